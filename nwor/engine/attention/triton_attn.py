"""vLLM's Triton backend, extended: see :mod:`nwor.engine.attention.staged_attention`.

Experimental, and off by default (setting ``attention_backends``): no test of it has run on a GPU yet. The
cache has FlashAttention's shape, and its layouts differ by strides alone. Two things are not as there:

- Its kernels find the request of a row by the first rows of all requests, and these have to begin with 0. So
  the rows behind the windows are views of their own, with first rows of their own.
- They can quantize the output. The verify kernel cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from nwor.engine.attention.staged_attention import StagedAttention, WindowsFirst
from nwor.engine.eligibility import check_triton

#: Triton compiles a kernel anew for an address that is no multiple of this, in bytes.
ALIGNMENT = 16


@dataclass
class RestMetadata(TritonAttentionMetadata):
    """The metadata of the rows behind the windows.

    Attributes:
        first_row: where those rows begin in the tensors of the whole step.

    """

    first_row: int = 0


def rest_of(metadata: TritonAttentionMetadata, requests: int, tokens: int) -> RestMetadata:
    """Return the metadata of a step without its first ``requests`` requests and their ``tokens`` rows.

    The longest query stays that of the whole step: which of its kernels Triton's attention launches follows
    from that number.

    Args:
        metadata: that of the whole step.
        requests: how many are left out.
        tokens: their rows.

    Raises:
        ValueError: if there is something in the metadata that a part of the step would have to have cut too.

    """
    for name in ("mm_prefix_range_tensor", "rswa_prefix_lens"):
        if getattr(metadata, name, None) is not None:
            raise ValueError(f"{name}: the step's attention is not plain")
    if not isinstance(metadata.causal, bool):
        raise ValueError("causal: differs between requests")
    whole = dict(vars(metadata))
    whole |= {
        "num_actual_tokens": metadata.num_actual_tokens - tokens,
        "query_start_loc": metadata.query_start_loc[requests:] - tokens,
        "seq_lens": aligned(metadata.seq_lens[requests:]),
        "block_table": aligned(metadata.block_table[requests:]),
        "slot_mapping": metadata.slot_mapping[tokens:],
    }
    return RestMetadata(**whole, first_row=tokens)


def aligned(part: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it where a kernel would be compiled in the middle of serving."""
    return part.clone() if part.data_ptr() % ALIGNMENT else part


class _AttentionOfParts(TritonAttentionImpl):
    """Stock attention, which takes the metadata of a part of the step with the tensors of the whole."""

    nwor: Any

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; keys and values are read from the cache alone."""
        if type(attn_metadata) is RestMetadata:
            first = attn_metadata.first_row
            super().forward(layer, query[first:], key, value, kv_cache, attn_metadata, output[first:])
            return output
        if output_scale is not None and self.nwor is not None and self.nwor.window.staging:
            # At the start such engines are refused; windows that are staged all the same have to be in the
            # cache before this reads it.
            self.nwor.give_up("verify attention", NotImplementedError("the kernel quantizes its output"))
        scales = (output_scale, output_block_scale)
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)


class NworTritonAttentionImpl(StagedAttention, _AttentionOfParts):
    """Stock attention of a layer, except for the rows of a window that is being staged."""

    def nwor_rest(
        self, metadata: TritonAttentionMetadata, requests: int, tokens: int, kv_cache: torch.Tensor
    ) -> RestMetadata:
        """Return the metadata of a step without its first requests; see :func:`rest_of`.

        Args:
            metadata: that of the whole step.
            requests: how many are left out.
            tokens: their rows.
            kv_cache: the layer's; of no matter here.

        """
        return rest_of(metadata, requests, tokens)


class NworTritonAttentionMetadataBuilder(WindowsFirst, TritonAttentionMetadataBuilder):
    """The stock builder, which on model runner V1 asks for windows to stand first in the batch."""


class NworTritonAttentionBackend(TritonAttentionBackend):
    """The stock backend with the classes above."""

    #: What of a layer is looked at beside what is looked at with every backend.
    nwor_check = staticmethod(check_triton)

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """Return the implementation of a layer."""
        return NworTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """Return the builder of a step's metadata."""
        return NworTritonAttentionMetadataBuilder
