"""Puts the fast paths of a worker in place, as the settings say."""

from __future__ import annotations

from typing import Any

import torch

from nwor.config import NworConfig
from nwor.engine.fastpath import greedy_sampling, h2d_cache, triton_launch


def apply(
    config: NworConfig, speculator: Any, sampler: Any, max_num_reqs: int, device: torch.device
) -> dict[str, str | None]:
    """Put them in place on model runner V2 on CUDA, before graphs are captured.

    Args:
        config: the engine's settings.
        speculator: the model runner's, or None.
        sampler: the model runner's rejection sampler, or None.
        max_num_reqs: most requests of a step.
        device: where the logits are.

    Returns:
        By path, why it is not in place; None where it is. Paths that the settings turn off are left out.

    """
    found: dict[str, str | None] = {}
    if config.fast_sampling and config.tree is not None:
        found |= dict.fromkeys(("drafting", "verifying"), "trees of draft tokens have kernels of their own")
    elif config.fast_sampling:
        found |= greedy_sampling.apply(speculator, sampler, max_num_reqs, device)
    if config.fast_host:
        found["inputs"] = h2d_cache.apply()
        found["launches"] = None if triton_launch.apply() else "this Triton's launches stay as they are"
    return found
