"""Claim: on a GPU `stage` and `cow` accept what `off` accepts, and no rejected token changes the cache.

Coverage: the demo model in bfloat16 on model runners V2 and V1, each with full and piecewise CUDA graphs,
with piecewise ones only, and without any; fp8 caches with the default graphs and without any.
Tolerance: `cow` gives the tokens of `off`; those of `stage` may part from them where two logits nearly tie,
nowhere else; acceptance within counting noise; cache slots byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu import demo_engine, near_ties

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

K = 4
PROMPTS = 128
NEW_TOKENS = 64


#: Those with "v1" run on model runner V1, the others on V2.
ENGINES = ["graphs", "piecewise", "eager", "v1-graphs", "v1-piecewise", "v1-eager", "fp8", "fp8-eager"]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    with demo_engine.start(
        request.param,
        {"mode": "off", "self_check_interval": 5},
        K,
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=4096,
        worker_extension_cls="tests.gpu.slot_probe.SlotProbe",
    ) as llm:
        yield llm


def _prompts() -> list[str]:
    bodies = ["return a + b", "for i in range(10):\n        total += i", "raise ValueError(message)", "x = {"]
    return [
        f"class Item{i % 9}:\n    def method_{i}(self, a, b):\n        " + bodies[i % 4] * (1 + i % 3)
        for i in range(PROMPTS)
    ]


def _run(llm: Any, mode: str, batch: int = PROMPTS) -> tuple[list[tuple[int, ...]], list[near_ties.Steps]]:
    from vllm import SamplingParams

    llm.collective_rpc("nwor_set_mode", args=(mode,))
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
    outputs, prompts = [], _prompts()
    for start in range(0, PROMPTS, batch):
        outputs += llm.generate(prompts[start : start + batch], params, use_tqdm=False)
    # The step that was scheduled ahead is counted in the mode that it ran in.
    core = llm.llm_engine.engine_core.engine_core
    while core.batch_queue or core.scheduler.has_requests():
        llm.llm_engine.step()
    return near_ties.read(outputs)


def _delta(llm: Any, mode: str) -> dict[str, Any]:
    before = llm.collective_rpc("nwor_report")[0]["counts"]
    result = _run(llm, mode)
    report = llm.collective_rpc("nwor_report")[0]
    assert report["fault"] is None
    assert report["unsupported"] is None
    direct = {
        reason: count - before["direct_windows"].get(reason, 0)
        for reason, count in report["counts"]["direct_windows"].items()
    }
    # Prompts are those of the run before, so a step may bring one that starts from cached blocks. Where its
    # rest is as long as a window, the step may run in a full graph, and runner V1 goes direct there. Rests
    # may be that short with vLLM 0.33; 0.32 drops the last block of a hit where a drafter is one of EAGLE's.
    gone = direct.pop("graph", 0) if mode == "stage" and _may_go_direct(llm) else 0
    assert not any(direct.values()), direct
    numbers = {
        name: value - before[name] for name, value in report["counts"].items() if isinstance(value, int)
    }
    assert gone <= numbers["windows"] / 50
    assert mode != "stage" or numbers["direct_bytes"] <= gone * (1 + K) * report["token_bytes"]
    return {"tokens": result[0], "logprobs": result[1], **numbers}


def _may_go_direct(llm: Any) -> bool:
    import vllm

    return type(demo_engine.runner(llm)).__name__.endswith("V1") and not vllm.__version__.startswith("0.32.")


def _agreement(a: list[tuple[int, ...]], b: list[tuple[int, ...]]) -> float:
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def test_full_graphs_of_stage_are_captured_and_replayed(
    engine: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = request.node.callspec.params["engine"]
    runner, report = demo_engine.runner(engine), engine.collective_rpc("nwor_report")[0]
    assert type(runner).__name__.endswith("V1" if name.startswith("v1") else "V2")
    print(f"{name}: graphs of stage took {report['capture_seconds']} s, {report['capture_bytes']} bytes")
    if not name.endswith(("graphs", "fp8")):
        assert report["capture_seconds"] == 0
        return
    assert report["capture_seconds"] > 0
    stage = demo_engine.stage_graphs(engine)
    take, taken = stage.take, []
    monkeypatch.setattr(stage, "take", lambda batch: taken.append(take(batch)) or taken[-1])
    _run(engine, "stage")
    print(f"{name}: {len(taken)} steps in full graphs, {sum(taken)} in those of stage")
    assert sum(taken) > 10


def test_outputs_and_acceptance(engine: Any) -> None:
    _run(engine, "off")
    off = _delta(engine, "off")
    alone, _ = _run(engine, "off", batch=1)
    own = _agreement(off["tokens"], alone)
    fp8 = engine.llm_engine.vllm_config.cache_config.cache_dtype == "fp8"
    for mode in ("stage", "cow"):
        seen = _delta(engine, mode)
        agreement = _agreement(off["tokens"], seen["tokens"])
        difference, gap = near_ties.differences(seen, off)
        print(
            f"{mode}: agrees {agreement:.3f}, off with itself {own:.3f}; windows {seen['windows']}; ", end=""
        )
        print(f"log-probabilities differ by {difference:.3f}, outputs part at gaps up to {gap:.3f}; ", end="")
        print(f"accepted {seen['accepted_tokens']} of {seen['draft_tokens']} (off {off['accepted_tokens']})")
        rate, base = (x["accepted_tokens"] / x["draft_tokens"] for x in (seen, off))
        # In fp8 most outputs part sooner or later, so that the two counts say little of each other.
        assert abs(rate - base) < (6 if fp8 else 3) * (0.5 / off["draft_tokens"]) ** 0.5
        # Stock attention rounds a row alike in every batch, another kernel does not: what may differ is the
        # choice between near-ties. With an fp8 cache stock attention also rounds the softmax's weights to 3
        # bits, which ours does not. In a model of both in plain torch that alone makes up to 1.5, and outputs
        # part at gaps up to 0.7 (1.3 and 0.8 between an fp8 and a bfloat16 cache): keys and values on the
        # verge of two numbers in e4m3 multiply it. The largest of some 4,500 steps says little then (1.5 to
        # 2.7 with kernels that round otherwise); 0.3% of the steps differ by more than 1 with each of them.
        assert gap <= (1.2 if fp8 else near_ties.MOST_GAP)
        assert difference <= (4.0 if fp8 else near_ties.MOST_DIFFERENCE)
        steps, _ = near_ties.by_step(seen, off)
        assert sum(step > 1.0 for step in steps) <= 0.01 * len(steps)
        assert mode == "stage" or agreement >= own
        # Others attend with another kernel where each request has one row, as at the end of some.
        assert fp8 or own == 1.0 or demo_engine.BACKEND != "flash"
        assert seen["windows"] > 1000
        if mode == "stage":
            assert seen["commit_bytes"] > 0


@pytest.mark.parametrize("mode", ["stage", "cow"])
def test_no_slot_of_a_rejected_token_changes(engine: Any, mode: str) -> None:
    engine.collective_rpc("probe_start", args=(_may_go_direct(engine),))
    try:
        _run(engine, mode)
    finally:
        seen = engine.collective_rpc("probe_stop")[0]
    print(mode, seen)
    assert seen["stray"] == 0
    assert seen["unwritten"] == 0
    assert seen["wrong"] == 0
    assert seen["rejected"] > 100
    assert seen["accepted"] > 100
    assert engine.collective_rpc("nwor_report")[0]["fault"] is None


def test_no_host_synchronization_is_added(engine: Any) -> None:
    """In `stage` torch sees no more synchronizing calls in a step than in `off`."""
    import warnings

    def synchronizations(mode: str) -> int:
        engine.collective_rpc("nwor_set_mode", args=(mode,))
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.generate(_prompts()[:4], params, use_tqdm=False)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(entry.message) for entry in caught)

    check = engine.llm_engine.vllm_config.additional_config["nwor"]
    assert check["self_check_interval"] == 5
    rank = demo_engine.runner(engine).nwor
    object.__setattr__(rank.state.config, "self_check_interval", 0)
    try:
        synchronizations("off")
        off = synchronizations("off")
        assert synchronizations("stage") <= off
    finally:
        object.__setattr__(rank.state.config, "self_check_interval", 5)
