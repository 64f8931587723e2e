"""How a tree of draft tokens is made and how large it is. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from math import isqrt
from typing import Any

from nwor.errors import ConfigError

#: Most nodes: a window of 64 rows, row 0 among them, is the longest that the verify kernels take.
MOST_NODES = 63
#: Numbers of nodes that windows may have where trees are larger: the likeliest so many of a tree are a tree.
#: With row 0 these are 16 and 32 rows, so windows of 4 or 8 requests fill the tiles of matrix products.
SMALLER = (15, 31)
#: A smaller tree has at most this share of the nodes.
MOST_SMALLER = 0.75
#: Most rows of a step's trees together where the engine chooses: on an H200 more never paid.
MOST_ROWS = 512
#: Depth where nobody gives one.
DEFAULT_DEPTH = 6
#: Most continuations of a node where nobody gives their number.
DEFAULT_WIDTH = 4
#: Most nodes that compete for a place in one tree.
MOST_CANDIDATES = 512


class TreeKind(StrEnum):
    """How candidates are found.

    Attributes:
        GROWN: each pass of the drafter expands the likeliest nodes of the one before (EAGLE-2).
        COMB: each pass continues the likeliest token alone, and its runners-up are leaves.

    """

    GROWN = "grown"
    COMB = "comb"


@dataclass(frozen=True)
class TreeShape:
    """How large trees are.

    Attributes:
        nodes: draft tokens of a window, the likeliest of all candidates.
        depth: passes of the drafter, and so the most draft tokens that a step can accept.
        width: continuations of a node, and in a grown tree nodes that a pass expands.
        kind: how candidates are found.

    """

    nodes: int
    depth: int
    width: int
    kind: TreeKind = TreeKind.GROWN

    @property
    def candidates(self) -> int:
        """Nodes that compete for a place."""
        return self.candidates_of(self.depth)

    def candidates_of(self, depth: int) -> int:
        """Return how many nodes so many passes find."""
        if self.kind is TreeKind.COMB:
            return depth * self.width
        return self.width + (depth - 1) * self.width**2

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Draft tokens of a window that is a tree, ascending: with many requests fewer than with one."""
        least, most = self.depth + len(self._depths), MOST_SMALLER * self.nodes
        return (*(nodes for nodes in SMALLER if least <= nodes <= most), self.nodes)

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        """How deep trees of one size may be where the engine chooses, the deepest first."""
        step = self.depth // 4
        if self.kind is TreeKind.COMB or not step or self.nodes < self.depth + 3:
            return (self.depth,)
        depths = [self.depth - less * step for less in range(3)]
        return tuple(depth for depth in depths if self.candidates_of(depth) >= self.nodes)

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """Draft tokens by which the engine chooses a tree, ascending.

        vLLM carries one number from the scheduler to the drafter. So a size stands for a tree of full depth,
        and each number just below it for a shallower one. With a depth of 8, trees of 15, 14 and 13 nodes are
        8, 6 and 4 deep.
        """
        return tuple(size - less for size in self.sizes for less in reversed(range(len(self._depths))))

    def size_of(self, drafts: int) -> int:
        """Return the size that so many draft tokens of a tree belong to."""
        return next((size for size in self.sizes if drafts <= size), self.nodes)

    def depth_of(self, drafts: int) -> int:
        """Return how deep trees of so many draft tokens are: passes of the drafter, and most accepted."""
        less = self.size_of(drafts) - drafts
        return self._depths[less] if less < len(self._depths) else self.depth

    def least_as_deep(self, drafts: int) -> int:
        """Return the fewest draft tokens by which the engine chooses a tree that is as deep."""
        return next(other for other in self.choices if self.depth_of(other) == self.depth_of(drafts))

    @property
    def longest_chain(self) -> int:
        """Most draft tokens of a window that is a chain."""
        return min(self.depth, self.nodes - 1)

    def most_requests(self, drafts: int) -> int:
        """Return for how many requests the engine may choose trees of so many draft tokens."""
        return max(1, MOST_ROWS // (self.size_of(drafts) + 1))

    def is_tree(self, drafts: int) -> bool:
        """Return whether a window of so many draft tokens is a tree; if not, it is a chain."""
        return drafts > self.depth or drafts == self.nodes

    def __post_init__(self) -> None:
        """Check that the numbers fit together.

        Raises:
            ConfigError: if they do not; the message says what would.

        """
        if not 2 <= self.nodes <= MOST_NODES:
            raise ConfigError(f"a tree of {self.nodes} nodes: 2 to {MOST_NODES} are possible")
        if not 1 <= self.depth <= self.nodes:
            raise ConfigError(
                f"a tree of {self.nodes} nodes and depth {self.depth}: the depth is 1 to the number of nodes"
            )
        if self.width < 1 or self.candidates > MOST_CANDIDATES:
            raise ConfigError(
                f"a tree of depth {self.depth} and width {self.width} has {max(self.candidates, 0)} "
                f"candidates: 1 to {MOST_CANDIDATES} are possible"
            )
        expanded = (self.depth - 1) * self.width
        if self.kind is TreeKind.GROWN and expanded > MOST_NODES + 1:
            raise ConfigError(
                f"a tree of depth {self.depth} and width {self.width} expands {expanded} nodes: at most "
                f"{MOST_NODES + 1} are possible"
            )
        if self.candidates < self.nodes:
            raise ConfigError(
                f"a tree of depth {self.depth} and width {self.width} has {self.candidates} candidates, not "
                f"{self.nodes}: make it wider or deeper"
            )

    @classmethod
    def of(
        cls, nodes: int, depth: int | None = None, width: int | None = None, kind: str | None = None
    ) -> TreeShape:
        """Return a shape with defaults for what is not given.

        Raises:
            ConfigError: as above, or for a kind that is none.

        """
        try:
            chosen = TreeKind(kind) if kind is not None else TreeKind.GROWN
        except ValueError:
            raise ConfigError(
                f"{kind!r} is no kind of tree: there are {' and '.join(map(repr, map(str, TreeKind)))}"
            ) from None
        if depth is None:
            depth = min(DEFAULT_DEPTH, max(nodes, 1))
        if width is None:
            width = DEFAULT_WIDTH
            if chosen is TreeKind.COMB:
                # Twice as many candidates as nodes: where the drafter is sure, others need room elsewhere.
                width = max(width, -(-2 * nodes // max(depth, 1)))
            elif depth > 1:
                # As many as may be expanded, up to twice the usual for large trees.
                width = max(width if nodes <= 24 else 2 * width, -(-nodes // depth))
                passes = depth - 1
                # The widest of which all candidates compete: width + passes * width ** 2 of them.
                widest = (isqrt(1 + 4 * passes * MOST_CANDIDATES) - 1) // (2 * passes)
                width = max(1, min(width, widest, (MOST_NODES + 1) // passes))
            else:
                width = max(width, nodes)
        return cls(nodes, depth, width, chosen)

    @classmethod
    def from_mapping(cls, settings: object) -> TreeShape:
        """Return the shape that plain JSON values say.

        Raises:
            ConfigError: if they are no object with ``nodes`` whose values are right.

        """
        wanted = "must be an object such as {'nodes': 16, 'depth': 6, 'width': 4}"
        if not isinstance(settings, Mapping) or "nodes" not in settings:
            raise ConfigError(f"NWOR setting 'tree' {wanted}, not {settings!r}")
        for name, value in settings.items():
            if name not in ("nodes", "depth", "width", "kind"):
                raise ConfigError(f"NWOR setting 'tree' {wanted}: {name!r} is none of its settings")
            if name != "kind" and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"NWOR setting 'tree' {wanted}: {name!r} is {value!r}")
        return cls.of(settings["nodes"], settings.get("depth"), settings.get("width"), settings.get("kind"))

    def to_mapping(self) -> dict[str, Any]:
        """Return plain JSON values from which :meth:`from_mapping` makes the same shape."""
        return {**asdict(self), "kind": str(self.kind)}


#: Rows of a step up to which an H100's or H200's matrix products take about as long as for one.
ROWS_FOR_TREES = 192
#: Draft tokens of chains where more requests run than have trees, and up to how many requests that holds.
CHAINS = ((48, 4), (1 << 30, 2))


def schedule(shape: TreeShape, requests: int | None, most_requests: int) -> list[tuple[int, int, int]]:
    """Return the draft tokens of a step by the requests that run: trees for few, chains for more.

    Args:
        shape: the trees.
        requests: how many requests may have trees; None for as many as :data:`ROWS_FOR_TREES` allows, of each
            of their sizes.
        most_requests: requests of the largest batch.

    Returns:
        What vLLM's ``num_speculative_tokens_per_batch_size`` takes.

    """
    if requests is not None:
        trees = [(requests, shape.nodes)]
    else:
        trees = [(max(1, ROWS_FOR_TREES // (nodes + 1)), nodes) for nodes in reversed(shape.sizes)]
    chains = [(last, min(drafts, shape.depth)) for last, drafts in CHAINS]
    entries, first = [], 1
    for last, drafts in (*trees, *chains):
        last = min(last, most_requests)
        if last >= first:
            entries.append((first, last, drafts))
            first = last + 1
    return entries


def tree_batch(requests: int, sizes: Sequence[int] | None) -> int:
    """Return how many requests a batch of so many has once it is padded for a CUDA graph.

    Args:
        requests: of the batch.
        sizes: of the graphs; None where they are not known yet, and then vLLM's are 8 apart.

    """
    if sizes is None:
        return -(-requests // 8) * 8
    return min((size for size in sizes if size >= requests), default=requests)
