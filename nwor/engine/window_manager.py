"""One rank's side of NWOR: attaches to the target's layers, opens a window batch for a step and finishes it.

The model runners call it; it knows nothing of their internals beyond what they pass in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from nwor.config import MAX_WINDOW, NworConfig
from nwor.counts.records import StepRecord
from nwor.engine.attention.attachment import Attachment, CacheViews
from nwor.engine.attention.layer_context import LayerContext, parameters_of
from nwor.engine.cuda_graphs.capture_errors import CaptureErrors
from nwor.engine.eligibility import (
    REASONS,
    Unsupported,
    check_engine,
    check_graphs,
    memory_is_reused,
)
from nwor.engine.pipeline_parallel.cut_short import CutShort
from nwor.engine.pipeline_parallel.deferral import Deferral, RejectedCounts
from nwor.engine.pipeline_parallel.stages import PipelineStages
from nwor.engine.stats.commit_timer import CommitTimer
from nwor.engine.step_plan import StepPlan, early_batch, int32_bytes
from nwor.engine.step_planner import StepPlanner
from nwor.engine.trimmed_drafts import TrimmedDrafts
from nwor.modes import Mode
from nwor.self_check import SelfCheck
from nwor.windows.window import Window
from nwor.worker_state import WorkerState

if TYPE_CHECKING:
    from nwor.engine.cuda_graphs.mixed import MixedGraphs
    from nwor.engine.trees.tables import TreeTables


class WindowManager:
    """NWOR on one worker.

    Attributes:
        state: mode, counters, faults.
        window: owner of the window batches; None where nothing can be staged.
        deferral: the windows that wait for their counts; None on ranks of the last pipeline stage.
        mixed: the CUDA graphs of mixed steps; None on runners that have none.
        capture_errors: what has gone wrong in layers while graphs were captured.

    """

    def __init__(self, vllm_config: Any, config: NworConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.state = WorkerState(config, config.mode)
        self.device = device
        self.window: Window | None = None
        self.plan: StepPlan | None = None
        self.timer = CommitTimer(device)
        self.deferral: Deferral | None = None
        self.mixed: MixedGraphs | None = None
        self._cut_short = CutShort(self.state)
        self._check: SelfCheck | None = None
        speculative = vllm_config.speculative_config
        self.longest_window = 1 + (speculative.num_speculative_tokens if speculative is not None else 0)
        self._planner = StepPlanner(self.state, self.longest_window)
        self._bound: list[Any] = []
        self.capture_errors = CaptureErrors(self)

    def bind(
        self,
        target_layers: Mapping[str, Any],
        slot_keys: Mapping[str, int],
        cache_views: CacheViews,
        backends: Sequence[Any],
        stages: PipelineStages | None = None,
    ) -> None:
        """Attach the target's attention layers to this rank's window, once the cache is allocated.

        Args:
            target_layers: every attention layer of the target model by name; no draft layer.
            slot_keys: which slot mapping (KV-cache group) each layer uses.
            cache_views: how to see a layer's cache as strided K and V.
            backends: the attention backends that take part.
            stages: the pipeline stages, all of which call this; None where there are none.

        """
        stages = stages or PipelineStages()
        self.state.last_stage = stages.last
        self._planner.largest_graph = self.vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._planner.copy_always = memory_is_reused(self.vllm_config.compilation_config)
        self.state.shared_graphs = self._shares_graphs()
        verdict: tuple[str, str] | None = None
        layer_contexts: list[tuple[Any, LayerContext]] = []
        try:
            check_engine(self.vllm_config, MAX_WINDOW)
            if self.device.type == "cuda":
                check_graphs(self.vllm_config.compilation_config)
            attachment = Attachment(self.vllm_config, self.device, self.state, self.longest_window)
            self.window, layer_contexts = attachment.layer_contexts(
                target_layers, slot_keys, cache_views, backends
            )
        except Unsupported as found:
            verdict = (found.reason, str(found))
        # A window is staged on all stages or on none: its figures cover them all.
        verdict = self._agree(stages, verdict)
        self.state.forget_facts()
        if verdict is not None:
            self.stage_nothing(*verdict)
            return
        if not stages.last:
            assert self.window is not None
            self.deferral = Deferral(self.window, self.state, stages.count)
        for layer, layer_context in layer_contexts:
            layer.impl.nwor = layer_context
        self._bound = [layer for layer, _ in layer_contexts]

    def take_scales(self) -> None:
        """Take the scales of fp8 caches anew, after weights were loaded into the running engine.

        A query's scale is part of what CUDA graphs were captured with. Where it changed nothing is staged any
        more.
        """
        if self.window is None:
            return
        for _, group in self.window.group_ops:
            group.take_scales()
        for layer in self._bound:
            before = layer.impl.nwor.parameters
            if before.scale != parameters_of(layer, self.longest_window).scale:
                self.unbind()
                self.refuse(
                    "cache_format", "the scale of queries changed with the weights; start the engine anew"
                )
                return

    @property
    def longest_chain(self) -> int:
        """Rows of the longest window that is a chain."""
        tree = self.state.config.tree
        return self.longest_window if tree is None else 1 + tree.longest_chain

    @property
    def most_window_rows(self) -> int:
        """Rows of all windows of the largest batch."""
        scheduler = self.vllm_config.scheduler_config
        return min(scheduler.max_num_seqs * self.longest_window, scheduler.max_num_batched_tokens)

    @property
    def always_copies(self) -> bool:
        """Whether every step's windows are copied aside as its layers run."""
        return self._planner.copy_always

    def _shares_graphs(self) -> bool:
        if self.device.type != "cuda" or self.vllm_config.parallel_config.tensor_parallel_size == 1:
            return False
        return bool(self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs())

    def unbind(self) -> None:
        """Let go of the layers, which may outlive the engine, and with them of the cache.

        Windows that an earlier pipeline stage holds back are still committed.
        """
        for layer in self._bound:
            layer.impl.nwor = None
        self._bound = []
        self.window = None

    def _agree(self, stages: PipelineStages, verdict: tuple[str, str] | None) -> tuple[str, str] | None:
        """Exchange verdicts and sizes with the other stages and return the first verdict there is."""
        state = self.state
        said = stages.gather((verdict, state.token_bytes, state.source_token_bytes))
        state.other_token_bytes = sum(size for _, size, _ in said) - state.token_bytes
        state.other_source_bytes = sum(size for _, _, size in said) - state.source_token_bytes
        # A graph makes its keys and values in the same memory each time that it is replayed.
        if stages.count > 1 and self.device.type == "cuda":
            state.stages_copy = self.vllm_config.compilation_config.cudagraph_mode.name != "NONE"
        return next((found for found, _, _ in said if found is not None), None)

    def stage_nothing(self, reason: str, detail: str) -> None:
        """Refuse while the engine starts, when nothing has been counted yet.

        What failed in a step of vLLM's warm-up before is the same error, and no fault of a running engine.
        """
        state = self.state
        state.fault, state.mode, state.switches = None, state.config.mode, 0
        state.token_bytes = state.source_token_bytes = 0
        state.other_token_bytes = state.other_source_bytes = 0
        self.refuse(reason, detail)

    def refuse(self, reason: str, detail: str = "") -> None:
        """Note that nothing can be staged in this engine, and why."""
        detail = detail or REASONS[reason].text
        self.window = None
        self.state.unsupported = (reason, detail)
        self.state.forget_facts()
        self.state.log_once(reason, detail)

    def plan_step(
        self,
        request_ids: Sequence[str],
        query_lens: Sequence[int] | npt.NDArray[Any],
        draft_counts: Sequence[int] | npt.NDArray[Any],
        early: bool = False,
        full: bool = False,
        graph_copies: bool | None = None,
        trimmed: tuple[torch.Tensor, int] | None = None,
        longest: int | None = None,
    ) -> StepPlan | None:
        """Decide, from the scheduler's own record of draft tokens, what this step does.

        Args:
            request_ids: the step's requests in batch order.
            query_lens: rows of each.
            draft_counts: draft tokens of each; its last rows.
            early: whether a request of the step may read what others of it write.
            full: whether each request has as many drafts as there can be, and no rows beside its window.
            graph_copies: whether the step's mixed graph copies windows aside; None where it runs in none.
            trimmed: where the device leaves out some of the draft tokens, each request's first row of logits,
                int32 [requests + 1] on the device, and the step's rows; None where it leaves out none.
            longest: rows of the longest window that the step's graph is for; None for any of the engine's.

        Returns:
            The plan, or None where the step verifies nothing.

        """
        refusal = None
        if self.window is None:
            refusal = self.state.unsupported[0] if self.state.unsupported else "fault"
        drafts: TrimmedDrafts | None = None
        try:
            if trimmed is not None:
                drafts = TrimmedDrafts(*trimmed)
            known = self._planner.known(
                query_lens,
                draft_counts,
                refusal,
                len(request_ids) if full else 0,
                graph_copies,
                None if drafts is None else drafts.num_tokens,
                longest,
            )
        except Exception as error:
            known = self._planner.failed(draft_counts, error)
        if not known.windows:
            return None
        self.state.steps += 1
        return StepPlan(known, list(request_ids), early, self._cut_short.step, drafts)

    def next_step(self, in_flight: int, freed: AbstractSet[str]) -> None:
        """Take in what the scheduler says of a step, before anything of the step is launched.

        With pipeline stages every step has to be announced so, whether or not it verifies.

        Args:
            in_flight: steps right before this one whose results the scheduler had not heard of.
            freed: requests whose blocks may have other owners from this step on.

        """
        self._cut_short.next_step(in_flight, freed)
        if self.deferral is not None:
            self.deferral.next_step(in_flight, freed)

    def begin(
        self,
        plan: StepPlan | None,
        query_start_loc: torch.Tensor,
        slots: Mapping[int, torch.Tensor] | torch.Tensor,
    ) -> None:
        """Open the window batch of a step before its first layer runs.

        Args:
            plan: what :meth:`plan_step` returned.
            query_start_loc: int32, at least [num_requests + 1], on the device.
            slots: by slot key, int64, at least [num_tokens]; or int64 [keys, at least num_tokens], the slot
                mappings of all keys.

        """
        self.plan = plan
        if plan is None or not plan.treatment.num_requests:
            return
        window, state = self.window, self.state
        assert window is not None
        try:
            self._open(plan, query_start_loc, slots)
            interval = state.config.self_check_interval
            if interval and state.steps % interval == 0 and not plan.faulty:
                self._check = SelfCheck(window)
        except Exception as error:
            self._fail_to_begin(plan, error)
            if state.graphs_mode is Mode.STAGE:
                # The ranks beside this one are about to replay a graph of `stage`, and it has to as well.
                try:
                    self._open(plan, query_start_loc, slots)
                except Exception as again:
                    self._fail_to_begin(plan, again)

    def _open(
        self,
        plan: StepPlan,
        query_start_loc: torch.Tensor,
        slots: Mapping[int, torch.Tensor] | torch.Tensor,
    ) -> None:
        assert self.window is not None
        batch = plan.known.batch(query_start_loc, slots)
        if plan.early and batch.mode is Mode.STAGE:
            batch = early_batch(plan, batch, self.device)
        self.window.begin(batch)

    def _fail_to_begin(self, plan: StepPlan, error: Exception) -> None:
        assert self.window is not None
        self.state.fail("begin", error)
        self.window.abort()
        plan.fail()

    @property
    def attends_trees(self) -> bool:
        """Whether all windows of the open step are staged, so that their rows attend as their trees say."""
        window, plan = self.window, self.plan
        if window is None or plan is None or not window.staging:
            return False
        return plan.direct_reason is None and not plan.faulty

    @property
    def trees_possible(self) -> bool:
        """Whether the next step's windows are going to be staged, as far as is known."""
        return self.window is not None and self.state.mode is Mode.STAGE

    def use_trees(self, tables: TreeTables) -> None:
        """Let layers attend, and commits write, as trees say; once the layers are bound."""
        if self.window is not None:
            self.window.source_rows = tables.source_rows
        for layer in self._bound:
            layer.impl.nwor.row_masks = tables.row_masks

    def go_direct(self, reason: str) -> None:
        """Write the open batch directly although it was planned otherwise, and count why."""
        assert self.plan is not None
        assert self.window is not None
        self.window.finish_direct()
        self.plan.go_direct(reason)
        self.state.log_once(reason, REASONS[reason].text)

    def finish(self, rejected: torch.Tensor) -> StepPlan | None:
        """Commit the open batch, right after rejection sampling and before the drafter runs.

        Args:
            rejected: int32 [at least num_requests] on the device: draft tokens rejected in each window.

        Returns:
            The step's plan, for :meth:`account` once the counts are on the host; None where nothing was
            verified.

        """
        plan, window = self.plan, self.window
        self.plan = None
        if plan is None or window is None or window.batch is None:
            return plan
        self._settle_faults(plan, window)
        check, self._check = self._check, None
        sources = dict(window.sources) if check is not None else {}
        try:
            if rejected.dtype is not torch.int32:
                rejected = rejected.to(torch.int32)
            if self.timer.due():
                with self.timer:
                    window.commit(rejected)
            else:
                window.commit(rejected)
        except Exception as error:
            self.fail_commit(plan, error)
            return plan
        if check is not None and plan.num_requests and not plan.faulty:
            check.report(self.state, sources, rejected)
        return plan

    def _settle_faults(self, plan: StepPlan, window: Window) -> None:
        if plan.faulty and window.staging:
            window.finish_direct(sampled=True)  # staged for the sake of the graphs alone
        elif window.finished_direct and plan.num_requests:
            plan.fail()

    def fail_commit(self, plan: StepPlan, error: Exception) -> None:
        """Turn NWOR off after an error at the commit or on the way to it; finish the batch by direct writes.

        Args:
            plan: the step's plan.
            error: the error.

        """
        self.plan = self._check = None
        self.state.fail("commit", error)
        window = self.window
        # What goes wrong after the commit, as in measuring it, finds the window closed and nothing missing.
        if window is not None and window.batch is not None:
            window.finish_direct(sampled=True)
            window.abort()
            plan.fail()

    def defer(self) -> None:
        """Hold the open batch back until its counts come, on a stage that does not sample."""
        plan, window = self.plan, self.window
        self.plan = None
        check, self._check = self._check, None
        if plan is None or window is None or window.batch is None:
            return
        assert self.deferral is not None
        try:
            self._settle_faults(plan, window)
            if not window.finished_direct:
                self.deferral.hold(plan, check, copy=self.state.stages_copy)
        except Exception as error:
            self.state.fail("defer", error)
            if window.batch is not None:
                window.finish_direct()
        finally:
            window.abort()

    def expect(self, rejected: RejectedCounts | None) -> None:
        """Note how to come by the counts of the step that :meth:`defer` has just held back.

        Args:
            rejected: returns int32 [at least num_requests] on the device: draft tokens rejected in each
                window. None where no counts will come.

        """
        if self.deferral is not None:
            self.deferral.expect(rejected)

    def account(self, plan: StepPlan | None, accepted: Sequence[int]) -> StepRecord | None:
        """Count the windows of a finished step.

        Args:
            plan: what :meth:`finish` returned.
            accepted: accepted draft tokens of each request of the plan, in its order.

        Returns:
            The step's record; None where nothing was verified.

        """
        return None if plan is None else self.account_sampled(plan, [1 + count for count in accepted])

    def account_sampled(self, plan: StepPlan, sampled: Sequence[int] | npt.NDArray[Any]) -> StepRecord:
        """Count the windows of a finished step.

        Args:
            plan: what :meth:`finish` returned.
            sampled: tokens that the step gave each request of the plan, in its order: accepted drafts and one
                more; 0 or 1 where no draft was accepted.

        """
        state, timer = self.state, self.timer
        treatment, own_windows = plan.outcome()
        counts = int32_bytes(sampled)
        if len(counts) != len(treatment.drafts):
            raise ValueError("sampled: wanted one number for each request of the plan")
        state.count(treatment, counts, own_windows)
        commits, seconds = timer.drain() if timer.waiting else (0, 0.0)
        record = StepRecord(plan.request_ids, treatment, counts, state.facts, state.windows, commits, seconds)
        if state.other_token_bytes or treatment.copied_bytes:
            windows = record.windows
            for kind in windows.values():
                state.add_bytes(record.copies(kind))
            self._cut_short.count(plan.step, windows)
        return record

    def drop(self) -> None:
        """Forget an open batch after a failed step; nothing is written."""
        self.plan = None
        self._check = None
        if self.window is not None:
            self.window.abort()
