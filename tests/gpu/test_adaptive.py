"""Claim: with vLLM's adaptive verification windows of any mixture of lengths are staged, and counted exactly.

Coverage: the demo model in bfloat16 on model runner V2, with a bfloat16 and an fp8 cache, and without graphs
of mixed steps; budgets that are drawn for each step, none and all among them, divided by vLLM's own scores;
vLLM's own budgets; prompts of 20 to 900 tokens that come while others verify, prefix hits.
Tolerance: outputs as in test_engine.py; the draft tokens of each window, cache slots and graphs exact.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.gpu import demo_engine, near_ties

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

K, PROMPTS, NEW_TOKENS, LONG = 6, 96, 48, 900
#: Settings of NWOR by name of the engine.
ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "fp8": {},
    "pieces-and-graphs": {"mixed_graph_rows": 0},
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    with demo_engine.start(
        request.param,
        {"mode": "off", "self_check_interval": 3, **ENGINES[request.param]},
        K,
        adaptive=True,
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=4096,
        enable_prefix_caching=True,
        worker_extension_cls="tests.gpu.slot_probe.SlotProbe",
    ) as llm:
        yield llm


def _manager(llm: Any) -> Any:
    manager = demo_engine.runner(llm).adaptive_verification
    assert manager is not None
    return manager


@contextmanager
def _drawn(llm: Any, seed: int) -> Iterator[list[torch.Tensor]]:
    """Draw how many draft tokens each step verifies; yields those of each request, by step with any."""
    manager, drawn, steps = _manager(llm), random.Random(seed), []
    get_num_tokens, reallocate = manager.get_num_tokens, manager.reallocate_drafts

    def draw(num_tokens_per_req: Any, draft_tokens: Any) -> int:
        get_num_tokens(num_tokens_per_req, draft_tokens)
        drafts, others, _ = manager._batch_budget
        most = sum(drafts.values())
        budget = drawn.choice([0, most, *(drawn.randint(0, most) for _ in range(6))])
        manager._batch_budget = drafts, others, budget
        return sum(others.values()) + budget

    def watched(req_ids: Any, idx_mapping: Any) -> Any:
        made = reallocate(req_ids, idx_mapping)
        if made[2]:
            steps.append(manager._batch_draft_capacity[: len(req_ids)].clone())
        return made

    manager.get_num_tokens, manager.reallocate_drafts = draw, watched
    try:
        yield steps
    finally:
        del manager.get_num_tokens, manager.reallocate_drafts


@contextmanager
def _records(llm: Any) -> Iterator[list[Any]]:
    """Yield a list that takes each step's record."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    take, records = scheduler._nwor_take, []

    def taken(record: Any) -> None:
        records.append(record)
        take(record)

    scheduler._nwor_take = taken
    try:
        yield records
    finally:
        del scheduler._nwor_take


