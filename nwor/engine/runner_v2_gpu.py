"""vLLM's model runner V2 on CUDA with windows."""

from __future__ import annotations

import logging
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from nwor.config import MAX_WINDOW
from nwor.engine import fast_paths
from nwor.engine.attention_flash import NworFlashAttentionBackend, layer_cache_views
from nwor.engine.graphs import NworCudaGraphManager, stageable
from nwor.engine.layers import target_layers
from nwor.engine.runner_v2 import NworRunnerV2
from nwor.engine.stage_set import expected_bytes
from nwor.engine.support import Unsupported, check_engine, check_graphs, memory_is_reused
from nwor.modes import Mode

logger = logging.getLogger("vllm.nwor.runner")


class NworGPUModelRunnerV2(NworRunnerV2, GPUModelRunner):
    """The CUDA runner with windows and with a second set of graphs."""

    cudagraph_manager: Any

    nwor_backend = NworFlashAttentionBackend
    nwor_cache_views = staticmethod(layer_cache_views)
    #: What the graphs of `stage` are expected to take; set while vLLM finds out what its own do.
    _nwor_expected_bytes: int = 0

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        """Allocate the cache, bind the layers, and take over the graphs before the first is captured."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        if not is_profiling:
            self.cudagraph_manager = NworCudaGraphManager.adopt(self.cudagraph_manager, self.nwor)
            state = self.nwor.state
            state.fast_paths.note(
                fast_paths.apply(
                    state.config, self.speculator, self.rejection_sampler, self.max_num_reqs, self.device
                )
            )

    def profile_cudagraph_memory(self) -> int:
        """Return what all graphs will take, those of ``stage`` too: vLLM leaves it out of the cache."""
        self._nwor_expected_bytes = 0
        return super().profile_cudagraph_memory() + self._nwor_expected_bytes

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture all graphs; where vLLM does so for their size alone, its own are enough to go by."""
        taken = super().capture_model(profile_only=profile_only)
        if profile_only:
            try:
                self._nwor_expected_bytes = self._nwor_expect()
            except Exception as error:  # no reason not to start: the graphs then come on top
                logger.warning("what the CUDA graphs of `stage` will take is not known: %r", error)
        return taken

    def _nwor_expect(self) -> int:
        rank, manager, settings = self.nwor, self.cudagraph_manager, self.vllm_config.compilation_config
        if Mode.STAGE not in rank.state.config.modes or memory_is_reused(settings):
            return 0
        try:
            check_engine(self.vllm_config, MAX_WINDOW)
            check_graphs(settings)
        except Unsupported:
            return 0
        descs = manager._capture_descs.get(CUDAGraphMode.FULL, [])
        rows = [desc.num_tokens for desc in descs if stageable(desc, rank.longest_window)]
        elements = 0
        for layer in target_layers(self).values():
            impl = getattr(layer, "impl", None)  # a layer without one is refused when the cache is there
            if impl is not None:
                # Values are a view of what one product made for queries, keys and values, and keep all of it.
                elements += (impl.num_heads + 2 * impl.num_kv_heads) * impl.head_size
        row_bytes = elements * self.model_config.dtype.itemsize
        return expected_bytes(rows, manager._capture_mem_samples or [], row_bytes)
