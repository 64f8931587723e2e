"""Stock vLLM against NWOR: runs decode.py in turn, one process an engine, and reports the ratios.

    python benchmarks/engine/compare.py --output benchmarks/engine/results/h200.json --budget-seconds 1500

For each shape and number of draft tokens stock vLLM runs first, without a trace of NWOR, then an engine with
NWOR that runs its modes interleaved. Everything known so far stands in the output file at any time. The
report beside it (`.md`) is written after each process; report.py makes one of several files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from grid import fractions, groups, numbers

DECODE = Path(__file__).resolve().parent / "decode.py"
#: What an engine's start takes, about.
START_SECONDS = 70.0
#: Least seconds for the two processes of a pair: two starts and something to measure.
LEAST_PAIR_SECONDS = 240.0
#: How much longer than its limit a process may take: the cell that was begun, prompts included.
GRACE_SECONDS = 60.0


def pair_seconds(left: float, pairs: int) -> float:
    """Return the seconds that the next pair of processes gets.

    Args:
        left: seconds of the whole budget that are left.
        pairs: pairs that are still to run.

    """
    return min(left, max(left / pairs, LEAST_PAIR_SECONDS))


def stock_seconds(pair: float, modes: int) -> float:
    """Return how much of a pair's time stock vLLM gets, in seconds.

    Starts and prompts cost both alike; of the rest each process gets as much as it has modes to run.

    Args:
        pair: seconds of both processes together.
        modes: NWOR's modes.

    """
    if pair == float("inf"):
        return pair
    prompts = 0.3  # of what the runs of one mode take
    return START_SECONDS + (pair - 2 * START_SECONDS) * (1 + prompts) / (1 + modes + 2 * prompts)


class Comparison:
    """All processes of this call and the files that they leave.

    Args:
        args: the command line.

    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.started = time.monotonic()
        self.output = Path(args.output)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.everything: dict[str, Any] = {
            "settings": {name: value for name, value in vars(args).items() if name != "output"},
            "processes": [],
        }

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        if not self.args.budget_seconds:
            return float("inf")
        seconds: float = self.args.budget_seconds - (time.monotonic() - self.started)
        return seconds

    def save(self) -> None:
        """Write what is known so far."""
        self.everything["wall_seconds"] = time.monotonic() - self.started
        draft = self.output.with_name(self.output.name + ".new")
        draft.write_text(json.dumps(self.everything, indent=1) + "\n")
        draft.replace(self.output)

    def write_report(self) -> None:
        """Write the report; one that cannot be written must not cost the processes that are still to run."""
        try:
            self.output.with_suffix(".md").write_text(report.document([self.everything]), encoding="utf-8")
        except Exception as error:
            print(f"no report: {type(error).__name__}: {error}", flush=True)

    def pair(self, shape: str, k: int, seconds: float, host_steps: int, folder: Path) -> None:
        """Run stock vLLM, then NWOR.

        Args:
            shape: name of the model's shape.
            k: draft tokens of a step.
            seconds: for both together.
            host_steps: as in decode.py.
            folder: for the processes' own files.

        """
        ends = time.monotonic() + seconds
        modes = self.args.modes.split(",")
        plan = folder / f"{shape}-{k}-stock.json"
        self.run(shape, k, "", stock_seconds(seconds, len(modes)), host_steps, plan, None)
        known = plan if plan.is_file() and json.loads(plan.read_text())["cells"] else None
        target = folder / f"{shape}-{k}-nwor.json"
        self.run(shape, k, self.args.modes, ends - time.monotonic(), host_steps, target, known)

    def run(
        self, shape: str, k: int, modes: str, seconds: float, host_steps: int, target: Path, plan: Path | None
    ) -> None:
        """Run one process and take its record over while it grows.

        Args:
            shape: name of the model's shape.
            k: draft tokens of a step.
            modes: NWOR's modes, comma-separated; empty for stock vLLM.
            seconds: no cell starts later.
            host_steps: as in decode.py.
            target: where the process writes its record.
            plan: the record whose cells and steps it follows, if there is one.

        """
        args = self.args
        limited = seconds != float("inf")
        command = [sys.executable, str(DECODE), "--shape", shape, "--k", str(k), "--modes", modes]
        command += ["--output", str(target), "--host-steps", str(host_steps)]
        command += ["--seconds", f"{max(seconds, 1):.0f}"] if limited else []
        command += ["--plan", str(plan)] if plan else []
        for name in ("contexts", "batches", "acceptances", "repeats", "run_seconds", "most_tokens"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        command += ["--capture-tokens", str(args.capture_tokens)]
        environment = dict(os.environ)
        if not modes:
            environment["NWOR_DISABLE"] = "1"
        place = len(self.everything["processes"])
        self.everything["processes"].append({"kind": "nwor" if modes else "stock", "shape": shape, "k": k})
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment)
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2)
                self.take(place, target, time.monotonic() - began)
                if limited and time.monotonic() - began > seconds + GRACE_SECONDS:
                    print(f"{shape} k={k} {modes or 'stock'}: ended, its time was over", flush=True)
                    break
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(30)
        self.take(place, target, time.monotonic() - began)
        entry = self.everything["processes"][place]
        if process.returncode:
            entry["error"] = entry.get("error") or f"ended with status {process.returncode}"
        self.save()
        self.write_report()

    def take(self, place: int, target: Path, seconds: float) -> None:
        """Put what a process has written so far in its place."""
        entry = self.everything["processes"][place]
        if target.is_file():
            entry |= json.loads(target.read_text())
        entry["wall_seconds"] = seconds
        self.save()

    def skip(self, shape: str, k: int) -> None:
        """Note a pair for which no time is left."""
        args = self.args
        contexts, batches = numbers(args.contexts), numbers(args.batches)
        cells = [cell for group in groups(contexts, batches, fractions(args.acceptances)) for cell in group]
        skipped = [{**vars(cell), "reason": "time was up"} for cell in cells]
        self.everything["processes"].append({"kind": "stock", "shape": shape, "k": k, "skipped": skipped})
        self.save()


def main() -> None:
    """Run all processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="1b,8b")
    parser.add_argument("--k", default="4,8", help="draft tokens of a step")
    parser.add_argument("--modes", default="off,stage,cow")
    parser.add_argument("--contexts", default="512,4096,16384")
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--acceptances", default="0.3,0.6,0.9")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run-seconds", type=float, default=0.5, help="length of a run")
    parser.add_argument("--most-tokens", type=int, default=1024, help="most tokens a request gains in a run")
    parser.add_argument("--host-steps", type=int, default=200, help="steps of the host's time; 0 for none")
    parser.add_argument("--capture-tokens", type=int, default=0, help="largest CUDA graph; 0 for vLLM's own")
    parser.add_argument("--budget-seconds", type=float, default=0, help="for everything; 0 for no limit")
    parser.add_argument("--output", required=True, help="JSON; the report is put beside it")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process under way ends as well
    comparison = Comparison(args)
    ks = numbers(args.k)
    pairs = [(shape, k) for k in ks for shape in args.shapes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        for number, (shape, k) in enumerate(pairs):
            if comparison.left < LEAST_PAIR_SECONDS:
                comparison.skip(shape, k)
                continue
            seconds = pair_seconds(comparison.left, len(pairs) - number)
            host_steps = args.host_steps if k == ks[0] else 0
            comparison.pair(shape, k, seconds, host_steps, Path(folder))
    comparison.write_report()
    print(comparison.output.with_suffix(".md").read_text("utf-8"))


if __name__ == "__main__":
    main()
