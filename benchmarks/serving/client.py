"""The load generator, a process of its own: reads a job from standard input, writes what it saw to a file.

    python -m benchmarks.serving.client < job.json

It imports neither torch nor vLLM and makes all requests before it sends the first. It says what share of a
core it took itself, and how late its event loop was.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving import plan, workload
from benchmarks.serving.stream import Stream, payload
from benchmarks.serving.summary import Timeline, quantile, summarize

HOST = "127.0.0.1"
#: Arrivals behind the window, as a share of those in it: the load goes on until its requests have ended.
AFTER = 1.0
#: Seconds between looks at how late the event loop is.
_LOOK = 0.01


@dataclass(frozen=True)
class Job:
    """One load on one server.

    Attributes:
        port: of the server, on this machine.
        model: its name there.
        load: name of the load; its rate where it is a share of a capacity.
        rate: requests a second with Poisson arrivals.
        lengths: medians, as ``512/256``.
        max_len: longest prompt and answer together.
        vocabulary: words of the model.
        seed: of lengths, arrivals and acceptance.
        salt: of the words.
        shared: share of prompts with a common prefix.
        temperature: of the requests.
        scale: of the number of measured requests in a closed loop.
        seconds: the window's with Poisson arrivals.
        ramp: seconds before that window.
        texts: file of token ids to cut prompts from; empty for random words.
        hard: share of hard requests among those with such prompts.

    """

    port: int
    model: str
    load: str
    rate: float
    lengths: str
    max_len: int
    vocabulary: int
    seed: str
    salt: str
    shared: float = 0.0
    temperature: float = 0.0
    scale: float = 1.0
    seconds: float = 10.0
    ramp: float = 2.0
    texts: str = ""
    hard: float = 0.0


class Loader:
    """Sends a job's requests.

    Args:
        job: what to send, and where.

    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.load = plan.parse_load(job.load)
        self.timelines: list[Timeline] = []
        self._streams: list[Stream] = []
        self._idle: list[Stream] = []

    def prepare(self, count: int, early: int) -> list[bytes]:
        """Return the bytes of the job's requests."""
        job = self.job
        recipe = workload.Recipe(
            plan.parse_lengths(job.lengths, job.max_len),
            job.vocabulary,
            job.seed,
            job.salt,
            job.shared,
            json.loads(Path(job.texts).read_text()) if job.texts else (),
            job.hard,
        )
        return [
            payload(HOST, job.port, workload.body(one, job.model, job.temperature))
            for one in workload.requests(recipe, count, early)
        ]

    async def run(self) -> dict[str, Any]:
        """Send everything and return the figures of the window."""
        closed = self.load.clients > 0
        if closed:
            wanted = plan.size(self.load.clients, self.job.scale)
            payloads = self.prepare(wanted.total, wanted.ramp)
        else:
            inside = max(8, round(self.job.rate * (self.job.seconds + self.job.ramp)))
            payloads = self.prepare(round(inside * (1 + AFTER)), 0)
        late: list[float] = []
        watch = asyncio.create_task(_watch(late))
        began, used = time.monotonic(), time.process_time()
        try:
            start, end = await (self._closed(payloads) if closed else self._arriving(payloads))
        finally:
            watch.cancel()
            for stream in self._streams:
                stream.close()
        wall, used = time.monotonic() - began, time.process_time() - used
        return {
            **summarize(self.timelines, start, end, "ended" if closed else "sent"),
            "window": [start, end],
            "wall_s": wall,
            "client_cpu": used / wall,
            "client_late_ms": 1e3 * quantile(late, 0.99),
        }

    async def _stream(self) -> Stream:
        while self._idle:
            stream = self._idle.pop()
            if not stream.closed:
                return stream
        stream = await Stream.open(HOST, self.job.port)
        self._streams.append(stream)
        return stream

    async def _one(self, content: bytes, stream: Stream) -> None:
        timeline = Timeline(time.monotonic())
        self.timelines.append(timeline)
        await stream.send(content, timeline)

    async def _closed(self, payloads: list[bytes]) -> tuple[float, float]:
        """Let each client send one request after the other; return the window."""
        left: Iterator[bytes] = iter(payloads)
        started, empty, ended = asyncio.Event(), asyncio.Event(), 0
        window = [0.0, 0.0]

        async def work() -> None:
            nonlocal ended
            stream = await self._stream()
            for content in left:
                await self._one(content, stream)
                ended += 1
                if ended == self.load.clients:
                    window[0] = time.monotonic()
                    started.set()
            if not empty.is_set():
                window[1] = time.monotonic()
                empty.set()

        await _first_of([asyncio.create_task(work()) for _ in range(self.load.clients)], empty)
        return window[0], window[1]

    async def _arriving(self, payloads: list[bytes]) -> tuple[float, float]:
        """Send requests when they arrive; return the window."""
        times = workload.arrivals(self.job.seed, self.job.rate, len(payloads))
        began = time.monotonic()
        start, end = began + self.job.ramp, began + self.job.ramp + self.job.seconds
        running: set[asyncio.Task[None]] = set()
        done = asyncio.Event()

        async def one(content: bytes) -> None:
            stream = await self._stream()
            await self._one(content, stream)
            self._idle.append(stream)

        async def send() -> None:
            for when, content in zip(times, payloads, strict=True):
                await asyncio.sleep(max(0.0, began + when - time.monotonic()))
                running.add(asyncio.create_task(one(content)))

        async def wait() -> None:
            await asyncio.sleep(end - time.monotonic())
            while any(one.tokens is None for one in self.timelines if one.sent <= end):
                for task in list(running):
                    if task.done():
                        task.result()  # raises what went wrong
                        running.discard(task)
                await asyncio.sleep(0.02)
            done.set()

        try:
            await _first_of([asyncio.create_task(send()), asyncio.create_task(wait())], done)
        finally:
            for task in running:
                task.cancel()
        return start, end


async def _first_of(tasks: list[asyncio.Task[None]], event: asyncio.Event) -> None:
    """Wait for the event, then cancel the tasks; raise what one of them failed with before."""
    waiter = asyncio.create_task(event.wait())
    try:
        pending: set[asyncio.Task[Any]] = {waiter, *tasks}
        while waiter in pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in (waiter, *tasks):
            task.cancel()
        await asyncio.gather(waiter, *tasks, return_exceptions=True)


async def _watch(late: list[float]) -> None:
    while True:
        asked = time.monotonic()
        await asyncio.sleep(_LOOK)
        late.append(time.monotonic() - asked - _LOOK)


def describe(job: Job) -> str:
    """Return a job as the JSON that the process reads."""
    return json.dumps(asdict(job))


def main() -> int:
    """Run the job that standard input holds; print the figures, or what went wrong."""
    job = Job(**json.loads(sys.stdin.read()))
    gc.disable()  # what one load leaves is little
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    try:
        print(json.dumps(asyncio.run(Loader(job).run())))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
