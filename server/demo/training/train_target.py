"""Train the target on the packed token stream."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from server.demo.training.model import Target
from server.demo.training.optim import CsvLog, Optimizers, Schedule

# This share of the windows begins with a document, as a prompt does; the rest begins anywhere.
_DOCUMENT_STARTS = 0.25


def windows(
    tokens: Tensor, starts: Tensor, batch: int, length: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Endless batches of windows ``[batch, length + 1]`` int64 of the stream ``tokens``."""
    last = tokens.numel() - length - 1
    starts = starts[starts <= last]
    span = torch.arange(length + 1, device=tokens.device)
    documents = min(round(batch * _DOCUMENT_STARTS), batch) if starts.numel() else 0
    while True:
        anywhere = torch.randint(0, last + 1, (batch - documents,), generator=generator)
        at = torch.randint(0, max(starts.numel(), 1), (documents,), generator=generator)
        begin = torch.cat((anywhere.to(tokens.device), starts[at.to(starts.device)]))
        yield tokens[begin[:, None] + span].long()


def loss_of(target: Target, batch: Tensor) -> Tensor:
    """Mean next-token cross-entropy, in nats, of windows ``[B, T + 1]``."""
    logits = target(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(target: Target, tokens: Tensor, length: int, batch: int, most: int = 64) -> float:
    """Mean loss over consecutive windows of ``tokens``, at most ``most`` of them."""
    count = min((tokens.numel() - 1) // length, most)
    if count == 0:
        raise ValueError(f"{tokens.numel()} tokens do not fill one window of {length}")
    total = 0.0
    for begin in range(0, count, batch):
        rows = [
            tokens[i * length : (i + 1) * length + 1].long() for i in range(begin, min(begin + batch, count))
        ]
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            total += float(loss_of(target, torch.stack(rows))) * len(rows)
    return total / count


def train_target(
    target: Target,
    data: dict[str, Tensor],
    log: Path,
    *,
    schedule: Schedule,
    batch: int,
    length: int,
    rate: float,
    seed: int,
    compiled: bool,
    checkpoint: Callable[[], None],
    every: int = 250,
) -> int:
    """Train in place on ``data``: ``train``, ``train_starts``, ``validation``, ``held_out``, on the device.

    ``checkpoint`` is called after each row of the log.

    Returns:
        The number of steps made.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizers = Optimizers(target, rate)
    batches = windows(data["train"], data["train_starts"], batch, length, generator)
    step_loss = torch.compile(loss_of) if compiled else loss_of
    device = data["train"].device.type
    table = CsvLog(str(log), ("step", "tokens", "seconds", "train_loss", "validation_loss", "held_out_loss"))
    begin = time.monotonic()
    step = 0
    recent: list[Tensor] = []
    while not schedule.done(step):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = step_loss(target, next(batches))
        loss.backward()
        optimizers.step(schedule.factor(step))
        recent.append(loss.detach())
        step += 1
        if step % every == 0 or schedule.done(step):
            table.row(
                step,
                step * batch * length,
                time.monotonic() - begin,
                float(torch.stack(recent).mean()),
                evaluate(target, data["validation"], length, 16),
                evaluate(target, data["held_out"], length, 16),
            )
            recent.clear()
            checkpoint()
    return step
