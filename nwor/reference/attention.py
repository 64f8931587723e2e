"""``verify_attention`` in float64, one request and one query at a time."""

from __future__ import annotations

import itertools
import math

import torch

from nwor.reference.fp8 import Rounding, dequantize, quantize, rounding_of


def verify_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    ancestor_mask: torch.Tensor | None = None,
    rounding: Rounding | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what :func:`nwor.ops.verify_attention` writes.

    Args:
        query: [T, Hq, D], possibly quantized to float8_e4m3fn.
        key: [T, Hk, D].
        value: [T, Hk, D].
        key_cache: [num_blocks, block_size, Hk, D].
        value_cache: likewise.
        block_table: int32 [>= B, max_blocks].
        query_start_loc: int32 [B + 1].
        seq_lens: int32 [>= B].
        scale: factor on the logits.
        kv_cache_dtype: "auto" or an fp8 format.
        k_scale: float32 with 1 or Hk elements, None for 1.
        v_scale: likewise.
        q_scale: likewise, of a quantized query; one factor per KV head, not per query head.
        sliding_window: tokens that a query sees, itself included; -1 for all.
        softcap: soft cap, 0 for none.
        sinks: [Hq] or None.
        ancestor_mask: int64 [T] or None.
        rounding: of the window's round trip through an fp8 cache; None for that of query's device.

    Returns:
        float64 [T, Hq, D] and float64 [Hq, T]; NaN in padding rows, which the op leaves alone.

    """
    device = query.device
    tokens, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    rounding = rounding or rounding_of(device)
    k_factor = _per_head(k_scale, num_kv_heads, device)
    v_factor = _per_head(v_scale, num_kv_heads, device)
    q_factor = _per_head(q_scale, num_kv_heads, device).repeat_interleave(num_heads // num_kv_heads, dim=0)
    queries = query.to(torch.float64) * q_factor.to(torch.float64)
    out = torch.full((tokens, num_heads, head_size), math.nan, dtype=torch.float64, device=device)
    lse = torch.full((num_heads, tokens), math.nan, dtype=torch.float64, device=device)
    for request, (start, end) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        if start == end:
            continue
        context = int(seq_lens[request]) - (end - start)
        past_k = _gather(key_cache, block_table[request], context, k_factor, kv_cache_dtype)
        past_v = _gather(value_cache, block_table[request], context, v_factor, kv_cache_dtype)
        own_k = _window(key[start:end], k_factor, kv_cache_dtype, rounding)
        own_v = _window(value[start:end], v_factor, kv_cache_dtype, rounding)
        keys = torch.cat([past_k, own_k]).repeat_interleave(num_heads // num_kv_heads, dim=1)
        values = torch.cat([past_v, own_v]).repeat_interleave(num_heads // num_kv_heads, dim=1)
        visible = _visible(context, end - start, sliding_window, ancestor_mask, start).to(device)
        logits = torch.einsum("qhd,khd->hqk", queries[start:end], keys) * scale
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~visible, -math.inf)
        if sinks is not None:
            column = sinks.to(torch.float64)[:, None, None].expand(num_heads, end - start, 1)
            logits = torch.cat([logits, column], dim=2)
        total = torch.logsumexp(logits, dim=2)
        weights = torch.exp(logits - total[:, :, None]).nan_to_num(0.0)[:, :, : visible.shape[1]]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values)
        lse[:, start:end] = total
    return out, lse


def _per_head(scale: torch.Tensor | None, num_kv_heads: int, device: torch.device) -> torch.Tensor:
    if scale is None:
        return torch.ones(num_kv_heads, 1, device=device)
    return scale.reshape(-1).expand(num_kv_heads)[:, None]


def _gather(
    cache: torch.Tensor, blocks: torch.Tensor, context: int, factor: torch.Tensor, kv_cache_dtype: str
) -> torch.Tensor:
    block_size = cache.shape[1]
    numbers = blocks.tolist()  # once: each number asked of a GPU would make the host wait
    rows = [cache[numbers[t // block_size], t % block_size] for t in range(context)]
    if not rows:
        return torch.empty((0, *cache.shape[2:]), dtype=torch.float64, device=cache.device)
    stored = torch.stack(rows)
    if kv_cache_dtype == "auto":
        return stored.to(torch.float64)
    return dequantize(stored, factor, kv_cache_dtype)


def _window(x: torch.Tensor, factor: torch.Tensor, kv_cache_dtype: str, rounding: Rounding) -> torch.Tensor:
    if kv_cache_dtype == "auto":
        return x.to(torch.float64)
    return dequantize(quantize(x, factor, kv_cache_dtype, rounding), factor, kv_cache_dtype)


def _visible(
    context: int, window: int, sliding_window: int, ancestor_mask: torch.Tensor | None, start: int
) -> torch.Tensor:
    """Return bool [window, context + window]: what each row sees."""
    visible = torch.zeros(window, context + window, dtype=torch.bool)
    masks = None
    if ancestor_mask is not None:
        masks = [int(mask) & (2**64 - 1) for mask in ancestor_mask[start : start + window].tolist()]
    positions = [context + (i if masks is None else masks[i].bit_count() - 1) for i in range(window)]
    for i in range(window):
        if masks is not None and masks[i] & (2**window - 1) == 0:
            continue
        oldest = 0 if sliding_window < 0 else positions[i] - sliding_window + 1
        visible[i, max(oldest, 0) : context] = True
        for j in range(window):
            seen = j <= i if masks is None else bool(masks[i] >> j & 1)
            visible[i, context + j] = seen and positions[j] >= oldest
    return visible
