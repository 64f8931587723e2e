"""Claim: where each step's windows are trees, chains or none, by choice, tokens are those without a drafter.

Coverage: the demo model on the CPU in float32, model runner V2, kernels interpreted; a number of draft tokens
drawn anew for each step, chains up to a tree's depth and whole trees among them; the cache after each step;
switches of the mode; bounds of a request; trees of each depth; then the engine's own choice by what it has
measured.
Control: trees branch, chains are verified, and steps without drafts run.
Tolerance: none for tokens and for the bytes that a step writes.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nwor.config import DraftBounds
from nwor.tree_shape import TreeShape
from tests import pipeline_runs
from tests.engine import contexts, engines, tree_stand_ins
from tests.engine.runner import V2
from tests.engine.test_trees_cpu import make_engine, plain  # noqa: F401
from tests.engine.tree_runs import SETTINGS, check_steps, drive

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not V2, reason="run by test_runner_v2.py: trees need runner V2"),
]

TREE = {"nodes": 8, "depth": 4, "width": 3, "kind": "grown"}
SHAPE = TreeShape.from_mapping(TREE)
BOUNDS = DraftBounds().with_tree(SHAPE)


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Any], plain: Any) -> Iterator[Any]:  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        tree_stand_ins.install(patch.setattr)
        speculation = engines.eagle(BOUNDS.most)
        speculation["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in BOUNDS.schedule]
        nwor = {"mode": "stage", "tree": TREE, "draft_tokens": "auto", "self_check_interval": 2}
        # Room for what is measured at the start.
        room = {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 24, "max_model_len": 256}
        yield make_engine(**SETTINGS | room, speculative_config=speculation, additional_config={"nwor": nwor})


class Drawn:
    """Stands in for the choice: one of the candidates for each step, all of them before any comes again."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._left: list[int] = []
        self.made: list[int] = []

    def __getitem__(self, requests: int) -> int:
        if not self._left:
            self._left = self._random.sample(BOUNDS.candidates, len(BOUNDS.candidates))
        self.made.append(self._left.pop())
        return self.made[-1]


@pytest.mark.parametrize("switched", [False, True])
def test_tokens_do_not_depend_on_what_windows_are(
    engine: Any,
    plain: Any,  # noqa: F811
    switched: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, numbers, modes = engine, Drawn(3), random.Random(5)
    scheduler = pipeline_runs.core_of(llm).scheduler
    requests = plain.requests["greedy"]
    assert llm.collective_rpc("nwor_set_mode", args=("stage",))
    pipeline_runs.drain(llm)
    assert llm.reset_prefix_cache()
    before = llm.collective_rpc("nwor_report")[0]
    assert before["unsupported"] is None
    monkeypatch.setattr(scheduler, "dynamic_sd_lookup", numbers)
    llm.collective_rpc("probe_start")

    def before_step(step: int) -> None:
        if switched and modes.random() < 0.3:
            llm.collective_rpc("nwor_set_mode", args=(modes.choice(["off", "stage", "cow"]),))

    try:
        with contexts.read(llm, plain.contexts, tolerance=1e-4) as read:
            done = drive(llm, requests, before_step)
            pipeline_runs.drain(llm)
    finally:
        seen = llm.collective_rpc("probe_stop")[0]
    report = llm.collective_rpc("nwor_report")[0]
    assert done == {str(index): tokens for index, tokens in enumerate(plain.tokens("greedy"))}
    assert report["fault"] is None
    assert seen["wrong"] == []
    assert read.wrong == []
    assert set(numbers.made) == set(BOUNDS.candidates)
    assert seen["chains"] > 0
    if not switched:
        assert seen["branched"] > 0
        assert report["counts"]["direct_windows"] == before["counts"]["direct_windows"]
    assert not scheduler._nwor_logged


@pytest.mark.parametrize("drafts", SHAPE.choices)
def test_trees_of_each_depth_are_those_of_an_independent_decoder(
    engine: Any,
    plain: Any,  # noqa: F811
    drafts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number of draft tokens stands for a depth; what deeper trees found before is not among its nodes."""
    llm = engine
    assert llm.collective_rpc("nwor_set_mode", args=("stage",))
    pipeline_runs.drain(llm)
    assert llm.reset_prefix_cache()
    numbers = collections.defaultdict(lambda: drafts)
    monkeypatch.setattr(pipeline_runs.core_of(llm).scheduler, "dynamic_sd_lookup", numbers)
    depth = SHAPE.depth_of(drafts)
    accepted = check_steps(llm, plain.requests["greedy"][0][0], depth, TREE, monkeypatch)
    assert accepted[drafts] > 2


def test_the_engine_measures_trees_and_chooses(engine: Any, plain: Any) -> None:  # noqa: F811
    llm = engine
    llm.collective_rpc("nwor_set_mode", args=("stage",))
    pipeline_runs.drain(llm)
    assert llm.reset_prefix_cache()
    report = llm.collective_rpc("nwor_report")[0]
    assert report["draft_costs_why_not"] is None
    assert report["draft_costs"]["draft_tokens"] == list(BOUNDS.candidates)
    lengths = pipeline_runs.core_of(llm).scheduler.dynamic_sd_lookup
    requests = plain.requests["greedy"]
    done = drive(llm, requests, lambda step: None)
    assert done == {str(index): tokens for index, tokens in enumerate(plain.tokens("greedy"))}
    assert lengths.explain()["auto"] is True
    assert set(lengths.explain()["tokens_per_second"]) == set(map(str, BOUNDS.candidates))
