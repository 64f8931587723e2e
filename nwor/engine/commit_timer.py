"""How long commits take, measured without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

import torch

#: Measurements that wait to be asked for; a rank that reports asks in every verify step.
_KEPT = 1000


class CommitTimer:
    """Times each ``with`` block: the host's clock on a CPU, a pair of events on a GPU.

    Events are read in a later step, once the device has passed them; nobody waits for them. Ranks that report
    nothing never ask, so only the latest measurements are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._started = 0.0
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._open: torch.cuda.Event | None = None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_KEPT)

    def __enter__(self) -> None:
        if not self._events:
            self._started = time.perf_counter()
            return
        self._open = torch.cuda.Event(enable_timing=True)
        self._open.record()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the measurement; that of a failed commit is dropped."""
        if kind is not None:
            return
        if not self._events:
            self._seconds.append(time.perf_counter() - self._started)
            return
        assert self._open is not None
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._pending.append((self._open, end))

    def drain(self) -> tuple[int, float]:
        """Return how many measurements were completed since the last call, and their sum in seconds."""
        while self._pending and self._pending[0][1].query():
            start, end = self._pending.popleft()
            self._seconds.append(start.elapsed_time(end) / 1000)
        count, seconds = 0, 0.0
        while self._seconds:
            count, seconds = count + 1, seconds + self._seconds.popleft()
        return count, seconds
