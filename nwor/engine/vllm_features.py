"""What differs between the versions of vLLM that NWOR works with.

Each question is asked of the code that is installed: whether a name, a field or a parameter is there. None is
answered from a version number, so that a patch release gets the answer of its own code. Nothing is imported
before a question is asked. What NWOR has copies of is another matter: see :mod:`nwor.engine.fastpath.stock`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Collection
from types import CodeType, ModuleType
from typing import Any

#: Where vLLM keeps the flags of ``vllm serve``, the latest place first.
_CLI_ARGS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")


def cli_args() -> ModuleType:
    """Return vLLM's module of the flags of ``vllm serve``.

    Raises:
        ModuleNotFoundError: there is none, or it misses a package of somebody else's.

    """
    for name in _CLI_ARGS[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A package above it may be what is missing; anything else is a fault of the installation.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    return importlib.import_module(_CLI_ARGS[-1])


def _code_of(function: Callable[..., Any]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__  # type: ignore[attr-defined]
    return code


def base_takes_placeholders_back() -> bool:
    """Return whether ``Scheduler`` itself takes placeholders of output tokens back.

    Otherwise ``AsyncScheduler`` does, and enters the tokens' blocks in the prefix cache as well. Where the
    base class does, ``update_from_output`` enters the blocks.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return "_update_request_with_output" not in vars(AsyncScheduler)


def results_enqueue_requests() -> bool:
    """Return whether ``update_from_output`` enqueues stopped requests that go on, after all removals.

    Otherwise ``_handle_stopped_request`` does so at once.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    return "_enqueue_waiting_request" not in _code_of(Scheduler._handle_stopped_request).co_names


def steps_skip_drafts() -> bool:
    """Return whether a step can say that its drafts are of no use (``SchedulerOutput.skip_drafts``)."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return any(field.name == "skip_drafts" for field in dataclasses.fields(SchedulerOutput))


def counts_executed_steps(scheduler: Any) -> bool:
    """Return whether a scheduler counts the steps that scheduled tokens."""
    return hasattr(scheduler, "num_executed_steps")


def prefill_cadence(scheduler: Any) -> bool:
    """Return whether a scheduler holds prompts back for some steps after each step with prompts."""
    return getattr(scheduler, "local_prefill_interval", 1) > 1


def mask_stride(vllm_config: Any) -> int | None:
    """Return the rows of a step's grammar masks that each request has.

    Args:
        vllm_config: the engine's configuration.

    Returns:
        None where a request has one row for each of its drafts and one more, and requests follow one another
        without gaps.

    """
    from vllm.v1.structured_output import StructuredOutputManager

    if "mask_stride" not in _code_of(StructuredOutputManager.grammar_bitmask).co_varnames:
        return None
    drafts: int = vllm_config.num_speculative_tokens
    return drafts + (0 if vllm_config.model_config.is_diffusion else 1)


def masks_of(grammar: Any, request: str, drafts_of: Callable[[str], int], stride: int | None) -> slice:
    """Return which rows of a step's grammar masks are those of a request.

    Args:
        grammar: vLLM's ``GrammarOutput``, which has masks of the request.
        request: its id.
        drafts_of: tells the draft tokens of a request by its id.
        stride: what :func:`mask_stride` says.

    """
    place = grammar.structured_output_request_ids.index(request)
    if stride is not None:
        return slice(place * stride, (place + 1) * stride)
    first = sum(1 + drafts_of(other) for other in grammar.structured_output_request_ids[:place])
    return slice(first, first + 1 + drafts_of(request))


def end_with_errors(scheduler: Any, request_ids: Collection[str]) -> None:
    """Have ``update_from_output`` end requests with an error, as it does where a grammar fails.

    It keeps such requests in a set, or in a dictionary of errors for the front end. An entry without an error
    of vLLM's leaves the words to the request's ``stop_reason``.
    """
    errors = scheduler.grammar_compile_error_reqs
    if isinstance(errors, set):
        errors.update(request_ids)
        return
    for request_id in request_ids:
        errors.setdefault(request_id, None)


def writes_own_cache(layer: Any) -> bool:
    """Return whether a model writes an attention layer's K/V itself, so that the layer gets none."""
    return bool(getattr(layer, "kv_cache_update_bypass", False))


def accepts_lossily(sampler: Any) -> bool:
    """Return whether a rejection sampler may accept drafts that the target's tokens differ from (FLy)."""
    return getattr(sampler, "fly_window_size", 0) > 0
