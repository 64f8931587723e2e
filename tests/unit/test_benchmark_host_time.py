"""Claims: host time is summed up by mode and turn, modes are compared turn by turn, and the report says so.

Coverage: both watches' results, steps that do not count, the passes' turns in an engine with NWOR and in one
without, a pass in which a step has more than one wait, results of before there were turns. The engine is a
stand-in.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "engine"
#: Modules of the benchmark that import each other by their bare names.
NAMES = ("grid", "results", "host_time", "report")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    yield found
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)


def _values(seconds: list[float], skipped: int, **more: list[float]) -> dict[str, list[float]]:
    steps = [9.0] * skipped + seconds
    ends = [float(number) for number in range(len(steps))]
    return {"seconds": steps, "ends": ends, **{name: [9.0] * skipped + own for name, own in more.items()}}


def test_medians_and_means_of_each_turn(modules: Any) -> None:
    host_time = modules.host_time
    skipped = host_time.SKIPPED
    seen = {
        "off/0": _values([1.0, 2.0, 6.0], skipped, timing=[0.5, 0.5, 0.5]),
        "stage/0": _values([2.0, 4.0, 9.0], skipped, timing=[0.5, 1.0, 0.5]),
        "stage/1": _values([5.0, 5.0, 5.0], skipped, timing=[1.0, 1.0, 1.0]),
        "off/1": _values([3.0, 3.0, 3.0], skipped, timing=[0.0, 0.0, 0.0]),
    }
    result = host_time.summarize(seen)
    assert result["off"]["turns"] == pytest.approx([1.5e6, 3e6])
    assert result["stage"]["turns"] == pytest.approx([3e6, 4e6])
    assert result["off"]["means"] == pytest.approx([2.5e6, 3e6])
    assert result["off"]["steps"] == 6
    assert result["off"]["step"] == pytest.approx(1e6)
    assert result["off"]["timing"] == pytest.approx(0.25e6)
    # The turns differ by 1.5 and by 1 second.
    assert host_time.difference(result["stage"], result["off"]) == pytest.approx((1.25e6, 0.25e6))
    means = host_time.difference(result["stage"], result["off"], "means")
    assert means == pytest.approx(((13 / 3 - 2.5 + 1) / 2 * 1e6, (13 / 3 - 2.5 - 1) / 2 * 1e6))


def test_another_series_of_the_same_steps(modules: Any) -> None:
    seen = {"stock/0": _values([1.0, 2.0, 3.0], modules.host_time.SKIPPED, cpu=[0.5, 0.6, 0.7])}
    assert modules.host_time.summarize(seen)["stock"]["median"] == pytest.approx(2e6)
    assert modules.host_time.summarize(seen, "cpu")["stock"]["median"] == pytest.approx(0.6e6)


def test_one_turn_has_no_error(modules: Any) -> None:
    assert modules.host_time.difference({"turns": [1.0]}, {"turns": [2.0]}) is None
    assert modules.host_time.difference({"median": 1.0}, {"median": 2.0}) is None


class Engine:
    """As much of the benchmark's engine as is called here; its worker's watch sees what `waits` says.

    Args:
        modes: NWOR's modes; none for stock vLLM.
        waits: waits of a step.

    """

    def __init__(self, modes: list[str], waits: int = 1) -> None:
        self.nwor_modes, self.modes = modes, modes or ["stock"]
        self.args = SimpleNamespace(batches=[1, 16])
        self.record: dict[str, Any] = {}
        self.waits = waits
        self.asked: list[str] = []
        self.mode, self.label, self.kind = self.modes[0], "", ""
        self.seen: dict[str, dict[str, list[float]]] = {}
        self.turns = SimpleNamespace(ask=lambda at, cell: self.asked.append(cell))
        self.llm = SimpleNamespace(collective_rpc=self.call)

    def call(self, method: str, args: tuple[str, ...] = ()) -> list[Any]:
        """Do what the worker does."""
        if method == "bench_watch_label":
            (self.label,) = args
        elif method == "bench_watch_stop":
            seen, self.seen = self.seen, {}
            return [seen]
        else:
            self.kind = method
        return [None]

    def batch(self, context: int, batch: int) -> Engine:
        """Return requests."""
        assert (context, batch) == (512, 16)
        return self

    def __enter__(self) -> Engine:
        self.run(3)  # what fills a batch is nobody's
        return self

    def __exit__(self, *error: object) -> None:
        self.run(2)

    def run(self, steps: int) -> None:
        """Take steps, `stage` a microsecond more than the others."""
        if not self.kind:
            return
        second = "cpu" if self.kind == "bench_watch_busy" else "timing"
        values = self.seen.setdefault(self.label, {"seconds": [], "ends": [], second: []})
        for _ in range(steps * (self.waits if second == "cpu" else 1)):
            values["seconds"].append(5e-6 + 1e-6 * (self.mode == "stage"))
            values["ends"].append(len(values["ends"]) * 1e-3)
            values[second].append(1e-6)

    def set_mode(self, mode: str) -> None:
        """Put a mode in force."""
        self.mode = mode

    def set_acceptance(self, rate: float) -> None:
        """Do nothing."""

    def save(self) -> None:
        """Do nothing."""


@pytest.mark.long
def test_all_passes_of_both_engines(modules: Any) -> None:
    engines = {"stock": Engine([]), "nwor": Engine(["off", "stage", "cow"])}
    for engine in engines.values():
        modules.host_time.measure(engine, 100)
    stock, nwor = (engine.record["host_time"] for engine in engines.values())
    assert engines["stock"].asked == engines["nwor"].asked  # both have the same turns
    assert set(stock) == {"batch", "context", "acceptance", "busy", "cpu", "runner"}
    assert set(nwor) == {*stock, "hooks"}
    for timed in ("busy", "hooks"):
        assert set(nwor[timed]) == {"off", "stage"}
        assert nwor[timed]["stage"]["steps"] == 100
        assert len(nwor[timed]["stage"]["turns"]) == 10
        apart = modules.host_time.difference(nwor[timed]["stage"], nwor[timed]["off"])
        assert apart == pytest.approx((1.0, 0.0))
    assert stock["runner"]["stock"]["steps"] == 20


def test_more_waits_than_steps_are_said(modules: Any) -> None:
    engine = Engine(["off"], waits=2)
    modules.host_time.measure(engine, 100)
    assert "waits in 18 steps" in engine.record["host_time"]["error"]
    assert "hooks" in engine.record["host_time"]


def _process(kind: str, times: dict[str, Any]) -> dict[str, Any]:
    place = {"batch": 64, "context": 512, "acceptance": 0.6}
    return {"kind": kind, "shape": "1b", "k": 4, "graph_tokens": 512, "host_time": {**place, **times}}


def _mode(median: float, turns: list[float] | None = None) -> dict[str, Any]:
    figures: dict[str, Any] = {"median": median, "low": median - 1, "high": median + 1, "step": 3500.0}
    return figures if turns is None else {**figures, "turns": turns, "means": [turn + 1 for turn in turns]}


def test_the_report_compares_both_processes(modules: Any) -> None:
    stock = _process("stock", {"busy": {"stock": _mode(2000.0, [1990.0, 2010.0])}})
    times = {"off": _mode(1700.0, [1700.0, 1700.0]), "stage": _mode(1740.0, [1735.0, 1745.0])}
    hooks = {"off": _mode(30.0), "stage": _mode(62.0)}  # as results of before there were turns have it
    nwor = _process("nwor", {"busy": times, "hooks": hooks, "error": "Traceback\nValueError: a|b"})
    lines = modules.report.host([{"processes": [stock, nwor]}])
    busy, hooked, failed = lines[2:]
    assert busy == (
        "| 1b, k=4, 64 x 512, 0.6 | busy | 2000.0 (1999.0..2001.0) of 3500 | 1700.0 (1699.0..1701.0) of 3500"
        " | 1740.0 (1739.0..1741.0) of 3500 | -300.0 ± 10.0 [-300.0 ± 10.0] | -260.0 ± 5.0 [-260.0 ± 5.0]"
        " | +40.0 ± 5.0 [+40.0 ± 5.0] |"
    )
    assert hooked.endswith("| - | - | +32.0 |")
    assert "failed, nwor: ValueError: a/b" in failed
    assert {line.count("|") for line in lines} == {9}
    assert modules.report.host([{"processes": [{"kind": "stock", "shape": "1b", "k": 4}]}]) == []