def _run(llm: Any, mode: str, prompts: int = PROMPTS) -> dict[str, Any]:
    """Let requests come as others end; every third begins as another one did."""
    from vllm import SamplingParams

    llm.collective_rpc("nwor_set_mode", args=(mode,))
    assert llm.reset_prefix_cache()
    llm.collective_rpc("nwor_reset_stats")
    encode = llm.get_tokenizer().encode
    ids = []
    for i in range(prompts):
        name = i // 3 if i % 3 else i
        text = f"class Item{name}:\n    def method_{name}(self, a, b):\n        return a + b\n"
        ids.append(encode(text * (1, 4, 12, 100)[i % 4])[: LONG - i % 7])
    params = [
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS + 5 * (i % 4), ignore_eos=True, logprobs=20)
        for i in range(prompts)
    ]
    outputs = llm.generate([{"prompt_token_ids": part} for part in ids], params, use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    while core.batch_queue or core.scheduler.has_requests():
        llm.llm_engine.step()
    assert core.scheduler._nwor_logged == set()
    return dict(zip(("tokens", "logprobs"), near_ties.read(outputs), strict=True))


def _report(llm: Any) -> dict[str, Any]:
    report: dict[str, Any] = llm.collective_rpc("nwor_report")[0]
    assert report["unsupported"] is None
    assert report["fault"] is None
    return report


def test_graphs_of_any_lengths_are_captured(engine: Any) -> None:
    report = _report(engine)
    print(f"graphs of stage took {report['capture_seconds']} s, {report['capture_bytes']} bytes")
    descs = demo_engine.stage_graphs(engine)._sources
    assert len(descs) > 5
    assert {(desc.uniform_token_count, desc.max_query_len) for desc in descs} == {(None, K + 1)}
    own = demo_engine.runner(engine).cudagraph_manager.captured_token_counts()
    assert {desc.num_tokens for desc in descs} == set(own)


@pytest.mark.parametrize("mode", ["off", "stage", "cow"])
def test_each_windows_draft_tokens_are_counted_as_the_device_had_them(
    engine: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = demo_engine.stage_graphs(engine)
    take, taken = stage.take, []
    monkeypatch.setattr(stage, "take", lambda desc: taken.append(take(desc)) or taken[-1])
    with _drawn(engine, 1) as steps, _records(engine) as records:
        _run(engine, mode)
    counts = _report(engine)["counts"]
    expected = [step.tolist() for step in steps]
    mixtures = sum(len(set(filter(None, step))) > 1 for step in expected)
    print(f"{mode}: {len(expected)} steps, {mixtures} of several lengths, {sum(taken)} in graphs of stage")
    assert [record.treatment.draft_counts for record in records] == expected
    assert mixtures > 30
    assert {drafts for step in expected for drafts in step} == set(range(K + 1))
    assert counts["draft_tokens"] == sum(map(sum, expected))
    assert counts["windows"] == sum(drafts > 0 for step in expected for drafts in step)
    assert counts["direct_windows"] == {}
    # Steps of windows alone replay vLLM's sizes; all of them have a graph of `stage`.
    assert (sum(taken) > 20) == (mode == "stage")
    assert all(taken)


def test_outputs_and_acceptance_are_those_of_off(engine: Any) -> None:
    runs = {}
    for mode in ("off", "stage", "cow"):
        with _drawn(engine, 2):
            runs[mode] = _run(engine, mode)
        runs[mode] |= _report(engine)["counts"]
    fp8 = engine.llm_engine.vllm_config.cache_config.cache_dtype == "fp8"
    off = runs["off"]
    for mode in ("stage", "cow"):
        seen = runs[mode]
        difference, gap = near_ties.differences(seen, off)
        steps, _ = near_ties.by_step(seen, off)
        rates = [run["accepted_tokens"] / run["draft_tokens"] for run in (seen, off)]
        print(f"{mode}: log-probabilities differ by {difference:.3f}, gaps up to {gap:.3f}, rates {rates}")
        # As in test_mixed_graphs.py.
        assert gap <= (1.2 if fp8 else near_ties.MOST_GAP)
        assert difference <= (4.0 if fp8 else near_ties.MOST_DIFFERENCE)
        assert sum(step > 1.0 for step in steps) <= (0.02 if fp8 else 0.01) * len(steps)
        # What is left of a request's drafts differs where outputs have parted.
        assert abs(rates[0] - rates[1]) < (8 if fp8 else 4) * (0.5 / off["draft_tokens"]) ** 0.5
        assert seen["rejected_tokens"] > 0


@pytest.mark.parametrize("mode", ["stage", "cow"])
def test_no_slot_of_a_rejected_token_changes(engine: Any, mode: str) -> None:
    engine.collective_rpc("probe_start")
    try:
        with _drawn(engine, 3):
            _run(engine, mode)
    finally:
        seen = engine.collective_rpc("probe_stop")[0]
    counts = _report(engine)["counts"]
    print(mode, seen)
    assert (seen["stray"], seen["unwritten"], seen["wrong"]) == (0, 0, 0)
    assert (seen["accepted"], seen["rejected"]) == (counts["accepted_tokens"], counts["rejected_tokens"])
    assert seen["rejected"] > 100
    assert seen["accepted"] > 100


def test_vllms_own_budgets(engine: Any) -> None:
    manager, budgets = _manager(engine), []
    get_num_tokens = manager.get_num_tokens

    def watched(num_tokens_per_req: Any, draft_tokens: Any) -> int:
        rows: int = get_num_tokens(num_tokens_per_req, draft_tokens)
        budgets.append((manager._batch_budget[2], sum(map(len, draft_tokens.values()))))
        return rows

    manager.get_num_tokens = watched
    try:
        off = _run(engine, "off")
        seen = _run(engine, "stage")
    finally:
        del manager.get_num_tokens
    counts = _report(engine)["counts"]
    trimmed = sum(0 < budget < whole for budget, whole in budgets)
    print(f"{trimmed} of {len(budgets)} steps trimmed, {counts['draft_tokens']} draft tokens verified")
    difference, gap = near_ties.differences(seen, off)
    fp8 = engine.llm_engine.vllm_config.cache_config.cache_dtype == "fp8"
    assert gap <= (1.2 if fp8 else near_ties.MOST_GAP)
    assert difference <= (4.0 if fp8 else near_ties.MOST_DIFFERENCE)
    assert counts["direct_windows"] == {}
    assert counts["windows"] > 0


def test_the_host_does_not_wait(engine: Any) -> None:
    def run() -> None:
        with _drawn(engine, 4):
            _run(engine, "stage", 24)

    assert demo_engine.own_synchronizations(engine, run) == []
