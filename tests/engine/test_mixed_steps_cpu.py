"""Claim: in a step with many more rows than its windows, no layer's tensors outlive the layer in `stage`.

Coverage: the demo model in float32 through vLLM's engine on the CPU; long prompts in chunks beside windows of
5 tokens; greedy and seeded sampling. The rows from which a step counts as large are lowered. Model runner V1;
with less work V1 and V2 with steps scheduled ahead (see runner.py).
Tolerance: none. Tokens, bytes kept alive, bytes counted and the cache's bytes are compared for equality.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import pipeline_runs
from tests.engine import engines
from tests.engine.runner import sized

pytestmark = pytest.mark.engine

PROMPTS, NEW_TOKENS = sized(16, 12, 8), sized(24, 12, 9)
#: Windows of all requests are fewer; windows beside a chunk of a prompt are more.
FEW_ROWS = 45


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """One engine; the modes and the limit are switched while it runs."""
    with engines.one_at_a_time() as make:
        yield make(**engines.PROBED | {"max_num_seqs": 8})


@pytest.fixture(autouse=True)
def _put_the_limit_back(engine: Any) -> Iterator[None]:
    before = engine.collective_rpc("set_few_rows", args=(FEW_ROWS,))[0]
    yield
    engine.collective_rpc("set_few_rows", args=(before,))


def _drain(llm: Any) -> None:
    core = pipeline_runs.core_of(llm)
    while core.batch_queue or core.scheduler.has_requests():
        llm.llm_engine.step()


def _run(llm: Any, mode: str, *, seeded: bool = False) -> list[tuple[int, ...]]:
    """Return the tokens of prompts of all lengths: while long ones are read, short ones verify."""
    from vllm import SamplingParams

    assert llm.collective_rpc("nwor_set_mode", args=(mode,))[0]["new"] == mode
    _drain(llm)
    assert llm.reset_prefix_cache()
    llm.collective_rpc("nwor_reset_stats")
    bodies = ["return a + b", "for i in range(10):\n        total += i", "raise ValueError(message)", "x = {"]
    prompts = [
        f"class Item{i}:\n    def method_{i}(self, a, b):\n        " + bodies[i % 4] * (1 + 12 * (i % 3))
        for i in range(PROMPTS)
    ]
    params = [
        SamplingParams(temperature=0.8 if seeded else 0.0, seed=7 + i, max_tokens=NEW_TOKENS, ignore_eos=True)
        for i in range(PROMPTS)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    _drain(llm)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def _watched(llm: Any, **params: Any) -> tuple[list[tuple[int, ...]], dict[str, Any], dict[str, Any]]:
    """Return the tokens in mode ``stage``, what was kept alive and copied, and the rank's figures."""
    from nwor.counts.formulas import WindowCounts
    from nwor.counts.records import Tally

    llm.collective_rpc("nwor_set_mode", args=("stage",))
    llm.collective_rpc("copies_start")
    with pipeline_runs.statistics(llm) as stats:
        try:
            tokens = _run(llm, "stage", **params)
        finally:
            seen = llm.collective_rpc("copies_stop")[0]
    report = llm.collective_rpc("nwor_report")[0]
    counts = report["counts"]
    assert (report["fault"], counts["direct_windows"]) == (None, {})
    assert seen["wrong"] == []
    assert counts["stage_bytes"] == seen["bytes"]
    kept = counts["first_tokens"] + counts["accepted_tokens"]
    assert counts["written_bytes"] == kept * report["token_bytes"] + seen["bytes"]
    # What the scheduler says of the same steps.
    total = WindowCounts()
    for told in (stat.nwor for stat in stats if getattr(stat, "nwor", None) is not None):
        total.add(Tally(told.kinds, told.extra).counts(told.token_bytes))
    assert (total.windows, total.stage_bytes) == (counts["windows"], counts["stage_bytes"])
    assert total.written_bytes == counts["written_bytes"]
    return tokens, seen, counts


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_same_tokens_and_nothing_but_copies_outlives_a_large_step(engine: Any, seeded: bool) -> None:
    expected = _run(engine, "off", seeded=seeded)
    tokens, seen, counts = _watched(engine, seeded=seeded)
    assert tokens == expected
    assert seen["copied"] > PROMPTS // 4
    # Steps of windows alone copy nothing; nor do mixed ones with few rows.
    assert seen["kept"] > PROMPTS // 4
    assert seen["bytes"] > 0
    assert counts["accepted_tokens"] > 0


def test_steps_that_count_as_small_stay_where_they_are(engine: Any) -> None:
    expected = _run(engine, "off")
    engine.collective_rpc("set_few_rows", args=(128,))
    tokens, seen, counts = _watched(engine)
    assert tokens == expected
    assert (seen["copied"], counts["stage_bytes"]) == (0, 0)
    assert seen["kept_mixed"] > PROMPTS // 4


def test_whole_cache_after_every_step(engine: Any) -> None:
    engine.collective_rpc("probe_start")
    try:
        _run(engine, "stage")
    finally:
        seen = engine.collective_rpc("probe_stop")[0]
    assert seen["wrong"] == []
    assert engine.collective_rpc("nwor_report")[0]["counts"]["stage_bytes"] > 0
    assert seen["mixed"] > 0
    assert seen["rejected"] > 0
    assert seen["accepted"] > 0
