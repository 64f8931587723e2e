"""The OpenAI API as the official client sees it, against a real server on the demo model."""

from __future__ import annotations

import json
import math

import httpx
import openai
import pytest

from tests.conftest import API_KEYS
from tests.server_process import DEMO_MODEL, ServerProcess

pytestmark = pytest.mark.engine

PROMPT = "def read_lines(path):\n    with open(path) as handle:\n"
MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers."}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0)


def complete(client: openai.OpenAI, **options) -> openai.types.Completion:
    settings = {"model": DEMO_MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **options}
    settings["extra_body"] = {"ignore_eos": True, **options.get("extra_body", {})}
    return client.completions.create(**settings)


def test_models_lists_the_demo_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEMO_MODEL]


def test_completion_reports_usage_and_finish_reason(client: openai.OpenAI) -> None:
    completion = complete(client, max_tokens=16)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 16
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 16


def test_greedy_completion_repeats_itself(client: openai.OpenAI) -> None:
    assert complete(client).choices[0].text == complete(client).choices[0].text


def test_stream_adds_up_to_the_whole_completion(client: openai.OpenAI) -> None:
    whole = complete(client)
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]


def test_stream_with_usage_ends_with_the_usage_chunk(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == complete(client).usage.completion_tokens


def test_chat_stream_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    settings = {"model": DEMO_MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**settings, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_completion_logprobs_name_the_greedy_token_first(client: openai.OpenAI) -> None:
    logprobs = complete(client, logprobs=3, max_tokens=8).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) >= 3
        assert value <= 0
        assert top[token] == max(top.values())


def test_chat_logprobs_are_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=DEMO_MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=4
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    for token in tokens:
        assert len(token.top_logprobs) == 4
        assert sum(math.exp(entry.logprob) for entry in token.top_logprobs) <= 1 + 1e-4


def test_n_gives_that_many_choices(client: openai.OpenAI) -> None:
    completion = complete(client, n=3, temperature=1.0, seed=7)
    assert sorted(choice.index for choice in completion.choices) == [0, 1, 2]
    assert len({choice.text for choice in completion.choices}) > 1


def test_stop_cuts_the_greedy_text_where_the_string_begins(client: openai.OpenAI) -> None:
    text = complete(client).choices[0].text
    stop = text[len(text) // 2 :][:4]
    choice = complete(client, stop=[stop]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_seed_fixes_the_sample(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        return complete(client, temperature=1.0, seed=seed).choices[0].text

    assert sample(11) == sample(11)
    assert sample(11) != sample(12)


def test_penalties_reduce_repetition(client: openai.OpenAI) -> None:
    def distinct(**penalties: float) -> int:
        completion = complete(
            client, prompt="0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,", max_tokens=48, logprobs=0,
            **penalties,
        )  # fmt: skip
        return len(set(completion.choices[0].logprobs.tokens))

    assert distinct(presence_penalty=2.0, frequency_penalty=2.0) > distinct()


def test_choice_confines_the_answer(client: openai.OpenAI) -> None:
    choices = ["import os", "import sys"]
    completion = complete(client, extra_body={"ignore_eos": False, "structured_outputs": {"choice": choices}})
    assert completion.choices[0].text in choices


def test_regex_confines_the_answer(client: openai.OpenAI) -> None:
    completion = complete(
        client, extra_body={"ignore_eos": False, "structured_outputs": {"regex": r"[0-9]{4}-[0-9]{2}"}}
    )
    year, month = completion.choices[0].text.split("-")
    assert (len(year), len(month)) == (4, 2)
    assert (year + month).isdigit()


def test_json_schema_confines_the_answer(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["function", "class"]}, "public": {"type": "boolean"}},
        "required": ["kind", "public"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=DEMO_MODEL,
        messages=MESSAGES,
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "item", "schema": schema}},
    )
    item = json.loads(answer.choices[0].message.content)
    assert set(item) == {"kind", "public"}
    assert item["kind"] in ("function", "class")
    assert isinstance(item["public"], bool)


def test_responses_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    settings = {"model": DEMO_MODEL, "input": "Add two numbers.", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**settings)
    assert whole.usage.output_tokens <= 16
    events = list(client.responses.create(**settings, stream=True))
    assert events[0].type == "response.created"
    # The limit cut it, as the whole answer says.
    assert whole.status == "incomplete"
    assert events[-1].type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text


def test_tokenize_and_detokenize_are_inverse(server: ServerProcess) -> None:
    with server.client() as http:
        request = {"model": DEMO_MODEL, "prompt": PROMPT, "add_special_tokens": False}
        tokens = http.post("/tokenize", json=request).json()["tokens"]
        assert len(tokens) > 4
        text = http.post("/detokenize", json={"model": DEMO_MODEL, "tokens": tokens}).json()["prompt"]
    assert text == PROMPT


def test_health_version_and_metrics_need_no_key(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/version").json() == {"version": "0.32.0"}
    assert "vllm:num_requests_running" in httpx.get(f"{server.url}/metrics").text


@pytest.mark.parametrize("key", API_KEYS)
def test_every_key_is_accepted(server: ServerProcess, key: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    assert complete(client, max_tokens=1).choices


def test_another_key_is_refused(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="third-key", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        complete(client)
    assert caught.value.status_code == 401
    assert caught.value.body["type"] == "AuthenticationError"
    assert "Authorization: Bearer" in caught.value.body["message"]


def test_a_missing_key_is_refused(server: ServerProcess) -> None:
    answer = httpx.get(f"{server.url}/v1/models")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == 401
    assert "missing" in answer.json()["error"]["message"]


def test_the_server_prints_how_to_use_it(server: ServerProcess) -> None:
    assert f"is ready on {server.url}" in server.log
    assert f"curl -s {server.url}/v1/completions" in server.log
