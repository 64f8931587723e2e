"""Model runner V2 with windows: what is common to CUDA and to the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nwor.config import NworConfig
from nwor.engine.freed import freed_by
from nwor.engine.layers import slot_keys, target_layers
from nwor.engine.plan import StepPlan, takes_over_blocks
from nwor.engine.rank import CacheViews, Rank
from nwor.engine.record import attach, in_flight_of
from nwor.engine.stages import Stages

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Base
else:
    Base = object


class NworRunnerV2(Base):
    """Mixin before vLLM's V2 runner: opens a window batch before the forward pass, commits after sampling.

    The window batch is opened once a step's inputs are on the device. The batch is sorted with verifying
    requests first, so the windows are its leading part. The commit is launched after the sampled tokens' copy
    to the host has started and before the drafter runs. A pipeline stage that does not sample holds its
    windows back until vLLM's own record of the step's counts has come (``PPHandler``).
    """

    nwor: Rank
    _nwor_finished: StepPlan | None = None
    _nwor_early: bool = False

    #: Set by subclasses: the attention implementation that takes part, and how its cache looks.
    nwor_impl: type
    nwor_cache_views: CacheViews

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        """Allocate the cache, then bind the target's layers to it."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        config = NworConfig.from_additional_config(self.vllm_config.additional_config)
        assert config is not None
        self.nwor = Rank(self.vllm_config, config, self.device)
        if is_profiling:
            return
        keys = slot_keys(self.kv_cache_config)
        self.nwor.bind(target_layers(self), keys, self.nwor_cache_views, self.nwor_impl, Stages.current())

    def finish_requests(self, scheduler_output: Any) -> None:
        """Commit what this step has to find in the cache, then free the requests that have ended.

        Called at the start of every step, before requests are added and anything is launched.
        """
        if self.use_pp:
            self.nwor.next_step(in_flight_of(scheduler_output), freed_by(scheduler_output))
        self._nwor_early = takes_over_blocks(scheduler_output)
        super().finish_requests(scheduler_output)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; a window batch left open by an exception is dropped without a write."""
        try:
            return super().execute_model(*args, **kwargs)
        except BaseException:
            self.nwor.drop()
            raise

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Prepare the step's block tables and slots, then open its window batch."""
        prepared = super().prepare_attn(input_batch)
        rank, plan = self.nwor, None
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is not None:
            scheduled = input_batch.num_scheduled_tokens
            plan = rank.plan_step(input_batch.req_ids, scheduled, drafts, self._nwor_early)
        rank.begin(plan, input_batch.query_start_loc, prepared[1])
        return prepared

    def postprocess_sampled(
        self,
        idx_mapping: torch.Tensor,
        sampled_tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        query_start_loc: torch.Tensor | None = None,
    ) -> None:
        """Commit the open batch, then update the requests' state."""
        self._nwor_finished = self.nwor.finish(num_rejected)
        super().postprocess_sampled(idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, commit and draft; the counts are read when the output's own copy has arrived."""
        try:
            if not self.is_last_pp_rank:
                self.nwor.defer()
            output = super().sample_tokens(grammar_output)
        except BaseException:
            self.nwor.drop()
            raise
        if not self.is_last_pp_rank:
            if self.nwor.deferral is not None:
                self._nwor_expect_counts()
            return output
        plan, self._nwor_finished = self._nwor_finished, None
        if plan is not None and output is not None:
            self._nwor_account_on_arrival(output, plan)
        return output

    def _nwor_expect_counts(self) -> None:
        handler = self.pp_handler
        assert handler is not None
        # What this step's call has just put there; None where no request of the step needs its outcome.
        entry = handler.queue[-1]
        if entry is None:
            self.nwor.expect(None)
            return

        def rejected() -> torch.Tensor:
            handler.main_stream.wait_event(entry.event)
            return entry.num_rejected

        self.nwor.expect(rejected)

    def _nwor_account_on_arrival(self, output: AsyncOutput, plan: StepPlan) -> None:
        get_output = output.get_output

        def counted() -> Any:
            # Else the output would refer to itself, and its tensors would wait for the garbage collector.
            del output.get_output  # type: ignore[misc]
            return attach(get_output(), self.nwor.account_sampled(plan, output.num_sampled_tokens_np))

        output.get_output = counted  # type: ignore[method-assign]
