"""Which of an engine's attention layers belong to the target model, and which slot mapping each uses."""

from __future__ import annotations

from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase


def target_layers(runner: Any) -> dict[str, Any]:
    """Return every layer of a runner's target model that keeps a cache or a state, by name.

    No layer of the draft model is among them; what cannot be staged is, for whoever binds them to refuse.
    """
    layers = get_layers_from_vllm_config(runner.vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]
    own = {id(module) for module in runner.get_model().modules()}
    return {name: layer for name, layer in layers.items() if id(layer) in own}


def draft_layers(runner: Any) -> list[Any]:
    """Return every layer of a runner's draft model that keeps a cache or a state."""
    layers = get_layers_from_vllm_config(runner.vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]
    target = target_layers(runner)
    return [layer for name, layer in layers.items() if name not in target]


def slot_keys(kv_cache_config: Any) -> dict[str, int]:
    """Return the number of the KV-cache group, and so of the slot mapping, of each layer by name."""
    return {
        name: group_id
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }
