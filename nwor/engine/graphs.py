"""CUDA graphs of verify steps: a second set for ``stage``, beside vLLM's own.

A graph replays kernels, not Python, so what a step does is settled when it is captured. vLLM's graphs write
the cache; those captured here leave the window where the forward pass made it. Switching the mode is a choice
between two sets at replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import weak_ref_tensors
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from nwor.group import Source
from nwor.modes import Mode
from nwor.window import CapturedSources, WindowBatch

if TYPE_CHECKING:
    from nwor.engine.rank import Rank

ForwardFn = Callable[[CUDAGraphMode], None]
ForwardFactory = Callable[..., ForwardFn]


class _CaptureBothModes(CudaGraphManager):
    """Stands behind ModelCudaGraphManager in the method order, where the forward functions pass through."""

    nwor: Rank
    graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    stage_graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    stage_sources: dict[BatchExecutionDescriptor, CapturedSources]
    _captured: dict[BatchExecutionDescriptor, dict[str, Source]]
    _latest: BatchExecutionDescriptor | None
    _latest_sources: CapturedSources | None

    def capture(self, create_forward_fn: ForwardFactory, progress_bar_desc: str = "") -> None:
        """Capture vLLM's graphs, then those of ``stage`` where it is enabled."""
        super().capture(self._holding(create_forward_fn), progress_bar_desc)
        self.stage_graphs, self.stage_sources, self._captured = {}, {}, {}
        self._latest = self._latest_sources = None
        if self.nwor.window is None or Mode.STAGE not in self.nwor.state.config.modes:
            return
        descs = [desc for desc in self._capture_descs.get(CUDAGraphMode.FULL, []) if self._stageable(desc)]
        if not descs or self._max_full_descs_to_capture is not None:
            return
        started, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        stock, self.graphs = self.graphs, {}
        stock_descs, self._capture_descs = self._capture_descs, {CUDAGraphMode.FULL: descs}
        try:
            super().capture(self._staging(create_forward_fn), f"{progress_bar_desc} (NWOR stage)")
            self.stage_graphs = self.graphs
        finally:
            self.graphs, self._capture_descs = stock, stock_descs
        for desc, sources in self._captured.items():
            self.stage_sources[desc] = self.nwor.window.captured(sources)
        self.nwor.state.capture_seconds = time.perf_counter() - started
        self.nwor.state.capture_bytes = free - torch.cuda.mem_get_info(self.device)[0]

    def _stageable(self, desc: BatchExecutionDescriptor) -> bool:
        return (
            desc.num_ubatches <= 1
            and desc.num_reqs is not None
            and desc.uniform_token_count is not None
            and 1 < desc.uniform_token_count <= self.nwor.longest_window
        )

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
            window = self.nwor.window
            assert window is not None
            assert desc.num_reqs is not None
            batch = WindowBatch(
                mode=Mode.STAGE,
                num_requests=desc.num_reqs,
                num_tokens=desc.num_tokens,
                query_start_loc=torch.empty(0, dtype=torch.int32, device=self.device),
                slots={},
            )

            def forward(cg_mode: CUDAGraphMode) -> None:
                window.begin(batch)
                try:
                    forward_fn(cg_mode)
                    if not window.staging:
                        raise RuntimeError("verify attention failed while its graph was captured")
                    if not warmup:
                        names = list(window.sources)
                        tensors = [tensor for name in names for tensor in window.sources[name]]
                        weak: list[Any] = weak_ref_tensors(tensors)
                        pairs = zip(weak[::2], weak[1::2], strict=True)
                        self._captured[desc] = dict(zip(names, pairs, strict=True))
                finally:
                    window.abort()

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
        manager.stage_graphs, manager.stage_sources, manager._captured = {}, {}, {}
        manager._latest = manager._latest_sources = None
        return manager

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        """Replay the graph of the open window batch's mode."""
        window = self.nwor.window
        if window is None or not window.staging:
            return super().run_fullgraph(desc)
        # A decode runs the same graph step after step, and a look-up by value costs as much as all else here.
        if desc is not self._latest:
            self._latest, self._latest_sources = desc, self.stage_sources.get(desc)
        sources = self._latest_sources
        assert window.batch is not None
        # The graphs of `stage` write nothing, so they leave nothing for others of the same step to read.
        if sources is None or window.batch.early is not None:
            self.nwor.go_direct("graph")
            return super().run_fullgraph(desc)
        window.adopt(sources)
        stock, self.graphs = self.graphs, self.stage_graphs
        try:
            return super().run_fullgraph(desc)
        finally:
            self.graphs = stock
