"""Random valid requests to the completions, chat and responses APIs, and what an answer to one says.

Made from a seed alone: the same seed gives the same requests.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.server_process import DEMO_MODEL

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
#: What this server refuses under speculation, with a temperature or without.
REFUSED_BY_SPECULATION = ("logprob_token_ids", "logit_bias", "min_p")
_PROMPTS = (
    "def fibonacci(n):",
    "import os\n\ndef walk(folder):\n",
    "class Stack:\n    def __init__(self):\n",
    "x = ",
    "for index in range(10):\n    print(",
    "# A list of the first primes\nprimes = [",
    "a" * 200,
)
_QUESTIONS = (
    "Write a function that adds two numbers.",
    "Write hello world.",
    "Reverse a list.",
    "Give a number.",
)
_OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "maxLength": 8}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@dataclass
class RandomRequest:
    """A request.

    Attributes:
        path: the API.
        body: its body, ``stream`` left out.
        stream: whether it is asked for as a stream.

    """

    path: str
    body: dict[str, Any]
    stream: bool

    @property
    def is_greedy(self) -> bool:
        """Whether its tokens follow from the model alone."""
        return self.body["temperature"] == 0

    @property
    def is_refused(self) -> bool:
        """Whether speculation has no place for it."""
        if self.is_greedy and set(self.body) & set(REFUSED_BY_SPECULATION) == {"min_p"}:
            return False  # it has no effect
        return any(name in self.body for name in REFUSED_BY_SPECULATION)


@dataclass
class Seen:
    """An answer.

    Attributes:
        status: of HTTP.
        message: of an error.
        choices: of each, its text, tokens, finish reason and the numbers of its log-probabilities.
        usage: prompt and completion tokens.

    """

    status: int
    message: str = ""
    choices: list[tuple[Any, ...]] = field(default_factory=list)
    usage: tuple[int, int] | None = None


class Generator:
    """Makes requests.

    Args:
        seed: of the random numbers.

    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self) -> RandomRequest:
        """Return the next request."""
        rng = self._random
        path = rng.choices(PATHS, (6, 3, 1))[0]
        body: dict[str, Any] = {"model": DEMO_MODEL, "temperature": rng.choice((0, 0, 0, 0.7, 1.3))}
        if path == "/v1/responses":
            body |= {"input": rng.choice(_QUESTIONS), "max_output_tokens": rng.randint(1, 24)}
            return RandomRequest(path, body, rng.random() < 0.3)
        body |= {"max_tokens": rng.randint(1, 24), "return_token_ids": True}
        if path == "/v1/completions":
            body["prompt"] = rng.choice((*_PROMPTS, [5, 6, 7, 300, 301]))
        else:
            body["messages"] = [{"role": "user", "content": rng.choice(_QUESTIONS)}]
        options = self._options(path)
        for name in rng.sample(sorted(options), rng.randint(0, 4)):
            body.update(options[name])
        if body.get("min_tokens", 0) > body["max_tokens"]:
            body["min_tokens"] = body["max_tokens"]
        if body["temperature"] == 0:
            body.pop("n", None)
        elif rng.random() < 0.7:
            body["seed"] = rng.randint(0, 2**31)
        if "logprob_token_ids" in body:
            body["logprobs"] = 2 if path == "/v1/completions" else True
        # vLLM has no log-probabilities of prompts in streams.
        return RandomRequest(path, body, rng.random() < 0.3 and "prompt_logprobs" not in body)

    def _options(self, path: str) -> dict[str, dict[str, Any]]:
        rng = self._random
        chat = path == "/v1/chat/completions"
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": _OBJECT}}
        options: dict[str, dict[str, Any]] = {
            "top_k": {"top_k": rng.choice((1, 5, 40))},
            "top_p": {"top_p": rng.choice((0.3, 0.9))},
            "min_p": {"min_p": 0.1} if rng.random() < 0.2 else {},
            "presence": {"presence_penalty": rng.choice((-0.5, 0.5, 1.5))},
            "frequency": {"frequency_penalty": rng.choice((0.3, 1.0))},
            "repetition": {"repetition_penalty": rng.choice((0.9, 1.2))},
            "bias": {"logit_bias": {"300": 5.0}} if rng.random() < 0.2 else {},
            "min_tokens": {"min_tokens": rng.randint(1, 24)},
            "ignore_eos": {"ignore_eos": True},
            "stop": {"stop": rng.choice(("\n", ["return", "self"], [" "]))},
            "include_stop": {"stop": ["n", "("], "include_stop_str_in_output": True},
            "stop_ids": {"stop_token_ids": rng.sample(range(7, 400), 5)},
            "bad_words": {"bad_words": rng.choice(([" self"], ["return", "def"], ["a", "b", "c"]))},
            "allowed": {"allowed_token_ids": sorted(rng.sample(range(7, 400), 60))},
            "prompt_logprobs": {"prompt_logprobs": rng.choice((0, 2))},
            "special": {"skip_special_tokens": False},
            "n": {"n": 2},
            "ids": {"logprob_token_ids": [10, 11]} if rng.random() < 0.2 else {},
            "truncate": {"truncate_prompt_tokens": rng.choice((1, 3, 50))},
            "regex": {
                "structured_outputs": {"regex": rng.choice(("[0-9]{3,6}", "(yes|no) [a-z]+", "[^\\n]{4,9}"))}
            },
            "choice": {"structured_outputs": {"choice": ["red", "green", "blue"]}},
            "schema": {"response_format": schema},
        }
        if chat:
            options["logprobs"] = {"logprobs": True, "top_logprobs": rng.choice((0, 3))}
        else:
            options["logprobs"] = {"logprobs": rng.choice((0, 1, 4))}
            options["echo"] = {"echo": True}
        return options


