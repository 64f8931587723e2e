"""Requests of the tests of trees, what an engine without speculation answers, and how they are run."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from typing import Any

import pytest

from server import demo
from tests.conftest import SLOW
from tests.engine import contexts, engines
from tests.engine.tree_decoder import TreeDecoder

#: Little of everything, so that requests meet each limit.
SETTINGS: dict[str, Any] = engines.PROBED | {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 9,
    "max_model_len": 192,
}
BODIES = ["return a + b", "for i in range(10):\n        total += i", "raise ValueError(message)", "x = {"]
#: A prompt whose continuations are not certain.
CHANCES = "def "
#: Requests of each test, by name: prompts, and what is asked of each.
Requests = list[tuple[Any, dict[str, Any]]]


def prompt_of(index: int) -> str:
    return f"class Item{index % 9}:\n    def method_{index}(self, a, b):\n        " + BODIES[index % 4] * (
        1 + index % 3
    )


def long_prompt(index: int, tokens: int) -> dict[str, Any]:
    """Return a prompt of so many tokens that reads like code."""
    return {"prompt_token_ids": (ids_of(prompt_of(index)) * 20)[:tokens]}


def ids_of(text: str) -> list[int]:
    from transformers import AutoTokenizer

    if not _tokenizer:
        _tokenizer.append(AutoTokenizer.from_pretrained(str(demo.model_path())))
    ids: list[int] = _tokenizer[0].encode(text)
    return ids


_tokenizer: list[Any] = []


def all_requests() -> dict[str, Requests]:
    from vllm.sampling_params import StructuredOutputsParams

    common = ids_of("self")[-1]
    seeded = {"temperature": 0.8}
    regex = StructuredOutputsParams(regex=r"(yes|no): [0-9]{2}-[a-f]{4}")
    found: dict[str, Requests] = {
        "greedy": [(prompt_of(i), {"max_tokens": 14}) for i in (0, 3, 9, 1)]
        + [(long_prompt(5, 70), {"max_tokens": 5})],
        "seeded": [(prompt_of(i), {"max_tokens": 6, "seed": 20 + i, **seeded}) for i in range(2)],
        "long": [(long_prompt(i, 45), {"max_tokens": 14}) for i in range(4)],
        "end": [(long_prompt(i, 183 + i), {"max_tokens": 20}) for i in range(2)],
        "several": [(prompt_of(2), {"n": 2, "max_tokens": 4, "seed": 3, **seeded})],
        "logprobs": [
            (prompt_of(0), {"logprobs": 5, "max_tokens": 8}),
            (prompt_of(1), {"logprobs": 3, "max_tokens": 5, "seed": 4, **seeded}),
            (prompt_of(2), {"max_tokens": 6}),
        ],
        "chains": [
            (prompt_of(0), {}),
            (prompt_of(1), {"repetition_penalty": 1.3, "frequency_penalty": 0.4}),
            (prompt_of(2), {"presence_penalty": 0.7, "stop_token_ids": [common]}),
            (prompt_of(3), {"bad_words": [" self", "a"]}),
            (prompt_of(4), {"structured_outputs": regex, "ignore_eos": False, "max_tokens": 24}),
            (prompt_of(6), {"repetition_penalty": 1.2, "seed": 5, "max_tokens": 4, **seeded}),
            (prompt_of(5), {"max_tokens": 8}),
        ],
        "trees": [
            (prompt_of(0), {"min_tokens": 6, "stop_token_ids": [common, 1]}),
            (prompt_of(1), {"allowed_token_ids": list(range(50, 300))}),
            (prompt_of(2), {"top_k": 20, "top_p": 0.9, "seed": 6, "max_tokens": 5, **seeded}),
        ],
        "many": [
            (f"# {i}\n" + prompt_of(i), {"max_tokens": 16, **({"seed": i, **seeded} if i >= 185 else {})})
            for i in range(200 if os.environ.get(SLOW) else 0)
        ],
        "one token": [(prompt_of(i), {"allowed_token_ids": [0], "max_tokens": 9}) for i in range(3)],
    }
    return found


def params_of(own: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": 7, "ignore_eos": True, **own})


def generate(llm: Any, requests: Requests) -> list[Any]:
    return list(
        llm.generate(
            [prompt for prompt, _ in requests], [params_of(own) for _, own in requests], use_tqdm=False
        )
    )


def tokens_of(outputs: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(answer.token_ids) for output in outputs for answer in output.outputs]


#: What was made in this process.
MADE: list[Plain] = []


class Plain:
    """What an engine without speculation has made of the same requests, of all of them at once."""

    def __init__(self, llm: Any) -> None:
        self.requests = all_requests()
        with contexts.read(llm) as self.contexts:
            made = iter(generate(llm, list(itertools.chain(*self.requests.values()))))
        self.outputs = {name: [next(made) for _ in own] for name, own in self.requests.items()}
        self.chances = {way: exp(value) for way, value in self._ways(llm, 3).items()}

    def _ways(self, llm: Any, length: int) -> dict[tuple[int, ...], float]:
        """Return the log-probability of each answer to :data:`CHANCES`, of two likely tokens a place."""
        ways: dict[tuple[int, ...], float] = {(): 0.0}
        start = ids_of(CHANCES)
        for _ in range(length):
            prompts = [{"prompt_token_ids": [*start, *way]} for way in ways]
            outputs = generate(llm, [(prompt, {"max_tokens": 1, "logprobs": 2}) for prompt in prompts])
            further = {}
            for (way, value), output in zip(ways.items(), outputs, strict=True):
                likely = sorted((x.logprob, t) for t, x in output.outputs[0].logprobs[0].items())[-2:]
                total = log(sum(exp(logprob) for logprob, _ in likely))
                further |= {(*way, token): value + logprob - total for logprob, token in likely}
            ways = further
        return ways

    def tokens(self, name: str) -> list[tuple[int, ...]]:
        """Return the tokens of a test's requests."""
        return tokens_of(self.outputs[name])


