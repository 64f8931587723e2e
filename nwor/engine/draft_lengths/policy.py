"""How many draft tokens the next windows get: those with which a token costs least.

With b requests, k drafts each, T(b, k) seconds a step and A(k) tokens a window, a token costs

    (T(b, k) + e) / (b A(k))  +  m D(b (k + 1)).

T is what was measured at start-up; e is what steps took beyond it of late: contexts, the host. Prompts have
to be run whatever k is, but a prompt's rows cost more beside more rows of windows: D(r) is what the prompts
of late add to a step of r rows, and m is how many steps with prompts there were for each token.

Where windows may be trees, one more candidate has as many draft tokens as a tree has nodes. Its A is
estimated for itself, by depth.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from nwor.config import DraftBounds
from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths.acceptance import AcceptanceEstimate

#: Steps between two looks at the choice while the number of requests stays about the same.
LOOK_EVERY = 16
#: Relative change of the number of requests that calls for a look at once.
LOOK_CHANGE = 0.1
#: What another number must save, relative, to be chosen over the one in force.
HYSTERESIS = 0.015
#: One step of so many tries one more candidate than is chosen, so that its acceptance stays known.
PROBE_EVERY = 128
#: Windows that try it each time, over as many steps as that takes.
PROBE_WINDOWS = 8
#: What is assumed of a tree that was never tried: siblings are worth so many independent drafts.
#: The demo model's trees of 16 nodes, 8 deep, accept as this says.
SIBLINGS = 1.25
#: Weight of one step among what steps take beyond the measured costs.
EXTRA_WEIGHT = 0.05
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
        #: Draft tokens of a window that is a tree; None where all windows are chains.
        self.tree = None if started.tree is None else started.most
        self._depth = 0 if started.tree is None else started.tree.depth
        self.tree_acceptance = AcceptanceEstimate(self._depth)
        self.costs: StepCosts | None = None
        self.chosen = bounds.fixed
        self.why = "the costs of steps are not known yet"
        self._extra = 0.0
        self._prompts: deque[int] = deque(maxlen=PROMPTS)
        self._mixed = self._tokens = 0.0
        self._looked_at = 0
        self._until_look = self._until_probe = 0
        self._probing = self.chosen
        self._probes_tree = False
        self._steps = 0
        self._found: dict[int, float] = {}
        self.bind(bounds)

    def bind(self, bounds: DraftBounds) -> None:
        """Choose within other bounds from now on; at least one candidate of the start lies within them."""
        self.bounds = bounds
        self._candidates = [k for k in self._all if bounds.least <= k <= bounds.most]
        self._until_look = 0
        self._until_probe = PROBE_EVERY
        self._found = {}

    def nearest(self, drafts: int) -> int:
        """Return the candidate nearest to ``drafts``: graphs and costs are there for it."""
        return min(self._candidates, key=lambda known: abs(known - drafts))

    def take_costs(self, costs: StepCosts) -> None:
        """Choose by these costs from now on."""
        self.costs, self._until_look = costs, 0

    def choose(self, requests: int) -> int:
        """Return how many drafts the step under way makes for each request.

        Args:
            requests: of the step.

        """
        if self.costs is None:
            return self.chosen
        self._steps += 1
        self._until_look -= 1
        if self._until_look <= 0 or abs(requests - self._looked_at) > LOOK_CHANGE * self._looked_at:
            self._look(requests)
        self._until_probe -= 1
        if self._until_probe <= 0:
            if self._until_probe == 0:
                self._probing = self._probe(requests)
            # Few requests tell little in a step.
            if -self._until_probe * requests >= PROBE_WINDOWS - requests:
                self._until_probe = PROBE_EVERY
            return self._probing
        return self.chosen

    def _probe(self, requests: int) -> int:
        """Return the candidate to try: a longer chain and a tree in turns; the best chain where trees are."""
        chains = [k for k in self._candidates if k != self.tree]
        if self.chosen == self.tree:
            drafting = [k for k in chains if k] or chains
            return min(drafting, key=lambda k: self._found.get(k, 0.0), default=self.chosen)
        longer = next((k for k in chains if k > self.chosen), self.chosen)
        turn = longer == self.chosen or not self._probes_tree
        self._probes_tree = turn and self._tree_could_pay(requests)
        return self._candidates[-1] if self._probes_tree else longer

    def _tree_could_pay(self, requests: int) -> bool:
        """Return whether a tree would be chosen if all of its levels were accepted."""
        if self.tree is None or self.tree not in self._candidates or self.chosen not in self._found:
            return False
        best = self._cost(requests, self.tree, 1.0 + self._depth)
        return best < self._found[self.chosen]

    def _expected_tokens(self) -> dict[int, float]:
        """Return the tokens that a window gives on the average, by candidate."""
        tokens = self.acceptance.tokens
        found = {k: tokens[k] for k in self._candidates if k != self.tree}
        if self.tree in self._candidates:
            found[self.tree] = 1.0 + sum(self._tree_accepted())
        return found

    def _tree_accepted(self) -> list[float]:
        """Return the chance of each depth of a tree that a node of it is accepted."""
        chance = self.acceptance.chances[0]
        return self.tree_acceptance.accepted_after(1.0 - (1.0 - chance) ** SIBLINGS)

    def _look(self, requests: int) -> None:
        """Weigh all candidates for so many requests."""
        self._until_look, self._looked_at = LOOK_EVERY, requests
        steps, self._steps = self._steps, 0
        self.acceptance.age(steps)
        self.tree_acceptance.age(steps)
        found = {k: self._cost(requests, k, tokens) for k, tokens in self._expected_tokens().items()}
        best = min(found, key=found.__getitem__)
        now = found.get(self.chosen)
        if now is None or found[best] < (1.0 - HYSTERESIS) * now:
            self.chosen = best
        self._found = found
        rate, what = 1.0 / found[self.chosen], f"{self.chosen} draft tokens give"
        if self.chosen == self.tree:
            what = f"trees of {self.chosen} draft tokens give"
        self.why = f"{what} {rate:.0f} tokens/s with {requests} requests"

    def _cost(self, requests: int, drafts: int, tokens: float) -> float:
        """Return the seconds of a token."""
        assert self.costs is not None
        step = self.costs.step(requests, drafts)
        cost = max(step + self._extra, 0.2 * step) / (requests * tokens)
        if self._prompts and self._tokens:
            rows = requests * (drafts + 1)
            adds = [self.costs.beside(rows, prompt) for prompt in list(self._prompts)[:: PROMPTS // 16]]
            cost += self._mixed / self._tokens * sum(adds) / len(adds)
        return max(cost, 1e-9)

    def observe(self, drafts: int, accepted: npt.NDArray[np.integer]) -> None:
        """Take in a step's windows.

        Args:
            drafts: draft tokens of each.
            accepted: [windows], how many were accepted.

        """
        if drafts == self.tree:
            self.tree_acceptance.add(self._depth, np.minimum(accepted, self._depth))
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
        self._tokens = self._tokens * keep + tokens
        if prompt:
            self._mixed += 1.0
            self._prompts.append(prompt)
        elif seconds > 0 and self.costs is not None and requests and drafts in self.costs.drafts:
            expected = self.costs.step(requests, drafts)
            if isfinite(expected):
                beyond = min(seconds, 4.0 * expected) - expected
                self._extra += EXTRA_WEIGHT * (beyond - self._extra)

    def explain(self) -> dict[str, Any]:
        """Return what is chosen and why, as plain JSON values."""
        result: dict[str, Any] = {
            "bounds": str(self.bounds),
            "chosen": self.chosen,
            "requests": self._looked_at,
            "why": self.why,
            "acceptance": [round(value, 4) for value in self.acceptance.accepted],
            "tree_acceptance": [],
            "milliseconds": {},
            "tokens_per_second": {},
            "extra_milliseconds": round(1e3 * self._extra, 3),
        }
        if self.tree is not None:
            result["tree_acceptance"] = [round(value, 4) for value in self._tree_accepted()]
        if self.costs is not None and self._looked_at:
            for drafts, cost in self._found.items():
                if not isfinite(cost):
                    continue  # no step has room for that
                seconds = self.costs.step(self._looked_at, drafts) + self._extra
                result["milliseconds"][str(drafts)] = round(1e3 * seconds, 3)
                result["tokens_per_second"][str(drafts)] = round(1.0 / cost, 1)
        return result
