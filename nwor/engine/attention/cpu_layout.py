"""Whether strides express the layout of a CPU cache: vLLM has one for each instruction set."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from vllm import _custom_ops as ops

from nwor.engine.eligibility import Unsupported

#: What vLLM packs K for where it can use AMX, and what it takes on the same processors otherwise.
PACKED, UNPACKED = "amx", "vec"
#: Names of float8 caches' dtype begin so.
_FLOAT8 = "fp8"


def cache_views(
    kv_cache: torch.Tensor, isa: str, kv_cache_dtype: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a CPU cache as [num_blocks, block_size, num_kv_heads, head_size] views.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], contiguous, as vLLM allocates it. A
            head's share of a block holds first all of K, then all of V.
        isa: the instruction set that vLLM chose for the layer; it decides the layout.
        kv_cache_dtype: vLLM's name of the cache's dtype.

    Raises:
        Unsupported: if K or V is packed in a way that strides cannot express.

    """
    _, heads, block_size, twice = kv_cache.shape
    if not _is_strided(isa, kv_cache.dtype, kv_cache_dtype, heads, block_size, twice // 2):
        raise Unsupported("cache_format", f"the CPU cache is packed for {isa}; strides cannot express it")
    return _strided(kv_cache)


def _strided(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views where K is [head_size, block_size] in a block, and V [block_size, head_size]."""
    blocks, heads, block_size, twice = kv_cache.shape
    head_size = twice // 2
    block_stride, head_stride = kv_cache.stride(0), kv_cache.stride(1)
    shape = (blocks, block_size, heads, head_size)
    offset = kv_cache.storage_offset()
    key_cache = kv_cache.as_strided(shape, (block_stride, 1, head_stride, block_size), offset)
    value_cache = kv_cache.as_strided(
        shape, (block_stride, head_size, head_stride, 1), offset + block_size * head_size
    )
    return key_cache, value_cache


@lru_cache(maxsize=64)
def _is_strided(
    isa: str, dtype: torch.dtype, kv_cache_dtype: str, heads: int, block_size: int, head_size: int
) -> bool:
    """Return whether what vLLM writes into a small cache of this kind is found in the views.

    Looking beats a list of names: which layout a name stands for depends on processor, dtype and version.
    """
    float8 = kv_cache_dtype.startswith(_FLOAT8)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(2 * block_size, generator=generator)[: block_size + 1]
    shape = (len(slots), heads, head_size)
    # Whole numbers that every dtype has.
    key, value = (
        torch.randint(-7, 8, shape, generator=generator).to(torch.bfloat16 if float8 else dtype)
        for _ in range(2)
    )
    cache = torch.zeros(2, heads, block_size, 2 * head_size, dtype=dtype)
    parts: Any = cache.view(2, heads, 2 * block_size, head_size).chunk(2, dim=2)
    try:
        ops.cpu_attn_reshape_and_cache(key, value, *parts, slots, isa, kv_cache_dtype=kv_cache_dtype)
    except RuntimeError:
        return False  # vLLM has no such layout here
    kept = torch.float8_e5m2 if "e5m2" in kv_cache_dtype else torch.float8_e4m3fn
    for written, view in zip((key, value), _strided(cache), strict=True):
        found = view[slots // block_size, slots % block_size]
        if float8:
            found = found.contiguous().view(kept)
        if not torch.equal(found.float(), written.float()):
            return False
    return True
