"""vLLM's model runner V2 on the CPU, taken where Triton has a backend for it, with windows."""

from __future__ import annotations

from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from nwor.engine.attention.cpu import NworCPUAttentionBackend, layer_cache_views
from nwor.engine.model_runner.v2 import NworRunnerV2


class NworCPUModelRunnerV2(NworRunnerV2, CPUModelRunner):  # type: ignore[misc]
    """The CPU runner with windows."""

    nwor_backend = NworCPUAttentionBackend
    nwor_cache_views = staticmethod(layer_cache_views)
