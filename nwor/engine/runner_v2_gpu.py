"""vLLM's model runner V2 on CUDA with windows."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from nwor.engine import lean_inputs, lean_launches, lean_sampling
from nwor.engine.attention_flash import NworFlashAttentionBackend, layer_cache_views
from nwor.engine.graphs import NworCudaGraphManager
from nwor.engine.runner_v2 import NworRunnerV2


class NworGPUModelRunnerV2(NworRunnerV2, GPUModelRunner):
    """The CUDA runner with windows and with a second set of graphs."""

    cudagraph_manager: Any

    nwor_backend = NworFlashAttentionBackend
    nwor_cache_views = staticmethod(layer_cache_views)

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        """Allocate the cache, bind the layers, and take over the graphs before the first is captured."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        if not is_profiling:
            self.cudagraph_manager = NworCudaGraphManager.adopt(self.cudagraph_manager, self.nwor)
            config = self.nwor.state.config
            if config.lean_sampling:
                lean_sampling.apply(self.speculator, self.rejection_sampler, self.max_num_reqs, self.device)
            if config.lean_host:
                lean_inputs.apply()
                lean_launches.apply()
