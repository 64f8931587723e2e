"""vLLM's model runner V1 on CUDA: runs as it is; each window is counted as direct, with the reason."""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nwor.config import NworConfig
from nwor.engine.plan import StepPlan
from nwor.engine.rank import Rank
from nwor.engine.record import attach


class NworGPUModelRunnerV1(GPUModelRunner):
    """The stock runner with a rank that reports the reason ``runner``."""

    nwor: Rank
    _nwor_plan: StepPlan | None = None

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache; no layer is bound."""
        super().initialize_kv_cache(*args, **kwargs)
        config = NworConfig.from_additional_config(self.vllm_config.additional_config)
        assert config is not None
        self.nwor = Rank(self.vllm_config, config, self.device)
        self.nwor.refuse("runner")

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step and note which requests verify in it."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        counts = [len(tokens) for tokens in drafts.values()]
        self._nwor_plan = self.nwor.plan_step(list(drafts), [1 + count for count in counts], counts)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample and draft; the windows are counted when the sampled tokens are on the host."""
        output = super().sample_tokens(grammar_output)
        plan, self._nwor_plan = self._nwor_plan, None
        if plan is None or output is None:
            return output
        if not isinstance(output, AsyncModelRunnerOutput):
            return self._nwor_account(output, plan)
        get_output = output.get_output
        output.get_output = lambda: self._nwor_account(get_output(), plan)  # type: ignore[method-assign]
        return output

    def _nwor_account(self, output: Any, plan: StepPlan) -> Any:
        accepted = []
        for request in plan.request_ids:
            index = output.req_id_to_index.get(request)
            tokens = [] if index is None else output.sampled_token_ids[index]
            accepted.append(max(len(tokens) - 1, 0))
        return attach(output, self.nwor.account(plan, accepted))
