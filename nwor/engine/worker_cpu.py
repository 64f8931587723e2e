"""vLLM's CPU worker with the NWOR runner and attention backend."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from nwor.engine.attention.backends import forget_choices
from nwor.engine.patches import cpu_runner_patch, cpu_runner_v2_patch
from nwor.engine.workarounds import cpu_expand
from nwor.engine.workarounds.adapters import mend_cpu_operators
from nwor.engine.worker import NworWorkerMixin


class NworCPUWorker(NworWorkerMixin, CPUWorker):  # type: ignore[misc]
    """The worker class of an engine that asked for NWOR on a CPU."""

    def init_device(self) -> None:
        """Name the NWOR backend and runner before either is looked up."""
        register_backend(AttentionBackendEnum.CPU_ATTN, "nwor.engine.attention.cpu.NworCPUAttentionBackend")
        forget_choices()
        if not self.use_v2_model_runner:
            cpu_expand.mend()
        if self.vllm_config.lora_config is not None:
            mend_cpu_operators()
        with cpu_runner_v2_patch() if self.use_v2_model_runner else cpu_runner_patch():
            super().init_device()
