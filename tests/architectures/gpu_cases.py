"""The models and drafters as a GPU runs them: heads that the kernels take, in bfloat16, and more of its own.

Beside every case of a CPU there are some with fp8 caches, on model runner V1, in piecewise graphs, and those
that vLLM runs on a GPU alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.architectures.cases import (
    ALTERNATING,
    CASES,
    COMMON,
    LLAMA,
    NGRAM,
    ROPE,
    SIGLIP,
    SLIDING_THEN_FULL,
    TEXT_ALONE,
    Case,
    within,
)
from tests.architectures.drafters import DRAFTERS, drafter

#: What is twice as wide on a GPU, whose kernels take no heads of 32 elements.
WIDTHS = ("hidden_size", "head_dim", "global_head_dim", "word_embed_proj_dim")
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
#: Drafters that vLLM has on its model runner V1 alone.
V1_METHODS = ("medusa", "suffix")


def wider(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with heads of twice as many elements, in bfloat16."""
    wide = {key: 2 * value if key in WIDTHS and value else value for key, value in config.items()}
    if "text_config" in wide:
        wide["text_config"] = wider(wide["text_config"])
    return wide | {"torch_dtype": "bfloat16"}


def on_gpu(case: Case) -> Case:
    """Return a case of a CPU as a GPU runs it."""
    changes = dict(case.gpu)
    return replace(
        case,
        config=wider({**COMMON, **case.config}) | changes.pop("config", {}),
        draft=None if case.draft is None else wider(case.draft),
        engine={**case.engine, **changes.pop("engine", {})},
        gpu={},
        **changes,
    )


def runner_of(case: Case) -> str:
    """Return the model runner that vLLM runs a case on."""
    if case.runner is not None:
        return case.runner
    settings = case.speculation
    blocks = settings["method"] in ("dflash", "dspark")
    parallel = settings.get("parallel_drafting", False) and not blocks
    return "V1" if parallel or settings["method"] in V1_METHODS else "V2"


MODELS_OF_CPU = {case.name: on_gpu(case) for case in CASES}
DRAFTERS_OF_CPU = {case.name: on_gpu(case) for case in DRAFTERS}


def again(of: str, how: str, **changes: Any) -> Case:
    """Return a case once more, served otherwise.

    Args:
        of: its name.
        how: what its name gets.
        changes: its other attributes; ``engine`` comes on top of the case's own.

    """
    case = {**MODELS_OF_CPU, **DRAFTERS_OF_CPU}[of]
    engine = {**case.engine, **changes.pop("engine", {})}
    return replace(case, name=f"{of}, {how}", quick=True, engine=engine, **changes)


def of_gpu(
    name: str, architecture: str, config: Mapping[str, Any], quick: bool = True, **attributes: Any
) -> Case:
    """Return a case that has no like on a CPU."""
    return on_gpu(Case(name, architecture, config, quick=quick, **attributes))


