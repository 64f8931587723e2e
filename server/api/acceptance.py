"""Puts a request's figures into its answers: ``metrics.nwor``, and acceptance where vLLM leaves it out.

vLLM adds ``metrics.speculative_decoding`` to every whole answer of the completions and chat APIs, but to a
stream only in the usage chunk, which clients must ask for, and to the responses API not at all. The seam is
the one method per API that produces the answer: it is wrapped on the serving object, and only the last chunk
of a stream is touched.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import PerRequestMetrics
from vllm.entrypoints.generate.base.serving import build_spec_decoding_metrics

from server.api.nwor_metrics import describe

_DATA = "data: "
# Quotes inside a string of the chunk are escaped: this is the field.
_FINISHED = '"finish_reason":"'
_NO_CHOICES = '"choices":[]'
_METRICS = '"metrics":'
_END = "}\n\n"


def install(state: Any) -> None:
    """Wrap the serving objects that ``init_app_state`` left in ``state``."""
    if getattr(state, "openai_serving_completion", None) is not None:
        _wrap_stream(state.openai_serving_completion, "completion_stream_generator")
        _wrap_whole_completion(state.openai_serving_completion)
    if getattr(state, "openai_serving_chat", None) is not None:
        _wrap_stream(state.openai_serving_chat, "chat_completion_stream_generator")
        _wrap_whole_chat(state.openai_serving_chat)
    if getattr(state, "openai_serving_responses", None) is not None:
        _wrap_responses(state.openai_serving_responses)


class _Watcher:
    """Looks at a request's results as they pass: the last one, and the figures of finished sequences."""

    def __init__(self) -> None:
        self.last: Any = None
        self.finished: dict[tuple[int, int], Any] = {}

    async def watch(self, results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for result in results:
            # Completions pair each result with its prompt's number.
            prompt, last = result if isinstance(result, tuple) else (0, result)
            for output in last.outputs:
                if output.finish_reason is not None:
                    self.last = last
                    self.finished[prompt, output.index] = output.spec_decode_metrics
            yield result


class _Argument:
    """Finds an argument of calls that may name it or not; binding each call's would take as long as a chunk.

    Args:
        function: that is called; a method, bound.
        name: of the parameter.

    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        parameters = list(inspect.signature(function).parameters)
        self._name, self._place = name, parameters.index(name) if name in parameters else len(parameters)

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any], default: Any = None) -> Any:
        """Return the argument of a call."""
        return args[self._place] if self._place < len(args) else kwargs.get(self._name, default)

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments with another value of this one."""
        place = self._place
        if place < len(args):
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, {**kwargs, self._name: value}


def _wrap_stream(serving: Any, name: str) -> None:
    original: Callable[..., AsyncIterator[str]] = getattr(serving, name)
    asked, generated, counted = (
        _Argument(original, name) for name in ("request", "result_generator", "num_prompts")
    )

    @functools.wraps(original)
    async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[str]:
        request = asked.of(args, kwargs)
        watcher = _Watcher()
        # The usage chunk comes last where there is one.
        usage_chunk = serving.enable_force_include_usage or (
            request.stream_options is not None and request.stream_options.include_usage
        )
        open_sequences = (request.n or 1) * counted.of(args, kwargs, 1)
        single = open_sequences == 1
        args, kwargs = generated.replaced(args, kwargs, watcher.watch(generated.of(args, kwargs)))
        async for chunk in original(*args, **kwargs):
            ends = _FINISHED in chunk
            open_sequences -= ends
            if open_sequences == 0 and (ends or usage_chunk) and chunk.startswith(_DATA + "{"):
                yield _add_to_chunk(chunk, watcher, single, usage_chunk)
            else:
                yield chunk

    setattr(serving, name, stream)


def _add_to_chunk(chunk: str, watcher: _Watcher, single: bool, usage_chunk: bool) -> str:
    """Return a stream's last chunk with the figures added, any other as it is."""
    if usage_chunk and _NO_CHOICES not in chunk:
        return chunk
    added: dict[str, Any] = {}
    last = watcher.last.outputs[0].spec_decode_metrics if single and watcher.last is not None else None
    if last is not None:
        added["speculative_decoding"] = last.to_dict()
    nwor = describe(watcher.finished.values())
    if nwor is not None:
        added["nwor"] = nwor
    if not added:
        return chunk
    if _METRICS not in chunk and chunk.endswith(_END):
        # The figures become the last member of the chunk, which nobody has to read and write anew.
        return f"{chunk[: -len(_END)]},{_METRICS}{json.dumps(added, separators=(',', ':'))}{_END}"
    body = json.loads(chunk[len(_DATA) :])
    body["metrics"] = added | (body.get("metrics") or {})
    return f"{_DATA}{json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _add_to_answer(response: Any, results: list[Any]) -> None:
    """Add ``metrics.nwor`` to a whole answer; ``results`` are the last ones of its prompts."""
    nwor = describe(output.spec_decode_metrics for result in results for output in result.outputs)
    if nwor is not None and hasattr(response, "metrics"):
        response.metrics = response.metrics or PerRequestMetrics()
        response.metrics.nwor = nwor


def _wrap_whole_completion(serving: Any) -> None:
    original = serving.request_output_to_completion_response
    results = _Argument(original, "final_res_batch")

    @functools.wraps(original)
    def respond(*args: Any, **kwargs: Any) -> Any:
        response = original(*args, **kwargs)
        _add_to_answer(response, results.of(args, kwargs))
        return response

    serving.request_output_to_completion_response = respond


def _wrap_whole_chat(serving: Any) -> None:
    original = serving.chat_completion_full_generator
    generated = _Argument(original, "result_generator")

    @functools.wraps(original)
    async def respond(*args: Any, **kwargs: Any) -> Any:
        watcher = _Watcher()
        args, kwargs = generated.replaced(args, kwargs, watcher.watch(generated.of(args, kwargs)))
        response = await original(*args, **kwargs)
        if watcher.last is not None:
            _add_to_answer(response, [watcher.last])
        return response

    serving.chat_completion_full_generator = respond


def _wrap_responses(serving: Any) -> None:
    # Streams end with this method's answer as well.
    original = serving.responses_full_generator
    contexts = _Argument(original, "context")

    @functools.wraps(original)
    async def respond(*args: Any, **kwargs: Any) -> Any:
        context = contexts.of(args, kwargs)
        response = await original(*args, **kwargs)
        # Contexts of several turns (tools) hold no single last output.
        last = getattr(context, "last_output", None)
        figures = build_spec_decoding_metrics(last)
        if figures is not None and hasattr(response, "metrics"):
            response.metrics = response.metrics or PerRequestMetrics()
            response.metrics.speculative_decoding = figures
            _add_to_answer(response, [last])
        return response

    serving.responses_full_generator = respond
