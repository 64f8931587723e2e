"""Claim: with trees of draft tokens an engine answers as one without speculation, and its cache holds the same.

Coverage: the demo model on the CPU in float32; grown trees and combs, greedy and seeded; one request and several
together, with prompts in chunks beside trees, prefix hits, trees cut short by the budget of a step and by the end
of the context, preemption, aborts, several answers to a prompt; switches of the mode before each step; an error
in each part; requests whose windows have to be chains beside others; log-probabilities; frequencies of sampled
tokens. Model runner V2, its kernels interpreted.
Control: trees accept more than chains of their depth, and windows branch.
Tolerance: none for tokens and for the bytes that a step writes. Log-probabilities and what the cache holds
differ from those without speculation by 1e-4 at most: attention adds up in another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from server import cpu_sampling
from tests import pipeline_runs
from tests.engine import contexts, engines, poison
from tests.engine.breaking import MESSAGE
from tests.engine.runner import V2

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not V2, reason="run by test_runner_v2.py: trees need runner V2"),
]
# Both engines sample with what the server mends.
assert cpu_sampling.KERNEL

GROWN = {"nodes": 16, "depth": 6, "width": 4, "kind": "grown"}
COMB = {"nodes": 8, "depth": 4, "width": 3, "kind": "comb"}
#: What adds breadth alone.
MORE = [
    {"nodes": 32, "depth": 6, "width": 8, "kind": "grown"},
    {"nodes": 8, "depth": 4, "width": 3, "kind": "grown"},
    {"nodes": 16, "depth": 4, "width": 4, "kind": "grown"},
    {"nodes": 32, "depth": 6, "width": 8, "kind": "comb"},
    {"nodes": 16, "depth": 6, "width": 4, "kind": "comb"},
    {"nodes": 63, "depth": 8, "width": 8, "kind": "comb"},
]


def _name(tree: dict[str, Any]) -> str:
    return f"{tree['kind']}-{tree['nodes']}-{tree['depth']}"


def _shapes(*shapes: dict[str, Any], more: Sequence[dict[str, Any]] = ()) -> Any:
    """Return a mark that runs a test with engines of some shapes; with ``more`` where slow tests run."""
    cases = [pytest.param(tree, id=_name(tree)) for tree in shapes]
    cases += [pytest.param(tree, id=_name(tree), marks=pytest.mark.slow) for tree in more]
    return pytest.mark.parametrize("engine", cases, indirect=True)


#: Little of everything, so that requests meet each limit.
SETTINGS: dict[str, Any] = engines.PROBED | {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 9,
    "max_model_len": 192,
}
BODIES = ["return a + b", "for i in range(10):\n        total += i", "raise ValueError(message)", "x = {"]
#: Requests of each test, by name: prompts, and what is asked of each.
Requests = list[tuple[Any, dict[str, Any]]]


def _prompt(index: int) -> str:
    return f"class Item{index % 9}:\n    def method_{index}(self, a, b):\n        " + BODIES[index % 4] * (
        1 + index % 3
    )


def _long(index: int, tokens: int) -> dict[str, Any]:
    """Return a prompt of so many tokens that reads like code."""
    return {"prompt_token_ids": (_ids(_prompt(index)) * 20)[:tokens]}


def _ids(text: str) -> list[int]:
    from transformers import AutoTokenizer

    from server import demo

    if not _tokenizer:
        _tokenizer.append(AutoTokenizer.from_pretrained(str(demo.model_path())))
    ids: list[int] = _tokenizer[0].encode(text)
    return ids


_tokenizer: list[Any] = []


def _requests() -> dict[str, Requests]:
    from vllm.sampling_params import StructuredOutputsParams

    common = _ids("self")[-1]
    seeded = {"temperature": 0.8}
    regex = StructuredOutputsParams(regex=r"(yes|no): [0-9]{3}-[a-f]{8}")
    found: dict[str, Requests] = {
        "greedy": [(_prompt(i), {"max_tokens": 14}) for i in (0, 3, 9, 1)] + [(_long(5, 70), {"max_tokens": 5})],
        "seeded": [(_prompt(i), {"max_tokens": 6, "seed": 20 + i, **seeded}) for i in range(3)],
        "long": [(_long(i, 45), {"max_tokens": 14}) for i in range(4)],
        "end": [(_long(i, 183 + i), {"max_tokens": 20}) for i in range(2)],
        "several": [(_prompt(2), {"n": 3, "max_tokens": 5, "seed": 3, **seeded})],
        "logprobs": [
            (_prompt(0), {"logprobs": 5, "max_tokens": 8}),
            (_prompt(1), {"logprobs": 3, "max_tokens": 5, "seed": 4, **seeded}),
            (_prompt(2), {"max_tokens": 6}),
        ],
        "chains": [
            (_prompt(0), {}),
            (_prompt(1), {"repetition_penalty": 1.3, "frequency_penalty": 0.4}),
            (_prompt(2), {"presence_penalty": 0.7, "stop_token_ids": [common]}),
            (_prompt(3), {"bad_words": [" self", "a"]}),
            (_prompt(4), {"structured_outputs": regex, "ignore_eos": False, "max_tokens": 24}),
            (_prompt(5), {"max_tokens": 8}),
            (_prompt(6), {"repetition_penalty": 1.2, "seed": 5, **seeded}),
        ],
        "trees": [
            (_prompt(0), {"min_tokens": 6, "stop_token_ids": [common, 1]}),
            (_prompt(1), {"allowed_token_ids": list(range(50, 300))}),
            (_prompt(2), {"top_k": 20, "seed": 6, **seeded}),
            (_prompt(3), {"top_p": 0.8, "seed": 7, **seeded}),
        ],
        "one token": [(_prompt(i), {"allowed_token_ids": [0], "max_tokens": 9}) for i in range(3)],
    }
    return found


def _params(own: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": 7, "ignore_eos": True, **own})


def _run(llm: Any, requests: Requests) -> list[Any]:
    return list(
        llm.generate([prompt for prompt, _ in requests], [_params(own) for _, own in requests], use_tqdm=False)
    )


def _tokens(outputs: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(answer.token_ids) for output in outputs for answer in output.outputs]


class Plain:
    """What an engine without speculation has made of the same requests, of all of them at once."""

    def __init__(self, llm: Any) -> None:
        self.requests = _requests()
        with contexts.read(llm) as self.contexts:
            outputs = iter(_run(llm, [request for requests in self.requests.values() for request in requests]))
        self.outputs = {name: list(itertools.islice(outputs, len(own))) for name, own in self.requests.items()}

    def tokens(self, name: str) -> list[tuple[int, ...]]:
        """Return the tokens of a test's requests."""
        return _tokens(self.outputs[name])


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., Any]]:
    with engines.one_at_a_time() as make, pytest.MonkeyPatch.context() as patch:
        # What stock vLLM cuts logits down with cannot be interpreted.
        patch.setattr("vllm.v1.sample.ops.topk_topp_sampler.HAS_TRITON", False)
        yield make