OWN_MODELS = (
    of_gpu(
        "Qwen 2-VL (served for text)",
        "Qwen2VLForConditionalGeneration",
        within(
            "qwen2_vl",
            {"model_type": "qwen2_vl_text", "num_attention_heads": 2, "num_key_value_heads": 1}
            | {"head_dim": None, "rope_parameters": {**ROPE, "mrope_section": [8, 12, 12]}},
            {"model_type": "qwen2_vl", "depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 128},
        ),
        engine=TEXT_ALONE,
    ),
    of_gpu(
        "Gemma 3 with images (served for text)",
        "Gemma3ForConditionalGeneration",
        within(
            "gemma3",
            {"model_type": "gemma3_text", "sliding_window": 24, "layer_types": SLIDING_THEN_FULL}
            | {"query_pre_attn_scalar": 32},
            SIGLIP,
            mm_tokens_per_image=4,
            tie_word_embeddings=True,
        ),
        engine=TEXT_ALONE,
        caches=4,
        shapes=4,
    ),
    of_gpu(
        "DeepSeek-V2 (MLA)",
        "DeepseekV2ForCausalLM",
        # The sizes that kernels are made for; no layer has experts.
        {"model_type": "deepseek_v2", "num_key_value_heads": 4, "head_dim": None, "q_lora_rank": 64}
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"n_routed_experts": 4, "first_k_dense_replace": 4, "moe_intermediate_size": 32}
        | {"rope_parameters": ROPE},
        direct="mla",
    ),
    of_gpu(
        "Qwen 3-Next (linear attention)",
        "Qwen3NextForCausalLM",
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"] * 2}
        # vLLM wants a layer with experts.
        | {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0, 1, 2]}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}
        | {"linear_conv_kernel_dim": 4}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
        direct="state_space",
        # vLLM would take FlashInfer's kernel of prompts, whether it is installed or not.
        engine={"gdn_prefill_backend": "triton"},
    ),
    of_gpu(
        "Falcon-H1 (Mamba 2 beside attention)",
        "FalconH1ForCausalLM",
        {"model_type": "falcon_h1", "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32}
        | {"mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_chunk_size": 64},
        quick=False,
        direct="state_space",
    ),
    of_gpu(
        "Llama in Triton's attention",
        "LlamaForCausalLM",
        LLAMA,
        direct="attention_backend",
        engine={"attention_backend": "TRITON_ATTN"},
    ),
    again("Llama (GQA)", "fp8 cache", engine=FP8),
    again("Gemma 3 (3 sliding layers : 1 full)", "fp8 cache", engine=FP8),
    again("gpt-oss (sinks, alternating windows, MoE)", "fp8 cache", engine=FP8),
    again("Llama (GQA)", "runner V1", runner="V1"),
    again("Gemma 2 (soft cap, alternating windows)", "runner V1", runner="V1"),
    again("gpt-oss (sinks, alternating windows, MoE)", "runner V1", runner="V1"),
    again("Llama (GQA)", "fp8 cache, runner V1", engine=FP8, runner="V1"),
    again("Llama (GQA)", "no graphs", graphs="none"),
    # Pieces are compiled, which takes longer than all else.
    again("Mistral (sliding window in all layers)", "piecewise graphs", graphs="piecewise"),
    again("Gemma 2 (soft cap, alternating windows)", "full and piecewise graphs", graphs="both"),
    again("Llama (GQA)", "full and piecewise graphs, runner V1", graphs="both", runner="V1"),
)

OWN_DRAFTERS = (
    of_gpu(
        "Llama by n-grams found on the GPU",
        "LlamaForCausalLM",
        LLAMA,
        speculation={**NGRAM, "method": "ngram_gpu", "num_speculative_tokens": 15},
    ),
    of_gpu(
        "Gemma 2 by a model of one layer",
        "Gemma2ForCausalLM",
        {"model_type": "gemma2", "sliding_window": 24, "layer_types": ALTERNATING}
        | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        caches=3,
        shapes=3,
        speculation={"method": "draft_model", "num_speculative_tokens": 15},
        draft=drafter("LlamaForCausalLM", model_type="llama"),
    ),
    again("Llama by EAGLE-3", "fp8 cache", engine=FP8),
    again("Qwen 3 by DFlash", "fp8 cache", engine=FP8),
    *(
        again(name, "runner V1", runner="V1")
        for name in (
            "Llama by EAGLE",
            "Llama by EAGLE-3",
            "Llama by a model of two layers",
            "MiMo by its own layer (MTP)",
            "Qwen 3 by DFlash",
            "Llama by n-grams of 15 tokens",
        )
    ),
    again("Llama by EAGLE-3", "full and piecewise graphs", graphs="both"),
    *(
        again(
            name,
            "adaptive verification",
            speculation={**DRAFTERS_OF_CPU[name].speculation, "enable_adaptive_verification": True},
        )
        for name in ("Llama by EAGLE-3", "Qwen 3 by DFlash 2", "Qwen 3 by DSpark")
    ),
)

GPU_MODELS: Sequence[Case] = (*MODELS_OF_CPU.values(), *OWN_MODELS)
#: All of them: even those that are slow where kernels are interpreted.
GPU_DRAFTERS: Sequence[Case] = tuple(
    replace(case, quick=True) for case in (*DRAFTERS_OF_CPU.values(), *OWN_DRAFTERS)
)
