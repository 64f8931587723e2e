"""Windows of many steps counted at once: what ``nwor.counts.records`` keeps by step, by kind. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from nwor.counts.records import Treatment, WindowKind

#: Kinds that differ in their accepted tokens alone: mode, reason, draft tokens.
Label = tuple[str, str, int]

INT32 = np.dtype(np.int32)
_ONE = np.int32(1)


class Layout:
    """What follows from a treatment alone.

    Args:
        treatment: how a step's windows are treated.

    Attributes:
        labels: the labels that its windows have.
        label: [windows] the number of each window's label.
        drafts: [windows] draft tokens.
        most: the most tokens that a window may give, where all have as many drafts; None where they have not.
        places: [windows] each window's place in the step's batch; None where every request has a window.
        windows: windows of such a step.

    """

    def __init__(self, treatment: Treatment) -> None:
        counts = np.frombuffer(treatment.drafts, INT32).astype(np.int64)
        places = np.flatnonzero(counts)
        self.windows = len(places)
        self.drafts = counts[places]
        own = 2 * self.drafts + (places < treatment.num_requests)
        # As np.unique does it, in a third of the time: few numbers, all of them small.
        codes = np.flatnonzero(np.bincount(own))
        number = np.zeros(codes[-1] + 1 if len(codes) else 0, np.int64)
        number[codes] = np.arange(len(codes))
        self.label = number[own]
        reasons = treatment.outside, treatment.inside
        self.labels: list[Label] = [(treatment.mode, reasons[code % 2], code // 2) for code in codes.tolist()]
        self.places = None if self.windows == len(counts) else places
        alike = self.windows > 0 and bool((self.drafts == self.drafts[0]).all())
        self.most = int(self.drafts[0]) + 1 if alike else None

    def accepted(self, steps: Sequence[bytes]) -> npt.NDArray[np.int32]:
        """Return int32 [steps, windows], the accepted drafts of each window.

        Args:
            steps: ``StepRecord.sampled`` of each step.

        Raises:
            ValueError: if a window gave more tokens than it had.

        """
        sampled = np.frombuffer(b"".join(steps), INT32).reshape(len(steps), -1)
        if self.places is not None:
            sampled = sampled[:, self.places]
        accepted = np.maximum(sampled, _ONE)
        accepted -= _ONE
        over = accepted.max(initial=0) >= self.most if self.most else (accepted > self.drafts).any()
        if over:
            raise ValueError("a window gave more tokens than it had")
        return accepted


@lru_cache(maxsize=512)
def layout_of(treatment: Treatment) -> Layout:
    """Return the layout of a treatment."""
    return Layout(treatment)


def count_kinds(treatment: Treatment, steps: Sequence[bytes]) -> dict[WindowKind, int]:
    """Return how many windows of each kind there were in steps of one treatment.

    Args:
        treatment: how their windows were treated.
        steps: ``StepRecord.sampled`` of each step.

    """
    layout = layout_of(treatment)
    if not layout.windows:
        return {}
    width = int(layout.drafts.max()) + 1
    accepted = layout.accepted(steps)
    # Most steps: all windows have one label.
    cells = accepted if len(layout.labels) == 1 else layout.label * width + accepted
    times = np.bincount(cells.ravel())
    found = np.flatnonzero(times)
    kinds: dict[WindowKind, int] = {}
    for cell, count in zip(found.tolist(), times[found].tolist(), strict=True):
        mode, reason, drafts = layout.labels[cell // width]
        # Two labels may read alike: inside the window batch and outside of it, where neither has a reason.
        kind = (mode, reason, drafts, cell % width)
        kinds[kind] = kinds.get(kind, 0) + count
    return kinds
