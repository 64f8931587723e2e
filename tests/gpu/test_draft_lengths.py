"""Claim: whatever number of drafts a step is given, windows are staged in graphs; outputs are as in `off`.

Coverage: the demo model in bfloat16 on model runner V2; numbers of drafts drawn anew for each step, 0 among
them, and for each request of a step; the engine's own choice; prompts that come while others verify, prefix
hits; costs measured at start-up.
Tolerance: outputs as in test_engine.py; windows, cache slots (a self-check in each step) and graphs exact.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nwor.config import DraftBounds
from nwor.engine.draft_lengths.lookup import DraftLengths
from tests.fitted_drafts import DrawnFits
from tests.gpu import demo_engine, near_ties

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

BOUNDS = DraftBounds(0, 8)
PROMPTS, NEW_TOKENS, SEQUENCES = 64, 40, 16


class Drawn:
    """Stands in for the choice: a number within the bounds for each step."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.made: list[int] = []

    def __getitem__(self, requests: int) -> int:
        self.made.append(self._random.randint(BOUNDS.least, BOUNDS.most))
        return self.made[-1]


class Fitted(Drawn):
    """Likewise, and windows are fitted to requests by chances that are drawn anew in every fourth step."""

    def __init__(self, seed: int, bounds: Any) -> None:
        super().__init__(seed)
        self.fits = DrawnFits(bounds, BOUNDS.most, seed)

    def __getitem__(self, requests: int) -> int:
        made = super().__getitem__(requests)
        if len(self.made) % 4 == 0:
            self.fits.draw(made)
        return made


@pytest.fixture(scope="module", params=["graphs", "fp8"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    with demo_engine.start(
        request.param,
        {"mode": "off", "self_check_interval": 1, "draft_tokens": str(BOUNDS), "fit_windows": True},
        BOUNDS.most,
        schedule=BOUNDS.schedule,
        max_model_len=1024,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=2048,
        enable_prefix_caching=True,
    ) as llm:
        yield llm


def _run(llm: Any, mode: str, numbers: Any = None) -> dict[str, Any]:
    """Return tokens and log-probabilities; ``numbers`` in place of the engine's choice."""
    from vllm import SamplingParams

    llm.collective_rpc("nwor_set_mode", args=(mode,))
    assert llm.reset_prefix_cache()
    llm.collective_rpc("nwor_reset_stats")
    core = llm.llm_engine.engine_core.engine_core
    own = core.scheduler.dynamic_sd_lookup
    core.scheduler.dynamic_sd_lookup = own if numbers is None else numbers
    texts = [
        f"class Item{i // 2}:\n    def method_{i // 2}(self, a, b):\n        return a + b\n"
        * (1, 3, 9, 30)[i % 4]
        for i in range(PROMPTS)
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS + i % 30, ignore_eos=True, logprobs=20)
        for i in range(PROMPTS)
    ]
    try:
        outputs = llm.generate(texts, params, use_tqdm=False)
        while core.batch_queue or core.scheduler.has_requests():
            llm.llm_engine.step()
    finally:
        core.scheduler.dynamic_sd_lookup = own
    tokens, logprobs = near_ties.read(outputs)
    return {"tokens": tokens, "logprobs": logprobs}


def _watched(engine: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return a count of the sets that graphs are replayed from, filled as steps run."""
    mixed = demo_engine.runner(engine).nwor.mixed
    used = {"windows": 0, "mixed": 0}
    prepare = mixed.prepare

    def watched(desc: Any) -> Any:
        graphs = prepare(desc)
        used["windows" if graphs is mixed.window_graphs else "mixed"] += 1
        return graphs

    monkeypatch.setattr(mixed, "prepare", watched)
    return used


@pytest.mark.parametrize("fitted", [False, True], ids=["alike", "fitted"])
def test_drawn_numbers(engine: Any, monkeypatch: pytest.MonkeyPatch, fitted: bool) -> None:
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    off = _run(engine, "off", [0] * (SEQUENCES + 1))
    used, numbers = _watched(engine, monkeypatch), Drawn(1)
    if fitted:
        numbers = Fitted(1, scheduler._nwor_bounds)
    seen = _run(engine, "stage", numbers)
    report = engine.collective_rpc("nwor_report")[0]
    counts = report["counts"]
    difference, gap = near_ties.differences(seen, off)
    same = sum(x == y for x, y in zip(seen["tokens"], off["tokens"], strict=True))
    print(used, counts["windows"], f"{same} of {PROMPTS} the same, {difference:.3f}, gaps up to {gap:.3f}")
    assert report["fault"] is None
    assert report["self_checks"] > 0
    assert set(numbers.made) == set(range(BOUNDS.most + 1))
    assert counts["windows"] > 0
    assert counts["direct_windows"] == {}
    assert min(used.values()) > 0
    fp8 = engine.llm_engine.vllm_config.cache_config.cache_dtype == "fp8"
    # As in test_engine.py: with an fp8 cache stock attention rounds the softmax's weights too.
    assert gap <= (1.2 if fp8 else near_ties.MOST_GAP)
    assert difference <= (4.0 if fp8 else near_ties.MOST_DIFFERENCE)
    assert scheduler._nwor_logged == set()
    if isinstance(numbers, Fitted):
        numbers.fits.end()
        assert numbers.fits.lengths >= {0, 1, 2}


def test_every_verify_step_replays_a_graph(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used = _watched(engine, monkeypatch)
    state = demo_engine.runner(engine).nwor.state
    before = state.steps
    _run(engine, "stage", Drawn(2))
    assert sum(used.values()) >= state.steps - before > 0


def test_costs_were_measured_and_choose(engine: Any) -> None:
    report = engine.collective_rpc("nwor_report")[0]
    assert report["draft_costs_why_not"] is None
    costs = demo_engine.runner(engine).nwor.state.draft_costs
    assert costs.drafts == BOUNDS.candidates
    assert costs.requests[-1] == SEQUENCES
    assert all(value > 0 for row in costs.seconds for value in row)
    assert len(costs.pass_seconds) == len(costs.requests)
    assert max(costs.pass_seconds) > 0
    _run(engine, "stage")
    lengths = engine.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup
    assert isinstance(lengths, DraftLengths)
    told = lengths.explain()
    print(told)
    assert told["auto"]
    assert BOUNDS.least <= told["chosen"] <= BOUNDS.most
    assert told["tokens_per_second"]


def test_the_host_does_not_wait(engine: Any) -> None:
    numbers = Drawn(3)
    assert demo_engine.own_synchronizations(engine, lambda: _run(engine, "stage", numbers)) == []
