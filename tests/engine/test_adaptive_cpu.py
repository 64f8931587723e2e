"""Claim: where the device trims windows, each to its own length, `stage` and `cow` are as exact as elsewhere.

Coverage: the demo model in float32 through vLLM's engine on the CPU, on model runner V2 with steps scheduled
ahead; vLLM's adaptive verification with drawn budgets and scores (adaptive_stand_in.py); greedy and seeded
sampling; prompts in chunks beside windows, prefix hits, faults.
Tolerance: none. Tokens, the cache's bytes, and the draft tokens of each window are compared for equality.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import pipeline_runs
from tests.engine import engines
from tests.engine.runner import V2

pytestmark = [pytest.mark.engine, pytest.mark.skipif(not V2, reason="vLLM trims on runner V2 alone")]

PROMPTS, NEW_TOKENS, K = 8, 12, 4


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """One engine; modes and trimming are switched while it runs."""
    with engines.one_at_a_time() as make:
        yield make(**engines.PROBED, speculative_config=engines.eagle(K))


def _drain(llm: Any) -> None:
    core = pipeline_runs.core_of(llm)
    while core.batch_queue or core.scheduler.has_requests():
        llm.llm_engine.step()


def _run(
    llm: Any, mode: str, *, seeded: bool = False, times: int = 1, requests: int = PROMPTS
) -> list[tuple[int, ...]]:
    """Return the tokens of prompts of all lengths: while long ones are read, short ones verify."""
    from vllm import SamplingParams

    assert llm.collective_rpc("nwor_set_mode", args=(mode,))[0]["new"] == mode
    assert llm.reset_prefix_cache()
    llm.collective_rpc("nwor_reset_stats")
    bodies = ["return a + b", "for i in range(10):\n        total += i", "raise ValueError(message)", "x = {"]
    prompts = [
        f"class Item{i}:\n    def method_{i}(self, a, b):\n        " + bodies[i % 4] * (1 + 12 * (i % 3))
        for i in range(requests)
    ]
    params = [
        SamplingParams(temperature=0.8 if seeded else 0.0, seed=7 + i, max_tokens=NEW_TOKENS, ignore_eos=True)
        for i in range(requests)
    ]
    tokens: list[tuple[int, ...]] = []
    for _ in range(times):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        _drain(llm)
        tokens += [tuple(output.outputs[0].token_ids) for output in outputs]
    return tokens


def _trimmed(llm: Any, mode: str, seed: int = 1, **run: Any) -> dict[str, Any]:
    """Return tokens, what was trimmed, what the probe saw, each step's record, and the rank's report."""
    from tests.engine.adaptive_stand_in import trimmed

    core = pipeline_runs.core_of(llm)
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
    take, records = scheduler._nwor_take, []

    def taken(record: Any) -> None:
        records.append(record)
        take(record)

    scheduler._nwor_take = taken
    llm.collective_rpc("probe_start")
    try:
        with trimmed(runner, seed) as drawn:
            tokens = _run(llm, mode, **run)
    finally:
        del scheduler._nwor_take
        seen = llm.collective_rpc("probe_stop")[0]
    report = llm.collective_rpc("nwor_report")[0]
    return {"tokens": tokens, "drawn": drawn, "seen": seen, "records": records, "report": report}


@pytest.fixture(scope="module")
def greedy(engine: Any) -> list[tuple[int, ...]]:
    """The tokens of mode `off` where nothing is trimmed."""
    return _run(engine, "off")


@pytest.mark.parametrize("mode", ["off", "stage", "cow"])
def test_tokens_cache_and_counts(engine: Any, greedy: list[tuple[int, ...]], mode: str) -> None:
    got = _trimmed(engine, mode)
    drawn, seen, counts = got["drawn"], got["seen"], got["report"]["counts"]
    assert got["tokens"] == greedy
    assert seen["wrong"] == []
    # The draw gives windows of all lengths, most of them beside others, and leaves out much.
    assert {drafts for step in drawn.steps for drafts in step} == set(range(K + 1))
    assert sum(len(set(filter(None, step))) > 1 for step in drawn.steps) > 5
    verified = sum(map(sum, drawn.steps))
    assert verified < 0.9 * drawn.scheduled
    # Each step's record has the draft tokens of each of its requests, as the device had them.
    assert [record.treatment.draft_counts for record in got["records"]] == drawn.steps
    assert counts["draft_tokens"] == verified == seen["accepted"] + seen["rejected"]
    assert counts["windows"] == sum(drafts > 0 for step in drawn.steps for drafts in step)
    assert counts["accepted_tokens"] == seen["accepted"] > 0
    assert counts["direct_windows"] == {}
    token = counts["baseline_bytes"] // (counts["windows"] + verified)
    if mode == "stage":
        assert counts["outcomes"] == {"committed": counts["windows"]}
        assert counts["staged_tokens"] == counts["windows"] + verified
        assert counts["saved_bytes"] == seen["rejected"] * token > 0
    if mode == "cow":
        assert counts["log_bytes"] == verified * token
        assert counts["restore_bytes"] == seen["rejected"] * token
    assert pipeline_runs.core_of(engine).scheduler._nwor_logged == set()


def test_modes_agree_in_seeded_sampling(engine: Any) -> None:
    off = _trimmed(engine, "off", seed=2, seeded=True)
    for mode in ("stage", "cow"):
        got = _trimmed(engine, mode, seed=2, seeded=True)
        assert got["tokens"] == off["tokens"]
        assert got["drawn"].steps == off["drawn"].steps
        assert got["seen"]["wrong"] == []


@pytest.mark.parametrize("mode", ["stage", "cow"])
def test_rows_that_others_of_the_step_read(
    engine: Any, greedy: list[tuple[int, ...]], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rows of trimmed windows are written as the layers run where a request starts from blocks."""
    from nwor.engine.trimmed_drafts import TrimmedDrafts

    asked = []
    rows = TrimmedDrafts.rows
    monkeypatch.setattr(TrimmedDrafts, "rows", lambda self, *args: asked.append(self) or rows(self, *args))
    monkeypatch.setattr("nwor.engine.model_runner.v2.takes_over_blocks", lambda scheduled: True)
    got = _trimmed(engine, mode, seed=3)
    assert got["tokens"] == greedy
    assert got["seen"]["wrong"] == []
    assert (len(asked) > 5) == (mode == "stage")


def test_prefix_hits(engine: Any, greedy: list[tuple[int, ...]]) -> None:
    got = _trimmed(engine, "stage", seed=4, times=2)
    assert got["tokens"] == greedy * 2
    assert got["seen"]["wrong"] == []


@pytest.mark.parametrize("where", ["stage", "attend", "commit"])
def test_after_a_fault_the_rest_is_direct_and_counted(
    engine: Any, greedy: list[tuple[int, ...]], where: str
) -> None:
    engine.collective_rpc("break_once", args=(where, 3))
    got = _trimmed(engine, "stage", seed=5)
    drawn, counts = got["drawn"], got["report"]["counts"]
    assert got["report"]["fault"] is not None
    assert got["tokens"] == greedy
    assert got["seen"]["wrong"] == []
    assert [record.treatment.draft_counts for record in got["records"]] == drawn.steps
    assert counts["draft_tokens"] == sum(map(sum, drawn.steps))
    assert 0 < sum(counts["direct_windows"].values()) < counts["windows"]
