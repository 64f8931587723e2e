"""Makes the tables of README.md and of both pages named performance.md from the benchmarks' results.

    python benchmarks/performance.py            # writes the pages
    python benchmarks/performance.py --check    # ends with 1 where a page is not what it would write

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is around it is written by hand.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from benchmarks.serving import figures as serving_figures  # noqa: E402
from benchmarks.serving import mixed_tables  # noqa: E402
from benchmarks.serving import report as serving_report  # noqa: E402
from benchmarks.serving.tables import table  # noqa: E402


def _load(folder: str, name: str) -> ModuleType:
    """Import a module of a benchmark under a name of its own: two have a `report` and a `results`.

    Args:
        folder: the benchmark; its modules import one another by their bare names.
        name: the module.

    """
    place, before = HERE / folder, set(sys.modules)
    sys.path.insert(0, str(place))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmarks_{folder}_{name}", place / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(place))
        for other in set(sys.modules) - before - {f"benchmarks_{folder}_{name}"}:
            if str(getattr(sys.modules[other], "__file__", None)).startswith(str(place)):
                del sys.modules[other]


kernels_report = _load("kernels", "report")
engine_results = _load("engine", "results")
host_time = _load("engine", "host_time")

DOCS = HERE.parent / "docs"
PAGES = (
    HERE.parent / "README.md",
    DOCS / "performance.md",
    DOCS / "kernels" / "performance.md",
    DOCS / "draft-lengths.md",
)
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
#: Files of benchmarks/engine/results and what the page calls their cells.
ENGINE = (
    ("8B, k = 4", "h200-8b-k4"),
    ("8B, k = 4, another machine", "h200-8b-k4-again"),
    ("8B, k = 8", "h200-8b-k8"),
    ("1B, k = 4", "h200-1b-k4"),
    ("1B, k = 8", "h200-1b-k8"),
    ("8B, k = 4, fp8 cache", "h200-8b-k4-fp8"),
    ("1B, k = 4, fp8 cache", "h200-1b-k4-fp8"),
)
MODES = ("h200-modes-8b-k4", "h200-modes-8b-k8", "h200-modes-1b-k4", "h200-modes-1b-k8")
HOST = ("h200-1b-k4-host", "h200-8b-k4-host", "h200-modes-1b-k4", "h200-modes-8b-k4")


def _kernels(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((HERE / "kernels" / "results" / f"{name}.json").read_text("utf-8"))
    return data


def _engine(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((HERE / "engine" / "results" / f"{name}.json").read_text("utf-8"))
    return data


def _table(*heads: str, rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(table(heads, rows))


_SUMMARY = (
    "| {} | cells | geometric mean, context <= 600 | all cells | slower beyond noise | worst"
    " | of cells over 100 MB: at 92% of copy | of one as large |\n|---|---|---|---|---|---|---|---|"
)


def kernels_h200() -> str:
    """By heads, the whole grid."""
    lines = [_SUMMARY.format("heads, cache")]
    for cache in ("bf16", "fp8"):
        data = _kernels(f"h200-{cache}")
        rows, copy = [r for r in data["rows"] if "stock" in r], data["copy_bytes_per_second"]
        for heads in dict.fromkeys(r["heads"] for r in rows):
            own = [r for r in rows if r["heads"] == heads]
            lines.append(kernels_report.summary_line(f"{heads}, {cache}", own, copy))
        lines.append(kernels_report.summary_line(f"**all, {cache}**", rows, copy))
    return "\n".join(lines)


def kernels_h100() -> str:
    """By heads and batch, the cells that were measured there."""
    lines = [_SUMMARY.format("heads, cache, batch")]
    for cache in ("bf16", "fp8"):
        data = _kernels(f"h100-{cache}")
        rows, copy = data["rows"], data["copy_bytes_per_second"]
        for heads in ("32/8/128", "32/8/64", "64/8/128", "16/2/256"):
            for name, few in (("1, 4, 16", True), ("64, 128", False)):
                own = [r for r in rows if r["heads"] == heads and (r["batch"] <= 16) == few]
                if own:
                    lines.append(kernels_report.summary_line(f"{heads}, {cache}, {name}", own, copy))
    return "\n".join(lines)


def commit() -> str:
    """What a commit of 32 layers takes."""
    head, body = "", []
    for name in ("h200-commit-bf16", "h200-fp8"):
        data = _kernels(name)
        lines = kernels_report.commit_table(data["rows"], data["copy_bytes_per_second"]).splitlines()
        head, body = "\n".join(lines[:2]), body + lines[2:]
    return "\n".join([head, *body])


def flashinfer() -> str:
    """FlashInfer's fastest way beside both."""
    rows = []
    for cache in ("bf16", "fp8"):
        for r in _kernels(f"h200-flashinfer-{cache}")["rows"]:
            way = kernels_report.fastest_flashinfer(r)
            cell = f"{r['heads']}, {cache}, {r['batch']} x {r['context']}"
            times = [f"{r[side]:.1f}" for side in ("stock", "nwor", way)]
            rows.append([cell, *times, way, f"{kernels_report.against_flashinfer(r)[0]:.2f}"])
    heads = ("heads, cache, batch x context", "stock", "nwor", "FlashInfer", "its way", "FlashInfer / nwor")
    return _table(*heads, rows=rows)


