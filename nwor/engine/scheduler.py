"""vLLM's scheduler, gathering what the workers say of each window.

Reached through vLLM's own setting ``scheduler_cls``, which takes the import path of anything that is called
like the class. A step's record is added to its requests' figures before vLLM takes the step in, so that a
request's last output has them all; and it is compared with what vLLM counts in the same step.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus

from nwor.engine.figures import EngineFigures, EngineStats, RequestFigures
from nwor.engine.freed import FreedRequests, freed_by
from nwor.engine.lean_scheduling import LeanScheduling
from nwor.engine.record import announce, record_of
from nwor.tally import StepRecord, Tally, add_bytes

logger = logging.getLogger("vllm.nwor.scheduler")


class NworScheduling(Scheduler):
    """Mixin before a scheduler class of an engine that asked for NWOR."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._nwor_requests: dict[str, Tally] = {}
        self._nwor_new = EngineFigures()
        self._nwor_windows = 0
        self._nwor_accepted: int | None = None
        self._nwor_logged: set[str] = set()
        # Steps are numbered from 1, in the order in which they are made and their results come.
        self._nwor_made = 0
        self._nwor_heard_of = 0
        self._nwor_freed = FreedRequests()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Make the next step, and let the workers know which ones are under way."""
        output = super().schedule(*args, **kwargs)
        in_flight = self._nwor_made - self._nwor_heard_of
        self._nwor_made += 1
        announce(output, in_flight)
        self._nwor_freed.note(self._nwor_made, in_flight, freed_by(output))
        return output

    def add_request(self, request: Request) -> None:
        """Take in a request, its figures with room for the windows."""
        super().add_request(request)
        figures = request.spec_decode_metrics
        if figures is not None and not isinstance(figures, RequestFigures):
            request.spec_decode_metrics = RequestFigures(**vars(figures))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take in one step's results and return the outputs for each front end, as vLLM does."""
        record = record_of(model_runner_output)
        self._nwor_heard_of += 1
        # None: nothing to compare. make_stats, which vLLM calls at the end of the step, does it.
        self._nwor_accepted = 0
        if record is not None:
            self._nwor_accepted = self._nwor_counted_by_vllm(record, model_runner_output)
            self._nwor_take(record)
        try:
            answers: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._nwor_accepted = None
        return answers

    def _nwor_take(self, record: StepRecord) -> None:
        new = self._nwor_new
        new.mode, new.switches = record.mode, record.switches
        new.token_bytes, new.held_bytes = record.token_bytes, record.held_bytes
        new.commits += record.commits
        new.commit_seconds += record.commit_seconds
        for request_id, kind in record.windows.items():
            new.kinds[kind] = new.kinds.get(kind, 0) + 1
            extra: dict[str, int] | None = None
            if record.earlier is not None:
                extra = {}
                add_bytes(extra, record.earlier.copies(kind))
                if self._nwor_freed.since(self._nwor_heard_of, request_id):
                    add_bytes(extra, record.earlier.missing(kind))
                add_bytes(new.extra, extra)
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                new.late_windows += 1
                continue
            tally = self._nwor_requests.get(request_id)
            if tally is None:
                tally = self._nwor_requests[request_id] = Tally()
                figures = request.spec_decode_metrics
                if isinstance(figures, RequestFigures):
                    # Shared: the figures of the request's last output are then complete.
                    figures.nwor, figures.nwor_token_bytes = tally.kinds, record.token_bytes
                    figures.nwor_extra = tally.extra
            tally.add(kind)
            if extra is not None:
                add_bytes(tally.extra, extra)
        self._nwor_windows += len(record.windows)
        if self._nwor_windows != record.all_windows:
            self._nwor_mismatch(
                "windows",
                f"{self._nwor_windows} windows arrived of {record.all_windows} that the rank counted",
            )
            self._nwor_windows = record.all_windows

    def _nwor_counted_by_vllm(self, record: StepRecord, output: Any) -> int:
        """Return the record's accepted tokens of those requests whose results vLLM will take in."""
        accepted = 0
        for request_id, (_, _, _, tokens) in record.windows.items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            if request.num_stale_output_tokens > 0 and request.drop_stale_output:
                continue
            accepted += tokens
        return accepted

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Return the step's statistics with the figures since the last ones."""
        stats = super().make_stats(*args, **kwargs)
        if stats is None:
            return None
        if self._nwor_accepted is not None:
            speculation = stats.spec_decoding_stats
            theirs = speculation.num_accepted_tokens if speculation is not None else 0
            if theirs != self._nwor_accepted:
                self._nwor_mismatch(
                    "accepted_tokens",
                    f"the workers accepted {self._nwor_accepted} tokens, vLLM counted {theirs}",
                )
        if self._nwor_new == EngineFigures():
            return stats
        new, self._nwor_new = self._nwor_new, EngineFigures()
        return EngineStats(**{field.name: getattr(stats, field.name) for field in fields(stats)}, nwor=new)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        tally = self._nwor_requests.pop(request.request_id, None)
        if tally is not None:
            if request.status == RequestStatus.FINISHED_ABORTED:
                self._nwor_new.aborted_windows += tally.windows
            else:
                self._nwor_new.finished_windows += tally.windows
                self._nwor_compare(request, tally)
        return super()._free_request(request, *args, **kwargs)

    def _nwor_compare(self, request: Request, tally: Tally) -> None:
        """Compare the figures of a finished request with vLLM's own of the same request."""
        figures = request.spec_decode_metrics
        # Steps whose results vLLM threw away after a preemption are in ours alone.
        if figures is None or request.num_preemptions:
            return
        theirs = sum(accepted * steps for accepted, steps in enumerate(figures.histogram))
        ours = sum(accepted * windows for (_, _, _, accepted), windows in tally.kinds.items())
        if ours != theirs:
            self._nwor_mismatch(
                "request", f"a request's windows accepted {ours} tokens, vLLM counted {theirs} for it"
            )

    def _nwor_mismatch(self, what: str, detail: str) -> None:
        mismatches = self._nwor_new.mismatches
        mismatches[what] = mismatches.get(what, 0) + 1
        if what not in self._nwor_logged:
            self._nwor_logged.add(what)
            logger.error("NWOR's figures do not agree (%s): %s; further ones are only counted", what, detail)


class NworScheduler(NworScheduling, LeanScheduling):
    """For engines that wait for each step."""


class NworAsyncScheduler(NworScheduling, AsyncScheduler, LeanScheduling):
    """For engines that schedule a step ahead."""


def create_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """Return the scheduler that vLLM would choose, with the figures gathered.

    Args:
        args: what vLLM passes to its scheduler classes.
        kwargs: likewise; ``vllm_config`` decides between the two.

    """
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    chosen = NworAsyncScheduler if config.scheduler_config.async_scheduling else NworScheduler
    return chosen(*args, **kwargs)
