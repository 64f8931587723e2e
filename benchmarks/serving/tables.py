"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a markdown table."""
    first, *others = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return [first, "|" + "---|" * len(head), *others]
