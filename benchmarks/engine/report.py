"""Turns results of compare.py into a Markdown report.

    python benchmarks/engine/report.py benchmarks/engine/results/*.json --output h200.md

Of a cell that stands in several files, the last one counts that has most modes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grid import expected_tokens
from host_time import difference
from results import Result, geometric_mean, results_of

METHOD = """\
Weights are dummies and acceptance is synthetic (vLLM's own `synthetic` rejection sampling): each draft token
is accepted with the chance given, if those before it were. A run is a batch of greedy requests whose prompts
are in the prefix cache. Measured are a fixed number of steps after every request has its first tokens, and
the tokens of just those steps; no request finishes among them. The number of steps is such that stock vLLM
takes about {run_seconds} s, but no request gains more than about {most_tokens} tokens. NWOR does the same
steps, and as each request's acceptance follows from its seed, accepts the same tokens in them. Stock vLLM
runs in a process of its own without NWOR. Both processes are on the machine at once and alternate, run by
run; NWOR's modes take turns in theirs. {repeats} runs of each.

A cell reads `stock tokens/s; off / stock; stage / stock (least..greatest run)`, medians of the runs. The
noise of a ratio is half the spread of both sides' runs, added up. It cannot know how one start of an engine
differs from another. **Bold**: `stage` is below 1.00 by more than the
noise. †: the batch is larger than the largest CUDA graph that vLLM captures, and its steps run without.
‡: some windows were written directly, against the mode."""
HOST = """\
Microseconds of host time a step: medians (quartiles), then the median time from one step to the next; runs of
steps in turns. `busy` is all that the engine's thread does in a step, scheduler and outputs included: the
time from one step to the next but for the wait for the device, which is one call. `cpu` is the thread's
processor time in the same steps. `hooks` is NWOR's part of the model runner alone: its overrides of the
runner, of the graph manager's replay and of `get_output`, without the stock methods that they call (the wait
among them) and without the timing's own cost; what NWOR saves elsewhere is not in it. Layers add nothing in
steps that replay a full CUDA graph; where a cell is marked †, there is no such graph, and what the layers do
on the host is not in `hooks`. `runner` is the model runner's `execute_model` and `sample_tokens` as wholes.

