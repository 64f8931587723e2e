"""``commit_window``, ``stage_window``, ``log_slots`` and ``restore_slots`` as loops over single tokens.

Each returns new tensors and leaves its arguments alone, so that a result can never alias what it is compared
with.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from nwor.reference.fp8 import Rounding, quantize, rounding_of


def commit_window(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    commit_counts: torch.Tensor | None = None,
    source_index: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rounding: Rounding | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one layer's caches as :func:`nwor.ops.commit_window` leaves them.

    Args:
        key: [T, Hk, D].
        value: [T, Hk, D].
        key_cache: [num_blocks, block_size, Hk, D].
        value_cache: likewise.
        slots: int64 [T].
        query_start_loc: int32 [B + 1].
        commit_counts: int32 [B], or None with source_index.
        source_index: int32 [T], or None with commit_counts.
        kv_cache_dtype: "auto" or an fp8 format.
        k_scale: float32 with 1 or Hk elements; None for 1.
        v_scale: likewise.
        rounding: of fp8; None for that of the device.

    Returns:
        Copies of the two caches, contiguous.

    """
    block_size, num_kv_heads = key_cache.shape[1:3]
    rounding = rounding or rounding_of(key.device)
    moves: list[tuple[int, int]] = []
    starts = query_start_loc.tolist()
    if commit_counts is not None:
        for request, start in enumerate(starts[:-1]):
            for row in range(start, start + int(commit_counts[request])):
                moves.append((row, int(slots[row])))
    else:
        assert source_index is not None
        for row in range(starts[0], starts[-1]):
            moves.append((int(source_index[row]), int(slots[row])))
    caches = []
    for source, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        result = cache.clone(memory_format=torch.contiguous_format)
        for row, slot in moves:
            if row < 0 or slot < 0:
                continue
            token = source[row]
            if kv_cache_dtype != "auto":
                factor = torch.ones(1, device=key.device) if scale is None else scale.reshape(-1)
                factor = factor.expand(num_kv_heads)[:, None]
                token = quantize(token, factor, kv_cache_dtype, rounding).view(cache.dtype)
            result[slot // block_size, slot % block_size] = token
        caches.append(result)
    return caches[0], caches[1]


def draft_rows(query_start_loc: torch.Tensor, first: Sequence[int] | None = None) -> list[int]:
    """Return the window rows from max(first[i], 1) on of each window i (first: 1 by default)."""
    rows: list[int] = []
    for i, (start, end) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        rows += range(start + max(first[i] if first is not None else 1, 1), end)
    return rows


def log_slots(
    key_cache: torch.Tensor, slots: torch.Tensor, query_start_loc: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Return, by window row, the raw bytes of the draft slots of one cache: uint8 [Hk * D * element size]."""
    block_size = key_cache.shape[1]
    log = {}
    for row in draft_rows(query_start_loc):
        slot = int(slots[row])
        if slot >= 0:
            token = key_cache[slot // block_size, slot % block_size]
            # Bytes can be viewed of a contiguous tensor alone, and a clone may keep the strides.
            log[row] = token.new_empty(token.numel()).copy_(token.flatten()).view(torch.uint8)
    return log


def restore_slots(
    cache: torch.Tensor,
    before: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    commit_counts: torch.Tensor,
) -> torch.Tensor:
    """Return one cache with the rejected slots' bytes as they were in ``before``.

    Args:
        cache: [num_blocks, block_size, Hk, D] after direct writes.
        before: the same cache before them.
        slots: int64 [T].
        query_start_loc: int32 [B + 1].
        commit_counts: int32 [B].

    """
    block_size = cache.shape[1]
    result = cache.clone(memory_format=torch.contiguous_format)
    for row in draft_rows(query_start_loc, commit_counts.tolist()):
        slot = int(slots[row])
        if slot >= 0:
            result[slot // block_size, slot % block_size] = before[slot // block_size, slot % block_size]
    return result


def stage_window(
    sources: Sequence[torch.Tensor], staged: Sequence[torch.Tensor], num_tokens: int
) -> list[torch.Tensor]:
    """Return the staged tensors with their first ``num_tokens`` rows taken from the sources."""
    return [
        torch.cat([source[:num_tokens], old[num_tokens:]])
        for source, old in zip(sources, staged, strict=True)
    ]
