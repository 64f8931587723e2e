"""Claim: on the CPU in float32, `stage` and `cow` give the tokens of `off`, and leave the cache as they must.

Coverage: the demo model through vLLM's engine; greedy and seeded sampling; windows of 2, 5 and 9 tokens;
batches of 1 to 16 requests, mixed with chunked prefill and prefix hits; mode switches between and during
requests. Model runner V1; with less work V1 and V2 with steps scheduled ahead (see runner.py).
Tolerance: none. Tokens, acceptance counts and cache bytes are compared for equality.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import pipeline_runs
from tests.engine import engines
from tests.engine.runner import AHEAD, V2, sized

pytestmark = pytest.mark.engine

WINDOWS = [4] if AHEAD else [1, 4, 8]
#: No two are alike. On V1 they are more than a step takes, so that rows of the batch are used again.
PROMPTS = sized(48, 24, 8)
NEW_TOKENS = sized(24, 12, 9)
#: Our name and vLLM's for the same count.
PAIRS = (
    ("windows", "num_drafts"),
    ("draft_tokens", "num_draft_tokens"),
    ("accepted_tokens", "num_accepted_tokens"),
)


@pytest.fixture(scope="module", params=WINDOWS, ids=lambda k: f"k{k}")
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One engine for each window length; its modes are switched while it runs."""
    with engines.one_at_a_time() as make:
        llm = make(**engines.PROBED, speculative_config=engines.eagle(request.param))
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == AHEAD
        runner = "nwor.engine.model_runner.v2" if V2 else "nwor.engine.model_runner.v1"
        assert llm.collective_rpc("runner_module")[0].startswith(runner)
        yield llm


def _prompts() -> list[str]:
    bodies = ["return a + b", "for i in range(10):\n        total += i", "raise ValueError(message)", "x = {"]
    return [
        f"class Item{i % 9}:\n    def method_{i}(self, a, b):\n        " + bodies[i % 4] * (1 + i % 3)
        for i in range(PROMPTS)
    ]


def _set_mode(llm: Any, mode: str) -> None:
    for answer in llm.collective_rpc("nwor_set_mode", args=(mode,)):
        assert answer["new"] == mode


