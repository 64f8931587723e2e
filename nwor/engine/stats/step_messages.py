"""What rides on a step's own messages: to the workers what the scheduler knows, and home the step's record.

Both are attributes of dataclasses of vLLM, and survive pickling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nwor.counts.records import StepRecord, WorkerFacts
from nwor.draft_costs import StepCosts

#: Name of the attribute on vLLM's ``SchedulerOutput``.
IN_FLIGHT = "nwor_in_flight"
#: Name of another: which fast paths the scheduler has, on its first step alone.
FAST_PATHS = "nwor_fast_paths"


def attach(output: Any, record: StepRecord | None) -> Any:
    """Let a record travel with a step's ``ModelRunnerOutput``.

    Args:
        output: the step's output; one that others share, as vLLM's empty output, never has a record.
        record: what the step's windows did; None where nothing was verified.

    Returns:
        ``output``.

    """
    if record is not None and output is not None:
        output.nwor = record
    return output


def record_of(output: Any) -> StepRecord | None:
    """Return the record that travels with a step's output, if there is one."""
    record: StepRecord | None = getattr(output, "nwor", None)
    return record


def attach_costs(output: Any, costs: StepCosts) -> None:
    """Let what steps cost travel with a step's ``ModelRunnerOutput``, once."""
    output.nwor_costs = costs


def costs_of(output: Any) -> StepCosts | None:
    """Return what :func:`attach_costs` noted; None on all steps but one."""
    found: StepCosts | None = getattr(output, "nwor_costs", None)
    return found


def attach_facts(output: Any, facts: WorkerFacts) -> None:
    """Let what holds for the rank travel with a ``ModelRunnerOutput`` that has no record."""
    output.nwor_facts = facts


def facts_of(output: Any) -> WorkerFacts | None:
    """Return what :func:`attach_facts` noted; None on most steps."""
    found: WorkerFacts | None = getattr(output, "nwor_facts", None)
    return found


def announce(scheduler_output: Any, in_flight: int) -> None:
    """Let the workers know how many steps right before this one the scheduler has not heard of."""
    setattr(scheduler_output, IN_FLIGHT, in_flight)


def in_flight_of(scheduler_output: Any) -> int:
    """Return what :func:`announce` noted.

    0 where another scheduler made the step. Every window is then committed before the next step, for which
    pipeline stages have to wait for each other; the cache is right either way.
    """
    found: int = getattr(scheduler_output, IN_FLIGHT, 0)
    return found


def announce_fast_paths(scheduler_output: Any, found: Mapping[str, str | None]) -> None:
    """Let the workers know which fast paths the scheduler has, for their reports.

    Args:
        scheduler_output: the scheduler's first step.
        found: by path, why it is not in place; None where it is.

    """
    setattr(scheduler_output, FAST_PATHS, dict(found))


def fast_paths_of(scheduler_output: Any) -> Mapping[str, str | None] | None:
    """Return what :func:`announce_fast_paths` noted; None on all steps but the first."""
    found: Mapping[str, str | None] | None = getattr(scheduler_output, FAST_PATHS, None)
    return found
