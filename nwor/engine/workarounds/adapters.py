"""LoRA adapters beside base requests, under a drafter: two faults of vLLM's, mended.

A drafter that shares the target's embedding or head gets them with their adapters around them, which expect
the rows of the target's step: the drafter's are others, and the engine dies. Drafts need no adapter; they are
verified. And on a CPU a row without adapter, index -1, takes the weights of the last one.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

_MARK = "_nwor_mended"
#: Functions of vLLM's CPU operators whose rows have an adapter's index each.
CPU_OPERATORS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def take_off_adapters(drafter: torch.nn.Module) -> int:
    """Have a drafter use the layers that it shares with the target without their adapters.

    Args:
        drafter: its model. The target's own layers stay as they are.

    Returns:
        The layers that had adapters around them.

    """
    from vllm.lora.layers.base import BaseLayerWithLoRA

    found = 0
    for module in list(drafter.modules()):
        if isinstance(module, BaseLayerWithLoRA):
            continue
        for name, child in list(module.named_children()):
            if isinstance(child, BaseLayerWithLoRA):
                setattr(module, name, child.base_layer)
                found += 1
    return found


def mend_drafter(runner: Any) -> None:
    """Do so for the drafter of a model runner, V1's or V2's, if it has one with a model."""
    if runner.lora_config is None:
        return
    for owner in (getattr(runner, "drafter", None), getattr(runner, "speculator", None)):
        model = getattr(owner, "model", None)
        if isinstance(model, torch.nn.Module) and model is not runner.model:
            take_off_adapters(model)


def mend_cpu_operators() -> None:
    """Have rows without adapter stay as they are in vLLM's CPU operators, in this process."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in CPU_OPERATORS:
        stock = getattr(lora_ops, name)
        if getattr(stock, _MARK, False):
            continue
        mended = _leaving_rows(stock)
        for module in (lora_ops, punica_cpu):
            setattr(module, name, mended)


def _leaving_rows(operator: Any) -> Any:
    @wraps(operator)
    def mended(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Rows of zeros add nothing, whatever weights they are multiplied with.
        bare = indices < 0
        if bare.any():
            inputs = inputs.masked_fill(bare.unsqueeze(1), 0)
            indices = indices.clamp(min=0)
        operator(inputs, weights, output, indices, *args, **kwargs)

    mended.__dict__[_MARK] = True
    return mended
