"""The kernels of trees that grow level by level (EAGLE-2): what is expanded next, and which nodes are kept.

A request's candidates stand in the order in which they are found: ``width`` of the first level, then
``width`` continuations of each of the ``width`` nodes that the next level expands.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from nwor.engine.trees.kernels import NO_PARENT, next_power_of_two
from nwor.engine.trees.top_tokens import ordered_key, place_of
from nwor.tree_shape import TreeShape


@triton.jit  # type: ignore[untyped-decorator]
def expand_kernel(  # type: ignore[no-untyped-def]
    # int64, float32 [rows, WIDTH]: continuations of each expanded node
    tokens_ptr,
    logprobs_ptr,
    # int32, float32, int64 [requests, WIDTH]: the nodes that were expanded, and those to be expanded next
    node_ptr,
    score_ptr,
    mask_ptr,
    next_node_ptr,
    next_score_ptr,
    next_mask_ptr,
    # int64, float32, int32 [requests, candidates]
    found_token_ptr,
    found_score_ptr,
    found_parent_ptr,
    candidates,
    # int64 [requests]: positions of the first level
    first_position_ptr,
    longest,
    # int32, int64, int64 [requests * WIDTH], int64 [requests, WINDOW]
    ids_ptr,
    positions_ptr,
    source_ptr,
    row_masks_ptr,
    offset,
    level,
    FIRST: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803  rows of the drafter's window, all levels together
    PLACES: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    parents: tl.constexpr = 1 if FIRST else WIDTH
    real = place < parents * WIDTH
    parent = place // WIDTH
    token = tl.load(tokens_ptr + request * parents * WIDTH + place, mask=real, other=0)
    own = tl.load(logprobs_ptr + request * parents * WIDTH + place, mask=real, other=-float("inf"))
    own = tl.where(own == own, own, -float("inf"))
    if FIRST:
        score = own
        above = tl.full([PLACES], NO_PARENT, dtype=tl.int32)
        # Rows of later levels see themselves alone until they are there.
        row = tl.arange(0, ROWS)
        one = tl.full([ROWS], 1, dtype=tl.int64)
        tl.store(row_masks_ptr + request * WINDOW + row, one << row.to(tl.int64), mask=row < WINDOW)
        tl.debug_barrier()
    else:
        score = tl.load(score_ptr + request * WIDTH + parent, mask=real, other=0.0) + own
        above = tl.load(node_ptr + request * WIDTH + parent, mask=real, other=NO_PARENT)
    out = request * candidates + offset + place
    tl.store(found_token_ptr + out, token, mask=real)
    tl.store(found_score_ptr + out, score, mask=real)
    tl.store(found_parent_ptr + out, above, mask=real)

    position = tl.minimum(tl.load(first_position_ptr + request) + level, longest - 1)
    smallest: tl.constexpr = -0x7FFFFFFFFFFFFFFF
    key = tl.where(real, ordered_key(score, place), smallest)
    for i in range(WIDTH):
        chosen = place_of(tl.max(key, axis=0))
        key = tl.where(place == chosen, smallest, key)
        here = request * WIDTH + i
        tl.store(next_node_ptr + here, offset + chosen)
        tl.store(next_score_ptr + here, tl.max(tl.where(place == chosen, score, -float("inf")), axis=0))
        tl.store(ids_ptr + here, tl.max(tl.where(place == chosen, token, 0), axis=0).to(tl.int32))
        tl.store(positions_ptr + here, position)
        # The drafter's window has a place for each node that is expanded, by level.
        bit = tl.full([], 1, dtype=tl.int64) << (tl.full([], 0, dtype=tl.int64) + level * WIDTH + i)
        if FIRST:
            tl.store(source_ptr + here, request)
            sees = bit
        else:
            tl.store(source_ptr + here, request * WIDTH + (chosen // WIDTH).to(tl.int64))
            sees = tl.load(mask_ptr + request * WIDTH + chosen // WIDTH) | bit
        tl.store(next_mask_ptr + here, sees)
        if level * WIDTH + i < WINDOW:  # the last level is not expanded
            tl.store(row_masks_ptr + request * WINDOW + level * WIDTH + i, sees)


@triton.jit  # type: ignore[untyped-decorator]
def select_kernel(  # type: ignore[no-untyped-def]
    # int64, float32, int32 [requests, candidates]
    found_token_ptr,
    found_score_ptr,
    found_parent_ptr,
    # [requests], uint8 [max_num_reqs]
    slots_ptr,
    linear_ptr,
    # int64 [requests, nodes]
    draft_tokens_ptr,
    draft_tokens_stride,
    # int8, int8, int64 [max_num_reqs, nodes + 1], uint8 [max_num_reqs]
    parent_ptr,
    depth_ptr,
    mask_ptr,
    chain_ptr,
    nodes,
    kept,
    candidates,
    # of these, those that were found for this batch
    found,
    # float32 [1]: whether, unless 0, all windows have to be chains
    refusing_ptr,
    WIDTH: tl.constexpr,  # noqa: N803
    PLACES: tl.constexpr,  # noqa: N803
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    linear = (tl.load(linear_ptr + slot) != 0) | (tl.load(refusing_ptr) != 0)
    place = tl.arange(0, PLACES)
    real = place < found
    score = tl.load(found_score_ptr + request * candidates + place, mask=real, other=-float("inf"))
    above = tl.load(found_parent_ptr + request * candidates + place, mask=real, other=NO_PARENT)
    smallest: tl.constexpr = -0x7FFFFFFFFFFFFFFF
    key = tl.where(real, ordered_key(score, place), smallest)
    # Of nodes that are kept: the row, and the rows on the way to it.
    row_of = tl.zeros([PLACES], dtype=tl.int32)
    mask_of = tl.zeros([PLACES], dtype=tl.int64)
    table = slot * (nodes + 1)
    last = tl.full([], NO_PARENT, dtype=tl.int32)
    on_chain = linear
    for row in range(1, kept + 1):
        # Of a tree the likeliest that is left, of a chain the likeliest continuation of what came before.
        eligible = tl.where(on_chain, tl.where(above == last, key, smallest), key)
        best = tl.max(eligible, axis=0)
        # Behind the end of a chain stands what no walk enters.
        ended = on_chain & (best == smallest)
        on_chain = on_chain & (best != smallest)
        best = tl.where(ended, tl.max(key, axis=0), best)
        chosen = place_of(best)
        key = tl.where(place == chosen, smallest, key)
        token = tl.load(found_token_ptr + request * candidates + chosen)
        node_above = tl.load(found_parent_ptr + request * candidates + chosen)
        from_row = tl.max(tl.where((place == node_above) & (node_above >= 0), row_of, 0), axis=0)
        from_mask = tl.max(tl.where((place == node_above) & (node_above >= 0), mask_of, 0), axis=0)
        # Bit 63 makes a mask negative; no node has a continuation that is kept behind row 63.
        one = tl.full([], 1, dtype=tl.int64)
        bit = one << tl.full([], 0, dtype=tl.int64) + row
        sees = tl.where(node_above >= 0, from_mask, one) | bit
        depth = tl.where(chosen < WIDTH, 1, 2 + (chosen - WIDTH) // (WIDTH * WIDTH))
        causal = ((bit - 1) << 1) | 1
        parent = tl.where(linear, tl.where(on_chain, row - 1, NO_PARENT), from_row)
        tl.store(draft_tokens_ptr + request * draft_tokens_stride + row - 1, token)
        tl.store(parent_ptr + table + row, parent.to(tl.int8))
        tl.store(depth_ptr + table + row, tl.where(linear, row, depth).to(tl.int8))
        tl.store(mask_ptr + table + row, tl.where(linear, causal, sees))
        row_of = tl.where(place == chosen, row, row_of)
        mask_of = tl.where(place == chosen, sees, mask_of)
        last = chosen
    tl.store(chain_ptr + slot, linear.to(tl.uint8))


class Candidates:
    """What the drafter's passes have found for each request of a batch.

    Args:
        shape: the trees.
        max_num_reqs: most requests of a batch.
        device: where it lies.

    Attributes:
        tokens: int64 [max_num_reqs * width, width], continuations of the rows of the latest pass.
        logprobs: float32, likewise.
        ids: int32 [max_num_reqs * width]: token ids of the next pass's rows. Code that was compiled for
            vLLM's own inputs reads them, and no guard would notice another dtype.
        positions: int64, likewise.
        sources: int64, likewise: the row of the latest pass that each continues.
        row_masks: int64 [max_num_reqs, window]: what each row of the drafter's window sees.
        window: rows of it: those of all passes behind the first.

    """

    def __init__(self, shape: TreeShape, max_num_reqs: int, device: torch.device) -> None:
        self.shape = shape
        width = shape.width
        self.window = (shape.depth - 1) * width
        self.count = shape.candidates

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.tokens = zeros(max_num_reqs * width, width)
        self.logprobs = zeros(max_num_reqs * width, width, dtype=torch.float32)
        self.ids = zeros(max_num_reqs * width, dtype=torch.int32)
        self.positions, self.sources = (zeros(max_num_reqs * width) for _ in range(2))
        self.row_masks = zeros(max_num_reqs, max(self.window, 1))
        self._found_tokens = zeros(max_num_reqs, self.count)
        self._found_scores = zeros(max_num_reqs, self.count, dtype=torch.float32)
        self._found_parents = zeros(max_num_reqs, self.count, dtype=torch.int32)
        # Expanded nodes and those to be expanded next take turns.
        self._nodes = zeros(2, max_num_reqs, width, dtype=torch.int32)
        self._scores = zeros(2, max_num_reqs, width, dtype=torch.float32)
        self._masks = zeros(2, max_num_reqs, width)

    def expand(self, requests: int, level: int, first_positions: torch.Tensor, longest: int) -> None:
        """Take the continuations of a pass in and choose the rows of the next.

        Args:
            requests: of the batch.
            level: the next pass, 0 for the one behind the drafter's first.
            first_positions: int64 [at least requests]: positions of nodes of depth 1.
            longest: positions are less.

        """
        width, now, then = self.shape.width, level % 2, (level + 1) % 2
        offset = 0 if level == 0 else width + (level - 1) * width * width
        expand_kernel[(requests,)](
            self.tokens,
            self.logprobs,
            self._nodes[now],
            self._scores[now],
            self._masks[now],
            self._nodes[then],
            self._scores[then],
            self._masks[then],
            self._found_tokens,
            self._found_scores,
            self._found_parents,
            self.count,
            first_positions,
            longest,
            self.ids,
            self.positions,
            self.sources,
            self.row_masks,
            offset,
            level,
            FIRST=level == 0,
            WIDTH=width,
            WINDOW=self.window,
            PLACES=next_power_of_two(width if level == 0 else width * width),
            ROWS=next_power_of_two(max(self.window, 1)),
            num_warps=1,
        )

    def select(
        self,
        slots: torch.Tensor,
        linear: torch.Tensor,
        draft_tokens: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        refusing: torch.Tensor,
        kept: int | None = None,
    ) -> None:
        """Keep the likeliest nodes of each request.

        Args:
            slots: [requests].
            linear: uint8 [max_num_reqs]: whose windows have to be chains.
            draft_tokens: int64 [at least requests, nodes], written.
            tables: parents, depths, masks and chains by slot, written.
            refusing: float32 [at least 1]: all windows have to be chains, unless it is 0.
            kept: how many nodes, of trees as deep as these are; None for those of the shape.

        """
        parents, depths, masks, chains = tables
        kept = self.shape.nodes if kept is None else kept
        select_kernel[(len(slots),)](
            self._found_tokens,
            self._found_scores,
            self._found_parents,
            slots,
            linear,
            draft_tokens,
            draft_tokens.stride(0),
            parents,
            depths,
            masks,
            chains,
            self.shape.nodes,
            kept,
            self.count,
            self.shape.candidates_of(self.shape.depth_of(kept)),
            refusing,
            WIDTH=self.shape.width,
            PLACES=next_power_of_two(self.count),
            num_warps=1,
        )
