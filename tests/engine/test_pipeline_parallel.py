"""Claim: with two pipeline stages, `stage` and `cow` give the tokens of `off`, and no stage reads stale keys.

Coverage: on the CPU in float32 with the demo model on model runner V2 (see runner.py), a process for each
stage; greedy and seeded sampling; prompts in chunks, prefix hits on what others have just made, aborts and
preemption with windows pending, mode switches while requests run.
Tolerance: tokens, acceptance counts, cache bytes and figures none; keys that are read 1e-4, since they were
computed in other batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests import pipeline_runs
from tests.engine import engines
from tests.engine.runner import INHERITED

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not INHERITED, reason="needs runner V2 in every stage: test_runner_v2.py runs this"),
]

STAGES = 2
NEW_TOKENS = 16
#: Small, so that blocks of the prefix cache fill up with generated tokens.
BLOCK_SIZE = 32
PROMPTS = [
    f"class Item{i}:\n    def method_{i}(self, a, b):\n        " + body * (1 + i % 3)
    for i, body in enumerate(["return a + b", "for i in a:\n        b += i", "raise ValueError(a)"] * 2)
]


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., Any]]:
    """Start engines, one at a time: the one before ends when the next is asked for."""
    few: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 96}
    few |= {"block_size": BLOCK_SIZE, "pipeline_parallel_size": STAGES, "distributed_executor_backend": "mp"}
    few["additional_config"] = {"nwor": {"mode": "off", "self_check_interval": 3}}
    few["worker_extension_cls"] = "tests.engine.stage_probe.StageProbe"
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with engines.one_at_a_time(**threads) as make:
        yield lambda **settings: make(**{**few, **settings})


@pytest.fixture
def engine(make_engine: Callable[..., Any]) -> Any:
    return make_engine()


def _sampling(**params: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **params})


def _counters(llm: Any) -> list[int]:
    values = {metric.name: metric for metric in llm.get_metrics()}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return [values[f"vllm:spec_decode_{name}"].value for name in names]


def _generate(llm: Any, prompts: Sequence[Any] = PROMPTS, **params: Any) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, _sampling(**params), use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def _watched(llm: Any, mode: str, run: Callable[[], Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Return what ``run`` gives in a mode, and what the stages saw, after the checks that always hold."""
    for answer in llm.collective_rpc("nwor_set_mode", args=(mode,)):
        assert answer["new"] == mode
    pipeline_runs.drain(llm)
    assert llm.reset_prefix_cache()
    llm.collective_rpc("nwor_reset_stats")
    llm.collective_rpc("probe_start")
    try:
        with pipeline_runs.statistics(llm) as stats:
            result = run()
            pipeline_runs.drain(llm)
    finally:
        seen = llm.collective_rpc("probe_stop")
    first, last = llm.collective_rpc("nwor_report")
    for stage, report in zip(seen, (first, last), strict=True):
        assert stage["wrong"] == []
        assert (report["fault"], report["unsupported"]) == (None, None)
        assert mode == "off" or report["self_checks"] > 0
    assert pipeline_runs.core_of(llm).scheduler._nwor_logged == set()
    assert first["counts"]["windows"] == 0
    counts = last["counts"]
    assert counts["direct_windows"] == {}
    # The figures are what was moved, on both stages together, to the byte.
    for path in ("commit", "stage", "log", "restore"):
        assert counts[f"{path}_bytes"] == sum(stage["bytes"][path] for stage in seen)
    told = [stat.nwor for stat in stats if getattr(stat, "nwor", None) is not None]
    _compare_with_counters(told, counts)
    assert counts["baseline_bytes"] == (counts["first_tokens"] + counts["draft_tokens"]) * sum(
        report["token_bytes"] for report in (first, last)
    )
    return result, seen


def _compare_with_counters(told: Sequence[Any], counts: dict[str, Any]) -> None:
    from nwor.counts.formulas import WindowCounts
    from nwor.counts.records import Tally

    total = WindowCounts()
    for figures in told:
        total.add(Tally(figures.kinds, figures.extra).counts(figures.token_bytes))
    for name in ("windows", "accepted_tokens", "baseline_bytes", "stage_bytes", "written_bytes"):
        assert getattr(total, name) == counts[name]


@pytest.fixture(scope="module")
def expected(make_engine: Callable[..., Any]) -> list[tuple[int, ...]]:
    """The greedy tokens of requests that nothing disturbs."""
    return _generate(make_engine())


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
def test_same_tokens_and_acceptance_in_every_mode(engine: Any, params: dict[str, Any]) -> None:
    results, counted = {}, {}
    for mode in ("off", "stage", "cow"):
        before = _counters(engine)
        results[mode], seen = _watched(engine, mode, lambda: _generate(engine, **params))
        counted[mode] = [now - then for now, then in zip(_counters(engine), before, strict=True)]
        for stage in seen:
            assert stage["steps"] > 5
            if mode != "off":
                assert stage["verified"] > 5
                assert stage["rejected"] > 10
                assert stage["accepted"] > 10
    assert results["stage"] == results["off"] == results["cow"]
    assert counted["stage"] == counted["off"] == counted["cow"]
    assert counted["off"][2] > 0


def test_large_steps_copy_their_windows_once_on_every_stage(engine: Any) -> None:
    """Beside long prompts; also where stages before the last copy in every step, as with CUDA graphs."""
    prompts = [prompt * (1 + 5 * (i % 2)) for i, prompt in enumerate(PROMPTS)]

    def run() -> list[tuple[int, ...]]:
        return _generate(engine, prompts)

    expected, _ = _watched(engine, "off", run)
    copied = []
    # No step, in layers of large steps, in both, after the forward pass alone.
    for rows, always in ((64, False), (20, False), (20, True), (64, True)):
        before = engine.collective_rpc("set_copies", args=(rows, always))[0]
        try:
            result, seen = _watched(engine, "stage", run)
        finally:
            engine.collective_rpc("set_copies", args=before)
        assert result == expected
        copied.append([stage["bytes"]["stage"] for stage in seen])
    none, large, both, afterwards = copied
    assert none == [0, 0]
    assert min(large) > 0
    assert both == [afterwards[0], large[1]]
    assert afterwards[0] > large[0]
    assert afterwards[1] == 0


@pytest.mark.parametrize("pause", [False, True], ids=["ahead", "after-a-pause"])
def test_prefix_hits_on_what_others_have_just_made(engine: Any, pause: bool) -> None:
    """Requests come with what a running one has got so far, while it goes on and right as it ends."""
    start = engine.get_tokenizer().encode(PROMPTS[0] * 4)[: 3 * BLOCK_SIZE - 5]

    def run() -> tuple[int, ...]:
        return pipeline_runs.prefix_hits(engine, start, _sampling, tokens=60, pause=pause)

    results = {}
    for mode in ("off", "stage", "cow"):
        results[mode], seen = _watched(engine, mode, run)
        if pause and mode != "off":
            assert seen[0]["heard_early"] > 0
    assert results["stage"] == results["off"] == results["cow"]


def test_aborts_with_windows_pending(engine: Any, expected: list[tuple[int, ...]]) -> None:
    """Others go on as if nothing had been, and the freed blocks serve the next requests."""
    # The first three are aborted, and started anew under other names.
    wanted = {index + 100 * (index < 3): tokens for index, tokens in enumerate(expected)}
    for mode in ("off", "stage", "cow"):
        result, seen = _watched(engine, mode, lambda: pipeline_runs.aborts(engine, PROMPTS, _sampling))
        assert result == wanted
        if mode == "stage":
            assert seen[0]["cut_short"] > 0


def test_mode_switches_while_requests_run(engine: Any, expected: list[tuple[int, ...]]) -> None:
    modes = ["stage", "cow", "off", "stage", "off", "cow"]
    result, _ = _watched(engine, "stage", lambda: pipeline_runs.switches(engine, PROMPTS, _sampling, modes))
    assert result == expected


def test_preemption_with_windows_pending(make_engine: Callable[..., Any]) -> None:
    # Every request needs another block soon, and there are not enough for all.
    few = {"num_gpu_blocks_override": len(PROMPTS) * 2 + 3, "max_model_len": 256}
    llm = make_engine(max_num_batched_tokens=512, **few)
    encode = llm.get_tokenizer().encode
    prompts = [{"prompt_token_ids": encode(prompt * 8)[: 2 * BLOCK_SIZE - 8]} for prompt in PROMPTS]

    def preemptions() -> int:
        return next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")

    def run() -> list[tuple[int, ...]]:
        before = preemptions()
        result = _generate(llm, prompts, max_tokens=28)
        assert preemptions() > before
        return result

    results = {mode: _watched(llm, mode, run)[0] for mode in ("off", "stage", "cow")}
    assert results["stage"] == results["off"] == results["cow"]
