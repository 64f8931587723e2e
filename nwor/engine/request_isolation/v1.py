"""Model runner V1: a step whose sampling fails is sampled again request by request.

The logits are computed anew from the hidden states, since sampling changes them in place. Generators of
seeded requests go back to where they were, so the tokens are those that the step would have had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from nwor.engine.request_isolation.common import Isolating, is_isolable, join_logprobs
from nwor.engine.vllm_features import mask_stride, masks_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Base
else:
    Base = object


def without_empty_windows(metadata: SpecDecodeMetadata | None) -> SpecDecodeMetadata | None:
    """Return None for a step in which no request has drafts: the plain sampler then serves it.

    vLLM sends each step of an engine that speculates through the rejection sampler, so that its kernels and
    masks are called with tensors of no rows; some of them raise.
    """
    return None if metadata is None or metadata.max_spec_len == 0 else metadata


@contextmanager
def minimum_of_last_rows(processors: Any, num_draft_tokens: list[int]) -> Iterator[None]:
    """Let ``min_tokens`` look at a window's last row with the length that it has there.

    vLLM masks the stop tokens of that row by the length before the window, and so lets an answer run past its
    natural end where the drafts before that row reach the minimum.

    Args:
        processors: the batch's logits processors.
        num_draft_tokens: drafts of each request.

    """
    changed: list[tuple[MinTokensLogitsProcessor, Any, Any]] = []
    for processor in processors.non_argmax_invariant:
        if not isinstance(processor, MinTokensLogitsProcessor) or not processor.min_toks:
            continue
        rows: list[int] = []
        tokens: list[int] = []
        restored_rows: list[int] = []
        restored_tokens: list[int] = []
        for index, (minimum, output, stops, structured) in processor.min_toks.items():
            if len(output) + num_draft_tokens[index] < minimum:
                rows += [index] * len(stops)
                tokens += stops
                if structured:
                    restored_rows += [index] * len(stops)
                    restored_tokens += stops
        changed.append((processor, processor.logits_slice, processor.restore_logits_slice))
        make = processor._device_tensor
        processor.logits_slice = (make(rows, torch.int32), make(tokens, torch.int32))
        processor.restore_logits_slice = (
            make(restored_rows, torch.int32),
            make(restored_tokens, torch.int32),
        )
    try:
        yield
    finally:
        for processor, logits_slice, restore_slice in changed:
            processor.logits_slice, processor.restore_logits_slice = logits_slice, restore_slice


class IsolatingRunnerV1(Isolating, Base):
    """Mixin before vLLM's V1 runner."""

    _nwor_step: Any = None
    _nwor_grammar: GrammarOutput | None = None
    num_prompt_logprobs: dict[str, int]

    def _nwor_can_isolate(self, error: BaseException) -> bool:
        parallel = self.parallel_config
        alone = parallel.tensor_parallel_size == 1 and parallel.pipeline_parallel_size == 1
        return alone and self._nwor_step is not None and is_isolable(error)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Sample; the grammar's masks are applied where their failure can be traced to a request."""
        if self.execute_model_state is None:
            return super().sample_tokens(grammar_output)
        self._nwor_step, self._nwor_grammar = self.execute_model_state, grammar_output
        self._nwor_failures = None
        try:
            return super().sample_tokens(None)
        finally:
            self._nwor_step = self._nwor_grammar = None

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        metadata = without_empty_windows(spec_decode_metadata)
        generators = self.input_batch.generators
        states = {index: generator.get_state() for index, generator in generators.items()}
        place = "grammar"
        try:
            if self._nwor_grammar is not None:
                assert logits is not None
                apply_grammar_bitmask(
                    self._nwor_step.scheduler_output, self._nwor_grammar, self.input_batch, logits
                )
            place = "sampling"
            if metadata is None:
                return super()._sample(logits, None)
            with minimum_of_last_rows(self.input_batch.logitsprocs, metadata.num_draft_tokens):
                return super()._sample(logits, metadata)
        except Exception as error:
            if not self._nwor_can_isolate(error):
                raise
            for index, state in states.items():
                generators[index].set_state(state)
            output, errors = self._nwor_sample_each(metadata)
            self._nwor_tell(place, error, errors)
            return output

    def _nwor_sample_each(
        self, metadata: SpecDecodeMetadata | None
    ) -> tuple[SamplerOutput, dict[str, Exception]]:
        """Sample every request of the step by itself.

        Returns:
            The step's output, in which a request that failed has the token 0; and the errors by request.

        """
        batch = self.input_batch
        drafts = metadata.num_draft_tokens if metadata is not None else [0] * batch.num_reqs
        probabilities = self._get_spec_decode_draft_probs(metadata) if metadata is not None else None
        logits = self.model.compute_logits(self._nwor_step.sample_hidden_states)
        width = max(drafts) + 1
        outputs: list[SamplerOutput | None] = []
        errors: dict[str, Exception] = {}
        row = draft = 0
        for index, request in enumerate(batch.req_ids):
            count = drafts[index]
            try:
                rows = logits[row : row + count + 1].clone()
                outputs.append(self._nwor_sample_one(index, rows, draft, metadata, probabilities))
            except Exception as error:
                if not is_isolable(error):
                    raise
                errors[request] = error
                outputs.append(None)
            row += count + 1
            draft += count
        return _joined(outputs, drafts, width, self.device), errors

    def _nwor_sample_one(
        self,
        index: int,
        logits: torch.Tensor,
        draft: int,
        metadata: SpecDecodeMetadata | None,
        probabilities: torch.Tensor | None,
    ) -> SamplerOutput:
        """Sample one request by itself.

        Args:
            index: where it stands in the batch.
            logits: [its drafts + 1, vocabulary], its own to change.
            draft: its first draft among those of the step.
            metadata: the step's, None where it has no drafts.
            probabilities: [drafts of the step, vocabulary] of the drafter, where it kept them.

        """
        self._nwor_apply_grammar(self.input_batch.req_ids[index], logits)
        sampling, count = self._nwor_metadata_of(index), logits.shape[0] - 1
        if count == 0:
            return self.sampler(logits=logits, sampling_metadata=sampling)
        assert metadata is not None
        counts = torch.tensor([count], dtype=torch.int32, device=self.device)
        rows = torch.arange(count + 1, dtype=torch.int32, device=self.device)
        own = SpecDecodeMetadata(
            draft_token_ids=metadata.draft_token_ids[draft : draft + count].contiguous(),
            num_draft_tokens=[count],
            cu_num_draft_tokens=counts,
            cu_num_sampled_tokens=counts + 1,
            target_logits_indices=rows[:-1],
            bonus_logits_indices=rows[-1:],
            logits_indices=rows,
        )
        likely = None if probabilities is None else probabilities[draft : draft + count].contiguous()
        with minimum_of_last_rows(sampling.logitsprocs, [count]):
            return self.rejection_sampler(own, likely, logits, sampling)

    def _nwor_apply_grammar(self, request: str, logits: torch.Tensor) -> None:
        """Apply a request's grammar, if it has one, to its own rows."""
        grammar = self._nwor_grammar
        if grammar is None or request not in grammar.structured_output_request_ids:
            return
        scheduled = self._nwor_step.scheduler_output
        drafts = scheduled.scheduled_spec_decode_tokens
        rows = masks_of(
            grammar, request, lambda other: len(drafts.get(other, ())), mask_stride(self.vllm_config)
        )
        own = GrammarOutput([request], grammar.grammar_bitmask[rows])
        alone: Any = SimpleNamespace(req_ids=[request])  # all that is read of a batch
        apply_grammar_bitmask(scheduled, own, alone, logits)

    def _nwor_metadata_of(self, index: int) -> SamplingMetadata:
        batch = self.input_batch
        request = batch.req_ids[index]
        whole = batch.sampling_metadata
        holder = whole.thinking_budget_state_holder
        if holder is not None and request in batch.thinking_token_budget_reqs:
            raise RuntimeError("a request with a thinking budget cannot be sampled by itself")
        here = slice(index, index + 1)
        greedy = request in batch.greedy_reqs
        return replace(
            whole,
            temperature=None if greedy or whole.temperature is None else whole.temperature[here],
            all_greedy=greedy,
            all_random=not greedy,
            top_p=None if whole.top_p is None else whole.top_p[here],
            top_k=None if whole.top_k is None else whole.top_k[here],
            generators={0: batch.generators[index]} if index in batch.generators else {},
            max_num_logprobs=batch.num_logprobs.get(request),
            prompt_token_ids=None if whole.prompt_token_ids is None else whole.prompt_token_ids[here],
            frequency_penalties=whole.frequency_penalties[here],
            presence_penalties=whole.presence_penalties[here],
            repetition_penalties=whole.repetition_penalties[here],
            output_token_ids=whole.output_token_ids[here],
            allowed_token_ids_mask=(
                whole.allowed_token_ids_mask[here]
                if whole.allowed_token_ids_mask is not None and request in batch.has_allowed_token_ids
                else None
            ),
            bad_words_token_ids=(
                {0: batch.bad_words_token_ids[index]} if index in batch.bad_words_token_ids else {}
            ),
            logitsprocs=self._nwor_processors_of(request),
            logprob_token_ids=(
                {0: batch.logprob_token_ids[request]} if request in batch.logprob_token_ids else None
            ),
            spec_token_ids=None if whole.spec_token_ids is None else whole.spec_token_ids[here],
            thinking_budget_state_holder=None,
        )

    def _nwor_processors_of(self, request: str) -> LogitsProcessors:
        """Return logits processors that know one request, the first of their batch."""
        state = self.requests[request]
        assert isinstance(state.sampling_params, SamplingParams)
        added = [(0, state.sampling_params, state.prompt_token_ids, state.output_token_ids)]
        made = []
        for processor in self.input_batch.logitsprocs.all:
            own = type(processor)(self.vllm_config, self.device, PIN_MEMORY)
            own.update_state(BatchUpdate(batch_size=1, removed=[], added=added, moved=[]))
            made.append(own)
        return LogitsProcessors(made)

    def _get_prompt_logprobs_dict(self, *args: Any, **kwargs: Any) -> dict[str, LogprobsTensors | None]:
        wanted = self.num_prompt_logprobs
        try:
            return super()._get_prompt_logprobs_dict(*args, **kwargs)
        except Exception as error:
            if not wanted or not self._nwor_can_isolate(error):
                raise
            found: dict[str, LogprobsTensors | None] = {}
            ended: dict[str, Exception] = {}
            for request, number in list(wanted.items()):
                self.num_prompt_logprobs = own = {request: number}
                try:
                    found.update(super()._get_prompt_logprobs_dict(*args, **kwargs))
                except Exception as own_error:
                    if not is_isolable(own_error):
                        raise
                    ended[request] = own_error
                    own.clear()
                if not own:
                    wanted.pop(request)
            self.num_prompt_logprobs = wanted
            self._nwor_tell("prompt_logprobs", error, ended)
            return found

    def propose_draft_token_ids(self, scheduler_output: Any, sampled_token_ids: Any, *args: Any) -> Any:
        """Draft; where that fails the next step gets drafts that verification throws away, and no harm."""
        try:
            return super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *args)
        except Exception as error:
            if not self._nwor_can_isolate(error):
                raise
            self._nwor_tell("drafting", error, {})
            self._draft_probs = self._draft_prob_req_ids = None
            if self.valid_sampled_token_count_event is not None:
                # Steps scheduled ahead find the sampled tokens there.
                tokens, counts = self.drafter.prepare_next_token_ids_padded(
                    sampled_token_ids, self.requests, self.input_batch, self.discard_request_mask.gpu
                )
                self._copy_valid_sampled_token_count(tokens, counts)
            return torch.zeros(
                self.input_batch.num_reqs, self.num_spec_tokens, dtype=torch.int32, device=self.device
            )


def _joined(
    outputs: list[SamplerOutput | None], drafts: list[int], width: int, device: torch.device
) -> SamplerOutput:
    """Put the outputs of requests, sampled by themselves, where the samplers put those of a batch.

    Args:
        outputs: of each request; None where it failed.
        drafts: of each request.
        width: most tokens of a request.
        device: where the tokens go.

    """
    tokens = torch.full((len(outputs), width), -1, dtype=torch.int32, device=device)
    for index, output in enumerate(outputs):
        if output is None:
            tokens[index, 0] = 0
        else:
            tokens[index, : drafts[index] + 1] = output.sampled_token_ids[0]
    parts = [None if output is None else output.logprobs_tensors for output in outputs]
    rows = len(outputs) * width
    return SamplerOutput(tokens, join_logprobs(parts, range(0, rows, width), rows, torch.int32, device))
