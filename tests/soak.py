"""Many random requests against one server, and its books at the end, as JSON.

``python -m tests.soak --requests 100000 --clients 64 --processes 8`` starts ``python -m server --demo``,
sends, prints and ends the server; ``--seconds`` ends it earlier. Clients send valid requests of every API,
whole and as streams, with and without priorities, and some leave in the middle. Meanwhile the mode is
switched, the prefix cache reset, all running requests aborted, and the engine put to sleep and woken up. The
cache is small, so that requests are preempted. Flags behind ``--`` go to the server. The exit code is 0 where
nothing was lost and nothing wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.gpu import entry_points
from tests.server_process import ServerProcess, find_free_port
from tests.soak_clients import Clients
from tests.waiting import wait_until

ADMIN_KEY = "soak"
MODES = ("off", "stage", "cow")
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
#: Seconds between two looks at the server's memory.
LOOK = 5.0
#: What the memory may grow by, of what it was after a quarter of the time.
GROWTH = 1.05


def flags(sequences: int) -> list[str]:
    """Return the server's flags, with a cache that has room for a part of what runs at once."""
    return [
        *("--demo", "--host", "127.0.0.1", "--admin-api-key", ADMIN_KEY, "--disable-uvicorn-access-log"),
        *("--scheduling-policy", "priority", "--max-num-seqs", str(sequences), "--max-model-len", "256"),
        *("--block-size", "32", "--num-gpu-blocks-override", str(sequences + 6)),
    ]


class Operator(threading.Thread):
    """What an operator does to a server while it runs.

    Args:
        url: of the server.
        seed: of the random numbers.
        sleep_level: vLLM's level of sleep: 0 keeps weights and cache where they are.

    Attributes:
        counts: what was done, and with which status, how often.
        wrong: what was not answered with 200.

    """

    def __init__(self, url: str, seed: int, sleep_level: int) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url, self._random, self._level = url, random.Random(seed), sleep_level
        self._over = threading.Event()

    def run(self) -> None:
        """Do one thing after another."""
        rng = self._random
        with httpx.Client(base_url=self._url, timeout=180) as http:
            while not self._over.wait(rng.uniform(0.5, 2)):
                for what in rng.choices(
                    (("mode",), ("reset",), ("abort",), ("sleep", "wake")), weights=(8, 2, 1, 1)
                )[0]:
                    try:
                        self._do(http, what)
                    except httpx.HTTPError as error:
                        self.wrong.append(f"{what}: {error!r}")
                        return

    def _do(self, http: httpx.Client, what: str) -> None:
        if what == "mode":
            headers, mode = {"Authorization": f"Bearer {ADMIN_KEY}"}, self._random.choice(MODES)
            answer = http.put("/admin/nwor", json={"mode": mode}, headers=headers)
        elif what == "reset":
            answer = http.post("/reset_prefix_cache")
        elif what == "abort":
            answer = http.post("/abort_requests", json={})
        elif what == "sleep":
            mode = self._random.choice(("abort", "wait"))
            answer = http.post("/sleep", params={"level": self._level, "mode": mode})
        else:
            answer = http.post("/wake_up")
        self.counts[f"{what} {answer.status_code}"] += 1
        if answer.status_code != 200:
            self.wrong.append(f"{what}: {answer.status_code} {answer.text[:500]}")

    def stop(self) -> None:
        """End after what is being done."""
        self._over.set()
        self.join()


def memory_of(server: ServerProcess) -> int:
    """Return the resident bytes of the server and its engine."""
    process = psutil.Process(server.process.pid)
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])


