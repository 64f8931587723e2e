"""Claim: the kernels of trees do what plain Python does.

Coverage: combs of many shapes with ties, impossible tokens and chains; windows with rows before them, cut
short, beside prompts; walks that end anywhere; states and inputs in the order of the accepted path; the
likeliest tokens of rows with ties. Triton's interpreter runs the kernels.
Tolerance: none but for log-probabilities, which are sums in another order.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.runner import V2

pytestmark = pytest.mark.skipif(not V2, reason="run by test_runner_v2.py, where kernels are interpreted")

#: Of some ranks none refuses.
NONE = torch.zeros(4)
SHAPES = [(16, 8, 4), (8, 4, 3), (2, 1, 2), (5, 5, 1), (32, 6, 8), (63, 8, 8), (12, 3, 7)]


def _tables(shape: tuple[int, int, int], slots: int = 6, tokens: int = 256) -> Any:
    from nwor.engine.trees.tables import TreeTables
    from nwor.tree_shape import TreeKind, TreeShape

    return TreeTables(TreeShape(*shape, TreeKind.COMB), slots, tokens, torch.device("cpu"))


def _candidates(shape: tuple[int, int, int], requests: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and log-probabilities, sorted as a drafter's are, with ties and with impossible ones."""
    _, depth, width = shape
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (requests, depth, width), generator=generator)
    # Few values, so that many nodes are equal; float32 sums of them are exact.
    logprobs = -torch.randint(0, 6, (requests, depth, width), generator=generator).float() / 4
    logprobs = logprobs.sort(dim=-1, descending=True).values
    if width > 1:
        logprobs[0, :, -1] = -float("inf")
    return tokens, logprobs


def _trees(tables: Any, tokens: torch.Tensor, logprobs: torch.Tensor, linear: set[int]) -> list[Any]:
    """Build trees for slots 0 and on, and return what plain Python makes of the same candidates."""
    from nwor.reference import trees

    requests = len(tokens)
    tables.tokens[:requests] = tokens
    tables.logprobs[:requests] = logprobs
    made = []
    for request in range(requests):
        if request in linear:
            made.append(trees.chain(tokens[request].tolist(), tables.shape.nodes))
        else:
            made.append(trees.comb(tokens[request].tolist(), logprobs[request].tolist(), tables.shape.nodes))
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("all_linear", [False, True])
def test_the_likeliest_nodes_are_kept(shape: tuple[int, int, int], all_linear: bool) -> None:
    tables = _tables(shape)
    tokens, logprobs = _candidates(shape, 4, seed=sum(shape))
    linear = {0, 1, 2, 3} if all_linear else {2}
    expected = _trees(tables, tokens, logprobs, linear)
    slots = torch.tensor([3, 0, 5, 1])
    tables.set_linear(5, True)
    drafts = torch.full((4, shape[0]), -7, dtype=torch.int64)
    tables.build(slots, drafts, NONE + all_linear)
    for request, (slot, tree) in enumerate(zip(slots.tolist(), expected, strict=True)):
        assert drafts[request].tolist() == list(tree.tokens[1:])
        assert tables._parents[slot].tolist()[1:] == list(tree.parents[1:])
        assert tables._depths[slot].tolist()[1:] == list(tree.depths[1:])
        masks = [mask - (1 << 64) if mask >> 63 else mask for mask in tree.masks]
        assert tables._masks[slot].tolist()[1:] == masks[1:]
        assert bool(tables._chains[slot]) == (request in linear)


GROWN = [(16, 6, 4), (8, 4, 3), (2, 1, 2), (5, 5, 1), (32, 6, 8), (63, 8, 8), (4, 1, 6), (12, 2, 4)]
#: Draft tokens that stand for a shallower tree than the shape's, and how deep that is.
SHALLOW = [((16, 6, 4), 14, 4), ((8, 4, 3), 7, 3), ((63, 8, 8), 61, 4), ((63, 8, 8), 14, 6)]


