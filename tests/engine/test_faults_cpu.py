"""Claim: an error in any part of NWOR turns it off, and costs no token, no request and no byte of the cache.

Coverage: the demo model on the CPU in float32 with windows of 5 tokens, greedy, with prompts in chunks beside
windows; an error in planning a step, opening its window, staging, attending, splitting a batch, committing,
measuring the commit, logging and restoring, before and after the part has done its work. Model runner V1;
with less work V1 and V2 with steps scheduled ahead (see runner.py).
Tolerance: none. Tokens and cache bytes are compared for equality, after every step, the failing one included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine import engines
from tests.engine.breaking import MESSAGE
from tests.engine.runner import sized

pytestmark = pytest.mark.engine

#: Not all prompts fit into a step, so that windows run beside chunks.
PROMPTS = sized(20, 10, 6)
NEW_TOKENS = sized(24, 12, 9)

#: The mode, what raises, and in which of the steps with windows.
FAULTS = [
    ("stage", "plan", 2),
    ("stage", "begin", 2),
    ("stage", "after begin", 2),
    ("stage", "stage", 0),
    ("stage", "stage", 2),
    ("stage", "after stage", 2),
    ("stage", "attend", 2),
    ("stage", "after attend", 2),
    ("stage", "split", 0),
    ("stage", "commit", 2),
    ("stage", "launch", 2),
    ("stage", "after commit", 2),
    ("stage", "timing", 2),
    ("cow", "plan", 2),
    ("cow", "begin", 2),
    ("cow", "log", 0),
    ("cow", "log", 2),
    ("cow", "after log", 2),
    ("cow", "commit", 2),
    ("cow", "restore", 2),
    ("cow", "after restore", 2),
    ("cow", "timing", 2),
]
#: Where all is committed when something fails, so that no window counts as written directly.
COMMITTED = ("after commit", "timing")


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with engines.one_at_a_time() as make:
        yield make(**engines.PROBED)


def _run(llm: Any, prompts: int = PROMPTS) -> list[tuple[int, ...]]:
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    bodies = ["return a + b", "for i in range(10):\n        total += i", "raise ValueError(message)", "x = {"]
    texts = [
        f"class Item{i % 9}:\n    def method_{i}(self, a, b):\n        " + bodies[i % 4] * (1 + i % 3)
        for i in range(prompts)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(texts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == NEW_TOKENS for output in outputs)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(engine: Any) -> list[tuple[int, ...]]:
    engine.collective_rpc("nwor_set_mode", args=("off",))
    return _run(engine)


def _report(llm: Any) -> dict[str, Any]:
    report: dict[str, Any] = llm.collective_rpc("nwor_report")[0]
    return report


@pytest.mark.parametrize(("mode", "where", "steps"), FAULTS)
def test_a_fault_costs_nothing_and_turns_nwor_off(
    engine: Any, expected: list[tuple[int, ...]], mode: str, where: str, steps: int
) -> None:
    engine.collective_rpc("nwor_set_mode", args=(mode,))
    before = _report(engine)
    assert (before["mode"], before["fault"]) == (mode, None)  # the fault of the case before is forgotten
    engine.collective_rpc("probe_start")
    try:
        engine.collective_rpc("break_once", args=(where, steps))
        assert _run(engine) == expected
        # The engine goes on serving, with nothing but direct writes.
        assert _run(engine, 2) == expected[:2]
    finally:
        seen = engine.collective_rpc("probe_stop")[0]
    assert engine.collective_rpc("was_broken")[0] == where
    assert seen["wrong"] == []
    report = _report(engine)
    assert report["mode"] == "off"
    assert f"{MESSAGE}: {where}" in report["fault"]
    assert report["switches"] == before["switches"] + 1
    # Each window of the failing step is counted with the reason, and no other.
    assert seen["failed"] > 0
    assert seen["direct"] == (0 if where in COMMITTED else seen["failed"])
    counts, counted = report["counts"]["direct_windows"], before["counts"]["direct_windows"]
    assert counts.get("fault", 0) - counted.get("fault", 0) == seen["direct"]
    assert not engine.llm_engine.engine_core.engine_core.scheduler._nwor_logged


@pytest.mark.parametrize("mode", ["stage", "cow"])
def test_a_mode_put_in_force_again_holds(engine: Any, expected: list[tuple[int, ...]], mode: str) -> None:
    engine.collective_rpc("nwor_set_mode", args=(mode,))
    before = _report(engine)
    assert _run(engine) == expected
    report = _report(engine)
    assert (report["mode"], report["fault"]) == (mode, None)
    assert report["counts"]["direct_windows"] == before["counts"]["direct_windows"]
    assert report["counts"]["windows"] > before["counts"]["windows"]
