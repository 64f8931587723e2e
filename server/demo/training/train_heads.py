"""Train EAGLE-1 and EAGLE-3 heads side by side against the frozen target."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from server.demo.training.heads import EagleHead, draft_losses
from server.demo.training.model import Target
from server.demo.training.optim import CsvLog, Optimizers, Schedule


@torch.no_grad()
def target_states(target: Target, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """``Target.hidden_states``, without gradients."""
    return target.hidden_states(ids)


def train_heads(
    target: Target,
    heads: dict[str, EagleHead],
    windows: Tensor,
    folder: Path,
    *,
    schedule: Schedule,
    batch: int,
    steps: int,
    rate: float,
    seed: int,
    compiled: bool,
    measure: Callable[[EagleHead], float],
    every: int = 500,
) -> int:
    """Train all heads in place on the same batches.

    Args:
        target: frozen, in the precision it is served in.
        windows: int16 ``[N, T]`` token windows on the device.
        folder: each head's losses go to ``head_<name>.csv`` there.
        steps: draft steps unrolled.
        measure: acceptance length of a head, for the log.

    Returns:
        The number of steps made.
    """
    device = windows.device.type
    generator = torch.Generator().manual_seed(seed)
    states = torch.compile(target_states) if compiled else target_states
    losses = torch.compile(draft_losses) if compiled else draft_losses
    optimizers = {name: Optimizers(head, rate) for name, head in heads.items()}
    columns = ["step", "seconds", *(f"loss_{j}" for j in range(steps)), *(f"hit_{j}" for j in range(steps))]
    tables = {
        name: CsvLog(str(folder / f"head_{name}.csv"), [*columns, "acceptance_length"]) for name in heads
    }
    recent: dict[str, list[Tensor]] = {name: [] for name in heads}
    order = torch.empty(0, dtype=torch.int64)
    begin = time.monotonic()
    step = 0
    while not schedule.done(step):
        if order.numel() < batch:
            order = torch.randperm(windows.shape[0], generator=generator)
        ids = windows[order[:batch].to(windows.device)].long()
        order = order[batch:]
        final, stream = states(target, ids)
        factor = schedule.factor(step)
        for name, head in heads.items():
            with torch.autocast(device, torch.bfloat16):
                loss, hit = losses(head, target, ids, final, stream, steps)
            loss.mean().backward()
            optimizers[name].step(factor)
            recent[name].append(torch.cat((loss.detach(), hit)))
        step += 1
        if step % every == 0 or schedule.done(step):
            for name, head in heads.items():
                mean = torch.stack(recent[name]).mean(0).tolist()
                with torch.autocast(device, torch.bfloat16):
                    length = measure(head)
                tables[name].row(step, time.monotonic() - begin, *mean, length)
                recent[name].clear()
    return step
