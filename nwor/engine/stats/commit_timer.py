"""How long commits take, measured without waiting for the device."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import TracebackType

import torch

#: On a GPU one commit of so many is measured: two events, made and recorded, cost the host microseconds.
EVERY = 8
#: Pairs of events that may wait to be read; a rank whose figures nobody asks for keeps no more.
MOST_PENDING = 32


class CommitTimer:
    """Times ``with`` blocks, by the host's clock on a CPU and by two events on a GPU.

    Which ones are timed :meth:`due` says: each on a CPU, one of :data:`EVERY` on a GPU.

    Events are read in a later step, once the device has passed them; nobody waits for them. The thread that
    launches commits and the one that counts windows may be two.

    Attributes:
        waiting: whether :meth:`drain` may have something to return.

    """

    def __init__(self, device: torch.device) -> None:
        self.waiting = False
        self._events = device.type == "cuda"
        self._started = 0.0
        self._count, self._seconds = 0, 0.0
        self._turn = 0
        self._reading = threading.Lock()
        self._open: torch.cuda.Event | None = None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def due(self) -> bool:
        """Return whether the next commit is to be timed; asked once for each."""
        if not self._events:
            return True
        self._turn = (self._turn + 1) % EVERY
        return self._turn == 1

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
        start, self._open = self._open, None
        if kind is not None:
            return
        if not self._events:
            with self._reading:
                self._add(time.perf_counter() - self._started)
        elif start is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._pending.append((start, end))
            if len(self._pending) > MOST_PENDING:
                with self._reading:
                    self._read()
        self.waiting = True

    def _add(self, seconds: float) -> None:
        self._count += 1
        self._seconds += seconds

    def _read(self) -> None:
        while self._pending and self._pending[0][1].query():
            start, end = self._pending.popleft()
            self._add(start.elapsed_time(end) / 1000)

    def drain(self) -> tuple[int, float]:
        """Return how many measurements were completed since the last call, and their sum in seconds."""
        with self._reading:
            if self._pending:
                self._read()
            self.waiting = bool(self._pending)
            drained = self._count, self._seconds
            self._count, self._seconds = 0, 0.0
        return drained
