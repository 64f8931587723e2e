"""Requests that were let go while their windows were under way; the same rule for scheduler and workers.

Where steps are scheduled ahead, a step may free a request (it ended, was preempted, or starts anew) of
which an earlier step is still under way. What that earlier step accepted is then of no use to anybody: the
scheduler had not heard of it, so no block was entered in the prefix cache for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def freed_by(scheduler_output: Any) -> set[str]:
    """Return the requests whose blocks may have other owners from this step on."""
    freed = set(scheduler_output.finished_req_ids)
    freed.update(scheduler_output.preempted_req_ids or ())
    # A request that comes with a further part of its prompt begins anew under the same name.
    freed.update(request.req_id for request in scheduler_output.scheduled_new_reqs)
    return freed


class FreedRequests:
    """Remembers in which step requests were freed, as long as an earlier step is under way."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def note(self, step: int, in_flight: int, freed: Iterable[str]) -> None:
        """Take in a step.

        Args:
            step: its number.
            in_flight: steps right before it whose results the scheduler had not heard of.
            freed: requests that the step frees.

        """
        oldest = step - in_flight
        for request in [request for request, when in self._steps.items() if when <= oldest]:
            del self._steps[request]
        self._steps.update(dict.fromkeys(freed, step))

    def since(self, step: int, request: str) -> bool:
        """Return whether a step after ``step`` freed the request while ``step`` was under way."""
        return self._steps.get(request, -1) > step
