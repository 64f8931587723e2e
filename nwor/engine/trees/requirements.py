"""Which engines can have trees, and which requests."""

from __future__ import annotations

import logging
from typing import Any

from nwor.config import CONFIG_KEY, DraftBounds, NworConfig
from nwor.errors import ConfigError
from nwor.modes import Mode
from nwor.tree_shape import TreeKind

logger = logging.getLogger("vllm.nwor.trees")

#: Major compute capabilities of GPUs on which attention that NWOR extends is vLLM's own choice.
_CAPABILITIES = (8, 9)

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
        reason = _attention_why_not(vllm_config)
    except ConfigError as error:
        if config.tree_required:
            raise
        reason = str(error)
    if reason is None:
        return
    logger.warning("Draft tokens are chains: %s", reason)
    _draft_chains(vllm_config, config)


def _attention_why_not(vllm_config: Any) -> str | None:
    """Return why the drafter's attention may be one without a window of its own; None where it is not."""
    from vllm.platforms import current_platform

    models = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    if any(getattr(model, "use_mla", False) for model in models):
        return "trees of draft tokens are not possible here: attention is MLA"
    backend = getattr(vllm_config.attention_config, "backend", None)
    name = getattr(backend, "name", backend)
    if name not in (None, "FLASH_ATTN"):
        return f"trees of draft tokens are not tried with attention backend {name} unless they are asked for"
    capability = current_platform.get_device_capability()
    if capability is not None and capability.major not in _CAPABILITIES:
        return (
            "trees of draft tokens are not tried on a GPU of compute capability "
            f"{capability.major}.{capability.minor} unless they are asked for"
        )
    return None


def _draft_chains(vllm_config: Any, config: NworConfig) -> None:
    """Take the trees out of a configuration."""
    speculative = vllm_config.speculative_config
    settings = {**config.to_mapping(), "tree": None, "tree_acceptance_rates": []}
    if config.draft_tokens is None:
        assert config.tree is not None
        speculative.num_speculative_tokens = config.tree.depth
        speculative.num_speculative_tokens_per_batch_size = None
    else:
        bounds = DraftBounds()
        settings["draft_tokens"] = str(bounds)
        speculative.num_speculative_tokens = bounds.most
        speculative.num_speculative_tokens_per_batch_size = bounds.schedule
    vllm_config.additional_config[CONFIG_KEY] = settings


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
    rows = scheduler.max_num_seqs * (shape.width if shape.kind is TreeKind.GROWN else 1)
    if rows > scheduler.max_num_batched_tokens:
        return (
            f"the drafter's passes may have {rows} rows ({scheduler.max_num_seqs} requests), and "
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
