"""The scheduler's side: vLLM asks for a number of drafts each step, NWOR answers, and sees what comes of it.

vLLM's scheduler holds a list of draft tokens by the number of requests (``dynamic_sd_lookup``) and reads it
in each step. Here an object stands in its place that chooses.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from nwor.config import DraftBounds
from nwor.counts.records import StepRecord, Treatment, WorkerFacts
from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths.policy import DraftLengthPolicy, Requests
from nwor.modes import Mode
from nwor.tree_shape import schedule

#: Steps whose windows may wait to be taken in.
MOST_WAITING = 16
#: A step shows what so many drafts of each request cost if at least this share of them was verified. Where
#: windows are fitted to requests, chains show it by their rows.
MOST_MADE = 0.75
_INT32 = np.dtype(np.int32)


def _attended(treatment: Treatment) -> bool:
    """Return whether windows that are trees were attended as such."""
    return treatment.mode == Mode.STAGE and not treatment.inside and not treatment.outside


class DraftLengths:
    """Stands where vLLM keeps its draft tokens by number of requests.

    Args:
        started: the bounds that the engine was started with.
        trees_required: somebody asked for trees, so few requests have them where costs are not known.
        requests: whose windows may be fitted to them; None where all of a step have as many draft tokens.

    Attributes:
        policy: the choice.
        steps: steps by the number of drafts that they made, since they were last drained.

    """

    def __init__(
        self, started: DraftBounds, trees_required: bool = True, requests: Requests | None = None
    ) -> None:
        self.policy = DraftLengthPolicy(started, requests=requests)
        self._fits = requests is not None
        self.steps: Counter[int] = Counter()
        self._started = started
        self._longest_chain = started.most if started.tree is None else started.tree.depth
        self._tree = started.tree
        self._fixed: int | None = started.fixed
        #: Trees for few requests and chains for more, where costs are not known.
        self._schedule = []
        if started.tree is not None and trees_required:
            self._schedule = schedule(started.tree, None, 1 << 30)
        self._by_requests = False
        self._why = "no step has been verified yet"
        self._facts: WorkerFacts | None = None
        # Records, each with the number of draft tokens that the step before made.
        self._waiting: list[tuple[StepRecord, int]] = []
        self._made = 0
        self._choices = self._choices_by_number()
        self._last = 0.0
        self._none_since: float | None = None

    def __getitem__(self, requests: int) -> int:
        """Return the draft tokens that a step of so many requests makes for each of them."""
        if self._by_requests:
            chosen = next(drafts for _, last, drafts in self._schedule if requests <= last)
            chosen = self.policy.nearest(chosen)
        else:
            chosen = self.policy.choose(requests) if self._fixed is None else self._fixed
        tree = self._tree
        if tree is not None and tree.is_tree(chosen) and requests > tree.most_requests(chosen):
            chosen = tree.depth  # the number is fixed, or within bounds of trees alone
        self.steps[chosen] += 1
        # A step that tries whether drafts would be accepted again ends nothing.
        if self._by_requests or (self.policy.chosen if self._fixed is None else self._fixed):
            self._none_since = None
        elif self._none_since is None:
            self._none_since = time.monotonic()
        return chosen

    def take_costs(self, costs: StepCosts | None) -> None:
        """Take in what the worker measured when the engine started."""
        if costs is not None:
            self.policy.take_costs(costs)
            self._facts = None

    def follow(self, facts: WorkerFacts) -> None:
        """Do as the workers were told."""
        if facts is not self._facts:
            self._follow(facts)

    def observe(self, record: StepRecord) -> None:
        """Take in a verify step's record."""
        self.follow(record.facts)
        self._waiting.append((record, self._made))
        if len(self._waiting) >= MOST_WAITING:
            self._take_waiting()

    def _follow(self, facts: WorkerFacts) -> None:
        """Do as the workers were told: choose within bounds, or keep to a number."""
        self._facts = facts
        wanted = facts.draft_tokens
        self._by_requests = False
        if wanted.isdecimal():
            self._fixed, self._why = int(wanted), f"fixed at {wanted} by request"
            self.policy.unfit()
            return
        bounds = DraftBounds.parse(wanted) if wanted else self._started
        if bounds != self.policy.bounds:
            self.policy.bind(bounds)
        self._fixed = self.policy.nearest(bounds.fixed)
        if facts.mode != Mode.STAGE:
            self._why = f"the mode is {facts.mode}: numbers are chosen in stage alone"
        elif self.policy.times is None:
            self._why = "the costs of steps were not measured"
            if self._schedule and bounds == self._started:
                self._by_requests = True
                self._why = "trees for few requests and chains for more, since costs were not measured"
        else:
            self._fixed = None
        if self._fixed is not None:
            self.policy.unfit()

    def _take_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        by_drafts: dict[int, list[Any]] = {}
        for record, made in waiting:
            drafts = np.frombuffer(record.treatment.drafts, _INT32)
            accepted = np.maximum(np.frombuffer(record.sampled, _INT32), 1) - 1
            if self.policy.estimates.trees:
                # What is longer than chains is a tree or its first rows, and so is all beside it.
                trees = drafts > self._longest_chain
                if trees.any():
                    if not _attended(record.treatment):
                        continue
                    choices = self._choices.get(made, self._choices[0])
                    drafts, accepted = choices[drafts[trees]], accepted[trees]
            first = int(drafts[0])
            if (drafts == first).all():
                by_drafts.setdefault(first, []).append(accepted)
                continue
            for count in np.unique(drafts).tolist():
                by_drafts.setdefault(count, []).append(accepted[drafts == count])
        for count, parts in by_drafts.items():
            if count:
                self.policy.estimates.observe(count, np.minimum(np.concatenate(parts), count))

    def _choices_by_number(self) -> dict[int, npt.NDArray[np.int32]]:
        """Return int32 [nodes + 1] for each number that makes trees: the candidate of a window by its drafts.

        All trees of a step are equally deep. A bound or a budget may leave a part of one: it counts as the
        candidate of as many nodes or more. Under 0 stands what is taken where the number is not known.
        """
        tree, trees = self._tree, self.policy.estimates.trees
        if tree is None:
            return {}
        sizes = sorted({tree.size_of(count) for count in trees})
        found = {}
        for made in (0, *trees):
            depth = tree.depth_of(made) if made else tree.depth
            as_deep = {tree.size_of(count): count for count in trees if tree.depth_of(count) == depth}
            by_drafts = (next(size for size in sizes if drafts <= size) for drafts in range(tree.nodes + 1))
            found[made] = np.array([as_deep.get(size, made or size) for size in by_drafts], _INT32)
        return found

    def observe_step(self, scheduled: Any, tokens: int, busy: bool) -> None:
        """Take in that a step's results have come.

        Args:
            scheduled: vLLM's ``SchedulerOutput`` of the step.
            tokens: that it gave.
            busy: whether another step was under way or could be made when the results before had come.

        """
        now = time.perf_counter()
        seconds, self._last = (now - self._last if busy else 0.0), now
        drafts = scheduled.scheduled_spec_decode_tokens
        requests = len(scheduled.num_scheduled_tokens)
        before, made = self._made, scheduled.num_spec_tokens_to_schedule
        self._made = made
        longest = max(map(len, drafts.values()), default=0)
        rows = scheduled.total_num_scheduled_tokens
        verified = sum(map(len, drafts.values()))
        prompt = rows - requests - verified
        spared = 0
        if not self._fits or made in self.policy.estimates.trees:
            known = longest == made and verified >= MOST_MADE * made * len(drafts)
        else:
            # Windows may be fitted to requests. Others decode without drafts, or are prompts.
            known, spared = made == before and longest <= made, made * requests - verified
        if not known:  # the number has just changed, or windows of requests are bounded
            made, seconds, spared = longest, 0.0, 0
        self.policy.observe_step(requests, made, prompt, tokens, seconds, spared)

    def drain(self) -> dict[int, int]:
        """Return the steps by draft tokens since this was last called."""
        steps, self.steps = dict(self.steps), Counter()
        return steps

    def explain(self) -> dict[str, Any]:
        """Return what is chosen and why, as plain JSON values."""
        result = self.policy.explain()
        if self._fixed is not None:
            result |= {"chosen": self._fixed, "why": self._why}
        idle = 0.0 if self._none_since is None else time.monotonic() - self._none_since
        return {"auto": self._fixed is None, **result, "seconds_without_drafts": round(idle, 3)}
