"""Requests that fail alone: what the workers and the scheduler have in common.

An exception while a step is sampled belongs to the requests that raise it when they are tried by themselves.
Their ids travel with the step's output, as its record does; the scheduler ends them with an error, and the
others go on with what they sampled by themselves. A fault of the device or of several ranks is not isolated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors

logger = logging.getLogger("vllm.nwor.isolation")

#: Where a step can fail for one request alone; values of the metric's label ``place``.
PLACES = ("sampling", "grammar", "prompt_logprobs", "drafting", "constraints")

_DEVICE_WORDS = ("CUDA error", "CUDA driver error", "HIP error", "NCCL error", "device-side assert")
#: Parameters whose values are text of the user or are made from it: only their number or size is logged.
_SIZES_ONLY = ("stop", "bad_words", "structured_outputs", "extra_args", "_bad_words_token_ids")
_LEFT_OUT = ("output_kind", "_all_stop_token_ids", "_eos_token_id", "output_text_buffer_length")


@dataclass
class StepFailures:
    """What failed in one step.

    Attributes:
        requests: the place and the error's words, by the id of each request that has to end.
        events: exceptions by place, those included that no request had to end for.

    """

    requests: dict[str, tuple[str, str]] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)

    def note(self, place: str) -> None:
        """Count an exception."""
        self.events[place] = self.events.get(place, 0) + 1

    def __bool__(self) -> bool:
        return bool(self.events)


def is_isolable(error: BaseException) -> bool:
    """Whether an error can be that of some requests: after a fault of the device nothing can be trusted."""
    if not isinstance(error, Exception):
        return False
    accelerator_error = getattr(torch, "AcceleratorError", ())
    if accelerator_error and isinstance(error, accelerator_error):
        return False
    return not any(word in str(error) for word in _DEVICE_WORDS)


def attach_failures(output: Any, failures: StepFailures) -> Any:
    """Let failures travel with a step's ``ModelRunnerOutput``, and take what they sampled from it.

    Args:
        output: the step's output, all of it on the host.
        failures: those of the step.

    Returns:
        ``output``.

    """
    if failures and output is not None:
        output.nwor_failed = failures
        for request_id in failures.requests:
            index = output.req_id_to_index.get(request_id)
            if index is not None and output.sampled_token_ids:
                output.sampled_token_ids[index] = []
            output.prompt_logprobs_dict.pop(request_id, None)
            output.prompt_token_id_logprobs_dict.pop(request_id, None)
    return output


def send_failures(output: Any, failures: StepFailures | None) -> Any:
    """Let failures travel with what a runner returns, once all of it is on the host.

    Args:
        output: vLLM's ``ModelRunnerOutput``, or one of its outputs that arrive later.
        failures: those of the step, if any.

    Returns:
        ``output``.

    """
    if not failures or output is None:
        return output
    if not hasattr(output, "get_output"):
        return attach_failures(output, failures)
    own = vars(output).get("get_output")

    def arrived() -> Any:
        # As it was: else the output would refer to itself.
        if own is None:
            del output.get_output
        else:
            output.get_output = own
        return attach_failures(output.get_output(), failures)

    output.get_output = arrived
    return output


def failures_of(output: Any) -> StepFailures | None:
    """Return what travels with a step's output, if anything does."""
    failures: StepFailures | None = getattr(output, "nwor_failed", None)
    return failures


def describe(params: Any) -> str:
    """Return the sampling parameters that differ from their defaults, without any text of the user."""
    if params is None:
        return "no sampling parameters"
    defaults = type(params)()
    told = []
    for name in getattr(params, "__struct_fields__", None) or vars(params):
        value = getattr(params, name)
        if name in _LEFT_OUT or value == getattr(defaults, name, None):
            continue
        if name in _SIZES_ONLY:
            told.append(f"{name}: {_size(value)}")
        elif isinstance(value, list | tuple | set | dict):
            told.append(f"{name}: {len(value)} entries")
        else:
            told.append(f"{name}={value!r}")
    return ", ".join(told) or "default parameters"


def _size(value: Any) -> str:
    if isinstance(value, list | tuple | Mapping):
        return f"{len(value)} entries"
    kinds = [
        name
        for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        if getattr(value, name, None) is not None
    ]
    return " and ".join(f"{kind} of {len(str(getattr(value, kind)))} characters" for kind in kinds) or "set"


class FailureLog:
    """Says once what kind of exception came up where; the scheduler says which requests end."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def tell(self, place: str, error: Exception) -> None:
        """Log an exception.

        Args:
            place: one of :data:`PLACES`.
            error: what was raised for the requests of the step together.

        """
        kind = (place, type(error).__name__)
        if kind not in self._seen:
            self._seen.add(kind)
            logger.error(
                "An exception in the %s of a step; further ones are only counted", place, exc_info=error
            )


class Isolating:
    """Mixin before either model runner: notes what failed in the step that it samples."""

    _nwor_failures: StepFailures | None = None
    _nwor_failure_log: FailureLog | None = None

    def _nwor_tell(self, place: str, error: Exception, ended: Mapping[str, Exception]) -> None:
        """Count and log an exception.

        Args:
            place: one of :data:`PLACES`.
            error: what was raised for the requests of the step together.
            ended: what was raised for those by themselves that have to end for it.

        """
        if self._nwor_failures is None:
            self._nwor_failures = StepFailures()
        self._nwor_failures.note(place)
        for request, own in ended.items():
            self._nwor_failures.requests[request] = (place, f"{type(own).__name__}: {own}")
        if self._nwor_failure_log is None:
            self._nwor_failure_log = FailureLog()
        self._nwor_failure_log.tell(place, error)


def join_logprobs(
    parts: Sequence[LogprobsTensors | None],
    firsts: Sequence[int],
    rows: int,
    ids_type: torch.dtype,
    device: torch.device,
) -> LogprobsTensors | None:
    """Put log-probabilities of requests, sampled by themselves, where the samplers put those of a batch.

    Args:
        parts: of each request; None where it has none.
        firsts: the first row of each request.
        rows: of all.
        ids_type: of the tokens' ids.
        device: where they go.

    Returns:
        As wide as the widest part; None where no request has any.

    """
    columns = max((part.logprobs.shape[1] for part in parts if part is not None), default=0)
    if not columns:
        return None
    ids = torch.zeros(rows, columns, dtype=ids_type, device=device)
    values = torch.full((rows, columns), float("-inf"), dtype=torch.float32, device=device)
    ranks = torch.zeros(rows, dtype=torch.int64, device=device)
    for part, first in zip(parts, firsts, strict=True):
        if part is None:
            continue
        length, own = part.logprobs.shape
        ids[first : first + length, :own] = part.logprob_token_ids
        values[first : first + length, :own] = part.logprobs
        ranks[first : first + length] = part.selected_token_ranks
    return LogprobsTensors(ids, values, ranks)