def _continuations(seed: int, width: int, way: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Return what the drafter makes of a way, with ties; of an odd seed one is impossible."""
    rng = random.Random(f"{seed} {way}")
    logprobs = sorted((-rng.randrange(6) / 4 for _ in range(width)), reverse=True)
    if seed % 2:
        logprobs[-1] = -float("inf")
    return [rng.randrange(50) for _ in range(width)], logprobs


def _grow(tables: Any, seeds: list[int], depth: int) -> None:
    """Run the passes of trees so deep, and check the rows of each."""
    found, width, requests = tables.candidates, tables.shape.width, len(seeds)
    longest = 105
    ways: list[list[tuple[int, ...]]] = [[()] for _ in range(requests)]
    first_positions = torch.tensor([100, 7, 30])
    for level in range(depth):
        rows = [
            _continuations(seeds[request], width, way) for request in range(requests) for way in ways[request]
        ]
        found.tokens[: len(rows)] = torch.tensor([tokens for tokens, _ in rows])
        found.logprobs[: len(rows)] = torch.tensor([logprobs for _, logprobs in rows])
        found.expand(requests, level, first_positions, longest)
        sources = found.sources[: requests * width].view(requests, width).tolist()
        ids = found.ids[: requests * width].view(requests, width).tolist()
        if level == depth - 1:
            break
        per_request = 1 if level == 0 else width
        ways = [
            [
                (*ways[request][source - request * per_request], token)
                for source, token in zip(sources[request], ids[request], strict=True)
            ]
            for request in range(requests)
        ]
        positions = [min(first + level, longest - 1) for first in first_positions.tolist()]
        assert found.positions[: requests * width].view(requests, width).tolist() == [
            [position] * width for position in positions
        ]
        # A row of the drafter's window sees as many rows as there are tokens on the way to it.
        masks = found.row_masks[:requests, level * width : (level + 1) * width]
        for mask in masks.flatten().tolist():
            assert (mask & ((1 << 64) - 1)).bit_count() == level + 1


def _check_grown(tables: Any, seeds: list[int], depth: int, nodes: int | None, all_linear: bool) -> None:
    """Build the windows of three requests, one of them a chain, and compare them with plain Python's."""
    from nwor.reference import trees

    kept, requests, width = nodes or tables.shape.nodes, len(seeds), tables.shape.width
    linear = {0, 1, 2} if all_linear else {2}
    slots = torch.tensor([4, 0, 2])
    tables.set_linear(2, True)
    drafts = torch.full((requests, tables.shape.nodes), -7, dtype=torch.int64)
    tables.build(slots, drafts, NONE + all_linear, nodes)
    for request, slot in enumerate(slots.tolist()):
        tree = trees.grown(
            lambda way, request=request: _continuations(seeds[request], width, way),  # type: ignore[misc]
            depth,
            width,
            kept,
            linear=request in linear,
        )
        rows = slice(1, kept + 1)
        assert drafts[request].tolist() == [*tree.tokens[1:], *[-7] * (tables.shape.nodes - kept)]
        assert tables._parents[slot].tolist()[rows] == list(tree.parents[1:])
        assert tables._depths[slot].tolist()[rows] == list(tree.depths[1:])
        masks = [mask - (1 << 64) if mask >> 63 else mask for mask in tree.masks]
        assert tables._masks[slot].tolist()[rows] == masks[1:]
        assert bool(tables._chains[slot]) == (request in linear)


@pytest.mark.parametrize("shape", GROWN, ids=str)
@pytest.mark.parametrize("all_linear", [False, True])
def test_trees_grow_from_the_likeliest_nodes(shape: tuple[int, int, int], all_linear: bool) -> None:
    from nwor.engine.trees.tables import TreeTables
    from nwor.tree_shape import TreeShape

    tables = TreeTables(TreeShape(*shape), 6, 64, torch.device("cpu"))
    _grow(tables, [0, 1, 2], shape[1])
    _check_grown(tables, [0, 1, 2], shape[1], None, all_linear)


@pytest.mark.parametrize(("shape", "drafts", "depth"), SHALLOW, ids=str)
@pytest.mark.parametrize("all_linear", [False, True])
def test_a_shallow_tree_has_nothing_of_what_a_deeper_one_found_before(
    shape: tuple[int, int, int], drafts: int, depth: int, all_linear: bool
) -> None:
    from nwor.engine.trees.tables import TreeTables
    from nwor.tree_shape import TreeShape

    tables = TreeTables(TreeShape(*shape), 6, 64, torch.device("cpu"))
    assert tables.shape.depth_of(drafts) == depth
    _grow(tables, [0, 1, 2], shape[1])
    _grow(tables, [4, 5, 6], depth)
    _check_grown(tables, [4, 5, 6], depth, drafts, all_linear)


def _batch(lengths: list[int], drafts: list[int], slots: list[int], base: list[int]) -> Any:
    """Return what the kernels read of vLLM's ``InputBatch``."""
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    logits = torch.tensor([0, *(count + 1 for count in drafts)], dtype=torch.int32).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(first, first + n) for first, n in zip(base, lengths, strict=True)])
    local = torch.cat([torch.arange(count + 1) for count in drafts]).to(torch.int32)
    return SimpleNamespace(
        num_reqs=len(lengths),
        num_tokens=int(starts[-1]),
        idx_mapping=torch.tensor(slots),
        query_start_loc=starts,
        cu_num_logits=logits,
        positions=positions,
        expanded_local_pos=local,
        input_ids=torch.arange(1000, 1000 + int(starts[-1]), dtype=torch.int32),
    )


