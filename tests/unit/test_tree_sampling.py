"""Claim: tokens that a walk through a tree gives are as frequent as the target says, and so are seeded ones.

Coverage: 120 requests with the same comb and the same target, each with noise of its own: the first token is
drawn at the root, the second at the node where the first was drafted, the third one deeper. Greedy requests
beside them. The log-probabilities' rows. Triton's interpreter runs vLLM's noise and the walk.
Tolerance: the p-value of Pearson's test is above one in a thousand; seeds are fixed.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.runner import V2

pytestmark = pytest.mark.skipif(not V2, reason="run by test_runner_v2.py, where kernels are interpreted")

GREEDY, SAMPLED = 8, 120
REQUESTS, VOCABULARY = GREEDY + SAMPLED, 5
#: Nodes, depth, width; all candidates are kept.
NODES, DEPTH, WIDTH = 6, 3, 2
#: Position of the first row.
BASE = 17


def _tables() -> Any:
    from nwor.engine.trees.tables import TreeTables
    from nwor.tree_shape import TreeKind, TreeShape

    shape = TreeShape(NODES, DEPTH, WIDTH, TreeKind.COMB)
    tables = TreeTables(shape, REQUESTS, REQUESTS * (NODES + 1), torch.device("cpu"))
    tables.tokens[:] = torch.tensor([[0, 3], [2, 4], [1, 0]])
    tables.logprobs[:] = torch.tensor([[-0.3, -1.5], [-0.4, -1.4], [-0.5, -1.3]])
    return tables


def _target(way: tuple[int, ...]) -> torch.Tensor:
    """Return the target's logits behind some tokens."""
    generator = torch.Generator().manual_seed(sum((token + 1) * 7**i for i, token in enumerate(way)) + 1)
    logits = torch.randn(VOCABULARY, generator=generator)
    # What is drafted is likely, so that walks go deep.
    drafted = {(): 0, (0,): 2, (0, 2): 1}.get(way)
    if drafted is not None:
        logits[drafted] = logits.max() + 0.4
    return logits


def _sampler(tables: Any, temperatures: torch.Tensor) -> Any:
    from nwor.engine.trees.sampler import TreeSampler

    def both(values: torch.Tensor) -> Any:
        return SimpleNamespace(np=values.numpy(), gpu=values)

    states = SimpleNamespace(temperature=both(temperatures), seeds=both(torch.arange(REQUESTS) * 977 + 5))
    sampler = SimpleNamespace(
        sampling_states=states,
        use_fp64_gumbel=False,
        logprobs_mode="raw_logprobs",
        apply_sampling_params=lambda logits, *args: logits,
    )
    stock = SimpleNamespace(
        sampler=sampler, synthetic_conditional_rates=None, enable_adaptive_verification=False
    )
    return TreeSampler(stock, tables, lambda: torch.zeros(4))


#: Answers, logits and the rows that answers were drawn at.
Step = tuple[list[tuple[int, ...]], torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def step() -> Step:
    """One step, the greedy requests in front."""
    # Slots count down.
    return _step(torch.tensor([1.0] * SAMPLED + [0.0] * GREEDY))


def _step(temperatures: torch.Tensor) -> Step:
    tables = _tables()
    drafts = torch.zeros(REQUESTS, NODES, dtype=torch.int64)
    # Slots in another order than the batch.
    slots = torch.arange(REQUESTS).flip(0).contiguous()
    tables.build(slots, drafts, torch.zeros(4))
    parents, depths = (table[0].tolist() for table in (tables._parents, tables._depths))
    tokens = [-1, *drafts[0].tolist()]
    ways: list[tuple[int, ...]] = [()]
    for row in range(1, NODES + 1):
        ways.append((*ways[parents[row]], tokens[row]))
    assert set(ways) == {(), (0,), (3,), (0, 2), (0, 4), (0, 2, 1), (0, 2, 0)}
    logits = torch.stack([_target(way) for way in ways]).repeat(REQUESTS, 1)
    rows = NODES + 1
    requests = torch.arange(REQUESTS * rows) // rows
    local = torch.tensor(depths, dtype=torch.int32).repeat(REQUESTS)
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32) * rows
    flat = torch.tensor(tokens).repeat(REQUESTS)
    sampler = _sampler(tables, temperatures)
    _, sampled, counts = sampler._verify(
        logits,
        None,
        flat,
        BASE + local.long(),
        starts,
        slots,
        slots.numpy(),
        slots[requests].contiguous(),
        local,
        np.zeros(REQUESTS, dtype=np.int32),
        flat,
    )
    answers = [tuple(sampled[i, : int(counts[i])].tolist()) for i in range(REQUESTS)]
    drawn = sampler._rows_on_path(tables.path[slots], starts, len(logits))
    return answers, logits, drawn


