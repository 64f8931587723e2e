"""Figures of requests and of /metrics, and the admin API, as tests of a server read and use them."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.conftest import ADMIN_KEY
from tests.server_process import DEMO_MODEL, ServerProcess
from tests.waiting import wait_until

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
NUMBERS = ("windows", "first_tokens", "draft_tokens", "accepted_tokens", "rejected_tokens")
BYTES = ("kv_bytes_baseline", "kv_bytes_written", "kv_bytes_saved")
#: What becomes of windows, as metrics call it, by mode.
OUTCOMES = {"off": "direct", "stage": "committed", "cow": "restored"}


def set_mode(server: ServerProcess, mode: str) -> dict[str, Any]:
    answer = httpx.put(f"{server.url}/admin/nwor", headers=ADMIN, json={"mode": mode}, timeout=90)
    assert answer.status_code == 200, answer.text
    assert answer.json()["new"] == mode
    return answer.json()


def report(server: ServerProcess) -> dict[str, Any]:
    return httpx.get(f"{server.url}/admin/nwor", headers=ADMIN, timeout=90).json()


def last_event(text: str) -> dict[str, Any]:
    events = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: {")]
    return json.loads(events[-1])


def read_metrics(server: ServerProcess) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in ("windows", "tokens", "kv_write_bytes", "kv_write_bytes_baseline", "request_windows"):
        for labels, value in server.metric(f"nwor_{name}_total").items():
            metrics[" ".join([name, *(value for _, value in labels)])] = value
    metrics["vllm drafts"] = server.total("vllm:spec_decode_num_drafts_total")
    metrics["vllm draft_tokens"] = server.total("vllm:spec_decode_num_draft_tokens_total")
    metrics["vllm accepted_tokens"] = server.total("vllm:spec_decode_num_accepted_tokens_total")
    metrics["mismatches"] = server.total("nwor_accounting_mismatches_total")
    return metrics


def settled(server: ServerProcess, before: dict[str, float]) -> dict[str, float]:
    """Return what was added to the metrics, once every window belongs to a request that ended."""
    delta: dict[str, float] = {}

    def all_ended() -> bool:
        delta.update((name, value - before.get(name, 0.0)) for name, value in read_metrics(server).items())
        windows = sum(value for name, value in delta.items() if name.startswith("windows "))
        ended = sum(value for name, value in delta.items() if name.startswith("request_windows "))
        return windows == ended > 0

    wait_until(all_ended, 20, lambda: f"every window belongs to a request that ended: {delta}", every=0.2)
    return delta


def check_request(figures: dict[str, Any]) -> None:
    """The figures of a request must agree with each other."""
    assert figures["first_tokens"] == figures["windows"] > 0
    assert figures["draft_tokens"] == figures["accepted_tokens"] + figures["rejected_tokens"]
    assert figures["acceptance_rate"] == figures["accepted_tokens"] / figures["draft_tokens"]
    assert sum(figures["accepted_by_position"]) == figures["accepted_tokens"]
    assert figures["accepted_by_position"] == sorted(figures["accepted_by_position"], reverse=True)
    assert figures["kv_bytes_saved"] == figures["kv_bytes_baseline"] - figures["kv_bytes_written"]
    assert figures["direct_windows"] == {}


def written(mode: str, figures: dict[str, Any], b: int) -> int:
    """Return what windows cost that are not copied aside."""
    first, drafts = figures["first_tokens"], figures["draft_tokens"]
    return {
        "off": (first + drafts) * b,
        "stage": (first + figures["accepted_tokens"]) * b,
        "cow": (first + drafts + drafts + figures["rejected_tokens"]) * b,
    }[mode]


def switch_while_it_runs(server: ServerProcess, prompt: str, modes: list[str]) -> dict[str, Any]:
    """Stream a request, switch to one mode after another at every tenth line, and return its figures."""
    # Long enough for three switches on a fast machine, too: the engine does not wait for them.
    body = {"model": DEMO_MODEL, "prompt": prompt, "max_tokens": 900, "ignore_eos": True, "stream": True}
    last = ""
    with (
        httpx.Client(base_url=server.url, headers=ADMIN, timeout=90) as admin,
        server.client() as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        for number, line in enumerate(answer.iter_lines()):
            if number % 10 == 4 and modes:
                assert admin.put("/admin/nwor", json={"mode": modes.pop(0)}).status_code == 200
            if line.startswith("data: {"):
                last = line
    assert modes == []
    return last_event(last)["metrics"]["nwor"]
