"""The object ``metrics.nwor`` of an answer; docs/metrics.md defines each figure."""

from __future__ import annotations

from collections.abc import Iterable
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
    }
