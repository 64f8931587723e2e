"""CUDA graphs of verify steps on model runner V2: a second set for ``stage``, see :mod:`stage_graphs`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from nwor.engine.cuda_graphs.mixed import MOST_WINDOW_ROWS, MixedGraphs, other_graphs
from nwor.engine.cuda_graphs.stage_graphs import StageGraphs, capture_counted
from nwor.windows.window import WindowKind

if TYPE_CHECKING:
    from nwor.engine.window_manager import WindowManager

logger = logging.getLogger("vllm.nwor.graphs")

ForwardFn = Callable[[CUDAGraphMode], None]
ForwardFactory = Callable[..., ForwardFn]


def stageable(desc: BatchExecutionDescriptor, longest_window: int) -> bool:
    """Return whether a graph's batch may consist of windows, all as long or of any lengths."""
    rows = desc.max_query_len if desc.uniform_token_count is None else desc.uniform_token_count
    return (
        desc.num_ubatches <= 1
        and desc.num_reqs is not None
        and rows is not None
        and 1 < rows <= longest_window
    )


def come_first(
    mixed: Sequence[BatchExecutionDescriptor],
    stock: Mapping[CUDAGraphMode, Sequence[BatchExecutionDescriptor]],
) -> bool:
    """Return whether graphs of mixed steps are to be captured before vLLM's own.

    The first that is captured sizes what all graphs put their results into, so it has to be the largest.
    """
    return mixed[0].num_tokens >= max(
        (desc.num_tokens for descs in stock.values() for desc in descs), default=0
    )


def _require_stock(manager: object) -> None:
    if type(manager) is not ModelCudaGraphManager:
        raise TypeError(f"expected vLLM's ModelCudaGraphManager, found {type(manager).__name__}")


class _CaptureForSize(CudaGraphManager):
    """As below, for a manager whose graphs vLLM captures for their size alone."""

    graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    mixed_descs: list[BatchExecutionDescriptor]
    _kept: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]

    def capture(self, create_forward_fn: ForwardFactory, progress_bar_desc: str = "") -> None:
        """Capture vLLM's graphs and those of mixed steps, all of which vLLM then takes for its own."""
        stock = self._capture_descs

        def capture_mixed() -> None:
            with other_graphs(self, self._kept, self.mixed_descs):
                super(_CaptureForSize, self).capture(create_forward_fn, f"{progress_bar_desc} (NWOR mixed)")

        first = come_first(self.mixed_descs, stock)
        if first:
            capture_mixed()
        super().capture(create_forward_fn, progress_bar_desc)
        if not first:
            capture_mixed()
        full = CUDAGraphMode.FULL
        self._capture_descs = {**stock, full: [*self.mixed_descs, *stock.get(full, [])]}


class ProfiledCudaGraphManager(ModelCudaGraphManager, _CaptureForSize):
    """vLLM's manager while it finds out what graphs take, those of mixed steps among them."""

    @classmethod
    def adopt(cls, manager: ModelCudaGraphManager, mixed_descs: Sequence[BatchExecutionDescriptor]) -> None:
        """Turn vLLM's freshly made manager into this class.

        Args:
            manager: vLLM's.
            mixed_descs: the graphs of mixed steps, the largest first; at least one.

        """
        _require_stock(manager)
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.mixed_descs, manager._kept = list(mixed_descs), {}


