"""Model runner V2: a step whose sampling fails is sampled again request by request.

V2 keeps what a request samples by in a row of its own and draws by seed and position, so a batch of one
request gives the tokens that the step would have had. Drafting and log-probabilities of prompts are wrapped
on the runner's own objects: no seam lies before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from nwor.engine.request_isolation.common import Isolating, is_isolable, join_logprobs
from nwor.engine.vllm_features import mask_stride, masks_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Base
else:
    Base = object


class IsolatingRunnerV2(Isolating, Base):
    """Mixin before vLLM's V2 runner."""

    def _nwor_can_isolate(self, error: BaseException) -> bool:
        # Ranks would have to agree on what failed; adaptive verification has its rows on the device alone.
        parallel = self.parallel_config
        return (
            parallel.tensor_parallel_size == 1
            and parallel.pipeline_parallel_size == 1
            and self.pcp_manager is None
            and self.adaptive_verification is None
            and not self.model_config.return_sampling_mask
            and is_isolable(error)
        )

    def _nwor_isolate_objects(self) -> None:
        """Wrap what drafts and what computes prompts' log-probabilities; once, when both are there."""
        speculator: Any = self.speculator
        if speculator is not None:
            speculator.propose = self._nwor_drafting(speculator.propose)
        worker = self.prompt_logprobs_worker
        if worker is not None:
            worker.compute_prompt_logprobs = self._nwor_prompts(worker, worker.compute_prompt_logprobs)

    def _nwor_drafting(self, propose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def isolated(input_batch: InputBatch, *args: Any, **kwargs: Any) -> torch.Tensor:
            try:
                return propose(input_batch, *args, **kwargs)
            except Exception as error:
                # Drafts that were sampled are verified by the drafter's logits, which are not there now.
                speculator: Any = self.speculator
                if speculator.draft_logits is not None or not self._nwor_can_isolate(error):
                    raise
                self._nwor_tell("drafting", error, {})
                self._nwor_drafted_nothing(input_batch)
                return torch.zeros(
                    input_batch.num_reqs, self.num_speculative_steps, dtype=torch.int64, device=self.device
                )

        return isolated

    def _nwor_drafted_nothing(self, batch: InputBatch) -> None:
        """Take in that the drafter has failed, and that what stands for its tokens are zeros."""

    def _nwor_prompts(self, worker: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
        def isolated(logits_fn: Any, hidden_states: Any, batch: InputBatch, *args: Any) -> Any:
            parts = worker.in_progress_prompt_logprobs
            before = {request: list(parts[request]) for request in batch.req_ids if parts.get(request)}
            try:
                return compute(logits_fn, hidden_states, batch, *args)
            except Exception as error:
                if not self._nwor_can_isolate(error):
                    raise
                # A request may have got its part of this step before another failed.
                for request in batch.req_ids:
                    if request in parts:
                        parts[request][:] = before.get(request, [])
                wanted = worker.uses_prompt_logprobs.copy()
                found: dict[str, Any] = {}
                ended: dict[str, Exception] = {}
                for request, index in zip(batch.req_ids, batch.idx_mapping_np, strict=True):
                    if not wanted[index]:
                        continue
                    worker.uses_prompt_logprobs[:] = False
                    worker.uses_prompt_logprobs[index] = True
                    try:
                        found.update(compute(logits_fn, hidden_states, batch, *args))
                    except Exception as own:
                        if not is_isolable(own):
                            raise
                        ended[request] = own
                        wanted[index] = False
                worker.uses_prompt_logprobs[:] = wanted
                self._nwor_tell("prompt_logprobs", error, ended)
                return found

        return isolated

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: GrammarOutput | None
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Sample a step's batch; what fails is tried again request by request."""
        try:
            return super().sample(hidden_states, input_batch, grammar_output)
        except Exception as error:
            if not self._nwor_can_isolate(error):
                raise
            outputs: list[SamplerOutput | None] = []
            errors: dict[str, Exception] = {}
            for index, request in enumerate(input_batch.req_ids[: input_batch.num_reqs]):
                try:
                    alone = batch_of(input_batch, index)
                    own = grammar_of(grammar_output, request, input_batch, mask_stride(self.vllm_config))
                    outputs.append(super().sample(hidden_states, alone, own)[0])
                except Exception as own_error:
                    if not is_isolable(own_error):
                        raise
                    errors[request] = own_error
                    outputs.append(None)
            self._nwor_tell("sampling", error, errors)
            output = self._nwor_joined(outputs, input_batch)
            return output, output.num_sampled, output.num_rejected

    def _nwor_joined(self, outputs: list[SamplerOutput | None], batch: InputBatch) -> SamplerOutput:
        """Put outputs of requests, sampled by themselves, where the samplers put those of a batch.

        Args:
            outputs: of each request; None where it failed: it gets the token 0 and ends.
            batch: the step's.

        """
        verifies = batch.num_draft_tokens > 0 and self.rejection_sampler is not None
        width = self.num_speculative_steps + 1 if verifies else 1
        tokens = torch.zeros(len(outputs), width, dtype=torch.int64, device=self.device)
        sampled, rejected, parts = [], [], []
        for index, output in enumerate(outputs):
            if output is None:
                alone = batch_of(batch, index)
                counts = get_num_sampled_and_rejected(
                    alone.seq_lens.new_ones(1),
                    alone.seq_lens,
                    alone.cu_num_logits,
                    alone.idx_mapping,
                    self.req_states.prefill_len.gpu,
                )
            else:
                own = output.sampled_token_ids
                tokens[index, : own.shape[1]] = own[0]
                counts = output.num_sampled, output.num_rejected
            sampled.append(counts[0])
            rejected.append(counts[1])
            parts.append(None if output is None else output.logprobs_tensors)
        lengths = np.diff(batch.cu_num_logits_np[: len(outputs) + 1]).tolist()
        nans = [output.num_nans for output in outputs if output is not None and output.num_nans is not None]
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=_joined_logprobs(parts, lengths, self.device),
            num_nans=torch.cat(nans) if len(nans) == len(outputs) else None,
            num_sampled=torch.cat(sampled),
            num_rejected=torch.cat(rejected),
            sampling_mask_tensors=None,
        )


def batch_of(batch: InputBatch, index: int) -> InputBatch:
    """Return the part of a batch that sampling one of its requests takes."""
    first, last = batch.cu_num_logits_np[index : index + 2].tolist()
    here, rows = slice(index, index + 1), slice(first, last)
    drafts = batch.num_draft_tokens_per_req
    return replace(
        batch,
        req_ids=[batch.req_ids[index]],
        num_reqs=1,
        num_reqs_after_padding=1,
        idx_mapping=batch.idx_mapping[here],
        idx_mapping_np=batch.idx_mapping_np[here],
        expanded_idx_mapping=batch.expanded_idx_mapping[rows],
        expanded_local_pos=batch.expanded_local_pos[rows],
        num_scheduled_tokens=batch.num_scheduled_tokens[here],
        num_draft_tokens=last - first - 1,
        num_draft_tokens_per_req=None if drafts is None else drafts[here],
        seq_lens=batch.seq_lens[here],
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[here],
        logits_indices=batch.logits_indices[rows],
        cu_num_logits=batch.cu_num_logits[index : index + 2] - first,
        cu_num_logits_np=batch.cu_num_logits_np[index : index + 2] - first,
    )


def grammar_of(
    grammar: GrammarOutput | None, request: str, batch: InputBatch, stride: int | None
) -> GrammarOutput | None:
    """Return the masks of one request; None where it has none. ``stride`` is :func:`mask_stride`'s."""
    if grammar is None or request not in grammar.structured_output_request_ids:
        return None
    place = grammar.structured_output_request_ids.index(request)
    lengths = dict(zip(batch.req_ids, np.diff(batch.cu_num_logits_np).tolist(), strict=False))
    rows = masks_of(grammar, request, lambda other: lengths.get(other, 0) - 1, stride)
    acceptable = grammar.num_acceptable_drafts
    return GrammarOutput(
        [request],
        grammar.grammar_bitmask[rows],
        None if acceptable is None else acceptable[place : place + 1],
    )


def _joined_logprobs(
    parts: list[LogprobsTensors | None], lengths: list[int], device: torch.device
) -> LogprobsTensors | None:
    *firsts, rows = ends = np.cumsum([0, *lengths]).tolist()
    joined = join_logprobs(parts, firsts, rows, torch.int64, device)
    if joined is None or rows == len(lengths):
        return joined
    return joined._replace(cu_num_generated_tokens=ends)
