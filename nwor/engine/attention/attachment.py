"""Attaching NWOR to the target's attention layers, once the cache is allocated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from nwor import ops
from nwor.counts.formulas import bytes_per_token
from nwor.engine.attention.choice import check_worthwhile
from nwor.engine.attention.layer_context import AttentionPlan, LayerContext, parameters_of
from nwor.engine.attention.staged_attention import stock_attention
from nwor.engine.eligibility import Unsupported, check_layer
from nwor.ops.attention import CUDA_HEAD_SIZES, check_cuda_cache
from nwor.windows.window import StagedLayer, Window, group_layers
from nwor.worker_state import WorkerState

logger = logging.getLogger("vllm.nwor.attention")

#: Of the oldest GPUs that the CUDA library is compiled for.
LEAST_CAPABILITY = (8, 0)
#: Of keys and values that the CUDA kernels take.
CUDA_SOURCE_DTYPES = (torch.float16, torch.bfloat16)

#: Returns K and V views of a layer's cache, or raises Unsupported.
CacheViews = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]


class Attachment:
    """Makes the window and the layer contexts of one rank.

    Args:
        vllm_config: the engine's configuration.
        device: the rank's.
        state: the rank's, which is told what a token takes.
        longest_window: rows of the longest window.

    """

    def __init__(
        self, vllm_config: Any, device: torch.device, state: WorkerState, longest_window: int
    ) -> None:
        self._vllm_config = vllm_config
        self._device = device
        self._state = state
        self._longest_window = longest_window

    def layer_contexts(
        self,
        target_layers: Mapping[str, Any],
        slot_keys: Mapping[str, int],
        cache_views: CacheViews,
        backends: Sequence[Any],
    ) -> tuple[Window, list[tuple[Any, LayerContext]]]:
        """Return the rank's window, and each of vLLM's layers with its context, not attached yet.

        Args:
            target_layers: every attention layer of the target model by name; no draft layer.
            slot_keys: which slot mapping (KV-cache group) each layer uses.
            cache_views: how to see a layer's cache as strided K and V.
            backends: the attention backends that take part.

        Raises:
            Unsupported: if a layer cannot be staged, or there is none.

        """
        staged: list[tuple[int, StagedLayer]] = []
        untested: dict[str, str] = {}
        on_cuda = self._device.type == "cuda"
        if on_cuda and torch.version.hip is not None:
            raise Unsupported("attention_backend", "there are no kernels for AMD GPUs")
        for name, layer in target_layers.items():
            if name not in slot_keys:
                raise Unsupported("state_space", f"layer {name} has no slot mapping")
            backend = check_layer(name, layer, *backends)
            dtype = self._vllm_config.model_config.dtype
            if (own_check := getattr(backend, "nwor_check", None)) is not None:
                own_check(name, layer, self._vllm_config)
            if on_cuda:
                capability = torch.cuda.get_device_capability(self._device)
                check_on_cuda(name, layer, dtype, capability)
                names = self._state.config.attention_backends
                check_worthwhile(name, layer, backend, names, capability, self._longest_window)
            views = getattr(backend, "nwor_cache_views", None) or cache_views
            own = staged_layer(name, layer, views, dtype)
            if on_cuda:
                check_cache(own)
            if (where := getattr(backend, "nwor_untested", None)) is not None:
                untested[backend.get_name()] = where
            staged.append((slot_keys[name], own))
        if not staged:
            raise Unsupported("state_space", "the target model has no attention layer with a cache")
        window = Window(group_layers(staged))
        # Draft layers come on top of the target's: never staged, and none of the target's may be missing.
        if window.layer_names != frozenset(target_layers):
            raise AssertionError("staged layers and target attention layers differ")
        for used, where in untested.items():
            logger.warning("windows are staged with %s attention, of which no test has run %s", used, where)
        self._state.token_bytes = bytes_per_token(layer.shape for _, layer in staged)
        self._state.source_token_bytes = bytes_per_token(
            replace(layer.shape, element_size=layer.source_dtype.itemsize) for _, layer in staged
        )
        self._state.ranks = self._vllm_config.parallel_config.tensor_parallel_size
        workspace = self._workspace(target_layers, staged)
        layer_contexts = []
        plans: dict[Hashable, AttentionPlan] = {}
        for _, layer in staged:
            module = target_layers[layer.name]
            parameters = parameters_of(module, self._longest_window)
            layer_contexts.append(
                (
                    module,
                    LayerContext(
                        window=window,
                        state=self._state,
                        layer=layer,
                        parameters=parameters,
                        workspace=workspace,
                        plan=AttentionPlan.share(
                            plans, self._device, module.impl.num_heads, layer, parameters
                        ),
                    ),
                )
            )
        return window, layer_contexts

    def _workspace(
        self, target_layers: Mapping[str, Any], staged: Sequence[tuple[int, StagedLayer]]
    ) -> torch.Tensor:
        size = 0
        for _, layer in staged:
            _, _, kv_heads, head_size = layer.key_cache.shape
            heads = target_layers[layer.name].impl.num_heads
            size = max(
                size,
                ops.verify_attention_workspace_size(
                    self._device, heads, kv_heads, head_size, self._longest_window
                ),
            )
        return torch.zeros(size, dtype=torch.uint8, device=self._device)


def check_on_cuda(name: str, layer: Any, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Check that the CUDA kernels are compiled for a layer and the GPU.

    FlashAttention has most of these limits itself; other backends run where it does not.

    Args:
        name: of the layer.
        layer: its module, its cache allocated.
        dtype: of keys and values as the forward pass makes them.
        capability: the GPU's compute capability.

    Raises:
        Unsupported: with the first reason found.

    """
    impl = layer.impl
    if impl.head_size not in CUDA_HEAD_SIZES:
        raise Unsupported(
            "attention_feature",
            f"layer {name} has heads of {impl.head_size}, the kernels take "
            f"{', '.join(map(str, CUDA_HEAD_SIZES))}",
        )
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        raise Unsupported(
            "attention_feature", f"the GPU has compute capability {found}, the kernels take {least} and up"
        )
    if dtype not in CUDA_SOURCE_DTYPES:
        raise Unsupported("attention_feature", f"layer {name} makes keys and values of {dtype}")
    quantized = impl.kv_cache_dtype.startswith("fp8")
    if not quantized and layer.kv_cache.dtype != dtype:
        raise Unsupported(
            "cache_format", f"layer {name} keeps {layer.kv_cache.dtype} and makes keys and values of {dtype}"
        )


def check_cache(layer: StagedLayer) -> None:
    """Check that the CUDA kernels can read a layer's cache where it lies.

    Args:
        layer: the layer, its views made.

    Raises:
        Unsupported: its strides or its address are not what they take.

    """
    try:
        for what, cache in (("keys", layer.key_cache), ("values", layer.value_cache)):
            check_cuda_cache(f"cache of {what} of layer {layer.name}", cache)
    except ValueError as error:
        raise Unsupported("cache_format", str(error)) from error


def staged_layer(name: str, layer: Any, cache_views: CacheViews, dtype: torch.dtype) -> StagedLayer:
    """Return what is known of one of vLLM's attention layers and its cache.

    Args:
        name: of the layer.
        layer: its module, its cache allocated.
        cache_views: how to see the cache as strided K and V.
        dtype: of keys and values as the forward pass makes them.

    Raises:
        Unsupported: if the cache's layout is not known.

    """
    key_cache, value_cache = cache_views(layer)
    impl, kv_cache = layer.impl, layer.kv_cache
    quantized = impl.kv_cache_dtype.startswith("fp8")

    def direct_write(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        stock_attention(impl).do_kv_cache_update(layer, key, value, kv_cache, slots)

    return StagedLayer(
        name=name,
        kv_cache=kv_cache,
        key_cache=key_cache,
        value_cache=value_cache,
        kv_cache_dtype=impl.kv_cache_dtype if quantized else "auto",
        k_scale=layer._k_scale if quantized else None,
        v_scale=layer._v_scale if quantized else None,
        source_dtype=dtype,
        direct_write=direct_write,
    )
