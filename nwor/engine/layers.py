"""Which of an engine's attention layers belong to the target model, and which slot mapping each uses."""

from __future__ import annotations

from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention


def target_layers(runner: Any) -> dict[str, Any]:
    """Return every attention layer of a runner's target model by name; no layer of the draft model."""
    layers = get_layers_from_vllm_config(runner.vllm_config, Attention)
    own = {id(module) for module in runner.get_model().modules()}
    return {name: layer for name, layer in layers.items() if id(layer) in own}


def slot_keys(kv_cache_config: Any) -> dict[str, int]:
    """Return the number of the KV-cache group, and so of the slot mapping, of each layer by name."""
    return {
        name: group_id
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }
