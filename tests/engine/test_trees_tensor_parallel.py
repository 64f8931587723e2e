"""Claim: with trees and two ranks of tensor parallelism, tokens are those without drafts, on both ranks.

Coverage: on the CPU in float32 with the demo model, model runner V2, a process for each rank; greedy and
seeded sampling, prompts in chunks beside trees; the cache of both ranks after each step; an error on one rank
alone, after which windows are chains on both until the mode is set anew.
Control: trees branch before the error and after the mode is set; in between none does.
Tolerance: none. Tokens are compared for equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import pipeline_runs
from tests.engine import engines
from tests.engine.breaking import MESSAGE
from tests.engine.runner import INHERITED, V2

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not (V2 and INHERITED), reason="run by test_runner_v2.py: trees need runner V2"),
    # How vLLM's worker processes end is not what is tested.
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]

RANKS, PROMPTS, NEW_TOKENS = 2, 5, 10
TREE = {"nodes": 8, "depth": 4, "width": 3, "kind": "grown"}
#: Parts that fail where slow tests run, besides.
SLOW = ("stage", "commit")
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 7}}
SETTINGS: dict[str, Any] = {
    **engines.PROBED,
    "block_size": 128,
    "tensor_parallel_size": RANKS,
    "distributed_executor_backend": "mp",
}


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[..., Any]]:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    # vLLM has torch compile the look-up of split embeddings, for which a stand-in for Triton is too little.
    environment["TORCH_COMPILE_DISABLE"] = "1"
    with engines.one_at_a_time(**environment) as start:
        yield start


def _generate(llm: Any, params: dict[str, Any]) -> list[tuple[int, ...]]:
    from vllm import SamplingParams

    bodies = ["return a + b", "for i in range(10):\n        total += i", "raise ValueError(message)", "x = {"]
    prompts = [
        f"class Item{i % 9}:\n    def method_{i}(self, a, b):\n        " + bodies[i % 4] * (1 + 2 * (i % 3))
        for i in range(PROMPTS)
    ]
    common = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    outputs = llm.generate(prompts, SamplingParams(**common | params), use_tqdm=False)
    pipeline_runs.drain(llm)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(make: Callable[..., Any]) -> dict[str, list[tuple[int, ...]]]:
    """What an engine of as many ranks answers without drafts."""
    plain = make(
        **SETTINGS | {"speculative_config": None, "additional_config": {}, "worker_extension_cls": ""}
    )
    return {name: _generate(plain, params) for name, params in SAMPLING.items()}


@pytest.fixture(scope="module")
def engine(make: Callable[..., Any], expected: Any) -> Any:
    return make(
        **SETTINGS | {"worker_extension_cls": "tests.engine.tree_probe.TreeProbe"},
        speculative_config=engines.eagle(TREE["nodes"]),
        additional_config={"nwor": {"mode": "stage", "tree": TREE, "self_check_interval": 2}},
    )


def _probed(llm: Any, params: dict[str, Any]) -> tuple[list[tuple[int, ...]], list[dict[str, Any]]]:
    """Return tokens, and what was seen of the cache of each rank."""
    assert llm.reset_prefix_cache()
    llm.collective_rpc("probe_start")
    try:
        tokens = _generate(llm, params)
    finally:
        seen = llm.collective_rpc("probe_stop")
    assert [rank["wrong"] for rank in seen] == [[]] * RANKS
    assert seen[0]["branched"] == seen[1]["branched"]
    assert seen[0]["chains"] == seen[1]["chains"]
    return tokens, seen


def _set_stage(llm: Any) -> None:
    assert [answer["new"] for answer in llm.collective_rpc("nwor_set_mode", args=("stage",))] == [
        "stage"
    ] * RANKS


@pytest.mark.parametrize("sampling", SAMPLING)
def test_tokens_and_the_caches_of_both_ranks(engine: Any, expected: Any, sampling: str) -> None:
    _set_stage(engine)
    tokens, seen = _probed(engine, SAMPLING[sampling])
    assert tokens == expected[sampling]
    for rank, report in zip(seen, engine.collective_rpc("nwor_report"), strict=True):
        assert (report["mode"], report["fault"], report["unsupported"]) == ("stage", None, None)
        assert min(rank["branched"], rank["accepted"], rank["rejected"], rank["mixed"]) > 0
        assert rank["chains"] == 0
    assert not pipeline_runs.core_of(engine).scheduler._nwor_logged


@pytest.mark.parametrize(
    "where",
    ["place", "after attend", "settle", *(pytest.param(where, marks=pytest.mark.slow) for where in SLOW)],
)
def test_a_fault_of_one_rank_alone(engine: Any, expected: Any, where: str) -> None:
    _set_stage(engine)
    assert engine.reset_prefix_cache()
    engine.collective_rpc("break_once", args=(where, 2, 1))
    tokens, seen = _probed(engine, {})
    assert tokens == expected["greedy"]
    assert engine.collective_rpc("was_broken") == ["", where]
    first, second = engine.collective_rpc("nwor_report")
    assert (first["mode"], first["fault"]) == ("stage", None)
    assert second["mode"] == "off"
    assert MESSAGE in second["fault"]
    assert seen[0]["chains"] > 0

    tokens, seen = _probed(engine, {})
    assert tokens == expected["greedy"]
    assert seen[0]["branched"] == 0
    assert seen[0]["accepted"] > 0

    _set_stage(engine)
    tokens, seen = _probed(engine, {})
    assert tokens == expected["greedy"]
    assert seen[0]["branched"] > 0
