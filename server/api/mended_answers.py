"""Answers of vLLM's serving layer that do not say what happened, mended on the serving objects.

- ``echo`` gives the prompt back, with ``return_token_ids`` as without; with ``max_tokens`` 0 nothing else.
- A streamed response that its limit cut ends with ``response.incomplete``.
- Answers of earlier turns in a response's input are read whole, or refused.
- Beam search refuses what it does not look at; a prompt without room for an answer is told so.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from openai.types.responses import ResponseIncompleteEvent as OpenAIIncompleteEvent
from openai.types.responses import ResponseOutputMessage, ResponseOutputText
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.exceptions import VLLMValidationError

from server.api.refusals import RefusalError

_DATA = "data: "
#: What beam search does not look at, and the values that ask for nothing.
_BEAM_IGNORES: dict[str, tuple[Any, ...]] = {
    "stop": (None, [], ""),
    "stop_token_ids": (None, []),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "logit_bias": (None, {}),
    "logprob_token_ids": (None, []),
    "structured_outputs": (None,),
    "response_format": (None,),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "repetition_penalty": (None, 1.0),
}
_NO_ROOM = "max_tokens must be at least 1, got"


class ResponseIncompleteEvent(OpenAIIncompleteEvent):
    """OpenAI's event with vLLM's response, as vLLM has it for the others."""

    response: ResponsesResponse  # type: ignore[assignment]


def install(state: Any) -> None:
    """Mend the serving objects that ``init_app_state`` left in ``state``."""
    completion = getattr(state, "openai_serving_completion", None)
    chat = getattr(state, "openai_serving_chat", None)
    responses = getattr(state, "openai_serving_responses", None)
    if completion is not None:
        _guard(completion, "create_completion")
        _mend_echo(completion)
    if chat is not None:
        _guard(chat, "create_chat_completion")
    if responses is not None:
        _guard(responses, "create_responses")
        _mend_last_event(responses, "create_responses")
        _mend_last_event(responses, "retrieve_responses")


def check_beam_search(request: Any) -> None:
    """Refuse a beam search with parameters that vLLM's does not look at.

    Raises:
        RefusalError: names them.

    """
    if not getattr(request, "use_beam_search", False):
        return
    ignored = [name for name, nothing in _BEAM_IGNORES.items() if getattr(request, name, None) not in nothing]
    if ignored:
        raise RefusalError(
            f"Beam search does not look at {', '.join(ignored)}: leave out use_beam_search, or these.",
            parameter=ignored[0],
        )


def check_response_input(request: Any) -> None:
    """Refuse answers of earlier turns that vLLM cannot read; it takes the first part of each for its text.

    Several parts of text are joined into the first.

    Raises:
        RefusalError: says which one.

    """
    items = getattr(request, "input", None)
    for number, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, ResponseOutputMessage):
            continue
        texts = [part.text for part in item.content if isinstance(part, ResponseOutputText)]
        if not texts or len(texts) < len(item.content):
            raise RefusalError(
                f"input[{number}]: an answer of an earlier turn needs content of type output_text, and that "
                "alone: send its text, or leave it out.",
                parameter="input",
            )
        if len(texts) > 1:
            item.content = [item.content[0].model_copy(update={"text": "".join(texts)})]


def _guard(serving: Any, name: str) -> None:
    original: Callable[..., Awaitable[Any]] = getattr(serving, name)

    @functools.wraps(original)
    async def create(request: Any, *args: Any, **kwargs: Any) -> Any:
        check_beam_search(request)
        if name == "create_responses":
            check_response_input(request)
        try:
            return await original(request, *args, **kwargs)
        except (VLLMValidationError, ValueError) as error:
            asked = getattr(request, "max_tokens", None)
            if _NO_ROOM not in str(error) or (asked is not None and asked < 1):
                raise
            longest = serving.model_config.max_model_len
            raise RefusalError(
                f"The prompt fills the model's context of {longest} tokens, so nothing can be generated: "
                "shorten it.",
                parameter="prompt" if name == "create_completion" else "input_tokens",
            ) from error

    setattr(serving, name, create)


def _mend_last_event(serving: Any, name: str) -> None:
    original: Callable[..., Awaitable[Any]] = getattr(serving, name)

    @functools.wraps(original)
    async def answer(*args: Any, **kwargs: Any) -> Any:
        found = await original(*args, **kwargs)
        return _with_honest_end(found) if inspect.isasyncgen(found) else found

    setattr(serving, name, answer)


async def _with_honest_end(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for event in events:
        response = getattr(event, "response", None)
        if event.type == "response.completed" and getattr(response, "status", None) == "incomplete":
            yield ResponseIncompleteEvent.model_construct(
                type="response.incomplete", sequence_number=event.sequence_number, response=response
            )
        else:
            yield event


def _mend_echo(serving: Any) -> None:
    whole = serving.request_output_to_completion_response
    signature = inspect.signature(whole)

    @functools.wraps(whole)
    def respond(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        request, results = call["request"], call["final_res_batch"]
        if not request.echo:
            return whole(*args, **kwargs)
        prompts = [_prompt_of(serving, result.prompt, result.prompt_token_ids) for result in results]
        for result, prompt in zip(results, prompts, strict=True):
            result.prompt = prompt
        response = whole(*args, **kwargs)
        sequences = max(1, len(response.choices) // max(1, len(prompts)))
        for number, choice in enumerate(response.choices):
            if request.return_token_ids:
                choice.text = prompts[number // sequences] + choice.text
            if request.max_tokens == 0 and choice.token_ids is not None:
                choice.token_ids = []
        if request.max_tokens == 0:
            # vLLM generates one token, which nobody gets.
            response.usage.total_tokens -= response.usage.completion_tokens
            response.usage.completion_tokens = 0
        return response

    serving.request_output_to_completion_response = respond
    stream: Callable[..., AsyncIterator[str]] = serving.completion_stream_generator
    stream_signature = inspect.signature(stream)

    @functools.wraps(stream)
    def chunks(*args: Any, **kwargs: Any) -> AsyncIterator[str]:
        found = stream(*args, **kwargs)
        request = args[0] if args else kwargs["request"]
        if not (request.echo and request.return_token_ids):
            return found  # no wrapper, which each chunk would pass through
        waiting = {}
        for number, entry in enumerate(stream_signature.bind(*args, **kwargs).arguments["engine_inputs"]):
            ids = entry.get("prompt_token_ids")
            text = _prompt_of(serving, serving._extract_prompt_text(entry), ids)
            for sequence in range(request.n or 1):
                waiting[number * (request.n or 1) + sequence] = text
        return _with_prompts(found, waiting)

    serving.completion_stream_generator = chunks


async def _with_prompts(chunks: AsyncIterator[str], waiting: dict[int, str]) -> AsyncIterator[str]:
    async for chunk in chunks:
        yield _with_prompt(chunk, waiting) if waiting and chunk.startswith(_DATA + "{") else chunk


def _prompt_of(serving: Any, text: str | None, ids: list[int] | None) -> str:
    """Return a prompt's text, from its tokens where it came as such."""
    if text is not None:
        return text
    decoded: str = serving.renderer.get_tokenizer().decode(list(ids or ()))
    return decoded


def _with_prompt(chunk: str, waiting: dict[int, str]) -> str:
    """Return a chunk with the prompt before the first text of each sequence."""
    body = json.loads(chunk[len(_DATA) :])
    for choice in body.get("choices") or ():
        choice["text"] = waiting.pop(choice["index"], "") + (choice.get("text") or "")
    return f"{_DATA}{json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
