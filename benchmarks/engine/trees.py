"""What a step costs with trees of draft tokens and with chains, and what follows for tokens a second.

    python benchmarks/engine/trees.py --arms stock@4,stage@4,grown@16x6x4 --output trees.json [--curves FILE]

    python benchmarks/engine/trees.py --arms stock@2,stock@4,stock@7+adaptive,stage@7+adaptive \\
        --batches 64,128 --acceptance 0.6 --output adaptive.json

One engine for each arm, all on one GPU at once; they take turns, run by run (turns.py). Acceptance is
synthetic and does not change what a step costs. Tokens a second are a step's time and the tokens that a step
brings: by ``--curves``, a JSON object of arms' names to the tokens of a step, as measured elsewhere.

Arms with ``+adaptive`` have vLLM's adaptive verification, whose steps cost what they verify. So tokens a
second as they were measured are told for them, and for chains beside them. All requests accept alike here:
what shorter windows for some of them alone gain is not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turns import Message, Player, alternate

DECODE = Path(__file__).resolve().parent / "decode.py"
#: Ends an arm with vLLM's adaptive verification.
ADAPTIVE = "+adaptive"


def command_of(arm: str) -> list[str]:
    """Return decode.py's flags of an arm.

    Raises:
        ValueError: if it is none.

    """
    kind, _, size = arm.partition("@")
    if size.endswith(ADAPTIVE):
        if kind not in ("stock", "stage"):
            raise ValueError(f"{arm}: adaptive verification is of chains")
        return [*command_of(arm.removesuffix(ADAPTIVE)), "--adaptive"]
    size, _, vocabulary = size.partition("+v")
    drafted = ["--draft-vocabulary", vocabulary] if vocabulary else []
    if kind == "stock":
        return ["--k", size]
    if kind == "stage":
        return ["--k", size, "--modes", "stage", *drafted]
    if kind in ("grown", "comb"):
        nodes, depth, width = size.split("x")
        return ["--k", nodes, "--modes", "stage", "--tree", f"{nodes},{depth},{width},{kind}", *drafted]
    raise ValueError(
        f"{arm}: wanted stock@K or stage@K, and {ADAPTIVE}, or grown@ or comb@NODESxDEPTHxWIDTH, and +vN"
    )


def launch(arm: str, args: argparse.Namespace, target: Path) -> tuple[subprocess.Popen[bytes], Player]:
    """Start the engine of an arm."""
    (theirs_read, ours_write), (ours_read, theirs_write) = os.pipe(), os.pipe()
    command = [sys.executable, str(DECODE), "--shape", args.shape, *command_of(arm)]
    command += ["--contexts", args.contexts, "--batches", args.batches, "--acceptances", str(args.acceptance)]
    command += ["--repeats", str(args.repeats), "--run-seconds", str(args.run_seconds)]
    command += ["--cache-gib", str(args.cache_gib), "--max-len", str(args.max_len), "--most-tokens", "512"]
    command += ["--turns", f"{theirs_read},{theirs_write}", "--output", str(target)]
    command += ["--folder", str(target.with_suffix("")), "--attention-backend", args.attention_backend]
    environment = dict(os.environ)
    if arm.startswith("stock"):
        environment["NWOR_DISABLE"] = "1"
    process = subprocess.Popen(command, env=environment, pass_fds=(theirs_read, theirs_write))
    os.close(theirs_read)
    os.close(theirs_write)
    return process, Player(arm, ours_read, ours_write)


def step_ms(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return a step's milliseconds, run by run, by context and batch."""
    found = {}
    for cell in record["cells"]:
        (seconds,) = cell["seconds"].values()
        found[f"{cell['context']}x{cell['batch']}"] = [1e3 * each / cell["steps"] for each in seconds]
    return found


