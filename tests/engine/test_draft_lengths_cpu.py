"""Claim: whatever number of drafts each step is given, tokens are those of an engine without a drafter.

Coverage: the demo model through vLLM's engine in float32; numbers of drafts drawn anew for each step, 0 among
them, and for each request of a step; modes `off`, `stage` and `cow`, switches between them; chunked prompts.
Tolerance: none. Tokens are compared for equality, and NWOR's counts with vLLM's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from nwor.config import DraftBounds
from nwor.engine.scheduler import NworScheduling
from tests.engine import engines
from tests.engine.runner import V2, sized
from tests.fitted_drafts import DrawnFits

pytestmark = pytest.mark.engine

BOUNDS = DraftBounds(0, 6)
PROMPTS, NEW_TOKENS = sized(24, 16, 4), sized(32, 20, 10)


COMMON = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 128}


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    with engines.one_at_a_time() as make:
        yield make


@pytest.fixture(scope="module")
def expected(make: Any) -> list[list[int]]:
    """What comes without a drafter."""
    return _run(make(**COMMON, speculative_config=None))


@pytest.fixture(scope="module")
def engine(make: Any, expected: Any) -> Any:
    return make(
        **COMMON,
        additional_config={"nwor": {"mode": "off", "draft_tokens": str(BOUNDS)}},
        speculative_config=engines.eagle(BOUNDS.most)
        | {"num_speculative_tokens_per_batch_size": BOUNDS.schedule},
    )


def _scheduler(llm: Any) -> NworScheduling:
    found = llm.llm_engine.engine_core.engine_core.scheduler
    assert isinstance(found, NworScheduling)
    return found


class Drawn:
    """Stands in for the choice: a number within the bounds for each step."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.made: list[int] = []

    def __getitem__(self, requests: int) -> int:
        assert requests > 0
        self.made.append(self._random.randint(BOUNDS.least, BOUNDS.most))
        return self.made[-1]


class Fitted(Drawn):
    """Likewise, and windows are fitted to requests by chances that are drawn anew, or no longer."""

    def __init__(self, seed: int, scheduler: NworScheduling) -> None:
        super().__init__(seed)
        self.fits = DrawnFits(scheduler._nwor_bounds, BOUNDS.most, seed)

    def __getitem__(self, requests: int) -> int:
        made = super().__getitem__(requests)
        self.fits.draw(made)
        return made


def _run(llm: Any, mode: str = "", numbers: Any = None, switches: bool = False) -> list[list[int]]:
    """Return the tokens of all prompts.

    Args:
        llm: an engine.
        mode: put in force before; empty leaves it.
        numbers: draft tokens by the number of requests, read in each step.
        switches: whether the mode changes on the way.

    """
    from vllm import SamplingParams

    if mode:
        for answer in llm.collective_rpc("nwor_set_mode", args=(mode,)):
            assert answer["new"] == mode
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    before = scheduler.dynamic_sd_lookup
    scheduler.dynamic_sd_lookup = numbers
    modes = random.Random(5)
    try:
        for number in range(PROMPTS):
            words = [(number * 31 + place * 7) % 900 + 40 for place in range(6 + 9 * (number % 8))]
            params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS + number % 5, ignore_eos=True)
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": words}, params)
        found: dict[str, list[int]] = {}
        while llm.llm_engine.has_unfinished_requests():
            if switches and modes.random() < 0.3:
                llm.collective_rpc("nwor_set_mode", args=(modes.choice(["off", "stage", "cow"]),))
            for output in llm.llm_engine.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
    finally:
        scheduler.dynamic_sd_lookup = before
    return [found[str(number)] for number in range(PROMPTS)]


@pytest.mark.parametrize("mode", ["off", "stage", "cow", "switched"])
def test_tokens_do_not_depend_on_the_numbers(engine: Any, expected: list[list[int]], mode: str) -> None:
    llm, numbers = engine, Drawn(len(mode))
    report = llm.collective_rpc("nwor_report")[0]
    assert report["unsupported"] is None
    before = report["counts"]
    switched = mode == "switched"
    assert _run(llm, "stage" if switched else mode, numbers, switched) == expected
    report = llm.collective_rpc("nwor_report")[0]
    assert report["fault"] is None
    counts = report["counts"]
    assert counts["windows"] > before["windows"]
    assert counts["direct_windows"] == before["direct_windows"] or mode in ("off", "switched")
    # Numbers of all kinds were in fact used, or most where steps are few.
    assert len(set(numbers.made)) >= (4 if V2 else BOUNDS.most - BOUNDS.least + 1)
    # The scheduler compares each step's and each request's figures with vLLM's, and logs where they differ.
    assert _scheduler(llm)._nwor_logged == set()


@pytest.mark.parametrize("mode", ["off", "stage"])
def test_tokens_do_not_depend_on_which_drafts_fit(engine: Any, expected: list[list[int]], mode: str) -> None:
    scheduler = _scheduler(engine)
    numbers = Fitted(7, scheduler)
    try:
        assert _run(engine, mode, numbers) == expected
    finally:
        numbers.fits.end()
    assert scheduler._nwor_bounds.active == {}
    assert numbers.fits.lengths >= {0, 1, 2}
    report = engine.collective_rpc("nwor_report")[0]
    assert report["fault"] is None
    assert scheduler._nwor_logged == set()


def test_the_scheduler_asks_nwor(engine: Any) -> None:
    from nwor.engine.draft_lengths.lookup import DraftLengths

    lengths = _scheduler(engine).dynamic_sd_lookup
    assert isinstance(lengths, DraftLengths)
    # Nothing was measured on model runner V1, so the number is that of the start.
    assert lengths[3] == BOUNDS.fixed or V2
    fast = _scheduler(engine).fast_paths
    assert fast["scheduler_steps"] is None
