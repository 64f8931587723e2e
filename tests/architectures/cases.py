"""Tiny models of many architectures: what distinguishes each, and what becomes of its windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 64
NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}

#: What the configurations of most models have in common.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """A model and how it is served.

    Attributes:
        name: what the table says of it.
        architecture: vLLM's class.
        config: of config.json, beside :data:`COMMON`; None takes a key out.
        direct: why its windows are written directly; None where they are staged.
        caches: KV-cache groups of the target's layers.
        shapes: groups of layers of the same shape and slot mapping that the window has.
        quick: whether continuous integration runs it.
        speculation: vLLM's setting of the drafter.
        engine: arguments of ``LLM``.
        draft: the drafter's whole configuration; None where drafts need no model of their own.
        v2: whether vLLM has the drafter on its model runner V2 alone.
        accepted: whether a random drafter of this kind is right now and then, in as few tokens as are tried.
        gpu: attributes that are otherwise on a GPU; ``config`` and ``engine`` come on top of the case's own.
        runner: the model runner that a GPU has to take, "V1" or "V2"; None leaves it to vLLM.
        graphs: CUDA graphs: "full" of verify steps alone, "piecewise", "both" as vLLM has it, or "none".

    """

    name: str
    architecture: str
    config: Mapping[str, Any]
    direct: str | None = None
    caches: int = 1
    shapes: int = 1
    quick: bool = False
    speculation: Mapping[str, Any] = field(default_factory=lambda: NGRAM)
    engine: Mapping[str, Any] = field(default_factory=dict)
    draft: Mapping[str, Any] | None = None
    v2: bool = False
    accepted: bool = True
    gpu: Mapping[str, Any] = field(default_factory=dict)
    runner: str | None = None
    graphs: str = "full"

    def config_json(self) -> dict[str, Any]:
        """Return the model's whole configuration."""
        whole = {**COMMON, "architectures": [self.architecture], **self.config}
        return {key: value for key, value in whole.items() if value is not None}


LLAMA: dict[str, Any] = {"model_type": "llama"}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
SLIDING_THEN_FULL = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
ALTERNATING = ["sliding_attention", "full_attention"] * 2
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 24,
    "layer_types": ALTERNATING,
    "rope_parameters": {
        "sliding_attention": ROPE,
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "tie_word_embeddings": True,
}

#: On a GPU vLLM takes another attention for heads of two sizes, as if some had more than 256 elements.
FLASH_ATTENTION_3: dict[str, Any] = {
    "attention_config": {"backend": "FLASH_ATTN", "flash_attn_version": 3},
}

LLAMA4: dict[str, Any] = {
    "model_type": "llama4_text",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "attn_temperature_tuning": False,
}

#: Serves a model that takes images for text alone: what reads images is not built.
TEXT_ALONE: dict[str, Any] = {"language_model_only": True}


SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def within(
    model_type: str,
    text: Mapping[str, Any],
    other: Mapping[str, Any],
    part: str = "vision_config",
    **more: Any,
) -> dict[str, Any]:
    """Return the configuration of a model that has one for text and one for images or sounds."""
    inner = {key: value for key, value in {**COMMON, **text}.items() if value is not None}
    outer = dict.fromkeys(COMMON.keys() - {"torch_dtype", "bos_token_id", "eos_token_id"})
    return outer | {"model_type": model_type, "text_config": inner, part: dict(other), **more}


