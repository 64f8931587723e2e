"""The way home of a step's record: an attribute of the step's output, from the worker to the scheduler."""

from __future__ import annotations

from typing import Any

from nwor.tally import StepRecord

#: Name of the attribute on vLLM's ``ModelRunnerOutput``, a dataclass; it survives pickling.
ATTRIBUTE = "nwor"


def attach(output: Any, record: StepRecord | None) -> Any:
    """Let a record travel with a step's ``ModelRunnerOutput``.

    Args:
        output: the step's output; one that others share, as vLLM's empty output, never has a record.
        record: what the step's windows did; None where nothing was verified.

    Returns:
        ``output``.

    """
    if record is not None and output is not None:
        setattr(output, ATTRIBUTE, record)
    return output


def record_of(output: Any) -> StepRecord | None:
    """Return the record that travels with a step's output, if there is one."""
    return getattr(output, ATTRIBUTE, None)
