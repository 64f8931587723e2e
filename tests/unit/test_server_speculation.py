"""What the server makes of a drafter's folder, given to vLLM as it is: the same method and model's class."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from server.drafters import METHODS
from server.errors import StartupError, UsageError
from server.speculation import use_draft

MASK = 15
COMMON: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
LLAMA = COMMON | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN3 = COMMON | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
# MiMo's own model type comes with code from its repository; vLLM goes by the architecture.
MIMO = COMMON | {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
GLM = COMMON | {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 4,
}
ONE = {"num_hidden_layers": 1}
PACKED = {
    "speculators_config": {
        "algorithm": "x",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}],
        "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": {**LLAMA, **ONE},
    "draft_vocab_size": 16,
    "mask_token_id": MASK,
}
#: By what it is: target, drafter (None: without a folder), vLLM's method and class, draft tokens.
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str, str, int]] = {
    "EAGLE-1": (LLAMA, LLAMA | ONE, "eagle", "EagleLlamaForCausalLM", 4),
    "EAGLE-1 by name": (
        LLAMA,
        LLAMA | ONE | {"architectures": ["EagleLlamaForCausalLM"]},
        "eagle",
        "EagleLlamaForCausalLM",
        4,
    ),
    "EAGLE-3": (
        LLAMA,
        LLAMA | ONE | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 16},
        "eagle3",
        "LlamaForCausalLMEagle3",
        4,
    ),
    "EAGLE-3 by key": (
        LLAMA,
        LLAMA | ONE | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "draft_vocab_size": 16},
        "eagle3",
        "Eagle3LlamaForCausalLM",
        4,
    ),
    "EAGLE-3 of speculators": (
        LLAMA,
        PACKED | {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]},
        "eagle3",
        "Eagle3LlamaForCausalLM",
        4,
    ),
    "P-EAGLE": (
        LLAMA,
        LLAMA | ONE | {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": MASK},
        "eagle3 at once",
        "LlamaForCausalLMEagle3",
        4,
    ),
    "P-EAGLE of speculators": (
        LLAMA,
        PACKED | {"speculators_model_type": "peagle", "architectures": ["PEagleDraftModel"]},
        "eagle3 at once",
        "PeagleLlamaForCausalLM",
        6,
    ),
    "draft model": (LLAMA, LLAMA | {"num_hidden_layers": 2}, "draft_model", "LlamaForCausalLM", 4),
    "PARD": (LLAMA, LLAMA | ONE | {"pard_token": MASK}, "draft_model at once", "LlamaForCausalLM", 4),
    "Medusa": (
        LLAMA,
        {"model_type": "medusa", "num_heads": 3, "hidden_size": 64, "vocab_size": 16},
        "medusa",
        "MedusaModel",
        3,
    ),
    "Medusa's first form": (LLAMA, {"medusa_num_heads": 3, "hidden_size": 64}, "medusa", "MedusaModel", 3),
    "DFlash": (
        QWEN3,
        QWEN3
        | {
            "architectures": ["DFlashDraftModel"],
            "block_size": 16,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
        },
        "dflash at once",
        "DFlashDraftModel",
        15,
    ),
    "DSpark": (
        QWEN3,
        QWEN3 | {"architectures": ["Qwen3DSparkModel"], "block_size": 5, "target_layer_ids": [0, 2]},
        "dspark at once",
        "Qwen3DSparkModel",
        5,
    ),
    "MTP of a folder": (MIMO, MIMO, "mtp", "MiMoMTPModel", 4),
    "MTP of the target": (MIMO, None, "mtp", "MiMoMTPModel", 4),
    "MTP of the target, GLM-4.5": (GLM, None, "mtp", "Glm4MoeMTPModel", 4),
    "n-grams": (LLAMA, None, "ngram", "LlamaForCausalLM", 4),
}


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """vLLM's configuration of a target, made once for each."""
    from vllm.config import ModelConfig
    from vllm.model_executor.models import registry

    known: dict[str, Any] = {}

    def make(config: dict[str, Any]) -> Any:
        name = config["architectures"][0]
        if name not in known:
            folder = write(tmp_path_factory.mktemp("target"), config)
            known[name] = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32")
        return known[name]

    with pytest.MonkeyPatch.context() as patch:
        # vLLM looks at each class in a process of its own, which takes seconds to start.
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield make


def write(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def configured(model: str, draft: str | None, method: str | None) -> dict[str, Any]:
    """The settings that the server gives vLLM."""
    args = argparse.Namespace(
        model=model,
        draft=draft,
        speculative_method=method,
        draft_sampling=None,
        num_speculative_tokens=None,
        additional_config=None,
        **dict.fromkeys(("tree_nodes", "tree_depth", "tree_width", "tree_kind", "tree_requests")),
    )
    use_draft(args, default=4, device_type="cpu")
    settings: dict[str, Any] = args.speculative_config
    return settings


@pytest.mark.parametrize("name", DRAFTERS)
def test_vllm_drafts_as_the_folder_says(
    name: str,
    tmp_path_factory: pytest.TempPathFactory,
    model_config: Callable[[dict[str, Any]], Any],
) -> None:
    from vllm.config import ParallelConfig, SpeculativeConfig, speculative

    target, drafter, wanted, architecture, tokens = DRAFTERS[name]
    method, _, at_once = wanted.partition(" ")
    config = model_config(target)
    # Not in a test's own folder, of whose name vLLM would make something.
    draft = None if drafter is None else write(tmp_path_factory.mktemp("drafter"), drafter)
    if METHODS[method]["method"] not in get_args(speculative.SpeculativeMethod):
        with pytest.raises(UsageError, match=f"does not draft by {method}: use another draft"):
            configured(config.model, draft, None)
        return
    settings = configured(config.model, draft, method if drafter is None else None)
    made = SpeculativeConfig(**settings, target_model_config=config, target_parallel_config=ParallelConfig())
    assert (made.method, made.parallel_drafting) == (method, bool(at_once))
    assert made.draft_model_config.architectures == [architecture]
    assert made.num_speculative_tokens == tokens


@pytest.mark.parametrize("word", ["eagle-", "eagle3"])
def test_vllm_goes_by_a_path_before_the_method(
    word: str,
    tmp_path_factory: pytest.TempPathFactory,
    model_config: Callable[[dict[str, Any]], Any],
) -> None:
    """So such a path is refused; where this fails, vLLM does no longer, and the refusal can go."""
    from vllm.config import ParallelConfig, SpeculativeConfig

    folder = tmp_path_factory.mktemp("drafter") / f"{word}1"
    folder.mkdir()
    made = SpeculativeConfig(
        method="draft_model",
        model=write(folder, LLAMA | {"num_hidden_layers": 2}),
        num_speculative_tokens=4,
        target_model_config=model_config(LLAMA),
        target_parallel_config=ParallelConfig(),
    )
    assert made.method == word.removesuffix("-")
    with pytest.raises(StartupError, match="rename the folder"):
        configured(model_config(LLAMA).model, str(folder), None)
