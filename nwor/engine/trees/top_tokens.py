"""The likeliest tokens of rows of logits and their log-probabilities, in two launches.

A comparison of whole rows is one of 64-bit keys: a value's order in front, its place behind. So one reduction
finds both, and among equals the smaller place.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from nwor.engine.trees.kernels import next_power_of_two

#: Columns of a thread block of the first launch.
BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def ordered_key(value, place):  # type: ignore[no-untyped-def]
    """Return int64 keys in the order of float32 values; among equals the smaller place has the larger key."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def place_of(key):  # type: ignore[no-untyped-def]
    """Return the place that a key was made of."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def value_of(key):  # type: ignore[no-untyped-def]
    """Return the float32 value that a key was made of."""
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def top_of_blocks_kernel(  # type: ignore[no-untyped-def]
    # [rows, vocabulary]
    logits_ptr,
    logits_stride,
    vocabulary,
    # int64 [rows, blocks, WIDTH], float32 [rows, blocks] twice
    best_ptr,
    largest_ptr,
    total_ptr,
    blocks,
    WIDTH: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < vocabulary
    logit = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=-float("inf"))
    logit = logit.to(tl.float32)
    smallest: tl.constexpr = -0x7FFFFFFFFFFFFFFF
    key = tl.where(inside, ordered_key(logit, column), smallest)
    out = row * blocks + block
    for i in range(WIDTH):
        best = tl.max(key, axis=0)
        tl.store(best_ptr + out * WIDTH + i, best)
        if i == 0:
            largest = value_of(best)
            shift = tl.where(largest == -float("inf"), 0.0, largest)
            tl.store(largest_ptr + out, largest)
            tl.store(total_ptr + out, tl.sum(tl.exp(logit - shift), axis=0))
        # What is taken comes no second time, not even where all that is left is impossible.
        key = tl.where(key == best, smallest, key)


@triton.jit  # type: ignore[untyped-decorator]
def top_of_rows_kernel(  # type: ignore[no-untyped-def]
    best_ptr,
    largest_ptr,
    total_ptr,
    blocks,
    vocabulary,
    # int64 [1]: the drafter's pass
    step_ptr,
    # int64, float32 [rows, DEPTH, WIDTH], int64 [rows]
    tokens_ptr,
    logprobs_ptr,
    first_ptr,
    DEPTH: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
    CANDIDATES: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    there = block < blocks
    own = tl.load(largest_ptr + row * blocks + block, mask=there, other=-float("inf"))
    total = tl.load(total_ptr + row * blocks + block, mask=there, other=0.0)
    largest = tl.max(own, axis=0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    own_shift = tl.where(own == -float("inf"), 0.0, own)
    log_total = tl.log(tl.sum(total * tl.exp(own_shift - shift), axis=0)) + shift
    place = tl.arange(0, CANDIDATES)
    smallest: tl.constexpr = -0x7FFFFFFFFFFFFFFF
    key = tl.load(best_ptr + row * blocks * WIDTH + place, mask=place < blocks * WIDTH, other=smallest)
    out = (row * DEPTH + tl.load(step_ptr)) * WIDTH
    for i in range(WIDTH):
        best = tl.max(key, axis=0)
        key = tl.where(key == best, smallest, key)
        # A vocabulary of fewer tokens than are wanted has none left in the end.
        there_is = best != smallest
        token = tl.where(there_is, place_of(best), vocabulary - 1).to(tl.int64)
        value = tl.where(there_is, value_of(best), -float("inf"))
        tl.store(tokens_ptr + out + i, token)
        # No more than 0, or a child would come before its parent. The less of what is no number and 0 is 0.
        logprob = value - log_total
        logprob = tl.where(logprob == logprob, tl.minimum(logprob, 0.0), -float("inf"))
        tl.store(logprobs_ptr + out + i, logprob)
        if i == 0:
            tl.store(first_ptr + row, token)


def top_tokens(
    logits: torch.Tensor,
    step: torch.Tensor,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    assumed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Note the likeliest tokens of one pass of the drafter, and return the first of each row.

    Args:
        logits: [rows, V], last stride 1, of any floating dtype.
        step: int64 scalar on the device: the pass, from 0.
        tokens: int64 [at least rows, depth, width]; the pass's column is written.
        logprobs: float32, likewise.
        assumed: float32 [width], noted in place of the log-probabilities that were found.

    Returns:
        int64 [rows].

    """
    rows, vocabulary = logits.shape
    _, depth, width = tokens.shape
    blocks = -(-vocabulary // BLOCK)
    best = torch.empty(rows, blocks, width, dtype=torch.int64, device=logits.device)
    sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    first = torch.empty(rows, dtype=torch.int64, device=logits.device)
    top_of_blocks_kernel[(rows, blocks)](
        logits, logits.stride(0), vocabulary, best, sums[0], sums[1], blocks, WIDTH=width, COLUMNS=BLOCK
    )
    candidates = next_power_of_two(blocks * width)
    top_of_rows_kernel[(rows,)](
        best,
        sums[0],
        sums[1],
        blocks,
        vocabulary,
        step,
        tokens,
        logprobs,
        first,
        DEPTH=depth,
        WIDTH=width,
        BLOCKS=next_power_of_two(blocks),
        CANDIDATES=candidates,
        # Few candidates fit into one warp, whose reductions meet in no memory.
        num_warps=1 if candidates <= 512 else 4,
    )
    if assumed is not None:
        logprobs[:rows].copy_(assumed)  # in benchmarks alone
    return first