class _CaptureBothModes(CudaGraphManager):
    """Stands behind ModelCudaGraphManager in the method order, where the forward functions pass through."""

    nwor: WindowManager
    graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    stage_graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    stage: StageGraphs[BatchExecutionDescriptor]
    mixed: MixedGraphs
    mixed_descs: list[BatchExecutionDescriptor]
    tree_descs: list[BatchExecutionDescriptor]
    _step_inputs: tuple[torch.Tensor, torch.Tensor]

    def capture(self, create_forward_fn: ForwardFactory, progress_bar_desc: str = "") -> None:
        """Capture mixed steps', then vLLM's own graphs, then those of ``stage`` where it is enabled."""
        self.mixed.clear()
        self.nwor.state.capture_seconds = 0.0
        self.nwor.state.capture_bytes = 0
        mixed = bool(self.stage.wanted and self.mixed_descs)
        if self.mixed_descs and not mixed:
            self.nwor.state.mixed_graphs_why_not = "nothing is staged"
        first = mixed and come_first(self.mixed_descs, self._capture_descs)
        if first:
            self._capture_mixed(create_forward_fn, progress_bar_desc)
        super().capture(self._holding(create_forward_fn), progress_bar_desc)
        if mixed and not first:
            self._capture_mixed(create_forward_fn, progress_bar_desc)
        self.stage_graphs = {}
        self.stage.clear()
        if not self.stage.wanted:
            return
        descs = [desc for desc in self._capture_descs.get(CUDAGraphMode.FULL, []) if self._stageable(desc)]
        if mixed and self._chooses_drafts:
            # Graphs of any lengths serve in place of a set for each. Not where ranks share what graphs read:
            # one with a fault has to write, and to replay the same graph as the others.
            if not self.nwor.state.shared_graphs:
                self._capture_windows(create_forward_fn, progress_bar_desc)
                if not self.stage.wanted:
                    return
            descs = [desc for desc in descs if not self.mixed.serves(desc.num_tokens)]
        if not descs or self._max_full_descs_to_capture is not None:
            return
        with self.stage.capture(), other_graphs(self, self.stage_graphs, descs):
            super().capture(self._staging(create_forward_fn), f"{progress_bar_desc} (NWOR stage)")
        self._settle()

    def _settle(self) -> bool:
        """Throw all graphs of NWOR's own away if a layer failed in one; return whether one did."""
        if not self.stage.settle():
            return False
        self.mixed.clear()
        self.stage_graphs = {}
        self.nwor.state.mixed_graphs_why_not = "nothing is staged"
        return True

    @property
    def _chooses_drafts(self) -> bool:
        return self.nwor.state.config.draft_tokens is not None

    def _capture_windows(self, create_forward_fn: ForwardFactory, progress_bar_desc: str) -> None:
        most = min(MOST_WINDOW_ROWS, self.nwor.most_window_rows)
        for graphs, all_descs in self._mixed_sets():
            largest = min(
                (desc.num_tokens for desc in graphs.graphs if desc.num_tokens >= most), default=most
            )
            descs = [desc for desc in all_descs if desc.num_tokens <= largest]
            run = self._wrapped(descs, create_forward_fn, f"{progress_bar_desc} (NWOR windows)")
            with self._counted("A graph of windows"):
                graphs.capture_windows(*self._step_inputs, run)
            if self._settle():
                return

    def _mixed_sets(self) -> list[tuple[MixedGraphs, list[BatchExecutionDescriptor]]]:
        """Return the graphs of mixed steps, those of trees apart, and what each set is to have."""
        sets = [(self.mixed, self.mixed_descs)]
        if self.mixed.of_trees is not None:
            sets.append((self.mixed.of_trees, self.tree_descs))
        return sets

    def _capture_mixed(self, create_forward_fn: ForwardFactory, progress_bar_desc: str) -> None:
        state = self.nwor.state
        for graphs, descs in self._mixed_sets():
            run = self._wrapped(descs, create_forward_fn, f"{progress_bar_desc} (NWOR mixed)")
            with self._counted("A graph of a mixed step"):
                graphs.capture(descs, *self._step_inputs, run)
            if self._settle():
                return
        state.mixed_graphs_why_not = None
        logger.info(
            "%d graphs of mixed steps, up to %d rows, took %.1f s and %.2f GiB",
            sum(len(graphs.graphs) for graphs, _ in self._mixed_sets()),
            state.mixed_graph_rows,
            state.capture_seconds,
            state.capture_bytes / (1 << 30),
        )

    def _wrapped(
        self, descs: Sequence[BatchExecutionDescriptor], create_forward_fn: ForwardFactory, progress: str
    ) -> Callable[[Any], dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]]:
        """Return what captures graphs with forward functions wrapped by what it is given."""

        def run(wrap: Any) -> dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]:
            def create(desc: BatchExecutionDescriptor, warmup: bool) -> ForwardFn:
                return wrap(desc, create_forward_fn(desc, warmup), warmup)

            with other_graphs(self, {}, descs) as graphs:
                super(_CaptureBothModes, self).capture(create, progress)
            return graphs

        return run

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        """Count time and memory of a capture, and say how to do without where it fails."""
        try:
            with capture_counted(self.nwor.state, self.nwor.device):
                yield
        except Exception:
            # Other ranks may have theirs, and vLLM's own capture would go on in the memory of a broken one.
            logger.error("%s could not be captured: set mixed_graph_rows to 0 to do without", what)
            raise

    def _stageable(self, desc: BatchExecutionDescriptor) -> bool:
        return stageable(desc, self.nwor.longest_window)

    def _holding(self, create_forward_fn: ForwardFactory) -> ForwardFactory:
        """Keep the keys and values of a piecewise pass alive until all layers have run."""

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> ForwardFn:
            forward_fn = create_forward_fn(desc, warmup)

            def forward(cg_mode: CUDAGraphMode) -> None:
                window = self.nwor.window
                # No step that is staged replays pieces of a size that a mixed step's graph serves.
                served = self.mixed.serves(desc.num_tokens)
                if cg_mode != CUDAGraphMode.PIECEWISE or window is None or served:
                    forward_fn(cg_mode)
                    return
                with window.keeping_alive():
                    forward_fn(cg_mode)

            return forward

        return create

    def _staging(self, create_forward_fn: ForwardFactory) -> ForwardFactory:
        """Run each pass with an open window, and note where the captured one leaves the window."""

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> ForwardFn:
            forward_fn = create_forward_fn(desc, warmup)
            assert desc.num_reqs is not None
            requests = desc.num_reqs
            longest = desc.max_query_len if desc.uniform_token_count is None else desc.uniform_token_count
            assert longest is not None
            # Trees that were cut are as short as chains.
            kind = WindowKind(longest, trees=self.nwor.state.config.tree is not None)

            def forward(cg_mode: CUDAGraphMode) -> None:
                with self.stage.forward(requests, desc.num_tokens, kind):
                    forward_fn(cg_mode)
                    if not warmup:
                        self.stage.note(desc)

            return forward

        return create