@pytest.fixture(scope="module")
def plain(make_engine: Callable[..., Any]) -> Plain:
    settings: dict[str, Any] = {
        **engines.PROBED,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 256,
        "max_model_len": SETTINGS["max_model_len"],
        "speculative_config": None,
        "additional_config": {},
        # The probe is for workers of ours: what it is mixed into must not be their base.
        "worker_extension_cls": "",
    }
    found = Plain(make_engine(**settings))
    # Which attention an engine takes vLLM remembers for those that follow.
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()
    return found


def _likeliest(
    logits: torch.Tensor, step: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor
) -> torch.Tensor:
    """Stand in for the kernels of that name, which take most of the time where they are interpreted."""
    rows, (_, _, width) = logits.shape[0], tokens.shape
    values, places = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    tokens[:rows, int(step)] = places[:, :width]
    logprobs[:rows, int(step)] = values[:, :width] - logits.float().logsumexp(dim=-1, keepdim=True)
    return places[:, 0]


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, make_engine: Callable[..., Any], plain: Plain
) -> Iterator[Any]:
    """One engine for each shape, in mode ``stage`` as each test begins."""
    tree = request.param
    with pytest.MonkeyPatch.context() as patch:
        for module in ("growth", "speculator"):
            patch.setattr(f"nwor.engine.trees.{module}.top_tokens", _likeliest)
        llm = make_engine(
            **SETTINGS,
            speculative_config=engines.eagle(tree["nodes"]),
            additional_config={"nwor": {"mode": "stage", "tree": tree, "self_check_interval": 2}},
        )
        assert llm.collective_rpc("runner_module")[0].startswith("nwor.engine.model_runner.v2")
        yield llm