def send(http: httpx.Client, request: RandomRequest, *, stream: bool = False) -> Seen:
    """Send a request, as a stream or whole, and return what the answer says."""
    extra: dict[str, Any] = {}
    if stream:
        extra["stream"] = True
        if request.path != "/v1/responses":
            extra["stream_options"] = {"include_usage": True}
    answer = http.post(request.path, json={**request.body, **extra})
    if answer.status_code != 200:
        error = answer.json().get("error", {})
        return Seen(answer.status_code, str(error.get("message", answer.text)))
    if request.path == "/v1/responses":
        return _read_response(_last_response(answer) if stream else answer.json())
    return _read_stream(answer) if stream else _read_choices(answer.json())


def _last_response(answer: httpx.Response) -> dict[str, Any]:
    last = events(answer)[-1]
    ends = {"completed": "response.completed", "incomplete": "response.incomplete"}
    response: dict[str, Any] = last["response"]
    assert last["type"] == ends[response["status"]]
    return response


def _read_response(response: dict[str, Any]) -> Seen:
    text = "".join(part.get("text", "") for item in response["output"] for part in item.get("content") or ())
    usage = response["usage"]
    return Seen(
        200,
        choices=[(text, response["status"])],
        usage=(usage["input_tokens"], usage["output_tokens"]),
    )


def _read_choices(body: dict[str, Any]) -> Seen:
    choices = []
    for choice in body["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        rows = _rows(choice.get("logprobs"))
        choices.append(
            (text, tuple(choice["token_ids"]), choice["finish_reason"], choice["stop_reason"], rows)
        )
    usage = body["usage"]
    return Seen(200, choices=choices, usage=(usage["prompt_tokens"], usage["completion_tokens"]))


def _rows(logprobs: dict[str, Any] | None) -> int | None:
    """Return for how many tokens there are log-probabilities."""
    if logprobs is None:
        return None
    found = logprobs["token_logprobs"] if "token_logprobs" in logprobs else logprobs["content"]
    return len(found)


def _read_stream(answer: httpx.Response) -> Seen:
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    ends: dict[int, tuple[Any, Any]] = {}
    rows: dict[int, int | None] = {}
    usage = None
    for event in events(answer):
        if "error" in event:
            return Seen(event["error"]["code"], event["error"]["message"])
        if event.get("usage"):
            usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
        for choice in event["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else (choice["delta"].get("content") or "")
            texts[index] = texts.get(index, "") + text
            tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
            found = _rows(choice.get("logprobs"))
            rows[index] = rows.get(index) if found is None else (rows.get(index) or 0) + found
            if choice.get("finish_reason"):
                ends[index] = (choice["finish_reason"], choice.get("stop_reason"))
    choices = [(texts[i], tuple(tokens[i]), *ends.get(i, (None, None)), rows[i]) for i in sorted(texts)]
    return Seen(200, choices=choices, usage=usage)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return what a stream sent."""
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
