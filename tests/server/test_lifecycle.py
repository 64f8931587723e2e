"""What happens when clients leave, when the server is told to stop, and when the engine dies."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server_process import DEMO_MODEL, ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

LONG = {"model": DEMO_MODEL, "prompt": "x = ", "max_tokens": 2000, "ignore_eos": True, "seed": 1}
RUNNING = "vllm:num_requests_running"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_goes_away_frees_its_requests(server: ServerProcess, path: str, stream: bool) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {}
    request = {**LONG, "n": 16, "temperature": 1.0, "stream": stream, **prompt}
    if prompt:
        del request["prompt"]
    wait_until(lambda: server.total(RUNNING) == 0, 30, "the engine is idle")
    finished = "vllm:request_success_total"
    before = server.metric(finished).get((("finished_reason", "length"),), 0)

    def leave() -> None:
        """Hang up as soon as the engine runs the request."""
        with server.client() as http, http.stream("POST", path, json=request) as answer:
            assert answer.status_code == 200
            next(answer.iter_raw())

    if stream:
        leave()
    else:
        # The answer would come only at the end; the client gives up before.
        with server.client(timeout=httpx.Timeout(10, read=1.0)) as http, pytest.raises(httpx.ReadTimeout):
            http.post(path, json=request)
    wait_until(lambda: server.total(RUNNING) == 0, 5, "the engine has dropped the requests")
    # They were dropped, not finished: 16 times 2000 tokens take longer than that.
    assert server.metric(finished).get((("finished_reason", "length"),), 0) == before


@pytest.mark.parametrize(
    "processes",
    [pytest.param(1, id="one process"), pytest.param(2, id="two processes", marks=pytest.mark.long)],
)
def test_sigterm_drains_then_aborts(start_server: Callable[..., ServerProcess], processes: int) -> None:
    server = start_server("--demo", "--drain-timeout", "4", "--api-server-count", str(processes))
    sockets = sockets_for_engines(server)
    # Where they are gone, an engine that connects late never does, and the server is never ready.
    assert len(sockets) == (4 if processes == 2 else 0)
    assert all(path.is_socket() for path in sockets)
    results: dict[str, httpx.Response] = {}

    def send(name: str, **change: Any) -> None:
        with server.client() as http:
            results[name] = http.post("/v1/completions", json={**LONG, **change})

    def stream() -> None:
        with server.client() as http:
            results["stream"] = http.post("/v1/completions", json={**LONG, "n": 48, "stream": True})

    # 96 sequences of 2000 tokens outlive the drain by far; ten tokens do not.
    threads = [
        threading.Thread(target=send, args=("long",), kwargs={"n": 48}, daemon=True),
        threading.Thread(target=stream, daemon=True),
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.total(RUNNING) >= 96, 60, "the long requests run")
    threads.append(threading.Thread(target=send, args=("short",), kwargs={"max_tokens": 10}))
    threads[-1].start()
    wait_until(lambda: server.total(RUNNING) >= 97 or "short" in results, 60, "the short request runs")

    told = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not accepts(server), 2, "new connections are refused")
    for thread in threads:
        thread.join(60)
    code = server.wait(60)

    assert code == 0, server.log[-3000:]
    assert not any(path.exists() for path in sockets)
    assert set(re.findall(r"\((ApiServer_\d) pid", server.log)) == (
        {"ApiServer_0", "ApiServer_1"} if processes == 2 else set()
    )
    assert time.monotonic() - told > 4
    assert results["short"].status_code == 200
    assert results["short"].json()["choices"][0]["finish_reason"] == "length"
    assert results["long"].status_code == 200
    reasons = [choice["finish_reason"] for choice in results["long"].json()["choices"]]
    assert reasons == ["abort"] * 48
    events = [line[6:] for line in results["stream"].text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    ends = [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert [reason for reason in ends if reason] == ["abort"] * 48


ENGINES = {
    "one process": (),
    "stock": ("--no-nwor",),
    "two processes": ("--api-server-count", "2"),
    "two engines": ("--data-parallel-size", "2", "--max-num-seqs", "8"),
    "two engines, one process": ("--data-parallel-size", "2", "--api-server-count", "1"),
}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=name, marks=[] if name == "one process" else [pytest.mark.long])
        for name, flags in ENGINES.items()
    ],
)
def test_an_interrupt_of_the_whole_process_group_drains(
    start_server: Callable[..., ServerProcess], flags: tuple[str, ...]
) -> None:
    """Ctrl-C in a terminal: engine and workers get the signal as well."""
    server = start_server("--demo", *flags)
    # With several processes the first to serve answers before all do.
    wait_until(lambda: "is ready on" in server.log, 60, "every process serves")
    request = {**LONG, "max_tokens": 400, "stream": True}
    events: list[str] = []
    with server.client() as http, http.stream("POST", "/v1/completions", json=request) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                if len(events) == 3:
                    os.killpg(server.process.pid, signal.SIGINT)
                events.append(line[6:])
    code = server.wait(60)

    assert code == 0, server.log[-3000:]
    assert events[-1] == "[DONE]"
    ends = [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert [reason for reason in ends if reason] == ["length"]
    # Nothing was killed, and nothing is left behind.
    for word in ("Traceback", "died", "force killing", "leaked"):
        assert word not in server.log, server.log[-6000:]


def sockets_for_engines(server: ServerProcess) -> list[Path]:
    """Return the files of the sockets that API server processes listen on, where there are several."""
    pids = map(int, set(re.findall(r"\(ApiServer_\d pid=(\d+)\)", server.log)))
    listening = re.compile(r"^\S+ \S+ 00000000 00010000 \S+ \S+ +(\d+) (/\S+)$", re.MULTILINE)
    paths = dict(listening.findall(Path("/proc/net/unix").read_text(encoding="utf-8")))
    held = [os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    return [Path(paths[name[8:-1]]) for name in held if name[8:-1] in paths]


@pytest.mark.parametrize(
    ("moment", "number", "send"),
    [
        ("a worker has begun", signal.SIGTERM, os.kill),
        ("the model is loaded", signal.SIGTERM, os.kill),
        ("the model is loaded", signal.SIGINT, os.killpg),
    ],
)
def test_a_signal_before_ready_ends_server_engine_and_workers(
    start_server: Callable[..., ServerProcess],
    tmp_path: Path,
    moment: str,
    number: signal.Signals,
    send: Callable[[int, int], None],
) -> None:
    admin = tmp_path / "admin"
    server = start_server("--demo", "--admin-api-key", "key", "--admin-uds", str(admin), wait=False)
    below: set[int] = set()

    def has_come() -> bool:
        below.update(child.pid for child in psutil.Process(server.process.pid).children(recursive=True))
        # An engine, its worker, and what Python's multiprocessing runs beside them.
        return len(below) >= 3 if moment == "a worker has begun" else "Loading safetensors" in server.log

    wait_until(has_come, 120, moment, every=0.02)
    assert admin.is_socket()
    send(server.process.pid, number)
    assert server.wait(30) == 128 + number
    assert not admin.exists()
    assert "stopped before it was ready" in server.log
    wait_until(lambda: not any(map(is_running, below)), 2, "no process below the server's is left")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has collected runs no more.
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.is_file() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def accepts(server: ServerProcess) -> bool:
    try:
        httpx.get(f"{server.url}/version", timeout=2)
    except httpx.TransportError:
        return False
    return True


@pytest.fixture(scope="module")
def plain(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    """A server on vLLM's stock worker, whose prompts take several steps."""
    return start_server("--demo", "--no-nwor", "--max-num-batched-tokens", "256")


