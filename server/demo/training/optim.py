"""Optimizers and the learning-rate schedule that target and heads share.

Matrices are trained with Muon (Jordan 2024; Liu et al. 2025, arXiv:2502.16982), everything else with AdamW.
"""

import time
from collections.abc import Iterable

import torch
from torch import nn


class Schedule:
    """Warm-up, plateau and linear decay to zero over a number of steps, or over minutes, whichever is given.

    With minutes, the number of steps is settled once, from the speed measured in the warm-up; it is kept in
    ``total`` so that a run can be repeated by steps.

    Args:
        steps: total number of steps, or 0 to go by time.
        minutes: time for the whole stage, from the construction on, compilation included.
        warmup: steps of linear warm-up.
        decay: share of all steps that decays.
    """

    def __init__(self, steps: int, minutes: float, warmup: int, decay: float) -> None:
        if steps <= 0 and minutes <= 0:
            raise ValueError("give a number of steps or of minutes")
        self.total = steps
        self.warmup, self.decay = warmup, decay
        self._deadline = time.monotonic() + 60 * minutes
        self._measured_from = 0.0
        self._measured = (max(warmup // 2, 1), max(warmup - 1, 2))

    def factor(self, step: int) -> float:
        """Learning-rate factor in 0 to 1 for a step counted from 0."""
        if self.total == 0:
            self._settle(step)
        if step < self.warmup:
            return (step + 1) / self.warmup
        left = (self.total - step) / max(self.decay * self.total, 1.0)
        return min(1.0, max(left, 0.0))

    def _settle(self, step: int) -> None:
        begin, end = self._measured
        if step in (begin, end) and torch.cuda.is_available():
            torch.cuda.synchronize()
        if step == begin:
            self._measured_from = time.monotonic()
        elif step == end:
            each = (time.monotonic() - self._measured_from) / (end - begin)
            self.total = step + max(int((self._deadline - time.monotonic()) / each), 1)

    def done(self, step: int) -> bool:
        """True once all steps are made."""
        return self.total > 0 and step >= self.total


class Optimizers:
    """Muon for matrices, AdamW for embeddings, norms and the rest; one learning rate for both.

    Args:
        module: what to train.
        rate: peak learning rate.
        weight_decay: decoupled, on matrices alone.
        clip: largest norm of the gradient.
    """

    def __init__(self, module: nn.Module, rate: float, weight_decay: float = 0.05, clip: float = 1.0) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in module.named_parameters():
            (matrices if weight.dim() == 2 and "embed" not in name else others).append(weight)
        self._all = [*matrices, *others]
        self._clip = clip
        self._rate = rate
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=rate, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            )
        ]
        if others:
            self._optimizers.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0))

    def step(self, factor: float) -> None:
        """Clip, update at ``factor`` times the peak rate, clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self._all, self._clip)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


class CsvLog:
    """A CSV file, one row at a time, flushed, and echoed to standard output."""

    def __init__(self, path: str, columns: Iterable[str]) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._columns = list(columns)
        self._file.write(",".join(self._columns) + "\n")

    def row(self, *values: float) -> None:
        """Append one row."""
        cells = [f"{v:.5g}" if isinstance(v, float) else str(v) for v in values]
        self._file.write(",".join(cells) + "\n")
        self._file.flush()
        print(" ".join(f"{c}={v}" for c, v in zip(self._columns, cells, strict=True)), flush=True)