def tokens_a_second(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the tokens a second of all runs together, by context and batch."""
    found = {}
    for cell in record["cells"]:
        ((mode, seconds),) = cell["seconds"].items()
        found[f"{cell['context']}x{cell['batch']}"] = sum(cell["tokens"][mode]) / sum(seconds)
    return found


def measured(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of tokens a second of arms of chains, where one of them is adaptive; else nothing."""
    arms = [arm for arm in records if arm.startswith(("stock", "stage"))]
    if not any(arm.endswith(ADAPTIVE) for arm in arms):
        return ""
    rates = {arm: tokens_a_second(records[arm]) for arm in arms}
    cells = list(next(iter(rates.values())))
    lines = ["", "| Tokens a second, measured | " + " | ".join(cells) + " |", "|---" * (len(cells) + 1) + "|"]
    for arm, by_cell in rates.items():
        row = [f"{by_cell[cell]:.0f}" if cell in by_cell else "" for cell in cells]
        lines.append(f"| {arm} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def report(times: Mapping[str, Mapping[str, list[float]]], curves: Mapping[str, float], first: str) -> str:
    """Return tables of steps' times, and of tokens a second relative to the first arm."""
    cells = list(next(iter(times.values()), {}))
    lines = ["| Step, ms | " + " | ".join(cells) + " |", "|---" * (len(cells) + 1) + "|"]
    for arm, by_cell in times.items():
        row = [
            f"{statistics.median(by_cell[cell]):.3f} ± {(max(by_cell[cell]) - min(by_cell[cell])) / 2:.3f}"
            if cell in by_cell
            else ""
            for cell in cells
        ]
        lines.append(f"| {arm} | " + " | ".join(row) + " |")
    if curves:
        lines += ["", f"| Tokens a second, of {first} | " + " | ".join(cells) + " |"]
        lines.append("|---" * (len(cells) + 1) + "|")
        for arm, tokens in curves.items():
            if arm not in times:
                continue
            row = []
            for cell in cells:
                if cell not in times[arm] or cell not in times[first]:
                    row.append("")
                    continue
                rate = tokens / statistics.median(times[arm][cell])
                row.append(f"{rate / (curves[first] / statistics.median(times[first][cell])):.3f}")
            lines.append(f"| {arm} ({tokens:.2f} a step) | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all arms and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", required=True)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--contexts", default="512")
    parser.add_argument("--batches", default="1,4,8,16")
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run-seconds", type=float, default=0.4)
    parser.add_argument("--cache-gib", type=float, default=3.0)
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--attention-backend", default="", help="vLLM's name; empty for its own choice")
    parser.add_argument("--curves", type=Path)
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args()
    arms = args.arms.split(",")
    for arm in arms:
        command_of(arm)
    go: dict[str, int] = {}

    def decide(player: Player, message: Message) -> Mapping[str, Any]:
        reply: dict[str, Any] = {"go": True}
        if "steps" in message:
            reply["steps"] = go.setdefault(message.get("cell", ""), message["steps"])
        return reply

    with tempfile.TemporaryDirectory() as folder:
        targets = {arm: Path(folder) / f"{index}.json" for index, arm in enumerate(arms)}
        started = [launch(arm, args, target) for arm, target in targets.items()]
        try:
            alternate([player for _, player in started], decide, 500.0, 120.0)
        finally:
            for process, player in started:
                os.close(player.read)
                os.close(player.write)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
        records = {arm: json.loads(target.read_text()) for arm, target in targets.items() if target.exists()}
    args.output.write_text(
        json.dumps({"settings": {**vars(args), "output": "", "curves": ""}, "arms": records})
    )
    curves = json.loads(args.curves.read_text()) if args.curves else {}
    times = {arm: step_ms(record) for arm, record in records.items()}
    text = report(times, curves, arms[0]) + measured(records)
    args.output.with_suffix(".md").write_text(text)
    print(text)
    for arm, record in records.items():
        if record.get("error"):
            print(arm, record["error"])


if __name__ == "__main__":
    main()
