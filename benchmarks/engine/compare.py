"""Stock vLLM against NWOR: runs decode.py twice at once, gives the two their turns, and reports the ratios.

    python benchmarks/engine/compare.py --output benchmarks/engine/results/h200.json --budget-seconds 1500

    python benchmarks/engine/compare.py --attention-backend TRITON_ATTN --modes off,stage --output triton.json

For each shape and number of draft tokens an engine without a trace of NWOR and one with it start together and
then alternate, run by run; NWOR's modes take turns within its own. Everything known so far stands in the
output file at any time. The report beside it (`.md`) is written after each pair; report.py makes one of
several files.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import report
import shapes
from grid import fractions, groups, numbers
from turns import Message, Player, alternate

DECODE = Path(__file__).resolve().parent / "decode.py"
#: Least seconds for a pair of processes: their start and something to measure.
LEAST_PAIR_SECONDS = 150.0
#: What starts and turns may take at most; beyond it a pair is ended.
START_SECONDS = 400.0
TURN_SECONDS = 120.0


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

    def label(self, shape: str) -> str:
        """Return what the shape is called in the results."""
        return shapes.label(shape, self.args.cache_dtype, self.args.attention_backend)

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
        """Run an engine without NWOR and one with it, in turns.

        Args:
            shape: name of the model's shape.
            k: draft tokens of a step.
            seconds: no context and batch is begun later.
            host_steps: as in decode.py.
            folder: for the processes' own files.

        """
        began = time.monotonic()
        ends = began + seconds
        processes, players, places, targets = [], [], [], []
        for kind, modes in (("stock", ""), ("nwor", self.args.modes)):
            targets.append(folder / f"{shape}-{k}-{kind}.json")
            places.append(len(self.everything["processes"]))
            self.everything["processes"].append({"kind": kind, "shape": self.label(shape), "k": k})
            process, player = self.launch(shape, k, kind, modes, host_steps, targets[-1])
            processes.append(process)
            players.append(player)
        go: dict[str, bool] = {}
        steps: dict[str, int] = {}

        def decide(player: Player, message: Message) -> Mapping[str, Any]:
            # Who comes first decides for both: whether there is time, and how many steps a run takes.
            cell = message.get("cell", "")
            reply = {"go": go.setdefault(cell, time.monotonic() < ends)}
            if "steps" in message:
                reply["steps"] = steps.setdefault(cell, message["steps"])
            for place, target in zip(places, targets, strict=True):
                self.take(place, target, time.monotonic() - began)
            return reply

        trouble = None
        try:
            alternate(players, decide, START_SECONDS, TURN_SECONDS)
        except TimeoutError as error:
            trouble = str(error)
            print(trouble, flush=True)
        finally:
            for process, player in zip(processes, players, strict=True):
                os.close(player.read)
                os.close(player.write)
                if trouble is not None:
                    process.kill()
                process.wait(60)
        for process, place, target in zip(processes, places, targets, strict=True):
            self.take(place, target, time.monotonic() - began)
            entry = self.everything["processes"][place]
            if process.returncode:
                entry["error"] = entry.get("error") or trouble or f"ended with status {process.returncode}"
        self.save()
        self.write_report()

    def launch(
        self, shape: str, k: int, kind: str, modes: str, host_steps: int, target: Path
    ) -> tuple[subprocess.Popen[bytes], Player]:
        """Start one process.

        Args:
            shape: name of the model's shape.
            k: draft tokens of a step.
            kind: "stock" or "nwor".
            modes: NWOR's modes, comma-separated; empty for stock vLLM.
            host_steps: as in decode.py.
            target: where the process writes its record.

        """
        args = self.args
        (theirs_read, ours_write), (ours_read, theirs_write) = os.pipe(), os.pipe()
        command = [sys.executable, str(DECODE), "--shape", shape, "--k", str(k), "--modes", modes]
        command += ["--output", str(target), "--host-steps", str(host_steps)]
        command += ["--turns", f"{theirs_read},{theirs_write}", "--folder", str(target.with_suffix(""))]
        names = ("contexts", "batches", "acceptances", "repeats", "run_seconds", "most_tokens", "cache_gib")
        for name in (*names, "cache_dtype", "attention_backend", "capture_tokens"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        environment = dict(os.environ)
        if not modes:
            environment["NWOR_DISABLE"] = "1"
        process = subprocess.Popen(command, env=environment, pass_fds=(theirs_read, theirs_write))
        os.close(theirs_read)
        os.close(theirs_write)
        return process, Player(f"{shape} k={k} {kind}", ours_read, ours_write)

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
        self.everything["processes"].append(
            {"kind": "stock", "shape": self.label(shape), "k": k, "skipped": skipped}
        )
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
    parser.add_argument("--host-steps", type=int, default=1000, help="steps of the host's time; 0 for none")
    parser.add_argument("--cache-dtype", default="auto", help="of the KV cache, as vLLM's --kv-cache-dtype")
    parser.add_argument("--attention-backend", default="", help="vLLM's name; empty for its own choice")
    parser.add_argument("--capture-tokens", type=int, default=0, help="largest CUDA graph; 0 for vLLM's own")
    parser.add_argument("--cache-gib", type=float, default=40.0, help="KV cache of each engine")
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
            seconds = comparison.left / (len(pairs) - number)
            host_steps = args.host_steps if k == ks[0] else 0
            comparison.pair(shape, k, seconds, host_steps, Path(folder))
    comparison.write_report()
    print(comparison.output.with_suffix(".md").read_text("utf-8"))


if __name__ == "__main__":
    main()
