"""Acceptance per request: where the figures stand, and that they add up to the engine's counters."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.server_process import DEMO_MODEL, ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

K = 4
PROMPTS = [
    "import os\n\ndef walk(folder):\n",
    "class Stack:\n    def __init__(self):\n",
    "for index in range(10):\n    print(",
    "def parse(text):\n    if not text:\n        return",
]


def last_event(text: str) -> dict[str, Any]:
    events = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: {")]
    return json.loads(events[-1])


def check_figures(figures: dict[str, Any]) -> None:
    """The figures of one request must agree with each other."""
    histogram = figures["acceptance_histogram"]
    assert figures["num_spec_tokens"] == K
    assert len(histogram) == K + 1
    assert sum(histogram) == figures["num_spec_steps"] > 0
    accepted = sum(count * number for number, count in enumerate(histogram))
    assert accepted == figures["num_accepted_draft_tokens"] <= figures["num_draft_tokens"]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / figures["num_spec_steps"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 12}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 12}),
    ],
)
def test_whole_answers_and_streams_carry_the_figures(server: ServerProcess, path: str, body: dict) -> None:
    request = {"model": DEMO_MODEL, "temperature": 0, **body}
    if "max_tokens" in body:
        request["ignore_eos"] = True
    with server.client() as http:
        whole = http.post(path, json=request).json()
        stream = last_event(http.post(path, json={**request, "stream": True}).text)
    streamed = stream["response"] if path == "/v1/responses" else stream
    for answer in (whole, streamed):
        check_figures(answer["metrics"]["speculative_decoding"])
    assert whole["metrics"]["speculative_decoding"] == streamed["metrics"]["speculative_decoding"] or (
        # Whole answers of the completions APIs name the fields that are not set.
        {k: v for k, v in whole["metrics"]["speculative_decoding"].items() if v is not None}
        == {k: v for k, v in streamed["metrics"]["speculative_decoding"].items() if v is not None}
    )


def test_a_stream_carries_the_figures_once_in_its_last_chunk(server: ServerProcess) -> None:
    request = {
        "model": DEMO_MODEL,
        "prompt": PROMPTS[1],
        "max_tokens": 12,
        "ignore_eos": True,
        "stream": True,
    }
    with server.client() as http:
        plain = http.post("/v1/completions", json=request).text
        usage = http.post("/v1/completions", json={**request, "stream_options": {"include_usage": True}}).text
    for text in (plain, usage):
        assert text.rstrip().endswith("data: [DONE]")
        assert text.count('"speculative_decoding"') == 1
        check_figures(last_event(text)["metrics"]["speculative_decoding"])
    assert last_event(plain)["choices"][0]["finish_reason"]
    assert last_event(usage)["choices"] == []


def test_several_choices_have_no_acceptance_of_their_own(server: ServerProcess) -> None:
    request = {"model": DEMO_MODEL, "prompt": PROMPTS[0], "max_tokens": 8, "n": 2, "temperature": 1.0}
    with server.client() as http:
        metrics = http.post("/v1/completions", json=request).json()["metrics"]
        assert metrics["speculative_decoding"] is None
        assert (
            '"speculative_decoding"'
            not in http.post("/v1/completions", json={**request, "stream": True}).text
        )


def test_a_request_that_a_stop_string_ends_has_its_figures(server: ServerProcess) -> None:
    request = {
        "model": DEMO_MODEL,
        "prompt": PROMPTS[0],
        "max_tokens": 64,
        "temperature": 0,
        "ignore_eos": True,
    }
    with server.client() as http:
        text = http.post("/v1/completions", json=request).json()["choices"][0]["text"]
        stopped = {**request, "stop": [text[len(text) // 2 :][:3]]}
        whole = http.post("/v1/completions", json=stopped).json()
        stream = last_event(http.post("/v1/completions", json={**stopped, "stream": True}).text)
    for answer in (whole, stream):
        assert answer["choices"][0]["finish_reason"] == "stop"
        figures = answer["metrics"]["speculative_decoding"]
        check_figures(figures)
        # Fewer steps than the whole 64 tokens would have taken.
        assert figures["num_spec_steps"] + figures["num_accepted_draft_tokens"] < 60


async def gather_figures(server: ServerProcess) -> list[dict[str, Any]]:
    """Send a mixture of requests at once; return the figures of each."""
    headers = {"Authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=300) as http:

        async def send(number: int) -> dict[str, Any]:
            body: dict[str, Any] = {"model": DEMO_MODEL, "max_tokens": 5 + 7 * number, "ignore_eos": True}
            body["temperature"] = 0 if number % 2 else 0.8
            if number % 3 == 0:
                path, body["messages"] = (
                    "/v1/chat/completions",
                    [{"role": "user", "content": PROMPTS[number % 4]}],
                )
            else:
                path, body["prompt"] = "/v1/completions", PROMPTS[number % 4]
            body["stream"] = number % 2 == 0
            answer = await http.post(path, json=body)
            answer.raise_for_status()
            parsed = last_event(answer.text) if body["stream"] else answer.json()
            return parsed["metrics"]["speculative_decoding"]

        return list(await asyncio.gather(*(send(number) for number in range(12))))


def read_counters(server: ServerProcess) -> dict[str, float]:
    """Return the engine's counters of speculative decoding, accepted tokens also by position."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    counters = {name: server.total(f"vllm:spec_decode_num_{name}_total") for name in names}
    for labels, value in server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total").items():
        counters[f"position {dict(labels)['position']}"] = value
    return counters


def test_the_requests_figures_add_up_to_the_counters(server: ServerProcess) -> None:
    before = read_counters(server)
    figures = asyncio.run(gather_figures(server))
    for request in figures:
        check_figures(request)
    expected = {
        "drafts": sum(request["num_spec_steps"] for request in figures),
        "draft_tokens": sum(request["num_draft_tokens"] for request in figures),
        "accepted_tokens": sum(request["num_accepted_draft_tokens"] for request in figures),
    }
    for position in range(K):
        expected[f"position {position}"] = sum(
            sum(request["acceptance_histogram"][position + 1 :]) for request in figures
        )

    def counted() -> dict[str, float]:
        after = read_counters(server)
        return {name: after[name] - before[name] for name in expected}

    # The last step's counts reach /metrics a moment after its tokens reach the client.
    wait_until(lambda: counted() == expected, 10, lambda: f"{counted()} are {expected}", every=0.2)
