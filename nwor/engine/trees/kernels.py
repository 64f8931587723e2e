"""The kernels of trees: ranking nodes, placing them in a step, walking them. Each is one launch for a batch.

A window's row 0 is the last token that is certain. Rows behind it are nodes, the likeliest first, so that
parents come before their children and any number of leading rows is a tree.
"""

from __future__ import annotations

from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import tl_rand32

#: Parent of a row that no walk may enter.
NO_PARENT = tl.constexpr(-1)


@triton.jit  # type: ignore[untyped-decorator]
def build_comb_kernel(  # type: ignore[no-untyped-def]
    # [requests, DEPTH, WIDTH]
    tokens_ptr,
    logprobs_ptr,
    # [requests]
    slots_ptr,
    # uint8 [max_num_reqs]: requests whose windows are chains
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
    # float32 [1]: whether, unless 0, all windows have to be chains
    refusing_ptr,
    DEPTH: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    CANDIDATES: tl.constexpr,  # noqa: N803  DEPTH * WIDTH, to the next power of two
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    linear = (tl.load(linear_ptr + slot) != 0) | (tl.load(refusing_ptr) != 0)
    place = tl.arange(0, CANDIDATES)
    real = place < DEPTH * WIDTH
    depth = place // WIDTH
    index = place - depth * WIDTH
    base = request * DEPTH * WIDTH
    token = tl.load(tokens_ptr + base + place, mask=real, other=0)
    own = tl.load(logprobs_ptr + base + place, mask=real, other=-float("inf"))
    own = tl.where(own == own, own, -float("inf"))
    # Scores: what lies on the spine before a candidate is added in its order, so no child exceeds its parent.
    spine = 0.0
    score = own
    for i in range(DEPTH - 1):
        step = tl.load(logprobs_ptr + base + i * WIDTH)
        spine += tl.where(step == step, step, -float("inf"))
        score = tl.where(depth == i + 1, spine + own, score)
    # Ranks: how many come before. Among equals that is who has the smaller depth, then the smaller index.
    rank = tl.zeros([CANDIDATES], dtype=tl.int32)
    for i in range(DEPTH * WIDTH):
        other = tl.max(tl.where(place == i, score, -float("inf")), axis=0)
        rank += ((other > score) | ((other == score) & (place > i))).to(tl.int32)
    # A chain has the spine in front; what stands behind it fills the rows and is never entered.
    chain_rank = tl.where(index == 0, depth, DEPTH + depth * (WIDTH - 1) + index - 1)
    rank = tl.where(linear, chain_rank, rank)
    row = rank + 1
    parent = tl.where(depth == 0, 0, NO_PARENT)
    above = tl.full([CANDIDATES], 1, dtype=tl.int64)
    spine_mask = tl.full([1], 1, dtype=tl.int64)
    one = tl.full([1], 1, dtype=tl.int64)
    for i in range(DEPTH - 1):
        spine_row = tl.max(tl.where(place == i * WIDTH, row, 0), axis=0)
        # Rows that are not kept may be any number: their bits are never read.
        spine_mask = spine_mask | (one << (spine_row & 63).to(tl.int64))
        parent = tl.where(depth == i + 1, spine_row, parent)
        above = tl.where(depth == i + 1, spine_mask, above)
    bit = (row & 63).to(tl.int64)
    mask = above | (one << bit)
    row_depth = depth + 1
    causal = (((one << bit) - 1) << 1) | 1
    parent = tl.where(linear & (index > 0), NO_PARENT, parent)
    row_depth = tl.where(linear, row, row_depth)
    mask = tl.where(linear, causal, mask)

    kept = real & (row <= nodes)
    tl.store(draft_tokens_ptr + request * draft_tokens_stride + row - 1, token, mask=kept)
    table = slot * (nodes + 1)
    tl.store(parent_ptr + table + row, parent.to(tl.int8), mask=kept)
    tl.store(depth_ptr + table + row, row_depth.to(tl.int8), mask=kept)
    tl.store(mask_ptr + table + row, mask, mask=kept)
    tl.store(chain_ptr + slot, linear.to(tl.uint8))


@triton.jit  # type: ignore[untyped-decorator]
def build_chains_kernel(  # type: ignore[no-untyped-def]
    # [requests]; int8, int8, int64 [max_num_reqs, nodes + 1], uint8 [max_num_reqs]
    slots_ptr,
    parent_ptr,
    depth_ptr,
    mask_ptr,
    chain_ptr,
    nodes,
    ROWS: tl.constexpr,  # noqa: N803
):
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    row = tl.arange(0, ROWS)
    inside = (row > 0) & (row <= nodes)
    table = slot * (nodes + 1) + row
    one = tl.full([ROWS], 1, dtype=tl.int64)
    tl.store(parent_ptr + table, (row - 1).to(tl.int8), mask=inside)
    tl.store(depth_ptr + table, row.to(tl.int8), mask=inside)
    tl.store(mask_ptr + table, (((one << row.to(tl.int64)) - 1) << 1) | 1, mask=inside)
    tl.store(chain_ptr + slot, tl.full([], 1, dtype=tl.uint8))


@triton.jit  # type: ignore[untyped-decorator]
def place_kernel(  # type: ignore[no-untyped-def]
    # [requests], int32 [requests + 1] twice
    slots_ptr,
    query_start_loc_ptr,
    cu_num_logits_ptr,
    depth_ptr,
    mask_ptr,
    nodes,
    # int64 [tokens], int64 [tokens], int32 [logits]
    positions_ptr,
    row_mask_ptr,
    local_pos_ptr,
    ROWS: tl.constexpr,  # noqa: N803  nodes + 1, to the next power of two
):
    request = tl.program_id(0)
    start = tl.load(query_start_loc_ptr + request).to(tl.int64)
    length = tl.load(query_start_loc_ptr + request + 1).to(tl.int64) - start
    first_logit = tl.load(cu_num_logits_ptr + request).to(tl.int64)
    drafts = tl.load(cu_num_logits_ptr + request + 1).to(tl.int64) - first_logit - 1
    if length > nodes + 1:  # a part of a prompt, and no window
        return
    row = tl.arange(0, ROWS)
    one = tl.full([1], 1, dtype=tl.int64)
    lead = length - drafts - 1  # rows before the last token that is certain
    here = row < length
    node = row - lead
    is_node = here & (node > 0)
    table = tl.load(slots_ptr + request).to(tl.int64) * (nodes + 1) + node
    depth = tl.load(depth_ptr + table, mask=is_node, other=0).to(tl.int64)
    sees = tl.load(mask_ptr + table, mask=is_node, other=0)
    before = (((one << row.to(tl.int64)) - 1) << 1) | 1
    mask = tl.where(is_node, (sees << lead) | ((one << lead) - 1), before)
    tl.store(row_mask_ptr + start + row, mask, mask=here)
    if drafts > 0:
        base = tl.load(positions_ptr + start + lead)
        tl.store(positions_ptr + start + row, base + depth, mask=is_node)
        tl.store(local_pos_ptr + first_logit + node, depth.to(tl.int32), mask=is_node)


@triton.jit  # type: ignore[untyped-decorator]
def walk_kernel(  # type: ignore[no-untyped-def]
    # int64 [logits], [logits], int32 [requests + 1], [requests]
    target_ptr,
    token_ptr,
    cu_num_logits_ptr,
    slots_ptr,
    parent_ptr,
    chain_ptr,
    nodes,
    # float32 [1]: whether, unless 0, trees were not attended as such
    refusing_ptr,
    # int64 [requests, nodes + 1], int32 [requests], int32 [max_num_reqs, nodes + 1]
    sampled_ptr,
    num_sampled_ptr,
    path_ptr,
    # [max_num_reqs], [logits], float32 [nodes], [nodes + 1, DEPTH]
    seed_ptr,
    pos_ptr,
    rates_ptr,
    tree_rates_ptr,
    DEPTH: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    SYNTHETIC: tl.constexpr,  # noqa: N803
):
    request = tl.program_id(0)
    start = tl.load(cu_num_logits_ptr + request).to(tl.int64)
    drafts = tl.load(cu_num_logits_ptr + request + 1).to(tl.int64) - start - 1
    slot = tl.load(slots_ptr + request).to(tl.int64)
    # A tree that was not attended as one has its first row right, and no other.
    if (tl.load(refusing_ptr) != 0) & (tl.load(chain_ptr + slot) == 0):
        drafts = drafts * 0
    row = tl.arange(0, ROWS)
    is_node = (row > 0) & (row <= drafts)
    parent = tl.load(parent_ptr + slot * (nodes + 1) + row, mask=is_node, other=NO_PARENT).to(tl.int32)
    token = tl.load(token_ptr + start + row, mask=is_node, other=-1).to(tl.int64)
    # All at once: one load after the other would wait for memory at each node.
    targets = tl.load(target_ptr + start + row, mask=row <= drafts, other=0)
    out = request.to(tl.int64) * (nodes + 1)
    way = slot * (nodes + 1)
    here = drafts.to(tl.int32) * 0
    count = here
    going = here == 0
    for depth in range(DEPTH + 1):
        target = tl.sum(tl.where(row == here, targets, 0), axis=0)
        child = is_node & (parent == here) & (token >= 0)
        if SYNTHETIC:
            # As vLLM's synthetic rejection: chance alone decides, here for the likeliest child.
            rate = tl.load(rates_ptr + depth, mask=depth < nodes, other=0.0)
            tree_rate = tl.load(tree_rates_ptr + drafts * DEPTH + depth, mask=depth < DEPTH, other=0.0)
            rate = tl.where(tl.load(chain_ptr + slot) == 0, tree_rate, rate)
            seed = tl.load(seed_ptr + slot)
            pos = tl.load(pos_ptr + start + here)  # in benchmarks alone
            lucky = tl.where(tl_rand32(seed, pos, includes_zero=False) < rate, 1, 0)
            child = child & (lucky == 1)
        else:
            child = child & (token == target)
        following = tl.min(tl.where(child, row, ROWS), axis=0)
        found = following < ROWS
        if SYNTHETIC:
            chosen = tl.max(tl.where(row == following, token, -1), axis=0)
            target = tl.where(found, chosen, target)
        tl.store(sampled_ptr + out + count, target, mask=going)
        tl.store(path_ptr + way + count, here, mask=going)
        count += going.to(tl.int32)
        going = going & found
        here = tl.where(going, following, here)
    tl.store(num_sampled_ptr + request, count)


@triton.jit  # type: ignore[untyped-decorator]
def source_rows_kernel(  # type: ignore[no-untyped-def]
    # int32 [requests + 1] twice, [requests], int32 [requests], int32 [max_num_reqs, nodes + 1]
    query_start_loc_ptr,
    cu_num_logits_ptr,
    slots_ptr,
    num_sampled_ptr,
    path_ptr,
    nodes,
    # int32 [tokens]
    source_rows_ptr,
    ROWS: tl.constexpr,  # noqa: N803
):
    request = tl.program_id(0)
    start = tl.load(query_start_loc_ptr + request)
    length = tl.load(query_start_loc_ptr + request + 1) - start
    if length > nodes + 1:
        return
    drafts = tl.load(cu_num_logits_ptr + request + 1) - tl.load(cu_num_logits_ptr + request) - 1
    lead = length - drafts - 1
    row = tl.arange(0, ROWS)
    node = row - lead
    accepted = tl.load(num_sampled_ptr + request)
    way = tl.load(slots_ptr + request).to(tl.int64) * (nodes + 1)
    taken = tl.load(path_ptr + way + node, mask=(node > 0) & (node < accepted), other=0)
    source = tl.where(node <= 0, row, tl.where(node < accepted, lead + taken, -1 - start))
    tl.store(source_rows_ptr + start + row, start + source, mask=row < length)


@triton.jit  # type: ignore[untyped-decorator]
def flatten_inputs_kernel(  # type: ignore[no-untyped-def]
    # int32 [requests + 1] twice, int32 [tokens]
    query_start_loc_ptr,
    cu_num_logits_ptr,
    source_rows_ptr,
    # int32 [tokens], int64 [tokens]
    input_ids_ptr,
    positions_ptr,
    nodes,
    ROWS: tl.constexpr,  # noqa: N803
):
    request = tl.program_id(0)
    start = tl.load(query_start_loc_ptr + request)
    length = tl.load(query_start_loc_ptr + request + 1) - start
    drafts = tl.load(cu_num_logits_ptr + request + 1) - tl.load(cu_num_logits_ptr + request) - 1
    if (drafts <= 0) | (length > nodes + 1):
        return
    lead = length - drafts - 1
    row = tl.arange(0, ROWS)
    source = tl.load(source_rows_ptr + start + row, mask=row < length, other=-1)
    token = tl.load(input_ids_ptr + source, mask=source >= 0, other=0)
    base = tl.load(positions_ptr + start + lead)
    tl.debug_barrier()  # all is read before the first row is written
    tl.store(input_ids_ptr + start + row, token, mask=source >= 0)
    tl.store(positions_ptr + start + row, base + row - lead, mask=(row > lead) & (row < length))


@triton.jit  # type: ignore[untyped-decorator]
def flatten_states_kernel(  # type: ignore[no-untyped-def]
    # int32 [requests + 1] twice, int32 [tokens], [tokens, size]
    query_start_loc_ptr,
    cu_num_logits_ptr,
    source_rows_ptr,
    states_ptr,
    states_stride,
    size,
    nodes,
    BLOCK: tl.constexpr,  # noqa: N803
):
    request = tl.program_id(0)
    start = tl.load(query_start_loc_ptr + request)
    length = tl.load(query_start_loc_ptr + request + 1) - start
    drafts = tl.load(cu_num_logits_ptr + request + 1) - tl.load(cu_num_logits_ptr + request) - 1
    if (drafts <= 0) | (length > nodes + 1):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    # A row's source never stands before it, so that rows can move one after the other.
    for row in range(1, length):
        source = tl.load(source_rows_ptr + start + row)
        if (source >= 0) & (source != start + row):
            state = tl.load(states_ptr + source.to(tl.int64) * states_stride + column, mask=inside)
            tl.store(states_ptr + (start + row).to(tl.int64) * states_stride + column, state, mask=inside)


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << max(number - 1, 0).bit_length()
