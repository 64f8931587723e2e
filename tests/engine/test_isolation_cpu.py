"""Claim: an exception in sampling, grammars, log-probabilities or drafting costs no other request a token.

Coverage: the demo model on the CPU in float32 with windows of 5 tokens; greedy, seeded, penalized, structured
and other requests at once, one of them poisoned: what it asks for raises in vLLM's own code, when it is tried
with others and when it is tried alone. In mode `stage`, sampling in `off` and `cow` too. Model runner V1;
V1 and V2 with steps scheduled ahead (see runner.py).
Tolerance: none. Tokens, finish reasons and log-probabilities of the others are those of a run without poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.engine import engines, poison
from tests.engine.runner import AHEAD, V2

pytestmark = pytest.mark.engine

NEW_TOKENS = 4 if V2 else 12


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with engines.one_at_a_time() as make:
        yield make(
            max_num_seqs=16,
            worker_extension_cls="tests.engine.cache_probe.CacheProbe",
            structured_outputs_config={"backend": "xgrammar"},
            enable_prefix_caching=False,
        )


def _params(poisoned: dict[str, Any]) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    common = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0.0}
    regex = StructuredOutputsParams(regex="[a-z ]{40,80}")
    wanted: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 5, "logprobs": 2},
        {"logprobs": 4},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1},
        {"min_tokens": NEW_TOKENS, "stop_token_ids": [5, 9]},
        {"allowed_token_ids": list(range(50, 300)), "temperature": 1.0, "seed": 3},
        {"prompt_logprobs": 2},
        {"structured_outputs": regex},
        {"structured_outputs": regex, **poisoned},
    ]
    if V2:  # kernels are interpreted
        wanted = [wanted[index] for index in (0, 1, 3, 6, 8)]
    return [SamplingParams(**{**common, **own}) for own in wanted]


def _run(llm: Any, poisoned: dict[str, Any]) -> list[Any]:
    params = _params(poisoned)
    prompts = [f"def method_{index}(a, b):\n    return " for index in range(len(params))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    poison.poisoned[:] = [str(int(outputs[-1].request_id.partition("-")[0]) + len(params))]
    return [
        (
            tuple(output.outputs[0].token_ids),
            output.outputs[0].finish_reason,
            _shown(output.outputs[0].logprobs, 4),
            _shown(output.prompt_logprobs, 2),
        )
        for output in outputs
    ]


def _shown(rows: Any, number: int) -> list[Any]:
    # Of a batch with wider rows each request shows what it asked for.
    return [
        sorted((t, round(x.logprob, 4)) for t, x in row.items() if x.rank <= number)
        for row in rows or []
        if row
    ]


#: The poisoned request's parameters, and what raises for it.
CASES: dict[str, tuple[dict[str, Any], Callable[[], AbstractContextManager[None]]]] = {
    "sampling": ({"bad_words": [" self"]}, poison.sampling),
    "logprobs": ({"logprobs": poison.LOGPROBS}, poison.logprobs),
    "prompt_logprobs": ({"prompt_logprobs": poison.PROMPT_LOGPROBS}, poison.prompt_logprobs),
    "grammar masks": ({}, poison.grammar_masks),
    "grammar state": ({}, poison.grammar_state),
}


@pytest.mark.parametrize(
    ("mode", "case"),
    [("stage", case) for case in CASES if not (AHEAD and case == "grammar state")]
    + [(mode, "sampling") for mode in ("off", "cow") if not AHEAD],
)
def test_a_request_fails_alone(engine: Any, mode: str, case: str) -> None:
    asked, context = CASES[case]
    engine.collective_rpc("nwor_set_mode", args=(mode,))
    expected = _run(engine, asked)
    assert all(reason == "length" for _, reason, *_ in expected)
    with context():
        seen = _run(engine, asked)
    assert seen[:-1] == expected[:-1]
    assert seen[-1][1] == "error"
    assert len(seen[-1][0]) < NEW_TOKENS
    # The engine is whole: the next test's first run is another request's. And no figure is off.
    assert not engine.llm_engine.engine_core.engine_core.scheduler._nwor_logged


def test_requests_that_fail_together_only_all_go_on(engine: Any) -> None:
    engine.collective_rpc("nwor_set_mode", args=("stage",))
    expected = _run(engine, {"logprobs": poison.LOGPROBS})
    runner = _runner(engine)
    sampler = runner.rejection_sampler
    stock = type(sampler).__call__
    failed = []

    def together(self: Any, first: Any, second: Any, *args: Any) -> Any:
        # V1 passes its metadata first, V2 its batch second.
        requests = len(first.num_draft_tokens) if not V2 else second.num_reqs
        if requests > 1:
            failed.append(requests)
            raise RuntimeError(poison.MESSAGE)
        return stock(self, first, second, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(sampler), "__call__", together)
        seen = _run(engine, {"logprobs": poison.LOGPROBS})
    assert failed
    assert seen == expected


def test_a_drafter_that_fails_costs_drafts_alone(engine: Any) -> None:
    engine.collective_rpc("nwor_set_mode", args=("stage",))
    expected = _run(engine, {})
    with poison.drafting(_runner(engine)):
        seen = _run(engine, {})
    # Seeded requests draw once for each step, of which there are others now.
    greedy = [index for index, params in enumerate(_params({})) if params.temperature == 0]
    assert [seen[index][:2] for index in greedy] == [expected[index][:2] for index in greedy]
    assert all(reason == "length" for _, reason, *_ in seen)
    assert _run(engine, {}) == expected


def _runner(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
