"""Clients of a soak: processes with threads that send random requests, and what they saw.

One process sends a few hundred requests a second at most (the interpreter's lock), so that a fast server
needs several.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections import Counter
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Any

import httpx

from tests.random_requests import Generator, RandomRequest, Seen, send

#: Of 100 requests, so many are left in the middle.
LEAVING = 8
#: Seconds that an answer may take, the pauses of the server included.
TIMEOUT = 180.0
#: More problems than this many end a process' part.
_MOST_WRONG = 5


def _finish(seen: Seen) -> list[str]:
    """Return how each sequence of an answer ended."""
    return [choice[1] if len(choice) == 2 else choice[2] for choice in seen.choices]


def _refused(request: RandomRequest, status: int, message: str) -> list[str]:
    """Return what to note of a refusal; some come after the engine has begun with the request."""
    begun = request.body.get("n", 1) if "Nothing was left" in message else 0
    return [f"status {status}", *["sequences refused late"] * begun]


class _Process:
    """The threads of one process and what they saw."""

    def __init__(self, url: str, seed: int, left: Synchronized[int], over: Event) -> None:
        self._url, self._seed, self._left, self._over = url, seed, left, over
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def client(self, number: int) -> None:
        """Send requests until all are sent or the time is over."""
        generator, rng = Generator(self._seed + number), random.Random(f"{self._seed} {number}")
        with httpx.Client(base_url=self._url, timeout=TIMEOUT) as http:
            while self._take():
                request = generator.make()
                if request.path != "/v1/responses":
                    request.body["priority"] = rng.randint(0, 3)
                leaves = rng.random() * 100 < LEAVING
                try:
                    noted = self._leave(http, request) if leaves else self._answer(http, request)
                except Exception as error:
                    noted = ["failed"]
                    self._complain(f"{error!r}: {request}")
                with self._lock:
                    self.counts.update(noted)

    def _take(self) -> bool:
        if self._over.is_set() or len(self.wrong) > _MOST_WRONG:
            return False
        with self._left.get_lock():
            self._left.value -= 1
            return self._left.value >= 0

    def _answer(self, http: httpx.Client, request: RandomRequest) -> list[str]:
        seen = send(http, request, stream=request.stream)
        if seen.status >= 500:
            self._complain(f"{seen}: {request}")
        if seen.status != 200:
            return _refused(request, seen.status, seen.message)
        ends = _finish(seen)
        # An aborted stream does not tell of sequences that had no token yet.
        asked = request.body.get("n", 1)
        return ["status 200", *["sequences"] * asked, *(f"end {end}" for end in ends)]

    def _leave(self, http: httpx.Client, request: RandomRequest) -> list[str]:
        """Read the first line of a stream, and no more."""
        with http.stream("POST", request.path, json={**request.body, "stream": True}) as answer:
            if answer.status_code == 200:
                next(answer.iter_lines(), None)
                return ["left", *["sequences"] * request.body.get("n", 1)]
            if answer.status_code >= 500:
                self._complain(f"{answer.status_code} of a stream: {request}")
            return _refused(request, answer.status_code, answer.read().decode())

    def _complain(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what[:2000])


def _run(url: str, seed: int, numbers: range, left: Any, over: Event, results: Any) -> None:
    part = _Process(url, seed, left, over)
    threads = [threading.Thread(target=part.client, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((part.counts, part.wrong, time.process_time()))


class Clients:
    """Client processes, started together.

    Args:
        url: of the server.
        seed: of the random numbers.
        requests: how many are sent in all, unless the time is over before.
        clients: how many send at the same time.
        processes: among how many processes they are dealt out.

    """

    def __init__(self, url: str, seed: int, requests: int, clients: int, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._left = context.Value("q", requests)
        self._requests = requests
        self._over = context.Event()
        self._results = context.Queue()
        self._processes = []
        for index in range(min(processes, clients)):
            numbers = range(index, clients, processes)
            arguments = (url, seed, numbers, self._left, self._over, self._results)
            self._processes.append(context.Process(target=_run, args=arguments, daemon=True))
        for process in self._processes:
            process.start()

    @property
    def sent(self) -> int:
        """How many requests were sent so far."""
        return self._requests - max(0, self._left.value)

    @property
    def ended(self) -> bool:
        """Whether every client has ended."""
        return not any(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        """Send no more requests."""
        self._over.set()

    def results(self) -> tuple[Counter[str], list[str], float]:
        """Wait for the end of every client.

        Returns:
            What was seen, by its name, and how often; what was wrong; seconds of processor time.

        """
        counts, wrong, cpu = Counter(), [], 0.0
        for _ in self._processes:
            part, problems, seconds = self._results.get(timeout=2 * TIMEOUT)
            counts += part
            wrong += problems
            cpu += seconds
        for process in self._processes:
            process.join()
        return counts, wrong, cpu
