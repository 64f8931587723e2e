"""Changes that make an argument wrong, for tests of what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Change = Callable[[Any], Any]


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between the elements of the last dimension."""
    return torch.stack([t, t], dim=-1)[..., 0]


def elsewhere(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def wider(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t], dim=-1)


def expanded(t: torch.Tensor) -> torch.Tensor:
    """The same shape, its first dimension all in one place."""
    return t[:1].expand_as(t)


def dtype_of(dtype: torch.dtype) -> Change:
    return lambda t: t.to(dtype)


def constant(value: Any) -> Change:
    return lambda _: value


def alter(arguments: dict[str, Any], name: str, change: Change, device: torch.device) -> None:
    """Change one argument of a call; a tensor that the change brings along goes to the call's device."""
    value = change(arguments.get(name))
    if isinstance(value, torch.Tensor) and value.is_cpu:
        value = value.to(device)
    arguments[name] = value
