"""A request's own bound of draft tokens over HTTP: every route, streams, the official client, mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import API_KEYS
from tests.server_process import DEMO_MODEL, ServerProcess

pytestmark = pytest.mark.engine

FIELD = "nwor_max_draft_tokens"
PROMPT = "class Stack:\n    def __init__(self):\n"
ROUTES = [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "ignore_eos": True},
    ),
    ("/v1/responses", {"input": PROMPT, "max_output_tokens": 12}),
]


def text_of(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    (choice,) = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_bound_holds_on_every_route(server: ServerProcess, path: str, body: Any, bound: int) -> None:
    request = {"model": DEMO_MODEL, "temperature": 0, **body}
    with server.client() as http:
        free = http.post(path, json=request).json()
        answer = http.post(path, json={**request, "vllm_xargs": {FIELD: bound}}).json()
        stream = http.post(path, json={**request, "vllm_xargs": {FIELD: bound}, "stream": True}).text
    figures = answer["metrics"]["nwor"]
    assert text_of(answer) == text_of(free)
    assert figures["max_draft_tokens"] == bound
    assert figures["why_bounded"] == "asked"
    if bound:
        assert figures["draft_tokens"] <= bound * figures["windows"]
        assert figures["windows"] > 0
    else:
        assert figures["windows"] == figures["draft_tokens"] == 0
        assert figures["steps_without_drafts"] > 0
    assert free["metrics"]["nwor"]["max_draft_tokens"] is None
    assert free["metrics"]["nwor"]["steps_without_drafts"] == 0
    assert free["metrics"]["nwor"]["draft_tokens"] > free["metrics"]["nwor"]["windows"]
    last = json.loads(
        [line for line in stream.splitlines() if line.startswith("data: {")][-1][len("data: ") :]
    )
    last = last.get("response", last)
    assert last["metrics"]["nwor"]["max_draft_tokens"] == bound


def test_the_official_client_sends_a_bound(server: ServerProcess) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEYS[0], max_retries=0)
    extra = {"vllm_xargs": {FIELD: 0}}
    calls: list[Callable[[], Any]] = [
        lambda: client.completions.create(
            model=DEMO_MODEL, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=extra
        ),
        lambda: client.chat.completions.create(
            model=DEMO_MODEL,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=8,
            temperature=0,
            extra_body=extra,
        ),
        lambda: client.responses.create(
            model=DEMO_MODEL, input=PROMPT, max_output_tokens=8, temperature=0, extra_body=extra
        ),
    ]
    for call in calls:
        figures = call().metrics["nwor"]
        assert (figures["max_draft_tokens"], figures["windows"]) == (0, 0)
    with pytest.raises(openai.BadRequestError, match="must be a whole number from 0"):
        client.completions.create(model=DEMO_MODEL, prompt=PROMPT, extra_body={"vllm_xargs": {FIELD: "none"}})


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({FIELD: -1}, "must be a whole number from 0"),
        ({FIELD: 64}, "to 63, not 64"),
        ({FIELD: 1.5}, "not 1.5"),
        ({FIELD: "2"}, "not '2'"),
        ({"nwor_max_drafts": 2}, "NWOR knows 'nwor_max_draft_tokens'"),
    ],
)
def test_wrong_bounds_are_400_and_say_what_is_wanted(
    server: ServerProcess, path: str, body: Any, stream: bool, given: Any, words: str
) -> None:
    request = {"model": DEMO_MODEL, **body, "vllm_xargs": given, "stream": stream}
    with server.client() as http:
        answer = http.post(path, json=request)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == "vllm_xargs"
    assert error["code"] == 400


def test_several_sequences_and_prompts_have_one_bound(server: ServerProcess) -> None:
    request = {"model": DEMO_MODEL, "prompt": [PROMPT, "import os\n"], "n": 2, "seed": 3, "max_tokens": 8}
    with server.client() as http:
        figures = http.post(
            "/v1/completions", json={**request, "vllm_xargs": {FIELD: 1}, "ignore_eos": True}
        ).json()["metrics"]["nwor"]
    assert figures["max_draft_tokens"] == 1
    assert figures["draft_tokens"] <= figures["windows"]
    assert figures["windows"] > 0
