"""Times steps as serving runs them: the host launches a step while the device is still at the one before."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

#: Seconds that the host is taken to need for a launch before any was seen, and bounds of the device's wait.
FIRST_LAUNCH, LEAST_WAIT, MOST_WAIT = 4e-3, 1e-3, 0.1
#: The device waits so many times as long as the host is expected to launch.
SPARE = 1.3
#: Cycles that tell how long a cycle of the device's wait is.
_CYCLES = 1_000_000


class StepClock:
    """Times steps on one device.

    A few steps in a row begin with one that the device waits for. The fewer they are and the shorter, the
    more the host shows in their mean. So the device is kept waiting until all are launched, and only then
    are they timed. A step takes no less than its launch: where the host is slower, it sets the pace.

    Args:
        device: where steps run. Those of a CPU are timed as they are.
        alone: whether no other device takes part in the steps. Else they are timed as they are too: one
            would wait for another that is kept waiting longer.

    """

    def __init__(self, device: torch.device, alone: bool = True) -> None:
        self._device = device
        self._launch = FIRST_LAUNCH
        self._cycles = self._cycles_a_second() if device.type == "cuda" and alone else 0.0

    def seconds(self, step: Callable[[], None], steps: int) -> float:
        """Return the seconds of one of several steps in a row.

        Args:
            step: launches one.
            steps: how many.

        """
        if not self._cycles:
            self._finish()
            before = time.perf_counter()
            for _ in range(steps):
                step()
            self._finish()
            return (time.perf_counter() - before) / steps
        launched: list[float] = []

        def launch() -> None:
            launched.append(time.perf_counter())
            for _ in range(steps):
                step()
                launched.append(time.perf_counter())

        wait = min(max(SPARE * steps * self._launch, LEAST_WAIT), MOST_WAIT)
        self._finish()
        torch.cuda._sleep(int(wait * self._cycles))
        taken = self._on_device(launch)
        # A launch that waits for the device, or for the collector, is no work of its own: the shortest is.
        self._launch = min(after - before for before, after in pairwise(launched))
        return max(taken / steps, self._launch)

    def _on_device(self, launch: Callable[[], None]) -> float:
        """Return the seconds that the device takes for what is launched, once it has done all before."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        launch()
        ended.record()
        self._finish()
        return began.elapsed_time(ended) / 1e3

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _cycles_a_second(self) -> float:
        """Return how many cycles of waiting make a second on the device."""
        return _CYCLES / min(self._on_device(lambda: torch.cuda._sleep(_CYCLES)) for _ in range(3))
