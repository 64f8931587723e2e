"""The stopwatches of the benchmarks: only what an override adds counts, or what a thread is busy with."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "engine" / "stopwatch.py"
_SPEC = importlib.util.spec_from_file_location("stopwatch", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
stopwatch = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(stopwatch)


class Clock:
    """Each reading takes a microsecond, half of it before and half after the instant that it returns."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now - 0.5


CLOCK = Clock()


class Stock:
    def step(self) -> None:
        CLOCK.now += 100

    def alone(self) -> None:
        CLOCK.now += 1000


class Override(Stock):
    def step(self) -> None:
        CLOCK.now += 7
        super().step()
        CLOCK.now += 5

    def end(self) -> None:
        CLOCK.now += 3


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "time", CLOCK)


@pytest.mark.parametrize("controls", [True, False])
def test_what_an_override_adds(controls: bool) -> None:
    watch: Any = stopwatch.Stopwatch()
    before = [vars(Stock)["step"], vars(Stock)["alone"], vars(Override)["step"]]
    watch.attach(Override, "step", stock=True)
    if controls:
        watch.attach_control(Override, "alone")
    watch.attach(Override, "end", ends_step=True)
    watch.label = "a"
    runner = Override()
    for steps in (1, 2):
        for _ in range(steps):
            runner.step()
            runner.alone()
        runner.end()
    watch.detach()
    assert [vars(Stock)["step"], vars(Stock)["alone"], vars(Override)["step"]] == before
    timing = watch.timing["a"]
    net = [seconds - own for seconds, own in zip(watch.seconds["a"], timing, strict=True)]
    if controls:  # but for `end`, which calls no stock method: its timing reads the clock less often
        assert net == pytest.approx([15, 27], abs=1.01)
    else:
        assert timing == [0, 0]
        assert all(own > added for own, added in zip(watch.seconds["a"], [15, 27], strict=True))


class Event:
    def wait(self) -> str:
        CLOCK.now += 500
        return "done"


def test_a_thread_but_for_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLOCK, "thread_time", lambda: 0.0, raising=False)
    original = vars(Event)["wait"]
    watch: Any = stopwatch.IdleWatch()
    watch.attach(Event, "wait")
    for label, work in (("", 1), ("a", 20), ("a", 30), ("b", 40)):
        watch.label = label
        CLOCK.now += work
        assert Event().wait() == "done"
        other = threading.Thread(target=Event().wait)  # nobody's step, but 500 of this thread's next
        other.start()
        other.join()
    watch.detach()
    assert vars(Event)["wait"] is original
    # The first wait has none before it. A reading of the clock at each end takes half a unit.
    assert {label: [own - 501 for own in seconds] for label, seconds in watch.seconds.items()} == {
        "a": [20, 30],
        "b": [40],
    }
    assert [len(watch.cpu["a"]), len(watch.ends["a"])] == [2, 2]
