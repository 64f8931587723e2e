"""What can be staged and what is written directly, by reason. One table for code, metrics and docs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nwor.engine.vllm_features import writes_own_cache


@dataclass(frozen=True)
class Reason:
    """Why windows are written directly.

    Attributes:
        when: "start" if known when the engine starts (nothing is staged then), "step" if found in a step.
        text: what it means, for the documentation and the log.

    """

    when: str
    text: str


REASONS: dict[str, Reason] = {
    "no_speculation": Reason("start", "the engine was started without speculative decoding"),
    "window_too_long": Reason("start", "more draft tokens a step than the verify kernels take"),
    "batch_invariance": Reason(
        "start", "results must not depend on the batch (VLLM_BATCH_INVARIANT); ours do, by rounding"
    ),
    "mla": Reason("start", "multi-head latent attention keeps another kind of cache"),
    "state_space": Reason("start", "Mamba and other recurrent layers advance a state"),
    "encoder_decoder": Reason("start", "cross-attention layers read an encoder's cache"),
    "context_parallel": Reason("start", "a request's cache is spread over ranks"),
    "pipeline_parallel": Reason("start", "on model runner V1 earlier stages never learn the counts"),
    "micro_batching": Reason("start", "two half batches run at once (dual-batch overlap)"),
    "kv_connector": Reason("start", "a KV connector saves the cache layer by layer inside the forward pass"),
    "kv_sharing": Reason("start", "layers read another layer's cache"),
    "piecewise_update": Reason("start", "piecewise CUDA graphs hold the update of the cache"),
    "attention_backend": Reason("start", "the layer's attention backend is not one that NWOR extends"),
    "attention_feature": Reason(
        "start", "attention that the verify kernel does not compute (ALiBi, non-causal, chunked local, ...)"
    ),
    "cache_format": Reason("start", "a cache format or layout that the kernels do not read"),
    "capture": Reason("start", "an error in a layer while a CUDA graph of `stage` was captured"),
    "batch_order": Reason("step", "a window does not stand in the leading part of the batch"),
    "graph": Reason("step", "the step ran in a CUDA graph that was captured for direct writes only"),
    "fault": Reason("step", "an error while staging or committing; the window was finished by direct writes"),
}


#: What to name in the setting ``attention_backends`` for an implementation of vLLM's that is not extended.
NAMED_BY = {"TritonAttentionImpl": "triton", "FlashInferImpl": "flashinfer"}


class Unsupported(Exception):  # noqa: N818  a verdict, not an error
    """Raised by the checks below; ``reason`` is a key of :data:`REASONS`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or REASONS[reason].text)
        self.reason = reason


def check_engine(vllm_config: Any, max_window: int) -> None:
    """Check the configuration of an engine.

    Args:
        vllm_config: vLLM's configuration.
        max_window: the longest window, in tokens, that the kernels take.

    Raises:
        Unsupported: with the first reason found.

    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise Unsupported("no_speculation")
    window = 1 + speculative.num_speculative_tokens
    if window > max_window:
        raise Unsupported(
            "window_too_long", f"windows of {window} tokens; at most {max_window} can be staged"
        )
    import vllm.envs

    if vllm.envs.VLLM_BATCH_INVARIANT:
        raise Unsupported("batch_invariance")
    model = vllm_config.model_config
    if model.use_mla:
        raise Unsupported("mla")
    if getattr(model, "is_mm_prefix_lm", False):
        # vLLM says so only where images may come.
        raise Unsupported(
            "attention_feature",
            "images' tokens see one another in both directions; served for text alone "
            "(--language-model-only) the model can be staged",
        )
    if model.is_encoder_decoder:
        raise Unsupported("encoder_decoder")
    if vllm_config.kv_transfer_config is not None:
        raise Unsupported("kv_connector")
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 and not vllm_config.use_v2_model_runner:
        raise Unsupported("pipeline_parallel")
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported("context_parallel")
    if getattr(parallel, "use_ubatching", False):
        raise Unsupported("micro_batching")


def check_layer(name: str, layer: Any, *backends: Any) -> Any:
    """Check that a layer is plain attention, served by the classes that NWOR extends.

    vLLM makes other kinds by deriving from the layer, and by wrapping its backend so that another builder
    makes the metadata: chunked local attention, say, turns a request into several, of which a window knows
    nothing. Whatever is derived or wrapped is refused, known or not.

    Args:
        name: of the layer.
        layer: the layer's module.
        backends: the attention backends that take part.

    Returns:
        The layer's.

    Raises:
        Unsupported: with the first reason found.

    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    if isinstance(layer, MambaBase):
        raise Unsupported("state_space", f"layer {name} is a {type(layer).__name__}")
    if not isinstance(layer, Attention):
        raise Unsupported("attention_backend", f"layer {name} is a {type(layer).__name__}")
    backend = next((each for each in backends if type(layer.impl) is each.get_impl_cls()), None)
    if backend is None:
        used = type(layer.impl).__name__
        setting = NAMED_BY.get(used)
        hint = (
            f"; experimental: name {setting} in attention_backends (--nwor-attention-backends)"
            if setting
            else ""
        )
        raise Unsupported("attention_backend", f"layer {name} uses {used}{hint}")
    if type(layer) is not Attention:
        raise Unsupported(
            "attention_feature", f"layer {name} is a {type(layer).__name__}, not vLLM's plain Attention"
        )
    builder = layer.get_attn_backend().get_builder_cls()
    if builder is not backend.get_builder_cls():
        raise Unsupported(
            "attention_feature",
            f"layer {name} has metadata from {builder.__name__}, not from its backend's own",
        )
    if writes_own_cache(layer):
        raise Unsupported("attention_feature", f"layer {name} gets no K/V: the model writes its cache itself")
    check_impl(name, layer.impl)
    return backend