def test_seeded_requests_survive_prompts_of_several_steps(plain: ServerProcess) -> None:
    def sample(seed: int, salt: str) -> str:
        prompt = "value = compute(index)\n" * 120
        request = {"model": DEMO_MODEL, "prompt": prompt, "max_tokens": 16, "seed": seed, "ignore_eos": True}
        with plain.client() as http:
            # The salt keeps the prefix cache from making the prompt short.
            answer = http.post("/v1/completions", json={**request, "cache_salt": salt})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] > 512
        return str(answer.json()["choices"][0]["text"])

    assert sample(3, "a") == sample(3, "b")


def test_a_dead_engine_turns_health_to_503_and_ends_the_process(plain: ServerProcess) -> None:
    server = plain
    failed: list[int] = []

    def run() -> None:
        with server.client() as http:
            failed.append(http.post("/v1/completions", json={**LONG, "n": 32}).status_code)

    request = threading.Thread(target=run, daemon=True)
    request.start()
    wait_until(lambda: server.total(RUNNING) == 32, 60, "the request runs")
    os.kill(server.engine_pid(), signal.SIGKILL)
    codes: list[int] = []

    def dead() -> bool:
        try:
            codes.append(httpx.get(f"{server.url}/health", timeout=2).status_code)
        except httpx.TransportError:
            return True
        return codes[-1] == 503

    wait_until(dead, 30, "/health tells of the engine's death")
    assert codes[-1] == 503
    assert server.wait(60) not in (0, None)
    request.join(10)
    assert failed == [500]
    assert "The engine died" in server.log
