"""Claim: `nwor-server --demo` serves on a GPU: answers, figures, switches of the mode, an end on SIGTERM.

Coverage: what `make serve DEVICE=cuda` starts, with less memory, over HTTP: requests side by side in each
mode, and one that goes on over switches. Reference: the figures of the answers against /metrics, and vLLM's
counters against NWOR's; the texts of `cow` against those of `off`. Tolerance: none.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ADMIN_KEY
from tests.gpu import demo_engine, entry_points
from tests.server_figures import (
    BYTES,
    NUMBERS,
    OUTCOMES,
    check_request,
    read_metrics,
    report,
    set_mode,
    settled,
    switch_while_it_runs,
    written,
)
from tests.server_process import DEMO_MODEL, ServerProcess
from tests.waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

REQUESTS, NEW_TOKENS = 24, 48
#: Other tests may be on the GPU: no more of its memory than these ask for.
LITTLE_MEMORY = (
    *("--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(demo_engine.CACHE_BYTES)),
    *("--max-model-len", "1024", "--max-num-seqs", "64"),
)


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        entry_points.provide(tmp_path_factory.mktemp("plugins"), patch)
        fixed = ("--num-speculative-tokens", "4")  # windows of the same length, for the sums below
        yield start_server("--demo", "--admin-api-key", ADMIN_KEY, *fixed, *LITTLE_MEMORY)


def prompt(number: int) -> str:
    return f"def method_{number}(self, items):\n    for item in items:\n"


def complete(server: ServerProcess, number: int) -> dict[str, Any]:
    body = {"model": DEMO_MODEL, "prompt": prompt(number), "max_tokens": NEW_TOKENS, "temperature": 0}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_engine_stages(server: ServerProcess) -> None:
    seen = report(server)
    assert seen["enabled"] is True
    assert seen["mode"] == "stage"
    assert seen["ranks_agree"] is True
    (rank,) = seen["ranks"]
    assert rank["unsupported"] is None
    assert rank["fault"] is None


def test_answers_and_figures_in_each_mode(server: ServerProcess) -> None:
    texts: dict[str, list[str]] = {}
    for mode, outcome in OUTCOMES.items():
        set_mode(server, mode)
        before = read_metrics(server)
        with ThreadPoolExecutor(REQUESTS) as pool:
            answers = list(pool.map(lambda number: complete(server, number), range(REQUESTS)))
        texts[mode] = [answer["choices"][0]["text"] for answer in answers]
        figures = [answer["metrics"]["nwor"] for answer in answers]
        for own, answer in zip(figures, answers, strict=True):
            check_request(own)
            assert own["modes"] == [mode]
            assert answer["usage"]["completion_tokens"] == NEW_TOKENS
        delta = settled(server, before)
        total = {name: sum(own[name] for own in figures) for name in (*NUMBERS, *BYTES)}
        # A step that was scheduled ahead may verify windows of requests that have ended: no answer has those,
        # nor do vLLM's own counts, whose scheduler no longer knows the requests. What they cost is known all
        # the same: as many drafts as any window, and what /metrics has accepted beyond the answers.
        late = int(delta.get("request_windows late", 0))
        print(f"{mode}: {total}, {late} late windows")
        assert delta["request_windows finished"] == total["windows"] > REQUESTS
        assert delta[f"windows {outcome}"] == total["windows"] + late
        assert delta["vllm drafts"] == total["windows"]
        drafts = total["draft_tokens"] // total["windows"]
        token_bytes = total["kv_bytes_baseline"] // (total["first_tokens"] + total["draft_tokens"])
        assert drafts * total["windows"] == total["draft_tokens"]
        accepted = int(delta["tokens accepted"])
        assert 0 <= accepted - total["accepted_tokens"] <= late * drafts
        with_late = {
            "first_tokens": total["windows"] + late,
            "draft_tokens": total["draft_tokens"] + late * drafts,
        }
        with_late |= {"accepted_tokens": accepted, "rejected_tokens": with_late["draft_tokens"] - accepted}
        paths = sum(value for name, value in delta.items() if name.startswith("kv_write_bytes "))
        copied = delta.get("kv_write_bytes stage", 0)
        assert delta["kv_write_bytes_baseline"] == written("off", with_late, token_bytes) > 0
        assert paths - copied == written(mode, with_late, token_bytes) > 0
        aside = total["kv_bytes_written"] - written(mode, total, token_bytes)
        assert 0 <= aside <= copied
        assert late or aside == copied
        assert delta["vllm accepted_tokens"] == total["accepted_tokens"]
        assert delta["mismatches"] == 0
        assert {"stage": 1, "off": 0, "cow": -1}[mode] * abs(total["kv_bytes_saved"]) == total[
            "kv_bytes_saved"
        ]
        assert (total["kv_bytes_saved"] == 0) == (mode == "off")
    assert texts["cow"] == texts["off"]
    same = sum(ours == theirs for ours, theirs in zip(texts["stage"], texts["off"], strict=True))
    print(f"stage: {same} of {REQUESTS} texts as in off")
    assert same > REQUESTS // 4  # where they part is for the engine's tests to say


def test_a_request_goes_on_over_switches(server: ServerProcess) -> None:
    set_mode(server, "stage")
    before = read_metrics(server)
    figures = switch_while_it_runs(server, prompt(0), ["cow", "off", "stage"])
    check_request(figures)
    assert figures["modes"] == sorted(OUTCOMES)
    delta = settled(server, before)
    assert all(delta[f"windows {outcome}"] > 0 for outcome in OUTCOMES.values())
    assert delta["mismatches"] == 0


def test_it_ends_when_told_to(server: ServerProcess) -> None:
    """The last test of the module: nobody needs the server any more."""
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.process.poll() is not None, 90, "the server has ended")
    assert server.process.returncode == 0, server.log[-3000:]


def test_the_engine_chooses_draft_tokens_where_nobody_says_a_number(
    start_server: Callable[..., ServerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_points.provide(tmp_path, monkeypatch)
    server = start_server("--demo", "--admin-api-key", ADMIN_KEY, *LITTLE_MEMORY)
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(lambda number: complete(server, number), range(REQUESTS)))
    assert all(answer["usage"]["completion_tokens"] == NEW_TOKENS for answer in answers)
    key = {"Authorization": f"Bearer {ADMIN_KEY}"}
    with server.client() as http:
        report = http.get("/admin/nwor", headers=key).json()
    print(report["draft_tokens"])
    assert report["draft_tokens"]["setting"] == "auto:0-8"
    assert report["draft_tokens"]["costs_why_not"] is None
    assert all(rank["fault"] is None for rank in report["ranks"])
    own = [answer["metrics"]["nwor"] for answer in answers]
    assert len({figures["draft_tokens"] / figures["windows"] for figures in own}) > 1
    assert {mode for figures in own for mode in figures["modes"]} == {"stage"}
