"""Wrong input over HTTP: OpenAI's error body, the right status, words that help, and a server that lives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server_process import DEMO_MODEL, ServerProcess

pytestmark = pytest.mark.engine

JSON = {"Content-Type": "application/json"}
LIMIT = 2**20


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def the_server_goes_on(http: httpx.Client) -> Iterator[None]:
    yield
    request = {"model": DEMO_MODEL, "prompt": "x = ", "max_tokens": 2, "ignore_eos": True}
    answer = http.post("/v1/completions", json=request)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 2


def check_error(answer: httpx.Response, status: int, *words: str, param: str | None = None) -> None:
    """The body must be OpenAI's, agree with the status, and hold the words that help."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["type"]
    assert error["param"] == param
    for word in words:
        assert word in error["message"]
    assert "Traceback" not in error["message"]
    assert "{'type'" not in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"model": ', ("not valid JSON", "position 10")),
        (b"", ("no body",)),
        (b'{"model": "\xff"}', ("not valid UTF-8", "0xff", "position 11")),
        (b"[" * 50_000, ("nested too deeply",)),
    ],
    ids=["malformed", "empty", "utf-8", "nested"],
)
def test_bodies_that_cannot_be_read(
    http: httpx.Client, path: str, body: bytes, words: tuple[str, ...]
) -> None:
    check_error(http.post(path, content=body, headers=JSON), 400, *words)


def test_another_content_type(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    check_error(answer, 400, "application/json")


@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        ({"max_tokens": "many"}, 400, "max_tokens", ("max_tokens", "integer", "'many'")),
        ({"temperature": []}, 400, "temperature", ("temperature", "number")),
        ({"stream": "perhaps"}, 400, "stream", ("stream", "boolean")),
        ({"prompt": {"a": 1}}, 400, "prompt", ("prompt", "string")),
        ({"prompt": None}, 400, "prompt", ("prompt",)),
        ({"seed": 2**80}, 400, "seed", ("seed", "9223372036854775807")),
        ({"model": "gpt-9"}, 404, "model", ("gpt-9", "does not exist", DEMO_MODEL)),
        ({"prompt": "word " * 4000}, 400, "input_tokens", ("maximum context length is 2048", "reduce")),
        ({"max_tokens": 100_000}, 400, "max_tokens", ("max_tokens=100000", "2048")),
        ({"max_tokens": 0}, 400, "max_tokens", ("at least 1",)),
        ({"max_tokens": -5}, 400, "max_tokens", ("at least 1",)),
        ({"temperature": -1}, 400, "temperature", ("non-negative",)),
        ({"temperature": 1e9}, 400, "temperature", ("[0, 2]",)),
        ({"top_p": 7}, 400, "top_p", ("(0, 1]",)),
        ({"n": 0}, 400, None, ("at least 1",)),
        ({"prompt": [10**7]}, 400, None, ("10000000", "out of vocabulary")),
        ({"logprobs": 1000}, 400, "logprobs", ("1000", "20")),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", ("integer",)),
        ({"structured_outputs": {"regex": "(["}}, 400, None, ("nclosed",)),
    ],
)
def test_values_that_cannot_be_served(
    http: httpx.Client, change: dict[str, Any], status: int, param: str | None, words: tuple[str, ...]
) -> None:
    request = {"model": DEMO_MODEL, "prompt": "x = ", "max_tokens": 2, **change}
    check_error(http.post("/v1/completions", json=request), status, *words, param=param)


def test_temperature_that_is_no_number(http: httpx.Client) -> None:
    body = f'{{"model": "{DEMO_MODEL}", "prompt": "x", "temperature": NaN}}'
    check_error(http.post("/v1/completions", content=body, headers=JSON), 400, "finite", param="temperature")


def test_half_a_surrogate_pair(http: httpx.Client) -> None:
    body = f'{{"model": "{DEMO_MODEL}", "prompt": "\\ud800"}}'
    check_error(http.post("/v1/completions", content=body, headers=JSON), 400, "surrogate")


@pytest.mark.parametrize("messages", [[], [{"role": 1}], "hello", [{"role": "user", "content": {"a": 1}}]])
def test_messages_of_the_wrong_form(http: httpx.Client, messages: Any) -> None:
    answer = http.post("/v1/chat/completions", json={"model": DEMO_MODEL, "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert "{'type'" not in answer.text


def test_streams_fail_before_they_begin(http: httpx.Client) -> None:
    request = {"model": DEMO_MODEL, "prompt": "x", "max_tokens": -1, "stream": True}
    check_error(http.post("/v1/completions", json=request), 400, "at least 1", param="max_tokens")


def test_unknown_path_and_wrong_method(http: httpx.Client) -> None:
    check_error(http.get("/v1/nothing"), 404, "/v1/nothing")
    check_error(http.get("/v1/completions"), 405, "GET", "POST")


def test_body_above_the_limit_with_its_length_declared(http: httpx.Client) -> None:
    body = json.dumps({"model": DEMO_MODEL, "prompt": "a" * LIMIT}).encode()
    check_error(http.post("/v1/completions", content=body, headers=JSON), 413, str(LIMIT), "--max-body-size")


def test_body_above_the_limit_in_chunks(http: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * (LIMIT // 8)

    check_error(http.post("/v1/completions", content=chunks(), headers=JSON), 413, str(LIMIT))


def test_body_at_the_limit_is_read(http: httpx.Client) -> None:
    body = json.dumps({"model": DEMO_MODEL, "prompt": "x = ", "max_tokens": 1}).encode()
    answer = http.post("/v1/completions", content=body.ljust(LIMIT), headers=JSON)
    assert answer.status_code == 200
