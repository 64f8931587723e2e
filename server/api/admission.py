"""What a request may not ask of this engine, told before it gets there, with 400 and what to do instead.

vLLM checks parameters when a request is added, which for a stream is after its status went out. So the engine
client's ``generate`` is wrapped on the object: the check runs when the serving layer calls it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams

from nwor.config import MAX_WINDOW, NworConfig
from nwor.engine.draft_lengths.request_bounds import MAX_DRAFT_TOKENS
from nwor.engine.patches import SCHEDULER
from server.api.http_errors import shorten
from server.api.refusals import RefusalError
from server.options import DEFAULT_MAX_GRAMMAR, REPORTING_SCHEDULER

#: Encodes as vLLM's messages to the engine do, as far as integers go.
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda _: None)
#: Parts of a schema beyond which it is not searched for references to itself.
_MAX_PARTS = 100_000


class Admission:
    """Checks sampling parameters against one engine.

    Args:
        engine: vLLM's engine client.
        max_grammar: characters of a grammar that are compiled.

    """

    def __init__(self, engine: Any, max_grammar: int = DEFAULT_MAX_GRAMMAR) -> None:
        self._processor = engine.input_processor
        self._speculates = engine.vllm_config.speculative_config is not None
        self._max_grammar = max_grammar
        self._unbounded = _why_unbounded(engine.vllm_config)

    def check(self, params: Any) -> None:
        """Refuse what cannot be served, and settle what vLLM leaves open.

        Args:
            params: a request's own sampling parameters.

        Raises:
            RefusalError: the request is answered with 400 and this message.

        """
        if not isinstance(params, SamplingParams):
            return
        check_integers(params)
        if params.extra_args:
            self._check_bound(params.extra_args)
        if self._speculates and params.logprob_token_ids:
            raise RefusalError(
                "logprob_token_ids is not served beside speculative decoding: ask for logprobs, or have the "
                "server started without a draft.",
                parameter="logprob_token_ids",
            )
        if any(not word.strip() for word in params.bad_words or ()):
            raise RefusalError(
                "bad_words: a word of white space alone excludes nothing: leave it out, or allow all other "
                "tokens with allowed_token_ids.",
                parameter="bad_words",
            )
        if params.allowed_token_ids:
            self._check_masks(params)
        if params.structured_outputs is not None:
            check_grammar(params.structured_outputs, self._max_grammar)
            # Behind the end of its grammar an answer would go on without one.
            params.ignore_eos = False
        if params.output_kind == RequestOutputKind.DELTA:
            # vLLM's own checks, which for other answers come in time.
            processor = self._processor
            params.verify(
                processor.model_config,
                processor.speculative_config,
                processor.structured_outputs_config,
                processor.tokenizer,
            )

    def _check_bound(self, extra: Mapping[str, Any]) -> None:
        """Refuse a bound of the draft tokens that is none, or that nobody would keep to."""
        unknown = next((key for key in extra if key.startswith("nwor_") and key != MAX_DRAFT_TOKENS), None)
        if unknown is not None:
            raise RefusalError(
                f"vllm_xargs has an unknown field {shorten(unknown)}: NWOR knows {MAX_DRAFT_TOKENS!r}.",
                parameter="vllm_xargs",
            )
        if MAX_DRAFT_TOKENS not in extra:
            return
        bound = extra[MAX_DRAFT_TOKENS]
        if isinstance(bound, bool) or not isinstance(bound, int) or not 0 <= bound < MAX_WINDOW:
            raise RefusalError(
                f"{MAX_DRAFT_TOKENS} must be a whole number from 0, no speculation for this request, to "
                f"{MAX_WINDOW - 1}, not {shorten(bound)}.",
                parameter="vllm_xargs",
            )
        if self._unbounded is not None:
            raise RefusalError(
                f"{MAX_DRAFT_TOKENS} has no effect here, because {self._unbounded}: leave it out.",
                parameter="vllm_xargs",
            )

    def _check_responses(self, serving: Any) -> None:
        """Have a streamed response checked as it begins: it calls the engine after its status went out."""
        create = serving.create_responses

        @functools.wraps(create)
        async def checked(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.stream:
                self.check(request.to_sampling_params(1, serving.default_sampling_params))
            return await create(request, *args, **kwargs)

        serving.create_responses = checked

    def _check_masks(self, params: SamplingParams) -> None:
        """Refuse masks that leave nothing to sample from the start."""
        whole = params.clone()
        tokenizer = self._processor.tokenizer
        if tokenizer is not None:
            whole.update_from_tokenizer(tokenizer)
        eos = getattr(tokenizer, "eos_token_id", None)
        whole.update_from_generation_config(self._processor.generation_config_fields, eos)
        left = set(params.allowed_token_ids or ())
        left -= {word[0] for word in whole.bad_words_token_ids or () if len(word) == 1}
        if not left:
            raise RefusalError(
                "allowed_token_ids and bad_words exclude every token between them: allow a token that is no "
                "bad word.",
                parameter="allowed_token_ids",
            )
        if params.min_tokens and not left - whole.all_stop_token_ids:
            raise RefusalError(
                "allowed_token_ids allows stop tokens alone, which min_tokens excludes: allow another token "
                "or drop min_tokens.",
                parameter="allowed_token_ids",
            )

    def install(self, engine: Any, state: Any = None) -> None:
        """Have every request of an engine client checked before anything of its answer is sent.

        Args:
            engine: vLLM's engine client.
            state: the application's state, with the serving objects in place.

        """
        if getattr(state, "openai_serving_responses", None) is not None:
            self._check_responses(state.openai_serving_responses)
        generate = engine.generate

        @functools.wraps(generate)
        def checked(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            self.check(sampling_params)
            check_integers(kwargs)
            results: AsyncIterator[Any] = generate(prompt, sampling_params, *args, **kwargs)
            return results

        engine.generate = checked


def check_integers(values: SamplingParams | dict[str, Any]) -> None:
    """Refuse integers that no message to the engine can hold.

    Args:
        values: sampling parameters, or other arguments of a request by name.

    Raises:
        RefusalError: names the argument.

    """
    try:
        _ENCODER.encode(values)
    except OverflowError:
        pass
    else:
        return
    named = values if isinstance(values, dict) else msgspec.structs.asdict(values)
    for name, value in named.items():
        try:
            _ENCODER.encode(value)
        except OverflowError:
            raise RefusalError(
                f"{name}: an integer has more than 64 bits: send a smaller one.", parameter=name
            ) from None


def _why_unbounded(vllm_config: Any) -> str | None:
    """Return why an engine keeps to no bound of a request's draft tokens; None where it does.

    One without speculation does: nobody drafts.
    """
    if vllm_config.speculative_config is None:
        return None
    if NworConfig.from_additional_config(vllm_config.additional_config) is None:
        return "the server runs without NWOR"
    if vllm_config.scheduler_config.scheduler_cls not in (SCHEDULER, REPORTING_SCHEDULER):
        return "the server has a scheduler of its own (--scheduler-cls)"
    if getattr(vllm_config, "diffusion_config", None) is not None:
        return "a diffusion model has vLLM's own scheduler"
    return None


def check_grammar(structured: Any, largest: int) -> None:
    """Refuse a grammar that would take long to compile, or that describes nothing.

    Args:
        structured: vLLM's ``StructuredOutputsParams``.
        largest: characters that are compiled.

    Raises:
        RefusalError: it is too large, or a part of its schema refers to nothing but itself.

    """
    for kind in ("json", "regex", "choice", "grammar", "structural_tag"):
        value = getattr(structured, kind, None)
        if value is None:
            continue
        if isinstance(value, list):
            size = sum(len(choice) + 3 for choice in value)
        else:
            size = len(value if isinstance(value, str) else json.dumps(value))
        if size > largest:
            raise RefusalError(
                f"structured_outputs.{kind} has {size} characters, and this server compiles at most "
                f"{largest}: make it smaller, or have the server started with a larger limit "
                "(nwor-server --max-grammar-size).",
                parameter="structured_outputs",
            )
        if kind == "json":
            _check_references(value)


def _check_references(schema: Any) -> None:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return  # vLLM says so
    reference: Any
    ending: set[str] = set()
    for reference in _references(schema):
        seen: set[str] = set()
        while isinstance(reference, str) and reference not in ending:
            if reference in seen:
                raise RefusalError(
                    f"The schema's {reference!r} refers to nothing but itself: give it a type.",
                    parameter="response_format",
                )
            seen.add(reference)
            target = _resolved(schema, reference)
            reference = target.get("$ref") if isinstance(target, dict) else None
        # Each is followed once, or a long chain would be from each of its links.
        ending |= seen


def _references(schema: Any) -> Iterator[str]:
    """Return every ``$ref`` within a schema."""
    parts, number = [schema], 0
    while parts and number < _MAX_PARTS:
        part = parts.pop()
        number += 1
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)


def _resolved(schema: Any, reference: str) -> Any:
    """Return what a reference within a schema names; None where it names nothing there."""
    if reference == "#":
        return schema
    if not reference.startswith("#/"):
        return None
    for word in reference[2:].split("/"):
        name = word.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema
