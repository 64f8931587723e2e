"""CUDA graphs of the drafter: of its first pass over a mixed step, and of its further passes by their number.

The first pass of an EAGLE drafter reads every row of the step. vLLM runs it piece by piece where prompts
stand beside verification. Here it replays a graph of the size of the target's (``mixed.py``), and then one by
the number of requests. Of few rows the first runs the model. Of many it ends with the last layer's keys and
values, and the second runs the model for last rows (:mod:`nwor.engine.fastpath.first_pass`). Draft layers
write the cache as ever, in every graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorBatchDescriptor,
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

from nwor.config import DraftBounds
from nwor.engine.attention.draft_pass import RowsPass, attending
from nwor.engine.attention.split_step import SplitStep
from nwor.engine.cuda_graphs.mixed import MixedGraphs, other_graphs
from nwor.engine.fastpath.first_pass import LEAST_ROWS, FirstPass
from nwor.tree_shape import TreeShape, tree_batch

logger = logging.getLogger("vllm.nwor.draft_graphs")

#: Requests of the graphs of what the first pass does for each. With more of them launches cost little.
REQUESTS = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))


def request_sizes(most: int) -> list[int]:
    """Return the requests of each graph by requests, the largest first, for batches of at most ``most``."""
    return sorted({min(count, most) for count in REQUESTS}, reverse=True)


class NworDraftGraphManager(SpeculatorCudaGraphManager):
    """vLLM's manager of the drafter's first pass, with graphs of mixed steps beside its own.

    Such a graph takes as many requests as there may be in so many rows. What the pass does for each request,
    most of all the product with the head's weights, would be done for all of those. So it is in graphs of its
    own, by the number of requests, and the graphs by rows end with the last layer.

    Attributes:
        mixed: the target's graphs of mixed steps.
        mixed_graphs: by rows, the model.
        request_graphs: by requests, what is done behind it.
        written_graphs: by rows, the model up to its last layer's keys and values.
        last_row_graphs: by requests, the model for last rows, and what is done behind it.

    """

    mixed: MixedGraphs
    graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    mixed_graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    request_graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    written_graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    last_row_graphs: dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]
    _first_pass: FirstPass | None
    _by_rows: dict[int, BatchExecutionDescriptor]
    _chosen: BatchExecutionDescriptor | None
    _requests: int
    _states: tuple[torch.Tensor, torch.Tensor] | None
    _speculator: Any
    _draft_layers: Sequence[Any]

    @classmethod
    def adopt(
        cls,
        speculator: Any,
        mixed: MixedGraphs,
        draft_layers: Sequence[Any],
        first_pass: FirstPass | None = None,
    ) -> bool:
        """Turn a drafter's freshly made manager into this class; return whether it could be.

        Args:
            speculator: vLLM's drafter.
            mixed: the target's graphs of mixed steps.
            draft_layers: the drafter's attention layers.
            first_pass: the drafter's first pass in two parts; None where it stays one.

        """
        manager = getattr(speculator, "prefill_cudagraph_manager", None)
        fits = (
            type(manager) is SpeculatorCudaGraphManager
            and getattr(type(speculator), "_prefill", None) is TargetDependentARSpeculator._prefill
            and all(
                getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None) == 3
                for layer in draft_layers
            )
        )
        if not fits or not draft_layers:
            logger.info(
                "the drafter's first pass over mixed steps runs piece by piece: its kind is not known"
            )
            return False
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.mixed, manager._speculator, manager._draft_layers = mixed, speculator, draft_layers
        manager._first_pass = first_pass
        if first_pass is not None:
            first_pass.replay_last_rows = manager._replay_last_rows
        manager._forget()
        return True

    def _forget(self) -> None:
        self.mixed_graphs, self.request_graphs, self._by_rows = {}, {}, {}
        self.written_graphs, self.last_row_graphs = {}, {}
        self._chosen, self._requests, self._states = None, 0, None

    def capture(self, forward_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Capture vLLM's graphs, then one for each of the target's graphs of mixed steps."""
        super().capture(forward_fn, *args, **kwargs)
        self._forget()
        by_rows: dict[int, BatchExecutionDescriptor] = {}
        for desc in self.mixed.graphs:  # the largest first; of equal rows the one that takes most requests
            known = by_rows.get(desc.num_tokens, desc)
            if not desc.num_active_loras and (desc.num_reqs or 0) >= (known.num_reqs or 0):
                by_rows[desc.num_tokens] = desc
        if not by_rows:
            return
        starts = args[1].query_start_loc  # vLLM's input buffers of the target
        kwargs["progress_bar_desc"] = "Capturing prefill CUDA graphs (NWOR mixed)"
        whole = [desc for desc in by_rows.values() if not self._in_parts(desc)]
        sets: list[tuple[dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph], list[Any], Any]] = []
        first_pass = self._first_pass
        if whole:
            most = max(desc.num_tokens for desc in whole) if first_pass is not None else self.max_num_reqs
            stock = forward_fn if first_pass is None else first_pass.stock
            sets.append((self.mixed_graphs, whole, self._rows_alone(starts)))
            sets.append((self.request_graphs, self._by_requests(most), self._requests_alone(stock)))
        if first_pass is not None:
            sets.append((self.written_graphs, list(by_rows.values()), self._written))
            sets.append((self.last_row_graphs, self._by_requests(self.max_num_reqs), first_pass.last_rows))
        try:
            for graphs, descs, forward in sets:
                with other_graphs(self, graphs, descs):
                    super().capture(forward, *args, **kwargs)
        except Exception:
            logger.error(
                "A graph of the drafter's pass could not be captured: set fast_drafting to false, or "
                "mixed_graph_rows to 0"
            )
            raise
        self._by_rows = by_rows

    def _in_parts(self, desc: BatchExecutionDescriptor) -> bool:
        return self._first_pass is not None and desc.num_tokens >= LEAST_ROWS

    def _by_requests(self, most: int) -> list[BatchExecutionDescriptor]:
        return [
            BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=count, num_reqs=count)
            for count in request_sizes(min(most, self.max_num_reqs))
        ]

    def _written(self, num_reqs: int, *args: Any) -> None:
        """Run the model up to its last layer's keys and values: no attention, so of any requests."""
        assert self._first_pass is not None
        self._first_pass.rows(*args)

    def _rows_alone(self, starts: torch.Tensor) -> Callable[..., Any]:
        """Run the model alone, and have attention scheduled within each graph, for any lengths."""

        def forward(
            num_reqs: int,
            num_tokens: int,
            attn_metadata: Any,
            slot_mappings: Any,
            num_tokens_across_dp: Any,
            cg_mode: CUDAGraphMode,
        ) -> None:
            own = starts[: num_reqs + 1]
            split = SplitStep(num_tokens, own[:0], own, {}, None, None)
            with attending(self._draft_layers, RowsPass(split=split)):
                states = self._speculator._run_model(
                    num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, cg_mode
                )
            self._keep(*states)

        return forward

    def _keep(self, last: torch.Tensor, fed_back: torch.Tensor) -> None:
        """Keep the hidden states of all rows where the graphs by requests read them."""
        if self._states is None:  # The largest graph is captured first, and before it a pass warms up.
            kept = torch.empty_like(last)
            self._states = kept, kept if fed_back is last else torch.empty_like(fed_back)
        for state, own in zip((last, fed_back), self._states, strict=True):
            own[: len(state)].copy_(state)
            if fed_back is last:
                break

    def _requests_alone(self, forward_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Run all of the pass but the model, which has left its hidden states."""

        def forward(*args: Any) -> Any:
            speculator = self._speculator
            speculator._run_model = lambda *_, **__: self._states
            try:
                return forward_fn(*args)
            finally:
                del speculator._run_model

        return forward

    def dispatch(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any
    ) -> BatchExecutionDescriptor:
        """Return vLLM's choice; where the target ran in a mixed step's graph, that of the same size.

        A step that makes no drafts has a graph by its rows, whatever the target ran in.
        """
        self._chosen = None
        desc = super().dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
        own = self._own(num_reqs, num_tokens)
        if own is None:
            return desc
        self._chosen, self._requests = own, num_reqs
        return own

    def _own(self, num_reqs: int, num_tokens: int) -> BatchExecutionDescriptor | None:
        if self._drafts_nothing and self.written_graphs:
            # No attention is in these, so requests do not count. Of rows behind the step's vLLM's slots say
            # that none is written.
            sizes = [size for size in self._by_rows if size >= num_tokens]
            return self._by_rows[min(sizes)] if sizes else None
        target = self.mixed.chosen
        if target is None or target.num_tokens != num_tokens or target.num_active_loras:
            return None
        own = self._by_rows.get(num_tokens)
        if own is not None and self._in_parts(own) and self._last_rows(num_reqs) is None:
            return None  # piece by piece, with the step's metadata
        return own

    @property
    def _drafts_nothing(self) -> bool:
        return self.mixed.next_drafts == 0

    def _last_rows(self, num_reqs: int) -> BatchExecutionDescriptor | None:
        return next((desc for desc in reversed(self.last_row_graphs) if desc.num_tokens >= num_reqs), None)

    def _replay_last_rows(self, num_reqs: int) -> bool:
        """Replay the smallest graph of the second part that takes so many requests; return whether one does.

        What it reads lies where vLLM puts that of each step: last rows, lengths, block tables.
        """
        desc = self._last_rows(num_reqs)
        if desc is not None:
            self._replay(desc, self.last_row_graphs)
        return desc is not None

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        """Replay a graph, from the set that it is of."""
        if self._chosen is None or desc is not self._chosen:
            return super().run_fullgraph(desc)
        requests = self._requests
        if self.written_graphs and (self._drafts_nothing or self._in_parts(desc)):
            self._replay(desc, self.written_graphs)
            if self._drafts_nothing:
                return None  # the pass has written the drafter's cache, and nobody reads its tokens
            replayed = self._replay_last_rows(requests)
            assert replayed
            return None
        self._replay(desc, self.mixed_graphs)
        if self._drafts_nothing:
            return None
        for tail in reversed(self.request_graphs):
            if tail.num_tokens >= requests:
                return self._replay(tail, self.request_graphs)
        prefill = self._speculator._prefill
        return self._requests_alone(prefill)(requests, desc.num_tokens, None, None, None)

    def _replay(self, desc: BatchExecutionDescriptor, graphs: Any) -> Any:
        stock, self.graphs = self.graphs, graphs
        try:
            return super().run_fullgraph(desc)
        finally:
            self.graphs = stock


def graph_numbers(bounds: DraftBounds) -> list[int]:
    """Return the numbers of draft tokens that the drafter's further passes have graphs for, ascending.

    Chains as long as a tree is deep are among them: more requests than may have trees have those.
    """
    longest = () if bounds.tree is None else (bounds.tree.depth,)
    return sorted({_captured_as(bounds.tree, n) for n in (*bounds.candidates, *longest) if n > 1})


def _captured_as(tree: TreeShape | None, number: int) -> int:
    """Return the least number of draft tokens with the same passes: that for the most requests."""
    return number if tree is None or not tree.is_tree(number) else tree.least_as_deep(number)


class NworDraftPassesManager(SpeculatorCudaGraphManager):
    """vLLM's manager of the drafter's further passes, with graphs of every number that may be chosen.

    vLLM captures them for the numbers in its schedule by batch size, of which a choice has no use. Trees that
    are equally deep have the same passes, whatever nodes are kept of them, and so one graph.
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
        manager._tree, manager._numbers = bounds.tree, graph_numbers(bounds)
        return True

    def specialize_spec_tokens(
        self, desc: BatchExecutionDescriptor, num_speculative_tokens: int
    ) -> BatchExecutionDescriptor:
        """Return the graph of so many draft tokens."""
        return super().specialize_spec_tokens(desc, _captured_as(self._tree, num_speculative_tokens))

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
