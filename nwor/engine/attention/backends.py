"""Which of vLLM's attention backends on GPUs are extended, and their classes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from nwor.engine.attention.choice import resolved

logger = logging.getLogger("vllm.nwor.attention")

_HERE = "nwor.engine.attention"
#: By the name that the setting ``attention_backends`` has for them: vLLM's backends, and what extends each.
BACKENDS = {
    "flash": {AttentionBackendEnum.FLASH_ATTN: f"{_HERE}.flash.NworFlashAttentionBackend"},
    "triton": {AttentionBackendEnum.TRITON_ATTN: f"{_HERE}.triton_attn.NworTritonAttentionBackend"},
    "flashinfer": {AttentionBackendEnum.FLASHINFER: f"{_HERE}.flashinfer.NworFlashInferBackend"},
    "rocm": {
        AttentionBackendEnum.ROCM_AITER_FA: f"{_HERE}.rocm.NworAiterFlashAttentionBackend",
        AttentionBackendEnum.ROCM_AITER_UNIFIED_ATTN: f"{_HERE}.rocm.NworRocmAiterUnifiedAttentionBackend",
        AttentionBackendEnum.ROCM_SEGMENTED_ATTN: f"{_HERE}.rocm.NworRocmSegmentedAttentionBackend",
    },
}


def capability() -> tuple[int, int] | None:
    """Return the GPU's compute capability as vLLM sees it; None where there is none."""
    found = current_platform.get_device_capability()
    return None if found is None else (found.major, found.minor)


def register(names: Sequence[str]) -> None:
    """Put extended backends in the place of vLLM's, before a model's layers look theirs up.

    What an engine of this process had before, and this one has not asked for, is vLLM's own again.

    Args:
        names: the setting ``attention_backends``.

    """
    wanted = resolved(names, capability())
    for name, members in BACKENDS.items():
        for stock, extended in members.items():
            if name in wanted:
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
    """Return the extended backends' classes; without those that what is installed here does not have.

    Args:
        names: the setting ``attention_backends``.

    """
    classes = []
    for name in resolved(names, capability()):
        for path in BACKENDS[name].values():
            module, _, own = path.rpartition(".")
            try:
                classes.append(getattr(import_module(module), own))
            except ImportError as error:  # no layer has it, then
                logger.info("%s attention is not extended: %s", name, error)
    return tuple(classes)
