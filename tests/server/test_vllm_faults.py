"""Faults of vLLM's under speculation that users report, over HTTP: mended, or refused with what to do.

docs/vllm-faults.md lists them. Where an answer must be right, the reference is a greedy answer of the same
server without the parameter in question.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from tests.random_requests import events
from tests.server.test_errors import check_error
from tests.server_process import DEMO_MODEL, ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

PROMPT = "def fibonacci(n):"


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def post(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    settings = {"model": DEMO_MODEL, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    if path == "/v1/completions":
        settings["prompt"] = PROMPT
    return http.post(path, json={**settings, **body})


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = post(http, **body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def chat(http: httpx.Client, question: str, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": question}]
    return post(http, "/v1/chat/completions", messages=messages, **body)


def tokens_of(http: httpx.Client, text: str) -> list[int]:
    body = {"model": DEMO_MODEL, "prompt": text, "add_special_tokens": False}
    found: list[int] = http.post("/tokenize", json=body).json()["tokens"]
    return found


SCHEMA_IN_ITSELF = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "token ids": ({"logprobs": 3, "logprob_token_ids": [10, 11]}, "logprob_token_ids", "without a draft"),
    "masks": (
        {"allowed_token_ids": [379], "bad_words": [" self"]},
        "allowed_token_ids",
        "exclude every token",
    ),
    "stop tokens": (
        {"allowed_token_ids": [1, 6], "min_tokens": 4},
        "allowed_token_ids",
        "min_tokens excludes",
    ),
    "white space": ({"bad_words": [" "]}, "bad_words", "white space alone"),
    "large choice": (
        {"structured_outputs": {"choice": [f"{number:06d}" for number in range(20_000)]}},
        "structured_outputs",
        "--max-grammar-size",
    ),
    "schema in itself": ({"structured_outputs": {"json": SCHEMA_IN_ITSELF}}, "response_format", "but itself"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_engine(http: httpx.Client, case: str, stream: bool) -> None:
    body, param, words = REFUSED[case]
    check_error(post(http, **body, stream=stream), 400, words, param=param)


def test_streams_are_checked_before_their_status(http: httpx.Client) -> None:
    answer = post(http, min_p=0.5, stream=True, temperature=1.0)
    assert answer.status_code == 400
    tuple_schema = {"type": "array", "items": [{"type": "string"}]}
    assert post(http, structured_outputs={"json": tuple_schema}, stream=True).status_code == 400


def test_sampling_parameters_alone_and_in_pairs(http: httpx.Client) -> None:
    """`top_k` alone used to end the engine; each of these is the only request of its step."""
    for body in (
        {"top_k": 20},
        {"top_p": 0.9},
        {"top_k": 20, "top_p": 0.9},
        {"top_k": 20, "logprobs": 2},
        {"top_k": 5, "frequency_penalty": 0.5, "seed": 3},
        {"top_k": 5, "max_tokens": 1},
    ):
        assert complete(http, temperature=0.9, **body)["finish_reason"] in ("length", "stop")


def test_a_minimum_that_the_answer_reaches_anyway_changes_nothing(http: httpx.Client) -> None:
    question = "Write a function that reverses a string."  # a window's last row ends its answer
    natural = chat(http, question, max_tokens=200).json()["choices"][0]
    assert natural["finish_reason"] == "stop"
    length = len(natural["token_ids"])
    for minimum in range(length - 4, length):
        answer = chat(http, question, max_tokens=200, min_tokens=minimum).json()["choices"][0]
        assert answer["token_ids"] == natural["token_ids"], minimum
    longer = chat(http, question, max_tokens=length + 8, min_tokens=length + 4).json()["choices"][0]
    assert len(longer["token_ids"]) >= length + 4


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_masks_that_leave_nothing_on_the_way(
    http: httpx.Client, server: ServerProcess, temperature: float
) -> None:
    """After one token the bad word of two excludes the only one that is allowed: no check can know."""
    [token] = tokens_of(http, "a")
    assert tokens_of(http, "aa") == [token, token]
    failed = server.metric("nwor_failed_requests_total")
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(complete, http, max_tokens=40, ignore_eos=True)
        answer = post(
            http, allowed_token_ids=[token], bad_words=["aa"], temperature=temperature,
            ignore_eos=True, max_tokens=30, prompt=[token] * 3, min_tokens=1, stop_token_ids=[],
        )  # fmt: skip
        seen = other.result()
    check_error(answer, 400, "Nothing was left to sample")
    place = (("place", "constraints"),)
    wait_until(
        lambda: server.metric("nwor_failed_requests_total")[place] == failed[place] + 1, 10, "it is counted"
    )
    assert len(seen["token_ids"]) == 40


def test_one_backend_serves_all_grammars(http: httpx.Client) -> None:
    def ask(schema: dict[str, Any]) -> int:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return chat(http, "Give a number.", max_tokens=60, response_format=wanted).status_code

    assert ask({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}) == 200
    assert ask({"type": "array", "items": [{"type": "string"}]}) == 400
    assert ask({"type": "integer", "multipleOf": 1000}) == 400


def test_no_control_tokens_inside_a_grammars_strings(http: httpx.Client) -> None:
    [letter] = tokens_of(http, "a")
    for seed in range(4):
        choice = complete(
            http,
            prompt="x = ",
            temperature=1.0,
            seed=seed,
            max_tokens=60,
            allowed_token_ids=[1, 2, 3, 4, 5, 6, letter],
            structured_outputs={"regex": "[^\\n]{20,30}"},
        )
        assert not {2, 3, 4, 5} & set(choice["token_ids"])
        assert choice["finish_reason"] == "stop"
        assert 20 <= len(choice["text"]) <= 30


def test_an_answer_ends_with_its_grammar(http: httpx.Client) -> None:
    choice = complete(http, structured_outputs={"choice": ["yes", "no"]}, ignore_eos=True, max_tokens=30)
    assert choice["text"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"


def test_beam_search_says_what_it_does_not_look_at(http: httpx.Client) -> None:
    beams = {"use_beam_search": True, "n": 2}
    check_error(post(http, **beams, stop=["\n"]), 400, "Beam search", "stop", param="stop")
    answer = post(http, **beams)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 2


def test_beams_end_with_any_end_token(http: httpx.Client) -> None:
    """An answer that greedy decoding ends with <|end|>, from just before that token."""
    question = {"model": DEMO_MODEL, "messages": [{"role": "user", "content": "Write hello world."}]}
    begin = http.post("/tokenize", json={**question, "add_generation_prompt": True}).json()["tokens"]
    answer = complete(http, prompt=begin, max_tokens=200)
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", 6)
    almost = begin + answer["token_ids"][:-1]
    beams = post(http, prompt=almost, use_beam_search=True, n=2, max_tokens=6).json()["choices"]
    assert not any(6 in beam["token_ids"] for beam in beams)
    assert beams[0]["finish_reason"] == "stop"
    assert beams[0]["token_ids"] == []


@pytest.mark.parametrize(
    "wanted",
    [
        {"grammar": "root ::= root"},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}},
    ],
)
def test_a_grammar_that_nothing_matches(http: httpx.Client, wanted: dict[str, Any]) -> None:
    """vLLM takes these for valid, samples token 0 and answers 500."""
    check_error(post(http, structured_outputs=wanted), 400, "Nothing was left to sample", "grammar")
    assert complete(http)


@pytest.mark.parametrize("limit", [5, 300])
def test_a_streamed_response_ends_with_what_happened(http: httpx.Client, limit: int) -> None:
    body = {"model": DEMO_MODEL, "input": "Write hello world.", "temperature": 0}
    answer = http.post("/v1/responses", json={**body, "max_output_tokens": limit, "stream": True})
    last = events(answer)[-1]
    cut = limit == 5
    assert last["type"] == ("response.incomplete" if cut else "response.completed")
    assert last["response"]["status"] == ("incomplete" if cut else "completed")
    assert (last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}) == cut


def earlier_answer(*texts: str) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": parts}


def test_earlier_answers_in_a_response(http: httpx.Client) -> None:
    def ask(answer: dict[str, Any]) -> httpx.Response:
        question = {"role": "user", "content": "Write hello world."}
        body = {"model": DEMO_MODEL, "input": [question, answer, question], "max_output_tokens": 2}
        return http.post("/v1/responses", json=body)

    check_error(ask(earlier_answer()), 400, "input[1]", "output_text", param="input")
    refusal = {**earlier_answer(), "content": [{"type": "refusal", "refusal": "no"}]}
    check_error(ask(refusal), 400, "input[1]", "output_text", param="input")
    in_parts, in_one = ask(earlier_answer("print(", "1)")).json(), ask(earlier_answer("print(1)")).json()
    assert in_parts["usage"]["input_tokens"] == in_one["usage"]["input_tokens"]


def test_integers_that_no_message_holds(http: httpx.Client) -> None:
    check_error(post(http, stream_interval=2**70), 400, "64 bits", param="stream_interval")


def test_tokens_past_a_stop_string_are_not_counted(http: httpx.Client, server: ServerProcess) -> None:
    name = "vllm:generation_tokens_total"
    before, charged = server.total(name), 0
    whole = post(http, max_tokens=32, ignore_eos=True).json()
    text = whole["choices"][0]["text"]
    charged += whole["usage"]["completion_tokens"]
    for index in range(6, 16):
        cut = post(http, max_tokens=32, ignore_eos=True, stop=[text[index : index + 2]]).json()
        assert cut["choices"][0]["finish_reason"] == "stop"
        charged += cut["usage"]["completion_tokens"]
    wait_until(lambda: server.total(name) - before >= charged, 10, "all tokens are counted")
    assert server.total(name) - before == charged


def test_clients_that_leave_are_counted_as_aborts(http: httpx.Client, server: ServerProcess) -> None:
    def aborted() -> float:
        return server.metric("vllm:request_success_total").get((("finished_reason", "abort"),), 0.0)

    before = aborted()
    for number in (1, 2):
        body = {"model": DEMO_MODEL, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "n": number}
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
    wait_until(lambda: aborted() == before + 3, 20, "three sequences are counted")
    sums = server.metric("vllm:request_queue_time_seconds_sum").values()
    assert all(value >= 0 for value in sums)


def test_connections_rest_longer_than_clients_keep_them(server: ServerProcess) -> None:
    address = httpx.URL(server.url)
    connection = HTTPConnection(address.host, address.port or 80, timeout=30)
    with closing(connection):
        for pause in (0, 6):  # HTTPX and OpenAI's client keep one for 5 s
            time.sleep(pause)
            # A connection that was closed meanwhile raises here: it does not connect again by itself.
            connection.auto_open = int(not pause)
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200


def test_a_seeded_prompt_of_one_token_beside_others(http: httpx.Client, server: ServerProcess) -> None:
    """vLLM draws its first token with other random numbers when it does not start alone."""
    [token] = tokens_of(http, "x")

    def answers() -> list[list[int]]:
        settings = {"prompt": [token], "temperature": 1.5, "max_tokens": 4, "ignore_eos": True}
        return [complete(http, **settings, seed=seed)["token_ids"] for seed in range(5)]

    alone = answers()
    body = {"model": DEMO_MODEL, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with (
        ThreadPoolExecutor(1) as pool,
        server.client() as other,
        other.stream("POST", "/v1/completions", json=body) as running,
    ):
        lines = running.iter_lines()
        next(lines)
        rest = pool.submit(lambda: sum(1 for _ in lines))
        assert answers() == alone
        assert not rest.done()  # the other request is still under way
    assert len({tuple(answer) for answer in alone}) > 2


@pytest.mark.parametrize("prompt", ["import os", [5, 6, 300, 301]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_gives_the_prompt_back(http: httpx.Client, prompt: Any, stream: bool) -> None:
    def text(**extra: Any) -> str:
        answer = post(http, prompt=prompt, echo=True, max_tokens=2, stream=stream, **extra)
        parts = events(answer) if stream else [answer.json()]
        return "".join(choice["text"] for part in parts for choice in part["choices"])

    plain = text(return_token_ids=False)
    assert text(return_token_ids=True) == plain
    if isinstance(prompt, str):
        assert plain.startswith(prompt)
        assert len(plain) > len(prompt)


def test_echo_of_the_prompt_alone_generates_nothing(http: httpx.Client) -> None:
    answer = post(http, prompt="import os", echo=True, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "import os"
    assert answer["choices"][0]["token_ids"] == []
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]


def test_a_prompt_without_room_for_an_answer(http: httpx.Client) -> None:
    longest = http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"model": DEMO_MODEL, "prompt": [5] * longest}
    check_error(http.post("/v1/completions", json=body), 400, str(longest), "shorten it", param="prompt")


def test_seeds_out_of_range(http: httpx.Client) -> None:
    check_error(post(http, seed=2**63), 400, "less than or equal", f"(got {2**63})", param="seed")
    check_error(post(http, seed=-(2**63) - 1), 400, "greater than or equal", param="seed")


def test_one_model_is_shown(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()["data"][0]
    shown = http.get(f"/v1/models/{DEMO_MODEL}")
    assert shown.status_code == 200
    assert {**shown.json(), "created": 0, "permission": 0} == {**listed, "created": 0, "permission": 0}
    check_error(http.get("/v1/models/other/one"), 404, "other/one", DEMO_MODEL)
