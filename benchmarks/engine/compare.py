"""Stock vLLM against NWOR: runs decode.py in turn, one process an engine, and prints the ratios.

    python benchmarks/engine/compare.py --shapes 1b,8b --output results.json

The engine with NWOR runs its modes interleaved in one process; stock vLLM runs in a process of its own. A
ratio's noise is the spread of the single runs' ratios to the median of the other side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DECODE = Path(__file__).resolve().parent / "decode.py"


def run(shape: str, modes: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one engine and return its record."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, str(DECODE), "--shape", shape, "--modes", modes, "--output", file.name]
        for name in ("k", "acceptance", "cells", "tokens", "repeats"):
            command += [f"--{name}", str(getattr(args, name))]
        subprocess.run(command, check=True)
        record: dict[str, Any] = json.loads(Path(file.name).read_text())
    return record


def collect(records: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, list[float]]]:
    """Gather the single rates by cell and mode."""
    cells: dict[tuple[int, int], dict[str, list[float]]] = {}
    for record in records:
        for entry in record["runs"]:
            modes = cells.setdefault((entry["batch"], entry["context"]), {})
            modes.setdefault(entry["mode"], []).extend(entry["tokens_per_second"])
    return cells


def table(shape: str, cells: dict[tuple[int, int], dict[str, list[float]]]) -> str:
    """Return a markdown table of ratios to stock."""
    lines = [f"| {shape}: batch x context | stock tok/s | " + " | ".join(("off", "stage", "cow")) + " |"]
    lines.append("|---|---|---|---|---|")
    for (batch, context), modes in sorted(cells.items()):
        stock = statistics.median(modes["stock"])
        row = [f"{batch} x {context}", f"{stock:.0f} (x{min(modes['stock']) / stock:.3f}..)"]
        for mode in ("off", "stage", "cow"):
            if mode not in modes:
                row.append("-")
                continue
            ratios = [value / stock for value in modes[mode]]
            row.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="1b,8b")
    parser.add_argument("--modes", default="off,stage")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.6)
    parser.add_argument("--cells", default="1x512,16x512,64x512,16x4096")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    everything: dict[str, Any] = {"settings": vars(args), "records": []}
    for shape in args.shapes.split(","):
        records = [run(shape, modes, args) for modes in ("", args.modes)]
        everything["records"] += records
        print(table(shape, collect(records)), flush=True)
        Path(args.output).write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
