"""Microseconds of `schedule()` and `update_from_output()`: vLLM's own way against NWOR's `fast_host`.

No engine and no GPU: results are made up, and cost nothing of what is timed. The two take turns. The clock is
the thread's own, so that other programs of the machine disturb it little.

    python -m benchmarks.engine.scheduler_micro --requests 64 --drafts 4
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from benchmarks.engine.scheduler_rig import Drive, Setup, make_request, make_scheduler
from nwor.engine.fastpath.scheduler import FastScheduling

#: Steps at the start of each turn that do not count.
WARM_UP = 4


class FastAsyncScheduler(AsyncScheduler, FastScheduling):
    """What engines with NWOR have, less NWOR's own figures."""


def fill(drive: Drive, setup: Setup, turn: int, context: int, length: int) -> None:
    """Start as many requests as run at once, and run the steps that read their prompts."""
    for number in range(setup.requests):
        name = f"{turn}-{number}"
        prompt = [2 + (number * 7 + position) % 997 for position in range(context)]
        drive.scheduler.add_request(
            make_request(drive.scheduler, name, prompt, SamplingParams(max_tokens=length))
        )
    while drive.scheduler.waiting or any(request.is_prefill_chunk for request in drive.scheduler.running):
        drive.make()
        drive.take()


def turn_of(drive: Drive, setup: Setup, turn: int, args: Any) -> tuple[list[float], list[float]]:
    """Time one turn's steps in microseconds, `schedule()` and `update_from_output()` apart."""
    fill(drive, setup, turn, args.context, args.steps * (setup.drafts + 1) + 64)
    schedules, updates = [], []
    gc.collect()
    gc.disable()
    drive.make()
    for step in range(args.steps):
        drive.steps += 1
        begin = time.thread_time()
        output = drive.scheduler.schedule()
        middle = time.thread_time()
        drive._under_way.append((output, drive.answer(output)))
        oldest, result = drive._under_way.popleft()
        resumed = time.thread_time()
        drive.scheduler.update_from_output(oldest, result)
        end = time.thread_time()
        if step >= WARM_UP:
            schedules.append((middle - begin) * 1e6)
            updates.append((end - resumed) * 1e6)
    gc.enable()
    drive.take()
    drive.scheduler.finish_requests(list(drive.scheduler.requests), RequestStatus.FINISHED_ABORTED)
    drive.make()
    drive.take()
    return schedules, updates


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--acceptance", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=100, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=6)
    args = parser.parse_args()
    blocks = args.requests * ((args.context + args.steps * (args.drafts + 1) + 64) // 16 + 4)
    length = args.context + args.steps * (args.drafts + 1) + 256
    drives, setups = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, create in (("stock", AsyncScheduler), ("fast", FastAsyncScheduler)):
            setup = Setup(
                drafts=args.drafts,
                requests=args.requests,
                blocks=blocks,
                length=length,
                settings={},
            )
            scheduler = make_scheduler(Path(folder), setup, create)
            drives[name], setups[name] = Drive(scheduler, acceptance=args.acceptance), setup
        seen: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in drives}
        for turn in range(args.turns):
            for name in list(drives)[:: 1 if turn % 2 else -1]:
                for into, new in zip(
                    seen[name], turn_of(drives[name], setups[name], turn, args), strict=True
                ):
                    into.extend(new)
    print(
        f"{args.requests} requests, k={args.drafts}, {args.acceptance} of drafts accepted (conditional), "
        f"context {args.context}; {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}"
    )
    for name, (schedules, updates) in seen.items():
        middle = statistics.median(schedules), statistics.median(updates)
        quickest = statistics.quantiles(schedules, n=10)[0], statistics.quantiles(updates, n=10)[0]
        print(
            f"{name}: {middle[0]:.0f} us schedule + {middle[1]:.0f} us update (medians of {len(schedules)} "
            f"steps; a tenth takes less than {quickest[0]:.0f} + {quickest[1]:.0f})"
        )


if __name__ == "__main__":
    main()