def sampling() -> str:
    """The kernels of `fast_sampling`."""
    rows = []
    data = _kernels("h200-sampling")
    drafts = data["drafts"]
    for r in data["results"]:
        what = (
            f"argmax, rows: {r['rows']}"
            if "rows" in r
            else f"rejection, k = {drafts}, requests: {r['requests']}"
        )
        rows.append([what, f"{r['vocab']}", f"{r['stock']:.1f}", f"{r['nwor']:.1f}"])
    return _table("what", "vocabulary", "stock", "nwor", rows=rows)


def _date(data: dict[str, Any]) -> str:
    return " to ".join(sorted({p["date"] for p in data["processes"] if "date" in p}))


def _mean(results: Sequence[Any], mode: str, base: str = "stock") -> str:
    there = [r for r in results if r.has(mode, base)]
    return f"{engine_results.geometric_mean(r.ratio(mode, base) for r in there):.3f}" if there else "-"


def _cell(result: Any) -> str:
    return f"{result.batch} x {result.context}, {result.acceptance}"


def engine() -> str:
    """Means of each run."""
    rows = []
    for name, file in ENGINE:
        data = _engine(file)
        cells = engine_results.results_of([data])
        low = min(cells, key=lambda r: r.ratio("stage"))
        lowest = f"{low.ratio('stage'):.3f} ± {low.noise('stage'):.3f} ({_cell(low)})"
        slower = sum(r.slower("stage") for r in cells)
        short = [r for r in cells if r.context == 512]
        figures = [
            _mean(cells, "stage"),
            _mean(short, "stage"),
            _mean(cells, "off"),
            _mean(cells, "stage", "off"),
        ]
        rows.append(
            [
                name,
                f"{len(cells)}",
                f"{data['settings']['repeats']}",
                _date(data),
                *figures,
                f"{slower}",
                lowest,
            ]
        )
    heads = (
        "engine",
        "cells",
        "runs",
        "date",
        "`stage` / stock",
        "at 512",
        "`off` / stock",
        "`stage` / `off`",
    )
    return _table(*heads, "`stage` slower beyond noise", "lowest `stage` / stock", rows=rows)


def engine_cells() -> str:
    """`stage` / stock at one acceptance, by context and batch."""
    columns = {
        name: engine_results.results_of([_engine(file)]) for name, file in ENGINE if "another" not in name
    }
    batches, rows = (1, 16, 64), []
    for context in (512, 4096, 16384):
        row = [f"{context}"]
        for cells in columns.values():
            found = {r.batch: r for r in cells if r.context == context and r.acceptance == 0.6}
            row.append(", ".join(f"{found[b].ratio('stage'):.3f}" if b in found else "-" for b in batches))
        rows.append(row)
    return _table("context", *columns, rows=rows)


