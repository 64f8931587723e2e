"""``stage_window``: a copy of a window aside, for callers that cannot keep its tensors alive."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nwor.ops import checks
from nwor.ops.registry import LIBRARIES

#: ``kMaxStageLayers`` of the CUDA kernel.
MOST_CUDA_LAYERS = 256

_stage = torch.ops.nwor.stage_window.default


def stage_window(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    staged_keys: Sequence[torch.Tensor],
    staged_values: Sequence[torch.Tensor],
    num_tokens: torch.Tensor,
    *,
    validate: bool = True,
) -> None:
    """Copy the leading rows of all layers' keys and values into tensors of the caller, in one launch.

    Args:
        keys: per layer [T, Hk, D], last dimension contiguous, other strides free and per tensor. On CUDA at
            most 256 layers.
        values: likewise.
        staged_keys: per layer [T', Hk, D]; rows below num_tokens are written. Each in memory of its own.
        staged_values: likewise.
        num_tokens: int32 [1] on the device: rows to copy, at most T and T' (more is an error on CPU and cut
            on CUDA).
        validate: False leaves out the checks of this function; those of the op itself remain.

    Raises:
        TypeError, ValueError: if an argument is wrong; the message names it, what it is and what is wanted.
        RuntimeError: on CPU also for num_tokens out of range, before anything is written.

    """
    if validate:
        layers = len(checks.tensors("keys", keys))
        first = checks.tensor("keys[0]", keys[0], dim=3)
        LIBRARIES.require(first.device)
        lists = (
            ("keys", keys),
            ("values", values),
            ("staged_keys", staged_keys),
            ("staged_values", staged_values),
        )
        for name, some in lists:
            checks.tensors(name, some, size=layers)
            for i, one in enumerate(some):
                checks.tensor(f"{name}[{i}]", one, dim=3)
                checks.shape(f"{name}[{i}]", one, (some[0].shape[0], *first.shape[1:]))
                checks.dtype(f"{name}[{i}]", one, checks.SOURCE_DTYPES)
                checks.dtype(f"{name}[{i}]", one, first.dtype)
                checks.device(f"{name}[{i}]", one, first.device)
                checks.last_contiguous(f"{name}[{i}]", one)
                if some is staged_keys or some is staged_values:
                    checks.apart(f"{name}[{i}]", one)
        if first.is_cuda and layers > MOST_CUDA_LAYERS:
            raise ValueError(f"keys: has {layers} tensors, wanted at most {MOST_CUDA_LAYERS} on CUDA")
        checks.vector("num_tokens", num_tokens, torch.int32, first.device, size=1)
    _stage(keys, values, staged_keys, staged_values, num_tokens)