def soak(server: ServerProcess, args: argparse.Namespace) -> dict[str, Any]:
    """Send the requests and return the books."""
    memory, began = [memory_of(server)], time.monotonic()
    operator = Operator(server.url, args.seed, args.sleep_level)
    clients = Clients(server.url, args.seed, args.requests, args.clients, args.processes)
    operator.start()
    while not clients.ended and server.process.poll() is None:
        time.sleep(LOOK)
        if args.seconds and time.monotonic() - began > args.seconds:
            clients.stop()
            break
        if server.process.poll() is None:
            memory.append(memory_of(server))
        seconds = time.monotonic() - began
        print(f"{seconds:.0f} s: {clients.sent} requests", file=sys.stderr, flush=True)
    counts, wrong, cpu = clients.results()
    seconds = time.monotonic() - began
    operator.stop()
    wrong += operator.wrong
    requests = sum(number for name, number in counts.items() if name.startswith(("status", "left", "failed")))
    books: dict[str, Any] = {
        "requests": requests,
        "seconds": round(seconds, 1),
        "requests_per_second": round(requests / seconds, 1),
        "clients": args.clients,
        "client_processes": args.processes,
        "client_cores_busy": round(cpu / seconds, 2),
        "seen": dict(sorted(counts.items())),
        "operator": dict(sorted(operator.counts.items())),
    }
    if server.process.poll() is None:
        books |= close_books(server, counts["sequences"] + counts["sequences refused late"], wrong)
        memory.append(memory_of(server))
    else:
        wrong.append(f"the server ended with {server.process.poll()}")
    books["memory_mb"] = {
        "start": round(memory[0] / 1e6),
        "end": round(memory[-1] / 1e6),
        "samples": [round(size / 1e6) for size in memory[:: max(1, len(memory) // 20)]],
    }
    settled = memory[len(memory) // 4 :]
    if len(settled) > 8 and settled[-1] > GROWTH * max(settled[: len(settled) // 3]):
        wrong.append(f"memory grew: {books['memory_mb']}")
    return books | {"wrong": wrong}


def close_books(server: ServerProcess, answered: int, wrong: list[str]) -> dict[str, Any]:
    """Return the server's own figures once nothing runs, and note what does not agree.

    Args:
        server: nobody sends it anything any more.
        answered: sequences that clients got an answer for, left, or were refused once they had begun.
        wrong: is appended to.

    """

    def settled() -> bool:
        return all(server.total(gauge) == 0 for gauge in GAUGES)

    try:
        wait_until(settled, 60, lambda: f"gauges at 0: { {gauge: server.total(gauge) for gauge in GAUGES} }")
    except AssertionError as error:
        wrong.append(str(error))
    time.sleep(1)
    windows, of_requests = server.total("nwor_windows_total"), server.total("nwor_request_windows_total")
    if windows != of_requests:
        wrong.append(f"{windows} windows, {of_requests} of requests that ended")
    failed = {
        dict(labels)["place"]: count for labels, count in server.metric("nwor_failed_requests_total").items()
    }
    if any(count for place, count in failed.items() if place != "constraints"):
        wrong.append(f"failed requests: {failed}")
    mismatches = server.total("nwor_accounting_mismatches_total")
    if mismatches:
        wrong.append(f"mismatches: {server.metric('nwor_accounting_mismatches_total')}")
    ends = {
        dict(labels)["finished_reason"]: round(count)
        for labels, count in server.metric("vllm:request_success_total").items()
    }
    if sum(ends.values()) != answered:
        wrong.append(f"{answered} sequences were asked for, these ended: {ends}")
    drafts, accepted = (
        server.total(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")
    )
    return {
        "sequences_ended": ends,
        "windows": {"of_steps": windows, "of_requests_that_ended": of_requests},
        "windows_by_outcome": by_labels(server, "nwor_windows_total"),
        "tokens": by_labels(server, "nwor_tokens_total"),
        "vllm_draft_tokens": {"drafted": drafts, "accepted": accepted},
        "generated_tokens": server.total("vllm:generation_tokens_total"),
        "preemptions": server.total("vllm:num_preemptions_total"),
        "failed_requests": failed,
        "step_failures": by_labels(server, "nwor_step_failures_total"),
        "accounting_mismatches": mismatches,
        "gauges": {gauge: server.total(gauge) for gauge in GAUGES},
    }


def by_labels(server: ServerProcess, name: str) -> dict[str, float]:
    """Return a metric's samples that are not 0."""
    return {
        " ".join(value for _, value in labels): count
        for labels, count in server.metric(name).items()
        if count
    }


def main() -> int:
    """Run from the command line; return 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=0, help="send no more after so long (0: no limit)")
    parser.add_argument("--clients", type=int, default=8, help="requests at the same time")
    parser.add_argument("--processes", type=int, default=2, help="processes that send them")
    parser.add_argument("--sequences", type=int, help="--max-num-seqs of the server (as many as clients)")
    parser.add_argument(
        "--sleep-level", type=int, default=0, help="1 and 2 need --enable-sleep-mode and CUDA"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--books", type=Path, help="write the books to this file as well")
    parser.add_argument("--log", type=Path, help="keep the server's log there")
    parser.add_argument("flags", nargs="*", help="flags of the server, behind --")
    args = parser.parse_args()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # cache reset, abort, sleep
    with tempfile.TemporaryDirectory() as folder:
        entry_points.provide_to_children(Path(folder) / "plugins")
        log = args.log or Path(folder) / "log.txt"
        given = [*flags(args.sequences or args.clients), *args.flags]
        server = ServerProcess(given, find_free_port(), log)
        try:
            server.wait_until_ready()
            books = soak(server, args)
            if books["wrong"]:
                print(server.log[-6000:], file=sys.stderr)
        finally:
            server.kill()
    text = json.dumps({"flags": given, **books}, indent=1)
    print(text)
    if args.books:
        args.books.write_text(text + "\n")
    return 1 if books["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