def modes() -> str:
    """The run that has all three modes, steps with full graphs only."""
    rows = []
    for file in MODES:
        data = _engine(file)
        cells = [r for r in engine_results.results_of([data]) if not r.without_graph]
        name = f"{cells[0].shape.upper()}, k = {cells[0].k}"
        rows.append([name, f"{len(cells)}", *(_mean(cells, mode) for mode in ("stage", "off", "cow"))])
    return _table("cells", "number", "`stage` / stock", "`off` / stock", "`cow` / stock", rows=rows)


def graphs() -> str:
    """Seconds and memory of the graphs of `stage`."""
    rows = []
    for name, file in ENGINE:
        data = _engine(file)
        for process in data["processes"]:
            if found := process.get("report"):
                mib = f"{found['capture_bytes'] / 2**20:.0f}"
                rows.append(
                    [name, f"{process['graph_tokens']}", _date(data), f"{found['capture_seconds']:.1f}", mib]
                )
    return _table("engine", "largest graph, tokens", "date", "s", "MiB", rows=rows)


def host() -> str:
    """Host time of a step."""
    rows = []
    for file in HOST:
        data = _engine(file)
        for process in data["processes"]:
            if process["kind"] != "nwor":
                continue
            stock = next(p["host_time"] for p in data["processes"] if p["kind"] == "stock")
            busy, hooks = process["host_time"]["busy"], process["host_time"]["hooks"]
            size = f"{process['host_time']['batch']} x {process['host_time']['context']}"
            rows.append(
                [
                    f"{process['shape'].upper()}, k = {process['k']}, {size}",
                    _date(data),
                    _apart(busy["stage"], stock["busy"]["stock"]),
                    _apart(busy["stage"], busy["off"]),
                    _apart(hooks["stage"], hooks["off"]),
                ]
            )
    heads = ("engine", "date", "all host work, `stage` - stock", "all host work, `stage` - `off`")
    return _table(*heads, "NWOR's hooks alone, `stage` - `off`", rows=rows)


#: Loads of benchmarks/serving in words.
_CLIENTS = {"c": "{} client", "p": "{} arrivals/s"}


def serving() -> str:
    """Servers under HTTP load, stock and `stage`."""
    document = json.loads((HERE / "serving" / "results" / "h100.json").read_text("utf-8"))
    rows = []
    for group, loads in serving_report.groups(document).items():
        for load, records in loads.items():
            what = _CLIENTS[load[0]].format(load[1:]) + ("s" if load[0] == "c" and load != "c1" else "")
            closed = serving_figures.compare(records, "stage", "stock", "tokens_s")
            rows.append(
                [
                    group[1].upper(),
                    what,
                    str(closed) if load[0] == "c" else "-",  # what comes in goes out
                    str(serving_figures.compare(records, "stage", "stock", "tpot")),
                    _both(records, "ttft_ms", 0.5),
                    _both(records, "ttft_ms", 0.99),
                    _both(records, "stall_ms", 0.99),
                    f"{serving_figures.windows(records, 'stage')[0]:.0%}",
                ]
            )
    heads = ("model", "load", "tokens/s, `stage` / stock", "speed per token, `stage` / stock")
    more = ("first token, ms", "99%, ms", "longest stall, 99%, ms", "windows staged")
    return _table(*heads, *more, rows=rows)