def test_a_step_is_walked_committed_and_flattened_as_in_plain_python() -> None:
    """Windows whole and cut short, with certain rows before one, a chain, one row, a prompt."""
    from nwor.reference import trees

    shape = (12, 5, 4)
    tables = _tables(shape)
    tokens, logprobs = _candidates(shape, 4, seed=3)
    expected = _trees(tables, tokens, logprobs, linear={3})
    slots = [4, 0, 2, 5, 1, 3]
    tables.set_linear(5, True)
    drafts_of = torch.zeros(4, shape[0], dtype=torch.int64)
    tables.build(torch.tensor(slots[:4]), drafts_of, NONE)

    lengths, drafts = [13, 8, 7, 13, 1, 40], [12, 7, 4, 12, 0, 0]
    batch = _batch(lengths, drafts, slots, [100, 30, 7, 500, 12, 0])
    plain, local = batch.positions.clone(), batch.expanded_local_pos.clone()
    starts = batch.query_start_loc.tolist()
    rng = random.Random(1)
    logits = int(batch.cu_num_logits[-1])
    tables.row_masks.fill_(-77)
    tables.place(batch)
    row_tokens, targets, paths = [], [], []
    for request, tree in enumerate(expected):
        count, lead = drafts[request], lengths[request] - drafts[request] - 1
        first = starts[request]
        rows = range(count + 1)
        own = [plain[first + lead].item() + tree.depths[row] for row in rows]
        assert batch.positions[first + lead : first + lead + count + 1].tolist() == own
        assert batch.positions[first : first + lead].tolist() == plain[first : first + lead].tolist()
        masks = [(1 << row + 1) - 1 for row in range(lead)]
        masks += [tree.masks[row] << lead | (1 << lead) - 1 for row in rows]
        assert tables.row_masks[first : first + lengths[request]].tolist() == masks
        # The target goes along with the tree for a while.
        goal = [rng.randrange(50) for _ in rows]
        here = 0
        while rng.random() < 0.85:
            children = [row for row in rows if row and tree.parents[row] == here]
            if not children:
                break
            following = rng.choice(children)
            goal[here] = tree.tokens[following]
            here = next(row for row in children if tree.tokens[row] == tree.tokens[following])
        row_tokens += [-1, *tree.tokens[1 : count + 1]]
        targets += goal
        paths.append(trees.walk(trees.Tree(tree.tokens, tree.parents, tree.depths, tree.masks), goal))
    placed = tables.row_masks.clone(), batch.positions.clone(), batch.expanded_local_pos.clone()
    for before in (placed, (torch.full_like(placed[0], -9), plain, local)):
        tables.row_masks.copy_(before[0])
        batch.positions.copy_(before[1])
        batch.expanded_local_pos.copy_(before[2])
        tables.place_plainly(batch)
        windows = sum(lengths[:5])
        assert torch.equal(tables.row_masks[:windows], placed[0][:windows])
        assert torch.equal(batch.positions, placed[1])
        assert torch.equal(batch.expanded_local_pos, placed[2])
    tables.row_masks.copy_(placed[0])
    assert sum(map(len, paths)) > 8
    row_tokens += [-1, -1]
    targets += [41, 42]
    paths += [[0], [0]]
    assert len(targets) == logits
    sampled, counts = tables.walk(
        torch.tensor(targets), torch.tensor(row_tokens), batch.cu_num_logits, batch.idx_mapping, NONE
    )
    ends = batch.cu_num_logits.tolist()
    for request, path in enumerate(paths):
        goal = targets[ends[request] : ends[request + 1]]
        assert counts[request] == len(path)
        assert sampled[request, : len(path)].tolist() == [goal[row] for row in path]

    counts[5] = 0  # as within a prompt
    tables.source_rows.fill_(-99)
    tables.settle(batch, counts)
    sources = []
    for request, path in enumerate(paths[:5]):
        lead, first = lengths[request] - drafts[request] - 1, starts[request]
        own = [first + row for row in range(lead)] + [first + lead + row for row in path]
        sources += own + [-1] * (lengths[request] - len(own))
    assert tables.source_rows[: len(sources)].tolist() == sources
    # A prompt is no window: nothing is said of its rows.
    assert set(tables.source_rows[len(sources) :].tolist()) == {-99}
    known = tables.source_rows.clone()
    tables.source_rows.fill_(-99)
    tables.settle_plainly(batch, counts)
    assert tables.source_rows.tolist() == known.tolist()

    states = torch.randn(int(batch.query_start_loc[-1]) + 3, 1500)
    before, ids = states.clone(), batch.input_ids.clone()
    tables.flatten(batch, [states])
    assert batch.positions.tolist() == plain.tolist()
    for row, source in enumerate(sources):
        if source >= 0:
            assert batch.input_ids[row] == ids[source]
            assert torch.equal(states[row], before[source])
    assert torch.equal(states[len(sources) :], before[len(sources) :])
    assert torch.equal(batch.input_ids[len(sources) :], ids[len(sources) :])


