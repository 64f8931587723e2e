"""Where a step's time goes: kernels by torch's profiler, host functions by Python's, mode by mode."""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from typing import Any

from benchmarks.serving import mixed_report
from benchmarks.serving.mixed_cells import Cell

#: Steps under each profiler.
STEPS = 20
#: Functions that are kept of each mode.
_KEPT = 160


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
    print("\n".join(mixed_report.profile_tables(result)), flush=True)
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
    ranked = sorted(table.items(), key=lambda one: -one[1][1])[:_KEPT]
    return {name: [round(calls / steps, 3), round(spent / steps, 2)] for name, (calls, spent) in ranked}
