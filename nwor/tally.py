"""Windows counted by what became of them; every figure follows from that count. Plain Python.

A step has up to hundreds of windows, and its figures travel with its output. So a step only says which *kind*
of window each request had, and a kind is counted with one look-up; tokens and bytes are worked out when
somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nwor.accounting import WindowCounts, count_window
from nwor.modes import Mode

#: What became of a window: the mode in force, why it was written directly although the mode is not ``off``
#: (empty where it was not), its draft tokens, and how many of them were accepted.
WindowKind = tuple[str, str, int, int]


@dataclass
class Tally:
    """Number of windows of each kind.

    Attributes:
        kinds: windows by kind.

    """

    kinds: dict[WindowKind, int] = field(default_factory=dict)

    def add(self, kind: WindowKind, times: int = 1) -> None:
        """Count ``times`` windows of a kind."""
        self.kinds[kind] = self.kinds.get(kind, 0) + times

    @property
    def windows(self) -> int:
        """Windows of all kinds."""
        return sum(self.kinds.values())

    def counts(self, token_bytes: int) -> WindowCounts:
        """Return all figures of these windows.

        Args:
            token_bytes: bytes of one token over all staged layers.

        """
        total = WindowCounts()
        for (mode, reason, drafts, accepted), times in self.kinds.items():
            window = count_window(
                Mode(mode),
                draft_tokens=drafts,
                accepted_tokens=accepted,
                token_bytes=token_bytes,
                direct_reason=reason or None,
            )
            total.add(window, times)
        return total


def summarize(tallies: Iterable[tuple[Mapping[WindowKind, int], int]]) -> WindowCounts:
    """Return the figures of several tallies together, each with its bytes per token."""
    total = WindowCounts()
    for kinds, token_bytes in tallies:
        total.add(Tally(dict(kinds)).counts(token_bytes))
    return total


@dataclass(frozen=True)
class StepRecord:
    """What a rank did in one verify step; rides home on the step's output.

    Attributes:
        windows: the kind of window that each verifying request had.
        mode: the rank's mode when the step was counted.
        switches: how often the mode was switched before that.
        token_bytes: bytes of one token over the staged layers of all ranks.
        all_windows: windows that the rank has counted since it started, this step's included.
        held_bytes: bytes that the step kept outside the paged cache, on all ranks: keys and values of windows
            (``stage``) or old bytes of draft slots (``cow``).
        commits: commits and restores whose duration is known since the record before.
        commit_seconds: their duration.

    """

    windows: dict[str, WindowKind]
    mode: str
    switches: int
    token_bytes: int
    all_windows: int
    held_bytes: int
    commits: int
    commit_seconds: float
