"""Beam search that knows every end token of the model.

vLLM's looks for the tokenizer's own alone. A beam's next tokens come as log-probabilities: those of further
end tokens are shown to it as the one that it knows.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

#: The further end tokens in force, within a beam search; what it starts inherits them.
_ends: ContextVar[frozenset[int]] = ContextVar("further end tokens of a beam search", default=frozenset())


def install(state: Any, engine: Any) -> None:
    """Have the beam searches of the serving objects in ``state`` end where a greedy answer would."""
    processor = engine.input_processor
    known = getattr(processor.tokenizer, "eos_token_id", None)
    found = processor.generation_config_fields.get("eos_token_id")
    further = frozenset(found if isinstance(found, list) else [found]) - {known, None}
    if known is None or not further:
        return
    for name in ("openai_serving_completion", "openai_serving_chat"):
        serving = getattr(state, name, None)
        if serving is not None:
            serving.beam_search = _marked(serving.beam_search, further)
    generate = engine.generate

    @functools.wraps(generate)
    def generate_for_beams(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        results: AsyncIterator[Any] = generate(*args, **kwargs)
        ends = _ends.get()
        return _with_one_end(results, known, ends) if ends else results

    engine.generate = generate_for_beams


def _marked(search: Any, further: frozenset[int]) -> Any:
    @functools.wraps(search)
    async def beam_search(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        params = kwargs["params"] if "params" in kwargs else args[2]
        _ends.set(frozenset() if params.ignore_eos else further)
        try:
            async for result in search(*args, **kwargs):
                yield result
        finally:
            _ends.set(frozenset())

    return beam_search


async def _with_one_end(
    results: AsyncIterator[Any], known: int, further: frozenset[int]
) -> AsyncIterator[Any]:
    async for result in results:
        for output in result.outputs:
            for row in output.logprobs or ():
                ends = [row.pop(token) for token in further if token in row]
                if ends:
                    row[known] = max(
                        [*ends, *([row[known]] if known in row else [])], key=lambda x: x.logprob
                    )
        yield result
