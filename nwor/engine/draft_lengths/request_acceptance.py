"""How likely each request's drafts are accepted, estimated from its windows of late and from all others'.

Draft j of request i is accepted with chance q_i g_j, once those before it were. q_i is drawn for each request
from one Beta distribution, and g_j is what positions differ by. Few windows say little of a request, so its
q_i is drawn towards the mean of all, the more the less requests differ. This is parametric empirical Bayes
(Morris, "Parametric empirical Bayes inference", 1983); the spread of the q_i is estimated by moments
(DerSimonian and Laird, "Meta-analysis in clinical trials", 1986).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Windows over which a request's accepted drafts are averaged, the latest counting most.
AVERAGED = 32
#: Windows of all requests after which what positions differ by counts half, and those that it begins with.
SHAPE_HALF_LIFE, SHAPE_PRIOR = 1024.0, 32.0
#: Least and most mean chance that is assumed of a request.
LEAST, MOST = 0.02, 0.98
#: Standard errors by which requests have to differ beyond chance to count as different.
SIGNIFICANT = 2.5
#: Least drafts that the mean of all requests counts as in the estimate of one.
LEAST_PRIOR = 0.5

_KEEP = 1 - 1 / AVERAGED
#: Row of requests that are not watched.
_NONE = 0
#: Rows of the sums, weighted but for the third: accepted drafts and windows of any kind; windows; accepted
#: drafts and tries of chains, tries by what their positions differ by, g. Then what the chance that is in the
#: accepted ones follows from: sums of g and of its squares, with squares of weights.
_ACCEPTED, _WEIGHTS, _WINDOWS, _CHAIN_ACCEPTED, _TRIES, _ALONE, _ALONE_SQUARES = range(7)


class RequestAcceptance:
    """The estimates of one engine's requests.

    Args:
        longest: most draft tokens of a chain; what is longer is a tree, and says nothing of chains.

    """

    def __init__(self, longest: int = 0) -> None:
        self.longest = longest
        self._rows: dict[str, int] = {}
        self._unused: list[int] = []
        self._sums: Floats = np.zeros((7, 1))
        # Of each position: accepted drafts, and how many were expected of the requests that tried it.
        self._shape_accepted, self._shape_expected = np.zeros(longest), np.zeros(longest)
        self._shape: Floats = np.ones(longest)
        self._chances: Floats = np.full(1, 0.5)

    def add(self, request_id: str) -> None:
        """Take in a request; nothing is known of one that is new."""
        if request_id in self._rows:
            return
        if not self._unused:
            rows = self._sums.shape[1]
            self._sums = np.pad(self._sums, ((0, 0), (0, rows)))
            self._chances = np.pad(self._chances, (0, rows), constant_values=0.5)
            self._unused = list(range(2 * rows - 1, rows - 1, -1))
        row = self._rows[request_id] = self._unused.pop()
        self._sums[:, row] = 0
        self._chances[row] = self._chances[_NONE]

    def end(self, request_id: str) -> None:
        """Let a request go."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._unused.append(row)

    def clear(self) -> None:
        """Forget all windows."""
        self._sums[:] = 0

    def forget(self, request_id: str) -> None:
        """Forget the windows of a request."""
        self._sums[:, self._rows[request_id]] = 0

    def observe(
        self,
        request_ids: Sequence[str],
        drafts: npt.NDArray[np.integer],
        accepted: npt.NDArray[np.int32],
        rare: float = 0.0,
    ) -> npt.NDArray[np.int64]:
        """Take in windows of steps in a row that had the same requests and draft tokens.

        Args:
            request_ids: the request of each window of a step.
            drafts: [windows], draft tokens of each.
            accepted: int32 [steps, windows], accepted ones.
            rare: accepted drafts a window.

        Returns:
            Places of the requests that had enough windows, and fewer accepted drafts in them than ``rare``.

        """
        rows = self._of(request_ids)
        steps = len(accepted)
        weights = np.power(_KEEP, np.arange(steps - 1, -1, -1, dtype=np.float64))
        sums = self._sums
        sums[:2, rows] *= _KEEP**steps
        sums[_ACCEPTED, rows] += weights @ accepted
        sums[_WEIGHTS, rows] += weights.sum()
        sums[_WINDOWS, rows] += steps
        self._observe_chains(rows, drafts, accepted, weights)
        few = (sums[_WINDOWS, rows] >= AVERAGED) & (sums[_ACCEPTED, rows] < rare * sums[_WEIGHTS, rows])
        return np.flatnonzero(few & (rows != _NONE))

    def _observe_chains(
        self,
        rows: npt.NDArray[np.int64],
        drafts: npt.NDArray[np.integer],
        accepted: npt.NDArray[np.int32],
        weights: Floats,
    ) -> None:
        if not len(drafts) or drafts.max() > self.longest:
            return  # trees, or the first rows of some
        tried = np.minimum(accepted + 1, drafts)
        self._observe_shape(rows, tried, accepted)
        sums, steps = self._sums, len(accepted)
        shape = np.concatenate(([0.0], self._shape))
        expected, squares = np.cumsum(shape)[tried], np.cumsum(shape**2)[tried]
        sums[_CHAIN_ACCEPTED : _TRIES + 1, rows] *= _KEEP**steps
        sums[_CHAIN_ACCEPTED, rows] += weights @ accepted
        sums[_TRIES, rows] += weights @ expected
        sums[_ALONE:, rows] *= _KEEP ** (2 * steps)
        sums[_ALONE, rows] += weights**2 @ expected
        sums[_ALONE_SQUARES, rows] += weights**2 @ squares

    def _observe_shape(
        self, rows: npt.NDArray[np.int64], tried: npt.NDArray[np.integer], accepted: npt.NDArray[np.int32]
    ) -> None:
        keep = 0.5 ** (tried.size / SHAPE_HALF_LIFE)
        self._shape_accepted *= keep
        self._shape_expected *= keep
        chances = self._chances[rows]
        for position in range(int(tried.max(initial=0))):
            self._shape_accepted[position] += float((accepted > position).sum())
            self._shape_expected[position] += float((tried > position).sum(axis=0) @ chances)
        found = (self._shape_accepted + SHAPE_PRIOR) / (self._shape_expected + SHAPE_PRIOR)
        self._shape = found / found[0]

    def survival(self, request_ids: Sequence[str]) -> Floats | None:
        """Return the chances that all drafts up to each position are accepted, request by request.

        Args:
            request_ids: those that run.

        Returns:
            float64 [requests, longest]; None where they do not differ beyond chance.

        """
        rows = self._of(request_ids)
        self._sums[:, _NONE] = 0
        accepted, tries, alone, squares = self._sums[_CHAIN_ACCEPTED:, rows]
        seen = tries > 0
        total = float(tries.sum())
        others = int(seen.sum()) - 1
        if others < 1:
            return None
        mean = min(max(float(accepted.sum()) / total, LEAST), MOST)
        # How far each is from the mean, squared, by its tries; and how far it would be by chance alone.
        apart = (accepted[seen] - mean * tries[seen]) ** 2 / tries[seen]
        chance = np.maximum(mean * alone[seen] - mean**2 * squares[seen], LEAST * mean * alone[seen])
        chance *= others / (others + 1.0) / tries[seen]
        beyond = float(apart.sum() - chance.sum())
        if beyond <= SIGNIFICANT * sqrt(2.0 * float((chance**2).sum())):
            return None
        spread = beyond / (total - float((tries**2).sum()) / total)
        prior = max(mean * (1.0 - mean) / spread - 1.0, LEAST_PRIOR)
        yes = accepted + prior * mean
        both = np.maximum(tries, accepted) + prior
        self._chances[rows] = np.clip(yes / both, LEAST, MOST)
        self._chances[_NONE] = mean
        ahead = np.arange(self.longest)
        chances = (yes[:, None] + ahead) / (both[:, None] + ahead)
        found: Floats = np.cumprod(np.minimum(chances * self._shape, MOST), axis=1)
        return found

    def _of(self, request_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        rows = self._rows
        return np.array([rows.get(request, _NONE) for request in request_ids], np.int64)
