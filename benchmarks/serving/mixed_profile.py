"""Where a step's time goes: kernels by torch's profiler, host functions by Python's, mode by mode."""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from typing import Any

from benchmarks.serving.mixed_cells import Cell

#: Steps under each profiler.
STEPS = 20
#: Lines of each table.
_LINES = 40


def profile(rig: Any, cell: Cell) -> dict[str, Any]:
    """Return kernels and host functions of a cell in every mode, and print what differs most."""
    result: dict[str, Any] = {"cell": cell.name, "steps": STEPS, "kernels": {}, "host": {}}
    rig.begin(cell)
    try:
        for mode in rig.modes:
            rig.block(mode, cell, 8)
            result["kernels"][mode] = _kernels(rig, mode, cell)
            result["host"][mode] = _host(rig, mode, cell)
    finally:
        rig.end()
    for kind in ("kernels", "host"):
        _show(f"{cell.name} {kind}", result[kind])
    return result


def _kernels(rig: Any, mode: str, cell: Cell) -> dict[str, list[float]]:
    """Return calls and microseconds a step by kernel; nothing without a GPU."""
    import torch
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    if not torch.cuda.is_available():
        return {}
    began = rig.steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        rig.block(mode, cell, STEPS)
        torch.cuda.synchronize()
    table: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            table[event.name[:120]][0] += 1
            table[event.name[:120]][1] += event.time_range.end - event.time_range.start
    return _per_step(table, rig.steps - began)


def _host(rig: Any, mode: str, cell: Cell) -> dict[str, list[float]]:
    """Return calls and own microseconds a step by Python function; the profiler makes all of them slower."""
    watch, began = cProfile.Profile(), rig.steps
    watch.enable()
    rig.block(mode, cell, STEPS)
    watch.disable()
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(watch).stats  # type: ignore[attr-defined]
    table = {
        f"{'/'.join(file.split('/')[-3:])}:{line} {name}": [float(calls), 1e6 * own]
        for (file, line, name), (_, calls, own, _, _) in stats.items()
    }
    return _per_step(table, rig.steps - began)


def _per_step(table: dict[str, list[float]], steps: int) -> dict[str, list[float]]:
    ranked = sorted(table.items(), key=lambda one: -one[1][1])[: 4 * _LINES]
    return {name: [round(calls / steps, 3), round(spent / steps, 2)] for name, (calls, spent) in ranked}


def _show(title: str, tables: dict[str, dict[str, list[float]]]) -> None:
    modes = list(tables)
    base = tables[modes[0]]
    names = {name for table in tables.values() for name in table}

    def moved(name: str) -> float:
        times = [table.get(name, [0, 0])[1] for table in tables.values()]
        return max(abs(one - base.get(name, [0, 0])[1]) for one in times) if len(times) > 1 else times[0]

    print(f"{title}: calls and us a step")
    for mode in modes:
        print(f"  in all {mode} {sum(spent for _, spent in tables[mode].values()):.0f}")
    for name in sorted(names, key=moved, reverse=True)[: _LINES // 2]:
        cells = "  ".join(
            f"{mode} {tables[mode].get(name, [0, 0])[0]:g}x {tables[mode].get(name, [0, 0])[1]:.0f}"
            for mode in modes
        )
        print(f"  {name[:90]:90} {cells}", flush=True)
