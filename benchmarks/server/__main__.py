"""Compare nwor-server with stock ``vllm serve``: same model, same flags, one run, alternating.

Both servers run at the same time; only one is under load at a time. Each round loads one and then the other,
and every other round begins with the other one, so that drift of the machine falls on both. A ratio is taken
per round; the table gives the median over the rounds and the quartiles. Ratios above 1 favour nwor-server.

    python -m benchmarks.server [--rounds 20] [--seconds 420] [--output benchmarks/server/results/NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from benchmarks.server.load import Load, measure
from benchmarks.server.report import describe_machine, summarize, write_report
from benchmarks.server.servers import Server, start_ours, start_stock

#: Concurrency and how many requests each round sends at it.
LOADS = (Load(1, 6), Load(8, 32), Load(32, 96))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="at most")
    parser.add_argument("--seconds", type=float, default=420, help="no round begins after so long")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/server/results/cpu"))
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error("--rounds must be 2 or more: a single round says nothing about the spread")
    return args


async def run(args: argparse.Namespace, servers: dict[str, Server]) -> list[dict]:
    """Return one record per round, load and server; no round begins after the time is up."""
    records = []
    for server in servers.values():
        await measure(server.url, Load(8, 16), args.max_tokens, first_prompt=0)
    start = time.monotonic()
    for number in range(args.rounds):
        if number >= 2 and time.monotonic() - start > args.seconds * number / (number + 1):
            break
        order = list(servers) if number % 2 == 0 else list(reversed(servers))
        for load in LOADS:
            for name in order:
                before = servers[name].cpu_seconds()
                first = 1000 * (number + 1)
                result = await measure(servers[name].url, load, args.max_tokens, first_prompt=first)
                used = servers[name].cpu_seconds() - before
                result["front_cpu_ms"] = 1000 * used / load.requests
                records.append({"server": name, "round": number, "concurrency": load.concurrency, **result})
                print(
                    f"round {number + 1}/{args.rounds} c={load.concurrency:<3} {name:<6} "
                    f"{result['tokens_per_s']:8.1f} tokens/s  TTFT {result['ttft_ms']:7.2f} ms  "
                    f"front CPU {result['front_cpu_ms']:6.2f} ms/request",
                    flush=True,
                )
    return records


def main(argv: list[str]) -> int:
    args = parse(argv)
    machine = describe_machine()
    with start_stock() as stock, start_ours() as ours:
        servers = {"stock": stock, "ours": ours}
        records = asyncio.run(run(args, servers))
    summary = summarize(records)
    rounds = len({record["round"] for record in records})
    settings = {"rounds": rounds, "max_tokens": args.max_tokens, "model": "bundled demo, EAGLE, k=4"}
    print(write_report(args.output, machine, settings, summary, records))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