def test_chains_are_chains() -> None:
    from nwor.reference import trees

    tables = _tables((12, 5, 4))
    tables.build_chains(torch.tensor([3, 1]))
    expected = trees.chain([[0]] * 12, 12)
    for slot in (3, 1):
        assert tables._parents[slot].tolist()[1:] == list(expected.parents[1:])
        assert tables._depths[slot].tolist()[1:] == list(expected.depths[1:])
        assert tables._masks[slot].tolist()[1:] == list(expected.masks[1:])
        assert tables._chains[slot]
    assert not tables._chains[2]
    assert not tables._parents[2].any()


def _tree_and_chain() -> tuple[Any, Any, list[Any]]:
    """Return tables and a batch of two windows of 6 drafts, a tree of 3 levels and a chain, and both."""
    shape = (6, 3, 3)
    tables = _tables(shape)
    tokens, logprobs = _candidates(shape, 2, seed=9)
    expected = _trees(tables, tokens, logprobs, linear={1})
    tables.set_linear(1, True)
    tables.build(torch.tensor([0, 1]), torch.zeros(2, 6, dtype=torch.int64), NONE)
    batch = _batch([7, 7], [6, 6], [0, 1], [10, 10])
    return tables, batch, expected


def test_of_what_did_not_attend_as_a_tree_chains_alone_accept() -> None:
    tables, batch, expected = _tree_and_chain()
    goal = []
    for tree in expected:
        own = [0] * 7
        own[0] = tree.tokens[1]  # the likeliest node continues row 0 in both
        goal += own
    row_tokens = torch.tensor([token for tree in expected for token in tree.tokens])
    for refusing, accepted in ((NONE, [1, 1]), (NONE + 1, [0, 1])):
        _, counts = tables.walk(
            torch.tensor(goal), row_tokens, batch.cu_num_logits, batch.idx_mapping, refusing
        )
        assert [count - 1 for count in counts.tolist()] >= accepted
        assert (counts[0] > 1) == (not refusing.any())


def test_where_chance_decides_trees_and_chains_have_rates_of_their_own() -> None:
    tables, batch, trees = _tree_and_chain()
    row_tokens = torch.tensor([token for tree in trees for token in tree.tokens])
    seeds, positions = torch.arange(8), torch.arange(14)
    never, always = torch.zeros(6), torch.ones(6)
    for chains, grown, accepted in ((never, always, [3, 0]), (always, never, [0, 3])):
        _, counts = tables.walk(
            torch.full((14,), -5),
            row_tokens,
            batch.cu_num_logits,
            batch.idx_mapping,
            NONE,
            (seeds, positions, chains, grown[:3].expand(7, -1).contiguous()),
        )
        assert (counts - 1).tolist() == accepted