CASES = (
    Case("Llama (GQA)", "LlamaForCausalLM", LLAMA, quick=True),
    Case(
        "GPT-J (MHA)",
        "GPTJForCausalLM",
        {
            "model_type": "gptj",
            "num_attention_heads": 2,
            "num_key_value_heads": None,
            "rotary_dim": 16,
            "head_dim": None,
        },
        quick=True,
    ),
    Case(
        "Falcon (MQA)",
        "FalconForCausalLM",
        {"model_type": "falcon", "num_attention_heads": 2, "multi_query": True, "parallel_attn": True}
        | {"new_decoder_architecture": False, "bias": False, "num_kv_heads": 1, "head_dim": None},
        quick=True,
    ),
    Case(
        "Mistral (sliding window in all layers)",
        "MistralForCausalLM",
        {"model_type": "mistral", "sliding_window": 24},
        quick=True,
    ),
    Case(
        "Gemma 2 (soft cap, alternating windows)",
        "Gemma2ForCausalLM",
        {"model_type": "gemma2", "sliding_window": 24, "layer_types": ALTERNATING}
        | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        caches=2,
        shapes=2,
        quick=True,
    ),
    Case(
        "Gemma 3 (3 sliding layers : 1 full)",
        "Gemma3ForCausalLM",
        {"model_type": "gemma3_text", "sliding_window": 24, "layer_types": SLIDING_THEN_FULL}
        | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        caches=4,
        shapes=4,
        quick=True,
    ),
    Case(
        "Gemma 4 (two shapes, K = V)",
        "Gemma4ForCausalLM",
        GEMMA4,
        caches=2,
        shapes=2,
        quick=True,
        gpu={"engine": FLASH_ATTENTION_3},
    ),
    Case(
        "gpt-oss (sinks, alternating windows, MoE)",
        "GptOssForCausalLM",
        {"model_type": "gpt_oss", "sliding_window": 24, "layer_types": ALTERNATING}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None},
        caches=2,
        shapes=2,
        quick=True,
    ),
    Case(
        "Qwen 3 MoE (QK norm)",
        "Qwen3MoeForCausalLM",
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        quick=True,
    ),
    Case(
        "IQuest-LoopCoder (attends twice)",
        "IQuestLoopCoderForCausalLM",
        {**LLAMA, "hidden_size": 128, "num_hidden_layers": 2, "loop_num": 2, "loop_window_size": 24},
        caches=2,
        shapes=2,
        quick=True,
    ),
    Case(
        "Llama 4 (chunked attention)",
        "Llama4ForCausalLM",
        {**LLAMA4, "attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0]},
        direct="attention_feature",
        quick=True,
    ),
    Case(
        "Bloom (ALiBi)",
        "BloomForCausalLM",
        {"model_type": "bloom", "num_attention_heads": 2, "head_dim": None},
        direct="attention_feature",
        quick=True,
    ),
    Case(
        "Gemma 4 (layers share caches)",
        "Gemma4ForCausalLM",
        {**GEMMA4, "num_kv_shared_layers": 2},
        direct="kv_sharing",
        quick=True,
        gpu={"engine": FLASH_ATTENTION_3},
    ),
    # The rest of what runs on a CPU.
    Case(
        "Llama, head size 80",
        "LlamaForCausalLM",
        {**LLAMA, "head_dim": 80},
        gpu={"config": {"head_dim": 80}, "direct": "attention_feature", "quick": True},
    ),
    Case(
        "Llama, 70 draft tokens",
        "LlamaForCausalLM",
        LLAMA,
        direct="window_too_long",
        speculation={**NGRAM, "num_speculative_tokens": 70},
        engine={"max_num_batched_tokens": 256, "max_num_seqs": 3},
    ),
    Case(
        "Qwen 2 (QKV bias)",
        "Qwen2ForCausalLM",
        {"model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None},
    ),
    Case("Qwen 3 (QK norm)", "Qwen3ForCausalLM", {"model_type": "qwen3"}),
    Case(
        "Qwen 3, blocks of 128 tokens",
        "Qwen3ForCausalLM",
        {"model_type": "qwen3"},
        engine={"block_size": 128},
    ),
    Case(
        "Phi 3 (sliding window)",
        "Phi3ForCausalLM",
        {"model_type": "phi3", "sliding_window": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"head_dim": None, "pad_token_id": 0},
    ),
    Case(
        "Granite (multipliers)",
        "GraniteForCausalLM",
        {"model_type": "granite", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None}
        | {"attention_multiplier": 0.2, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    ),
    Case(
        "OLMo 3 (3 sliding layers : 1 full)",
        "Olmo3ForCausalLM",
        {"model_type": "olmo3", "sliding_window": 24, "layer_types": SLIDING_THEN_FULL}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None},
        caches=4,
        shapes=4,
    ),
    Case(
        "Gemma 3, one group for all layers",
        "Gemma3ForCausalLM",
        {"model_type": "gemma3_text", "sliding_window": 24, "layer_types": SLIDING_THEN_FULL}
        | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        engine={"disable_hybrid_kv_cache_manager": True},
    ),
    Case(
        "Cohere 2 (no RoPE in full layers)",
        "Cohere2ForCausalLM",
        {
            "model_type": "cohere2",
            "sliding_window": 24,
            "layer_types": ALTERNATING,
            "tie_word_embeddings": True,
        }
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None},
        caches=2,
        shapes=2,
        # Else all logits are near ties.
        gpu={"config": {"logit_scale": 1.0}},
    ),
    Case(
        "EXAONE 4",
        "Exaone4ForCausalLM",
        {"model_type": "exaone4", "sliding_window": 24, "layer_types": ALTERNATING, "head_dim": None}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window_pattern": "LG"},
        caches=2,
        shapes=2,
    ),
    Case("GLM 4", "Glm4ForCausalLM", {"model_type": "glm4", "partial_rotary_factor": 0.5}),
    Case(
        "StableLM (partial RoPE)",
        "StableLmForCausalLM",
        {"model_type": "stablelm", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None}
        | {"partial_rotary_factor": 0.5},
    ),
    Case(
        "GPT-2 (learned positions)",
        "GPT2LMHeadModel",
        {"model_type": "gpt2", "num_attention_heads": 2, "num_key_value_heads": None, "head_dim": None}
        | {"n_positions": 512},
    ),
    Case(
        "OPT (learned positions)",
        "OPTForCausalLM",
        {"model_type": "opt", "num_attention_heads": 2, "num_key_value_heads": None, "head_dim": None}
        | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    ),
    Case(
        "Mixtral (sliding window, experts)",
        "MixtralForCausalLM",
        {"model_type": "mixtral", "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Case(
        "Llama 4 (no chunked layers)",
        "Llama4ForCausalLM",
        {**LLAMA4, "attention_chunk_size": None, "no_rope_layers": [0, 0, 0, 0]},
    ),
    Case(
        "PaliGemma (served for text)",
        "PaliGemmaForConditionalGeneration",
        within(
            "paligemma",
            {"model_type": "gemma"},
            SIGLIP | {"projection_dim": 64},
            projection_dim=64,
            tie_word_embeddings=True,
        ),
        engine=TEXT_ALONE,
        gpu={"quick": True},
    ),
    Case(
        "Qwen 2-Audio (served for text)",
        "Qwen2AudioForConditionalGeneration",
        within(
            "qwen2_audio",
            {"model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None},
            {"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 1}
            | {"encoder_attention_heads": 2},
            part="audio_config",
        ),
        engine=TEXT_ALONE,
    ),
    Case(
        "Falcon (ALiBi)",
        "FalconForCausalLM",
        {"model_type": "falcon", "num_attention_heads": 2, "multi_query": False, "parallel_attn": False}
        | {"new_decoder_architecture": False, "bias": False, "alibi": True, "head_dim": None}
        | {"num_key_value_heads": None},
        direct="attention_feature",
    ),
)
