"""How likely drafts are accepted, position by position, estimated from the windows of late."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt

#: Windows after which an observation counts half.
HALF_LIFE = 1024.0
#: Steps after which an observation counts half, however few windows they had of its kind.
HALF_LIFE_STEPS = 1024.0
#: What is assumed of the first draft, as if as many windows had shown it.
PRIOR, PRIOR_WINDOWS = 0.6, 4.0


class AcceptanceEstimate:
    """Chance of each draft that all drafts before it in its window were accepted.

    A position that was not tried of late is taken for one like the position before it.

    Args:
        most: most draft tokens of a window.

    """

    def __init__(self, most: int) -> None:
        self._tried = np.zeros(most)
        self._accepted = np.zeros(most)

    def add(self, drafts: int, accepted: npt.NDArray[np.integer]) -> None:
        """Take in windows.

        Args:
            drafts: draft tokens of each.
            accepted: [windows], how many of them were accepted.

        """
        if not drafts or not len(accepted):
            return
        by_count = np.bincount(accepted, minlength=drafts + 1)
        # Windows with at least 0, 1, ... accepted drafts.
        at_least = by_count[::-1].cumsum()[::-1]
        keep = 0.5 ** (len(accepted) / HALF_LIFE)
        self._tried *= keep
        self._accepted *= keep
        self._tried[:drafts] += at_least[:drafts]
        self._accepted[:drafts] += at_least[1 : drafts + 1]

    def age(self, steps: int) -> None:
        """Let what was observed count less after so many steps, most of which may say nothing of it."""
        keep = 0.5 ** (steps / HALF_LIFE_STEPS)
        self._tried *= keep
        self._accepted *= keep

    @property
    def chances(self) -> list[float]:
        """Chance of each draft whose predecessors were accepted."""
        return self.chances_after(PRIOR)

    def chances_like(self, others: Sequence[float]) -> list[float]:
        """Return the chances where those of other windows are assumed, position by position."""
        found = zip(self._tried.tolist(), self._accepted.tolist(), others, strict=True)
        return [
            (accepted + PRIOR_WINDOWS * other) / (tried + PRIOR_WINDOWS) for tried, accepted, other in found
        ]

    def chances_after(self, before: float) -> list[float]:
        """Return the chances where ``before`` is assumed of the first draft."""
        result = []
        for tried, accepted in zip(self._tried.tolist(), self._accepted.tolist(), strict=True):
            before = (accepted + PRIOR_WINDOWS * before) / (tried + PRIOR_WINDOWS)
            result.append(before)
        return result

    @property
    def accepted(self) -> list[float]:
        """Chance that all drafts up to each position are accepted."""
        return list(accumulate(self.chances, mul))

    @property
    def tokens(self) -> list[float]:
        """Tokens that a window gives on the average, by its draft tokens: 0, 1 and so on."""
        return list(accumulate(self.accepted, initial=1.0))
