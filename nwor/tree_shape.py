"""How large a tree of draft tokens is. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nwor.errors import ConfigError

#: Most nodes: a window of 64 rows, row 0 among them, is the longest that the verify kernels take.
MOST_NODES = 63
#: Depth where nobody gives one.
DEFAULT_DEPTH = 6
#: Most continuations of a node where nobody gives their number.
DEFAULT_WIDTH = 4
#: Most nodes that compete for a place in one tree.
MOST_CANDIDATES = 512


@dataclass(frozen=True)
class TreeShape:
    """A comb: a spine of the drafter's likeliest tokens, and runners-up beside each of them.

    Attributes:
        nodes: draft tokens of a window, the likeliest of all candidates.
        depth: passes of the drafter, and so the most draft tokens that a step can accept.
        width: candidates of each pass.

    """

    nodes: int
    depth: int
    width: int

    def __post_init__(self) -> None:
        """Check that the numbers fit together.

        Raises:
            ConfigError: if they do not; the message says what would.

        """
        if not 1 <= self.nodes <= MOST_NODES:
            raise ConfigError(f"a tree of {self.nodes} nodes: 1 to {MOST_NODES} are possible")
        if not 1 <= self.depth <= self.nodes:
            raise ConfigError(
                f"a tree of {self.nodes} nodes and depth {self.depth}: the depth is 1 to the number of nodes"
            )
        if self.width < 1 or self.depth * self.width > MOST_CANDIDATES:
            raise ConfigError(
                f"a tree of depth {self.depth} and width {self.width}: the width is 1 or more, and depth "
                f"times width at most {MOST_CANDIDATES}"
            )
        if self.depth * self.width < self.nodes:
            raise ConfigError(
                f"a tree of depth {self.depth} and width {self.width} has {self.depth * self.width} nodes, "
                f"not {self.nodes}: make it wider or deeper"
            )

    @classmethod
    def of(cls, nodes: int, depth: int | None = None, width: int | None = None) -> TreeShape:
        """Return a shape with defaults for what is not given.

        Raises:
            ConfigError: as above.

        """
        if depth is None:
            depth = min(DEFAULT_DEPTH, max(nodes, 1))
        if width is None:
            # Twice as many candidates as nodes: where the drafter is sure of one, others need room elsewhere.
            width = max(DEFAULT_WIDTH, -(-2 * nodes // max(depth, 1)))
        return cls(nodes, depth, width)

    @classmethod
    def from_mapping(cls, settings: object) -> TreeShape:
        """Return the shape that plain JSON values say.

        Raises:
            ConfigError: if they are no object of whole numbers with ``nodes``.

        """
        wanted = "must be an object such as {'nodes': 16, 'depth': 6, 'width': 4}"
        if not isinstance(settings, Mapping) or "nodes" not in settings:
            raise ConfigError(f"NWOR setting 'tree' {wanted}, not {settings!r}")
        for name, value in settings.items():
            if name not in ("nodes", "depth", "width"):
                raise ConfigError(f"NWOR setting 'tree' {wanted}: {name!r} is none of its settings")
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"NWOR setting 'tree' {wanted}: {name!r} is {value!r}")
        return cls.of(settings["nodes"], settings.get("depth"), settings.get("width"))

    def to_mapping(self) -> dict[str, Any]:
        """Return plain JSON values from which :meth:`from_mapping` makes the same shape."""
        return asdict(self)
