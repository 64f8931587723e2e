"""How many draft tokens the next windows get: those with which a token costs least (step_estimates.py).

Steps in turns try what is not chosen and might be better, so that A and T of it stay known.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Protocol

from nwor.config import DraftBounds
from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths import fitting
from nwor.engine.draft_lengths.fitting import Plan
from nwor.engine.draft_lengths.request_acceptance import Floats
from nwor.engine.draft_lengths.step_estimates import StepEstimates
from nwor.engine.draft_lengths.step_groups import StepGroups
from nwor.engine.draft_lengths.step_times import StepTimes

#: Steps between two looks at the choice while the number of requests stays about the same.
LOOK_EVERY = 16
#: Relative change of the number of requests that calls for a look at once.
LOOK_CHANGE = 0.1
#: What another number must save, relative, to be chosen over the one in force.
HYSTERESIS = 0.015
#: After so many steps another candidate than the chosen one is tried.
PROBE_EVERY = 128
#: The same while there are some that were not tried with about as many requests, or whose cost is in doubt.
FIRST_PROBES_EVERY = 24
#: Times that a candidate is tried before its cost counts as known.
TRIES = 2
#: Windows, and steps, that try a candidate each time. The first and the last step do not show its cost.
PROBE_WINDOWS, PROBE_STEPS = 8, 3
#: The same steps where most have prompts: no step stands for itself then, and time moves at both ends.
PROBE_STEPS_MIXED = 6
#: A candidate is tried if it would be chosen were its steps so much shorter: not tried yet, tried of late,
#: and tried so many steps ago that what was seen then may be wrong now.
HOPE_UNTRIED, HOPE_TRIED, HOPE_FORGOTTEN = 0.3, 0.8, 0.4
FORGOTTEN = 2048
#: What takes so many times as long as the chosen candidate's step is too dear to try.
DEAR = 4.0
#: Fewest requests whose windows are fitted to them.
FEWEST_FITTED = 4


class Requests(Protocol):
    """The requests that run, one by one."""

    def survival(self) -> Floats | None:
        """Return float64 [requests, longest chain]: the chance that all drafts up to each are accepted.

        None where requests do not differ beyond chance.
        """

    def fit(self, least: float, drafts: int, least_drafts: int = 0) -> None:
        """Verify those drafts alone that are likely enough, until this is called again.

        Args:
            least: gain that a draft needs; 0 for all drafts.
            drafts: that are made for each.
            least_drafts: drafts that each verifies all the same.

        """

    def lengths(self) -> Mapping[int, int]:
        """Return how many requests are bounded to each number of drafts, by number."""


class DraftLengthPolicy:
    """The choice for one engine.

    Args:
        bounds: between which numbers to choose.
        started: the bounds that the engine was started with: graphs and costs are those of their candidates.
        requests: whose windows may be fitted to them; None where all are alike.

    """

    def __init__(
        self, bounds: DraftBounds, started: DraftBounds | None = None, requests: Requests | None = None
    ) -> None:
        started = started or bounds
        self._requests = requests
        self._all = started.candidates
        self.estimates = StepEstimates(started)
        self._groups: StepGroups | None = None
        self.chosen = bounds.fixed
        self.why = "the costs of steps are not known yet"
        self._looked_at = 0
        self._until_look = self._until_probe = 0
        self._probing = self.chosen
        self._probed_with = 0
        # By the place of the number of requests in the measurement, and candidate: times tried, last step.
        self._tries: dict[tuple[int, int], int] = {}
        self._tried_at: dict[tuple[int, int], int] = {}
        self._now = 0
        self._steps = 0
        self._found: dict[int, float] = {}
        self._plans: dict[int, Plan] = {}
        #: Gain that a draft needs for a row, where windows are fitted to requests; else 0.
        self.least = 0.0
        self.bind(bounds)

    def bind(self, bounds: DraftBounds) -> None:
        """Choose within other bounds from now on; at least one candidate of the start lies within them."""
        self.bounds = bounds
        self._candidates = [k for k in self._all if bounds.least <= k <= bounds.most]
        self._until_look = 0
        self._until_probe = FIRST_PROBES_EVERY
        self._found = {}

    @property
    def times(self) -> StepTimes | None:
        """What steps take; None until costs are known."""
        return self.estimates.times

    def nearest(self, drafts: int) -> int:
        """Return the candidate nearest to ``drafts``: graphs and costs are there for it."""
        return min(self._candidates, key=lambda known: abs(known - drafts))

    def take_costs(self, costs: StepCosts) -> None:
        """Choose by these costs from now on."""
        self.estimates.take_costs(costs)
        assert self.times is not None
        self._groups, self._until_look = StepGroups(self.times), 0

    def choose(self, requests: int) -> int:
        """Return how many drafts the step under way makes for each request.

        Args:
            requests: of the step.

        """
        if self.times is None:
            return self.chosen
        self._steps += 1
        self._now += 1
        self._until_look -= 1
        if self._until_look <= 0 or abs(requests - self._looked_at) > LOOK_CHANGE * self._looked_at:
            self._look(requests)
        self._until_probe -= 1
        if self._until_probe > 0:
            return self.chosen
        if self._until_probe == 0:
            self._probing, self._probed_with = self._probe(requests), requests
        elif abs(requests - self._probed_with) > LOOK_CHANGE * self._probed_with:
            # What was worth a try with so many requests may be far too dear now.
            self._until_probe = FIRST_PROBES_EVERY
            return self.chosen
        # Few requests tell little in a step.
        steps = PROBE_STEPS_MIXED if self.estimates.is_mostly_mixed else PROBE_STEPS
        if -self._until_probe + 1 >= max(steps, -(-PROBE_WINDOWS // requests)):
            untried = any(self._is_untried(requests, k) for k in self._worth_trying(requests))
            self._until_probe = FIRST_PROBES_EVERY if untried else PROBE_EVERY
        return self._probing

    def _probe(self, requests: int) -> int:
        """Return the candidate to try: of those worth it the one whose last turn is longest ago."""
        assert self.times is not None
        place = self.times.place(requests)
        worth = self._worth_trying(requests)
        if not worth:
            return self.chosen
        probed = min(worth, key=lambda k: (self._tried_at.get((place, k), -1), self._found.get(k, 0.0)))
        self._tried_at[place, probed] = self._now
        self._tries[place, probed] = self._tries.get((place, probed), 0) + 1
        return probed

    def _is_untried(self, requests: int, drafts: int) -> bool:
        """Return whether a candidate was hardly tried, or took another time than expected when it was."""
        assert self.times is not None
        return self._is_hardly_tried(requests, drafts) or self.times.is_in_doubt(requests, drafts)

    def _is_hardly_tried(self, requests: int, drafts: int) -> bool:
        assert self.times is not None
        return self._tries.get((self.times.place(requests), drafts), 0) < TRIES

    def _is_tried_of_late(self, requests: int, drafts: int) -> bool:
        assert self.times is not None
        since = self._now - self._tried_at.get((self.times.place(requests), drafts), -FORGOTTEN - 1)
        return since <= FORGOTTEN and not self._is_hardly_tried(requests, drafts)

    def _is_size_known(self, requests: int, drafts: int) -> bool:
        """Return whether a tree of this size was tried of late, however deep it was."""
        sizes = self.estimates.sizes
        return any(self._is_tried_of_late(requests, k) for k in sizes if sizes[k] == sizes[drafts])

    def _hope(self, requests: int, drafts: int) -> float:
        """Return how much shorter a candidate's steps may be than what is known of them says."""
        if self._is_untried(requests, drafts):
            return HOPE_UNTRIED
        if self._is_tried_of_late(requests, drafts):
            return HOPE_TRIED
        # A tree may be accepted to its end, whatever it was before: then its tokens are hoped for.
        hope = (
            HOPE_FORGOTTEN
            if drafts not in self.estimates.trees or self._is_size_known(requests, drafts)
            else 1.0
        )
        # What was seen may have been another program on the device, however much it was.
        assert self.times is not None
        return min(hope, self.times.without_own(requests, drafts) / self.times.step(requests, drafts))

    def _worth_trying(self, requests: int) -> list[int]:
        """Return which candidates to try now and then, though another is chosen."""
        if self.chosen not in self._found:
            return []
        assert self.times is not None
        now = self._found[self.chosen]
        dear, times = DEAR * self.times.step(requests, self.chosen), self.times
        trees = self.estimates.trees
        others = [
            k
            for k in self._candidates
            if k != self.chosen and min(times.step(requests, k), times.without_own(requests, k)) < dear
        ]
        chains = [k for k in others if k not in trees]
        # How far texts are accepted has to stay known: by a chain beside trees, else by a longer one.
        if self.chosen in trees:
            drafting = [k for k in chains if k] or chains
            worth = set(drafting and [min(drafting, key=lambda k: self._found.get(k, 0.0))])
        else:
            worth = set([k for k in chains if k > self.chosen][:1])
        for k in others:
            plan = self._plans[k]
            if k in trees and not self._is_size_known(requests, k):
                plan = fitting.whole(requests, k, 1.0 + self.estimates.depths[k])
            if self.estimates.cost(requests, k, plan, self._hope(requests, k)) < now:
                worth.add(k)
        return sorted(worth)

    def _look(self, requests: int) -> None:
        """Weigh all candidates for so many requests."""
        self._until_look, self._looked_at = LOOK_EVERY, requests
        steps, self._steps = self._steps, 0
        self.estimates.age(steps)
        survival = None
        if self._requests is not None and requests >= FEWEST_FITTED:
            survival = self._requests.survival()
        self._plans = self.estimates.plans(requests, self._candidates, survival, self.bounds.least)
        found = {k: self.estimates.cost(requests, k, plan) for k, plan in self._plans.items()}
        best = min(found, key=found.__getitem__)
        now = found.get(self.chosen)
        if now is None or found[best] < (1.0 - HYSTERESIS) * now:
            self.chosen = best
        self._found = found
        self._fit(self._plans[self.chosen].least)
        rate, what = 1.0 / found[self.chosen], f"{self.chosen} draft tokens give"
        if self.chosen in self.estimates.trees:
            what = f"trees of {self.chosen} draft tokens, {self.estimates.depths[self.chosen]} deep, give"
        self.why = f"{what} {rate:.0f} tokens/s with {requests} requests"
        if self.least:
            self.why += f", each draft that adds {self.least:.0%} to its request's window or more"

    def _fit(self, least: float) -> None:
        """Have windows fitted to requests from now on, or no longer where ``least`` is 0."""
        if self._requests is not None and (least or self.least):
            self._requests.fit(least, self.chosen, self.bounds.least)
        self.least = least

    def unfit(self) -> None:
        """Have all drafts verified: they are not chosen for now."""
        self.estimates.fits = False
        self._fit(0.0)

    def observe_step(
        self, requests: int, drafts: int, prompt: int, tokens: float, seconds: float, spared: int = 0
    ) -> None:
        """Take in how long a step took.

        Args:
            requests: that verified.
            drafts: of each, and as many were made for each.
            prompt: rows of prompts beside them.
            tokens: that the step gave.
            seconds: since the results of the step before; 0 where the engine was idle in between.
            spared: drafts that were not verified.

        """
        self.estimates.observe_mix(prompt, tokens)
        if self._groups is None or self.times is None:
            return
        rows = requests * (drafts + 1.0) - spared
        if spared and seconds and self.times.knows(drafts):
            # What it would have taken with all drafts: one finding for steps of one number, fitted or not.
            seconds += self.estimates.saved(requests, drafts, rows)
        self._groups.add(requests, drafts, prompt, seconds, rows)

    def explain(self) -> dict[str, Any]:
        """Return what is chosen and why, as plain JSON values."""
        result: dict[str, Any] = {
            "bounds": str(self.bounds),
            "chosen": self.chosen,
            "requests": self._looked_at,
            "why": self.why,
            "acceptance": [round(value, 4) for value in self.estimates.acceptance.accepted],
            "tree_acceptance": {},
            "milliseconds": {},
            "tokens_per_second": {},
            "extra_milliseconds": 0.0,
            "corrections": {},
            "prompt_factor": 1.0,
            "least_gain": round(self.least, 4),
            "bounded_requests": {},
        }
        if self.least and self._requests is not None:
            result["bounded_requests"] = {
                str(drafts): count for drafts, count in sorted(self._requests.lengths().items())
            }
        for nodes, accepted in self.estimates.tree_accepted().items():
            result["tree_acceptance"][str(nodes)] = [round(value, 4) for value in accepted]
        if self.times is not None and self._looked_at:
            result["extra_milliseconds"] = round(1e3 * self.times.common(self._looked_at), 3)
            result["prompt_factor"] = round(self.times.prompts, 3)
            result["corrections"] = self.times.plain(self._looked_at)
            for drafts, cost in self._found.items():
                if not isfinite(cost):
                    continue  # no step has room for that
                seconds = self.estimates.seconds(self._looked_at, drafts, self._plans[drafts])
                result["milliseconds"][str(drafts)] = round(1e3 * seconds, 3)
                result["tokens_per_second"][str(drafts)] = round(1.0 / cost, 1)
        return result
