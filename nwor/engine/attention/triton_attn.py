"""vLLM's Triton backend, extended: see :mod:`nwor.engine.attention.staged_attention`.

Experimental, and off by default (setting ``attention_backends``). The cache has FlashAttention's shape, and
its layouts differ by strides alone.
"""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from nwor.engine.attention.cut_metadata import CutsMetadata
from nwor.engine.attention.extended_backend import ExtendedBackend
from nwor.engine.attention.staged_attention import StagedAttention, WindowsFirst
from nwor.engine.eligibility import check_triton


class NworTritonAttentionImpl(StagedAttention, CutsMetadata, TritonAttentionImpl):
    """Stock attention of a layer, except for the rows of a window that is being staged."""


class NworTritonAttentionMetadataBuilder(WindowsFirst, TritonAttentionMetadataBuilder):
    """The stock builder, which on model runner V1 asks for windows to stand first in the batch."""


class NworTritonAttentionBackend(ExtendedBackend, TritonAttentionBackend):
    """The stock backend with the classes above."""

    nwor_impl = NworTritonAttentionImpl
    nwor_builder = NworTritonAttentionMetadataBuilder
    nwor_check = staticmethod(check_triton)
