"""Windows counted by what became of them; every figure follows from that count. Plain Python.

A step has up to hundreds of windows, and its figures travel with its output. So a step only says how its
windows were *treated*, which is the same for most steps, and how many tokens each request's gave. Which
*kind* each window is, and how many there are of each, is worked out for many steps at once
(``nwor.counts.histogram``); tokens and bytes when somebody asks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nwor.counts.formulas import WindowCounts, count_window
from nwor.modes import Mode

#: What became of a window: the mode in force, why it was written directly although the mode is not ``off``
#: (empty where it was not), its draft tokens, and how many of them were accepted.
WindowKind = tuple[str, str, int, int]


@dataclass(frozen=True)
class EarlierStages:
    """The pipeline stages before the last, which learn what was accepted some steps later.

    A window whose request ended or was preempted before that keeps its first token alone there.

    Attributes:
        token_bytes: bytes of one token over their staged layers, on all their ranks.
        copied_bytes: bytes that they copy aside after the forward pass for each token of a staged window; 0
            where they need not.

    """

    token_bytes: int
    copied_bytes: int

    def missing(self, kind: WindowKind) -> dict[str, int]:
        """Return by path, negative, what they do not write of a window that they never finish."""
        mode, reason, drafts, accepted = kind
        if reason or mode == Mode.OFF:
            return {}
        if mode == Mode.STAGE:
            return {"commit": -accepted * self.token_bytes}
        return {"restore": -(drafts - accepted) * self.token_bytes}


def add_bytes(total: dict[str, int], more: Mapping[str, int]) -> None:
    """Add bytes by path to ``total``."""
    for path, size in more.items():
        total[path] = total.get(path, 0) + size


@dataclass
class Tally:
    """Number of windows of each kind.

    Attributes:
        kinds: windows by kind.
        extra: bytes by path that were written beyond the figures of the kinds: see
            :meth:`StepRecord.copies` and :meth:`EarlierStages.missing`.

    """

    kinds: dict[WindowKind, int] = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)

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
            total.add(_window(mode, reason, drafts, accepted, token_bytes), times)
        for path, size in self.extra.items():
            name = f"{path}_bytes"
            setattr(total, name, getattr(total, name) + size)
        return total


@functools.lru_cache(maxsize=4096)
def _window(mode: str, reason: str, drafts: int, accepted: int, token_bytes: int) -> WindowCounts:
    """Return the counts of one window, for reading alone: answers share it."""
    return count_window(
        Mode(mode),
        draft_tokens=drafts,
        accepted_tokens=accepted,
        token_bytes=token_bytes,
        direct_reason=reason or None,
    )


def summarize(tallies: Iterable[tuple[Tally, int]]) -> WindowCounts:
    """Return the figures of several tallies together, each with its bytes per token."""
    total = WindowCounts()
    for tally, token_bytes in tallies:
        total.add(tally.counts(token_bytes))
    return total


class Treatment(NamedTuple):
    """How the windows of a step are treated. The same object serves every step of the same shape.

    Attributes:
        mode: the mode in force.
        drafts: int32 [requests], as bytes: draft tokens of each request of the step, in batch order.
        num_requests: leading requests that form the window batch; 0 where all is direct.
        num_tokens: rows of those requests.
        inside: why windows of the batch were written directly after all; empty where they were not.
        outside: why windows outside the batch are written directly; empty in mode ``off``.
        held_bytes: bytes that such a step keeps outside the paged cache, on all ranks: keys and values of
            windows (``stage``) or old bytes of draft slots (``cow``).
        copied_bytes: bytes that the layers of all ranks copy aside for each row of the window batch, in a
            step whose tensors are too large to be kept; 0 where windows stay where they are.

    """

    mode: str
    drafts: bytes
    num_requests: int
    num_tokens: int
    inside: str = ""
    outside: str = ""
    held_bytes: int = 0
    copied_bytes: int = 0

    @property
    def draft_counts(self) -> list[int]:
        """Draft tokens of each request."""
        return memoryview(self.drafts).cast("i").tolist()


class WorkerFacts(NamedTuple):
    """What holds for a rank until something of it changes.

    Attributes:
        mode: the rank's mode.
        switches: how often the mode was switched before that.
        token_bytes: bytes of one token over the staged layers of all ranks.
        earlier: the pipeline stages before the last; None where there are none.
        draft_tokens: what was asked for while the engine ran: a number, or bounds as ``auto:1-6``; empty
            where the settings of the start hold.
        chain_requests: where windows are trees, requests so far whose windows had to be chains, by reason.

    """

    mode: str
    switches: int
    token_bytes: int
    earlier: EarlierStages | None = None
    draft_tokens: str = ""
    chain_requests: tuple[tuple[str, int], ...] = ()


class StepRecord(NamedTuple):
    """What a rank did in one verify step; rides home on the step's output.

    Attributes:
        request_ids: the step's requests in batch order, those without drafts included.
        treatment: how their windows were treated.
        sampled: int32 [requests], as bytes: tokens that the step gave each request, accepted drafts and one
            more; 0 or 1 where no draft was accepted.
        facts: the rank, when the step was counted.
        all_windows: windows that the rank has counted since it started, this step's included.
        commits: commits and restores whose duration is known since the record before.
        commit_seconds: their duration.

    """

    request_ids: Sequence[str]
    treatment: Treatment
    sampled: bytes
    facts: WorkerFacts
    all_windows: int
    commits: int = 0
    commit_seconds: float = 0.0

    @property
    def windows(self) -> dict[str, WindowKind]:
        """The kind of window of each verifying request; a line of Python for each, so not for every step."""
        mode, _, staged, _, inside, outside, _, _ = self.treatment
        windows = {}
        sampled = memoryview(self.sampled).cast("i")
        for index, drafts in enumerate(self.treatment.draft_counts):
            if drafts:
                reason = inside if index < staged else outside
                windows[self.request_ids[index]] = (mode, reason, drafts, max(sampled[index], 1) - 1)
        return windows

    def copies(self, kind: WindowKind) -> dict[str, int]:
        """Return by path what copying one of the step's windows aside wrote, on all ranks.

        Every stage copies in a step whose tensors are too large to be kept. Stages before the last that copy
        in any step do not do so twice.

        Args:
            kind: the window's kind.

        """
        mode, reason, drafts, _ = kind
        if reason or mode != Mode.STAGE:
            return {}
        size, earlier = self.treatment.copied_bytes, self.facts.earlier
        if not size and earlier is not None:
            size = earlier.copied_bytes
        return {"stage": (1 + drafts) * size} if size else {}
