"""Trees of draft tokens in plain Python: what the kernels of :mod:`nwor.engine.trees` are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Parent of a row that no walk may enter.
NO_PARENT = -1


@dataclass(frozen=True)
class Tree:
    """A window: row 0 is the last token that is certain, the others are nodes.

    Attributes:
        tokens: of each row; that of row 0 is not known here and stands as -1.
        parents: the row of which each continues; that of row 0 is :data:`NO_PARENT`.
        depths: rows on the way from row 0.
        masks: bit j of a row says whether row j is on the way to it, itself included.

    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    masks: tuple[int, ...]


def comb(tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], nodes: int) -> Tree:
    """Return the likeliest nodes of a comb.

    The first candidate of each pass continues the spine. Others are leaves beside it. A node's score is the
    sum of log-probabilities on the way to it; among equals a smaller depth, then a smaller index comes first.

    Args:
        tokens: [depth][width] candidates of each pass.
        logprobs: likewise, the first of each pass the largest; sums are taken in the order of the spine.
        nodes: how many to keep.

    """
    scored = []
    spine = 0.0
    for depth, candidates in enumerate(logprobs):
        scored += [(-(spine + logprob), depth, index) for index, logprob in enumerate(candidates)]
        spine += candidates[0]
    kept = sorted(scored)[:nodes]
    rows = {(depth, index): row for row, (_, depth, index) in enumerate(kept, start=1)}
    parents, depths, masks, ids = [NO_PARENT], [0], [1], [-1]
    for row, (_, depth, index) in enumerate(kept, start=1):
        parent = rows[depth - 1, 0] if depth else 0
        ids.append(tokens[depth][index])
        parents.append(parent)
        depths.append(depth + 1)
        masks.append(masks[parent] | 1 << row)
    return Tree(tuple(ids), tuple(parents), tuple(depths), tuple(masks))


def grown(
    continuations: Callable[[tuple[int, ...]], tuple[Sequence[int], Sequence[float]]],
    depth: int,
    width: int,
    nodes: int,
    *,
    linear: bool = False,
) -> Tree:
    """Return the likeliest nodes of a tree, each level of which continues the likeliest of the one before.

    Args:
        continuations: of the tokens on the way to a node: ``width`` tokens, the likeliest first, and their
            log-probabilities.
        depth: levels.
        width: nodes that a level expands.
        nodes: how many to keep.
        linear: whether to keep a chain, each row the likeliest found continuation of the one before.

    """
    # Score, parent (-1 for none), tokens on the way.
    found: list[tuple[float, int, tuple[int, ...]]] = []
    frontier: list[int] = []
    for level in range(depth):
        expanded = frontier if level else [-1]
        begin = len(found)
        for node in expanded:
            score, _, way = found[node] if node >= 0 else (0.0, -1, ())
            for token, logprob in zip(*continuations(way), strict=True):
                found.append((score + logprob if level else logprob, node, (*way, token)))
        frontier = sorted(range(begin, len(found)), key=lambda index: (-found[index][0], index))[:width]
    order = sorted(range(len(found)), key=lambda index: (-found[index][0], index))
    kept: list[int] = []
    on_chain = 0
    if linear:
        last = -1
        while following := [index for index in order if found[index][1] == last]:
            last = following[0]
            kept.append(last)
        on_chain = len(kept)
    kept = [*kept, *(index for index in order if index not in kept)][:nodes]
    rows = {index: row for row, index in enumerate(kept, start=1)}
    tokens, parents, depths, masks = [-1], [NO_PARENT], [0], [1]
    for row, index in enumerate(kept, start=1):
        _, parent, way = found[index]
        tokens.append(way[-1])
        if linear:
            parents.append(row - 1 if row <= on_chain else NO_PARENT)
            depths.append(row)
            masks.append((1 << row + 1) - 1)
            continue
        above = rows[parent] if parent >= 0 else 0
        parents.append(above)
        depths.append(len(way))
        masks.append(masks[above] | 1 << row)
    return Tree(tuple(tokens), tuple(parents), tuple(depths), tuple(masks))


def chain(tokens: Sequence[Sequence[int]], nodes: int) -> Tree:
    """Return the spine alone as a window of as many rows; those behind it are entered by no walk."""
    depth = len(tokens)
    ids = [-1, *(row[0] for row in tokens)]
    ids += [token for row in tokens for token in row[1:]]
    rows = range(nodes + 1)
    return Tree(
        tuple(ids[: nodes + 1]),
        tuple(row - 1 if row <= depth else NO_PARENT for row in rows),
        tuple(rows),
        tuple((1 << row + 1) - 1 for row in rows),
    )


def walk(tree: Tree, targets: Sequence[int]) -> list[int]:
    """Return the rows on the way that the target's own tokens take, row 0 first.

    Args:
        tree: the window, or the first rows of one.
        targets: the target's token after each row.

    """
    path = [0]
    while True:
        here = path[-1]
        following = [
            row
            for row in range(1, len(targets))
            if tree.parents[row] == here and tree.tokens[row] == targets[here]
        ]
        if not following:
            return path
        path.append(following[0])