def check_impl(name: str, impl: Any) -> None:
    """Check one layer's attention implementation.

    Raises:
        Unsupported: with the first reason found.

    """
    if impl.alibi_slopes is not None:
        raise Unsupported("attention_feature", f"layer {name} uses ALiBi")
    if impl.kv_sharing_target_layer_name is not None:
        raise Unsupported(
            "kv_sharing", f"layer {name} reads the cache of {impl.kv_sharing_target_layer_name}"
        )
    attn_type = getattr(impl, "attn_type", "decoder")
    if str(getattr(attn_type, "value", attn_type)) != "decoder":
        raise Unsupported("attention_feature", f"layer {name} is of type {attn_type}")


def check_triton(name: str, layer: Any, vllm_config: Any) -> None:
    """Check what vLLM's Triton backend can do and the verify kernel, or the commit, cannot.

    Args:
        name: of the layer.
        layer: the layer's module, an implementation of the Triton backend in it.
        vllm_config: the engine's configuration.

    Raises:
        Unsupported: with the first reason found.

    """
    impl = layer.impl
    if getattr(impl, "chunk_lookback", -1) > -1:
        raise Unsupported("attention_feature", f"layer {name} attends to chunks of its context")
    cache = str(impl.kv_cache_dtype)
    if cache.endswith("per_token_head"):
        raise Unsupported("cache_format", f"layer {name} keeps a scale for each token and head ({cache})")
    if cache == "fp8_e5m2":
        raise Unsupported("cache_format", f"layer {name}: Triton's writer makes e4m3 of an fp8_e5m2 cache")
    check_output(name, impl, vllm_config)


def check_flashinfer(name: str, layer: Any, vllm_config: Any) -> None:
    """Check what vLLM's FlashInfer backend can do and the verify kernel, or the commit, cannot.

    Args:
        name: of the layer.
        layer: the layer's module, an implementation of the FlashInfer backend in it.
        vllm_config: the engine's configuration.

    Raises:
        Unsupported: with the first reason found.

    """
    if layer.impl.is_kvcache_nvfp4:
        raise Unsupported("cache_format", f"layer {name} keeps 4-bit numbers and their scales (nvfp4)")
    check_output(name, layer.impl, vllm_config)


def check_rocm(name: str, layer: Any, vllm_config: Any) -> None:
    """Check what vLLM's backends for AMD GPUs can do and a verify kernel or a commit could not.

    Args:
        name: of the layer.
        layer: the layer's module, an implementation of one of these backends in it.
        vllm_config: the engine's configuration.

    Raises:
        Unsupported: with the first reason found.

    """
    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.platforms import current_platform

    passes = vllm_config.compilation_config.pass_config
    for fusion in ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache"):
        if getattr(passes, fusion, False):
            raise Unsupported("attention_feature", f"the cache is written with rotary positions ({fusion})")
    if rocm_aiter_ops.is_shuffle_kv_cache_enabled():
        raise Unsupported("cache_format", f"layer {name} keeps keys and values shuffled")
    if layer.impl.kv_cache_dtype.startswith("fp8") and current_platform.is_fp8_fnuz():
        raise Unsupported("cache_format", f"layer {name} keeps fp8 of another kind (e4m3fnuz)")
    check_output(name, layer.impl, vllm_config)


def check_output(name: str, impl: Any, vllm_config: Any) -> None:
    """Check that a layer's attention leaves its output in the model's dtype.

    Raises:
        Unsupported: it quantizes it.

    """
    if not getattr(vllm_config.compilation_config.pass_config, "fuse_attn_quant", False):
        return
    from vllm.model_executor.layers.quantization.utils import quant_utils

    kinds = (quant_utils.kFp8StaticTensorSym, quant_utils.kNvfp4Dynamic)
    if any(impl.fused_output_quant_supported(kind) for kind in kinds):
        raise Unsupported(
            "attention_feature",
            f"layer {name} quantizes its output (fuse_attn_quant); the verify kernel does not",
        )


def check_graphs(compilation: Any) -> None:
    """Check that CUDA graphs of pieces of the model leave the update of the cache to Python.

    A window is handed over where a layer's keys and values are written. Captured, that write is replayed, and
    nobody is told.

    Args:
        compilation: vLLM's ``CompilationConfig``, of an engine on CUDA.

    Raises:
        Unsupported: a captured piece holds it.

    """
    mode = compilation.cudagraph_mode
    if mode is None or not mode.has_piecewise_cudagraphs():
        return
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    if is_breakable_cudagraph_enabled():
        raise Unsupported("piecewise_update", "breakable CUDA graphs hold the update of the cache")
    if memory_is_reused(compilation):
        raise Unsupported("piecewise_update")


def memory_is_reused(compilation: Any) -> bool:
    """Return whether compiled code may put later tensors where a layer's keys and values lie.

    Inductor plans the memory of what it compiles as a whole. Where vLLM takes attention and the update of the
    cache out of that (its own compilation on CUDA, by default), their arguments cross from one compiled piece
    to another, and what is referred to is not reused. Compiled in one piece, as on a CPU, keys and values are
    dead to the compiler after their layer's attention, whoever else still refers to them.

    Args:
        compilation: vLLM's ``CompilationConfig``.

    """
    mode = compilation.mode
    name = getattr(mode, "name", mode)
    if name in (None, "NONE"):
        return False
    return (
        name != "VLLM_COMPILE"
        or bool(compilation.use_inductor_graph_partition)
        or not compilation.splitting_ops_contain_attention()
        or not compilation.splitting_ops_contain_kv_cache_update()
    )