Differences are means over the turns of what the turns' medians differ by, ± the standard error; in brackets
the same of the turns' means, in which rare work counts as well, and so does what interrupts a step. Without
an error they are the difference of the medians. The error is that of this start of both processes: what one
start differs from another by is not in it. Target for what is added to stock: 30 at most."""


def cell_text(result: Result | None) -> str:
    """Return what stands in a cell of the tables."""
    if result is None or "stock" not in result.rates:
        return "-"
    stock = statistics.median(result.rates["stock"])
    parts = [f"{stock:.0f}", f"{result.ratio('off'):.3f}" if result.has("off") else "-"]
    slower = False
    if result.has("stage"):
        low, high = (bound(result.rates["stage"]) / stock for bound in (min, max))
        parts.append(f"{result.ratio('stage'):.3f} ({low:.3f}..{high:.3f})")
        slower = result.slower("stage")
    else:
        parts.append("-")
    text = "; ".join(parts)
    marks = "†" * result.without_graph + "‡" * bool(result.direct)
    return (f"**{text}**" if slower else text) + (f" {marks}" if marks else "")


def tables(results: Sequence[Result]) -> list[str]:
    """Return a table for each shape and number of draft tokens."""
    lines: list[str] = []
    for shape, k in sorted({(result.shape, result.k) for result in results}):
        own = {(r.context, r.acceptance, r.batch): r for r in results if (r.shape, r.k) == (shape, k)}
        batches = sorted({batch for _, _, batch in own})
        lines += [f"### {shape}, {k} draft tokens", ""]
        lines.append("| context | acceptance | " + " | ".join(f"batch {b}" for b in batches) + " |")
        lines.append("|---|---|" + "---|" * len(batches))
        for context, acceptance in sorted({key[:2] for key in own}):
            cells = [cell_text(own.get((context, acceptance, batch))) for batch in batches]
            lines.append(f"| {context} | {acceptance} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def summary(results: Sequence[Result]) -> list[str]:
    """Return the table of means: by shape, by shape and context 512, and by mode."""
    lines = ["| cells | ratio | cells | geometric mean | below 1.00 beyond noise | lowest |"]
    lines.append("|---|---|---|---|---|---|")
    parts: list[tuple[str, list[Result]]] = []
    for shape in sorted({result.shape for result in results}):
        own = [result for result in results if result.shape == shape]
        parts += [(shape, own), (f"{shape}, context 512", [r for r in own if r.context == 512])]
    pairs = [(mode, "stock") for mode in ("stage", "off", "cow")] + [("stage", "off")]
    for (name, own), (mode, base) in itertools.product(parts, pairs):
        there = [result for result in own if result.has(mode, base)]
        if not there:
            continue
        lowest = min(there, key=lambda result: result.ratio(mode, base))
        lines.append(
            f"| {name} | {mode} / {base} | {len(there)}"
            f" | {geometric_mean(result.ratio(mode, base) for result in there):.3f}"
            f" | {sum(result.slower(mode, base) for result in there)}"
            f" | {lowest.ratio(mode, base):.3f} ± {lowest.noise(mode, base):.3f} ({lowest.name}) |"
        )
    return lines


def checks(results: Sequence[Result]) -> str:
    """Return a sentence on whether runs accepted what they had to."""
    gains = [
        (gain / expected_tokens(result.k, result.acceptance) - 1, result.batch)
        for result in results
        for gain in result.gains.values()
    ]
    large = [abs(part) for part, batch in gains if batch >= 16]
    differing = [result.name for result in results if len({f"{g:.9f}" for g in result.gains.values()}) > 1]
    text = ""
    if large:
        text = (
            f"Tokens gained in a step differ from what the acceptance asks for by {max(large):.1%} at most "
            "(batches of 16 and more). "
        )
    if differing:
        return text + "Modes did not accept the same tokens in: " + "; ".join(differing) + "."
    return text + "In each cell all modes, stock vLLM included, gained the same tokens in the same steps."


def processes(files: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of engine starts and memory."""
    head = "| shape | k | start, s: stock / NWOR | graphs of `stage`: s / MiB"
    lines = [f"{head} | KV cache, tokens (blocks): stock / NWOR | fewer with NWOR | trouble |"]
    lines.append("|---|---|---|---|---|---|---|")
    for data in files:
        pairs: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
        for process in data["processes"]:
            pairs.setdefault((process["shape"], process["k"]), {})[process["kind"]] = process
        for (shape, k), pair in pairs.items():
            stock, nwor = pair.get("stock", {}), pair.get("nwor", {})
            starts = " / ".join(_number(process.get("start_seconds"), ".0f") for process in (stock, nwor))
            found = nwor.get("report") or {}
            graphs = (
                f"{found['capture_seconds']:.1f} / {found['capture_bytes'] / 2**20:.0f}" if found else "- / -"
            )
            sizes = " / ".join(
                f"{process['cache_tokens']} ({process['cache_blocks']})" if "cache_tokens" in process else "-"
                for process in (stock, nwor)
            )
            fewer = "-"
            if "cache_tokens" in stock and "cache_tokens" in nwor:
                fewer = f"{100 * (1 - nwor['cache_tokens'] / stock['cache_tokens']):.2f}%"
            troubles = [
                f"{kind}: {str(process['error']).strip().splitlines()[-1]}"
                for kind, process in pair.items()
                if process.get("error")
            ]
            if found.get("fault"):
                troubles.append(f"fault: {found['fault']}")
            text = "; ".join(troubles).replace("|", "/") or "none"
            lines.append(f"| {shape} | {k} | {starts} | {graphs} | {sizes} | {fewer} | {text} |")
    return lines


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def host(files: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of host time; empty where none was measured."""
    lines: list[str] = []
    for data in files:
        cells: dict[tuple[str, int, str, str], dict[str, Any]] = {}
        failed: list[str] = []
        for process in data["processes"]:
            times = process.get("host_time") or {}
            name = f"{process['shape']}, k={process['k']}"
            if times.get("error"):
                trouble = str(times["error"]).strip().splitlines()[-1].replace("|", "/")
                failed.append(f"| {name} | failed, {process['kind']}: {trouble} |" + " - |" * 6)
            for timed in ("busy", "cpu", "hooks", "runner"):
                if timed in times:
                    place = f"{name}, {times['batch']} x {times['context']}, {times['acceptance']}"
                    place += " †" * (times["batch"] * (process["k"] + 1) > (process["graph_tokens"] or 1e9))
                    cells.setdefault((process["shape"], process["k"], timed, place), {}).update(times[timed])
        for (_, _, timed, place), modes in sorted(cells.items()):
            parts = [place, timed]
            for mode in ("stock", "off", "stage"):
                found = modes.get(mode)
                text = "{median:.1f} ({low:.1f}..{high:.1f}) of {step:.0f}"
                parts.append(text.format(**found) if found else "-")
            pairs = (("off", "stock"), ("stage", "stock"), ("stage", "off"))
            parts += [_difference(modes, mode, base) for mode, base in pairs]
            lines.append("| " + " | ".join(parts) + " |")
        lines += failed
    if not lines:
        return []
    head = "| cell | timed | stock | off | stage | off - stock | stage - stock | stage - off |"
    return [head, "|---|---|---|---|---|---|---|---|", *lines]


def _difference(modes: dict[str, Any], mode: str, base: str) -> str:
    if mode not in modes or base not in modes:
        return "-"
    of_medians = difference(modes[mode], modes[base])
    if of_medians is None:
        return f"{modes[mode]['median'] - modes[base]['median']:+.1f}"
    text = "{:+.1f} ± {:.1f}".format(*of_medians)
    of_means = difference(modes[mode], modes[base], "means")
    return text if of_means is None else text + " [{:+.1f} ± {:.1f}]".format(*of_means)


def skipped(files: Sequence[dict[str, Any]], results: Sequence[Result]) -> list[str]:
    """Return what was not measured, by reason; what another file measured is not listed."""
    measured = {
        (kind, r.shape, r.k, r.context, r.batch, r.acceptance)
        for r in results
        for kind in {"stock" if mode == "stock" else "nwor" for mode in r.rates}
    }
    reasons: dict[tuple[str, int, str, str], set[tuple[int, int, float]]] = {}
    for data in files:
        for process in data["processes"]:
            for entry in process.get("skipped", ()):
                cell = (entry["context"], entry["batch"], entry["acceptance"])
                if (process["kind"], process["shape"], process["k"], *cell) in measured:
                    continue
                key = (process["shape"], process["k"], process["kind"], entry["reason"])
                reasons.setdefault(key, set()).add(cell)
    lines = []
    for (shape, k, kind, reason), cells in sorted(reasons.items()):
        places: dict[tuple[int, int], list[str]] = {}
        for context, batch, acceptance in sorted(cells):
            places.setdefault((batch, context), []).append(str(acceptance))
        text = "; ".join(f"{b} x {c} ({', '.join(rates)})" for (b, c), rates in places.items())
        lines.append(f"- {shape}, k={k}, {kind}: {text}: {reason}")
    return lines


def document(files: Sequence[dict[str, Any]]) -> str:
    """Return the whole report.

    Args:
        files: what compare.py wrote, one or more.

    """
    results = results_of(files)
    known = [process for data in files for process in data["processes"] if "device" in process]
    about = sorted(
        {f"{p['device']}, vLLM {p['vllm']}, PyTorch {p['torch']}, {p['date']}" for p in known}
    ) or ["no engine started"]
    ahead = {True: "scheduled a step ahead", False: "not scheduled ahead"}
    ways = sorted({f"{ahead[p['async_scheduling']]}, {p['graph_mode']}" for p in known if "graph_mode" in p})
    settings = files[-1]["settings"]
    parts = ["# Decode throughput: stock vLLM against NWOR", "", "; ".join(about) + ".", ""]
    asked = {
        name: " or ".join(f"{value}" for value in sorted({data["settings"][name] for data in files}))
        for name in ("run_seconds", "most_tokens", "repeats")
    }
    parts += [METHOD.format(**asked), ""]
    parts += (
        [f"Engines: {'; '.join(ways)}; a KV cache of {settings['cache_gib']:g} GiB each, 64 requests.", ""]
        if ways
        else []
    )
    if results:
        parts += ["## Summary", "", *summary(results), "", checks(results), ""]
        parts += ["## Cells", "", *tables(results)]
    parts += ["## Engines", "", *processes(files), ""]
    if times := host(files):
        parts += ["## Host time", "", HOST, "", *times, ""]
    if missing := skipped(files, results):
        parts += ["## Not measured", "", *missing, ""]
    return "\n".join(parts)


def main() -> None:
    """Read the files and write the report, or print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    text = document([json.loads(path.read_text("utf-8")) for path in args.results])
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