class NworCudaGraphManager(ModelCudaGraphManager, _CaptureBothModes):
    """vLLM's manager with a second set of graphs, chosen at replay."""

    @classmethod
    def adopt(
        cls,
        manager: ModelCudaGraphManager,
        window_manager: WindowManager,
        mixed_descs: Sequence[BatchExecutionDescriptor] = (),
        tree_descs: Sequence[BatchExecutionDescriptor] = (),
    ) -> NworCudaGraphManager:
        """Turn vLLM's freshly made manager into this class; nothing has been captured yet.

        Args:
            manager: vLLM's.
            window_manager: this rank's, its layers bound.
            mixed_descs: the graphs of mixed steps to capture, the largest first.
            tree_descs: those of mixed steps with trees, likewise; the others are then for chains alone.

        """
        _require_stock(manager)
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.nwor = window_manager
        manager.stage_graphs, manager.stage = {}, StageGraphs(window_manager)
        manager.mixed_descs, manager.tree_descs = list(mixed_descs), list(tree_descs)
        chains = WindowKind(window_manager.longest_chain, trees=False) if tree_descs else None
        manager.mixed = window_manager.mixed = MixedGraphs(window_manager, chains)
        if tree_descs:
            trees = WindowKind(window_manager.longest_window, trees=True)
            manager.mixed.of_trees = MixedGraphs(window_manager, trees)
        return manager

    def capture(  # type: ignore[override]
        self,
        model: Any,
        model_state: Any,
        input_buffers: Any,
        tensors: Any,
        block_tables: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Capture all graphs; those of mixed steps read where vLLM puts each step's slots and first rows."""
        self._step_inputs = block_tables.slot_mappings, input_buffers.query_start_loc
        super().capture(model, model_state, input_buffers, tensors, block_tables, *args, **kwargs)  # type: ignore[call-arg]

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> BatchExecutionDescriptor:
        """Return vLLM's choice; in its place a mixed step's graph where that is no graph of decodes alone."""
        self.mixed.chosen = None
        desc = super().dispatch(
            num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len, num_ubatches
        )
        # Those of adaptive verification are of no one length, and of a longest.
        decodes = desc.uniform_token_count is not None or desc.max_query_len is not None
        # Where lengths are chosen, windows of all lengths run in the same graphs; vLLM's serve steps of none.
        own = not decodes or (self._chooses_drafts and uniform_token_count != 1)
        if not own or not self.mixed.graphs:
            return desc
        return self.mixed.choose(num_reqs, num_tokens, desc.num_active_loras) or desc

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        """Replay the graph of the open window batch's mode."""
        if desc is self.mixed.chosen:
            return self._replay(desc, self.mixed.prepare(desc))
        window = self.nwor.window
        if window is None or not window.staging or not self.stage.take(desc):
            return super().run_fullgraph(desc)
        return self._replay(desc, self.stage_graphs)

    def _replay(self, desc: BatchExecutionDescriptor, graphs: Any) -> Any:
        stock, self.graphs = self.graphs, graphs
        try:
            return super().run_fullgraph(desc)
        finally:
            self.graphs = stock
