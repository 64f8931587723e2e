"""``plan_verify_attention``: what ``verify_attention`` finds out from lengths, once for many layers."""

from __future__ import annotations

import torch

from nwor.ops import checks
from nwor.ops.attention import CUDA_HEAD_SIZES, MAX_WINDOW
from nwor.ops.registry import LIBRARIES

_op = torch.ops.nwor.plan_verify_attention.default


def make_verify_plan(device: torch.device | str) -> torch.Tensor | None:
    """Return memory for a plan: uint8, zero-filled, of the size that any batch and shape needs on the device.

    None on a CPU, where ``verify_attention`` needs no plan.

    Args:
        device: where the attention runs.

    Raises:
        LibraryError: if there is no library for the device.

    """
    device = torch.device(device)
    LIBRARIES.require(device)
    size = LIBRARIES.plan_size(device)
    return torch.zeros(size, dtype=torch.uint8, device=device) if size else None


def plan_verify_attention(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_query_len: int,
    source_dtype: torch.dtype,
    kv_cache_dtype: str = "auto",
    sliding_window: int = -1,
    quantized_query: bool = False,
) -> None:
    """Write ``plan``: which tiles of which request each thread block of ``verify_attention`` begins with.

    Without a plan every thread block of every layer finds that out from the lengths by itself, which takes
    about as long as a short context's attention. Lengths are the same in all layers of a step, so one small
    launch before the first of them serves all. The plan holds until the lengths change; a call of
    ``verify_attention`` that it was not made for (another batch size, shape, dtype, the query's included,
    sliding window or ``max_query_len``) takes no notice of it, but **whether the lengths are those that it
    was made for, nobody checks**. No length is read on the host, so the call may be captured in a CUDA graph.

    Args:
        query_start_loc: int32 [B + 1], as ``verify_attention`` will get it.
        seq_lens: int32 [>= B], likewise.
        plan: what :func:`make_verify_plan` returned, written. Calls that are given it must come behind this
            one on the same stream.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_size: elements of a head.
        max_query_len: upper bound of the window lengths, 1 to 64.
        source_dtype: dtype of key and value, and of queries that are not quantized: float16 or bfloat16.
        kv_cache_dtype: "auto", "fp8", "fp8_e4m3" or "fp8_e5m2".
        sliding_window: tokens that a query sees, itself included; -1 for all.
        quantized_query: whether queries are float8_e4m3fn, which takes an fp8 cache.

    Raises:
        TypeError, ValueError: if an argument is wrong; the message names it, what it is and what is wanted.

    """
    checks.tensor("query_start_loc", query_start_loc)
    device = query_start_loc.device
    LIBRARIES.require(device)
    checks.vector("query_start_loc", query_start_loc, torch.int32, device, at_least=1)
    checks.vector("seq_lens", seq_lens, torch.int32, device, at_least=query_start_loc.shape[0] - 1)
    checks.integer("num_heads", num_heads, 1)
    checks.integer("num_kv_heads", num_kv_heads, 1, num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads: is {num_heads}, wanted a multiple of num_kv_heads, {num_kv_heads}")
    checks.integer("head_size", head_size, 1)
    on_cuda = device.type == "cuda"
    if on_cuda and head_size not in CUDA_HEAD_SIZES:
        wanted = ", ".join(map(str, CUDA_HEAD_SIZES))
        raise ValueError(f"head_size: is {head_size}, wanted one of {wanted} on CUDA")
    checks.integer("max_query_len", max_query_len, 1, MAX_WINDOW)
    dtypes = checks.SOURCE_DTYPES[1:] if on_cuda else checks.SOURCE_DTYPES
    if source_dtype not in dtypes:
        raise ValueError(f"source_dtype: is {source_dtype}, wanted one of {', '.join(map(str, dtypes))}")
    checks.cache_dtype("kv_cache_dtype", kv_cache_dtype, source_dtype)
    checks.sliding_window(sliding_window)
    if checks.boolean("quantized_query", quantized_query) and kv_cache_dtype == "auto":
        raise ValueError(
            f"quantized_query: is True, wanted False, as kv_cache_dtype is {kv_cache_dtype!r}"
            " (quantized queries go with fp8 caches)"
        )
    checks.vector("plan", plan, torch.uint8, device, at_least=LIBRARIES.plan_size(device))
    _op(
        query_start_loc,
        seq_lens,
        plan,
        num_heads,
        num_kv_heads,
        head_size,
        max_query_len,
        source_dtype,
        kv_cache_dtype,
        sliding_window,
        quantized_query,
    )
