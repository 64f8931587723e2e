"""Turns results of run.py into Markdown, every cell of them, and the plots of docs/plots.

    cd benchmarks/kernels/results
    python ../report.py h200-{bf16,fp8,flashinfer-bf16,flashinfer-fp8,reading-bf16}.json --output h200.md

`benchmarks/performance.py` makes the summary in docs/performance.md from the same results.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cells import BATCHES, CONTEXTS, DRAFTS, FLASHINFER, JOINED_DRAFTS

PLOTS = Path(__file__).resolve().parents[2] / "docs" / "plots"
Row = dict[str, Any]


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def speedup(row: Row) -> float:
    return row["stock"] / row["nwor"]


def noise(row: Row) -> float:
    """Relative noise of the speed-up: both sides' together."""
    return row["stock_noise"] / row["stock"] + row["nwor_noise"] / row["nwor"]


def bandwidth(row: Row) -> float:
    """Bytes of context per second of verify_attention, its commit's share taken out."""
    return row["cache_bytes"] / ((row["nwor"] - row["commit"] / 32) * 1e-6)


def copy_bandwidth(row: Row, large: float) -> float:
    """Bytes per second of a copy that moves as many bytes as the cell reads; `large`: of one of 4 GiB.

    From 1 GB on the large one stands for it: in a graph such copies move a third less.
    """
    return row["cache_bytes"] / (row["copy"] * 1e-6) if row["cache_bytes"] < 1e9 else large


def cell_text(row: Row | None, copy: float) -> str:
    if row is None or "nwor" not in row:
        return "-"
    floor = row["least_bytes"] / copy * 1e6
    text = f"{row['stock']:.1f} / {row['nwor']:.1f} / {floor:.1f}: {speedup(row):.2f}"
    return f"**{text}**" if speedup(row) < 1 - noise(row) else text


