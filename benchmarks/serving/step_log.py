"""A stat logger of vLLM's that writes a line for every step of the engine; the same in every arm.

vLLM finds it as an entry point on ``PYTHONPATH`` (see :func:`provide`), in stock servers too. In the front's
process it reads figures that vLLM has made anyway, and patches nothing. vLLM's own flag
``--enable-logging-iteration-details`` would do for stock, but sends NWOR's scheduler the long way.

A step counts as *mixed* when a prompt ended in it while other requests decoded. A chunk of a prompt before
its last leaves no trace in these figures, and its step counts as pure.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.serving.summary import quantile

#: Names the file to write.
VARIABLE = "NWOR_BENCHMARK_STEP_LOG"
#: Seconds after a step in which its line is written; a reader waits longer.
FLUSH_SECONDS = 0.25


def line(first: int, gaps: list[float], generated: int, computed: int, now: float) -> list[float]:
    """Return what is kept of a step.

    Args:
        first: requests that had their first token in it.
        gaps: seconds since the last token of each request that went on: by the engine's clock.
        generated: tokens of all requests.
        computed: tokens of the prompts that ended.
        now: when.

    """
    gap = sorted(gaps)[len(gaps) // 2] if gaps else 0.0
    return [round(now, 4), first, len(gaps), round(1e3 * gap, 4), generated, computed]


class StepLog:
    """Collects lines, and writes them now and then from the front's event loop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: list[list[float]] = []

    def add(self, stats: Any) -> None:
        """Keep one step's figures."""
        if not self._lines:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)
        self._lines.append(
            line(
                len(stats.time_to_first_tokens_iter),
                stats.inter_token_latencies_iter,
                stats.num_generation_tokens,
                stats.prompt_token_stats.computed,
                time.monotonic(),
            )
        )

    def flush(self) -> None:
        """Append what has come to the file."""
        with open(self._path, "a") as file:
            file.write("".join(json.dumps(one) + "\n" for one in self._lines))
        self._lines.clear()


def provide(folder: Path) -> Path:
    """Write the metadata of installed plugins into a folder for ``PYTHONPATH``, and return the folder."""
    package = folder / "nwor_benchmark_steps-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nwor-benchmark-steps\nVersion: 0\n")
    points = "[vllm.stat_logger_plugins]\nnwor_steps = benchmarks.serving.step_plugin:StepLogger\n"
    points += "[vllm.general_plugins]\nnwor_rates = benchmarks.serving.rates_plugin:register\n"
    (package / "entry_points.txt").write_text(points)
    return folder


def read(path: Path, start: float, end: float) -> list[list[float]]:
    """Return the lines of a window."""
    if not path.is_file():
        return []
    result = []
    with path.open() as file:
        for text in file:
            if not text.endswith("\n"):
                break  # being written
            step = json.loads(text)
            if start < step[0] <= end:
                result.append(step)
    return result


def summarize(steps: list[list[float]]) -> dict[str, Any]:
    """Return how many steps were pure and mixed and what they took; empty where none is known.

    What a step takes is the time between its results and those before, by the engine's clock. Where steps are
    launched ahead, host work of a mixed step falls into the time of the step before it.
    """
    kinds = {
        "pure": [step for step in steps if step[2] and not step[1]],
        "mixed": [step for step in steps if step[2] and step[1]],
        "prompts": [step for step in steps if step[1] and not step[2]],
    }
    if not steps:
        return {}
    decoding = len(kinds["pure"]) + len(kinds["mixed"])
    result: dict[str, Any] = {
        "steps": len(steps),
        "mixed_share": len(kinds["mixed"]) / max(1, decoding),
        "prompts_only": len(kinds["prompts"]),
    }
    for kind in ("pure", "mixed"):
        times = [step[3] for step in kinds[kind]]
        if times:
            result[kind] = {
                "steps": len(times),
                "median_ms": statistics.median(times),
                "mean_ms": statistics.fmean(times),
                "p99_ms": quantile(times, 0.99),
                "requests": statistics.fmean(step[2] for step in kinds[kind]),
                "prompt_tokens": statistics.fmean(step[5] for step in kinds[kind]),
            }
    return result
