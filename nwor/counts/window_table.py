"""Windows by request and kind, filled from many steps at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nwor.counts.histogram import Label, Layout, layout_of
from nwor.counts.records import Treatment, WindowKind

Numbers = npt.NDArray[np.int64]

_ENDED = 0
#: Treatments of the same requests whose cells are remembered.
MOST_TREATMENTS = 64


@dataclass
class _Roster:
    """A step's requests, and where their windows are counted.

    Attributes:
        request_ids: the requests in batch order.
        rows: [requests] the table's row of each.
        some_ended: whether one of them has ended.
        cells: by treatment, [windows] the cell for windows of which nothing was accepted.

    """

    request_ids: Sequence[str]
    rows: Numbers
    some_ended: bool
    cells: dict[Treatment, Numbers] = field(default_factory=dict)


class WindowTable:
    """A row for each request that has windows, a column for each kind; row 0 for requests that have ended.

    Kinds that differ in their accepted tokens alone stand side by side, so that a window's cell is where its
    request's windows of its treatment begin, and its accepted tokens further.
    """

    def __init__(self) -> None:
        self._kinds: list[WindowKind] = []
        self._first: dict[Label, int] = {}
        self._counts: Numbers = np.zeros((64, 32), np.int64)
        self._rows: dict[str, int] = {}
        self._unused = list(range(63, _ENDED, -1))
        self._ended: Numbers = np.zeros(32, np.int64)
        self._drained: Numbers = np.zeros(32, np.int64)
        self._roster: _Roster | None = None

    def add(
        self,
        request_ids: Sequence[str],
        treatment: Treatment,
        steps: Sequence[bytes],
        runs: Callable[[str], bool],
    ) -> tuple[npt.NDArray[np.int32], Sequence[str], npt.NDArray[np.bool_] | None]:
        """Count the windows of steps that have the same requests and treatment.

        Args:
            request_ids: the requests in batch order.
            treatment: how their windows were treated.
            steps: ``StepRecord.sampled`` of each step.
            runs: whether a request that is new here has not ended yet.

        Returns:
            int32 [steps, windows], the accepted tokens of each window; the requests of these windows; and
            bool [windows], which of them have ended, None where none has.

        """
        layout = layout_of(treatment)
        for label in layout.labels:
            if label not in self._first:
                self._add_columns(label)
        roster = self._roster
        if roster is None or roster.request_ids != request_ids:
            roster = self._roster = self._make_roster(request_ids, runs)
        cells = roster.cells.get(treatment)
        if cells is None:
            if len(roster.cells) >= MOST_TREATMENTS:  # where no two steps are alike
                roster.cells.clear()
            cells = roster.cells[treatment] = self._cells(roster, layout)
        accepted = layout.accepted(steps)
        np.add.at(self._counts.reshape(-1), cells + accepted, 1)
        ended = cells < self._counts.shape[1] if roster.some_ended else None
        named = request_ids if layout.places is None else [request_ids[i] for i in layout.places.tolist()]
        return accepted, named, ended

    def forget_requests(self) -> None:
        """Look the next step's requests up anew: one may have begun under the name of another."""
        self._roster = None

    def _add_columns(self, label: Label) -> None:
        mode, reason, drafts = label
        self._first[label] = len(self._kinds)
        self._kinds += [(mode, reason, drafts, accepted) for accepted in range(drafts + 1)]
        missing = len(self._kinds) - self._counts.shape[1]
        if missing > 0:
            missing += len(self._kinds)
            self._counts = np.pad(self._counts, ((0, 0), (0, missing)))
            self._ended, self._drained = (
                np.pad(self._ended, (0, missing)),
                np.pad(self._drained, (0, missing)),
            )
            self._roster = None  # every cell has moved

    def _make_roster(self, request_ids: Sequence[str], runs: Callable[[str], bool]) -> _Roster:
        rows = list(map(self._rows.get, request_ids))
        some_ended = False
        while None in rows:
            place = rows.index(None)
            if runs(request_ids[place]):
                rows[place] = self._new_row(request_ids[place])
            else:
                rows[place], some_ended = _ENDED, True
        return _Roster(list(request_ids), np.array(rows, np.int64), some_ended)

    def _new_row(self, request: str) -> int:
        if not self._unused:
            rows = self._counts.shape[0]
            self._counts = np.pad(self._counts, ((0, rows), (0, 0)))
            self._unused = list(range(2 * rows - 1, rows - 1, -1))
        row = self._rows[request] = self._unused.pop()
        return row

    def _cells(self, roster: _Roster, layout: Layout) -> Numbers:
        rows = roster.rows if layout.places is None else roster.rows[layout.places]
        columns = np.array([self._first[label] for label in layout.labels], np.int64)[layout.label]
        cells: Numbers = rows * self._counts.shape[1] + columns
        return cells

    def of(self, request: str) -> dict[WindowKind, int]:
        """Return a request's windows by kind."""
        row = self._rows.get(request)
        return {} if row is None else self._by_kind(self._counts[row])

    def end(self, request: str) -> None:
        """Let a request go: windows that come under its name from now on have no request."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._ended += self._counts[row]
            self._counts[row] = 0
            self._unused.append(row)
            self._roster = None

    def drain(self) -> dict[WindowKind, int]:
        """Return the windows by kind, of all requests, since this was last called."""
        total = self._counts.sum(axis=0) + self._ended
        new = total - self._drained
        self._drained = total
        return self._by_kind(new)

    def _by_kind(self, counts: Numbers) -> dict[WindowKind, int]:
        found = counts.nonzero()[0]
        return {
            self._kinds[column]: times
            for column, times in zip(found.tolist(), counts[found].tolist(), strict=True)
        }
