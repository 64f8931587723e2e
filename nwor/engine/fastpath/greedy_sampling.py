"""Sampling on model runner V2 on CUDA, with kernels made for its two usual cases.

- The drafter takes the most likely token: vLLM's ``argmax`` reads few rows with few thread blocks.
- Every request of a batch is greedy: see :mod:`nwor.engine.fastpath.greedy_rejection`.

All else goes to the stock methods. Both ways stand for code of vLLM's, so they are taken only where that code
is, to the letter, the one that they were written for.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from nwor import ops
from nwor.engine.fastpath.greedy_rejection import DTYPES, rejection_sample_greedy
from nwor.engine.fastpath.stock import Sources, changed
from nwor.engine.vllm_features import accepts_lossily

logger = logging.getLogger("vllm.nwor.greedy_sampling")

_GPU = "vllm.v1.worker.gpu"
_SPEC = f"{_GPU}.spec_decode"
_KERNELS = f"{_SPEC}.rejection_sampler_utils"

#: What each of the two ways stands for.
DRAFTING: Sources = {
    (f"{_SPEC}.speculator", "DraftModelSpeculator.sample_draft"): ("f729e99b44320e54", "f8c982c90ba2c1f7")
}
VERIFYING: Sources = {
    (f"{_SPEC}.rejection_sampler", "RejectionSampler._verify"): ("94c9ec2b06f73ad5", "10bb2c9b9812d2a3"),
    (_KERNELS, "rejection_sample"): ("fa833427de8892b1", "0fad761aa6c0fd19"),
    (_KERNELS, "_is_bonus_logit"): (None, "4870d372d19786f7"),
    (_KERNELS, "_compute_local_logits_stats_kernel"): ("4d036d011e2231a3", "431df7a47f3921b6"),
    (_KERNELS, "_compute_global_target_argmax"): ("1843bab16fdfb0c9",),
    (_KERNELS, "_rejection_kernel"): ("26053a4cb923f5e5", "1bbd2248fe112eaf"),
    (_KERNELS, "_resample_kernel"): ("e426b97e91df0bca",),
    (_KERNELS, "_seeded_resample_argmax"): ("9bf5f1b171f73c81",),
    (_KERNELS, "_insert_resampled_kernel"): ("d6a290f3be4de080",),
    (f"{_GPU}.sample.gumbel", "gumbel_block_argmax"): ("7d8eb062d2a67c7b", "ea7673d6410e94aa"),
    (f"{_GPU}.sample.gumbel", "gumbel_noised_argmax"): ("07e181ff753d8e93",),
    (f"{_GPU}.sample.gumbel", "tl_rand32"): ("ba8ad066ccc537f4",),
}


class FastDraft:
    """Takes the place of one speculator's ``sample_draft``.

    Attributes:
        stock: what it takes the place of.
        short: calls that used the op; a replay of a CUDA graph is none.

    """

    def __init__(self, speculator: DraftModelSpeculator) -> None:
        self.stock = speculator.sample_draft
        self.short = 0
        self._speculator = speculator
        # Allocated before graphs are captured, and kept for as long as their owner. Some drafters sample the
        # tokens of all steps at once.
        rows = speculator.max_num_reqs * max(speculator.num_speculative_steps, 1)
        self._workspace = ops.make_argmax_workspace(rows, speculator.device)
        self._rows = rows

    def __call__(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
        **others: Any,
    ) -> torch.Tensor:
        """Return the drafts of some rows, as the stock method does.

        Further arguments concern the drafter's random numbers, which the most likely token needs none of.
        """
        speculator = self._speculator
        if draft_logits is not None or speculator.use_local_argmax_reduction:
            return self.stock(
                hidden_states,
                sample_src_positions,
                idx_mapping,
                temperature,
                seeds,
                draft_step,
                draft_logits,
                spec_step_idx,
                **others,
            )
        logits = speculator.compute_draft_logits(hidden_states, spec_step_idx)
        sampled = self._argmax(logits)
        speculator._maybe_predict_acceptance(logits, idx_mapping, draft_step)
        return sampled

    def _argmax(self, logits: torch.Tensor) -> torch.Tensor:
        if (
            logits.dim() != 2
            or logits.dtype not in DTYPES
            or logits.stride(1) != 1
            or logits.shape[0] > self._rows
            or logits.shape[1] == 0
        ):
            return logits.argmax(dim=-1)
        self.short += 1
        sampled = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        ops.argmax_rows(logits, sampled, self._workspace, validate=False)
        return sampled


class FastVerify:
    """Takes the place of one rejection sampler's ``_verify``.

    Attributes:
        stock: what it takes the place of.
        short: calls in which every request was greedy.

    """

    def __init__(self, sampler: RejectionSampler, rows: int, device: torch.device) -> None:
        self.stock = sampler._verify
        self.short = 0
        self._sampler = sampler
        self._workspace = ops.make_argmax_workspace(rows, device)
        self._rows = rows

    def warm_up(self) -> None:
        """Let Triton compile before the first request: vLLM's own warm-up has no greedy batch with drafts.

        The dtypes are those of model runner V2's inputs: others would be other kernels.
        """
        device = self._workspace.device
        one = torch.zeros(1, dtype=torch.int32, device=device)
        rejection_sample_greedy(
            torch.zeros(1, 8, device=device),
            None,
            one,
            torch.arange(2, dtype=torch.int32, device=device),
            one.long(),
            one.long(),
            one.long(),
            self._sampler.num_speculative_steps,
            self._sampler.synthetic_conditional_rates,
            self._workspace,
        )

    def __call__(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray[Any, Any],
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray[Any, Any],
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return processed logits, sampled tokens and their number, as the stock method does."""
        sampler = self._sampler.sampler
        states = sampler.sampling_states
        # The host's own copy is the source of the device's; nothing waits here.
        if states.temperature.np[idx_mapping_np].any() or logits.shape[0] > self._rows:
            return self.stock(
                logits,
                draft_logits,
                draft_sampled,
                pos,
                cu_num_logits,
                idx_mapping,
                idx_mapping_np,
                expanded_idx_mapping,
                expanded_local_pos,
                seq_lens_upper_bound_np,
                verify_draft_sampled,
            )
        self.short += 1
        processed_logits = sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        sampled, num_sampled = rejection_sample_greedy(
            processed_logits,
            None if draft_logits is None else draft_logits.shape[-1],
            verify_draft_sampled,
            cu_num_logits,
            pos,
            idx_mapping,
            states.seeds.gpu,
            self._sampler.num_speculative_steps,
            self._sampler.synthetic_conditional_rates,
            self._workspace,
        )
        return processed_logits, sampled, num_sampled


