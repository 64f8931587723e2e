"""The live page's headline, and what it says of trees of draft tokens, in real Chromium."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from nwor.engine.trees.requirements import CHAIN_REASONS
from nwor.tree_shape import TreeKind, TreeShape
from tests.dashboard.browser import SOON, WINDOWS, Seen, drawn, drawn_bars, text, unlock, wait
from tests.dashboard.stand_in import Metrics, StandIn
from tests.waiting import wait_until

TREE = TreeShape.of(16, 6, 4)
#: For Metrics.add_windows: 11 of the nodes of four windows are accepted.
WALKS = [1, 0, 1, 1, 0, 0, 1]
#: As the page writes them.
NONE, APOSTROPHE = "\N{EN DASH}", "\N{RIGHT SINGLE QUOTATION MARK}"


def rows(page: Any, selector: str) -> list[list[str]]:
    """Return the cells of a table's body."""
    return [row.split("\t") for row in page.locator(f"{selector} tr").all_inner_texts()]


def bars(page: Any) -> str:
    return page.get_attribute("#positions .plot", "aria-label") or ""


@pytest.fixture
def trees(stand_in: StandIn) -> StandIn:
    """A server whose windows are trees, by its metrics and by its admin report."""
    stand_in.metrics = Metrics(tree=TREE)
    for state in stand_in.engine.ranks:
        state.config = replace(state.config, tree=TREE, draft_tokens=None)
    return stand_in


def test_the_headline_is_what_a_step_gives_now_since_the_start_and_over_time(
    stand_in: StandIn, visit: Seen
) -> None:
    stand_in.metrics.add_windows([2, 0, 0, 0, 0])
    page = visit(stand_in.url).open()
    assert text(page, ".figure:first-child h2") == "Accepted tokens a step"
    assert text(page, "#tokens") == NONE
    assert text(page, "#tokens-more").startswith("no windows in the last ")
    assert text(page, "#tokens-start") == "1.00 since the start"
    stand_in.metrics.add_windows(WINDOWS)
    wait(page, "#tokens", "3.25")
    assert text(page, "#tokens-more").startswith("of 5.0 verified in the last ")
    assert text(page, "#tokens-start") == "2.50 since the start"
    wait(page, "#chart-tokens .u-legend", "3.25")

    def falls() -> bool:
        stand_in.metrics.add_windows([4, 0, 0, 0, 0])
        return len({value for _, value in drawn(page, "chart-tokens")}) > 1

    wait_until(falls, SOON / 1000, "the line has the fall")


def test_a_server_that_does_not_speculate_has_no_headline(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics = Metrics(speculation=False)
    page = visit(stand_in.url).open()
    wait(page, "#notes", "does not speculate")
    assert not page.is_visible("#tokens")
    assert not page.is_visible("#chart-tokens")


def test_chains_have_positions_and_nothing_of_trees(stand_in: StandIn, visit: Seen) -> None:
    stand_in.metrics.add_windows(WINDOWS)
    page = visit(stand_in.url).open()
    assert not page.is_visible("#tree")
    assert text(page, "#positions-title") == "Acceptance by position"
    assert "position 4" in bars(page)
    assert "depth" not in bars(page)
    assert page.locator("#positions").get_by_text("draft token of the window").count() == 1


def test_trees_are_shown_by_shape_depth_and_nodes(trees: StandIn, visit: Seen) -> None:
    trees.metrics.add_windows([1])
    page = visit(trees.url).open()
    shape = f"16 nodes, 6 deep: of a tree{APOSTROPHE}s 16 draft tokens a step accepts 6 at most."
    assert text(page, "#tree-shape") == f"{shape} The admin key shows kind and width."
    assert text(page, "#positions-title") == "Acceptance by depth"
    trees.metrics.add_windows(WALKS)
    wait(page, "#tokens", "3.75")
    assert text(page, "#tokens-more").startswith("of 17.0 verified in the last ")
    assert rows(page, "#tree-nodes") == [["Verified", "64", "80"], ["Accepted", "11", "11"]]
    # Of 16 counters by position as many as the tree is deep.
    assert re.findall(r"depth (\d+): ([\d.]+) %, since start ([\d.]+) %", bars(page)) == [
        ("1", "75.0", "60.0"),
        ("2", "75.0", "60.0"),
        ("3", "50.0", "40.0"),
        ("4", "25.0", "20.0"),
        ("5", "25.0", "20.0"),
        ("6", "25.0", "20.0"),
    ]
    assert drawn_bars(page) == 6
    assert page.locator("#positions").get_by_text("depth in the tree").count() == 1


def test_requests_with_chains_are_listed_by_reason(trees: StandIn, visit: Seen) -> None:
    trees.metrics.inc("nwor_chain_requests", 2, "penalties")
    page = visit(trees.url).open()
    assert rows(page, "#tree-chains") == [["Penalties", "0", "2"]]
    assert not page.is_visible("#tree-chains-none")
    trees.metrics.inc("nwor_chain_requests", 3, "structured_outputs")
    wait(page, "#tree-chains", "Structured outputs")
    assert rows(page, "#tree-chains") == [["Structured outputs", "3", "3"], ["Penalties", "0", "2"]]
    # One that a later server has and this page does not know.
    trees.metrics.inc("nwor_chain_requests", 1, "novelty")
    wait(page, "#tree-chains", "novelty")


def test_the_page_has_words_for_each_reason(trees: StandIn, visit: Seen) -> None:
    page = visit(trees.url).open()
    assert page.is_visible("#tree-chains-none")
    assert rows(page, "#tree-chains") == []
    for reason in CHAIN_REASONS:
        trees.metrics.inc("nwor_chain_requests", 1, reason)
    wait_until(
        lambda: len(rows(page, "#tree-chains")) == len(CHAIN_REASONS), SOON / 1000, "all reasons are listed"
    )
    heads = [head for head, *_ in rows(page, "#tree-chains")]
    assert all(re.fullmatch("[A-Z][a-z ]+", head) for head in heads)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (TreeKind.GROWN, "Grown, 4 wide: each pass of the drafter expands the likeliest nodes of the last."),
        (TreeKind.COMB, "Comb, 4 wide: each pass of the drafter continues the likeliest token"),
    ],
)
def test_the_admin_key_shows_kind_and_width(trees: StandIn, visit: Seen, kind: TreeKind, words: str) -> None:
    for state in trees.engine.ranks:
        state.config = replace(state.config, tree=replace(TREE, kind=kind))
    page = visit(trees.url).open()
    unlock(page)
    wait(page, "#tree-shape", words)
    assert "admin key" not in text(page, "#tree-shape")
    page.click("#forget")
    wait(page, "#tree-shape", "The admin key shows kind and width.")


@pytest.mark.parametrize("mode", ["off", "cow"])
def test_modes_without_trees_say_so(trees: StandIn, visit: Seen, mode: str) -> None:
    page = visit(trees.url).open()
    assert "chains" not in text(page, "#tree-shape")
    trees.metrics.set_mode(mode)
    wait(page, "#tree-shape", f"In mode {mode} all windows are chains.")


def test_old_figures_of_trees_look_old(trees: StandIn, visit: Seen) -> None:
    page = visit(trees.url).open()
    filtered = "getComputedStyle(document.querySelector('#tree')).filter"
    assert page.evaluate(filtered) == "none"
    trees.health = 503
    wait(page, "#state-text", "The engine is down")
    assert page.evaluate(filtered) == "grayscale(1)"
