"""vLLM's GPU worker with the NWOR runner and attention backends."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from nwor.config import NworConfig
from nwor.engine.attention import backends
from nwor.engine.worker import NworWorkerMixin


class NworGPUWorker(NworWorkerMixin, Worker):  # type: ignore[misc]
    """The worker class of an engine that asked for NWOR on a GPU."""

    def init_device(self) -> None:
        """Name NWOR's backends before the model's layers look theirs up."""
        config = NworConfig.from_additional_config(self.vllm_config.additional_config)
        assert config is not None
        backends.register(config.attention_backends)
        super().init_device()

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            from nwor.engine.model_runner.v2_gpu import NworGPUModelRunnerV2

            return NworGPUModelRunnerV2(self.vllm_config, self.device)
        from nwor.engine.model_runner.v1_gpu import NworGPUModelRunnerV1

        return NworGPUModelRunnerV1(self.vllm_config, self.device)
