"""Claim: among none, chains and trees the engine chooses what gives most tokens, and follows load and text.

Coverage: candidates and bounds beside a tree; the choice against every candidate held to, by simulation;
texts that change; the depth of trees; windows that are parts of trees; bounds that leave trees out while the
engine runs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nwor.config import DraftBounds, NworConfig
from nwor.counts.records import StepRecord, Treatment, WorkerFacts
from nwor.draft_costs import StepCosts, settle
from nwor.engine.draft_lengths import policy as policies
from nwor.engine.draft_lengths.lookup import DraftLengths
from nwor.engine.draft_lengths.policy import DraftLengthPolicy
from nwor.errors import ConfigError
from nwor.tree_shape import TreeShape

SHAPE = TreeShape.of(16, 6)
BOUNDS = DraftBounds().with_tree(SHAPE)
#: Chance of a chain's draft, and of a tree's level, that it is accepted after those before.
CHAIN, TREE = 0.75, 0.88
#: Draft tokens that stand for trees of 16 nodes, the deepest last.
TREES = (14, 15, 16)


def _costs(floor: float = 0.005, row: float = 27e-6, draft: float = 0.0003) -> StepCosts:
    """Rows are free up to a floor; a tree's drafter has a chain's passes, each with more rows."""
    numbers, requests = BOUNDS.candidates, (1, 4, 16, 64, 128, 256)

    def seconds(count: int, drafts: int) -> float:
        passes = SHAPE.depth_of(drafts) * 1.5 if SHAPE.is_tree(drafts) else max(drafts, 1)
        return max(floor, row * count * (drafts + 1)) + draft * passes

    return StepCosts(requests, numbers, tuple(tuple(seconds(b, k) for k in numbers) for b in requests))


def _accepted(generator: np.random.Generator, drafts: int, windows: int, chain: float, tree: float) -> Any:
    levels, chance = (SHAPE.depth_of(drafts), tree) if SHAPE.is_tree(drafts) else (drafts, chain)
    going = generator.random((windows, levels)) < chance
    return going.cumprod(axis=1).sum(axis=1).astype(np.int32)


def _run(
    policy: DraftLengthPolicy,
    number: Callable[[int], int],
    requests: int,
    steps: int,
    chances: tuple[float, float] = (CHAIN, TREE),
    seed: int = 0,
) -> tuple[float, list[int]]:
    """Return tokens a second on the device that the costs describe, and the number of each step."""
    generator, costs = np.random.default_rng(seed), _costs()
    tokens = seconds = 0.0
    made = []
    for _ in range(steps):
        drafts = number(requests)
        made.append(drafts)
        accepted = _accepted(generator, drafts, requests, *chances)
        took = costs.step(requests, drafts)
        tokens += requests + accepted.sum()
        seconds += took
        if drafts:
            policy.estimates.observe(drafts, accepted)
        policy.observe_step(requests, drafts, 0, requests + float(accepted.sum()), took)
    return tokens / seconds, made


def _policy() -> DraftLengthPolicy:
    policy = DraftLengthPolicy(BOUNDS)
    policy.take_costs(_costs())
    return policy


def test_candidates_are_chains_as_deep_as_the_tree_and_the_tree() -> None:
    assert BOUNDS.candidates == (0, 1, 2, 3, 4, 6, *TREES)
    assert [SHAPE.depth_of(drafts) for drafts in TREES] == [4, 5, 6]
    assert str(BOUNDS) == "auto:0-16"
    assert DraftBounds.parse("auto:2-16").with_tree(SHAPE).candidates == (2, 3, 4, 6, *TREES)
    assert DraftBounds.parse("auto:9-16").with_tree(SHAPE).candidates == TREES
    assert DraftBounds.parse("auto:16-16").with_tree(SHAPE).candidates == (16,)
    assert DraftBounds().with_tree(TreeShape.of(12, 3)).candidates == (0, 1, 2, 3, 12)
    # A tree of one way is a chain.
    assert DraftBounds().with_tree(TreeShape.of(4, 4)).candidates == (0, 1, 2, 3, 4)
    assert BOUNDS.fixed == 4
    assert DraftBounds().with_tree(TreeShape.of(12, 3)).fixed == 3
    with pytest.raises(ConfigError, match="end at 12, and the tree has 16 nodes: use auto, or auto:1-16"):
        DraftBounds.parse("auto:1-12").with_tree(SHAPE)


def test_settings_come_back_as_they_were() -> None:
    config = NworConfig.from_mapping({"draft_tokens": "auto", "tree": {"nodes": 16}})
    assert config.draft_tokens is not None
    assert config.draft_tokens.candidates == BOUNDS.candidates
    again = NworConfig.from_mapping(config.to_mapping())
    assert again == config
    assert again.draft_tokens is not None
    assert again.draft_tokens.tree == SHAPE


@pytest.mark.parametrize("requests", [1, 4, 16, 64, 256])
def test_no_candidate_held_to_gives_more(requests: int) -> None:
    steps = max(1500, 8000 // requests)
    held = {k: _run(_policy(), lambda _, k=k: k, requests, steps, seed=1)[0] for k in BOUNDS.candidates}
    policy = _policy()
    _run(policy, policy.choose, requests, 1500)
    rate, made = _run(policy, policy.choose, requests, steps, seed=1)
    assert rate > 0.97 * max(held.values())
    best = max(held, key=held.__getitem__)
    trees = sum(drafts in TREES for drafts in made)
    assert (trees > len(made) // 2) == (best in TREES)
    # The device is such that both happen.
    assert (best in TREES) == (requests <= 4)


@pytest.mark.parametrize(("tree", "deepest"), [(0.95, True), (0.55, False)])
def test_trees_are_as_deep_as_texts_are_accepted(tree: float, deepest: bool) -> None:
    """Where nothing is accepted behind the first levels their passes are spared."""
    held = {k: _run(_policy(), lambda _, k=k: k, 2, 3000, (0.3, tree), 1)[0] for k in TREES}
    assert (max(held, key=held.__getitem__) == 16) == deepest
    policy = _policy()
    _run(policy, policy.choose, 2, 3000, (0.3, tree))
    rate, made = _run(policy, policy.choose, 2, 3000, (0.3, tree), 1)
    assert rate > 0.97 * max(held.values())
    late = [drafts for drafts in made[-2000:] if drafts in TREES]
    assert (late.count(16) > late.count(14)) == deepest


def test_trees_are_left_where_the_text_has_nothing_for_them_and_found_again() -> None:
    policy = _policy()
    _run(policy, policy.choose, 2, 2000)
    assert policy.chosen in TREES
    # Runners-up are of no use here.
    _, made = _run(policy, policy.choose, 2, 6000, (CHAIN, CHAIN))
    assert policy.chosen in (3, 4, 6)
    # Trees are still tried, and so are longer chains where there are any.
    late = made[-4000:]
    assert 0 < sum(drafts in TREES for drafts in late) < len(late) // 20
    _run(policy, policy.choose, 2, 8000)
    assert policy.chosen in TREES


def test_chains_are_tried_beside_trees() -> None:
    """What chains would give stays known, though all windows are trees."""
    policy = _policy()
    _run(policy, policy.choose, 2, 2000)
    assert policy.chosen in TREES
    _run(policy, policy.choose, 2, 12000, (0.97, 0.97))
    assert policy.chosen == 6


def test_trees_that_cannot_pay_are_not_tried() -> None:
    policy = _policy()
    _run(policy, policy.choose, 256, 1000)
    _, made = _run(policy, policy.choose, 256, 2 * policies.PROBE_EVERY)
    assert not {*made} & {*TREES}


def _record(drafts: list[int], sampled: list[int], facts: WorkerFacts) -> StepRecord:
    as_bytes = [np.array(values, np.int32).tobytes() for values in (drafts, sampled)]
    treatment = Treatment(facts.mode, as_bytes[0], len(drafts), sum(drafts) + len(drafts))
    return StepRecord([str(index) for index in range(len(drafts))], treatment, as_bytes[1], facts, 0)


@pytest.mark.parametrize(("drafts", "trees", "chains"), [((16, 3), 1, 0), ((9, 2), 1, 0), ((3, 2), 0, 2)])
def test_parts_of_trees_are_no_chains(drafts: tuple[int, ...], trees: int, chains: int) -> None:
    lengths, facts = DraftLengths(BOUNDS), WorkerFacts("stage", 1, 1)
    for _ in range(64):
        lengths.observe(_record(list(drafts), [2] * len(drafts), facts))
    policy = lengths.policy
    seen = policy.estimates.size_acceptance[16]
    assert (seen._tried[0] > 0) == (trees > 0)
    # What the step before made is not known here.
    assert not trees or policy.estimates.tree_acceptance[16]._tried[0] == seen._tried[0]
    assert policy.estimates.acceptance._tried[0] == pytest.approx(64 * chains, rel=0.1)
    assert seen._tried[0] == pytest.approx(64 * trees, rel=0.1)


def test_bounds_below_its_nodes_leave_trees_out() -> None:
    lengths = DraftLengths(BOUNDS)
    lengths.take_costs(_costs())
    facts = WorkerFacts("stage", 1, 1, None, settle(BOUNDS, "auto:0-6"))
    for _ in range(400):
        lengths.follow(facts)
        assert lengths[1] <= 6
    lengths.follow(WorkerFacts("stage", 1, 1, None, settle(BOUNDS, "16")))
    assert lengths[30] == 16
    # Trees of so many requests have no graphs.
    assert lengths[31] == lengths[300] == SHAPE.depth
    lengths.follow(WorkerFacts("stage", 1, 1, None, settle(BOUNDS, "auto:16-16")))
    assert lengths[300] == SHAPE.depth
    lengths.follow(WorkerFacts("stage", 1, 1, None, settle(BOUNDS, "auto")))
    for _ in range(400):
        number = lengths[1]
        accepted = SHAPE.depth_of(number) if number in TREES else min(number, 2)
        lengths.policy.estimates.observe(number, np.full(1, accepted, np.int32))
    assert lengths.policy.chosen == 16
    explained = lengths.explain()
    assert explained["why"].startswith("trees of 16 draft tokens, 6 deep, give")
    depths = {nodes: len(seen) for nodes, seen in explained["tree_acceptance"].items()}
    assert depths == {"14": 4, "15": 5, "16": 6}
    with pytest.raises(ConfigError, match="not prepared at the start"):
        settle(BOUNDS, "8")


def test_what_is_tried_with_few_requests_is_not_tried_with_many() -> None:
    """A load that jumps while a tree is tried ends the trial."""
    policy = _policy()
    for _ in range(4000):
        number = policy.choose(2)
        policy.estimates.observe(number, _accepted(np.random.default_rng(0), number, 2, 0.97, 0.3))
        if number in TREES and policy.chosen not in TREES:
            break
    else:
        pytest.fail("no tree was tried")
    assert policy.choose(200) == policy.chosen
    assert policy.chosen not in TREES


def test_trees_have_at_most_so_many_rows_whatever_was_measured() -> None:
    """A measurement that ends early has no larger batch that says so."""
    numbers = BOUNDS.candidates
    policy = DraftLengthPolicy(BOUNDS)
    policy.take_costs(StepCosts((1, 4), numbers, ((0.005,) * len(numbers),) * 2))
    for _ in range(2 * policies.PROBE_EVERY):
        number = policy.choose(31)
        assert number not in TREES
        policy.estimates.observe(number, np.full(31, number, np.int32))
    assert any(policy.choose(30) in TREES for _ in range(2 * policies.PROBE_EVERY))


def test_steps_with_bounded_trees_say_nothing_of_costs() -> None:
    lengths = DraftLengths(BOUNDS)
    lengths.take_costs(_costs())
    seen: list[float] = []
    lengths.policy.observe_step = lambda *given: seen.append(given[-2])  # type: ignore[method-assign]
    for drafts in ([16, 16], [16, 1], [16, 16, 16, 1], [16, 4, 1]):
        windows = {str(place): [0] * count for place, count in enumerate(drafts)}
        scheduled = SimpleNamespace(
            scheduled_spec_decode_tokens=windows,
            num_scheduled_tokens=windows,
            num_spec_tokens_to_schedule=16,
            total_num_scheduled_tokens=sum(drafts) + len(drafts),
        )
        lengths.observe_step(scheduled, len(drafts), busy=True)
    assert [seconds > 0 for seconds in seen] == [True, False, True, False]


class _Measured:
    """Requests of a measurement: they grow as they are told, and have room or not."""

    steps: set[tuple[int, int]]

    def __init__(self, worker: Any, blocks_of: Any) -> None:
        self.most = worker.model_runner.max_model_len
        _Measured.steps = set()

    def blocks(self, count: int, tokens: int) -> int:
        return count * tokens

    def begin(self, count: int, prompt: int, room: int, drafts: int) -> None:
        assert prompt + room <= self.most
        self.count, self.last, self.computed, self.made = count, prompt + room, prompt, drafts

    def step(self, drafts: int, then: int) -> None:
        assert drafts in (0, self.made), "a step verifies what the one before has made, or nothing of it"
        self.computed, self.made = self.computed + 1 + drafts, then
        assert self.computed <= self.last
        self.steps.add((self.count, drafts))

    def end(self) -> None: ...


@pytest.mark.parametrize(
    ("least", "measured"),
    [
        (0, (13, 14, 15, 31, 60)),
        (14, (14, 15, 31, 60, 29)),
        (15, (15, 31, 60, 29, 30)),
        (29, (29, 30, 31, 60)),
        (30, (30, 31, 60, 58)),
        (58, (58, 59, 60)),
    ],
)
def test_shallow_trees_cost_what_the_smallest_say(least: int, measured: tuple[int, ...]) -> None:
    from nwor.engine.draft_lengths import measurement

    tree = TreeShape.of(60, 8)
    bounds = DraftBounds(least, 60, given=True).with_tree(tree)
    trees = [k for k in bounds.candidates if tree.is_tree(k)]
    derived = measurement._derived(bounds)
    assert set(trees) - set(derived) == set(measured)

    def seconds(drafts: int) -> float:
        return 0.005 + 1e-5 * tree.size_of(drafts) + 5e-4 * tree.depth_of(drafts)

    row = [float("inf") if k in derived else seconds(k) for k in bounds.candidates]
    filled = dict(zip(bounds.candidates, measurement.with_shallow_trees(bounds, row), strict=True))
    assert {k: filled[k] for k in trees} == pytest.approx({k: seconds(k) for k in trees})
    # Where larger trees have no room, none of them costs anything that is known.
    row = [
        float("inf") if tree.size_of(k) > 31 else value
        for k, value in zip(bounds.candidates, row, strict=True)
    ]
    filled = dict(zip(bounds.candidates, measurement.with_shallow_trees(bounds, row), strict=True))
    assert all(filled[k] == float("inf") for k in (58, 59, 60) if k in filled)


@pytest.mark.parametrize(
    ("longest", "fitting"),
    [
        (2048, (0, 1, 2, 3, 4, 6, 8, 13, 14, 15, 29, 30, 31, 58, 59, 60)),
        (400, (0, 1, 2, 3, 4, 6, 8, 13, 14, 15, 29, 30, 31, 58, 59, 60)),
        (100, (0, 1, 2, 3, 4, 6, 8, 13, 14, 15)),
        (85, (0, 1, 2, 3, 4, 6, 8, 13)),
        (84, (0, 1, 2, 3, 4, 6, 8)),
    ],
)
def test_short_contexts_are_measured_as_far_as_they_reach(
    longest: int, fitting: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.v1.worker.gpu import warmup

    from nwor.engine.draft_lengths import measurement

    monkeypatch.setattr(measurement, "_Requests", _Measured)
    monkeypatch.setattr(measurement, "REQUESTS_CPU", measurement.REQUESTS)
    monkeypatch.setattr(warmup, "_warmup_block_counter", lambda runner: None)
    tree = TreeShape.of(60, 8)
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(num_blocks=1 << 20),
        kv_connector=SimpleNamespace(set_disabled=lambda disabled: None),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        max_model_len=longest,
        max_num_tokens=8192,
        max_num_reqs=256,
    )
    costs = measurement.measure(
        SimpleNamespace(model_runner=runner), DraftBounds().with_tree(tree), fits=True
    )
    columns = dict(zip(costs.drafts, np.isfinite(costs.seconds).any(axis=0), strict=True))
    known = {drafts for drafts, there in columns.items() if there}
    assert known == set(fitting)
    # The largest batch of each size of trees is among those measured.
    wanted = {(tree.most_requests(nodes), nodes) for nodes in tree.sizes if nodes in fitting}
    assert wanted <= _Measured.steps
    # Chains of many requests end earlier, too.
    assert max(count * (1 + drafts) for count, drafts in _Measured.steps) == 1024  # type: ignore[attr-defined]
    assert {count for count, _ in _Measured.steps} >= {1, 128, 256}
    # Of larger trees the deepest are measured, and the rest follows.
    assert not {drafts for _, drafts in _Measured.steps} & {29, 30, 58, 59}
    assert not [1 for count, drafts in _Measured.steps if drafts > 8 and count > tree.most_requests(drafts)]  # type: ignore[attr-defined]


def test_windows_that_were_not_attended_as_trees_say_nothing_of_them() -> None:
    lengths = DraftLengths(BOUNDS)
    for mode, inside in (("off", ""), ("stage", "fault")):
        record = _record([16, 16], [1, 1], WorkerFacts(mode, 1, 1))
        record = record._replace(treatment=record.treatment._replace(inside=inside))
        for _ in range(64):
            lengths.observe(record)
    assert lengths.policy.estimates.tree_acceptance[16]._tried.sum() == 0


def test_what_no_step_has_room_for_is_not_chosen() -> None:
    """A tree does not keep chains from being measured with more requests than it has room for."""
    costs = _costs()
    inf = float("inf")
    rows = [tuple(inf if k in TREES and b > 16 else x for k, x in zip(costs.drafts, row, strict=True))
            for b, row in zip(costs.requests, costs.seconds, strict=True)]  # fmt: skip
    costs = StepCosts(costs.requests, costs.drafts, tuple(rows))
    assert costs.step(16, 16) < inf
    assert costs.step(17, 16) == inf
    assert costs.step(200, 4) == _costs().step(200, 4)
    assert costs.plain()["milliseconds"]["64"][-1] is None
    policy = DraftLengthPolicy(BOUNDS)
    policy.take_costs(costs)
    _, made = _run(policy, policy.choose, 64, 600)
    assert not {*made} & {*TREES}
    assert "16" not in policy.explain()["milliseconds"]


def test_where_costs_are_not_known_few_requests_have_trees() -> None:
    lengths = DraftLengths(BOUNDS)
    lengths.follow(WorkerFacts("stage", 1, 1))
    assert [lengths[requests] for requests in (1, 11, 12, 48, 49, 500)] == [16, 16, 4, 4, 2, 2]
    assert lengths.explain()["auto"] is False
    lengths.follow(WorkerFacts("off", 2, 1))
    assert lengths[1] == 4
    lengths.follow(WorkerFacts("stage", 3, 1, None, "auto:0-3"))
    assert lengths[1] == 3
    lengths = DraftLengths(BOUNDS, trees_required=False)
    lengths.follow(WorkerFacts("stage", 1, 1))
    assert [lengths[requests] for requests in (1, 12, 500)] == [4, 4, 4]
    lengths = DraftLengths(DraftBounds().with_tree(TreeShape.of(60, 8)))
    lengths.follow(WorkerFacts("stage", 1, 1))
    by_requests = [60, 60, 31, 31, 15, 15, 4, 4, 2, 2]
    assert [lengths[requests] for requests in (1, 3, 4, 6, 7, 12, 13, 48, 49, 500)] == by_requests


def test_bounds_that_somebody_named_are_not_widened() -> None:
    with pytest.raises(ConfigError, match="auto:0-8 end at 8, and the tree has 16 nodes"):
        NworConfig.from_mapping({"draft_tokens": "auto:0-8", "tree": {"nodes": 16}})


def test_large_trees_are_counted_by_their_size() -> None:
    bounds = DraftBounds().with_tree(TreeShape.of(60, 8))
    assert bounds.candidates == (0, 1, 2, 3, 4, 6, 8, 13, 14, 15, 29, 30, 31, 58, 59, 60)
    for made, candidates in ((60, (15, 31, 60)), (59, (14, 30, 59)), (58, (13, 29, 58))):
        lengths, facts = DraftLengths(bounds), WorkerFacts("stage", 1, 1)
        lengths._made = made
        for drafts in (8, 9, 15, 16, 31, 45, made):
            for _ in range(64):
                lengths.observe(_record([drafts], [4], facts))
        tried = {size: seen._tried[0] for size, seen in lengths.policy.estimates.size_acceptance.items()}
        assert tried == {size: pytest.approx(128, rel=0.1) for size in (15, 31, 60)}
        each = {count: seen._tried[0] for count, seen in lengths.policy.estimates.tree_acceptance.items()}
        # What a bound or a budget left of a window is as deep as the others of its step.
        assert each == {k: pytest.approx(128, rel=0.1) if k in candidates else 0 for k in each}
        assert lengths.policy.estimates.acceptance._tried[0] == pytest.approx(64, rel=0.1)


def test_the_number_of_the_step_before_says_how_deep_windows_are() -> None:
    """Requests that may have 15 draft tokens have trees 4 deep where others have 58 of these."""
    bounds = DraftBounds().with_tree(TreeShape.of(60, 8))
    lengths, facts = DraftLengths(bounds), WorkerFacts("stage", 1, 1)
    for made, verified in ((58, 0), (60, 58), (0, 60)):
        windows = {name: [0] * min(verified, most) for name, most in (("free", 60), ("bounded", 15))}
        scheduled = SimpleNamespace(
            scheduled_spec_decode_tokens={name: drafts for name, drafts in windows.items() if drafts},
            num_scheduled_tokens=windows,
            num_spec_tokens_to_schedule=made,
            total_num_scheduled_tokens=2 + sum(map(len, windows.values())),
        )
        if verified:
            lengths.observe(_record([verified, 15], [5, 5], facts))
        lengths.observe_step(scheduled, 2, busy=True)
    lengths._take_waiting()
    tried = {
        k: seen._tried[0] for k, seen in lengths.policy.estimates.tree_acceptance.items() if seen._tried[0]
    }
    assert set(tried) == {13, 15, 58, 60}


def test_what_is_known_of_small_trees_is_assumed_of_large_ones() -> None:
    policy = DraftLengthPolicy(DraftBounds().with_tree(TreeShape.of(60, 8)))
    for _ in range(50):
        policy.estimates.observe(15, np.full(20, 5, np.int32))
    small, middle, large = (policy.estimates.tree_accepted()[nodes] for nodes in (15, 31, 60))
    assert middle == large == pytest.approx(small, abs=0.01)
    assert small[4] > 0.99 > 0.01 > small[5]
    for _ in range(50):
        policy.estimates.observe(31, np.full(20, 7, np.int32))
    assert policy.estimates.tree_accepted()[31][6] > 0.9
    assert policy.estimates.tree_accepted()[60] == pytest.approx(
        policy.estimates.tree_accepted()[31], abs=0.02
    )
    assert policy.estimates.tree_accepted()[15] == pytest.approx(small, abs=0.01)


def test_what_is_known_of_a_tree_is_assumed_of_shallower_ones() -> None:
    policy = DraftLengthPolicy(DraftBounds().with_tree(TreeShape.of(60, 8)))
    for _ in range(50):
        policy.estimates.observe(15, np.full(20, 5, np.int32))
    accepted = policy.estimates.tree_accepted()
    assert accepted[13] == pytest.approx(accepted[15][:4], abs=0.01)
    assert accepted[14] == pytest.approx(accepted[15][:6], abs=0.01)
    # What a shallower tree shows itself counts more.
    for _ in range(50):
        policy.estimates.observe(13, np.full(20, 2, np.int32))
    accepted = policy.estimates.tree_accepted()
    assert accepted[13][1] > 0.9 > 0.1 > accepted[13][2]
    assert accepted[15][4] > 0.9