def _expected() -> dict[tuple[int, ...], float]:
    """Return the chance of each answer: one ends behind the first token that was not drafted."""
    found: dict[tuple[int, ...], float] = {}
    drafted = {(0,), (3,), (0, 2), (0, 4), (0, 2, 1), (0, 2, 0)}

    def go(way: tuple[int, ...], chance: float) -> None:
        for token, own in enumerate(_target(way).softmax(-1).tolist()):
            further = (*way, token)
            if further in drafted:
                go(further, chance * own)
            else:
                found[further] = chance * own

    go((), 1.0)
    return found


def test_answers_are_as_frequent_as_likely(step: Step) -> None:
    answers = step[0][GREEDY:]
    expected, seen = _expected(), Counter(answers)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert seen.keys() <= expected.keys()
    assert {len(answer) for answer in answers} == {1, 2, 3, 4}
    wanted = {way: SAMPLED * chance for way, chance in expected.items()}
    rare = [way for way, number in wanted.items() if number < 5]
    cells = [(wanted[way], seen[way]) for way in wanted if way not in rare]
    cells.append((sum(wanted[way] for way in rare), sum(seen[way] for way in rare)))
    assert len(cells) > 5

    def p_value(found: list[tuple[float, int]]) -> float:
        statistic = sum((number - wanted) ** 2 / wanted for wanted, number in found)
        return float(torch.special.gammaincc(torch.tensor((len(found) - 1) / 2), torch.tensor(statistic / 2)))

    assert p_value(cells) > 1e-3, sorted(cells)
    # The test can fail: two frequencies exchanged are found out.
    first, second, *others = sorted(cells, reverse=True, key=lambda cell: cell[1])
    least = others[-1]
    swapped = [(first[0], least[1]), second, *others[:-1], (least[0], first[1])]
    assert p_value(swapped) < 1e-6


def test_greedy_requests_beside_sampled_ones_take_the_likeliest(step: Step) -> None:
    way: tuple[int, ...] = ()
    while not way or way in {(0,), (3,), (0, 2), (0, 4), (0, 2, 1), (0, 2, 0)}:
        way = (*way, int(_target(way).argmax()))
    assert set(step[0][:GREEDY]) == {way}
    alone, _, _ = _step(torch.zeros(REQUESTS))
    assert set(alone) == {way}


def test_log_probabilities_are_of_the_rows_that_were_walked(step: Step) -> None:
    answers, logits, drawn = step
    for request, answer in enumerate(answers):
        first = request * (NODES + 1)
        for place in range(len(answer)):
            assert torch.equal(logits[drawn[first + place]], _target(answer[:place]))
        # What stands behind an answer's end names rows of the same request.
        rows = drawn[first : first + NODES + 1]
        assert ((rows >= first) & (rows <= first + NODES)).all()


def test_rates_of_chance_go_by_the_draft_tokens_of_a_window() -> None:
    from nwor.engine.trees.sampler import TreeSampler
    from nwor.tree_shape import TreeShape

    shape, stock = TreeShape.of(60, 8), torch.linspace(0.9, 0.1, 60)
    rates = [[first] + [first / 2] * 7 for first in (0.4, 0.6, 0.8)]
    table = TreeSampler._rates_by_drafts(stock, rates, shape)
    assert table.shape == (61, 8)
    assert table[:, 0].tolist() == pytest.approx([0.4] * 16 + [0.6] * 16 + [0.8] * 29)
    assert table[:, 1:3].tolist() == [pytest.approx([0.5, 1.0])] * 61
    one = TreeSampler._rates_by_drafts(stock, rates[:1], shape)
    assert torch.equal(one, table[:1].expand(61, 8))
    assert torch.equal(TreeSampler._rates_by_drafts(stock, (), shape), stock[:8].expand(61, 8))
    # One list for each depth of each size: levels that a tree does not have are never accepted.
    each = [[0.01 * drafts] * shape.depth_of(drafts) for drafts in shape.choices]
    table = TreeSampler._rates_by_drafts(stock, each, shape)
    for drafts in shape.choices:
        depth = shape.depth_of(drafts)
        assert table[drafts].tolist() == pytest.approx(
            [0.01 * drafts, *[1.0] * (depth - 1), *[0.0] * (8 - depth)]
        )
    assert torch.equal(table[16], table[29])
