"""Compare two servers: same model, same flags, one run, alternating.

    python -m benchmarks.server [front|figures|stage] [--rounds 40] [--seconds 600] [--output PATH]

- ``front``: nwor-server against stock ``vllm serve``, both on the stock engine
- ``figures``: nwor-server with every figure and the admin API, against nwor-server without them; both write
  the cache the stock way
- ``stage``: nwor-server as it comes, against stock ``vllm serve``

Both servers run at the same time; only one is under load at a time. Each round loads one and then the other,
and every other round begins with the other one, so that drift of the machine falls on both. A ratio is taken
per round, after one round that does not count; the table gives their geometric mean, with the interval that
holds it in 95% of resampled runs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.server.load import Load, measure
from benchmarks.server.report import describe_machine, summarize, write_report
from benchmarks.server.servers import (
    Server,
    start_observed,
    start_ours,
    start_staging,
    start_stock,
    start_unobserved,
)

#: Concurrency and how many requests each round sends at it.
LOADS = (Load(1, 6), Load(8, 32), Load(32, 96))

#: Seconds before each load: the processes of the server that was loaded last poll for another second, on the
#: cores that the other one needs.
REST = 2.0


@dataclass(frozen=True)
class Comparison:
    """Two servers, how the report calls them, and what is asked of their ratio."""

    baseline: str
    ours: str
    start_baseline: Callable[[], AbstractContextManager[Server]]
    start_ours: Callable[[], AbstractContextManager[Server]]
    loads: tuple[Load, ...]
    target: float


COMPARISONS = {
    "front": Comparison("stock vllm serve", "nwor-server", start_stock, start_ours, LOADS, 0.97),
    "figures": Comparison(
        "without figures", "with figures", start_unobserved, start_observed, LOADS[2:], 0.99
    ),
    "stage": Comparison("stock vllm serve", "nwor-server, stage", start_stock, start_staging, LOADS, 1.0),
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description=__doc__.splitlines()[0])
    parser.add_argument("comparison", nargs="?", choices=COMPARISONS, default="front")
    parser.add_argument("--rounds", type=int, default=40, help="at most")
    parser.add_argument("--seconds", type=float, default=600, help="no round begins after so long")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--output", type=Path, help="default: benchmarks/server/results/COMPARISON")
    args = parser.parse_args(argv)
    args.output = args.output or Path("benchmarks/server/results") / args.comparison
    if args.rounds < 2:
        parser.error("--rounds must be 2 or more: a single round says nothing about the spread")
    return args


async def run(args: argparse.Namespace, servers: dict[str, Server]) -> list[dict]:
    """Return one record per round, load and server; no round begins after the time is up."""
    records = []
    loads = COMPARISONS[args.comparison].loads
    for load in loads:
        for server in servers.values():
            await asyncio.sleep(REST)
            await measure(server.url, load, args.max_tokens, first_prompt=0)
    start = time.monotonic()
    for number in range(args.rounds):
        if number >= 2 and time.monotonic() - start > args.seconds * number / (number + 1):
            break
        order = list(servers) if number % 2 == 0 else list(reversed(servers))
        for load in loads:
            for name in order:
                await asyncio.sleep(REST)
                before = servers[name].cpu_seconds()
                first = 1000 * (number + 1)
                result = await measure(servers[name].url, load, args.max_tokens, first_prompt=first)
                used = servers[name].cpu_seconds() - before
                result["front_cpu_ms"] = 1000 * used / load.requests
                records.append({"server": name, "round": number, "concurrency": load.concurrency, **result})
                print(
                    f"round {number + 1}/{args.rounds} c={load.concurrency:<3} {name:<8} "
                    f"{result['tokens_per_s']:8.1f} tokens/s  TTFT {result['ttft_ms']:7.2f} ms  "
                    f"front CPU {result['front_cpu_ms']:6.2f} ms/request",
                    flush=True,
                )
    return records


def main(argv: list[str]) -> int:
    args = parse(argv)
    compared = COMPARISONS[args.comparison]
    machine = describe_machine()
    with compared.start_baseline() as baseline, compared.start_ours() as ours:
        servers = {"baseline": baseline, "ours": ours}
        records = asyncio.run(run(args, servers))
    settings = {
        "comparison": args.comparison,
        "baseline": compared.baseline,
        "ours": compared.ours,
        "target": compared.target,
        "rounds": len({record["round"] for record in records}),
        "max_tokens": args.max_tokens,
        "model": "bundled demo model and head, k=4",
    }
    print(write_report(args.output, machine, settings, summarize(records, compared.target), records))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
