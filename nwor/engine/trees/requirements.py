"""Which engines can have trees, and which requests."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

from nwor.config import CONFIG_KEY, DraftBounds, NworConfig
from nwor.engine.attention.choice import resolved
from nwor.errors import ConfigError
from nwor.modes import Mode
from nwor.ops.attention import CUDA_HEAD_SIZES
from nwor.tree_shape import TreeKind, tree_batch

logger = logging.getLogger("vllm.nwor.trees")

#: Draft methods whose passes leave runners-up that a comb can be made of.
METHODS = ("eagle", "eagle3")

#: What of a request needs vLLM's own kernels, which know a window as a chain.
CHAIN_REASONS = (
    "penalties",
    "bad_words",
    "structured_outputs",
    "thinking_token_budget",
    "logits_processors",
)


def settle(vllm_config: Any, config: NworConfig) -> None:
    """Refuse an engine that cannot have its trees, or have it draft chains where trees are not required.

    Args:
        vllm_config: vLLM's configuration, changed in the second case.
        config: NWOR's, with a tree.

    Raises:
        ConfigError: with the reason and what to do.

    """
    # Not at the top: it looks at vLLM's own modules.
    from nwor.engine.trees import known_sources

    try:
        check_engine(vllm_config, config)
        known_sources.check()
        if config.tree_required:
            return
        reason = _why_never_chosen(vllm_config, config)
        if reason is not None:
            reason = f"trees of draft tokens would never be chosen here: {reason}"
    except ConfigError as error:
        if config.tree_required:
            raise
        reason = str(error)
    if reason is None:
        return
    logger.warning("Draft tokens are chains: %s", reason)
    _draft_chains(vllm_config, config)


def _why_never_chosen(vllm_config: Any, config: NworConfig) -> str | None:
    """Return why this engine would not choose trees, or could not attend to them; None where it may.

    Asked where nobody has asked for trees: those that are never chosen cost memory all the same. They are
    chosen by what steps cost, which is measured where mixed steps run in graphs: in FlashAttention 3.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is None:
        return None  # a CPU runs all steps without graphs
    models = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    if any(getattr(model, "use_mla", False) for model in models):
        return "attention is MLA"
    backend = getattr(vllm_config.attention_config, "backend", None)
    name = getattr(backend, "name", backend)
    if name not in (None, "FLASH_ATTN"):
        return f"attention backend {name} is named"
    if "flash" not in resolved(config.attention_backends, (capability.major, capability.minor)):
        return "FlashAttention is not among the attention backends that NWOR extends (attention_backends)"
    if capability.major != 9 or vllm_config.attention_config.flash_attn_version not in (None, 3):
        return (
            "they are chosen where attention is FlashAttention 3, on a GPU of compute capability 9; this one "
            f"has {capability.major}.{capability.minor}"
        )
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype.startswith("fp8") and cache_dtype not in ("fp8", "fp8_e4m3"):
        return f"FlashAttention does not read a cache of {cache_dtype}"
    for model in models:
        if (size := model.get_head_size()) not in CUDA_HEAD_SIZES:
            return f"heads of size {size} have no kernels ({', '.join(map(str, CUDA_HEAD_SIZES))} have)"
    graphs = vllm_config.compilation_config.cudagraph_mode
    if vllm_config.model_config.enforce_eager or (graphs is not None and not graphs.has_full_cudagraphs()):
        return "full CUDA graphs are off"
    if config.mixed_graph_rows == 0:
        return "graphs of mixed steps are off (mixed_graph_rows is 0)"
    if vllm_config.model_config.is_multimodal_model or vllm_config.model_config.enable_prompt_embeds:
        return "the model takes embeddings, and mixed steps of it run without graphs"
    return None


def _draft_chains(vllm_config: Any, config: NworConfig) -> None:
    """Take the trees out of a configuration."""
    speculative, tree = vllm_config.speculative_config, config.tree
    assert tree is not None
    settings = {**config.to_mapping(), "tree": None, "tree_acceptance_rates": []}
    if config.draft_tokens is None:
        speculative.num_speculative_tokens = tree.depth
        speculative.num_speculative_tokens_per_batch_size = None
    else:
        most = min(config.draft_tokens.most, DraftBounds().most)
        bounds = DraftBounds(min(config.draft_tokens.least, most), most)
        settings["draft_tokens"] = str(bounds)
        speculative.num_speculative_tokens = bounds.most
        speculative.num_speculative_tokens_per_batch_size = bounds.schedule
    vllm_config.additional_config[CONFIG_KEY] = settings


