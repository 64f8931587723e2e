"""CUDA graphs of whole mixed steps in mode ``stage``, on model runner V2 with FlashAttention 3.

vLLM runs a step in which prompts stand beside verification piece by piece: each layer's attention is launched
from Python. Here the whole forward pass is one graph, for any mixture of requests. It reads from the device
how many of its rows are windows (:mod:`nwor.engine.attention.split_step`). With none it is a step of direct
writes: a fall-back replays the same graph, and all ranks of tensor parallelism always replay the same one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from nwor.engine.attention.split_step import SplitStep
from nwor.engine.cuda_graphs.stage_graphs import weak_sources
from nwor.modes import Mode
from nwor.windows.window import CapturedSources, WindowKind

if TYPE_CHECKING:
    from nwor.engine.window_manager import WindowManager
    from nwor.windows.layer_ops import Source

logger = logging.getLogger("vllm.nwor.mixed_graphs")

ForwardFn = Callable[[CUDAGraphMode], None]
ForwardFactory = Callable[..., ForwardFn]

#: Graphs of more rows copy their windows aside: else the memory of all rows' keys and values, layer by layer,
#: would stay taken for them.
MOST_KEPT_ROWS = 512
#: Graphs of windows alone have at most as many rows; larger steps of windows run in graphs of mixed steps, in
#: which an attention without rows is launched in each layer.
MOST_WINDOW_ROWS = 1024
#: Slot of a row that is not written.
NO_SLOT = -1


def why_not(vllm_config: Any, layers: Mapping[str, Any], takes_embeddings: bool) -> str | None:
    """Return why mixed steps of this engine cannot run in one graph; None where they can.

    Args:
        vllm_config: the engine's configuration.
        layers: the target's attention layers by name.
        takes_embeddings: whether the model is given embeddings in place of token ids.

    """
    compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
    if compilation.cudagraph_mode is None or not compilation.cudagraph_mode.has_full_cudagraphs():
        return "full CUDA graphs are off"
    if parallel.data_parallel_size > 1:
        return "data-parallel ranks agree on vLLM's own graphs"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline stages hold windows back, and would copy them twice"
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        return "kv_sharing_fast_prefill is on"
    if takes_embeddings:
        return "the model takes embeddings"
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        if getattr(impl, "vllm_flash_attn_version", None) != 3:
            return f"layer {name} does not run in FlashAttention 3"
        # vLLM keeps its own schedule of a whole step beside ours.
        if not issubclass(layer.get_attn_backend().get_builder_cls(), FlashAttentionMetadataBuilder):
            return f"layer {name} has another builder than FlashAttention's"
    return None


@contextmanager
def other_graphs(
    manager: Any,
    graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph],
    descs: Sequence[BatchExecutionDescriptor],
) -> Iterator[dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]]:
    """Have one of vLLM's graph managers capture other full graphs than its own within this block.

    Args:
        manager: vLLM's.
        graphs: what it adds the graphs to.
        descs: the graphs to capture.

    """
    stock = manager.graphs, manager._capture_descs
    manager.graphs, manager._capture_descs = graphs, {CUDAGraphMode.FULL: descs}
    try:
        yield graphs
    finally:
        manager.graphs, manager._capture_descs = stock


class MixedGraphs:
    """The graphs of one rank, and the choice among them.

    Args:
        window_manager: this rank's, its layers bound.
        kind: the windows that they are for; None for all of the engine's.

    Attributes:
        kind: likewise.
        of_trees: the graphs of steps in which a window may be a tree; None where these are of all steps.
        verifies_trees: whether a window of the step that is being prepared may be a tree.
        next_drafts: draft tokens that the step will make for each request; None for the engine's number.
        graphs: by descriptor; none before they are captured.
        window_graphs: by the same descriptors, graphs of steps that consist of windows alone, of any lengths.
        chosen: the graph of the step that is being prepared; None where vLLM's own choice stands.

    """

    def __init__(self, window_manager: WindowManager, kind: WindowKind | None = None) -> None:
        self._window_manager = window_manager
        self.kind = kind
        self.of_trees: MixedGraphs | None = None
        self.verifies_trees = False
        self.next_drafts: int | None = None
        self.graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph] = {}
        self.chosen: BatchExecutionDescriptor | None = None
        self._by_loras: dict[int, list[BatchExecutionDescriptor]] = {}
        self._sources: dict[BatchExecutionDescriptor, CapturedSources] = {}
        self.window_graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph] = {}
        self._window_sources: dict[BatchExecutionDescriptor, CapturedSources] = {}
        self._chosen_rows = 0
        self._aside: dict[str, Source] = {}
        self._rows = torch.zeros(1, dtype=torch.int32, device=window_manager.device)
        self._rows_value = 0
        self._early: torch.Tensor | None = None
        self._early_set = False
        self._places: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def longest(self) -> int | None:
        """Rows of the longest window that the chosen graph is for; None where it is any of the engine's."""
        if self.chosen is None:
            return None
        trees = self.of_trees
        kind = trees.kind if trees is not None and self.chosen is trees.chosen else self.kind
        return None if kind is None else kind.longest

    def copies(self, desc: BatchExecutionDescriptor) -> bool:
        """Return whether a graph copies its windows aside."""
        return desc.num_tokens > MOST_KEPT_ROWS

    def serves(self, rows: int) -> bool:
        """Return whether every step of up to so many rows that is staged runs in one of these graphs."""
        alike = self.of_trees is None or self.of_trees.serves(rows)
        return alike and any(desc.num_tokens >= rows for desc in self.graphs)

    def capture(
        self,
        descs: Sequence[BatchExecutionDescriptor],
        slots: torch.Tensor,
        starts: torch.Tensor,
        run: Callable[[Callable[[BatchExecutionDescriptor, ForwardFn, bool], ForwardFn]], Any],
    ) -> None:
        """Capture the graphs.

        Args:
            descs: which.
            slots: int64 [slot keys, most rows]: vLLM's own slot mappings, which each step fills.
            starts: int32 [at least most requests + 1]: vLLM's own ``query_start_loc``, likewise.
            run: captures with forward functions that are wrapped by what it is given, and returns the graphs
                by descriptor.

        """
        window_manager, most = self._window_manager, max(desc.num_tokens for desc in descs)
        self._early = torch.full(
            (slots.shape[0], most), NO_SLOT, dtype=torch.int64, device=window_manager.device
        )
        self._places = torch.arange(most, dtype=torch.int32, device=window_manager.device)
        self._stream = (
            torch.cuda.Stream(window_manager.device) if window_manager.device.type == "cuda" else None
        )
        self._rows.zero_()
        self._rows_value, self._early_set = 0, False
        window = window_manager.window
        assert window is not None
        if any(map(self.copies, descs)) and not self._aside:
            self._aside = window.room(min(window_manager.most_window_rows, most))
        if self.of_trees is not None:
            self.of_trees._aside = self._aside  # a step runs in one of the two

        noted: dict[BatchExecutionDescriptor, dict[str, Source]] = {}
        self.graphs = run(self._noting(noted, slots, starts))
        self._sources = window_manager.capture_errors.captured(noted)
        by_loras: dict[int, list[BatchExecutionDescriptor]] = {}
        for desc in sorted(self.graphs, key=lambda desc: (desc.num_tokens, desc.num_reqs)):
            by_loras.setdefault(desc.num_active_loras, []).append(desc)
        self._by_loras = by_loras
        window_manager.state.mixed_graph_rows = most

    def capture_windows(
        self,
        slots: torch.Tensor,
        starts: torch.Tensor,
        run: Callable[[Callable[[BatchExecutionDescriptor, ForwardFn, bool], ForwardFn]], Any],
    ) -> None:
        """Capture graphs of steps that consist of windows alone, once the others are captured.

        Args:
            slots: as for :meth:`capture`.
            starts: likewise.
            run: likewise.

        """
        noted: dict[BatchExecutionDescriptor, dict[str, Source]] = {}
        self.window_graphs = run(self._noting(noted, slots, starts, windows_only=True))
        self._window_sources = self._window_manager.capture_errors.captured(noted)

    def _noting(
        self,
        noted: dict[BatchExecutionDescriptor, dict[str, Source]],
        slots: torch.Tensor,
        starts: torch.Tensor,
        windows_only: bool = False,
    ) -> Callable[[BatchExecutionDescriptor, ForwardFn, bool], ForwardFn]:
        """Return what wraps forward functions; it notes where each captured pass leaves its windows."""

        def wrap(desc: BatchExecutionDescriptor, forward_fn: ForwardFn, warmup: bool) -> ForwardFn:
            def forward(cg_mode: CUDAGraphMode) -> None:
                with self._open(desc, slots, starts, windows_only) as split:
                    forward_fn(cg_mode)
                    if not warmup:
                        noted[desc] = weak_sources(split.sources)

            return forward

        return wrap

    @contextmanager
    def _open(
        self,
        desc: BatchExecutionDescriptor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        windows_only: bool = False,
    ) -> Iterator[SplitStep]:
        """Derive the two parts from the number of window rows, on the device, and let layers see them."""
        window = self._window_manager.window
        assert window is not None
        assert desc.num_reqs is not None
        assert self._early is not None
        assert self._places is not None
        rows, tokens = self._rows, desc.num_tokens
        starts = starts[: desc.num_reqs + 1]
        if windows_only:
            aside = self._aside if self.copies(desc) else None
            # Requests that pad the batch are empty.
            own_starts = torch.minimum(starts, rows)
            split = SplitStep(tokens, own_starts, starts[:0], {}, aside, None, windows_only=True)
            with self._showing(split):
                yield split
            return
        own = torch.where(self._places[:tokens] < rows, self._early[:, :tokens], slots[:, :tokens])
        split = SplitStep(
            num_tokens=tokens,
            window_starts=torch.minimum(starts, rows),
            rest_starts=torch.maximum(starts, rows),
            slots={name: own[key] for name, key in window.slot_keys.items()},
            aside=self._aside if self.copies(desc) else None,
            stream=self._stream,
        )
        with self._showing(split):
            yield split

    @contextmanager
    def _showing(self, split: SplitStep) -> Iterator[None]:
        window = self._window_manager.window
        assert window is not None
        window.shared.clear()
        if self._window_manager.capture_errors.found:  # a stock pass
            yield
            return
        window.split, window.kind = split, self.kind
        try:
            with self._window_manager.capture_errors.noting():
                yield
        finally:
            window.split = window.kind = None

    def choose(self, num_reqs: int, num_tokens: int, loras: int) -> BatchExecutionDescriptor | None:
        """Return the graph for a step that is to be staged; None where there is none.

        Args:
            num_reqs: requests of the step.
            num_tokens: its rows.
            loras: the number of active adapters, as graphs are captured for.

        """
        self.chosen = None
        if self.of_trees is not None:
            self.of_trees.chosen = None
            if self.verifies_trees:
                self.chosen = self.of_trees.choose(num_reqs, num_tokens, loras)
                return self.chosen
        if self._window_manager.window is not None and self._window_manager.state.graphs_mode is Mode.STAGE:
            for desc in self._by_loras.get(loras, ()):
                assert desc.num_reqs is not None
                if desc.num_tokens >= num_tokens and desc.num_reqs >= num_reqs:
                    self.chosen, self._chosen_rows = desc, num_tokens
                    break
        return self.chosen

    def prepare(self, desc: BatchExecutionDescriptor) -> dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]:
        """Tell the graph that is about to be replayed where the open window batch ends.

        Returns:
            The set that holds the graph: that of windows alone where the step has no other rows.

        """
        if self.of_trees is not None and desc is self.of_trees.chosen:
            return self.of_trees.prepare(desc)
        window_manager, rows = self._window_manager, 0
        window = window_manager.window
        batch = window.batch if window is not None and window.staging else None
        graphs = self.graphs
        if window is not None and batch is not None:
            alone = (
                batch.num_tokens == self._chosen_rows and batch.early is None and desc in self.window_graphs
            )
            try:
                window.adopt((self._window_sources if alone else self._sources)[desc])
                rows = batch.num_tokens
                if alone:
                    graphs = self.window_graphs
                else:
                    self._set_early(batch.early, rows)
            except Exception as error:
                rows = 0
                window_manager.state.fail("graph", error)
                window_manager.go_direct("fault")
        if rows != self._rows_value:
            self._rows.fill_(rows)
            self._rows_value = rows
        if graphs is self.graphs:
            window_manager.state.mixed_graph_steps += 1
        return graphs

    def _set_early(self, early: Mapping[int, torch.Tensor] | None, rows: int) -> None:
        """Have rows of the windows written as layers run; ``early`` is by slot key, int64 [rows]."""
        assert self._early is not None
        if self._early_set:
            self._early.fill_(NO_SLOT)
            self._early_set = False
        if early is not None:
            self._early_set = True
            for key, slots in early.items():
                self._early[key, :rows].copy_(slots)

    def clear(self) -> None:
        """Forget all graphs."""
        self.graphs, self._sources, self._by_loras = {}, {}, {}
        self.window_graphs, self._window_sources = {}, {}
        self.chosen = None
        self._aside, self._early, self._places = {}, None, None
        if self.of_trees is not None:
            self.of_trees.clear()
        self._window_manager.state.mixed_graph_rows = 0
