"""Hours of random requests against one server, and its books at the end.

``python -m tests.soak --minutes 60``. Clients send valid requests of every API, whole and as streams, with
and without priorities, and some leave in the middle. The mode is switched and the prefix cache reset
meanwhile, and the cache is small, so that requests are preempted. The end is 0 where nothing was lost and
nothing wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

from tests.conftest import find_free_port
from tests.random_requests import Generator, RandomRequest, send
from tests.server_process import DEMO_MODEL, ServerProcess
from tests.waiting import wait_until

ADMIN_KEY = "soak"
CLIENTS = 8
MODES = ("off", "stage", "cow")
#: Of 100 requests, so many are left in the middle.
LEAVING = 8
FLAGS = (
    *("--demo", "--dtype", "float32", "--host", "127.0.0.1", "--admin-api-key", ADMIN_KEY),
    *("--scheduling-policy", "priority", "--max-num-seqs", "8"),
    # Room for a part of what runs at once.
    *(
        "--block-size",
        "32",
        "--num-gpu-blocks-override",
        "20",
        "--max-model-len",
        "512",
        "--disable-uvicorn-access-log",
    ),
)


class Soak:
    """One run.

    Args:
        server: a server that is ready.
        seed: of the random numbers.

    """

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.server = server
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._seed = seed
        self._over = threading.Event()
        self._lock = threading.Lock()

    def run(self, seconds: float) -> None:
        """Send requests for a while, then look at the books."""
        workers = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]
        workers.append(threading.Thread(target=self._operator))
        for worker in workers:
            worker.start()
        memory = []
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.wrong:
            time.sleep(min(10.0, max(0.0, end - time.monotonic())))
            memory.append(self._memory())
        self._over.set()
        for worker in workers:
            worker.join()
        self._close_books(memory)

    def _client(self, number: int) -> None:
        generator, rng = Generator(self._seed + number), random.Random(self._seed - number)
        with self.server.client(timeout=120) as http:
            while not self._over.is_set():
                request = generator.make()
                if request.path != "/v1/responses":
                    request.body["priority"] = rng.randint(0, 3)
                try:
                    if rng.random() * 100 < LEAVING:
                        self._leave(http, request)
                    else:
                        seen = send(http, request, stream=request.stream)
                        self._note(f"status {seen.status}")
                        if seen.status >= 500:
                            self.wrong.append(f"{seen}: {request}")
                except Exception as error:
                    self.wrong.append(f"{error!r}: {request}")
                    return

    def _leave(self, http: httpx.Client, request: RandomRequest) -> None:
        body = {**request.body, "stream": True}
        with http.stream("POST", request.path, json=body) as answer:
            next(answer.iter_lines(), None)
        self._note("left")

    def _operator(self) -> None:
        rng = random.Random(self._seed)
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        with httpx.Client(base_url=self.server.url, timeout=120) as http:
            while not self._over.wait(rng.uniform(0.5, 3)):
                mode = rng.choice(MODES)
                answer = http.put("/admin/nwor", json={"mode": mode}, headers=headers)
                self._note(f"mode {answer.status_code}")
                if rng.random() < 0.2:
                    self._note(f"reset {http.post('/reset_prefix_cache').status_code}")

    def _note(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _memory(self) -> int:
        server = psutil.Process(self.server.process.pid)
        return sum(process.memory_info().rss for process in [server, *server.children(recursive=True)])

    def _close_books(self, memory: list[int]) -> None:
        server = self.server
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            wait_until(lambda gauge=gauge: server.total(gauge) == 0, 60, f"{gauge} is 0")  # type: ignore[misc]
        time.sleep(1)
        windows, ended = server.total("nwor_windows_total"), server.total("nwor_request_windows_total")
        if windows != ended:
            self.wrong.append(f"{windows} windows, {ended} of requests that ended")
        if server.total("nwor_accounting_mismatches_total"):
            self.wrong.append(f"mismatches: {server.metric('nwor_accounting_mismatches_total')}")
        failed = server.metric("nwor_failed_requests_total")
        if any(count for key, count in failed.items() if key != (("place", "constraints"),)):
            self.wrong.append(f"failed requests: {failed}")
        if server.total("vllm:kv_cache_usage_perc") > 0:
            self.wrong.append(f"cache in use: {server.total('vllm:kv_cache_usage_perc')}")
        settled = memory[len(memory) // 4 :]
        if len(settled) > 8 and settled[-1] > 1.05 * max(settled[: len(settled) // 3]):
            self.wrong.append(f"memory grew: {settled[:3]} to {settled[-3:]}")
        print(f"requests: {dict(sorted(self.counts.items()))}")
        ends = server.metric("vllm:request_success_total")
        print(f"ended: { {dict(labels)['finished_reason']: round(count) for labels, count in ends.items()} }")
        print(f"preemptions: {server.total('vllm:num_preemptions_total'):.0f}, windows: {windows:.0f}")
        print(f"constraints that left nothing: {failed[(('place', 'constraints'),)]:.0f}")
        print(f"memory, MB: {[round(size / 1e6) for size in memory[:: max(1, len(memory) // 8)]]}")


def main() -> int:
    """Run from the command line; return 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the route that resets the prefix cache
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(list(FLAGS), find_free_port(), Path(folder) / "log.txt")
        try:
            server.wait_until_ready()
            soak = Soak(server, args.seed)
            soak.run(args.minutes * 60)
            if soak.wrong and server.process.poll() is not None:
                print(server.log[-6000:])
        finally:
            server.kill()
    for problem in soak.wrong[:10]:
        print(f"WRONG: {problem}")
    print(f"{DEMO_MODEL}: " + ("something was wrong" if soak.wrong else "nothing lost, nothing wrong"))
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
