"""Windows that are fitted to requests by drawn chances, for tests in which tokens have to stay the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


class DrawnFits:
    """Fits an engine's windows anew whenever it is asked to.

    Args:
        bounds: the scheduler's ``RequestBounds``.
        most: most draft tokens of a window.
        seed: what is drawn follows from it.

    Attributes:
        lengths: numbers of draft tokens that requests were bounded to.

    """

    def __init__(self, bounds: Any, most: int, seed: int) -> None:
        self._bounds, self._most = bounds, most
        self._random, self._chances = random.Random(seed), np.random.default_rng(seed)
        self.lengths: set[int] = set()

    def draw(self, made: int) -> None:
        """Fit the windows of the running requests, or no longer; ``made`` drafts are made for each."""
        names = self._bounds._running()
        survival = np.cumprod(self._chances.random((len(names), self._most)), axis=1)
        self._bounds._looked = names, survival
        self._bounds.fit(self._random.choice([0.0, 0.1, 0.3, 0.5]), made)
        self.lengths |= self._bounds.lengths().keys()

    def end(self) -> None:
        """Fit nothing any longer."""
        self._bounds.fit(0.0, 0)