def _run(llm: Any, mode: str, *, seeded: bool = False, batch: int = PROMPTS) -> list[tuple[int, ...]]:
    """Return the tokens of all prompts; of half of them one at a time, which takes as long as all at once."""
    from vllm import SamplingParams

    _set_mode(llm, mode)
    # A prefix hit changes what the drafter sees, and with it the number of windows.
    assert llm.reset_prefix_cache()
    prompts = _prompts()[: PROMPTS if batch > 1 else PROMPTS // 2]
    tokens: list[tuple[int, ...]] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        params = [
            SamplingParams(
                temperature=0.8 if seeded else 0.0,
                seed=1000 + start + i,
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
            )
            for i in range(len(part))
        ]
        outputs = llm.generate(part, params, use_tqdm=False)
        tokens.extend(tuple(output.outputs[0].token_ids) for output in outputs)
    return tokens


@pytest.fixture(scope="module")
def expected(engine: Any) -> list[tuple[int, ...]]:
    """The greedy tokens of mode `off`."""
    return _run(engine, "off")


def _mismatches(llm: Any) -> set[str]:
    """Return the names of figures that the scheduler found to differ from vLLM's since the start."""
    names: set[str] = llm.llm_engine.engine_core.engine_core.scheduler._nwor_logged
    return names


def _counters(llm: Any) -> dict[str, int]:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    values = {metric.name: metric for metric in llm.get_metrics()}
    return {name: values[f"vllm:spec_decode_{name}"].value for name in names}


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_same_tokens_and_acceptance_in_every_mode(engine: Any, seeded: bool) -> None:
    results, counted = {}, {}
    for mode in ("off", "stage", "cow"):
        before = _counters(engine)
        own_before = engine.collective_rpc("nwor_report")[0]["counts"]
        results[mode] = _run(engine, mode, seeded=seeded)
        after = _counters(engine)
        own = engine.collective_rpc("nwor_report")[0]["counts"]
        counted[mode] = {name: after[name] - before[name] for name in after}
        # Our own counts are vLLM's, over the same steps. Where steps are scheduled ahead, the workers verify
        # for requests that have just ended, too; vLLM does not count those. The scheduler compares the rest.
        late = 2 * PROMPTS if AHEAD else 0
        for ours, theirs in PAIRS:
            more = own[ours] - own_before[ours] - counted[mode][theirs]
            assert 0 <= more <= late * (1 if ours == "windows" else max(WINDOWS))
        assert _mismatches(engine) == set()
    assert counted["off"]["num_accepted_tokens"] > 0
    assert results["stage"] == results["off"]
    assert results["cow"] == results["off"]
    assert counted["stage"] == counted["off"] == counted["cow"]


def test_batch_size_does_not_matter(engine: Any, expected: list[tuple[int, ...]]) -> None:
    assert _run(engine, "stage", batch=1) == expected[: PROMPTS // 2]


@pytest.mark.parametrize("mode", ["off", "stage", "cow"])
def test_whole_cache_after_every_step(engine: Any, mode: str) -> None:
    engine.collective_rpc("probe_start")
    try:
        _run(engine, mode)
    finally:
        seen = engine.collective_rpc("probe_stop")[0]
    assert seen["wrong"] == []
    assert seen["steps"] > PROMPTS // 4
    assert seen["mixed"] > 0
    assert seen["rejected"] > PROMPTS // 2
    assert seen["accepted"] > 0


def test_prefix_hits_do_not_change_tokens(engine: Any) -> None:
    from vllm import SamplingParams

    # Long enough for hits, of which vLLM leaves out the last block where an EAGLE head drafts.
    prompts = [prompt * 4 for prompt in _prompts()[: PROMPTS // 4]]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert engine.reset_prefix_cache()
    results, hits = [], []
    for mode in ("off", "stage", "cow", "stage"):
        _set_mode(engine, mode)
        before = pipeline_runs.counter(engine, "vllm:prefix_cache_hits")
        outputs = engine.generate(prompts, params, use_tqdm=False)
        hits.append(pipeline_runs.counter(engine, "vllm:prefix_cache_hits") - before)
        results.append([tuple(output.outputs[0].token_ids) for output in outputs])
    assert results[1:] == results[:1] * 3
    assert hits[0] < min(hits[1:])


def test_savings_are_the_rejected_tokens(engine: Any) -> None:
    before = engine.collective_rpc("nwor_report")[0]
    _run(engine, "stage")
    after = engine.collective_rpc("nwor_report")[0]
    delta = {
        name: after["counts"][name] - before["counts"][name] for name in ("rejected_tokens", "commit_bytes")
    }
    assert after["unsupported"] is None
    assert after["counts"]["direct_windows"] == before["counts"]["direct_windows"]
    kept = sum(after["counts"][n] - before["counts"][n] for n in ("first_tokens", "accepted_tokens"))
    assert delta["commit_bytes"] == kept * after["token_bytes"]
    assert delta["rejected_tokens"] > 0


def test_mode_switches_while_requests_run(engine: Any, expected: list[tuple[int, ...]]) -> None:
    from vllm import SamplingParams

    expected = expected[:16]
    _set_mode(engine, "off")
    assert engine.reset_prefix_cache()
    core = engine.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(_prompts()[:16]):
        core.add_request(str(index), prompt, params)
    modes = ["stage", "cow", "off"]
    done: dict[str, tuple[int, ...]] = {}
    step = 0
    while core.has_unfinished_requests():
        _set_mode(engine, modes[step % 3])
        for output in core.step():
            if output.finished:
                done[output.request_id] = tuple(output.outputs[0].token_ids)
        step += 1
    assert step > 3
    assert [done[str(index)] for index in range(len(expected))] == expected
