"""What a step costs while prompts join, in ``off`` and ``stage``: engines in process, one after the other.

    python -m benchmarks.serving.mixed_steps --engines 8b,8b:fp8 --out mixed.json [--minutes 9]

In each cell some requests decode, and a prompt joins every other step. The modes take turns on one engine, in
blocks of steps. The most telling cells come first; when the time is up the rest is skipped and named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.serving import mixed_cells
from benchmarks.serving.servers import ROOT


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.mixed_steps", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--engines", default="8b,1b,8b:fp8,1b:fp8", help="shapes, with :fp8 for an fp8 cache")
    parser.add_argument("--out", type=Path, required=True, help="results; extended where it is there")
    parser.add_argument(
        "--modes",
        default="off,stage",
        help="the first is what the others are compared with; stage@0,stage@1 for numbers of draft tokens "
        "up to --k on one engine; or stock",
    )
    parser.add_argument("--cells", default="", help="requests and prompt tokens, as 16x512,64x0; default all")
    parser.add_argument("--every", type=int, default=2, help="a prompt joins in every so-manieth step")
    parser.add_argument("--blocks", type=int, default=6, help="of each mode in each cell")
    parser.add_argument("--steps", type=int, default=24, help="of a block")
    parser.add_argument("--minutes", type=float, default=9.0, help="in all, starts included")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--acceptance", default="heads")
    parser.add_argument("--chunk", type=int, default=2048, help="most rows of a prompt in a step")
    parser.add_argument("--cache-gib", type=float, default=24.0)
    parser.add_argument("--max-len", type=int, default=20480)
    parser.add_argument("--profile", default="", help="cells to profile at the end, as 16x128,64x512")
    parser.add_argument("--engine", action="append", default=[], help="vLLM setting, as enforce_eager=true")
    parser.add_argument("--nwor", action="append", default=[], help="setting of NWOR, as fast_drafting=false")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, engine: str, until: float) -> dict[str, Any]:
    """Return what one engine's process has found out."""
    shape, _, cache = engine.strip().partition(":")
    with tempfile.TemporaryDirectory(prefix="nwor-mixed-") as folder:
        out = Path(folder) / "cells.json"
        command = [sys.executable, "-m", "benchmarks.serving.mixed_engine", "--shape", shape]
        command += [
            "--cache-dtype",
            cache or "auto",
            "--folder",
            folder,
            "--out",
            str(out),
            "--until",
            str(until),
        ]
        for name in ("modes", "acceptance", "cells", "profile", "k", "chunk", "every", "blocks", "steps"):
            command += [f"--{name}", str(getattr(args, name))]
        command += ["--max-len", str(args.max_len), "--cache-gib", str(args.cache_gib)]
        command += [f"--engine={one}" for one in args.engine]
        command += [f"--nwor={one}" for one in args.nwor]
        log = args.out.with_suffix(f".{shape}{'-' + cache if cache else ''}.log")
        with log.open("wb") as errors:
            subprocess.run(command, cwd=ROOT, stderr=errors, check=False)
        record: dict[str, Any] = (
            json.loads(out.read_text()) if out.is_file() else {"error": "no results", "cells": []}
        )
        if record["error"]:
            print(log.read_text(errors="replace")[-3000:], flush=True)
    return {"name": engine.strip(), "shape": shape, "cache": cache or "auto", "k": args.k, **record}


def summary(records: list[dict[str, Any]], base: str, other: str) -> str:
    """Return the geometric mean over all cells, and the cells below 1."""
    found = {
        f"{record['name']} {mixed_cells.of(cell).name}": mixed_cells.geometric_mean(
            mixed_cells.ratios(cell["blocks"], base, other, "typical")
        )
        for record in records
        for cell in record["cells"]
        if base in cell["blocks"] and other in cell["blocks"]
    }
    below = [f"{name} {ratio:.3f}" for name, ratio in found.items() if ratio < 1]
    mean = mixed_cells.geometric_mean(list(found.values()))
    return f"{base}/{other} over {len(found)} cells: {mean:.4f}; below 1: {', '.join(below) or 'none'}"


def main(argv: list[str]) -> int:
    """Measure engine after engine; each gets an equal part of the time that is left."""
    args = parse(argv)
    mixed_cells.parse(args.cells, args.every)
    for mode in args.modes.split(","):
        mixed_cells.parse_mode(mode, args.k)
    began, engines = time.time(), args.engines.split(",")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    records = json.loads(args.out.read_text())["engines"] if args.out.is_file() else []
    here = []
    for index, engine in enumerate(engines):
        left = began + 60 * args.minutes - time.time()
        here.append(run(args, engine, time.time() + left / (len(engines) - index)))
        args.out.write_text(json.dumps({"schema": 1, "kind": "mixed", "engines": [*records, *here]}) + "\n")
    modes = args.modes.split(",")
    for other in modes[1:]:
        print(summary(here, modes[0], other))
    return 1 if any(record["error"] for record in here) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
