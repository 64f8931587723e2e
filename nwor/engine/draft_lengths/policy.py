"""How many draft tokens the next windows get: those with which a token costs least.

With b requests, k drafts each, T(b, k) seconds a step and A(k) tokens a window, a token costs

    T(b, k) / (b A(k))  +  m D(b (k + 1)).

T was measured at start-up, and is corrected by the steps of late (step_times.py). Prompts have to be run
whatever k is, but a prompt's rows cost more beside more rows of windows: D(r) is what the prompts of late add
to a step of r rows, and m is how many steps with prompts there were for each token.

Where windows may be trees, more candidates have as many draft tokens as trees have nodes. The A of each is
estimated for itself, by depth. One that was not tried of late is taken for others of its size, and those for
smaller trees.

Steps in turns try what is not chosen and might be better, so that A and T of it stay known.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from math import inf, isfinite
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from nwor.config import DraftBounds
from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths.acceptance import AcceptanceEstimate
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
#: What is assumed of a tree that was never tried: siblings are worth so many independent drafts.
#: The demo model's trees of 16 nodes, 8 deep, accept as this says.
SIBLINGS = 1.25
#: Steps with prompts that are remembered.
PROMPTS = 64
#: Steps over which steps with prompts and tokens are counted, as half-life.
MIX_HALF_LIFE = 512.0


class DraftLengthPolicy:
    """The choice for one engine.

    Args:
        bounds: between which numbers to choose.
        started: the bounds that the engine was started with: graphs and costs are those of their candidates.

    """

    def __init__(self, bounds: DraftBounds, started: DraftBounds | None = None) -> None:
        started = started or bounds
        self._all = started.candidates
        self.acceptance = AcceptanceEstimate(started.most)
        self._shape = shape = started.tree
        #: Draft tokens of windows that are trees, ascending.
        self.trees = () if shape is None else tuple(k for k in self._all if shape.is_tree(k))
        depth = 0 if shape is None else shape.depth
        self._depths = {} if shape is None else {k: shape.depth_of(k) for k in self.trees}
        self._sizes = {} if shape is None else {k: shape.size_of(k) for k in self.trees}
        self.tree_acceptance = {k: AcceptanceEstimate(depth) for k in self.trees}
        self._size_acceptance = {size: AcceptanceEstimate(depth) for size in sorted({*self._sizes.values()})}
        self.times: StepTimes | None = None
        self._groups: StepGroups | None = None
        self.chosen = bounds.fixed
        self.why = "the costs of steps are not known yet"
        self._prompts: deque[int] = deque(maxlen=PROMPTS)
        self._mixed = self._seen = self._tokens = 0.0
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
        self.bind(bounds)

    def bind(self, bounds: DraftBounds) -> None:
        """Choose within other bounds from now on; at least one candidate of the start lies within them."""
        self.bounds = bounds
        self._candidates = [k for k in self._all if bounds.least <= k <= bounds.most]
        self._until_look = 0
        self._until_probe = FIRST_PROBES_EVERY
        self._found = {}

    def nearest(self, drafts: int) -> int:
        """Return the candidate nearest to ``drafts``: graphs and costs are there for it."""
        return min(self._candidates, key=lambda known: abs(known - drafts))

    def take_costs(self, costs: StepCosts) -> None:
        """Choose by these costs from now on."""
        self.times, self._until_look = StepTimes(costs), 0
        self._groups = StepGroups(self.times)

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
        steps = PROBE_STEPS_MIXED if self._mixed > 0.5 * self._seen else PROBE_STEPS
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
        size = self._sizes[drafts]
        return any(self._is_tried_of_late(requests, k) for k in self.trees if self._sizes[k] == size)

    def _hope(self, requests: int, drafts: int) -> float:
        """Return how much shorter a candidate's steps may be than what is known of them says."""
        if self._is_untried(requests, drafts):
            return HOPE_UNTRIED
        if self._is_tried_of_late(requests, drafts):
            return HOPE_TRIED
        # A tree may be accepted to its end, whatever it was before: then its tokens are hoped for.
        hope = HOPE_FORGOTTEN if drafts not in self.trees or self._is_size_known(requests, drafts) else 1.0
        # What was seen may have been another program on the device, however much it was.
        assert self.times is not None
        return min(hope, self.times.without_own(requests, drafts) / self.times.step(requests, drafts))

    def _worth_trying(self, requests: int) -> list[int]:
        """Return which candidates to try now and then, though another is chosen."""
        if self.chosen not in self._found:
            return []
        assert self.times is not None
        now, tokens = self._found[self.chosen], self._expected_tokens()
        dear, times = DEAR * self.times.step(requests, self.chosen), self.times
        others = [
            k
            for k in self._candidates
            if k != self.chosen and min(times.step(requests, k), times.without_own(requests, k)) < dear
        ]
        chains = [k for k in others if k not in self.trees]
        # How far texts are accepted has to stay known: by a chain beside trees, else by a longer one.
        if self.chosen in self.trees:
            drafting = [k for k in chains if k] or chains
            worth = set(drafting and [min(drafting, key=lambda k: self._found.get(k, 0.0))])
        else:
            worth = set([k for k in chains if k > self.chosen][:1])
        for k in others:
            given = tokens[k]
            if k in self.trees and not self._is_size_known(requests, k):
                given = 1.0 + self._depths[k]
            if self._cost(requests, k, given, self._hope(requests, k)) < now:
                worth.add(k)
        return sorted(worth)

    def _expected_tokens(self) -> dict[int, float]:
        """Return the tokens that a window gives on the average, by candidate."""
        tokens = self.acceptance.tokens
        found = {k: tokens[k] for k in self._candidates if k not in self.trees}
        accepted = self._tree_accepted()
        return found | {k: 1.0 + sum(accepted[k]) for k in self.trees if k in self._candidates}

    def _tree_accepted(self) -> dict[int, list[float]]:
        """Return for each candidate that is a tree the chance of each depth that a node of it is accepted."""
        chances = self._chances_by_size(1.0 - (1.0 - self.acceptance.chances[0]) ** SIBLINGS)
        found: dict[int, list[float]] = {}
        for drafts, seen in self.tree_acceptance.items():
            own = seen.chances_like(chances[self._sizes[drafts]])
            found[drafts] = list(accumulate(own[: self._depths[drafts]], mul))
        return found

    def _chances_by_size(self, first: float) -> dict[int, list[float]]:
        """Return the chances of trees by size, where ``first`` is assumed of the first draft of all."""
        found: dict[int, list[float]] = {}
        chances: list[float] = []
        for size, seen in self._size_acceptance.items():
            # What was not tried of late is taken for a smaller tree.
            chances = found[size] = seen.chances_like(chances) if chances else seen.chances_after(first)
        return found

    def _look(self, requests: int) -> None:
        """Weigh all candidates for so many requests."""
        self._until_look, self._looked_at = LOOK_EVERY, requests
        steps, self._steps = self._steps, 0
        self.acceptance.age(steps)
        for seen in (*self.tree_acceptance.values(), *self._size_acceptance.values()):
            seen.age(steps)
        found = {k: self._cost(requests, k, tokens) for k, tokens in self._expected_tokens().items()}
        best = min(found, key=found.__getitem__)
        now = found.get(self.chosen)
        if now is None or found[best] < (1.0 - HYSTERESIS) * now:
            self.chosen = best
        self._found = found
        rate, what = 1.0 / found[self.chosen], f"{self.chosen} draft tokens give"
        if self.chosen in self.trees:
            what = f"trees of {self.chosen} draft tokens, {self._depths[self.chosen]} deep, give"
        self.why = f"{what} {rate:.0f} tokens/s with {requests} requests"

    def _cost(self, requests: int, drafts: int, tokens: float, hope: float = 1.0) -> float:
        """Return the seconds of a token, were a step's seconds ``hope`` times those that are known."""
        assert self.times is not None
        shape = self._shape
        if drafts in self.trees and shape is not None and requests > shape.most_requests(drafts):
            return inf  # there are no graphs of that
        cost = hope * self.times.step(requests, drafts) / (requests * tokens)
        if self._prompts and self._tokens:
            rows = requests * (drafts + 1)
            beside = self.times.beside
            adds = [beside(rows, prompt) for prompt in list(self._prompts)[:: PROMPTS // 16]]
            cost += self._mixed / self._tokens * sum(adds) / len(adds)
        return max(cost, 1e-9)

    def observe(self, drafts: int, accepted: npt.NDArray[np.integer]) -> None:
        """Take in a step's windows.

        Args:
            drafts: draft tokens of each.
            accepted: [windows], how many were accepted.

        """
        if drafts in self.trees:
            depth = self._depths[drafts]
            accepted = np.minimum(accepted, depth)
            self.tree_acceptance[drafts].add(depth, accepted)
            self._size_acceptance[self._sizes[drafts]].add(depth, accepted)
        else:
            self.acceptance.add(drafts, accepted)

    def observe_step(self, requests: int, drafts: int, prompt: int, tokens: float, seconds: float) -> None:
        """Take in how long a step took.

        Args:
            requests: that verified.
            drafts: of each, and as many were made for each.
            prompt: rows of prompts beside them.
            tokens: that the step gave.
            seconds: since the results of the step before; 0 where the engine was idle in between.

        """
        keep = 0.5 ** (1.0 / MIX_HALF_LIFE)
        self._mixed *= keep
        self._seen = self._seen * keep + 1.0
        self._tokens = self._tokens * keep + tokens
        if prompt:
            self._mixed += 1.0
            self._prompts.append(prompt)
        if self._groups is not None:
            self._groups.add(requests, drafts, prompt, seconds)

    def explain(self) -> dict[str, Any]:
        """Return what is chosen and why, as plain JSON values."""
        result: dict[str, Any] = {
            "bounds": str(self.bounds),
            "chosen": self.chosen,
            "requests": self._looked_at,
            "why": self.why,
            "acceptance": [round(value, 4) for value in self.acceptance.accepted],
            "tree_acceptance": {},
            "milliseconds": {},
            "tokens_per_second": {},
            "extra_milliseconds": 0.0,
            "corrections": {},
            "prompt_factor": 1.0,
        }
        for nodes, accepted in self._tree_accepted().items():
            result["tree_acceptance"][str(nodes)] = [round(value, 4) for value in accepted]
        if self.times is not None and self._looked_at:
            result["extra_milliseconds"] = round(1e3 * self.times.common(self._looked_at), 3)
            result["prompt_factor"] = round(self.times.prompts, 3)
            result["corrections"] = self.times.plain(self._looked_at)
            for drafts, cost in self._found.items():
                if not isfinite(cost):
                    continue  # no step has room for that
                seconds = self.times.step(self._looked_at, drafts)
                result["milliseconds"][str(drafts)] = round(1e3 * seconds, 3)
                result["tokens_per_second"][str(drafts)] = round(1.0 / cost, 1)
        return result
