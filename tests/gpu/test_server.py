"""Claim: `nwor-server --demo` serves on a GPU: answers, figures, switches of the mode, an end on SIGTERM.

Coverage: the command line that `make serve DEVICE=cuda` uses, over HTTP, in each mode, with requests that go
on over a switch. Reference: the figures of the answers against /metrics, and vLLM's counters against NWOR's;
the tokens of `cow` against those of `off`. Tolerance: none.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from tests.conftest import ADMIN_KEY
from tests.gpu import demo_engine, entry_points
from tests.server_process import DEMO_MODEL, ServerProcess
from tests.waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

REQUESTS, NEW_TOKENS = 24, 48
#: Other tests may be on the GPU: no more of its memory than these ask for.
LITTLE_MEMORY = (
    *("--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(demo_engine.CACHE_BYTES)),
    *("--max-model-len", "1024", "--max-num-seqs", "64"),
)
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    flags = LITTLE_MEMORY if torch.cuda.is_available() else ()
    with pytest.MonkeyPatch.context() as patch:
        entry_points.provide(tmp_path_factory.mktemp("plugins"), patch)
        yield start_server("--demo", "--admin-api-key", ADMIN_KEY, *flags)


def switch(server: ServerProcess, mode: str) -> None:
    answer = httpx.put(f"{server.url}/admin/nwor", headers=ADMIN, json={"mode": mode}, timeout=90)
    assert answer.status_code == 200, answer.text


def complete(server: ServerProcess, number: int, tokens: int = NEW_TOKENS) -> dict[str, Any]:
    body = {
        "model": DEMO_MODEL,
        "prompt": f"def method_{number}(self, items):\n    for item in items:\n",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def batch(server: ServerProcess) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(lambda number: complete(server, number), range(REQUESTS)))


def counters(server: ServerProcess) -> dict[str, float]:
    """Return what /metrics has once it changes no more: a step scheduled ahead is counted after answers."""
    while True:
        seen = read_counters(server)
        time.sleep(0.5)
        if read_counters(server) == seen:
            return seen


def read_counters(server: ServerProcess) -> dict[str, float]:
    outcomes = server.metric("nwor_windows_total")
    tokens = server.metric("nwor_tokens_total")
    return {
        "committed": outcomes[(("outcome", "committed"),)],
        "restored": outcomes[(("outcome", "restored"),)],
        "accepted": tokens[(("kind", "accepted"),)],
        "vllm": server.total("vllm:spec_decode_num_accepted_tokens_total"),
        "written": server.total("nwor_kv_write_bytes_total"),
    }


def test_the_engine_stages(server: ServerProcess) -> None:
    report = httpx.get(f"{server.url}/admin/nwor", headers=ADMIN, timeout=90).json()
    assert report["enabled"] is True
    assert report["mode"] == "stage"
    assert report["ranks_agree"] is True
    (rank,) = report["ranks"]
    assert rank["unsupported"] is None
    assert rank["fault"] is None


def test_answers_and_figures_in_each_mode(server: ServerProcess) -> None:
    texts: dict[str, list[str]] = {}
    for mode in ("stage", "off", "cow"):
        switch(server, mode)
        before = counters(server)
        answers = batch(server)
        texts[mode] = [answer["choices"][0]["text"] for answer in answers]
        assert all(answer["usage"]["completion_tokens"] == NEW_TOKENS for answer in answers)
        figures = [answer["metrics"]["nwor"] for answer in answers]
        assert all(figure["modes"] == [mode] for figure in figures)
        assert not any(figure["direct_windows"] for figure in figures)
        seen = {name: value - before[name] for name, value in counters(server).items()}
        windows = sum(figure["windows"] for figure in figures)
        accepted = sum(figure["accepted_tokens"] for figure in figures)
        written = sum(figure["kv_bytes_written"] for figure in figures)
        saved = sum(figure["kv_bytes_saved"] for figure in figures)
        print(f"{mode}: {windows} windows, {accepted} accepted, {written} bytes written, {saved} saved")
        # A step that was scheduled ahead counts windows of requests that have ended: what is on /metrics has
        # those as well.
        assert seen["accepted"] == seen["vllm"] >= accepted > 0
        assert seen["written"] >= written > 0
        assert seen["committed"] >= windows if mode == "stage" else seen["committed"] == 0
        assert seen["restored"] >= windows if mode == "cow" else seen["restored"] == 0
        assert {"stage": saved > 0, "off": saved == 0, "cow": saved < 0}[mode]
    assert texts["cow"] == texts["off"]
    same = sum(ours == theirs for ours, theirs in zip(texts["stage"], texts["off"], strict=True))
    print(f"stage: {same} of {REQUESTS} texts as in off")
    assert same > REQUESTS // 4  # where they part is for the engine's tests to say
    assert server.total("nwor_accounting_mismatches_total") == 0


def test_requests_go_on_over_switches(server: ServerProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(complete, server, number, 512) for number in range(4)]
        for mode in ("stage", "off", "cow", "stage"):
            switch(server, mode)
        answers = [request.result() for request in running]
    assert all(answer["usage"]["completion_tokens"] == 512 for answer in answers)
    assert server.total("nwor_accounting_mismatches_total") == 0


def test_it_ends_when_told_to(server: ServerProcess) -> None:
    """The last test of the module: nobody needs the server any more."""
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.process.poll() is not None, 90, "the server has ended")
    assert server.process.returncode == 0, server.log[-3000:]
