"""vLLM's model runner V1 on the CPU with windows."""

from __future__ import annotations

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from nwor.engine.attention.cpu import NworCPUAttentionBackend, layer_cache_views
from nwor.engine.model_runner.v1 import NworRunnerV1


class NworCPUModelRunnerV1(NworRunnerV1, CPUModelRunner):  # type: ignore[misc]
    """The CPU runner with windows; no device to wait for, so counts are read at once."""

    nwor_backend = NworCPUAttentionBackend
    nwor_cache_views = staticmethod(layer_cache_views)
