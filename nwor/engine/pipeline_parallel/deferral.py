"""Windows of a pipeline stage that does not sample: it learns what was accepted some steps later.

The first token of each window, and every row that is no draft, is committed right after the forward pass.
The drafts wait for the counts. They are committed

- before the forward pass of the step in which vLLM takes the counts in, which is the earliest that schedules
  the same request again;
- earlier where the scheduler has heard of the step's results: from then on the accepted tokens may stand in
  blocks of the prefix cache, which other requests read;
- never where the request was freed before that: its blocks may have other owners, and nobody reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch

from nwor.engine.step_plan import StepPlan, draft_rows, only
from nwor.modes import Mode
from nwor.self_check import SelfCheck
from nwor.windows.window import HeldBatch, Window
from nwor.worker_state import WorkerState

#: Returns int32 [at least num_requests] on the device, the draft tokens rejected in each window of a step;
#: what is launched afterwards waits for them.
RejectedCounts = Callable[[], torch.Tensor]


@dataclass
class Deferred:
    """The drafts of one step's windows.

    Attributes:
        step: number of the step.
        plan: how its requests were treated.
        held: the batch; only rows of drafts have slots.
        check: the step's check of the cache; None on most steps.
        rejected: how to come by the counts; None until they are on their way.
        cut_short: requests that were freed while the step was under way.

    """

    step: int
    plan: StepPlan
    held: HeldBatch
    check: SelfCheck | None
    rejected: RejectedCounts | None = None
    cut_short: set[str] = field(default_factory=set)


class Deferral:
    """The windows of this rank that wait for their counts.

    Args:
        window: the rank's window.
        state: the rank's state.
        delay: steps after which vLLM takes a step's counts in.

    """

    def __init__(self, window: Window, state: WorkerState, delay: int) -> None:
        self._window = window
        self._state = state
        self._delay = delay
        self._step = 0
        self._pending: deque[Deferred] = deque()

    @property
    def pending(self) -> Sequence[Deferred]:
        """Steps whose drafts were not committed yet, the oldest first."""
        return tuple(self._pending)

    def next_step(self, in_flight: int, freed: AbstractSet[str]) -> None:
        """Commit what this step's forward pass has to find in the cache.

        Args:
            in_flight: steps right before this one whose results the scheduler had not heard of.
            freed: requests whose blocks may have other owners from this step on.

        """
        self._step += 1
        kept: deque[Deferred] = deque()
        for entry in self._pending:
            heard_of = entry.step < self._step - in_flight
            if not heard_of:
                entry.cut_short.update(freed & set(entry.plan.request_ids))
            if heard_of or entry.step + self._delay <= self._step:
                self._finish(entry)
            else:
                kept.append(entry)
        self._pending = kept

    def hold(self, plan: StepPlan, check: SelfCheck | None, *, copy: bool) -> None:
        """Take over the open batch once the forward pass has run, and commit all that is no draft.

        Args:
            plan: the step's plan.
            check: the step's check of the cache, if there is one.
            copy: whether the next step overwrites the keys and values.

        """
        held = self._window.release(copy=copy)
        try:
            entry = self._deferred(plan, held, check)
        except Exception:
            self._window.write_all(held)
            raise
        self._pending.append(entry)

    def _deferred(self, plan: StepPlan, held: HeldBatch, check: SelfCheck | None) -> Deferred:
        batch = held.batch
        draft = draft_rows(plan, batch.query_start_loc.device)
        if plan.mode is Mode.STAGE and batch.early is None:
            none = torch.zeros(batch.num_requests, dtype=torch.int32, device=batch.query_start_loc.device)
            self._window.finish(held.with_slots(only(~draft, batch.slots)), none)
        held = held.with_slots(only(draft, batch.slots))
        if check is not None:
            check.follow(held.batch)
        return Deferred(self._step, plan, held, check)

    def expect(self, rejected: RejectedCounts | None) -> None:
        """Note how to come by the counts of the step that has just been held, if one has.

        Args:
            rejected: None where vLLM does not send any, although requests verified.

        """
        if not self._pending or self._pending[-1].step != self._step:
            return
        entry = self._pending[-1]
        entry.rejected = rejected
        if rejected is None:
            self._pending.pop()
            self._fail(entry, RuntimeError("the last pipeline stage sends no counts for a verify step"))

    def _finish(self, entry: Deferred) -> None:
        plan, held = entry.plan, entry.held
        requests = plan.request_ids[: plan.num_requests]
        if entry.cut_short:
            alive = [request not in entry.cut_short for request in requests]
            if not any(alive):
                return
            self._forget(held, alive, plan.query_lens)
        try:
            if entry.rejected is None:
                raise RuntimeError("a step's counts were asked for before they were sent")
            rejected = entry.rejected().to(torch.int32)
            self._window.finish(held, rejected)
        except Exception as error:
            self._fail(entry, error)
            return
        if entry.check is not None:
            entry.check.follow(held.batch)
            entry.check.report(self._state, held.sources, rejected)

    @staticmethod
    def _forget(held: HeldBatch, alive: Sequence[bool], query_lens: Sequence[int]) -> None:
        """Take the slots of requests that were freed out of a batch, in place.

        The slots are the batch's own since its drafts were told from the rest. Nothing is allocated or sent:
        should anything else go wrong, what is then written directly has to leave these slots alone as well.
        """
        begin = 0
        with torch.inference_mode():  # as they may have been made
            for kept, count in zip(alive, query_lens, strict=True):
                if not kept:
                    for slots in held.batch.slots.values():
                        slots[begin : begin + count].fill_(-1)
                begin += count

    def _fail(self, entry: Deferred, error: Exception) -> None:
        self._state.fail("deferred commit", error)
        self._window.write_all(entry.held)
