"""vLLM's scheduler, gathering what the workers say of each window.

Reached through vLLM's own setting ``scheduler_cls``, which takes the import path of anything that is called
like the class. A step's record is only kept when the step comes. Records are counted, many at once, before a
request ends, so that its last output has all its figures, and before statistics with figures are sent: at
    most every
:data:`EVERY` seconds while nothing else happens. Each step is compared with what vLLM counted in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus

from nwor.config import DraftBounds, NworConfig
from nwor.counts.histogram import layout_of
from nwor.counts.records import StepRecord, WindowKind, WorkerFacts, add_bytes
from nwor.counts.window_table import WindowTable
from nwor.engine.draft_lengths.lookup import DraftLengths
from nwor.engine.draft_lengths.request_bounds import BoundedDrafts
from nwor.engine.fastpath.scheduler import FastScheduling
from nwor.engine.pipeline_parallel.freed import FreedRequests, freed_by
from nwor.engine.request_isolation.common import StepFailures
from nwor.engine.request_isolation.request_failures import RequestFailures
from nwor.engine.stats.figures import EngineFigures, EngineStats, RequestFigures
from nwor.engine.stats.step_messages import announce, announce_fast_paths, costs_of, facts_of, record_of
from nwor.engine.workarounds.seeded_starts import drop_placeholders
from nwor.errors import ConfigError
from nwor.modes import Mode

logger = logging.getLogger("vllm.nwor.scheduler")

#: Seconds for which figures may wait to be sent.
EVERY = 0.2
#: Steps whose records may wait to be counted.
MOST_WAITING = 256

#: A step's record, and those of its requests whose results vLLM throws away.
_Waiting = tuple[StepRecord, frozenset[str]]
_NONE: frozenset[str] = frozenset()


class NworScheduling(BoundedDrafts, RequestFailures):
    """Mixin before a scheduler class of an engine that asked for NWOR."""

    dynamic_sd_lookup: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._nwor_table = WindowTable()
        self._nwor_waiting: list[_Waiting] = []
        self._nwor_new = EngineFigures()
        self._nwor_latest: StepRecord | None = None
        self._nwor_facts: WorkerFacts | None = None
        self._nwor_due = True
        self._nwor_next = 0.0
        self._nwor_windows = 0
        # Accepted tokens by step, as the workers and as vLLM counted them; and what the step under way is.
        self._nwor_ours: list[int] = []
        self._nwor_theirs: list[int] = []
        self._nwor_verified: bool | None = None
        self._nwor_stale: set[str] = set()
        self._nwor_partial: set[str] = set()
        self._nwor_ending: Request | None = None
        self._nwor_logged: set[str] = set()
        # Requests with chains beside trees that are counted already, by reason.
        self._nwor_chains: dict[str, int] = {}
        self._nwor_introduced = False
        # With pipeline stages. Steps are numbered from 1, in the order in which they are made and their
        # results come.
        self._nwor_stages = self.vllm_config.parallel_config.pipeline_parallel_size > 1
        self._nwor_made = 0
        self._nwor_heard_of = 0
        self._nwor_freed = FreedRequests()
        self._nwor_extra: dict[str, dict[str, int]] = {}
        config = NworConfig.from_additional_config(self.vllm_config.additional_config)
        if config is not None and config.tree is not None:
            # The drafter writes ahead at most what its passes add; nodes of a tree have no slots there.
            ahead = self.vllm_config.num_lookahead_tokens
            self.num_lookahead_tokens = min(ahead, config.tree.depth)
        # Whether another step was under way when the results before came.
        self._nwor_busy = False
        self._nwor_lengths: DraftLengths | None = None
        if config is not None and config.draft_tokens is not None:
            self._nwor_check_bounds(config.draft_tokens)
            self.dynamic_sd_lookup = self._nwor_lengths = DraftLengths(
                config.draft_tokens, config.tree_required, self._nwor_bounds if config.fit_windows else None
            )

    def _nwor_check_bounds(self, bounds: DraftBounds) -> None:
        """Check that vLLM's own settings leave room for the bounds.

        Raises:
            ConfigError: if they do not.

        """
        if self.num_spec_tokens < bounds.most:
            raise ConfigError(
                f"draft_tokens {bounds} needs at least {bounds.most} num_speculative_tokens in vLLM's "
                f"speculative config, not {self.num_spec_tokens}"
            )
        if self.dynamic_sd_lookup is None:
            schedule = [list(entry) for entry in bounds.schedule]
            raise ConfigError(
                f"draft_tokens {bounds} needs num_speculative_tokens_per_batch_size {schedule} in vLLM's "
                "speculative config, and no data parallelism"
            )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Make the next step; with pipeline stages, let the workers know which ones are under way."""
        output = super().schedule(*args, **kwargs)
        if not self._nwor_introduced:
            self._nwor_introduced = True
            announce_fast_paths(output, getattr(self, "fast_paths", {}))
        if self._nwor_stages:
            in_flight = self._nwor_made - self._nwor_heard_of
            self._nwor_made += 1
            announce(output, in_flight)
            self._nwor_freed.note(self._nwor_made, in_flight, freed_by(output))
        return output

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        drop_placeholders(scheduler_output, self.requests)
        super()._update_after_schedule(scheduler_output)

    def add_request(self, request: Request) -> None:
        """Take in a request, its figures with room for the windows."""
        super().add_request(request)
        self._nwor_table.forget_requests()
        figures = request.spec_decode_metrics
        if figures is not None and not isinstance(figures, RequestFigures):
            request.spec_decode_metrics = RequestFigures(**vars(figures))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take in one step's results and return the outputs for each front end, as vLLM does."""
        record = record_of(model_runner_output)
        # make_stats, which vLLM calls at the end of the step, compares.
        self._nwor_verified = record is not None
        if self._nwor_stages:
            self._nwor_heard_of += 1
        if record is not None:
            self._nwor_take(record)
        try:
            answers: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._nwor_verified = None
        if self._nwor_lengths is not None:
            self._nwor_watch(self._nwor_lengths, record, scheduler_output, model_runner_output)
        return answers

    def _nwor_watch(
        self, lengths: DraftLengths, record: StepRecord | None, scheduled: Any, result: Any
    ) -> None:
        """Let the choice of draft tokens see what came of a step."""
        if not scheduled.total_num_scheduled_tokens:
            return
        lengths.take_costs(costs_of(result))
        facts = facts_of(result)
        if facts is not None:
            lengths.follow(facts)
        tokens = len(scheduled.num_scheduled_tokens)
        if record is not None:
            lengths.observe(record)
            tokens = sum(memoryview(record.sampled).cast("i"))
        lengths.observe_step(scheduled, tokens, self._nwor_busy)
        self._nwor_busy = bool(self.running)

    def failures_counted(self, failures: StepFailures, counted: bool) -> None:
        """Count what failed in a step."""
        self._nwor_due = True
        for place, times in failures.events.items():
            self._nwor_new.failures[place] = self._nwor_new.failures.get(place, 0) + times
        for place, _ in failures.requests.values():
            self._nwor_new.failed_requests[place] = self._nwor_new.failed_requests.get(place, 0) + 1
        if self._nwor_verified and failures.requests and not counted:
            # vLLM gets none of what they sampled in this step, whose record is the last that waits.
            record, thrown_away = self._nwor_waiting[-1]
            self._nwor_waiting[-1] = record, thrown_away | failures.requests.keys()
            self._nwor_partial.update(record.windows.keys() & failures.requests.keys())

    def _nwor_take(self, record: StepRecord) -> None:
        """Keep a step's record until somebody asks; what is true of its requests only now is noted."""
        if len(self._nwor_waiting) >= MOST_WAITING:
            self._nwor_fold()
        self._nwor_waiting.append((record, self._nwor_thrown_away(record) if self._nwor_stale else _NONE))
        self._nwor_latest = record
        if record.facts is not self._nwor_facts:
            self._nwor_due = self._nwor_due or record.facts != self._nwor_facts
            self._nwor_facts = record.facts
            if record.facts.chain_requests:
                self._nwor_take_chains(record.facts.chain_requests)
            # Graphs for requests without drafts among windows are those of `stage`.
            self._nwor_bounds.watch = (
                self._nwor_watches
                and record.facts.mode == Mode.STAGE
                and not record.facts.draft_tokens.isdecimal()
            )
        if record.facts.earlier is not None or record.treatment.copied_bytes:
            self._nwor_take_extra(record)

    def _nwor_take_chains(self, counted: Sequence[tuple[str, int]]) -> None:
        """Count the requests with chains beside trees since the rank told of them last."""
        known, new = self._nwor_chains, self._nwor_new.chain_requests
        for reason, requests in counted:
            if more := requests - known.get(reason, 0):
                new[reason] = new.get(reason, 0) + more
                known[reason] = requests

    def _nwor_thrown_away(self, record: StepRecord) -> frozenset[str]:
        thrown_away = []
        for request_id in list(self._nwor_stale):
            request = self.requests.get(request_id)
            if request is None or request.num_stale_output_tokens == 0:
                self._nwor_stale.discard(request_id)
            elif request.drop_stale_output:
                thrown_away.append(request_id)
        self._nwor_partial.update(record.windows.keys() & thrown_away)
        return frozenset(thrown_away)

    def _nwor_take_extra(self, record: StepRecord) -> None:
        """Count what the windows' kinds do not say: copies, and what earlier stages leave out."""
        earlier = record.facts.earlier
        for request_id, kind in record.windows.items():
            extra = record.copies(kind)
            if earlier is not None and self._nwor_freed.since(self._nwor_heard_of, request_id):
                add_bytes(extra, earlier.missing(kind))
            add_bytes(self._nwor_new.extra, extra)
            if self._nwor_runs(request_id):
                add_bytes(self._nwor_extra.setdefault(request_id, {}), extra)

    def _nwor_runs(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and (not request.is_finished() or request is self._nwor_ending)

    def _nwor_fold(self) -> None:
        """Count the windows of the records that wait. No request may have been freed since they came."""
        waiting, self._nwor_waiting = self._nwor_waiting, []
        start = 0
        for stop in range(1, len(waiting) + 1):
            if stop == len(waiting) or not _alike(waiting[start], waiting[stop]):
                self._nwor_add(waiting[start:stop])
                start = stop

    def _nwor_running(self) -> list[str]:
        self._nwor_fold()
        return super()._nwor_running()

    def _nwor_add(self, alike: Sequence[_Waiting]) -> None:
        """Count the windows of steps with the same requests, treated alike."""
        new = self._nwor_new
        (first, thrown_away), records = alike[0], [record for record, _ in alike]
        accepted, request_ids, ended = self._nwor_table.add(
            first.request_ids, first.treatment, [record.sampled for record in records], self._nwor_runs
        )
        if ended is not None:
            new.late_windows += int(ended.sum()) * len(records)
        new.commits += sum([record.commits for record in records])
        new.commit_seconds += sum([record.commit_seconds for record in records])
        self._nwor_bounds.observe(request_ids, layout_of(first.treatment).drafts, accepted)
        if self._nwor_windows + len(request_ids) * len(records) != records[-1].all_windows:
            self._nwor_find_missing(records, len(request_ids))
        self._nwor_windows = records[-1].all_windows
        if not self.log_stats:
            return  # vLLM counts nothing to compare with
        if ended is not None:
            accepted = accepted * ~ended
        if thrown_away:
            accepted = accepted * [request not in thrown_away for request in request_ids]
        self._nwor_ours += accepted.sum(axis=1).tolist()

    def _nwor_find_missing(self, records: Sequence[StepRecord], windows: int) -> None:
        """Count the steps before which windows got lost.

        Args:
            records: steps in a row.
            windows: windows of each.

        """
        arrived = self._nwor_windows
        for record in records:
            arrived += windows
            if arrived != record.all_windows:
                self._nwor_mismatch(
                    "windows", f"{arrived} windows arrived of {record.all_windows} that the rank counted"
                )
                arrived = record.all_windows

    def _nwor_compare_steps(self) -> None:
        """Compare the accepted tokens of each step with vLLM's."""
        ours, theirs = self._nwor_ours, self._nwor_theirs
        self._nwor_ours, self._nwor_theirs = [], []
        if ours == theirs:
            return
        for own, other in zip_longest(ours, theirs, fillvalue=0):
            if own != other:
                self._nwor_mismatch(
                    "accepted_tokens", f"the workers accepted {own} tokens, vLLM counted {other}"
                )

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Return the step's statistics, now and then with the figures since the last ones."""
        stats = super().make_stats(*args, **kwargs)
        if stats is None:
            return None
        if self._nwor_verified is not None:
            speculation = stats.spec_decoding_stats
            theirs = speculation.num_accepted_tokens if speculation is not None else 0
            if self._nwor_verified:
                self._nwor_theirs.append(theirs)
            elif theirs:
                self._nwor_mismatch(
                    "accepted_tokens", f"the workers accepted 0 tokens, vLLM counted {theirs}"
                )
        now = time.monotonic()
        # Without running requests no further step may come.
        if now < self._nwor_next and not self._nwor_due and self.running:
            return stats
        new = self._nwor_drain()
        if new is None:
            return stats
        self._nwor_due, self._nwor_next = False, now + EVERY
        return EngineStats(**{field.name: getattr(stats, field.name) for field in fields(stats)}, nwor=new)

    def _nwor_drain(self) -> EngineFigures | None:
        """Return the figures since this was last called; None where there are none."""
        self._nwor_fold()
        self._nwor_compare_steps()
        new, latest = self._nwor_new, self._nwor_latest
        if self._nwor_lengths is not None and self._nwor_lengths.steps:
            new.draft_steps, new.drafting = self._nwor_lengths.drain(), self._nwor_lengths.explain()
        if latest is None and new == EngineFigures():
            return None
        self._nwor_new, self._nwor_latest = EngineFigures(), None
        new.kinds = self._nwor_table.drain()
        if latest is not None:
            new.mode, new.switches = latest.facts.mode, latest.facts.switches
            new.token_bytes, new.held_bytes = latest.facts.token_bytes, latest.treatment.held_bytes
        return new

    def settle(self, request: Request) -> dict[WindowKind, int]:
        """Bring a request's figures up to date and return its windows by kind."""
        self._nwor_fold()
        kinds = self._nwor_table.of(request.request_id)
        figures = request.spec_decode_metrics
        if kinds and isinstance(figures, RequestFigures):
            assert self._nwor_facts is not None
            figures.nwor, figures.nwor_token_bytes = kinds, self._nwor_facts.token_bytes
            figures.nwor_extra = dict(self._nwor_extra.get(request.request_id, {}))
        if isinstance(figures, RequestFigures):
            self._nwor_bounds.enter(request.request_id, figures)
        return kinds

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        # It is finished already, but it was not when its records came.
        self._nwor_ending = request
        kinds = self.settle(request)
        self._nwor_ending = None
        if kinds:
            windows = sum(kinds.values())
            if request.status == RequestStatus.FINISHED_ABORTED:
                self._nwor_new.aborted_windows += windows
            else:
                self._nwor_new.finished_windows += windows
                self._nwor_compare(request, kinds)
        self._nwor_table.end(request.request_id)
        self._nwor_extra.pop(request.request_id, None)
        self._nwor_partial.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _handle_stopped_request(self, request: Request) -> bool:
        ended: bool = super()._handle_stopped_request(request)
        if not ended:
            # It goes on with further input, but this turn's output goes out, and what is under way is thrown
            # away.
            self.settle(request)
            self._nwor_stale.add(request.request_id)
        return ended

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if request.drop_stale_output:
            self._nwor_stale.add(request.request_id)

    def _nwor_compare(self, request: Request, kinds: dict[WindowKind, int]) -> None:
        """Compare the figures of a finished request with vLLM's own of the same request."""
        figures = request.spec_decode_metrics
        # Steps whose results vLLM threw away are in ours alone.
        if figures is None or request.num_preemptions or request.request_id in self._nwor_partial:
            return
        theirs = sum(accepted * steps for accepted, steps in enumerate(figures.histogram))
        ours = sum(accepted * windows for (_, _, _, accepted), windows in kinds.items())
        if ours != theirs:
            self._nwor_mismatch(
                "request", f"a request's windows accepted {ours} tokens, vLLM counted {theirs} for it"
            )

    def _nwor_mismatch(self, what: str, detail: str) -> None:
        self._nwor_due = True
        mismatches = self._nwor_new.mismatches
        mismatches[what] = mismatches.get(what, 0) + 1
        if what not in self._nwor_logged:
            self._nwor_logged.add(what)
            logger.error("NWOR's figures do not agree (%s): %s; further ones are only counted", what, detail)


class NworScheduler(NworScheduling, FastScheduling):
    """For engines that wait for each step."""


class NworAsyncScheduler(NworScheduling, AsyncScheduler, FastScheduling):
    """For engines that schedule a step ahead."""


def create_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """Return the scheduler that vLLM would choose, with the figures gathered.

    Args:
        args: what vLLM passes to its scheduler classes.
        kwargs: likewise; ``vllm_config`` decides between the two.

    """
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    if special := special_scheduler(config):
        return special(*args, **kwargs)
    chosen = NworAsyncScheduler if config.scheduler_config.async_scheduling else NworScheduler
    return chosen(*args, **kwargs)


def special_scheduler(vllm_config: Any) -> type[Scheduler] | None:
    """Return vLLM's own scheduler for models that need one of their own; None for all others.

    vLLM sets it where no scheduler was chosen before, so whoever chooses one has to ask. Figures of requests
    are not gathered then.
    """
    if getattr(vllm_config, "diffusion_config", None) is None:
        return None
    from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler, DiffusionScheduler

    logger.warning("A diffusion model has vLLM's own scheduler: NWOR's figures of requests are not gathered")
    ahead = vllm_config.scheduler_config.async_scheduling
    return DiffusionAsyncScheduler if ahead else DiffusionScheduler


def _alike(one: _Waiting, other: _Waiting) -> bool:
    return (
        (one[0].treatment is other[0].treatment or one[0].treatment == other[0].treatment)
        and one[1] == other[1]
        and one[0].request_ids == other[0].request_ids
    )