@pytest.mark.parametrize("vocabulary", [7, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest_tokens(vocabulary: int, dtype: torch.dtype) -> None:
    from nwor.engine.trees.top_tokens import top_tokens

    depth, width = 3, 5
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(vocabulary)).to(dtype)
    logits[1, :] = 0  # all alike
    logits[2, 2:] = -float("inf")  # fewer than are wanted
    tokens = torch.full((4, depth, width), -1)
    logprobs = torch.full((4, depth, width), 1.0)
    first = top_tokens(logits, torch.tensor(1), tokens, logprobs)
    exact = logits.double()
    order = torch.sort(exact, dim=-1, descending=True, stable=True).indices[:, :width]
    assert tokens[:, 1].tolist()[:2] == order.tolist()[:2]
    assert tokens[3, 1].tolist() == order[3].tolist()
    assert set(tokens[2, 1, :2].tolist()) == {0, 1}
    assert first.tolist() == order[:, 0].tolist()
    expected = exact.log_softmax(-1).gather(1, tokens[:, 1])
    assert torch.allclose(logprobs[:, 1].double(), expected, atol=1e-5)
    assert (tokens[:, 1] >= 0).all()
    assert (tokens[:, 1] < vocabulary).all()
    assert (tokens[:, 0] == -1).all()
    assert (tokens[:, 2] == -1).all()
    assumed = torch.log(torch.tensor([0.5, 0.2, 0.1, 0.05, 0.01]))
    again = top_tokens(logits, torch.tensor(1), tokens, logprobs, assumed)
    assert again.tolist() == first.tolist()
    assert torch.equal(logprobs[:, 1], assumed.expand(4, width))


@pytest.mark.parametrize("spoilt", [slice(None), slice(7, 8)], ids=["all", "one"])
def test_where_a_row_has_no_numbers_nothing_is_likely(spoilt: slice) -> None:
    """A likelihood of one would make its continuations the best of a tree."""
    from nwor.engine.trees.top_tokens import top_tokens

    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    logits[0, spoilt] = float("nan")
    tokens, logprobs = torch.full((2, 1, 4), -1), torch.full((2, 1, 4), 1.0)
    top_tokens(logits, torch.tensor(0), tokens, logprobs)
    assert (logprobs[0] == -float("inf")).all()
    assert (logprobs[1] <= 0).all()
    assert logprobs[1].isfinite().all()
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_what_passes_of_the_drafter_note() -> None:
    """The first pass notes all that may have trees, in graphs of larger batches too. Chains note none."""
    from nwor.engine.trees.speculator import TreeDrafts
    from nwor.engine.trees.tables import TreeTables
    from nwor.tree_shape import TreeShape

    most, rows, shape = 4, 40, TreeShape(12, 4, 2)
    tables = TreeTables(shape, rows, 256, torch.device("cpu"), most)
    assert tables.candidates is not None
    noted = tables.candidates.tokens
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(3))
    likeliest = logits.argmax(dim=-1)

    class Speculator:
        device = torch.device("cpu")

        def propose(self) -> None: ...

        def sample_draft(self) -> None: ...

        def compute_draft_logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
            return logits[: len(hidden)]

        def _generate_draft(self, num_reqs: int, num_speculative_steps: int) -> None:
            for step in range(1, num_speculative_steps):
                assert torch.equal(_sample(self, num_reqs, step), likeliest[:num_reqs])

        def _generate_fused_drafts(self, num_reqs: int, num_speculative_steps: int) -> None:
            self._generate_draft(num_reqs=num_reqs, num_speculative_steps=num_speculative_steps)

        _multi_step_decode = _generate_fused_drafts

    def _sample(speculator: Any, requests: int, step: int = 0) -> torch.Tensor:
        rest = (None, None, None, None, torch.tensor(step), None)
        found: torch.Tensor = speculator.sample_draft(torch.zeros(requests, 2), *rest)
        return found

    speculator: Any = Speculator()
    TreeDrafts(speculator, tables, lambda: NONE)
    for name in ("_generate_draft", "_generate_fused_drafts", "_multi_step_decode"):
        for requests, drafts in ((2, 3), (2, 4), (rows, 3), (rows, 12)):
            noted.fill_(-1)
            getattr(speculator, name)(requests, drafts)
            assert (noted == -1).all() or drafts == 12, (name, requests, drafts)
    for requests in (2, most, most + 1, rows):
        noted.fill_(-1)
        assert torch.equal(_sample(speculator, requests), likeliest[:requests])
        kept = min(requests, most)
        assert torch.equal(noted[:kept], logits[:kept].topk(shape.width).indices)
        assert (noted[kept:] == -1).all()