def why_not_draft(speculator: DraftModelSpeculator) -> str | None:
    """Return why the op does not fit a speculator; None if it does."""
    if type(speculator).sample_draft is not DraftModelSpeculator.sample_draft:
        return f"{type(speculator).__name__} has a sample_draft of its own"
    return changed(DRAFTING)


def why_not_verify(sampler: Any) -> str | None:
    """Return why the short way does not fit a rejection sampler; None if it does."""
    if type(sampler) is not RejectionSampler:
        return f"the rejection sampler is a {type(sampler).__name__}"
    if sampler.watermark_key is not None:
        return "outputs are watermarked"
    if accepts_lossily(sampler):
        return "drafts may be accepted that are not the target's tokens"
    return changed(VERIFYING)


def apply(speculator: Any, sampler: Any, max_num_reqs: int, device: torch.device) -> dict[str, str | None]:
    """Put both ways in place where they fit, before graphs are captured; once for each object.

    Args:
        speculator: the model runner's; None, or one without a model, drafts otherwise.
        sampler: the model runner's rejection sampler, or None.
        max_num_reqs: most requests of a step.
        device: where the logits are.

    Returns:
        For "drafting" and "verifying" why vLLM's own way stays; None where the short one is in place. Where
        there is something to shorten, the log says it too.

    """
    found: dict[str, str | None] = {
        "drafting": "no draft model chooses tokens",
        "verifying": "there is no rejection sampler",
    }
    try:
        ops.LIBRARIES.require(device)
    except ops.LibraryError as error:
        return dict.fromkeys(found, _told("sampling", str(error)))
    if isinstance(speculator, DraftModelSpeculator):
        reason = None
        if not isinstance(vars(speculator).get("sample_draft"), FastDraft):
            reason = why_not_draft(speculator)
            if reason is None:
                speculator.sample_draft = FastDraft(speculator)  # type: ignore[method-assign]
        found["drafting"] = _told("drafting", reason)
    if sampler is not None:
        reason = None
        if not isinstance(vars(sampler).get("_verify"), FastVerify):
            reason = why_not_verify(sampler)
            if reason is None:
                rows = max_num_reqs * (sampler.num_speculative_steps + 1)
                sampler._verify = FastVerify(sampler, rows, device)
                if HAS_TRITON:
                    sampler._verify.warm_up()
        found["verifying"] = _told("verifying", reason)
    return found


def _told(what: str, reason: str | None) -> str | None:
    """Return the reason, said in the log where there is one."""
    if reason is not None:
        logger.warning("NWOR leaves %s as vLLM does it: %s", what, reason)
    return reason
