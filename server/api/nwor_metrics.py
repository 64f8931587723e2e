"""The object ``metrics.nwor`` of an answer; docs/metrics.md defines each figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nwor.counts.records import summarize
from nwor.engine.stats.figures import RequestFigures


def describe(sequences: Iterable[Any]) -> dict[str, Any] | None:
    """Return the figures of a request.

    Args:
        sequences: the figures of each of its output sequences, as vLLM's outputs carry them; None for a
            sequence without.

    Returns:
        Plain JSON values, summed over the sequences; None where the engine has no NWOR.

    """
    known = [figures for figures in sequences if isinstance(figures, RequestFigures)]
    if not known:
        return None
    counts = summarize((figures.tally, figures.nwor_token_bytes) for figures in known)
    positions = max(figures.num_spec_tokens for figures in known)
    by_position = counts.accepted_by_position
    return {
        "modes": sorted(counts.modes),
        "windows": counts.windows,
        "first_tokens": counts.first_tokens,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "rejected_tokens": counts.rejected_tokens,
        "acceptance_rate": counts.accepted_tokens / counts.draft_tokens if counts.draft_tokens else 0.0,
        "accepted_by_position": by_position + [0] * (positions - len(by_position)),
        "kv_bytes_baseline": counts.baseline_bytes,
        "kv_bytes_written": counts.written_bytes,
        "kv_bytes_saved": counts.saved_bytes,
        "direct_windows": counts.direct_windows,
        **_bound(known),
    }


def _bound(known: Sequence[RequestFigures]) -> dict[str, Any]:
    """Return the tightest bound of the sequences' windows, why, and the steps that it left without drafts."""
    bounded = [figures for figures in known if figures.nwor_max_draft_tokens is not None]
    tightest = min(bounded, key=lambda figures: figures.nwor_max_draft_tokens or 0, default=None)
    reasons = [figures.nwor_why_bounded for figures in ([tightest] if tightest else known)]
    return {
        "max_draft_tokens": tightest.nwor_max_draft_tokens if tightest else None,
        "why_bounded": next(filter(None, reasons), None),
        "steps_without_drafts": sum(figures.nwor_steps_without_drafts for figures in known),
    }
