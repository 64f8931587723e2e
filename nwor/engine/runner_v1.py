"""Model runner V1 with windows: what is common to the CPU and to those CUDA engines that run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context

from nwor.config import NworConfig
from nwor.engine.layers import slot_keys, target_layers
from nwor.engine.plan import takes_over_blocks
from nwor.engine.rank import CacheViews, Rank
from nwor.engine.record import attach
from nwor.tally import StepRecord

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Base
else:
    Base = object


class NworRunnerV1(Base):
    """Mixin before vLLM's V1 runner: opens a window batch before the forward pass, commits after sampling.

    The scheduler's own record of draft tokens says which requests verify; nothing is inferred from query
    lengths, so a chunk of a prompt is never taken for a window.
    """

    nwor: Rank
    _nwor_scheduled: SchedulerOutput | None = None
    _nwor_record: StepRecord | None = None

    #: Set by subclasses: the attention implementation that takes part, and how its cache looks.
    nwor_impl: type
    nwor_cache_views: CacheViews

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        """Allocate the cache, then bind the target's layers to it."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        if is_profiling:
            return
        config = NworConfig.from_additional_config(self.vllm_config.additional_config)
        assert config is not None
        self.nwor = Rank(self.vllm_config, config, self.device)
        keys = slot_keys(self.kv_cache_config)
        self.nwor.bind(target_layers(self), keys, self.nwor_cache_views, self.nwor_impl)

    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> Any:
        """Run one step; a window batch left open by an exception is dropped without a write."""
        self._nwor_scheduled = scheduler_output
        try:
            return super().execute_model(scheduler_output, intermediate_tensors)
        except BaseException:
            self.nwor.drop()
            raise
        finally:
            self._nwor_scheduled = None

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = self._nwor_scheduled
        if scheduled is not None:
            self._nwor_begin(scheduled)
        return super()._model_forward(*args, **kwargs)

    def _nwor_begin(self, scheduled: SchedulerOutput) -> None:
        request_ids = self.input_batch.req_ids
        query_lens = [scheduled.num_scheduled_tokens[request] for request in request_ids]
        drafts = scheduled.scheduled_spec_decode_tokens
        draft_counts = [len(drafts.get(request, ())) for request in request_ids]
        early = takes_over_blocks(scheduled)
        plan = self.nwor.plan_step(request_ids, query_lens, draft_counts, early)
        slots: dict[int, torch.Tensor] = {}
        if plan is not None and plan.num_requests:
            by_layer = get_forward_context().slot_mapping
            assert isinstance(by_layer, dict)
            for group_id, group in enumerate(self.kv_cache_config.kv_cache_groups):
                for name in group.layer_names:
                    if name in by_layer:
                        slots[group_id] = by_layer[name]
                        break
        self.nwor.begin(plan, self.query_start_loc.gpu, slots)

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        try:
            output = super()._sample(logits, spec_decode_metadata)
        except BaseException:
            self.nwor.drop()
            raise
        plan = self.nwor.plan
        if plan is not None:
            drafts = torch.tensor(plan.draft_counts, dtype=torch.int32)
            self.nwor_finish(output.sampled_token_ids, drafts)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, commit and draft; what the windows did goes home with the step's output."""
        output = super().sample_tokens(grammar_output)
        record, self._nwor_record = self._nwor_record, None
        return attach(output, record)

    def nwor_finish(self, sampled: torch.Tensor, drafts: torch.Tensor) -> None:
        """Commit the open batch and count it.

        Args:
            sampled: [requests, 1 + drafts] token ids, -1 (or an id outside the vocabulary) where rejected.
            drafts: int32 [requests] on the CPU: draft tokens of each request.

        """
        vocabulary = self.input_batch.vocab_size
        valid = ((sampled >= 0) & (sampled < vocabulary)).sum(dim=1, dtype=torch.int32)
        accepted = torch.where(drafts > 0, (valid - 1).clamp_(min=0), 0)
        plan = self.nwor.finish(drafts - accepted)
        self._nwor_record = self.nwor.account(plan, accepted.tolist())
