"""Batches of greedy requests for rejection sampling, and vLLM's outcome for them beside the short way's.

Unwritten places are compared, too: torch fills new memory with one number while these run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from nwor.engine.fastpath import greedy_sampling
from nwor.engine.fastpath.greedy_rejection import rejection_sample_greedy

#: How long the requests' windows are: all drafts, any number of them, or none.
LENGTHS = ("full", "mixed", "none")


@dataclass(frozen=True)
class Case:
    """A batch; see `make`."""

    requests: int = 5
    k: int = 4
    vocab: int = 9000
    dtype: torch.dtype = torch.bfloat16
    lengths: str = "full"
    synthetic: bool = False
    placeholders: float = 0.0
    draft_vocab: int | None = None
    padding: int = 0
    agreement: float = 0.7
    ties: bool = False
    seed: int = 0

    def __str__(self) -> str:
        default = Case()
        parts = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(default, name)]
        return ",".join(parts).replace("torch.", "") or "usual"


@dataclass
class Batch:
    """What a rejection sampler gets, and what the states of its requests hold."""

    logits: torch.Tensor
    draft_logits: torch.Tensor | None
    draft_sampled: torch.Tensor
    pos: torch.Tensor
    cu_num_logits: torch.Tensor
    idx_mapping: torch.Tensor
    expanded_idx_mapping: torch.Tensor
    expanded_local_pos: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    rates: torch.Tensor | None

    @property
    def first(self) -> tuple[Any, ...]:
        """The arguments of `_verify` after which it wants the sequence lengths."""
        indices = self.idx_mapping.cpu().numpy()
        return (
            *(self.logits, self.draft_logits, self.draft_sampled, self.pos, self.cu_num_logits),
            *(self.idx_mapping, indices, self.expanded_idx_mapping, self.expanded_local_pos),
        )


def make(case: Case, device: torch.device) -> Batch:
    """Make a batch whose drafts are mostly what the target would say; states of others are not greedy."""
    generator = torch.Generator().manual_seed(case.seed)

    def integers(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    drafts = {
        "full": torch.full((case.requests,), case.k),
        "mixed": integers(0, case.k + 1, case.requests),
        "none": torch.zeros(case.requests, dtype=torch.int64),
    }[case.lengths]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (drafts + 1).cumsum(0)])
    rows = int(starts[-1])
    logits = torch.randn(rows, case.vocab + case.padding, generator=generator) * 4
    logits[:, case.vocab :] = 1e4
    if case.ties:
        logits.round_()
    logits = logits.to(case.dtype)
    seen = min(case.vocab, case.draft_vocab or case.vocab)
    likely = logits[:, :seen].argmax(dim=-1)
    # A row's input token: the first of a request is no draft, the others follow the row before.
    tokens = torch.where(
        torch.rand(rows, generator=generator) < case.agreement, likely.roll(1), integers(0, seen, rows)
    )
    tokens[torch.rand(rows, generator=generator) < case.placeholders] = -1
    local = torch.cat([torch.arange(int(count) + 1) for count in drafts])
    states = case.requests + 3
    mapping = torch.randperm(states, generator=generator)[: case.requests]
    expanded = mapping.repeat_interleave(drafts + 1)
    temperature = torch.full((states,), 0.7)
    temperature[mapping] = 0.0
    seeds = torch.randint(-(2**62), 2**62, (states,), generator=generator)
    pos = integers(0, 3000, case.requests).repeat_interleave(drafts + 1) + local
    cached = None
    if case.draft_vocab is not None:
        cached = torch.randn(states, case.k, case.draft_vocab, generator=generator).to(case.dtype)
    rates = torch.linspace(0.9, 0.3, case.k) if case.synthetic else None
    return Batch(
        logits=logits.to(device)[:, : case.vocab],
        draft_logits=None if cached is None else cached.to(device),
        draft_sampled=tokens.to(torch.int32).to(device),
        pos=pos.to(device),
        cu_num_logits=starts.to(torch.int32).to(device),
        idx_mapping=mapping.to(device),
        expanded_idx_mapping=expanded.to(device),
        expanded_local_pos=local.to(torch.int32).to(device),
        temperature=temperature.to(device),
        seeds=seeds.to(device),
        rates=None if rates is None else rates.to(device),
    )


@contextmanager
def filled_memory() -> Iterator[None]:
    """Let torch fill what it allocates, so that what nobody writes is the same everywhere."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Processing:
    """Stands for vLLM's sampler: what the rejection sampler asks of it."""

    use_fp64_gumbel = False

    def __init__(self, batch: Batch) -> None:
        self.processed = 0
        self.sampling_states = SimpleNamespace(
            temperature=SimpleNamespace(np=batch.temperature.cpu().numpy(), gpu=batch.temperature),
            seeds=SimpleNamespace(gpu=batch.seeds),
        )

    def apply_sampling_params(self, logits: torch.Tensor, *_others: Any) -> torch.Tensor:
        self.processed += 1
        return logits.float() - 1


