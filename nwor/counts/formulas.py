"""What a step writes to the paged cache, in tokens and bytes. Plain arithmetic, no torch.

With b the bytes of one token over all staged layers, and a step of F first tokens and D draft tokens, of
which A were accepted and R = D - A rejected::

    baseline          = (F + D) * b              what direct writes cost
    written, off      = (F + D) * b
    written, stage    = (F + A) * b + staged copies
    written, cow      = (F + D) * b + D * b (log) + R * b (restore)
    saved             = baseline - written       negative where it is negative

Two figures are counted beside the windows' own: staged copies (``nwor.counts.records.StepRecord.copies``),
and what pipeline stages before the last leave out (``nwor.counts.records.EarlierStages``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nwor.modes import Mode


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps of a token.

    Attributes:
        num_kv_heads: KV heads held by this rank.
        head_size: elements per head.
        element_size: bytes per element of the cache.

    """

    num_kv_heads: int
    head_size: int
    element_size: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V together that one token takes in this layer."""
        return 2 * self.num_kv_heads * self.head_size * self.element_size


def bytes_per_token(layers: Iterable[LayerShape]) -> int:
    """Return b: the bytes of one token over all ``layers`` of a rank."""
    return sum(layer.bytes_per_token for layer in layers)


@dataclass
class WindowCounts:
    """Counts over any number of windows; adding two of them adds everything.

    Attributes:
        windows: windows finished.
        first_tokens: tokens that are neither accepted nor rejected: one for each window.
        draft_tokens: draft tokens verified.
        accepted_tokens: draft tokens accepted.
        baseline_bytes: what direct writes of the same windows cost.
        direct_bytes: written inside the forward pass.
        commit_bytes: written by commits.
        stage_bytes: written by staging copies.
        log_bytes: old bytes copied aside by ``cow``.
        restore_bytes: old bytes put back by ``cow``.
        committed_tokens: tokens that commits wrote: first and accepted ones of windows that were held back.
        staged_tokens: tokens of windows that were held back outside the cache until their commit.
        direct_windows: windows that were written directly although a mode other than ``off`` was in force,
            by reason.
        outcomes: windows by outcome: ``committed`` (held back, then committed), ``restored`` (``cow``) or
            ``direct``.
        modes: windows by the mode in force.
        accepted_windows: element j is the number of windows of which j draft tokens were accepted.

    """

    windows: int = 0
    first_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    baseline_bytes: int = 0
    direct_bytes: int = 0
    commit_bytes: int = 0
    stage_bytes: int = 0
    log_bytes: int = 0
    restore_bytes: int = 0
    committed_tokens: int = 0
    staged_tokens: int = 0
    direct_windows: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    accepted_windows: list[int] = field(default_factory=list)

    @property
    def rejected_tokens(self) -> int:
        """Draft tokens that were not accepted."""
        return self.draft_tokens - self.accepted_tokens

    @property
    def written_bytes(self) -> int:
        """All writes that these windows caused, copies included."""
        return self.direct_bytes + self.commit_bytes + self.stage_bytes + self.log_bytes + self.restore_bytes

    @property
    def saved_bytes(self) -> int:
        """Paged-cache writes avoided; negative where more was written than direct writes would have."""
        return self.baseline_bytes - self.written_bytes

    @property
    def accepted_by_position(self) -> list[int]:
        """Element i is the number of windows whose draft token i (from 0) was accepted."""
        later = 0
        positions = []
        for count in reversed(self.accepted_windows[1:]):
            later += count
            positions.append(later)
        return positions[::-1]

    def plain(self) -> dict[str, Any]:
        """Return the figures as plain JSON values, those that follow from others included."""
        return {**vars(self), **{name: getattr(self, name) for name in _DERIVED}}

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> WindowCounts:
        """Return the object of which :meth:`plain` gave ``values``."""
        return cls(**{name: value for name, value in values.items() if name not in _DERIVED})

    def add(self, other: WindowCounts, times: int = 1) -> None:
        """Add ``other`` to this object, ``times`` times."""
        # Written out: a front end does this for each answer, and names looked up take three times as long.
        self.windows += times * other.windows
        self.first_tokens += times * other.first_tokens
        self.draft_tokens += times * other.draft_tokens
        self.accepted_tokens += times * other.accepted_tokens
        self.baseline_bytes += times * other.baseline_bytes
        self.direct_bytes += times * other.direct_bytes
        self.commit_bytes += times * other.commit_bytes
        self.stage_bytes += times * other.stage_bytes
        self.log_bytes += times * other.log_bytes
        self.restore_bytes += times * other.restore_bytes
        self.committed_tokens += times * other.committed_tokens
        self.staged_tokens += times * other.staged_tokens
        for own, more in (
            (self.direct_windows, other.direct_windows),
            (self.outcomes, other.outcomes),
            (self.modes, other.modes),
        ):
            for label, count in more.items():
                own[label] = own.get(label, 0) + times * count
        missing = len(other.accepted_windows) - len(self.accepted_windows)
        self.accepted_windows.extend([0] * missing)
        for accepted, count in enumerate(other.accepted_windows):
            self.accepted_windows[accepted] += times * count


_DERIVED = ("rejected_tokens", "written_bytes", "saved_bytes")


def count_window(
    mode: Mode,
    *,
    draft_tokens: int,
    accepted_tokens: int,
    token_bytes: int,
    direct_reason: str | None = None,
) -> WindowCounts:
    """Return the counts of one finished window; copies of staged windows are counted beside it.

    Args:
        mode: the mode that was in force for the window.
        draft_tokens: draft tokens in the window.
        accepted_tokens: how many of them were accepted.
        token_bytes: b, bytes of one token over all staged layers.
        direct_reason: why the window was written directly although ``mode`` is not ``off``; None where it
            was not.

    Raises:
        ValueError: if the token counts are impossible.

    """
    if not 0 <= accepted_tokens <= draft_tokens:
        raise ValueError(f"accepted_tokens must lie in 0..{draft_tokens}, not {accepted_tokens}")
    tokens = 1 + draft_tokens
    counts = WindowCounts(
        windows=1,
        first_tokens=1,
        draft_tokens=draft_tokens,
        accepted_tokens=accepted_tokens,
        baseline_bytes=tokens * token_bytes,
        modes={mode.value: 1},
        accepted_windows=[0] * accepted_tokens + [1] + [0] * (draft_tokens - accepted_tokens),
    )
    if mode is Mode.STAGE and direct_reason is None:
        counts.outcomes["committed"] = 1
        counts.committed_tokens = 1 + accepted_tokens
        counts.staged_tokens = tokens
        counts.commit_bytes = (1 + accepted_tokens) * token_bytes
        return counts
    counts.outcomes["restored" if mode is Mode.COW and direct_reason is None else "direct"] = 1
    counts.direct_bytes = tokens * token_bytes
    if direct_reason is not None:
        counts.direct_windows[direct_reason] = 1
    elif mode is Mode.COW:
        counts.log_bytes = draft_tokens * token_bytes
        counts.restore_bytes = counts.rejected_tokens * token_bytes
    return counts
