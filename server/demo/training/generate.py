"""The target's own continuations: what the heads are trained on, since drafts are judged against them."""

import time

import torch
from torch import Tensor

from server.demo.training.model import Target


def new_caches(
    target: Target, rows: int, length: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """One static cache ``[2, rows, kv_heads, length, head_dim]`` for each layer."""
    shape = target.shape
    size = (2, rows, shape.num_key_value_heads, length, shape.head_dim)
    return [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.num_hidden_layers)]


def _next(logits: Tensor, temperature: Tensor) -> Tensor:
    """Greedy where ``temperature`` ``[rows, 1]`` is 0, else a sample."""
    logits = logits.float()
    noise = -torch.log(torch.empty_like(logits).exponential_().clamp_min(1e-20))
    return (logits + temperature * noise).argmax(dim=-1)


@torch.no_grad()
def continue_prompts(
    target: Target, prompts: Tensor, length: int, temperature: Tensor, caches: list[Tensor]
) -> Tensor:
    """Continue prompts of one length.

    Args:
        prompts: int64 ``[rows, P]``.
        length: tokens in all, prompt included.
        temperature: float ``[rows, 1]``; 0 is greedy.
        caches: from ``new_caches``, of at least ``length`` tokens; overwritten.

    Returns:
        int64 ``[rows, length]``.
    """
    rows, given = prompts.shape
    ids = torch.zeros(rows, length, dtype=torch.int64, device=prompts.device)
    ids[:, :given] = prompts
    block = 32
    logits = None
    for begin in range(0, given, block):
        end = min(begin + block, given)
        logits = target.decode(ids[:, begin:end], caches, torch.arange(begin, end, device=ids.device))
    assert logits is not None
    for at in range(given, length):
        ids[:, at] = _next(logits, temperature)
        if at + 1 < length:
            logits = target.decode(ids[:, at : at + 1], caches, torch.arange(at, at + 1, device=ids.device))
    return ids


@torch.no_grad()
def self_generated(
    target: Target,
    tokens: Tensor,
    starts: Tensor,
    *,
    rows: int,
    length: int,
    minutes: float,
    most: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Windows of the corpus, each continued by the target from a prompt of 64 tokens or more.

    Two rows in three are greedy, the rest is sampled at temperature 0.8. Two in three begin with a document.

    Args:
        rows: rows generated at once.
        length: tokens in a window, prompt included.
        minutes, most: ends after so much time or so many rows, whichever comes first.

    Returns:
        int16 ``[N, length]`` windows, and int16 ``[N]`` lengths of their prompts.
    """
    device = tokens.device
    caches = new_caches(target, rows, length, device, next(target.parameters()).dtype)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    span = torch.arange(length, device=device)
    starts = starts[starts < tokens.numel() - length]
    choices = [length // 6 * i for i in range(1, 6)]
    windows: list[Tensor] = []
    prompts: list[Tensor] = []
    deadline = time.monotonic() + 60 * minutes
    row = torch.arange(rows, device=device)
    while len(windows) * rows < most and time.monotonic() < deadline:
        given = choices[len(windows) % len(choices)]
        anywhere = torch.randint(0, tokens.numel() - length, (rows,), generator=generator).to(device)
        at = torch.randint(0, starts.numel(), (rows,), generator=generator).to(device)
        begin = torch.where(row % 3 > 0, starts[at], anywhere)
        ids = tokens[begin[:, None] + span[:given]].long()
        temperature = torch.where(row // 3 % 3 > 0, 0.0, 0.8)[:, None]
        windows.append(continue_prompts(target, ids, length, temperature, caches).short())
        prompts.append(torch.full((rows,), given, dtype=torch.int16, device=device))
    return torch.cat(windows), torch.cat(prompts)


@torch.no_grad()
def greedy_after(target: Target, prompts: list[list[int]], new: int) -> tuple[Tensor, Tensor]:
    """Greedy continuation of prompts of any lengths, without a cache.

    Returns:
        int64 ``[N, longest + new]`` token ids, padded on the right with 0, and int64 ``[N]`` prompt lengths.
    """
    device = next(target.parameters()).device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    ids = torch.zeros(len(prompts), int(lengths.max()) + new, dtype=torch.int64, device=device)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt, device=device)
    row = torch.arange(len(prompts), device=device)
    for i in range(new):
        final, _ = target.hidden_states(ids[:, : int(lengths.max()) + i])
        ids[row, lengths + i] = target.logits(final[row, lengths + i - 1]).argmax(dim=-1)
    return ids, lengths
