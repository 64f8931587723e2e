"""A step's metadata where vLLM's own can be cut, as that of Triton and of most ROCm backends can.

Their kernels find the request of a row by the first rows of all requests, and these have to begin with 0. So
the rows behind the windows are a step of their own, with first rows of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

#: Triton compiles a kernel anew for an address that is no multiple of this, in bytes.
ALIGNMENT = 16


def rest_of(metadata: Any, requests: int, tokens: int) -> Any:
    """Return the metadata of a step without its first ``requests`` requests and their ``tokens`` rows.

    The longest query stays that of the whole step: which of its kernels Triton's attention launches follows
    from that number.

    Args:
        metadata: that of the whole step, a data class of vLLM's.
        requests: how many are left out.
        tokens: their rows.

    Raises:
        ValueError: if there is something in the metadata that a part of the step would have to have cut too.

    """
    for name in ("mm_prefix_range_tensor", "rswa_prefix_lens", "scheduler_metadata"):
        if getattr(metadata, name, None) is not None:
            raise ValueError(f"{name}: the step's attention is not plain")
    if not isinstance(metadata.causal, bool):
        raise ValueError("causal: differs between requests")
    return replace(
        metadata,
        num_actual_tokens=metadata.num_actual_tokens - tokens,
        query_start_loc=metadata.query_start_loc[requests:] - tokens,
        seq_lens=aligned(metadata.seq_lens[requests:]),
        block_table=aligned(metadata.block_table[requests:]),
        slot_mapping=metadata.slot_mapping[tokens:],
    )


def aligned(part: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it where a kernel would be compiled in the middle of serving."""
    return part.clone() if part.data_ptr() % ALIGNMENT else part


class CutsMetadata:
    """Stands before vLLM's implementation: how ``StagedAttention`` gets the metadata of a part."""

    def nwor_rest(self, metadata: Any, requests: int, tokens: int, kv_cache: torch.Tensor) -> Any:
        """Return the metadata of a step without its first requests; see :func:`rest_of`.

        Args:
            metadata: that of the whole step.
            requests: how many are left out.
            tokens: their rows.
            kv_cache: the layer's; of no matter here.

        """
        return rest_of(metadata, requests, tokens)
