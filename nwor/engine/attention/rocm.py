"""vLLM's backends for AMD GPUs, extended as far as reading goes: no AMD GPU has run this.

The ops have no kernels for AMD GPUs yet, and so every engine there is refused when its layers are bound. What
is here is what vLLM's side of it takes. ``ROCM_ATTN`` is not among them: it packs keys so that several tokens
share 16 bytes, which strides do not express.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.rocm_aiter_fa import (
    AiterFlashAttentionBackend,
    AiterFlashAttentionImpl,
    AiterFlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.rocm_aiter_unified_attn import (
    RocmAiterUnifiedAttentionBackend,
    RocmAiterUnifiedAttentionImpl,
    RocmAiterUnifiedAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.rocm_segmented_attn import (
    RocmSegmentedAttentionBackend,
    RocmSegmentedAttentionImpl,
    RocmSegmentedAttentionMetadataBuilder,
)

from nwor.engine.attention.cut_metadata import CutsMetadata
from nwor.engine.attention.extended_backend import ExtendedBackend
from nwor.engine.attention.staged_attention import StagedAttention, WindowsFirst
from nwor.engine.attention.step_metadata import AttendsOnDemand, BuildsOnDemand
from nwor.engine.eligibility import Unsupported, check_rocm

UNTESTED = "on an AMD GPU"


class NworAiterFlashAttentionImpl(StagedAttention, AttendsOnDemand, AiterFlashAttentionImpl):
    """Stock attention of a layer, except for the rows of a window that is being staged."""


class NworAiterFlashAttentionMetadataBuilder(BuildsOnDemand, AiterFlashAttentionMetadataBuilder):
    """The stock builder, asked for the part of a step that is not staged."""


class NworAiterFlashAttentionBackend(ExtendedBackend, AiterFlashAttentionBackend):
    """The stock backend with the classes above."""

    nwor_impl = NworAiterFlashAttentionImpl
    nwor_builder = NworAiterFlashAttentionMetadataBuilder
    nwor_check = staticmethod(check_rocm)
    nwor_untested = UNTESTED


class NworRocmAiterUnifiedAttentionImpl(StagedAttention, CutsMetadata, RocmAiterUnifiedAttentionImpl):
    """Stock attention of a layer, except for the rows of a window that is being staged."""


class NworRocmAiterUnifiedAttentionMetadataBuilder(WindowsFirst, RocmAiterUnifiedAttentionMetadataBuilder):
    """The stock builder, which on model runner V1 asks for windows to stand first in the batch."""


class NworRocmAiterUnifiedAttentionBackend(ExtendedBackend, RocmAiterUnifiedAttentionBackend):
    """The stock backend with the classes above."""

    nwor_impl = NworRocmAiterUnifiedAttentionImpl
    nwor_builder = NworRocmAiterUnifiedAttentionMetadataBuilder
    nwor_check = staticmethod(check_rocm)
    nwor_untested = UNTESTED


class NworRocmSegmentedAttentionImpl(StagedAttention, CutsMetadata, RocmSegmentedAttentionImpl):
    """Stock attention of a layer, except for the rows of a window that is being staged."""


class NworRocmSegmentedAttentionMetadataBuilder(WindowsFirst, RocmSegmentedAttentionMetadataBuilder):
    """The stock builder, which on model runner V1 asks for windows to stand first in the batch."""


def sides_apart(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a cache that holds all heads of a token side by side, first K, then V.

    Args:
        layer: its cache is [num_blocks, 2, block_size, num_kv_heads * head_size], of any strides.

    Raises:
        Unsupported: if the cache has another shape.

    """
    cache, heads, size = layer.kv_cache, layer.impl.num_kv_heads, layer.head_size
    if cache.dim() != 4 or cache.shape[1] != 2 or cache.shape[-1] != heads * size:
        raise Unsupported("cache_format", f"a cache of shape {tuple(cache.shape)} is not known")
    key_cache, value_cache = cache.unflatten(-1, (heads, size)).unbind(1)
    return key_cache, value_cache


class NworRocmSegmentedAttentionBackend(ExtendedBackend, RocmSegmentedAttentionBackend):
    """The stock backend with the classes above."""

    nwor_impl = NworRocmSegmentedAttentionImpl
    nwor_builder = NworRocmSegmentedAttentionMetadataBuilder
    nwor_check = staticmethod(check_rocm)
    nwor_cache_views = staticmethod(sides_apart)
    nwor_untested = UNTESTED
