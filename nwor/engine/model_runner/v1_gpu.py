"""vLLM's model runner V1 on CUDA with windows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nwor.engine.attention.staged_attention import layer_cache_views
from nwor.engine.cuda_graphs.v1 import NworCUDAGraphWrapper
from nwor.engine.model_runner.v1 import NworRunnerV1
from nwor.engine.window_manager import WindowManager


class NworGPUModelRunnerV1(NworRunnerV1, GPUModelRunner):
    """The CUDA runner with windows and with a second set of full graphs."""

    nwor_cache_views = staticmethod(layer_cache_views)

    #: None where the engine has no full graphs.
    _nwor_graphs: NworCUDAGraphWrapper | None = None

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        """Allocate the cache, bind the layers, and take over the graphs before the first is captured."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        if not is_profiling and isinstance(self.model, CUDAGraphWrapper):
            self._nwor_graphs = NworCUDAGraphWrapper.adopt(self.model, self.nwor)

    def _capture_cudagraphs(
        self,
        batch_descriptors: Sequence[BatchDescriptor],
        cudagraph_runtime_mode: CUDAGraphMode,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> None:
        super()._capture_cudagraphs(batch_descriptors, cudagraph_runtime_mode, profiler)
        graphs = self._nwor_graphs
        if cudagraph_runtime_mode != CUDAGraphMode.FULL or graphs is None or not graphs.stage.wanted:
            return
        # Every request of a uniform batch is a window; a batch of another kind may hold prompts.
        descs = [desc for desc in batch_descriptors if desc.uniform and desc.num_reqs is not None]
        if descs and 1 < self.uniform_decode_query_len <= self.nwor.longest_window:
            with graphs.capture_stage():
                super()._capture_cudagraphs(descs, cudagraph_runtime_mode, profiler)

    def _dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        with self._nwor_capture_pass(num_tokens, kwargs):
            return super()._dummy_run(num_tokens, *args, **kwargs)

    def _nwor_capture_pass(self, num_tokens: int, settings: dict[str, Any]) -> AbstractContextManager[None]:
        """Return what one pass of a capture has to run within; any other pass runs as it is."""
        graphs = self._nwor_graphs
        if graphs is not None and graphs.capturing_stage:
            return graphs.stage.forward(num_tokens // self.uniform_decode_query_len, num_tokens)
        # Made after the profiling run, which is a dummy run too.
        window_manager: WindowManager | None = getattr(self, "nwor", None)
        capturing = settings.get("is_graph_capturing", False)
        if (
            window_manager is not None
            and window_manager.window is not None
            and capturing
            and settings.get("cudagraph_runtime_mode") == CUDAGraphMode.PIECEWISE
        ):
            return window_manager.window.keeping_alive()
        return nullcontext()