def drive(llm: Any, requests: Requests, before_step: Callable[[int], None]) -> dict[str, tuple[int, ...]]:
    """Run requests, whose names are their numbers, and return the tokens of those that end."""
    core, done = llm.llm_engine, {}
    for index, (prompt, own) in enumerate(requests):
        core.add_request(str(index), prompt, params_of(own))
    for step in itertools.count():
        if not core.has_unfinished_requests():
            return done
        before_step(step)
        for output in core.step():
            if output.finished:
                done[output.request_id] = tuple(output.outputs[0].token_ids)
    raise AssertionError


def check_steps(
    llm: Any, prompt: Any, depth: int, tree: Mapping[str, Any], patch: pytest.MonkeyPatch
) -> Counter[int]:
    """Generate 24 tokens, and compare each step's tree and walk with those of an independent decoder.

    Args:
        llm: the engine, with nothing under way.
        prompt: of the one request.
        depth: of its trees.
        tree: plain values of their shape.
        patch: undone by the caller.

    Returns:
        Steps by the draft tokens of their window.

    """
    decoder = TreeDecoder(demo.model_path(), demo.draft_path())
    tables, steps = contexts.runner_of(llm)._nwor_trees.tables, []
    walk = tables.walk

    def watched(targets: Any, tokens: Any, starts: Any, slots: Any, *others: Any) -> Any:
        sampled, counts = walk(targets, tokens, starts, slots, *others)
        paths: list[tuple[int, ...]] = [()]
        for row in range(1, int(starts[1])):
            paths.append((*paths[int(tables._parents[slots[0], row])], int(tokens[row])))
        steps.append((paths[1:], sampled[0, : int(counts[0])].tolist()))
        return sampled, counts

    patch.setattr(tables, "walk", watched)
    (output,) = generate(llm, [(prompt, {"max_tokens": 24})])
    text = [*output.prompt_token_ids, output.outputs[0].token_ids[0]]
    lengths = Counter[int]()
    assert steps
    for paths, sampled in steps:
        assert len(set(paths)) == len(paths)
        scores = decoder.candidates(text, depth, tree["width"], tree["kind"] == "grown")
        best = sorted(scores, key=scores.__getitem__, reverse=True)[: len(paths)]
        # Rounding may decide between the last that stay and the first that do not.
        last = scores[best[-1]] if best else 0.0
        for path in set(best) ^ set(paths):
            assert abs(scores[path] - last) < 1e-4
        assert decoder.walk(text, set(paths)) == sampled
        text += sampled
        lengths[len(paths)] += 1
    assert text[len(output.prompt_token_ids) :][:24] == list(output.outputs[0].token_ids)
    return lengths
