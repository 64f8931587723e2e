"""Claim: with two ranks of tensor parallelism, `stage` and `cow` give the tokens of `off` on both ranks.

Coverage: on the CPU in float32 with the demo model, a process for each rank, model runners V1 and V2 (see
runner.py); greedy and seeded sampling, prompts in chunks beside windows, mode switches while requests run, an
error on one rank alone.
Tolerance: none. Tokens, acceptance counts and the cache bytes of both ranks are compared for equality.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import pipeline_runs
from tests.engine import engines
from tests.engine.breaking import MESSAGE
from tests.engine.runner import AHEAD, INHERITED, V2

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(AHEAD and not INHERITED, reason="the ranks' processes would run plain V1"),
    # How vLLM's worker processes end is not what is tested.
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]

RANKS = 2
PROMPTS = 8 if V2 else 20
NEW_TOKENS = 12 if V2 else 24


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    # vLLM has torch compile the look-up of split embeddings, for which a stand-in for Triton is too little.
    environment["TORCH_COMPILE_DISABLE"] = "1"
    with engines.one_at_a_time(**environment) as make:
        yield make(
            tensor_parallel_size=RANKS,
            distributed_executor_backend="mp",
            # Blocks of the size that a server has on a CPU.
            **engines.PROBED | {"block_size": 128},
        )


def _prompts() -> list[str]:
    bodies = ["return a + b", "for i in range(10):\n        total += i", "raise ValueError(message)", "x = {"]
    return [
        f"class Item{i % 9}:\n    def method_{i}(self, a, b):\n        " + bodies[i % 4] * (1 + i % 3)
        for i in range(PROMPTS)
    ]


def _sampling(**params: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **params})


def _set_mode(llm: Any, mode: str) -> None:
    assert [answer["new"] for answer in llm.collective_rpc("nwor_set_mode", args=(mode,))] == [mode] * RANKS
    pipeline_runs.drain(llm)
    assert llm.reset_prefix_cache()


def _generate(llm: Any, mode: str, **params: Any) -> list[tuple[int, ...]]:
    _set_mode(llm, mode)
    outputs = llm.generate(_prompts(), _sampling(**params), use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(engine: Any) -> list[tuple[int, ...]]:
    """The greedy tokens of mode `off`."""
    return _generate(engine, "off")


def _counters(llm: Any) -> list[int]:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return [pipeline_runs.counter(llm, f"vllm:spec_decode_{name}") for name in names]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
def test_same_tokens_and_counts_in_every_mode_and_the_caches_of_both_ranks(
    engine: Any, params: dict[str, Any]
) -> None:
    results, counted, probed = {}, {}, {}
    for mode in ("off", "stage", "cow"):
        before, steps = _counters(engine), [r["steps"] for r in engine.collective_rpc("nwor_report")]
        engine.collective_rpc("probe_start")
        try:
            results[mode] = _generate(engine, mode, **params)
            pipeline_runs.drain(engine)
        finally:
            probed[mode] = engine.collective_rpc("probe_stop")
        counted[mode] = [now - then for now, then in zip(_counters(engine), before, strict=True)]
        reports = engine.collective_rpc("nwor_report")
        assert [report["rank"] for report in reports] == list(range(RANKS))
        for report, then, seen in zip(reports, steps, probed[mode], strict=True):
            assert (report["mode"], report["fault"], report["unsupported"]) == (mode, None, None)
            assert report["ranks"] == RANKS
            # Each rank keeps its own share of every token, and says what it was told of the counts.
            assert report["steps"] - then == seen["steps"] > 5
            assert seen["wrong"] == []
            assert seen == probed["off"][0]
            assert min(seen["rejected"], seen["accepted"], seen["mixed"]) > 0
        assert reports[0]["token_bytes"] == reports[1]["token_bytes"] > 0
        assert not pipeline_runs.core_of(engine).scheduler._nwor_logged
    assert results["stage"] == results["off"]
    assert results["cow"] == results["off"]
    assert counted["stage"] == counted["off"] == counted["cow"]
    assert counted["off"][2] > 0


def test_mode_switches_while_requests_run(engine: Any, expected: list[tuple[int, ...]]) -> None:
    _set_mode(engine, "off")
    modes = ["stage", "cow", "off", "cow", "stage", "off"]
    assert pipeline_runs.switches(engine, _prompts(), _sampling, modes) == expected


@pytest.mark.parametrize(("mode", "where"), [("stage", "stage"), ("stage", "commit"), ("cow", "restore")])
def test_a_fault_of_one_rank_alone(
    engine: Any, expected: list[tuple[int, ...]], mode: str, where: str
) -> None:
    """That rank writes directly from then on, the other goes on; neither loses anything."""
    _set_mode(engine, mode)
    engine.collective_rpc("probe_start")
    try:
        engine.collective_rpc("break_once", args=(where, 2, 1))
        outputs = engine.generate(_prompts(), _sampling(), use_tqdm=False)
        pipeline_runs.drain(engine)
    finally:
        seen = engine.collective_rpc("probe_stop")
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == expected
    assert engine.collective_rpc("was_broken") == ["", where]
    assert [rank["wrong"] for rank in seen] == [[], []]
    first, second = engine.collective_rpc("nwor_report")
    assert (first["mode"], first["fault"]) == (mode, None)
    assert second["mode"] == "off"
    assert MESSAGE in second["fault"]
