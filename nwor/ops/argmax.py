"""``argmax_rows``: the most likely token of each row of logits."""

from __future__ import annotations

import torch

from nwor.ops import checks
from nwor.ops.registry import LIBRARIES

_argmax = torch.ops.nwor.argmax_rows.default

#: Numbers of workspace a row: the best so far, and how many thread blocks have arrived.
_A_ROW = 2
_MAX_VOCAB = 2**31 - 1


def make_argmax_workspace(rows: int, device: torch.device | str) -> torch.Tensor:
    """Return a workspace for :func:`argmax_rows`, int64 [2 * rows] of zeros.

    Args:
        rows: most rows of a call.
        device: where the logits are.

    Raises:
        TypeError, ValueError: if rows is no int or negative.

    """
    checks.integer("rows", rows, 0)
    return torch.zeros(_A_ROW * rows, dtype=torch.int64, device=device)


def argmax_rows(
    logits: torch.Tensor,
    output: torch.Tensor,
    workspace: torch.Tensor,
    *,
    validate: bool = True,
) -> None:
    """Write the index of each row's largest element, as ``torch.argmax(logits, dim=-1)`` gives it, in one
    launch.

    Of equal elements the first counts; -0.0 equals 0.0; a NaN is larger than all else. A row of -inf alone
    gives 0.

    Args:
        logits: float32, float16 or bfloat16 [R, V], V from 1 to 2**31 - 1; last dimension contiguous, the
            rows at any stride and any alignment: slices of a padded vocabulary, too.
        output: int64 [R], contiguous; written.
        workspace: int64, contiguous, at least 2 * R elements, all zero: see :func:`make_argmax_workspace`.
            On CUDA the thread blocks of a row meet there, and the last of them puts the zeros back. So it is
            zeroed once, serves calls of any number of rows one after another, also in CUDA graphs, and must
            not be shared by streams that run at once.
        validate: False leaves out the checks of this function; those of the op itself remain.

    Raises:
        TypeError, ValueError: if an argument is wrong; the message names it, what it is and what is wanted.

    """
    if validate:
        checks.tensor("logits", logits, dim=2)
        LIBRARIES.require(logits.device)
        checks.dtype("logits", logits, checks.SOURCE_DTYPES)
        rows, vocab = logits.shape
        if not 1 <= vocab <= _MAX_VOCAB:
            raise ValueError(f"logits: shape is {list(logits.shape)}, wanted 1 to {_MAX_VOCAB} columns")
        checks.last_contiguous("logits", logits)
        checks.vector("output", output, torch.int64, logits.device, size=rows)
        checks.vector("workspace", workspace, torch.int64, logits.device, at_least=_A_ROW * rows)
    _argmax(logits, output, workspace)
