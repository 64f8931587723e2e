"""Draft tokens that the device alone knows the number of: vLLM's adaptive verification.

The scheduler gives each request its draft tokens. The host then says how many of all these a step verifies,
and the device which requests they are of. So the rows of all windows together are known when a step is
planned, those of each window on the device, and on the host once the step's output has come.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nwor.counts.histogram import INT32


class TrimmedDrafts:
    """The draft tokens of each request of one step that the device has trimmed.

    Made before the step's forward pass, on the stream of that pass. The host does not wait.

    Args:
        first_logits: int32 [requests + 1] on the device: each request's first row of logits. It has a row for
            each of its draft tokens and one more. The next step may write there.
        num_tokens: rows of the step.

    Attributes:
        num_tokens: likewise.

    """

    __slots__ = ("_first_logits", "_on_host", "num_tokens")

    def __init__(self, first_logits: torch.Tensor, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._first_logits = first_logits
        # The output's own copies wait for all that was launched before them. So this one has come when they
        # have, and nobody has to wait for it.
        self._on_host = torch.empty(
            first_logits.shape, dtype=first_logits.dtype, pin_memory=first_logits.device.type == "cuda"
        )
        self._on_host.copy_(first_logits, non_blocking=True)

    def counts(self) -> npt.NDArray[Any]:
        """Return int32 [requests], the draft tokens of each; not before the step's output has come."""
        counts: npt.NDArray[Any] = np.diff(self._on_host.numpy()) - 1
        return counts.astype(INT32, copy=False)

    def rows(self, starts: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return bool [num_tokens] on the device: which leading rows are drafts. Only before the next step.

        Args:
            starts: int32 [leading requests + 1] on the device: the first row of each.
            num_tokens: their rows.

        """
        ends = starts[1:].contiguous()
        rows = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
        request = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
        drafts = self._first_logits.diff()[: len(ends)] - 1
        return rows >= (ends - drafts)[request]
