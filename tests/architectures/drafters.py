"""Tiny drafters of the kinds that vLLM runs on a CPU, each with a target that it drafts for.

Suffix decoding is not among them: it needs a package that this project does not install.
"""

from __future__ import annotations

from typing import Any

from tests.architectures.cases import COMMON, LLAMA, NGRAM, VOCABULARY, Case

#: An id that no prompt has, which stands for the tokens to be drafted at once.
MASK = VOCABULARY - 1
#: Layers of the target whose output EAGLE-3 and DFlash read.
AUXILIARY = [1, 2, 3]
QWEN3: dict[str, Any] = {"model_type": "qwen3", "tie_word_embeddings": True}


def drafter(architecture: str, **config: Any) -> dict[str, Any]:
    """Return a drafter's whole configuration; None takes a key out."""
    whole = {**COMMON, "architectures": [architecture], "num_hidden_layers": 1, **config}
    return {key: value for key, value in whole.items() if value is not None}


def drafts(method: str, tokens: int, **settings: Any) -> dict[str, Any]:
    """Return vLLM's setting."""
    return {"method": method, "num_speculative_tokens": tokens, **settings}


DFLASH: dict[str, Any] = {
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"target_layer_ids": AUXILIARY, "mask_token_id": MASK},
}
#: Of the four likeliest tokens of each place it takes those that go best together.
DFLASH2: dict[str, Any] = DFLASH | {
    "dflash_config": {
        **DFLASH["dflash_config"],
        "conv_kernel_size": 4,
        "conv_group_size": 1,
        "selector_rank": 8,
        "selector_top_k": 4,
    }
}
EAGLE3: dict[str, Any] = {
    "model_type": "llama",
    "draft_vocab_size": VOCABULARY,
    "eagle_aux_hidden_state_layer_ids": AUXILIARY,
}

DRAFTERS = (
    Case(
        "Llama by EAGLE",
        "LlamaForCausalLM",
        LLAMA,
        speculation=drafts("eagle", 4),
        draft=drafter("LlamaForCausalLM", model_type="llama"),
        quick=True,
    ),
    Case(
        "Llama by EAGLE-3",
        "LlamaForCausalLM",
        LLAMA,
        speculation=drafts("eagle3", 5),
        draft=drafter("LlamaForCausalLMEagle3", **EAGLE3),
        quick=True,
    ),
    Case(
        "Llama by P-EAGLE",
        "LlamaForCausalLM",
        LLAMA,
        speculation=drafts("eagle3", 8, parallel_drafting=True),
        draft=drafter("LlamaForCausalLMEagle3", **EAGLE3, ptd_token_id=MASK),
        quick=True,
    ),
    Case(
        "Llama by a model of two layers",
        "LlamaForCausalLM",
        LLAMA,
        speculation=drafts("draft_model", 15),
        draft=drafter("LlamaForCausalLM", model_type="llama", num_hidden_layers=2),
        quick=True,
    ),
    Case(
        "Llama by PARD",
        "LlamaForCausalLM",
        LLAMA,
        speculation=drafts("draft_model", 8, parallel_drafting=True),
        draft=drafter("LlamaForCausalLM", model_type="llama", num_hidden_layers=2, pard_token=MASK),
        quick=True,
    ),
    Case(
        "Llama by Medusa",
        "LlamaForCausalLM",
        LLAMA,
        speculation=drafts("medusa", 4),
        draft=drafter("MedusaModel", model_type="medusa", num_heads=4, num_hidden_layers=1)
        | {"truncated_vocab_size": VOCABULARY},
        quick=True,
    ),
    Case(
        "MiMo by its own layer (MTP)",
        "MiMoForCausalLM",
        {"model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"num_nextn_predict_layers": 1},
        speculation=drafts("mtp", 3),
        quick=True,
    ),
    Case(
        "Qwen 3 by DFlash",
        "Qwen3ForCausalLM",
        QWEN3,
        speculation=drafts("dflash", 15),
        draft=drafter("DFlashDraftModel", **DFLASH),
        quick=True,
    ),
    Case(
        "Llama by n-grams of 15 tokens",
        "LlamaForCausalLM",
        LLAMA,
        speculation={**NGRAM, "num_speculative_tokens": 15},
        quick=True,
    ),
    Case(
        "Qwen 3 by DFlash 2",
        "Qwen3ForCausalLM",
        QWEN3,
        speculation=drafts("dflash", 15),
        draft=drafter("DFlash2DraftModel", **DFLASH2),
        v2=True,
        accepted=False,
    ),
    Case(
        "Qwen 3 by DSpark",
        "Qwen3ForCausalLM",
        QWEN3,
        speculation=drafts("dspark", 7),
        draft=drafter("Qwen3DSparkModel", model_type="qwen3", block_size=7, markov_rank=16)
        | {"target_layer_ids": AUXILIARY, "mask_token_id": MASK},
        v2=True,
        quick=True,
    ),
)