def serving_lengths() -> str:
    """Stock and `stage` with prompts and answers of several lengths, and with common prefixes."""
    document = json.loads((HERE / "serving" / "results" / "h200-lengths.json").read_text("utf-8"))
    rows, means = [], []
    for group, loads in serving_report.groups(document).items():
        for load, records in loads.items():
            closed = serving_figures.compare(records, "stage", "stock", "tokens_s")
            token = serving_figures.compare(records, "stage", "stock", "tpot")
            means.append((closed.mean if load[0] == "c" else None, token.mean))
            share = f"{group[4]:.0%} with " if group[4] else ""
            rows.append(
                [
                    group[2] + (f", {share}common prefixes" if share else ""),
                    f"{load[1:]} clients" if load[0] == "c" else f"arrivals, {load[1:]} of capacity",
                    str(closed) if load[0] == "c" else "-",  # what comes in goes out
                    str(token),
                    _both(records, "ttft_ms", 0.5),
                    _both(records, "ttft_ms", 0.99),
                    _both(records, "stall_ms", 0.99),
                ]
            )
            assert serving_figures.windows(records, "stage")[0] == 1.0
    closed_mean, token_mean = (
        f"{statistics.geometric_mean(one[place] for one in means if one[place]):.3f}" for place in (0, 1)
    )
    rows.append(["geometric mean", "", closed_mean, token_mean, "", "", ""])
    heads = ("prompt / answer", "load", "tokens/s, `stage` / stock", "speed per token, `stage` / stock")
    return _table(*heads, "first token, ms", "99%, ms", "longest stall, 99%, ms", rows=rows)


