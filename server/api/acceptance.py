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
from collections.abc import AsyncIterator, Callable
from typing import Any

from vllm.entrypoints.generate.base.protocol import PerRequestMetrics
from vllm.entrypoints.generate.base.serving import build_spec_decoding_metrics

from server.api.nwor_metrics import describe

_DATA = "data: "
# Quotes inside a string of the chunk are escaped: this is the field.
_FINISHED = '"finish_reason":"'


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
            prompt, self.last = result if isinstance(result, tuple) else (0, result)
            for output in self.last.outputs:
                if output.finish_reason is not None:
                    self.finished[prompt, output.index] = output.spec_decode_metrics
            yield result


def _wrap_stream(serving: Any, name: str) -> None:
    original: Callable[..., AsyncIterator[str]] = getattr(serving, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    async def stream(*args: Any, **kwargs: Any) -> AsyncIterator[str]:
        call = signature.bind(*args, **kwargs)
        request = call.arguments["request"]
        watcher = _Watcher()
        call.arguments["result_generator"] = watcher.watch(call.arguments["result_generator"])
        # The usage chunk comes last where there is one.
        usage_chunk = serving.enable_force_include_usage or (
            request.stream_options is not None and request.stream_options.include_usage
        )
        open_sequences = (request.n or 1) * call.arguments.get("num_prompts", 1)
        single = open_sequences == 1
        async for chunk in original(*call.args, **call.kwargs):
            ends = _FINISHED in chunk
            open_sequences -= ends
            if open_sequences == 0 and (ends or usage_chunk) and chunk.startswith(_DATA + "{"):
                yield _add_to_chunk(chunk, watcher, single, usage_chunk)
            else:
                yield chunk

    setattr(serving, name, stream)


def _add_to_chunk(chunk: str, watcher: _Watcher, single: bool, usage_chunk: bool) -> str:
    """Return a stream's last chunk with the figures added, any other as it is."""
    body = json.loads(chunk[len(_DATA) :])
    if usage_chunk and body.get("choices"):
        return chunk
    metrics = body.get("metrics") or {}
    figures = build_spec_decoding_metrics(watcher.last) if single else None
    if figures is not None and "speculative_decoding" not in metrics:
        added = PerRequestMetrics(speculative_decoding=figures)
        metrics.update(added.model_dump(exclude_none=True))
    nwor = describe(watcher.finished.values())
    if nwor is not None:
        metrics["nwor"] = nwor
    if not metrics:
        return chunk
    body["metrics"] = metrics
    return f"{_DATA}{json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _add_to_answer(response: Any, results: list[Any]) -> None:
    """Add ``metrics.nwor`` to a whole answer; ``results`` are the last ones of its prompts."""
    nwor = describe(output.spec_decode_metrics for result in results for output in result.outputs)
    if nwor is not None and hasattr(response, "metrics"):
        response.metrics = response.metrics or PerRequestMetrics()
        response.metrics.nwor = nwor


def _wrap_whole_completion(serving: Any) -> None:
    original = serving.request_output_to_completion_response
    signature = inspect.signature(original)

    @functools.wraps(original)
    def respond(*args: Any, **kwargs: Any) -> Any:
        response = original(*args, **kwargs)
        _add_to_answer(response, signature.bind(*args, **kwargs).arguments["final_res_batch"])
        return response

    serving.request_output_to_completion_response = respond


def _wrap_whole_chat(serving: Any) -> None:
    original = serving.chat_completion_full_generator
    signature = inspect.signature(original)

    @functools.wraps(original)
    async def respond(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        watcher = _Watcher()
        call.arguments["result_generator"] = watcher.watch(call.arguments["result_generator"])
        response = await original(*call.args, **call.kwargs)
        if watcher.last is not None:
            _add_to_answer(response, [watcher.last])
        return response

    serving.chat_completion_full_generator = respond


def _wrap_responses(serving: Any) -> None:
    # Streams end with this method's answer as well.
    original = serving.responses_full_generator
    signature = inspect.signature(original)

    @functools.wraps(original)
    async def respond(*args: Any, **kwargs: Any) -> Any:
        context = signature.bind(*args, **kwargs).arguments["context"]
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
