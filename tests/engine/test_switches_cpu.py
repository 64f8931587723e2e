"""Claim: a switch of the mode takes effect with the next step, changes no token and delays no request.

Coverage: the demo model on the CPU in float32 with windows of 5 tokens, greedy; requests that come while
others run, long prompts in chunks; each of the six switches between two modes before each single step of the
same run, switches every second and third step, and switches in the middle of a step. Model runner V1; with
less work V1 and V2 with steps scheduled ahead (see runner.py).
Tolerance: none. Tokens, cache bytes and all that the scheduler decides are compared for equality: which
requests each step has, with how many tokens and drafts, and after which step each token is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from tests import pipeline_runs
from tests.engine import engines
from tests.engine.runner import sized

pytestmark = pytest.mark.engine

PROMPTS = sized(24, 12, 8)
NEW_TOKENS = sized(24, 12, 10)
#: Rows of a step. Windows of all requests leave little to prompts, and a long one takes several steps.
ROWS = 64
#: A walk through the modes that takes each of the six ways from one to another once, and ends where it began.
WALK = ["off", "stage", "cow", "off", "cow", "stage"]
assert len(set(pairwise([*WALK, WALK[0]]))) == 6


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with engines.one_at_a_time() as make:
        yield make(**engines.PROBED | {"max_num_seqs": 8, "max_num_batched_tokens": ROWS})


@dataclass
class Run:
    """What happened step by step.

    Attributes:
        tokens: of each request.
        scheduled: of each step of the scheduler, by request: its tokens, and how many of them are drafts.
        progress: of each step of the engine, by request: how many tokens it has, and whether it has ended.
        kinds: what the steps of the scheduler consist of: "chunk" of a prompt, "verify", or "both".
        verified: the mode that was asked for before each verify step, the one that it ran in, and whether it
            had a window batch.
        switches: how often which mode followed which, and what the first step after that consisted of.

    """

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    scheduled: list[dict[int, tuple[int, int]]] = field(default_factory=list)
    progress: list[dict[int, tuple[int, bool]]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    verified: list[tuple[str, str, bool]] = field(default_factory=list)
    switches: set[tuple[str, str, str]] = field(default_factory=set)


def _prompt(index: int) -> str:
    # The first is one of the long ones, so that there are steps before any request verifies.
    body = "return a + b" if index % 2 else "for i in range(10):\n        total += i\n        "
    body *= 1 if index % 4 else 8
    return f"class Item{index}:\n    def method_{index}(self, a, b):\n        {body}"


def _number(request: str) -> int:
    return int(request.split("-")[0])  # vLLM adds something random to the name


def _watch_scheduler(llm: Any, run: Run, patch: pytest.MonkeyPatch) -> None:
    scheduler = pipeline_runs.core_of(llm).scheduler
    schedule = scheduler.schedule
    computed: dict[str, int] = {}

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        drafts = output.scheduled_spec_decode_tokens
        computed.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        chunk = False
        for request, count in output.num_scheduled_tokens.items():
            computed[request] += count
            chunk |= computed[request] < scheduler.requests[request].num_prompt_tokens
        run.scheduled.append(
            {
                _number(request): (count, len(drafts.get(request, ())))
                for request, count in output.num_scheduled_tokens.items()
            }
        )
        run.kinds.append("both" if chunk and drafts else "chunk" if chunk else "verify" if drafts else "")
        return output

    patch.setattr(scheduler, "schedule", watched)


def _run(llm: Any, mode_of: Callable[[int], str], *, inside: bool = False) -> Run:
    """Run all requests, some of which come while others run.

    Args:
        llm: the engine.
        mode_of: the mode that is asked for before a step, by the step's number.
        inside: ask for it in the middle of the step before instead.

    """
    from vllm import SamplingParams

    core, run = llm.llm_engine, Run()
    rank = pipeline_runs.core_of(llm).model_executor.driver_worker.worker.model_runner.nwor
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert llm.reset_prefix_cache()
    llm.collective_rpc("nwor_set_mode", args=(mode_of(0),))
    llm.collective_rpc("probe_start")
    asked, step, came = mode_of(0), 0, 0
    with pytest.MonkeyPatch.context() as patch:
        _watch_scheduler(llm, run, patch)
        begin = rank.begin

        def watched_begin(plan: Any, *args: Any) -> None:
            nonlocal asked
            begin(plan, *args)
            if plan is not None:
                run.verified.append((asked, str(plan.mode), rank.window.batch is not None))
            if inside:
                asked = mode_of(step + 1)
                llm.collective_rpc("nwor_set_mode", args=(asked,))

        patch.setattr(rank, "begin", watched_begin)
        while came < PROMPTS or core.has_unfinished_requests():
            # Three to begin with, then one every other step, whatever the mode.
            while came < PROMPTS and came < 3 + step // 2:
                core.add_request(str(came), _prompt(came), params)
                came += 1
            before = asked
            if not inside:
                asked = mode_of(step)
                (answer,) = llm.collective_rpc("nwor_set_mode", args=(asked,))
                assert (answer["old"], answer["new"]) == (before, asked)
            steps, progress = len(run.scheduled), {}
            for output in core.step():
                tokens = run.tokens[int(output.request_id)] = tuple(output.outputs[0].token_ids)
                progress[int(output.request_id)] = len(tokens), output.finished
            run.progress.append(progress)
            if asked != before and not inside and len(run.scheduled) > steps:
                run.switches.add((before, asked, run.kinds[steps]))
            step += 1
        pipeline_runs.drain(llm)
    seen = llm.collective_rpc("probe_stop")[0]
    assert seen["wrong"] == []
    assert seen["rejected"] > PROMPTS
    assert not pipeline_runs.core_of(llm).scheduler._nwor_logged
    report = llm.collective_rpc("nwor_report")[0]
    assert (report["fault"], report["counts"]["direct_windows"]) == (None, {})
    return run


@pytest.fixture(scope="module")
def undisturbed(engine: Any) -> Run:
    run = _run(engine, lambda step: "off")
    assert len(run.tokens) == PROMPTS
    assert {"chunk", "verify", "both"} <= set(run.kinds)
    # No step but the last ones idles: a request that is held up for a step shows.
    assert all(run.scheduled[:-2])
    return run


def _compare(run: Run, undisturbed: Run) -> None:
    assert run.tokens == undisturbed.tokens
    # No request waits for a step more, and none is asked for a token more or less in any.
    assert run.scheduled == undisturbed.scheduled
    assert run.progress == undisturbed.progress


@pytest.mark.parametrize("mode", ["stage", "cow"])
def test_every_mode_takes_the_same_steps(engine: Any, undisturbed: Run, mode: str) -> None:
    run = _run(engine, lambda step: mode)
    _compare(run, undisturbed)
    assert set(run.verified) == {(mode, mode, True)}


def test_each_switch_before_each_step(engine: Any, undisturbed: Run) -> None:
    switches = set()
    for shift in range(len(WALK)):
        run = _run(engine, lambda step, shift=shift: WALK[(step + shift) % len(WALK)])
        _compare(run, undisturbed)
        # Each step runs in the mode that was asked for right before it, from its begin to its end.
        assert all(ran == asked and staged == (asked != "off") for asked, ran, staged in run.verified)
        switches |= run.switches
    ways = set(pairwise([*WALK, WALK[0]]))
    assert {(*way, kind) for way in ways for kind in ("chunk", "verify", "both")} <= switches


@pytest.mark.parametrize("period", [2, 3])
def test_switches_every_few_steps(engine: Any, undisturbed: Run, period: int) -> None:
    run = _run(engine, lambda step: WALK[step // period % len(WALK)])
    _compare(run, undisturbed)
    assert all(ran == asked for asked, ran, _ in run.verified)
    assert {ran for _, ran, _ in run.verified} == {"off", "stage", "cow"}


def test_a_switch_within_a_step_waits_for_its_end(engine: Any, undisturbed: Run) -> None:
    """A step whose window is open ends in the mode that it began in, as the cache shows."""
    run = _run(engine, lambda step: WALK[step % len(WALK)], inside=True)
    _compare(run, undisturbed)
    assert all(ran == asked and staged == (asked != "off") for asked, ran, staged in run.verified)
    assert {ran for _, ran, _ in run.verified} == {"off", "stage", "cow"}