def _by_clients(loads: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return closed loops in words, and their records, by the number of clients."""
    ordered = sorted(loads, key=lambda load: int(load[1:]))
    return [(f"{load[1:]} client" + ("s" if load != "c1" else ""), loads[load]) for load in ordered]


def _number(arm: str) -> str:
    """Return the draft tokens of an arm of stock's."""
    return arm.partition("@")[2] or "4"


def _tried(records: Any) -> str:
    """Return the draft tokens of stock's arms."""
    return ", ".join(sorted(_number(arm) for arm in serving_figures.arms(records) if arm.startswith("stock")))


def _median(records: Any, arm: str, figure: str) -> float:
    """Return the median over the rounds of an arm."""
    return statistics.median(one[figure] for one in records if one["arm"] == arm)


def serving_auto() -> str:
    """Servers under HTTP load: stock with each number of drafts, and one that chooses it."""
    document = json.loads((HERE / "serving" / "results" / "h200-auto.json").read_text("utf-8"))
    tried = ("stock@1", "stock@2", "stock")
    assert {run["k"] for run in document["runs"].values()} == {4}  # of the arm `stock`
    rows = []
    for group, loads in serving_report.groups(document).items():
        for load, records in loads.items():
            best = serving_figures.best_stock(records)
            names = serving_figures.arms(records)
            rates = [
                f"{statistics.median(one['tokens_s'] for one in records if one['arm'] == arm):.0f}"
                if arm in names
                else "-"
                for arm in (*tried, "auto")
            ]
            ratios = [
                str(serving_figures.compare(records, "auto", base, "tokens_s")) if base in names else "-"
                for base in (best, "stock")
            ]
            first = [f"{serving_figures.pooled(records, arm, 'ttft_ms', 0.5):.0f}" for arm in (best, "auto")]
            clients = f"{load[1:]} client" + ("s" if load != "c1" else "")
            rows.append([group[1].upper(), clients, *rates, *ratios, " → ".join(first)])
    heads = ("model", "load", "k = 1, tokens/s", "k = 2", "k = 4", "`auto`")
    return _table(*heads, "`auto` / best", "`auto` / k = 4", "first token, best → `auto`, ms", rows=rows)


def serving_auto_acceptance() -> str:
    """One model with few and with many drafts accepted: the best fixed number, and one that is chosen."""
    results = HERE / "serving" / "results" / "h200-auto-acceptance.json"
    document = json.loads(results.read_text("utf-8"))
    rows = []
    for group, loads in serving_report.groups(document).items():
        for clients, records in _by_clients(loads):
            best = serving_figures.best_stock(records)
            (chance,) = {one["acceptance"] for one in records}
            rates = (f"{_median(records, arm, 'tokens_s'):.0f}" for arm in (best, "auto"))
            ratio = str(serving_figures.compare(records, "auto", best, "tokens_s"))
            rows.append([group[1].upper(), chance, clients, _tried(records), _number(best), *rates, ratio])
    heads = ("model", "chance of a draft", "load", "numbers tried", "best", "tokens/s")
    return _table(*heads, "`auto`", "`auto` / best", rows=rows)


def serving_auto_turns() -> str:
    """A server that chooses beside stock's best number, by how long the same requests take."""
    results = HERE / "serving" / "results" / "h200-auto-turns.json"
    document = json.loads(results.read_text("utf-8"))
    rows = []
    for group, loads in serving_report.groups(document).items():
        for clients, records in _by_clients(loads):
            best = serving_figures.best_stock(records, "turn_s")
            rows.append(
                [
                    f"{group[1].upper()}, {group[2]}",
                    records[0]["acceptance"],
                    clients,
                    _tried(records),
                    _number(best),
                    *(f"{_median(records, arm, 'wall_s'):.1f}" for arm in (best, "auto")),
                    str(serving_figures.compare(records, "auto", best, "turn_s")),
                    str(len({(one["run"], one["round"]) for one in records})),
                ]
            )
    heads = ("model, prompts/answers", "chance of a draft", "load", "numbers tried", "best", "its seconds")
    return _table(*heads, "`auto`", "`auto` / best", "rounds", rows=rows)


def serving_fitted() -> str:
    """Hard and easy requests together: windows alike, windows that fit each, and adaptive verification."""
    document = json.loads((HERE / "serving" / "results" / "h200-fitted.json").read_text("utf-8"))
    (loads,) = serving_report.groups(document).values()
    arms = ("stock@2", "auto", "fitted", "adaptive@4")
    rows = []
    for clients, records in _by_clients(loads):
        assert set(serving_figures.arms(records)) == set(arms)
        pairs = (("auto", "stock@2"), ("fitted", "stock@2"), ("fitted", "auto"), ("adaptive@4", "auto"))
        ratios = (str(serving_figures.compare(records, *pair, "turn_s")) for pair in pairs)
        rates = (f"{_median(records, arm, 'tokens_s'):.0f}" for arm in arms)
        first = (f"{serving_figures.pooled(records, arm, 'ttft_ms', 0.5):.0f}" for arm in arms)
        rows.append([clients, *rates, *ratios, " → ".join(first)])
    heads = ("load", "stock, k = 2, tokens/s", "`auto`", "`--fit-windows`", "adaptive, k = 4")
    more = ("`auto` / stock, seconds", "fitted / stock", "fitted / `auto`", "adaptive / `auto`")
    return _table(*heads, *more, "first token, ms", rows=rows)


def serving_auto_hard() -> str:
    """A server that chooses where few drafts are accepted and many requests run, run by run."""
    document = json.loads((HERE / "serving" / "results" / "h200-auto-hard.json").read_text("utf-8"))
    (loads,) = serving_report.groups(document).values()
    rows = []
    for clients, every in _by_clients(loads):
        for run in dict.fromkeys(one["run"] for one in every):
            records = [one for one in every if one["run"] == run]
            best = serving_figures.best_stock(records, "turn_s")
            (own,) = (one["counters"] for one in records if one["arm"] == "auto")
            ratios = (serving_figures.compare(records, "auto", best, one) for one in ("turn_s", "tokens_s"))
            rows.append(
                [
                    clients,
                    _tried(records),
                    _number(best),
                    *(f"{_median(records, arm, 'wall_s'):.1f}" for arm in (best, "auto")),
                    f"{own['drafts'] / own['generated']:.2f}",
                    *map(str, ratios),
                    _both(records, "ttft_ms", 0.5, best, "auto"),
                ]
            )
    heads = ("load", "numbers tried", "best", "its seconds", "`auto`", "drafted windows a token")
    return _table(*heads, "best / `auto`, seconds", "`auto` / best, tokens/s", "first token, ms", rows=rows)


def serving_trees() -> str:
    """What is chosen among none, chains and trees, beside stock's best chain of the same run."""
    results = HERE / "serving" / "results" / "h200-trees-default.json"
    document = json.loads(results.read_text("utf-8"))
    arm, rows = "auto-tree@60x8", []
    for group, loads in serving_report.groups(document).items():
        for load in sorted(loads, key=lambda load: int(load[1:])):
            records = loads[load]
            beside, tried, best = [], set(), set()
            for run in {one["run"]: None for one in records}:
                own = [one for one in records if one["run"] == run]
                tried |= {name for name in serving_figures.arms(own) if name.startswith("stock")}
                found = serving_figures.best_stock(own)
                best.add(found)
                beside += [
                    {**one, "arm": "best" if one["arm"] == found else arm}
                    for one in own
                    if one["arm"] in (found, arm)
                ]
            rates = (
                f"{statistics.median(one['tokens_s'] for one in beside if one['arm'] == name):.0f}"
                for name in ("best", arm)
            )
            rows.append(
                [
                    group[1].upper(),
                    f"{load[1:]} client" + ("s" if load != "c1" else ""),
                    *(
                        ", ".join(sorted(name.partition("@")[2] or "4" for name in some))
                        for some in (tried, best)
                    ),
                    *rates,
                    str(serving_figures.compare(beside, arm, "best", "tokens_s")),
                    str(len({(one["run"], one["round"]) for one in beside})),
                    _both(beside, "ttft_ms", 0.5, "best", arm),
                ]
            )
    heads = ("model", "load", "numbers tried", "best", "tokens/s", "chosen", "chosen / best", "rounds")
    return _table(*heads, "first token, ms", rows=rows)


def _both(records: Any, figure: str, share: float, base: str = "stock", arm: str = "stage") -> str:
    sides = [serving_figures.pooled(records, one, figure, share) for one in (base, arm)]
    return " → ".join(f"{side:.0f}" for side in sides)


def _apart(mode: dict[str, Any], base: dict[str, Any]) -> str:
    found = host_time.difference(mode, base)
    assert found is not None
    return "{:+.0f} ± {:.0f}".format(*found)


TABLES: dict[str, Callable[[], str]] = {
    "kernels-h200": kernels_h200,
    "kernels-h100": kernels_h100,
    "commit": commit,
    "flashinfer": flashinfer,
    "sampling": sampling,
    "engine": engine,
    "engine-cells": engine_cells,
    "modes": modes,
    "graphs": graphs,
    "host": host,
    "serving": serving,
    "serving-lengths": serving_lengths,
    "serving-auto": serving_auto,
    "serving-auto-acceptance": serving_auto_acceptance,
    "serving-auto-turns": serving_auto_turns,
    "serving-fitted": serving_fitted,
    "serving-auto-hard": serving_auto_hard,
    "serving-trees": serving_trees,
    "mixed": mixed_tables.kinds,
    "mixed-parts": mixed_tables.parts,
    "mixed-kernels": mixed_tables.kernels,
    "mixed-cells": mixed_tables.cells,
    "drafts": mixed_tables.drafts,
    "first-pass": mixed_tables.first_pass,
}


def page(text: str) -> str:
    """Return the page with its tables made anew.

    Args:
        text: the page as it stands.

    """
    return TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where it would")
    args = parser.parse_args()
    texts = {path: path.read_text("utf-8") for path in PAGES}
    if args.check:
        sys.exit(any(page(text) != text for text in texts.values()))
    for path, text in texts.items():
        path.write_text(page(text), encoding="utf-8")


if __name__ == "__main__":
    main()
