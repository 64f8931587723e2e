"""Claim: what a step takes is measured as serving runs it, however few steps there are to measure.

Coverage: steps that the device takes longer for than the host, or the host than the device; a step that waits
for the device; a CPU. Reference: a device in virtual time, whose steps take what they are told.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from nwor.engine.draft_lengths import step_clock
from nwor.engine.draft_lengths.step_clock import LEAST_WAIT, MOST_WAIT, SPARE, StepClock

CYCLES_A_SECOND = 1.7e9


class Device:
    """A host and a device in virtual time: the device does one thing after another."""

    def __init__(self, launch: float, takes: float) -> None:
        self.launch, self.takes = launch, takes
        self.now = self.free = 0.0
        self.waits_at: int | None = None
        self.steps = 0
        self.slept: list[float] = []

    def run(self, seconds: float) -> None:
        self.free = max(self.free, self.now) + seconds

    def step(self) -> None:
        if self.steps == self.waits_at:
            self.synchronize()
        self.steps += 1
        self.now += self.launch
        self.run(self.takes)

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles / CYCLES_A_SECOND)
        self.run(self.slept[-1])

    def synchronize(self, device: object = None) -> None:
        self.now = max(self.now, self.free)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        made = SimpleNamespace(at=0.0)
        made.record = lambda: setattr(made, "at", max(self.now, self.free))
        made.elapsed_time = lambda later: 1e3 * (later.at - made.at)
        return made


@pytest.fixture
def clock_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StepClock]:
    def clock(device: Device, alone: bool = True) -> StepClock:
        monkeypatch.setattr(torch.cuda, "Event", device.event)
        monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", device.sleep)
        monkeypatch.setattr(step_clock.time, "perf_counter", lambda: device.now)
        return StepClock(torch.device("cuda"), alone)

    return clock


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize(("launch", "takes"), [(2e-3, 3e-3), (2.9e-3, 3e-3), (1e-4, 3e-3), (5e-3, 3e-3)])
def test_steps_take_what_they_do_when_launched_ahead(
    clock_of: Callable[..., StepClock], launch: float, takes: float, steps: int
) -> None:
    device = Device(launch, takes)
    clock = clock_of(device)
    for _ in range(3):
        assert clock.seconds(device.step, steps) == pytest.approx(max(launch, takes), rel=1e-6)
    # Timed from the launch of the first, they would seem longer.
    device.synchronize()
    began = device.now
    for _ in range(steps):
        device.step()
    device.synchronize()
    assert (device.now - began) / steps > 1.01 * max(launch, takes)


def test_the_device_waits_as_long_as_launches_take(clock_of: Callable[..., StepClock]) -> None:
    """A host that is far slower than was thought: the next measurement waits for it."""
    device = Device(19e-3, 20e-3)
    clock = clock_of(device)
    first = clock.seconds(device.step, 3)
    assert first > 1.01 * device.takes
    assert clock.seconds(device.step, 3) == pytest.approx(device.takes, rel=1e-6)


def test_a_step_that_waits_for_the_device_is_no_slow_launch(clock_of: Callable[..., StepClock]) -> None:
    device = Device(1e-3, 3e-3)
    clock = clock_of(device)
    clock.seconds(device.step, 2)
    device.waits_at = device.steps + 1
    # The second is launched when the device has done the first, which it began after its wait.
    assert clock.seconds(device.step, 2) == pytest.approx((2 * device.takes + device.launch) / 2, rel=1e-6)
    before = device.slept[-1]
    device.waits_at = None
    assert clock.seconds(device.step, 2) == pytest.approx(device.takes, rel=1e-6)
    assert device.slept[-1] == pytest.approx(before, rel=1e-3)


@pytest.mark.parametrize(
    ("launch", "waits"), [(1e-6, LEAST_WAIT), (1.0, MOST_WAIT), (3e-3, 2 * SPARE * 3e-3)]
)
def test_the_device_waits_neither_too_short_nor_too_long(
    clock_of: Callable[..., StepClock], launch: float, waits: float
) -> None:
    device = Device(launch, 1e-3)
    clock = clock_of(device)
    for _ in range(2):
        clock.seconds(device.step, 2)
    assert device.slept[-1] == pytest.approx(waits, rel=1e-3)


def test_a_device_among_others_is_not_kept_waiting(clock_of: Callable[..., StepClock]) -> None:
    device = Device(2e-3, 3e-3)
    assert clock_of(device, alone=False).seconds(device.step, 2) == pytest.approx((2e-3 + 6e-3) / 2)
    assert not device.slept


def test_a_cpu_runs_steps_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(2e-3, 0.0)
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: device.now)
    assert StepClock(torch.device("cpu")).seconds(device.step, 3) == pytest.approx(2e-3)
