"""Claim: the figures of requests are what the workers did, and add up to the counters of engine and vLLM.

Coverage: the real server on the demo model, in each mode, across switches while a request runs and across an
abort; completions, chat and responses, whole and streamed, one and several sequences; and an engine whose
cache is so small that it preempts.
Tolerance: none.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server import demo
from tests.server_figures import (
    BYTES,
    NUMBERS,
    OUTCOMES,
    check_request,
    last_event,
    read_metrics,
    report,
    set_mode,
    settled,
    switch_while_it_runs,
    written,
)
from tests.server_process import DEMO_MODEL, ServerProcess

pytestmark = pytest.mark.engine

PROMPTS = [
    "class Item:\n    def method(self, a, b):\n        " + "return a + b" * 2,
    "def total(items):\n    for item in items:\n        " + "total += i" * 2,
]


@pytest.fixture(autouse=True)
def _leave_the_server_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        set_mode(request.getfixturevalue("server"), "stage")


def requests() -> list[tuple[str, dict[str, Any]]]:
    """A mixture: every API, whole and streamed, with one and with several sequences."""
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    mixture: list[tuple[str, dict[str, Any]]] = []
    for number, stream in enumerate((False, True)):
        options: list[dict[str, Any]] = [{}, {"n": 2}]
        if stream:
            options.append({"stream_options": {"include_usage": True}, "n": 2})
        for extra in options:
            common = {"max_tokens": 6 + 5 * number, "ignore_eos": True, "stream": stream, **extra}
            mixture.append(("/v1/completions", {"prompt": PROMPTS[:2], **common}))
            mixture.append(("/v1/completions", {"prompt": PROMPTS[number], **common}))
            mixture.append(("/v1/chat/completions", {**chat, **common}))
        mixture.append(("/v1/responses", {"input": "Hello", "max_output_tokens": 9, "stream": stream}))
    return [(path, {"model": DEMO_MODEL, "temperature": 0.5, **body}) for path, body in mixture]


async def gather(server: ServerProcess) -> list[dict[str, Any]]:
    """Send the mixture at once and return ``metrics.nwor`` of each answer."""
    headers = {"Authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=300) as http:

        async def send(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            if not body["stream"]:
                return answer.json()["metrics"]["nwor"]
            assert answer.text.count('"nwor":') == 1
            event = last_event(answer.text)
            return event.get("response", event)["metrics"]["nwor"]

        return list(await asyncio.gather(*(send(path, body) for path, body in requests())))


@pytest.mark.parametrize("mode", ["off", "stage", "cow"])
def test_requests_add_up_to_the_counters_in_each_mode(server: ServerProcess, mode: str) -> None:
    set_mode(server, mode)
    assert dict(server.metric("nwor_mode"))[(("mode", mode),)] == 1
    assert server.total("nwor_mode") == 1
    b = report(server)["ranks"][0]["token_bytes"]
    rank_before = report(server)["counters"]
    before = read_metrics(server)
    answers = asyncio.run(gather(server))
    copied = 0
    for figures in answers:
        check_request(figures)
        assert figures["modes"] == [mode]
        assert figures["kv_bytes_baseline"] == (figures["first_tokens"] + figures["draft_tokens"]) * b
        # In `stage` windows beside many rows of prompts are copied; whether any are is a matter of time.
        copies = figures["kv_bytes_written"] - written(mode, figures, b)
        assert 0 <= copies <= (figures["kv_bytes_baseline"] if mode == "stage" else 0)
        assert copies % b == 0
        copied += copies
    delta = settled(server, before)
    total = {name: sum(figures[name] for figures in answers) for name in (*NUMBERS, *BYTES)}
    # One front end, one rank: requests, metrics, the rank's own counters and vLLM's say the same.
    assert delta[f"windows {OUTCOMES[mode]}"] == delta["request_windows finished"] == total["windows"]
    for kind in ("first", "draft", "accepted", "rejected"):
        assert delta[f"tokens {kind}"] == total[f"{kind}_tokens"]
    assert delta["kv_write_bytes_baseline"] == total["kv_bytes_baseline"]
    paths = sum(value for name, value in delta.items() if name.startswith("kv_write_bytes "))
    assert paths == total["kv_bytes_written"]
    assert delta["kv_write_bytes stage"] == copied
    rank = report(server)["counters"]
    for name in NUMBERS:
        assert rank[name] - rank_before[name] == total[name]
    assert rank["saved_bytes"] - rank_before["saved_bytes"] == total["kv_bytes_saved"]
    assert total["accepted_tokens"] > 0
    assert delta["vllm drafts"] == total["windows"]
    assert delta["vllm draft_tokens"] == total["draft_tokens"]
    assert delta["vllm accepted_tokens"] == total["accepted_tokens"]
    assert delta["mismatches"] == 0


def test_a_request_across_switches_has_the_windows_of_each_mode(server: ServerProcess) -> None:
    b = report(server)["ranks"][0]["token_bytes"]
    # Where this process gets no CPU for seconds, a request has ended before it is switched: then another one.
    for _ in range(5):
        set_mode(server, "stage")
        before = read_metrics(server)
        figures = switch_while_it_runs(server, PROMPTS[0], ["cow", "off", "stage"])
        check_request(figures)
        delta = settled(server, before)
        outcomes = {outcome: delta[f"windows {outcome}"] for outcome in OUTCOMES.values()}
        assert sum(outcomes.values()) == figures["windows"]
        assert figures["modes"] == sorted(mode for mode, outcome in OUTCOMES.items() if outcomes[outcome])
        assert figures["kv_bytes_baseline"] == (figures["windows"] + figures["draft_tokens"]) * b
        paths = sum(value for name, value in delta.items() if name.startswith("kv_write_bytes "))
        assert paths == figures["kv_bytes_written"]
        assert delta["mismatches"] == 0
        if len(figures["modes"]) == len(OUTCOMES):
            return
    pytest.fail(f"five requests ended before they were switched twice; the last one's windows: {outcomes}")


def test_windows_of_an_aborted_request_count(server: ServerProcess) -> None:
    body = {"model": DEMO_MODEL, "prompt": PROMPTS[1], "max_tokens": 900, "ignore_eos": True, "stream": True}
    for _ in range(5):
        before = read_metrics(server)
        with server.client() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            for number, _line in enumerate(answer.iter_lines()):
                if number == 10:
                    break
        delta = settled(server, before)
        assert delta["mismatches"] == 0
        aborted, finished = (delta.get(f"request_windows {end}", 0) for end in ("aborted", "finished"))
        # Where this process gets no CPU for seconds, a request has ended before it is given up: then another.
        if finished == 0:
            assert aborted >= 1
            # A step that is under way when its request is aborted did its writes, so it counts here; vLLM
            # drops its results uncounted. At most two steps of four drafts are under way.
            assert 0 <= delta["tokens accepted"] - delta["vllm accepted_tokens"] <= 8
            return
        assert aborted == 0
    pytest.fail(f"five requests ended before they were given up: {delta}")


@pytest.fixture
def small_engine() -> Iterator[Any]:
    """An engine that has to preempt: its cache does not hold the requests that it runs."""
    saved = dict(os.environ)
    os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
    from vllm import LLM

    from nwor.engine.plugin import register

    register()
    llm = LLM(
        str(demo.model_path()),
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        block_size=32,
        num_gpu_blocks_override=14,
        enable_prefix_caching=False,
        speculative_config={
            "model": str(demo.draft_path()),
            "method": demo.draft_method(),
            "num_speculative_tokens": 4,
        },
        additional_config={"nwor": {"mode": "stage"}},
        per_request_spec_decode_metrics="summary",
        disable_log_stats=False,
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()
    os.environ.clear()
    os.environ.update(saved)


def test_preempted_requests_count(small_engine: Any) -> None:
    from prometheus_client import REGISTRY
    from vllm import SamplingParams

    from nwor.engine.stats.metrics import attach_metrics

    assert attach_metrics(small_engine.llm_engine) is not None
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    outputs = small_engine.generate([PROMPTS[0] * 3] * 8, params, use_tqdm=False)
    counts = small_engine.collective_rpc("nwor_report")[0]["counts"]
    values = {metric.name: getattr(metric, "value", None) for metric in small_engine.get_metrics()}
    assert values["vllm:num_preemptions"] > 0
    assert counts["accepted_tokens"] > 0
    assert values["vllm:spec_decode_num_accepted_tokens"] == counts["accepted_tokens"]

    def total(name: str) -> float:
        return sum(
            sample.value
            for family in REGISTRY.collect()
            if family.name == name
            for sample in family.samples
            if sample.name == f"{name}_total"
        )

    assert total("nwor_windows") == counts["windows"] == total("nwor_request_windows")
    assert total("nwor_kv_write_bytes") == counts["written_bytes"]
    assert total("nwor_accounting_mismatches") == 0
    figures = [output.outputs[0].spec_decode_metrics for output in outputs]
    assert sum(sum(figure.nwor.values()) for figure in figures) == counts["windows"]