def table(rows: Sequence[Row], text: Callable[[Row | None], str]) -> str:
    by_cell = {(r["batch"], r["context"], r["drafts"]): r for r in rows}
    lines = [
        "| k | context | " + " | ".join(f"batch {b}" for b in BATCHES) + " |",
        "|---|---|" + "---|" * len(BATCHES),
    ]
    for drafts in DRAFTS:
        for context in CONTEXTS:
            cells = [text(by_cell.get((b, context, drafts))) for b in BATCHES]
            lines.append(f"| {drafts} | {context} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fastest_flashinfer(row: Row) -> str:
    """FlashInfer's fastest way in a cell that has one."""
    return min((way for way in FLASHINFER if way in row), key=lambda way: row[way])


def against_flashinfer(row: Row) -> tuple[float, float]:
    """FlashInfer's time over nwor's, and the noise of both, relative."""
    way = fastest_flashinfer(row)
    return row[way] / row["nwor"], row[way + "_noise"] / row[way] + row["nwor_noise"] / row["nwor"]


def flashinfer_part(name: str, rows: Sequence[Row], origin: str) -> str:
    """The section of a run that has FlashInfer's ways: a line for each cell, and the means of all."""
    ratios = [against_flashinfer(r) for r in rows]
    beside = [r["stock"] / r[fastest_flashinfer(r)] for r in rows]
    slower = sum(ratio < 1 - either for ratio, either in ratios)
    apart = [difference for r in rows for difference in r["differences"].values()]
    worst = max(apart, key=lambda d: math.inf if math.isnan(d) else d)
    lines = [
        f"### FlashInfer, {name}\n",
        f"{origin} Microseconds per layer. FlashInfer's fastest way takes"
        f" {geometric_mean(ratio for ratio, _ in ratios):.2f} times what nwor takes (geometric mean of"
        f" {len(rows)} cells, from {min(ratios)[0]:.2f} to {max(ratios)[0]:.2f}; nwor is slower beyond"
        f" noise in {slower}), and {1 / geometric_mean(beside):.2f} times what stock takes. Outputs differ"
        f" from stock's by {worst:.4f} at most.\n",
        "| heads | batch x context, k | stock | nwor | " + " | ".join(FLASHINFER) + " | fastest / nwor |",
        "|---|---|---|---|" + "---|" * len(FLASHINFER) + "---|",
    ]
    for row, (ratio, either) in zip(rows, ratios, strict=True):
        ways = [f"{row[way]:.1f}" if way in row else "-" for way in FLASHINFER]
        text = f"**{ratio:.2f}**" if ratio < 1 - either else f"{ratio:.2f}"
        lines.append(
            f"| {row['heads']} | {row['batch']} x {row['context']}, {row['drafts']} | {row['stock']:.1f}"
            f" | {row['nwor']:.1f} | {' | '.join(ways)} | {text} |"
        )
    return "\n".join(lines) + "\n"


def reading_part(name: str, rows: Sequence[Row], origin: str, large: float) -> str:
    """The section of a run that has a kernel that only reads: a line for each heads, batch and context."""
    groups: dict[tuple[str, int, int], dict[int, Row]] = {}
    for row in rows:
        groups.setdefault((row["heads"], row["batch"], row["context"]), {})[row["drafts"]] = row
    groups = {cell: own for cell, own in groups.items() if "reading" in own.get(DRAFTS[0], {})}
    lines = [
        f"### Reading alone, {name}\n",
        f"{origin} Microseconds per layer, in parentheses the share of the large copy's bandwidth:"
        " a copy as large, a kernel that only reads the context as it lies, one that reads it as attention"
        f" must and joins what k = {JOINED_DRAFTS} has to, neither computing anything, and"
        " `verify_attention`.\n",
        "| heads | batch x context | MB | copy | only reads | reads, joins | "
        + " | ".join(f"k = {drafts}" for drafts in DRAFTS)
        + " |",
        "|---|---|---|---|---|---|" + "---|" * len(DRAFTS),
    ]
    for (heads, batch, context), own in groups.items():
        first = own[DRAFTS[0]]
        moved = first["cache_bytes"]
        joined = own.get(JOINED_DRAFTS, {}).get("joining")  # nothing of it where a run ended early
        times: list[float | None] = [first["copy"], first["reading"], joined]
        times += [row["nwor"] - row["commit"] / 32 if (row := own.get(k)) else None for k in DRAFTS]
        cells = [f"{time:.1f} ({100 * moved / (time * 1e-6) / large:.0f}%)" if time else "" for time in times]
        lines.append(f"| {heads} | {batch} x {context} | {moved / 1e6:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def product_part(name: str, rows: Sequence[Row], origin: str) -> str:
    """The section of a run with a product and a small kernel before each layer: a line for each cell."""
    lines = [
        f"### After a matrix product, {name}\n",
        f"{origin} Microseconds per layer, without what stands before it. **Bold**: slower beyond noise.\n",
        "| heads | batch x context, k | stock | nwor | stock / nwor |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{speedup(row):.2f} ± {noise(row):.2f}"
        ratio = f"**{ratio}**" if speedup(row) < 1 - noise(row) else ratio
        lines.append(
            f"| {row['heads']} | {row['batch']} x {row['context']}, {row['drafts']} | {row['stock']:.1f}"
            f" | {row['nwor']:.1f} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def summary_line(name: str, rows: Sequence[Row], copy: float) -> str:
    short = [r for r in rows if r["context"] <= 600]
    slower = [r for r in rows if speedup(r) < 1 - noise(r)]
    large = [r for r in rows if r["cache_bytes"] > 100e6]
    reach = [bandwidth(r) / copy for r in large]
    beside = [bandwidth(r) / copy_bandwidth(r, copy) for r in large]
    return (
        f"| {name} | {len(rows)} | {geometric_mean(map(speedup, short)):.2f}"
        f" | {geometric_mean(map(speedup, rows)):.2f}"
        f" | {len(slower)} | {min(map(speedup, rows)):.2f}"
        f" | {sum(x >= 0.92 for x in reach)} of {len(reach)}"
        f" | {sum(x >= 0.92 for x in beside)} of {len(beside)} |"
    )


def commit_table(rows: Sequence[Row], copy: float) -> str:
    lines = ["| heads | cache | batch | k | us | bytes read and written per second, share of the copy's |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        if row["context"] != 600 or (row["batch"], row["drafts"]) not in ((16, 4), (128, 8)):
            continue
        _, kv_heads, size = map(int, row["heads"].split("/"))
        written = 1 if row["fp8"] else 2
        moved = 32 * row["batch"] * (row["drafts"] + 1) * kv_heads * size * 2 * (2 + written)
        rate = moved / (row["commit"] * 1e-6)
        cache = "fp8" if row["fp8"] else "bf16"
        lines.append(
            f"| {row['heads']} | {cache} | {row['batch']} | {row['drafts']} | {row['commit']:.1f}"
            f" | {rate / 1e12:.2f} TB/s, {100 * rate / copy:.0f}% |"
        )
    return "\n".join(lines)


def plot(name: str, groups: dict[str, list[Row]], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(groups), figsize=(4.2 * len(groups), 3.6), sharey=True, squeeze=False)
    for axis, (heads, rows) in zip(axes[0], groups.items(), strict=True):
        for drafts in DRAFTS:
            for batch in BATCHES:
                line = sorted(
                    (r["context"], speedup(r)) for r in rows if (r["batch"], r["drafts"]) == (batch, drafts)
                )
                if line:
                    axis.plot(*zip(*line, strict=True), marker=".", lw=1, color=f"C{BATCHES.index(batch)}",
                              ls=("-", "--", ":")[DRAFTS.index(drafts)],
                              label=f"batch {batch}" if drafts == DRAFTS[0] else None)  # fmt: skip
        axis.axhline(1.0, color="black", lw=0.8)
        axis.set(xscale="log", title=heads, xlabel="context tokens")
    axes[0][0].set_ylabel("speed-up over stock")
    axes[0][-1].legend(fontsize=7, title="k: 1 solid, 4 dashed, 8 dotted", title_fontsize=7)
    figure.suptitle(name)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    parts: list[str] = [
        "# verify_attention and commit_window beside stock: every cell\n",
        "A cell reads `stock / nwor / floor: speed-up` in microseconds per layer; the floor is every byte of"
        " context, window, query and output once, at a device copy's speed. Bold cells are slower than stock"
        " beyond the noise of both. docs/performance.md says how this is measured.\n",
    ]
    for path in args.results:
        data = json.loads(path.read_text())
        copy = data["copy_bytes_per_second"]
        rows = [r for r in data["rows"] if "stock" in r]
        fp8 = any(r["fp8"] for r in data["rows"])
        spread = max((r.get("spread", 0.0) for r in rows), default=0.0)
        name = "fp8 (e4m3) cache" if fp8 else "bf16 cache"
        if spread:
            name += f", contexts up to {spread:.0%} shorter and longer"
        origin = (
            f"{data['device']}, PyTorch {data['torch']}, {data['date']}; {data['turns']} turns of"
            f" {data['times']} times; a copy moves {copy / 1e12:.2f} TB/s."
        )
        if beside := [r for r in rows if any(way in r for way in FLASHINFER)]:
            parts.append(flashinfer_part(name, beside, origin))
            continue
        if any(r.get("after_product") for r in rows):
            parts.append(product_part(name, rows, origin))
            continue
        if any("reading" in r for r in data["rows"]):
            parts.append(reading_part(name, data["rows"], origin, copy))
            continue
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(row["heads"], []).append(row)
        skipped = [r for r in data["rows"] if "nwor" not in r]
        shared = [r for r in rows if r["distinct_layers"] < data["layers"]]
        parts.append(f"### {name}\n")
        parts.append(
            f"{origin} {len(rows)} cells measured, {len(skipped)} did not fit into"
            f" {data['pool_gib']:.0f} GiB; in {len(shared)} of them the 32 layers share fewer caches (each"
            " still many times the L2 cache).\n"
        )
        parts.append(
            "| heads | cells | geometric mean, context <= 600 | all cells | slower beyond noise | worst"
            " | of cells over 100 MB: at 92% of copy | of one as large |\n|---|---|---|---|---|---|---|---|"
        )
        parts += [summary_line(heads, group, copy) for heads, group in groups.items()]
        parts.append(summary_line("all", rows, copy) + "\n")
        parts.append(commit_table(rows, copy) + "\n")
        PLOTS.mkdir(exist_ok=True)
        plot(name, groups, PLOTS / f"kernels-{'fp8' if fp8 else 'bf16'}{'-spread' if spread else ''}.png")
        for heads, group in groups.items():
            parts.append(f"#### {heads}, {name}\n")
            parts.append(table(group, partial(cell_text, copy=copy)) + "\n")
    args.output.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
