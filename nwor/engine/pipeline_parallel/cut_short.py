"""What earlier pipeline stages leave out, counted on a rank of the last one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from nwor.counts.records import WindowKind
from nwor.engine.pipeline_parallel.freed import FreedRequests
from nwor.worker_state import WorkerState


class CutShort:
    """Adds to a rank's counters what the figures of its windows' kinds do not say.

    A request may be freed before or after its window is counted here, and by another thread.

    Args:
        state: the rank's state.

    Attributes:
        step: number of the latest step.

    """

    def __init__(self, state: WorkerState) -> None:
        self.step = 0
        self._state = state
        self._freed = FreedRequests()
        self._counted: dict[int, dict[str, WindowKind]] = {}
        self._lock = threading.Lock()

    def next_step(self, in_flight: int, freed: AbstractSet[str]) -> None:
        """Take in a step; see :meth:`nwor.engine.window_manager.WindowManager.next_step`."""
        with self._lock:
            self.step += 1
            self._freed.note(self.step, in_flight, freed)
            for step in [step for step in self._counted if step < self.step - in_flight]:
                del self._counted[step]
            earlier = self._state.earlier
            for windows in self._counted.values():
                for request in freed & windows.keys():
                    assert earlier is not None
                    self._state.add_bytes(earlier.missing(windows.pop(request)))

    def count(self, step: int, windows: Mapping[str, WindowKind]) -> None:
        """Count the windows of a step, by request."""
        earlier = self._state.earlier
        if earlier is None:
            return
        with self._lock:
            still_open = self._counted.setdefault(step, {})
            for request, kind in windows.items():
                if self._freed.since(step, request):
                    self._state.add_bytes(earlier.missing(kind))
                else:
                    still_open[request] = kind
