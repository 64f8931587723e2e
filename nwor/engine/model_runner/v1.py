"""Model runner V1 with windows: what is common to CUDA and to the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.outputs import AsyncModelRunnerOutput

from nwor.engine.model_runner.common import NworRunner
from nwor.engine.request_isolation.common import send_failures
from nwor.engine.request_isolation.v1 import IsolatingRunnerV1
from nwor.engine.step_plan import rejected_drafts, takes_over_blocks
from nwor.engine.workarounds import sampled_drafts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class NworRunnerV1(NworRunner, IsolatingRunnerV1):
    """Mixin before vLLM's V1 runner: opens a window batch before the forward pass, commits after sampling.

    The scheduler's own record of draft tokens says which requests verify; nothing is inferred from query
    lengths, so a chunk of a prompt is never taken for a window. The attention backend asks for verifying
    requests to stand first, so the windows are the leading part of the batch. The commit is launched right
    after rejection sampling, before the drafter runs.
    """

    _nwor_scheduled: SchedulerOutput | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        sampled_drafts.mend()
        super().__init__(*args, **kwargs)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; a window batch left open by an exception is dropped without a write."""
        try:
            return super().execute_model(*args, **kwargs)
        finally:
            self._nwor_scheduled = None

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        if len(self.input_batch.req_ids) > 1:
            super()._may_reorder_batch(scheduler_output)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        # The record that the step runs by: where drafts are made on the GPU by n-grams, vLLM has copied the
        # scheduler's and left out drafts that turned out to be none.
        self._nwor_scheduled = scheduler_output
        return super()._prepare_inputs(scheduler_output, *args, **kwargs)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = self._nwor_scheduled
        if scheduled is not None:
            self._nwor_begin(scheduled)
        return super()._model_forward(*args, **kwargs)

    def _nwor_begin(self, scheduled: SchedulerOutput) -> None:
        drafts = scheduled.scheduled_spec_decode_tokens
        plan = None
        if drafts:
            request_ids = self.input_batch.req_ids
            query_lens = [scheduled.num_scheduled_tokens[request] for request in request_ids]
            draft_counts = [len(drafts.get(request, ())) for request in request_ids]
            plan = self.nwor.plan_step(request_ids, query_lens, draft_counts, takes_over_blocks(scheduled))
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
        output = super()._sample(logits, spec_decode_metadata)
        plan = self.nwor.plan
        if plan is not None:
            vocabulary = self.input_batch.vocab_size
            self._nwor_finished = plan
            try:
                rejected = rejected_drafts(output.sampled_token_ids, plan.draft_counts, vocabulary)
            except Exception as error:  # without the counts no window can be committed
                self.nwor.fail_commit(plan, error)
            else:
                self._nwor_finished = self.nwor.finish(rejected)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, commit and draft; the counts are read when the output's own copy has arrived."""
        try:
            output = super().sample_tokens(grammar_output)
        except BaseException:
            self._nwor_drop()
            raise
        plan, self._nwor_finished = self._nwor_finished, None
        failures, self._nwor_failures = self._nwor_failures, None
        if plan is not None and output is not None:
            if isinstance(output, AsyncModelRunnerOutput):
                self._nwor_account_on_arrival(output, plan)
            else:
                output = self._nwor_account(output, output, plan)
        elif plan is None:
            output = self._nwor_tell_facts(output)
        # Last: windows of requests that failed are committed and counted like others.
        return send_failures(output, failures)

    def _nwor_sampled(self, output: Any, result: Any) -> Sequence[int]:
        # vLLM has cleared the tokens of requests whose prompt is unfinished; they have no drafts.
        return [len(tokens) for tokens in result.sampled_token_ids]
