"""CUDA graphs of verify steps on model runner V2: a second set for ``stage``, see :mod:`stage_set`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from nwor.engine.stage_set import StageSet

if TYPE_CHECKING:
    from nwor.engine.rank import Rank

ForwardFn = Callable[[CUDAGraphMode], None]
ForwardFactory = Callable[..., ForwardFn]


def stageable(desc: BatchExecutionDescriptor, longest_window: int) -> bool:
    """Return whether a graph's batch may consist of windows."""
    return (
        desc.num_ubatches <= 1
        and desc.num_reqs is not None
        and desc.uniform_token_count is not None
        and 1 < desc.uniform_token_count <= longest_window
    )


class _CaptureBothModes(CudaGraphManager):
    """Stands behind ModelCudaGraphManager in the method order, where the forward functions pass through."""

    nwor: Rank
    graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    stage_graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    stage: StageSet[BatchExecutionDescriptor]

    def capture(self, create_forward_fn: ForwardFactory, progress_bar_desc: str = "") -> None:
        """Capture vLLM's graphs, then those of ``stage`` where it is enabled."""
        super().capture(self._holding(create_forward_fn), progress_bar_desc)
        self.stage_graphs = {}
        self.stage.clear()
        if not self.stage.wanted:
            return
        descs = [desc for desc in self._capture_descs.get(CUDAGraphMode.FULL, []) if self._stageable(desc)]
        if not descs or self._max_full_descs_to_capture is not None:
            return
        with self.stage.capture():
            stock, self.graphs = self.graphs, {}
            stock_descs, self._capture_descs = self._capture_descs, {CUDAGraphMode.FULL: descs}
            try:
                super().capture(self._staging(create_forward_fn), f"{progress_bar_desc} (NWOR stage)")
                self.stage_graphs = self.graphs
            finally:
                self.graphs, self._capture_descs = stock, stock_descs

    def _stageable(self, desc: BatchExecutionDescriptor) -> bool:
        return stageable(desc, self.nwor.longest_window)

    def _holding(self, create_forward_fn: ForwardFactory) -> ForwardFactory:
        """Keep the keys and values of a piecewise pass alive until all layers have run."""

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> ForwardFn:
            forward_fn = create_forward_fn(desc, warmup)

            def forward(cg_mode: CUDAGraphMode) -> None:
                window = self.nwor.window
                if cg_mode != CUDAGraphMode.PIECEWISE or window is None:
                    forward_fn(cg_mode)
                    return
                with window.holding():
                    forward_fn(cg_mode)

            return forward

        return create

    def _staging(self, create_forward_fn: ForwardFactory) -> ForwardFactory:
        """Run each pass with an open window, and note where the captured one leaves the window."""

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> ForwardFn:
            forward_fn = create_forward_fn(desc, warmup)
            assert desc.num_reqs is not None
            requests = desc.num_reqs

            def forward(cg_mode: CUDAGraphMode) -> None:
                with self.stage.forward(requests, desc.num_tokens):
                    forward_fn(cg_mode)
                    if not warmup:
                        self.stage.note(desc)

            return forward

        return create


class NworCudaGraphManager(ModelCudaGraphManager, _CaptureBothModes):
    """vLLM's manager with a second set of graphs, chosen at replay."""

    @classmethod
    def adopt(cls, manager: ModelCudaGraphManager, rank: Rank) -> NworCudaGraphManager:
        """Turn vLLM's freshly made manager into this class; nothing has been captured yet."""
        if type(manager) is not ModelCudaGraphManager:
            raise TypeError(f"expected vLLM's ModelCudaGraphManager, found {type(manager).__name__}")
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.nwor = rank
        manager.stage_graphs, manager.stage = {}, StageSet(rank)
        return manager

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        """Replay the graph of the open window batch's mode."""
        window = self.nwor.window
        if window is None or not window.staging or not self.stage.take(desc):
            return super().run_fullgraph(desc)
        stock, self.graphs = self.graphs, self.stage_graphs
        try:
            return super().run_fullgraph(desc)
        finally:
            self.graphs = stock
