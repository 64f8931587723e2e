"""Structured outputs: an exception in one request's grammar stays with that request.

Compiling has a limit of time, which :mod:`nwor.engine.request_isolation.grammar_limit` sets. And no control
token is sampled inside a grammar's strings. To a grammar a token is its text, so that ``<|user|>`` matches
whatever takes any character. Structural tags, which name such tokens on purpose, may have them.
"""

from __future__ import annotations

import logging
import threading
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from nwor.config import NworConfig
from nwor.engine.request_isolation.grammar_limit import LimitedCompiler, limit
from nwor.engine.vllm_features import mask_stride

logger = logging.getLogger("vllm.nwor.grammars")


class NothingLeftError(Exception):
    """A grammar got a token that its own masks exclude: they, with the request's others, left none."""


class GuardedGrammars(StructuredOutputManager):
    """What the engine's manager becomes."""

    #: Errors by request, until the scheduler takes them.
    _nwor_failed: dict[str, Exception]
    #: Control tokens that end no text.
    _nwor_control: frozenset[int]
    #: Seconds that compiling a grammar may take; 0 has no limit.
    _nwor_seconds: int
    #: Held by the thread that sets the limit up.
    _nwor_lock: threading.Lock

    @property
    def has_failed(self) -> bool:
        """Whether there are errors to take."""
        return bool(self._nwor_failed)

    def take_failed(self) -> dict[str, Exception]:
        """Return the errors since this was last called, by request."""
        failed, self._nwor_failed = self._nwor_failed, {}
        return failed

    def _create_grammar(self, request: Any) -> Any:
        if self._nwor_seconds:
            with self._nwor_lock:
                limit(self.backend, self._nwor_seconds, self.executor._max_workers)
            if isinstance(compiler := getattr(self.backend, "compiler", None), LimitedCompiler):
                compiler.prepare()
        return super()._create_grammar(request)

    def clear_backend(self) -> None:
        """End compiling, and release the backend."""
        if isinstance(compiler := getattr(self.backend, "compiler", None), LimitedCompiler):
            compiler.close()
        super().clear_backend()

    def grammar_bitmask(
        self, requests: Any, structured_output_request_ids: list[str], scheduled_spec_decode_tokens: Any
    ) -> npt.NDArray[np.int32] | None:
        """Return the step's masks; a request whose grammar fails may take any token, and ends."""
        ids = structured_output_request_ids
        self._nwor_allocate()
        try:
            masks = super().grammar_bitmask(requests, ids, scheduled_spec_decode_tokens)
        except Exception:
            masks = self._one_by_one(requests, ids, scheduled_spec_decode_tokens)
        if masks is not None and self._nwor_control:
            row, stride = 0, mask_stride(self.vllm_config)
            for request_id in ids:
                rows = 1 + len(scheduled_spec_decode_tokens.get(request_id, ()))
                request = requests[request_id]
                if _is_plain(request):
                    control = self._nwor_control - request.sampling_params.all_stop_token_ids
                    _take_out(masks[row : row + rows], control)
                row += stride or rows
        return masks

    def _nwor_allocate(self) -> None:
        """Allocate masks of as many rows as a step can have, where vLLM would for trees of all requests."""
        known = getattr(self, "_grammar_bitmask", None) is not None
        if known or self.backend is None or mask_stride(self.vllm_config) is not None:
            return
        scheduler = self.vllm_config.scheduler_config
        rows = scheduler.max_num_seqs * (1 + self.vllm_config.num_speculative_tokens)
        self._grammar_bitmask = self.backend.allocate_token_bitmask(
            min(rows, scheduler.max_num_batched_tokens)
        )

    def _one_by_one(self, requests: Any, ids: list[str], drafts: Any) -> npt.NDArray[np.int32] | None:
        parts = []
        for request_id in ids:
            try:
                part = super().grammar_bitmask(requests, [request_id], drafts)
                assert part is not None
                parts.append(part.copy())  # the next call writes to the same rows
            except Exception as error:
                self._nwor_failed[request_id] = error
                words = -(-self.vllm_config.model_config.get_vocab_size() // 32)
                if self._grammar_bitmask is not None:
                    words = self._grammar_bitmask.shape[1]
                rows = mask_stride(self.vllm_config) or 1 + len(drafts.get(request_id, ()))
                parts.append(np.full((rows, words), -1, dtype=np.int32))
        return np.concatenate(parts) if parts else None

    def accept_tokens(self, request: Any, new_token_ids: list[int]) -> bool:
        """Let a grammar take in tokens; one that fails ends its request, as one that refuses them does."""
        try:
            taken: bool = super().accept_tokens(request, new_token_ids)
        except Exception as error:
            self._nwor_failed[request.request_id] = error
            return False
        if not taken:
            self._nwor_failed[request.request_id] = NothingLeftError()
        return taken

    def validate_tokens(self, request: Any, spec_tokens: list[int]) -> list[int]:
        """Return the drafts that a grammar takes; none where it fails."""
        try:
            return super().validate_tokens(request, spec_tokens)
        except Exception as error:
            self._nwor_failed[request.request_id] = error
            return []


def guard(manager: Any) -> GuardedGrammars | None:
    """Make an engine's freshly made manager the class above; return None for one that is not vLLM's own."""
    if type(manager) not in (StructuredOutputManager, GuardedGrammars):
        return None
    manager.__class__ = GuardedGrammars
    guarded: GuardedGrammars = manager
    guarded._nwor_failed = {}
    guarded._nwor_control = frozenset()
    config = NworConfig.from_additional_config(manager.vllm_config.additional_config)
    guarded._nwor_seconds = config.grammar_seconds if config is not None else 0
    guarded._nwor_lock = threading.Lock()
    if not manager.vllm_config.model_config.skip_tokenizer_init:
        guarded._nwor_control = _control_tokens(manager)
    return guarded


def _control_tokens(manager: StructuredOutputManager) -> frozenset[int]:
    """Return the tokenizer's special tokens but those that end a text."""
    config, tokenizer = manager.vllm_config.model_config, manager.tokenizer
    ends = {getattr(tokenizer, "eos_token_id", None)}
    generation = config.try_get_generation_config()
    more = generation.get("eos_token_id")
    ends.update(more if isinstance(more, list) else [more])
    size = config.get_vocab_size()
    special = {token for token in getattr(tokenizer, "all_special_ids", ()) if 0 <= token < size}
    return frozenset(special - ends)


def _is_plain(request: Any) -> bool:
    """Return whether a request has a grammar in which control tokens have no place."""
    structured = request.structured_output_request
    if structured is None:
        return False
    kind, _ = structured.structured_output_key
    return kind != StructuredOutputOptions.STRUCTURAL_TAG


def _take_out(masks: npt.NDArray[np.int32], tokens: frozenset[int]) -> None:
    """Take tokens out of masks, in place; a mask that allows everything stays as it is.

    Args:
        masks: int32 [rows, words], a bit for each token.
        tokens: ids within the masks.

    """
    words, kept = _words_without(tokens)
    masks[np.ix_((masks != -1).any(axis=1), words)] &= kept


@lru_cache(maxsize=32)
def _words_without(tokens: frozenset[int]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]:
    """Return which words of a mask have bits of tokens, and all other bits of those words.

    Some tokenizers have a thousand control tokens, and this is asked for each request in every step.
    """
    ids = np.array(sorted(tokens), dtype=np.intp)
    words, places = np.unique(ids // 32, return_inverse=True)
    kept = np.full(len(words), 0xFFFFFFFF, dtype=np.uint32)
    np.bitwise_and.at(kept, places, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    return words, kept.view(np.int32)
