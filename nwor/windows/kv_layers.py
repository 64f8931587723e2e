"""The layers that windows are staged for, and which of them one launch serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nwor.counts.formulas import LayerShape

#: Writes rows of key and value, [T, num_kv_heads, head_size], to the slots, int64 [T], as stock code does.
DirectWrite = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class StagedLayer:
    """One attention layer of the target model, as this rank holds it.

    Attributes:
        name: the engine's own name of the layer.
        kv_cache: the tensor that holds both K and V of the layer; what commits declare as mutated.
        key_cache: view of it, [num_blocks, block_size, num_kv_heads, head_size], any strides.
        value_cache: likewise for V.
        kv_cache_dtype: vLLM's name of the cache's format, "auto" or an fp8 kind.
        k_scale: float32 scale of fp8 keys, 1 or num_kv_heads elements; None stands for 1.
        v_scale: likewise for values.
        source_dtype: dtype of the keys and values that the forward pass makes.
        direct_write: the stock writer of this layer, used where a window has to be finished directly.

    """

    name: str
    kv_cache: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    kv_cache_dtype: str
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    source_dtype: torch.dtype
    direct_write: DirectWrite

    @property
    def shape(self) -> LayerShape:
        """What the layer keeps of one token."""
        _, _, num_kv_heads, head_size = self.key_cache.shape
        return LayerShape(num_kv_heads, head_size, self.key_cache.element_size())


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a slot mapping and a shape, so that one launch commits them all.

    Attributes:
        slot_key: which of the step's slot mappings the layers use (the engine's KV-cache group).
        layers: the layers, in the order of the engine's registry.

    """

    slot_key: int
    layers: tuple[StagedLayer, ...]


def group_layers(layers: Sequence[tuple[int, StagedLayer]]) -> tuple[LayerGroup, ...]:
    """Group (slot key, layer) pairs by slot mapping, shape, format and block size."""
    grouped: dict[tuple[object, ...], list[StagedLayer]] = {}
    for slot_key, layer in layers:
        key = (
            slot_key,
            layer.key_cache.shape[1:],
            layer.key_cache.dtype,
            layer.kv_cache_dtype,
            layer.source_dtype,
        )
        grouped.setdefault(key, []).append(layer)
    return tuple(LayerGroup(int(str(key[0])), tuple(members)) for key, members in grouped.items())
