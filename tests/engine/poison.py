"""Makes vLLM's own parts raise for one kind of request, on either model runner; a context each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.engine.runner import V2

MESSAGE = "poisoned on purpose"
#: What the poisoned request has, and no other.
LOGPROBS = 7
PROMPT_LOGPROBS = 6


def _raise() -> None:
    raise RuntimeError(MESSAGE)


@contextmanager
def sampling() -> Iterator[None]:
    """Bad words raise."""
    if V2:
        from vllm.v1.worker.gpu.sample.bad_words import BadWordsState

        original = BadWordsState.apply

        def apply(self: Any, logits: Any, ctx: Any) -> Any:
            if self.num_bad_words.np[ctx.idx_mapping_np].any():
                _raise()
            return original(self, logits, ctx)

        with mock.patch.object(BadWordsState, "apply", apply):
            yield
        return
    error = RuntimeError(MESSAGE)
    with (
        mock.patch("vllm.v1.sample.rejection_sampler.apply_bad_words_with_drafts", side_effect=error),
        mock.patch("vllm.v1.sample.sampler.apply_bad_words", side_effect=error),
    ):
        yield


@contextmanager
def logprobs() -> Iterator[None]:
    """So many log-probabilities raise."""
    if V2:
        from vllm.v1.worker.gpu.sample import sampler
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        original = sampler.compute_topk_scores

        def compute(logits: Any, num_logprobs: int, *args: Any, **kwargs: Any) -> Any:
            if num_logprobs == LOGPROBS:
                _raise()
            return original(logits, num_logprobs, *args, **kwargs)

        with (
            mock.patch.object(sampler, "compute_topk_scores", compute),
            mock.patch.object(rejection_sampler, "compute_topk_scores", compute),
        ):
            yield
        return
    from vllm.v1.sample.sampler import Sampler

    gather = Sampler.gather_logprobs

    def gather_logprobs(values: Any, num_logprobs: int, token_ids: Any) -> Any:
        if num_logprobs == LOGPROBS:
            _raise()
        return gather(values, num_logprobs, token_ids)

    with mock.patch.object(Sampler, "gather_logprobs", staticmethod(gather_logprobs)):
        yield


@contextmanager
def prompt_logprobs() -> Iterator[None]:
    """So many log-probabilities of prompts raise."""
    if V2:
        from vllm.v1.worker.gpu.sample import prompt_logprob

        original = prompt_logprob.compute_prompt_logprobs_with_chunking

        def compute(ids: Any, states: Any, logits: Any, number: int, *args: Any) -> Any:
            if number == PROMPT_LOGPROBS:
                _raise()
            return original(ids, states, logits, number, *args)

        with mock.patch.object(prompt_logprob, "compute_prompt_logprobs_with_chunking", compute):
            yield
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stock = GPUModelRunner._get_prompt_logprobs_dict

    def get(self: Any, *args: Any) -> Any:
        if PROMPT_LOGPROBS in self.num_prompt_logprobs.values():
            _raise()
        return stock(self, *args)

    with mock.patch.object(GPUModelRunner, "_get_prompt_logprobs_dict", get):
        yield


@contextmanager
def grammar_masks() -> Iterator[None]:
    """The grammar's masks cannot be applied, where its request is the last that has one."""
    if V2:
        from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

        apply_v2 = StructuredOutputsWorker.apply_grammar_bitmask

        def apply(self: Any, logits: Any, batch: Any, ids: Any, mask: Any) -> None:
            if any(_is_poisoned(request) for request in ids):
                _raise()
            apply_v2(self, logits, batch, ids, mask)

        with mock.patch.object(StructuredOutputsWorker, "apply_grammar_bitmask", apply):
            yield
        return
    from nwor.engine.request_isolation import v1 as isolation_v1

    original = isolation_v1.apply_grammar_bitmask

    def apply_v1(scheduled: Any, grammar: Any, batch: Any, logits: Any) -> None:
        if any(_is_poisoned(request) for request in grammar.structured_output_request_ids):
            _raise()
        original(scheduled, grammar, batch, logits)

    with mock.patch.object(isolation_v1, "apply_grammar_bitmask", apply_v1):
        yield


@contextmanager
def grammar_state() -> Iterator[None]:
    """A grammar raises when it takes in tokens: drafts for the masks of later ones, and those sampled."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    original = XgrammarGrammar.accept_tokens

    def accept(self: Any, request_id: str, tokens: list[int]) -> bool:
        if _is_poisoned(request_id):
            _raise()
        return original(self, request_id, tokens)

    with mock.patch.object(XgrammarGrammar, "accept_tokens", accept):
        yield


@contextmanager
def drafting(runner: Any) -> Iterator[None]:
    """The drafter raises, whatever it drafts for."""
    owner, name = (runner.speculator, "sample_draft") if V2 else (runner.drafter, "propose")
    with mock.patch.object(owner, name, side_effect=RuntimeError(MESSAGE)) as poisoned_drafter:
        yield
    assert poisoned_drafter.called


#: Number of the poisoned request among those of the run, set by the test.
poisoned: list[str] = []


def _is_poisoned(request_id: str) -> bool:
    return request_id.partition("-")[0] in poisoned