def most_requests(vllm_config: Any, config: NworConfig) -> int:
    """Return the requests of the largest batch whose windows may be trees, padding included.

    Args:
        vllm_config: vLLM's configuration.
        config: NWOR's, with a tree.

    """
    tree, most = config.tree, vllm_config.scheduler_config.max_num_seqs
    assert tree is not None
    by_requests = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    if config.draft_tokens is not None:
        wanted = max(map(tree.most_requests, tree.sizes))
    elif by_requests and not tree.is_tree(by_requests[-1][2]):
        # Up to the next entry: vLLM fills gaps with the entry before.
        lasts = (after[0] - 1 for one, after in pairwise(by_requests) if tree.is_tree(one[2]))
        wanted = max(lasts, default=1)
    else:
        return int(most)
    return min(int(most), tree_batch(wanted, vllm_config.compilation_config.cudagraph_capture_sizes))


def check_engine(vllm_config: Any, config: Any) -> None:
    """Refuse an engine that cannot have trees.

    Args:
        vllm_config: vLLM's configuration.
        config: NWOR's, with a tree.

    Raises:
        ConfigError: with the reason and what to do.

    """
    reason = why_not(vllm_config, config)
    if reason is not None:
        raise ConfigError(f"trees of draft tokens are not possible here: {reason}")


def why_not(vllm_config: Any, config: Any) -> str | None:
    """Return why an engine cannot have trees; None where it can."""
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if speculative is None:
        return "the engine was started without speculative decoding"
    if not vllm_config.use_v2_model_runner:
        return "they need vLLM's model runner V2 (VLLM_USE_V2_MODEL_RUNNER=1, and on a CPU a Triton for CPUs)"
    if speculative.method not in METHODS:
        return f"the drafter is {speculative.method!r}, and they are for {' and '.join(METHODS)}"
    if speculative.num_speculative_tokens != config.tree.nodes:
        return (
            f"num_speculative_tokens is {speculative.num_speculative_tokens}, and a tree of "
            f"{config.tree.nodes} nodes needs as many"
        )
    if getattr(speculative, "parallel_drafting", False):
        return "the drafter makes all tokens in one pass"
    if getattr(speculative, "draft_sample_method", "greedy") != "greedy":
        return "drafts are sampled (draft_sample_method): nodes are the likeliest tokens"
    if speculative.rejection_sample_method not in ("standard", "synthetic"):
        return f"rejection_sample_method is {speculative.rejection_sample_method!r}"
    if config.tree_acceptance_rates and speculative.rejection_sample_method != "synthetic":
        return "'tree_acceptance_rates' are for rejection_sample_method 'synthetic'"
    if getattr(speculative, "enable_adaptive_verification", False):
        return "adaptive verification shortens windows by its own scores"
    if Mode.STAGE not in config.modes:
        return "mode 'stage' is not enabled"
    if getattr(parallel, "enable_batch_sharded_sampling", False):
        return "ranks sample a part of the requests each (enable_batch_sharded_sampling)"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline stages hold windows back as chains"
    if parallel.data_parallel_size > 1:
        return "data parallelism: ranks agree on the rows of each pass"
    scheduler, shape = vllm_config.scheduler_config, config.tree
    requests = most_requests(vllm_config, config)
    rows = requests * (shape.width if shape.kind is TreeKind.GROWN else 1)
    if rows > scheduler.max_num_batched_tokens:
        return (
            f"the drafter's passes may have {rows} rows ({requests} requests), and "
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}: lower max_num_seqs or the width"
        )
    model = vllm_config.model_config
    if model.uses_mrope or getattr(model, "uses_xdrope_dim", 0):
        return "the model's positions have several parts (M-RoPE)"
    if getattr(model, "return_sampling_mask", False):
        return "sampling masks are returned, which are made for chains"
    if getattr(vllm_config, "watermark_config", None) is not None:
        return "outputs are watermarked"
    return None


def needs_chain(params: Any, custom_processors: bool) -> str | None:
    """Return why a request's windows have to be chains, one of :data:`CHAIN_REASONS`, or None.

    Args:
        params: vLLM's ``SamplingParams``.
        custom_processors: whether the engine has logits processors of the user's own.

    """
    if params is None:
        return None
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        return "penalties"
    if params.bad_words:
        return "bad_words"
    if params.structured_outputs is not None:
        return "structured_outputs"
    if getattr(params, "thinking_token_budget", None) is not None:
        return "thinking_token_budget"
    if custom_processors:
        return "logits_processors"
    return None
