"""Keeps how a drafter's chains and trees were accepted, for benchmarks of other shapes.

    python -m benchmarks.serving.curves NAME --source "..." chain=chain.json 16x6=tree.json

Files are those of ``benchmarks/acceptance/measure.py``. What they say replaces NAME in ``curves.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.serving.models import CURVES
from nwor.tree_shape import TreeShape


def by_depth(result: Path, most: int | None = None) -> list[float]:
    """Return the chance that a step accepts at least 1, 2, ... draft tokens.

    Args:
        result: of ``measure.py``.
        most: how many to return; None for all.

    """
    record = json.loads(result.read_text("utf-8"))
    return [round(count / record["drafts"], 4) for count in record["per_position"][:most]]


def main(argv: list[str]) -> int:
    """Write ``curves.json`` anew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("--source", required=True, help="model, machine and date")
    parser.add_argument("results", nargs="+", metavar="chain=FILE|NODESxDEPTH[/NODES]=FILE")
    args = parser.parse_args(argv)
    curve: dict[str, object] = {"source": args.source}
    trees: dict[str, list[float]] = {}
    for one in args.results:
        kind, _, file = one.partition("=")
        if kind == "chain":
            curve["chain"] = by_depth(Path(file))
            continue
        shape, _, drafts = kind.partition("/")
        nodes, depth = map(int, shape.split("x"))
        tree = TreeShape.of(nodes, depth)
        trees[kind] = by_depth(Path(file), tree.depth_of(int(drafts or nodes)))
    curves = json.loads(CURVES.read_text("utf-8")) | {args.name: curve | {"trees": trees}}
    CURVES.write_text(json.dumps(curves, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
