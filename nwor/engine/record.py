"""What rides on a step's own messages: to the workers what the scheduler knows, and home the step's record.

Both are attributes of dataclasses of vLLM, and survive pickling.
"""

from __future__ import annotations

from typing import Any

from nwor.tally import StepRecord

#: Name of the attribute on vLLM's ``SchedulerOutput``.
IN_FLIGHT = "nwor_in_flight"


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