def _report(llm: Any) -> dict[str, Any]:
    report: dict[str, Any] = llm.collective_rpc("nwor_report")[0]
    return report


def _begin(llm: Any, mode: str = "stage") -> dict[str, Any]:
    """Put a mode in force, forget all prompts and return the report."""
    llm.collective_rpc("nwor_set_mode", args=(mode,))
    pipeline_runs.drain(llm)
    assert llm.reset_prefix_cache()
    report = _report(llm)
    assert (report["mode"], report["fault"], report["unsupported"]) == (mode, None, None)
    return report


def _watch(
    llm: Any, plain: Plain, run: Callable[[], Any], mode: str = "stage", fault: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return what requests give, and what was seen of their steps: all bytes were those that they must be.

    Args:
        llm: the engine.
        plain: what the other one has made.
        run: runs requests that the other one has had too.
        mode: the first one.
        fault: what raises within; None for nothing.

    """
    before = _begin(llm, mode)
    llm.collective_rpc("probe_start")
    try:
        with contexts.read(llm, plain.contexts, tolerance=1e-4) as read:
            result = run()
            pipeline_runs.drain(llm)
    finally:
        seen: dict[str, Any] = llm.collective_rpc("probe_stop")[0]
    assert seen["wrong"] == []
    assert read.wrong == []
    assert read.compared > 0
    report = _report(llm)
    counts, counted = report["counts"], before["counts"]
    if fault is None:
        assert report["fault"] is None
        assert counts["direct_windows"] == counted["direct_windows"]
    else:
        assert f"{MESSAGE}: {fault}" in report["fault"]
    assert not pipeline_runs.core_of(llm).scheduler._nwor_logged
    names = ("windows", "first_tokens", "draft_tokens", "accepted_tokens", "rejected_tokens", "commit_bytes")
    seen |= {name: counts[name] - counted[name] for name in names}
    seen |= {"checks": report["self_checks"] - before["self_checks"], "difference": read.largest}
    return result, seen


def _compare(llm: Any, plain: Plain, name: str, mode: str = "stage") -> dict[str, Any]:
    """Run a test's requests, compare their tokens, and return what was seen."""
    outputs, seen = _watch(llm, plain, lambda: _run(llm, plain.requests[name]), mode)
    assert _tokens(outputs) == plain.tokens(name)
    return seen


@_shapes(GROWN, COMB, more=MORE)
@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_tokens_and_cache(engine: Any, plain: Plain, sampling: str) -> None:
    seen = _compare(engine, plain, sampling)
    assert seen["rejected"] > seen["accepted"] > 0
    assert seen["branched"] > 0
    assert seen["checks"] > 2
    # Slots get what was accepted and nothing else.
    kept = seen["first_tokens"] + seen["accepted_tokens"]
    assert seen["commit_bytes"] == kept * _report(engine)["token_bytes"]
    if sampling == "greedy":
        assert seen["mixed"] > 0
        assert seen["cut"] > 0


@_shapes(GROWN)
@pytest.mark.parametrize("name", ["end", "long", "several", "trees"])
def test_limits(engine: Any, plain: Plain, name: str) -> None:
    before = pipeline_runs.counter(engine, "vllm:num_preemptions")
    seen = _compare(engine, plain, name)
    preempted = pipeline_runs.counter(engine, "vllm:num_preemptions") - before
    assert (preempted > 0) == (name == "long")
    if name == "end":
        assert seen["cut"] > 0
