"""Which engines can have trees, and which requests."""

from __future__ import annotations

from typing import Any

from nwor.errors import ConfigError
from nwor.modes import Mode
from nwor.tree_shape import TreeKind

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
    lengths = {drafts for _, _, drafts in speculative.num_speculative_tokens_per_batch_size or ()}
    longest = max(lengths - {config.tree.nodes}, default=0)
    if longest > config.tree.depth:
        return (
            f"chains of {longest} draft tokens (num_speculative_tokens_per_batch_size) are longer than the "
            f"tree is deep ({config.tree.depth})"
        )
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
