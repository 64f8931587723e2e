"""Tables of docs/performance.md about steps while prompts join, from the results of mixed_steps.py."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving import mixed_cells
from benchmarks.serving.tables import table

RESULTS = Path(__file__).parent / "results"
#: Kinds of cells in which prompts join.
KINDS: tuple[tuple[str, Callable[[int], bool]], ...] = (
    ("no prompts", lambda prompt: not prompt),
    ("64 and 128 tokens", lambda prompt: 0 < prompt <= 128),
    ("512 and 1024", lambda prompt: 128 < prompt <= 1024),
    ("2048 and longer", lambda prompt: prompt > 1024),
)
#: Kinds of kernels by what their names have; the first that fits.
KERNELS = (
    ("attention of windows", re.compile(r"nwor::.*(verify|join|combine)")),
    ("FlashAttention", re.compile(r"flash::")),
    ("K/V written, kept, committed", re.compile(r"reshape_and_cache|stage_kernel|commit")),
    ("matrix products", re.compile(r"nvjet|gemm|cublas|splitK|cutlass")),
    ("other", re.compile("")),
)


def engines(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the engines of a file of results by what they are called in tables."""
    document = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return [
        (f"{one['shape'].upper()}, {'bf16' if one['cache'] == 'auto' else one['cache']} cache", one)
        for one in document["engines"]
    ]


def _lines(*heads: str, rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(table(heads, rows))


def _ms(blocks: Sequence[Mapping[str, Any]], figure: str = "typical") -> float:
    return statistics.median(block[figure] for block in blocks)


def parts() -> str:
    """What a step takes while prompts join, and how much of it the host does not wait for the device."""
    rows = []
    for name, engine in engines("h100-mixed"):
        for what, belongs in KINDS:
            cells = [cell["blocks"] for cell in engine["cells"] if belongs(cell["prompt"])]
            if not cells:
                continue

            def sides(figure: str, cells: Any = cells) -> str:
                modes = ("off", "stage")
                means = (statistics.fmean(_ms(blocks[mode], figure) for blocks in cells) for mode in modes)
                return " → ".join(f"{mean:.1f}" for mean in means)

            rows.append([name, what, sides("typical"), sides("host")])
    return _lines("engine", "prompts", "a step, ms", "the host's work in it, ms", rows=rows)


def kinds() -> str:
    """Steps while prompts join: geometric means by engine and by prompts."""
    rows = []
    for name, engine in engines("h100-mixed"):
        found = {
            (cell["requests"], cell["prompt"]): mixed_cells.geometric_mean(
                mixed_cells.ratios(cell["blocks"], "off", "stage", "typical")
            )
            for cell in engine["cells"]
        }
        low = min(found, key=found.__getitem__)
        row = [name, str(len(found))]
        for _, belongs in KINDS:
            some = [ratio for (_, prompt), ratio in found.items() if belongs(prompt)]
            row.append(f"{mixed_cells.geometric_mean(some):.3f}" if some else "-")
        row += [
            f"{mixed_cells.geometric_mean(list(found.values())):.3f}",
            f"{sum(ratio < 1 for ratio in found.values())}, lowest {found[low]:.3f} ({low[0]} x {low[1]})",
        ]
        rows.append(row)
    return _lines("engine", "cells", *(name for name, _ in KINDS), "all", "cells below 1", rows=rows)


def cells() -> str:
    """Steps while prompts join on an H200, cell by cell, with the settings of the engine."""
    rows = []
    for name, engine in engines("h200-mixed"):
        settings = ", ".join(f"`{one}`" for one in engine["engine"]["settings"])
        if "fast_drafting" in settings:
            continue
        for cell in engine["cells"]:
            times = " → ".join(f"{_ms(cell['blocks'][mode]):.2f}" for mode in ("off", "stage"))
            each = mixed_cells.ratios(cell["blocks"], "off", "stage", "typical")
            mean = f"{mixed_cells.geometric_mean(each):.3f} ({min(each):.3f} to {max(each):.3f})"
            rows.append([name, settings, _cell(cell), times, mean])
    return _lines("engine", "setting", "requests x prompt", "a step, ms", "`off` / `stage`", rows=rows)


def drafts() -> str:
    """Steps by their number of draft tokens, beside stock without speculation."""
    modes = ("stock", "stage@0", "stage@1")
    found: dict[str, dict[str, str]] = {}
    for _, engine in engines("h200-drafts"):
        profiles = {profile["cell"]: profile["kernels"] for profile in engine["profiles"]}
        for cell in engine["cells"]:
            for mode, blocks in cell["blocks"].items():
                step = f"{_ms(blocks):.2f}"
                if kernels_ := profiles.get(_cell(cell), {}).get(mode):
                    step += f" ({sum(spent for _, spent in kernels_.values()) / 1e3:.2f})"
                found.setdefault(_cell(cell), {})[mode] = step
    rows = [[cell_name, *(steps[mode] for mode in modes)] for cell_name, steps in found.items()]
    heads = ("requests x prompt", "stock without speculation", "`stage`, 0 draft tokens", "1 draft token")
    return _lines(*heads, rows=rows)


def by_kind(kernels: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return microseconds a step by kind of kernel.

    Args:
        kernels: calls and microseconds a step by name.

    """
    found = dict.fromkeys((kind for kind, _ in KERNELS), 0.0)
    for name, (_, spent) in kernels.items():
        found[next(kind for kind, pattern in KERNELS if pattern.search(name))] += spent
    return found


def kernels() -> str:
    """What kernels take in a step, by kind."""
    rows = []
    for name, engine in engines("h200-mixed"):
        for profile in engine["profiles"]:
            modes = [by_kind(profile["kernels"][mode]) for mode in ("off", "stage")]
            cells = {cell["requests"]: cell for cell in engine["cells"] if _cell(cell) == profile["cell"]}
            took = [_ms(cell["blocks"][mode]) for cell in cells.values() for mode in ("off", "stage")]
            step = " → ".join(f"{1e3 * one:.0f}" for one in took) or "-"
            kinds_ = [" → ".join(f"{mode[kind]:.0f}" for mode in modes) for kind, _ in KERNELS]
            rows.append([name.removesuffix(", bf16 cache"), profile["cell"], step, *kinds_])
    heads = ("engine", "requests x prompt", "a step, us", *(kind for kind, _ in KERNELS))
    return _lines(*heads, rows=rows)


def _cell(cell: Mapping[str, Any]) -> str:
    return mixed_cells.of(cell).name


def first_pass() -> str:
    """Steps with the drafter's first pass in one part and in two."""
    rows = []
    whole = {
        (name, _cell(cell)): cell["blocks"]
        for name, engine in engines("h200-mixed")
        if "fast_drafting=false" in engine["engine"]["settings"]
        for cell in engine["cells"]
    }
    for name, engine in engines("h200-mixed"):
        for cell in engine["cells"]:
            other = whole.get((name, _cell(cell)))
            if engine["engine"]["settings"] or other is None:
                continue
            row = [name.partition(",")[0], _cell(cell)]
            for mode in ("off", "stage"):
                one, two = _ms(other[mode]), _ms(cell["blocks"][mode])
                row.append(f"{one:.2f} → {two:.2f}, {one / two:.3f}")
            rows.append(row)
    return _lines("engine", "requests x prompt", "`off`, ms", "`stage`, ms", rows=rows)
