"""Claim: a tree's shape is what was asked for or is refused with what would fit; settings survive the way.

Coverage: defaults for every number of nodes and both kinds, bounds and what lies behind them, plain values
that are none of a shape, the way through ``additional_config`` and back, trees and chains by requests.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor.config import NworConfig
from nwor.errors import ConfigError
from nwor.tree_shape import MOST_CANDIDATES, MOST_NODES, TreeKind, TreeShape, schedule


@pytest.mark.parametrize("kind", TreeKind)
@pytest.mark.parametrize("nodes", range(2, MOST_NODES + 1))
def test_defaults_fit_every_number_of_nodes(kind: TreeKind, nodes: int) -> None:
    shape = TreeShape.of(nodes, kind=kind)
    assert (shape.nodes, shape.kind) == (nodes, kind)
    assert shape.depth <= nodes <= shape.candidates <= MOST_CANDIDATES
    # Each depth has a width, but of deeper ones none has room for the expanded nodes of all passes.
    for depth in range(1, min(nodes, 33) + 1):
        assert TreeShape.of(nodes, depth, kind=kind).candidates >= nodes


def test_candidates_of_both_kinds() -> None:
    assert TreeShape(8, 4, 3, TreeKind.COMB).candidates == 12
    assert TreeShape(8, 4, 3).candidates == 3 + 3 * 9
    assert TreeShape(4, 1, 6).candidates == 6
    assert TreeShape.of(16) == TreeShape(16, 6, 4, TreeKind.GROWN)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1, 1), "a tree of 1 nodes: 2 to 63 are possible"),
        ((64, 6, 4), "a tree of 64 nodes"),
        ((16, 0, 4), "the depth is 1 to the number of nodes"),
        ((16, 17, 4), "the depth is 1 to the number of nodes"),
        ((16, 6, 0), "has 0 candidates"),
        ((16, 6, -1), "candidates: 1 to 512"),
        ((16, 2, 23), "a tree of depth 2 and width 23 has 552 candidates"),
        ((16, 16, 5), "expands 75 nodes: at most 64"),
        ((16, 1, 8), "has 8 candidates, not 16: make it wider or deeper"),
        ((16, 4, 3, TreeKind.COMB), "has 12 candidates, not 16"),
        ((63, 32, 17, TreeKind.COMB), "544 candidates"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TreeShape(*arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (16, "must be an object such as"),
        ({"depth": 4}, "must be an object such as"),
        ({"nodes": 16, "size": 3}, "'size' is none of its settings"),
        ({"nodes": True}, "'nodes' is True"),
        ({"nodes": 16, "depth": "6"}, "'depth' is '6'"),
        ({"nodes": 16, "width": 4.0}, "'width' is 4.0"),
        ({"nodes": 16, "kind": "bush"}, "'bush' is no kind of tree: there are 'grown' and 'comb'"),
        ({"nodes": 99}, "a tree of 99 nodes"),
    ],
)
def test_settings_that_are_no_shape(settings: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TreeShape.from_mapping(settings)
    with pytest.raises(ConfigError, match=message):
        NworConfig.from_mapping({"tree": settings})


@given(
    nodes=st.integers(2, MOST_NODES),
    depth=st.none() | st.integers(1, 12),
    kind=st.sampled_from([None, "grown", "comb"]),
)
def test_settings_survive_the_way(nodes: int, depth: int | None, kind: str | None) -> None:
    given_ = {"nodes": nodes, "depth": depth, "kind": kind}
    settings = {name: value for name, value in given_.items() if value is not None}
    if depth is not None and depth > nodes:
        with pytest.raises(ConfigError):
            TreeShape.from_mapping(settings)
        return
    shape = TreeShape.from_mapping(settings)
    assert TreeShape.from_mapping(shape.to_mapping()) == shape
    config = NworConfig.from_additional_config({"nwor": {"tree": settings}})
    assert config is not None
    assert config.tree == shape
    again = NworConfig.from_mapping(config.to_mapping())
    assert again == config


def test_no_tree_is_no_tree() -> None:
    for settings in ({}, {"tree": None}):
        config = NworConfig.from_mapping(settings)
        assert config.tree is None
        assert config.to_mapping()["tree"] is None


@given(
    nodes=st.integers(2, MOST_NODES),
    requests=st.none() | st.integers(1, 300),
    most=st.integers(1, 300),
)
def test_schedules_say_of_each_batch_what_it_drafts(nodes: int, requests: int | None, most: int) -> None:
    shape = TreeShape.of(nodes)
    entries = schedule(shape, requests, most)
    assert [first for first, _, _ in entries] == [1, *(last + 1 for _, last, _ in entries[:-1])]
    assert all(first <= last for first, last, _ in entries)
    assert entries[-1][1] == most
    assert entries[0][2] == nodes
    # What is no tree is no deeper than one; more requests have less.
    numbers = [drafts for _, _, drafts in entries]
    assert all(1 <= drafts <= shape.depth or drafts in shape.sizes for drafts in numbers)
    assert numbers[1:] == sorted(numbers[1:], reverse=True)
    assert requests is None or not set(numbers[1:]) & set(shape.sizes[:-1]) - set(range(shape.depth + 1))
    if requests is not None:
        assert entries[0][1] == min(requests, most)


@given(
    nodes=st.integers(2, MOST_NODES),
    depth=st.none() | st.integers(1, 12),
    kind=st.sampled_from(["grown", "comb"]),
)
def test_each_number_of_draft_tokens_stands_for_one_tree(nodes: int, depth: int | None, kind: str) -> None:
    if depth is not None and depth > nodes:
        return
    shape = TreeShape.of(nodes, depth, kind=kind)
    assert list(shape.choices) == sorted(set(shape.choices))
    assert set(shape.sizes) <= set(shape.choices)
    for drafts in shape.choices:
        assert shape.is_tree(drafts)
        size, own = shape.size_of(drafts), shape.depth_of(drafts)
        assert drafts <= size
        assert size in shape.sizes
        assert (own == shape.depth) == (drafts == size)
        # So many nodes are there to be kept, and most of them are no chain.
        assert shape.candidates_of(own) >= drafts >= own
        assert shape.most_requests(drafts) == shape.most_requests(size)
    depths = [shape.depth_of(drafts) for drafts in shape.choices]
    assert depths == sorted(set(depths)) * len(shape.sizes)


def test_the_default_trees() -> None:
    shape = TreeShape.of(60, 8)
    assert shape.sizes == (15, 31, 60)
    assert shape.choices == (13, 14, 15, 29, 30, 31, 58, 59, 60)
    assert [shape.depth_of(drafts) for drafts in shape.choices] == [4, 6, 8] * 3
    assert TreeShape.of(16, 8).sizes == (16,)
    assert TreeShape.of(16, 8, kind="comb").choices == (16,)
