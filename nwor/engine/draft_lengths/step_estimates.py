"""What a step with each number of draft tokens would give, and what a token of it would cost.

With b requests, k drafts each, T(b, k) seconds a step and A(k) tokens a window, a token costs

    T(b, k) / (b A(k))  +  m D(b (k + 1)).

T was measured at start-up, and is corrected by the steps of late (step_times.py). Prompts have to be run
whatever k is, but a prompt's rows cost more beside more rows of windows: D(r) is what the prompts of late add
to a step of r rows, and m is how many steps with prompts there were for each token.

Where windows may be trees, more candidates have as many draft tokens as trees have nodes. The A of each is
estimated for itself, by depth. One that was not tried of late is taken for others of its size, and those for
smaller trees.

Where requests differ in how likely their drafts are accepted, A(k) is the geometric mean of theirs. Chains
are weighed with windows that fit each request as well (fitting.py): T is that of the rows that are verified
then, and of k passes of the drafter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import exp, inf, isfinite
from operator import mul

import numpy as np
import numpy.typing as npt

from nwor.config import DraftBounds
from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths import fitting
from nwor.engine.draft_lengths.acceptance import AcceptanceEstimate
from nwor.engine.draft_lengths.fitting import Plan
from nwor.engine.draft_lengths.request_acceptance import Floats
from nwor.engine.draft_lengths.step_times import StepTimes

#: What is assumed of a tree that was never tried: siblings are worth so many independent drafts.
#: The demo model's trees of 16 nodes, 8 deep, accept as this says.
SIBLINGS = 1.25
#: Steps with prompts that are remembered, and how many of them say what prompts add.
PROMPTS, SAMPLED = 64, 16
#: Steps over which steps with prompts and tokens are counted, as half-life.
MIX_HALF_LIFE = 512.0


class StepEstimates:
    """The estimates of one engine.

    Args:
        started: the bounds that the engine was started with.

    Attributes:
        trees: draft tokens of windows that are trees, ascending.
        depths: depth of each tree.
        sizes: nodes of each tree before it was made less deep.
        acceptance: of chains.
        tree_acceptance: of trees, by draft tokens.
        size_acceptance: of trees, by size.
        times: what steps take; None until costs are known.
        fits: whether windows that fit each request pay.

    """

    def __init__(self, started: DraftBounds) -> None:
        self._shape = shape = started.tree
        numbers = started.candidates
        self.trees = () if shape is None else tuple(k for k in numbers if shape.is_tree(k))
        self._chains = [k for k in numbers if k not in self.trees]
        depth = 0 if shape is None else shape.depth
        self.depths = {} if shape is None else {k: shape.depth_of(k) for k in self.trees}
        self.sizes = {} if shape is None else {k: shape.size_of(k) for k in self.trees}
        self.acceptance = AcceptanceEstimate(started.most)
        self.tree_acceptance = {k: AcceptanceEstimate(depth) for k in self.trees}
        self.size_acceptance = {size: AcceptanceEstimate(depth) for size in sorted({*self.sizes.values()})}
        self.times: StepTimes | None = None
        self.fits = False
        self._prompts: deque[int] = deque(maxlen=PROMPTS)
        self._mixed = self._seen = self._tokens = 0.0
        # Since the plans were made last, by rows.
        self._adds: dict[float, float] = {}

    def take_costs(self, costs: StepCosts) -> None:
        """Go by these costs from now on."""
        self.times = StepTimes(costs)

    @property
    def is_mostly_mixed(self) -> bool:
        """Whether most steps of late had prompts."""
        return self._mixed > 0.5 * self._seen

    def observe(self, drafts: int, accepted: npt.NDArray[np.integer]) -> None:
        """Take in a step's windows.

        Args:
            drafts: draft tokens of each.
            accepted: [windows], how many were accepted.

        """
        if drafts in self.trees:
            depth = self.depths[drafts]
            accepted = np.minimum(accepted, depth)
            self.tree_acceptance[drafts].add(depth, accepted)
            self.size_acceptance[self.sizes[drafts]].add(depth, accepted)
        else:
            self.acceptance.add(drafts, accepted)

    def observe_mix(self, prompt: int, tokens: float) -> None:
        """Take in a step's rows of prompts, and the tokens that it gave."""
        keep = 0.5 ** (1.0 / MIX_HALF_LIFE)
        self._mixed *= keep
        self._seen = self._seen * keep + 1.0
        self._tokens = self._tokens * keep + tokens
        if prompt:
            self._mixed += 1.0
            self._prompts.append(prompt)

    def age(self, steps: int) -> None:
        """Let what was observed count less after so many steps."""
        for seen in (self.acceptance, *self.tree_acceptance.values(), *self.size_acceptance.values()):
            seen.age(steps)

    def plans(
        self,
        requests: int,
        candidates: Sequence[int],
        survival: Floats | None = None,
        least_drafts: int = 0,
    ) -> dict[int, Plan]:
        """Return what a step with each candidate would be: windows that fit each request where that pays.

        Args:
            requests: of the step.
            candidates: numbers of draft tokens.
            survival: float64 [running requests, longest chain], the chance that all drafts up to each are
                accepted; None where requests do not differ.
            least_drafts: drafts that every request is to verify.

        """
        assert self.times is not None
        self._adds.clear()
        fits, self.fits = self.fits, False
        tokens, accepted = self.acceptance.tokens, self.tree_accepted()
        plans = {
            k: fitting.whole(requests, k, 1.0 + sum(accepted[k]) if k in self.trees else tokens[k])
            for k in candidates
        }
        chains = [k for k in candidates if k in self._chains and isfinite(self.times.step(requests, k))]
        if survival is None or not chains or not self.times.costs.pass_seconds:
            return plans
        share, gained = requests / len(survival), fitting.gains(survival)
        alike, fitted = {}, {}
        for k in chains:
            # Some requests may have asked for fewer.
            rows = len(gained) + np.count_nonzero(survival[:, :k])
            tokens_each = exp(float(gained[:, :k].sum()) / len(gained))
            alike[k] = Plan(share * rows, requests * tokens_each)
            plan = fitting.fitted(gained, k, self._costs_of(requests, k, share), least_drafts)
            fitted[k] = Plan(share * plan.rows, share * plan.tokens, plan.least)
        cheapest, own = (min(self.cost(requests, k, plan[k]) for k in chains) for plan in (alike, fitted))
        self.fits = own < (1.0 - (fitting.KEEP if fits else fitting.BEGIN)) * cheapest
        # Of trees the mean alone is known: it is taken to lie above the geometric one as that of chains does.
        above = (1.0 + float(survival[:, : chains[-1]].sum()) / len(survival)) * requests
        above /= alike[chains[-1]].tokens
        for k in self.trees:
            if k in plans:
                plans[k] = plans[k]._replace(tokens=max(plans[k].tokens / above, float(requests)))
        return plans | (fitted if self.fits else alike)

    def _costs_of(self, requests: int, drafts: int, share: float) -> Callable[[Floats, Floats], Floats]:
        """Return the cost of a token by rows and tokens of ``1 / share`` times as many requests."""
        assert self.times is not None
        whole, saved = self.times.step(requests, drafts), self.times.saved
        places = [requests * (k + 1.0) for k in self._chains]
        adds = [self._added(rows) for rows in places]

        def cost(rows: Floats, tokens: Floats) -> Floats:
            rows = share * rows
            seconds = whole - saved(requests, drafts, self._chains, rows)
            return seconds / (share * tokens) + np.interp(rows, places, adds)

        return cost

    def cost(self, requests: int, drafts: int, plan: Plan, hope: float = 1.0) -> float:
        """Return the seconds of a token, were a step's seconds ``hope`` times those that are known."""
        shape = self._shape
        if drafts in self.trees and shape is not None and requests > shape.most_requests(drafts):
            return inf  # there are no graphs of that
        return max(hope * self.seconds(requests, drafts, plan) / plan.tokens + self._added(plan.rows), 1e-9)

    def seconds(self, requests: int, drafts: int, plan: Plan) -> float:
        """Return the seconds of a step without prompts."""
        assert self.times is not None
        seconds = self.times.step(requests, drafts)
        if plan.rows < requests * (drafts + 1.0) - 0.5:
            seconds -= self.saved(requests, drafts, plan.rows)
        return seconds

    def saved(self, requests: int, drafts: int, rows: float) -> float:
        """Return what a step saves in which all windows together have ``rows``."""
        assert self.times is not None
        return float(self.times.saved(requests, drafts, self._chains, np.array(rows)))

    def _added(self, rows: float) -> float:
        """Return the seconds that prompts of late add to each token beside windows of so many rows."""
        if not self._prompts or not self._tokens:
            return 0.0
        added = self._adds.get(rows)
        if added is None:
            assert self.times is not None
            beside = self.times.beside
            adds = [beside(round(rows), prompt) for prompt in list(self._prompts)[:: PROMPTS // SAMPLED]]
            added = self._adds[rows] = self._mixed / self._tokens * sum(adds) / len(adds)
        return added

    def tree_accepted(self) -> dict[int, list[float]]:
        """Return for each candidate that is a tree the chance of each depth that a node of it is accepted."""
        chances = self._chances_by_size(1.0 - (1.0 - self.acceptance.chances[0]) ** SIBLINGS)
        found: dict[int, list[float]] = {}
        for drafts, seen in self.tree_acceptance.items():
            own = seen.chances_like(chances[self.sizes[drafts]])
            found[drafts] = list(accumulate(own[: self.depths[drafts]], mul))
        return found

    def _chances_by_size(self, first: float) -> dict[int, list[float]]:
        """Return the chances of trees by size, where ``first`` is assumed of the first draft of all."""
        found: dict[int, list[float]] = {}
        chances: list[float] = []
        for size, seen in self.size_acceptance.items():
            # What was not tried of late is taken for a smaller tree.
            chances = found[size] = seen.chances_like(chances) if chances else seen.chances_after(first)
        return found