def make_sampler(batch: Batch, k: int, *, block: bool = False) -> RejectionSampler:
    """Make a rejection sampler of vLLM's over the stand-in for its sampler."""
    sampler: Any = object.__new__(RejectionSampler)
    sampler.sampler = Processing(batch)
    sampler.watermark_key = None
    sampler.num_speculative_steps = k
    sampler.synthetic_conditional_rates = batch.rates
    sampler.use_block_verification = block
    return sampler


def verify(method: Any, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Call a `_verify` on a batch."""
    lengths = np.zeros(len(batch.idx_mapping), dtype=np.int32)
    result: tuple[torch.Tensor, ...] = method(*batch.first, lengths, batch.draft_sampled)
    return result


#: Both ways are compared on these on the CPU, where Triton's kernels are interpreted, and on GPUs.
CASES = [
    Case(),
    Case(dtype=torch.float32, seed=1),
    Case(dtype=torch.float16, lengths="mixed", seed=2),
    Case(lengths="none", seed=3),
    Case(lengths="mixed", placeholders=0.3, seed=4),
    Case(synthetic=True, seed=5),
    Case(synthetic=True, lengths="mixed", placeholders=0.3, agreement=0.0, seed=6),
    Case(draft_vocab=8500, lengths="mixed", seed=7),
    Case(draft_vocab=9500, agreement=1.0, seed=8),
    Case(padding=13, vocab=8191, ties=True, seed=9),
    Case(k=1, requests=9, vocab=100, seed=10),
    Case(k=8, requests=3, vocab=16385, agreement=0.95, seed=11),
    Case(k=7, requests=3, agreement=1.0, lengths="mixed", seed=12),
    Case(requests=1, agreement=1.0, seed=13),
    Case(requests=1, agreement=0.0, ties=True, seed=14),
]


def stock(batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample as vLLM does."""
    return rejection_sample(
        batch.logits,
        batch.draft_logits,
        batch.draft_sampled,
        batch.cu_num_logits,
        batch.pos,
        batch.idx_mapping,
        batch.expanded_idx_mapping,
        batch.expanded_local_pos,
        batch.temperature,
        batch.seeds,
        k,
        batch.rates,
    )


def short(batch: Batch, case: Case, workspace: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the short way."""
    return rejection_sample_greedy(
        batch.logits,
        case.draft_vocab,
        batch.draft_sampled,
        batch.cu_num_logits,
        batch.pos,
        batch.idx_mapping,
        batch.seeds,
        case.k,
        batch.rates,
        workspace,
    )


def check_in_place(case: Case, device: torch.device, *, greedy: bool, block: bool) -> None:
    """Compare a sampler's ``_verify`` before and after the short way took its place.

    Args:
        case: the batch.
        device: where it is.
        greedy: whether all of its requests are; if not, one is random.
        block: whether the sampler verifies blocks.

    """
    batch = make(case, device)
    if not greedy:
        batch.temperature[batch.idx_mapping[2].long()] = 0.8
    sampler: Any = make_sampler(batch, case.k, block=block)
    with filled_memory():
        want = verify(sampler._verify, batch)
        assert greedy_sampling.apply(None, sampler, case.requests, device)["verifying"] is None
        got = verify(sampler._verify, batch)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
    assert sampler._verify.short == greedy
    assert sampler.sampler.processed == 2  # once for each call
