"""vLLM's FlashAttention backend, extended: see :mod:`nwor.engine.attention.staged_attention`."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from nwor.engine.attention.extended_backend import ExtendedBackend
from nwor.engine.attention.split_step import scheduled, splits_for
from nwor.engine.attention.staged_attention import StagedAttention, WindowsFirst


class NworFlashAttentionImpl(StagedAttention, FlashAttentionImpl):
    """Stock attention of a layer, except for the rows of a window that is being staged."""

    nwor_rest_in_place = True

    def nwor_rest(
        self, metadata: FlashAttentionMetadata, requests: int, tokens: int, kv_cache: torch.Tensor
    ) -> FlashAttentionMetadata:
        """Return the metadata of a step without its first ``requests`` requests.

        Rows are not sliced: attention begins behind the windows' ``tokens`` rows of the same tensors.

        Args:
            metadata: that of the whole step.
            requests: how many are left out.
            tokens: their rows.
            kv_cache: the layer's.

        """
        rest = replace(
            metadata,
            query_start_loc=metadata.query_start_loc[requests:],
            seq_lens=metadata.seq_lens[requests:],
            block_table=metadata.block_table[requests:],
        )
        return scheduled(self, rest, kv_cache)

    def nwor_last_rows(
        self,
        metadata: FlashAttentionMetadata,
        starts: torch.Tensor,
        seq_lens: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> FlashAttentionMetadata:
        """Return the metadata of one row of each request, as :class:`LastRowsPass` describes it.

        Args:
            metadata: that of a step of at least as many requests and rows.
            starts: int32 [requests + 1].
            seq_lens: int32 [requests].
            kv_cache: the layer's.

        """
        requests = seq_lens.shape[0]
        last = replace(
            metadata,
            num_actual_tokens=requests,
            max_query_len=1,
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_table=metadata.block_table[:requests],
            slot_mapping=metadata.slot_mapping[:requests],
            max_num_splits=min(metadata.max_num_splits, splits_for(requests)),
        )
        return scheduled(self, last, kv_cache)


class NworFlashAttentionMetadataBuilder(WindowsFirst, FlashAttentionMetadataBuilder):
    """The stock builder, which on model runner V1 asks for windows to stand first in the batch."""


class NworFlashAttentionBackend(ExtendedBackend, FlashAttentionBackend):
    """The stock backend with the classes above."""

    nwor_impl = NworFlashAttentionImpl
    nwor_builder = NworFlashAttentionMetadataBuilder
