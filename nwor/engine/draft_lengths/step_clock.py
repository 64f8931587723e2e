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

    A few steps in a row begin with one that the device waits for: the fewer they are and the shorter, the
    more the host shows in their mean. So the device is kept waiting until all are launched, and only then
    are they timed. A step takes no less than its launch: where the host is slower, it sets the pace.

    Args:
        device: where steps run. Those of a CPU are timed as they are.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launch = FIRST_LAUNCH
        self._cycles = self._cycles_a_second() if device.type == "cuda" else 0.0

    def seconds(self, step: Callable[[], None], steps: int) -> float:
        """Return the seconds of one of several steps in a row.

        Args:
            step: launches one.
            steps: how many.

        """
        if self._device.type != "cuda":
            before = time.perf_counter()
            for _ in range(steps):
                step()
            return (time.perf_counter() - before) / steps
        wait = min(max(SPARE * steps * self._launch, LEAST_WAIT), MOST_WAIT)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        torch.cuda._sleep(int(wait * self._cycles))
        began.record()
        launched = [time.perf_counter()]
        for _ in range(steps):
            step()
            launched.append(time.perf_counter())
        ended.record()
        torch.cuda.synchronize(self._device)
        launches = [after - before for before, after in pairwise(launched)]
        self._launch = sum(launches) / steps
        # A launch that waits for the device is no work of the host's: the shortest is.
        return max(began.elapsed_time(ended) / 1e3 / steps, min(launches))

    def _cycles_a_second(self) -> float:
        """Return how many cycles of waiting make a second on the device."""
        seconds = []
        for _ in range(3):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            torch.cuda._sleep(_CYCLES)
            ended.record()
            torch.cuda.synchronize(self._device)
            seconds.append(began.elapsed_time(ended) / 1e3)
        return _CYCLES / min(seconds)
