"""CUDA graphs of the drafter: of its first pass over a mixed step, and of its further passes by their number.

The first pass of an EAGLE drafter reads every row of the step. vLLM runs it piece by piece where prompts
stand beside verification. Here it replays a graph of the size of the target's (``mixed.py``). Draft layers
write the cache as ever, in every graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorBatchDescriptor,
    SpeculatorCudaGraphManager,
)

from nwor.config import DraftBounds
from nwor.engine.attention.split_step import SplitStep
from nwor.engine.cuda_graphs.mixed import MixedGraphs, other_graphs
from nwor.tree_shape import TreeShape, tree_batch

logger = logging.getLogger("vllm.nwor.draft_graphs")


class NworDraftGraphManager(SpeculatorCudaGraphManager):
    """vLLM's manager of the drafter's first pass, with graphs of mixed steps beside its own."""

    mixed: MixedGraphs
    graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    mixed_graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    _draft_layers: Sequence[Any]

    @classmethod
    def adopt(cls, speculator: Any, mixed: MixedGraphs, draft_layers: Sequence[Any]) -> bool:
        """Turn a drafter's freshly made manager into this class; return whether it could be.

        Args:
            speculator: vLLM's drafter.
            mixed: the target's graphs of mixed steps.
            draft_layers: the drafter's attention layers.

        """
        manager = getattr(speculator, "prefill_cudagraph_manager", None)
        fits = type(manager) is SpeculatorCudaGraphManager and all(
            getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None) == 3
            for layer in draft_layers
        )
        if not fits or not draft_layers:
            logger.info(
                "the drafter's first pass over mixed steps runs piece by piece: its kind is not known"
            )
            return False
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.mixed, manager.mixed_graphs, manager._draft_layers = mixed, {}, draft_layers
        return True

    def capture(self, forward_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Capture vLLM's graphs, then one for each of the target's graphs of mixed steps."""
        super().capture(forward_fn, *args, **kwargs)
        self.mixed_graphs = {}
        descs = [desc for desc in self.mixed.graphs if not desc.num_active_loras]
        if not descs:
            return
        starts = args[1].query_start_loc  # vLLM's input buffers of the target
        kwargs["progress_bar_desc"] = "Capturing prefill CUDA graphs (NWOR mixed)"
        try:
            with other_graphs(self, self.mixed_graphs, descs):
                super().capture(self._splitting(forward_fn, starts), *args, **kwargs)
        except Exception:
            logger.error("A graph of the drafter's pass could not be captured: set mixed_graph_rows to 0")
            raise

    def _splitting(self, forward_fn: Callable[..., Any], starts: torch.Tensor) -> Callable[..., Any]:
        """Have attention scheduled within each graph, for any lengths."""

        def forward(num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            own = starts[: num_reqs + 1]
            split = SplitStep(num_tokens, own[:0], own, {}, None, None)
            with self._attending(split):
                return forward_fn(num_reqs, num_tokens, *args, **kwargs)

        return forward

    @contextmanager
    def _attending(self, split: SplitStep) -> Iterator[None]:
        for layer in self._draft_layers:
            layer.impl.nwor_draft = split
        try:
            yield
        finally:
            for layer in self._draft_layers:
                layer.impl.nwor_draft = None

    def dispatch(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any
    ) -> BatchExecutionDescriptor:
        """Return vLLM's choice; where the target ran in a mixed step's graph, that of the same size."""
        desc = super().dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
        chosen = self.mixed.chosen
        if chosen is None or chosen.num_tokens != num_tokens or chosen not in self.mixed_graphs:
            return desc
        return chosen

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        """Replay a graph, from the set that it is of."""
        if desc is not self.mixed.chosen:
            return super().run_fullgraph(desc)
        stock, self.graphs = self.graphs, self.mixed_graphs
        try:
            return super().run_fullgraph(desc)
        finally:
            self.graphs = stock


class NworDraftPassesManager(SpeculatorCudaGraphManager):
    """vLLM's manager of the drafter's further passes, with graphs of every number that may be chosen.

    vLLM captures them for the numbers in its schedule by batch size, of which a choice has no use.
    """

    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    _numbers: Sequence[int]
    _tree: TreeShape | None

    @classmethod
    def adopt(cls, speculator: Any, bounds: DraftBounds) -> bool:
        """Turn a drafter's freshly made manager into this class; return whether it could be.

        Args:
            speculator: vLLM's drafter.
            bounds: whose candidates may be chosen.

        """
        manager = getattr(speculator, "decode_cudagraph_manager", None)
        if type(manager) is not SpeculatorCudaGraphManager:
            return False
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager._numbers = [number for number in bounds.candidates if number > 1]
        manager._tree = bounds.tree
        return True

    def _fits(self, desc: BatchExecutionDescriptor, number: int, sizes: Sequence[int]) -> bool:
        """Return whether batches of that size may have so many draft tokens: trees are for few requests."""
        if self._tree is None or not self._tree.is_tree(number):
            return True
        largest = tree_batch(self._tree.most_requests(number), sizes)
        return desc.num_reqs is None or desc.num_reqs <= largest

    def capture(self, *args: Any, specialize_spec_tokens: bool = False, **kwargs: Any) -> None:
        """Capture one graph for each size and number; where vLLM captures single passes, those."""
        if specialize_spec_tokens:
            self._capture_descs = {
                mode: [
                    SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=number)
                    for desc in descs
                    for number in sorted(self._numbers, reverse=True)
                    if self._fits(desc, number, [one.num_reqs or 0 for one in descs])
                ]
                for mode, descs in self._capture_descs.items()
            }
        super().capture(*args, **kwargs)
