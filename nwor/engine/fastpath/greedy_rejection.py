"""Rejection sampling of batches in which every request is greedy, in two launches.

vLLM's kernels serve greedy and random requests at once: they reduce each row of logits by blocks, join the
blocks, compare drafts one after the other, and reduce the row of the last token again. Where all requests are
greedy a row's argmax is all that its logits say: one launch finds those of all rows, another compares.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import tl_rand32

from nwor import ops

#: What the op takes as it is; anything else goes to it in float32, as vLLM's kernels read it.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def _verify_greedy_kernel(  # type: ignore[no-untyped-def]
    # [num_reqs, num_speculative_steps + 1]
    sampled_ptr,
    sampled_stride,
    # [num_reqs]
    num_sampled_ptr,
    # [num_logits]
    target_argmax_ptr,
    # [num_logits]
    draft_sampled_ptr,
    # [num_reqs + 1]
    cu_num_logits_ptr,
    # [num_reqs]
    idx_mapping_ptr,
    # [max_num_reqs]
    seed_ptr,
    # [num_logits]
    pos_ptr,
    # [num_speculative_steps]
    synthetic_conditional_rates_ptr,
    PADDED_STEPS: tl.constexpr,  # noqa: N803
    SYNTHETIC_MODE: tl.constexpr,  # noqa: N803
):
    req_idx = tl.program_id(0)
    start_idx = tl.load(cu_num_logits_ptr + req_idx).to(tl.int64)
    end_idx = tl.load(cu_num_logits_ptr + req_idx + 1).to(tl.int64)
    num_draft_tokens = end_idx - start_idx - 1

    # All steps at once; the first draft that is not accepted decides what of them counts.
    step = tl.arange(0, PADDED_STEPS)
    has_draft = step < num_draft_tokens
    target = tl.load(target_argmax_ptr + start_idx + step, mask=step <= num_draft_tokens, other=0)
    draft = tl.load(draft_sampled_ptr + start_idx + 1 + step, mask=has_draft, other=-1).to(tl.int64)
    if SYNTHETIC_MODE:
        seed = tl.load(seed_ptr + tl.load(idx_mapping_ptr + req_idx).to(tl.int64))
        pos = tl.load(pos_ptr + start_idx + step, mask=has_draft, other=0)
        rate = tl.load(synthetic_conditional_rates_ptr + step, mask=has_draft, other=0.0)
        accepted = tl_rand32(seed, pos, includes_zero=False) < rate
    else:
        accepted = target == draft
    # -1 marks placeholders, which are rejected.
    accepted = accepted & has_draft & (draft >= 0)
    accepted_length = tl.min(tl.where(accepted, PADDED_STEPS, step), axis=0)
    # Accepted drafts, then the target's own token: in place of the first rejected one, or after all of them.
    tl.store(
        sampled_ptr + req_idx.to(tl.int64) * sampled_stride + step,
        tl.where(accepted, draft, target),
        mask=(step <= accepted_length) & (step <= num_draft_tokens),
    )
    tl.store(num_sampled_ptr + req_idx, accepted_length + 1)


def rejection_sample_greedy(
    target_logits: torch.Tensor,
    draft_vocab_size: int | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None,
    workspace: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what vLLM's ``rejection_sample`` returns where every request's temperature is 0.

    Equal but for NaN: here the first NaN of a row is its largest element; in vLLM's kernels the block of the
    vocabulary that has one may lose to others, and which of its elements stands for it is left open. Such
    tokens mean nothing either way, and both are within the vocabulary.

    Args:
        target_logits: [num_logits, V], last stride 1.
        draft_vocab_size: columns of the drafter's logits, where those are kept; further ones of the target's
            are not looked at.
        draft_sampled: int32 or int64 [num_logits]: each row's input token; -1 for placeholders.
        cu_num_logits: int32 [num_reqs + 1]: where each request's rows begin.
        pos: int64 [num_logits]: positions of the rows.
        idx_mapping: int32 or int64 [num_reqs]: where each request stands in ``seed``.
        seed: int64 [max_num_reqs].
        num_speculative_steps: most drafts of a request.
        synthetic_conditional_rates: float32 [num_speculative_steps]; None where drafts are compared.
        workspace: for :func:`nwor.ops.argmax_rows`, for at least ``num_logits`` rows.

    Returns:
        int64 [num_reqs, num_speculative_steps + 1] with each request's tokens, what follows them not written,
        and int32 [num_reqs] with their number.

    """
    num_reqs, num_logits = cu_num_logits.shape[0] - 1, target_logits.shape[0]
    if draft_vocab_size is not None and draft_vocab_size < target_logits.shape[1]:
        target_logits = target_logits[:, :draft_vocab_size]
    if target_logits.dtype not in DTYPES:
        target_logits = target_logits.float()
    target_argmax = draft_sampled.new_empty(num_logits, dtype=torch.int64)
    ops.argmax_rows(target_logits, target_argmax, workspace, validate=False)
    sampled = draft_sampled.new_empty(num_reqs, num_speculative_steps + 1, dtype=torch.int64)
    num_sampled = sampled.new_empty(num_reqs, dtype=torch.int32)
    _verify_greedy_kernel[(num_reqs,)](
        sampled,
        sampled.stride(0),
        num_sampled,
        target_argmax,
        draft_sampled,
        cu_num_logits,
        idx_mapping,
        seed,
        pos,
        synthetic_conditional_rates,
        PADDED_STEPS=1 << num_speculative_steps.bit_length(),  # at least one more than there are drafts
        SYNTHETIC_MODE=synthetic_conditional_rates is not None,
        num_warps=1,
    )
    return sampled, num_sampled
