"""Which of vLLM's attention backends on CUDA are extended, and their classes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

_HERE = "nwor.engine.attention"
#: By the name that the setting ``attention_backends`` has for it: vLLM's backend, and what extends it.
BACKENDS = {
    "flash": (AttentionBackendEnum.FLASH_ATTN, f"{_HERE}.flash.NworFlashAttentionBackend"),
    "triton": (AttentionBackendEnum.TRITON_ATTN, f"{_HERE}.triton_attn.NworTritonAttentionBackend"),
}


def register(names: Collection[str]) -> None:
    """Put extended backends in the place of vLLM's, before a model's layers look theirs up.

    What an engine of this process had before, and this one has not asked for, is vLLM's own again.

    Args:
        names: the setting ``attention_backends``.

    """
    for name, (stock, extended) in BACKENDS.items():
        if name in names:
            register_backend(stock, extended)
        elif stock.is_overridden() and stock.get_path() == extended:
            stock.clear_override()
    forget_choices()


def forget_choices() -> None:
    """Have vLLM choose backends anew: it keeps the classes that an earlier engine of this process got."""
    for name in ("_cached_get_attn_backend", "_cached_get_mamba_attn_backend"):
        choose = getattr(selector, name, None)
        if choose is not None and hasattr(choose, "cache_clear"):
            choose.cache_clear()


def extended_backends(names: Sequence[str]) -> tuple[Any, ...]:
    """Return the extended backends' classes.

    Args:
        names: the setting ``attention_backends``.

    """
    classes = []
    for name in names:
        module, _, own = BACKENDS[name][1].rpartition(".")
        classes.append(getattr(import_module(module), own))
    return tuple(classes)
