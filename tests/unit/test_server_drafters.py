"""How a drafter's folder tells its method, held against what vLLM makes of the same files."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import PretrainedConfig
from vllm.config.speculative import MTPModelTypes, SpeculativeConfig
from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES

from server import demo
from server.drafters import METHODS, read_drafter, within_target
from server.errors import StartupError

EAGLE_WEIGHTS = ("fc.weight", "layers.0.mlp.up_proj.weight")
MODEL_WEIGHTS = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")


def tell(
    folder: Path, config: dict[str, Any], weights: tuple[str, ...] = (), method: str | None = None
) -> Any:
    """What is told from a folder with this configuration and weights of these names."""
    if weights:
        save_file({name: torch.zeros(1) for name in weights}, folder / "model.safetensors")
    return read_drafter(folder, config, method)


TOLD = [
    ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
    ({"architectures": ["EagleDeepSeekMTPModel"], "model_type": "deepseek_v3"}, "eagle"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
    ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
    ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 3}, "peagle"),
    ({"architectures": ["LlamaForCausalLM"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "eagle3"),
    ({"speculators_model_type": "eagle3"}, "eagle3"),
    ({"speculators_model_type": "peagle"}, "peagle"),
    ({"speculators_model_type": "dflash"}, "dflash"),
    ({"speculators_model_type": "dflash2"}, "dflash"),
    ({"speculators_model_type": "dspark"}, "dspark"),
    ({"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle"}, "peagle"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "dflash"),
    ({"architectures": ["Qwen3ForCausalLM"], "dflash_config": {}}, "dflash"),
    ({"architectures": ["LiLiCorrDraftModel"]}, "dflash"),
    ({"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}, "dspark"),
    ({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v41"}, "dspark"),
    ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "medusa"),
    ({"medusa_num_heads": 4, "base_model_name_or_path": "lmsys/vicuna-7b"}, "medusa"),
    ({"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}, "mtp"),
    ({"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"}, "mtp"),
    ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "pard_token": 5}, "pard"),
    ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, "eagle"),
    ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 16}, "draft_model"),
    ({"architectures": None}, "eagle"),
]


@pytest.mark.parametrize(("config", "method"), TOLD)
def test_the_configuration_tells_the_method(tmp_path: Path, config: dict[str, Any], method: str) -> None:
    drafter = tell(tmp_path, config)
    assert drafter.method == method
    assert drafter.source


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_weights_tell_a_head_from_a_model_of_the_same_name(tmp_path: Path, layers: int, packed: bool) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
    for name, weights, method in (
        ("head", EAGLE_WEIGHTS, "eagle"),
        ("nested head", ("model.fc.weight", "model.layers.0.mlp.up_proj.weight"), "eagle"),
        ("model", MODEL_WEIGHTS, "draft_model"),
        ("GPT-2", ("wte.weight", "h.0.mlp.c_fc.weight", "h.1.mlp.fc.weight"), "draft_model"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        if packed:
            torch.save({weight: torch.zeros(1) for weight in weights}, folder / "pytorch_model.bin")
        drafter = tell(folder, config, () if packed else weights)
        assert (drafter.method, "weight" in drafter.source) == (method, True)


def test_weights_that_cannot_be_read_leave_it_to_the_configuration(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "c_model.bin"):
        (tmp_path / name).write_bytes(b"\xff" * (4 if name < "b" else 40))
    assert tell(tmp_path, {"num_hidden_layers": 3}).method == "draft_model"


KEYS = (
    *("model_type", "architectures", "speculators_model_type", "speculators_config", "dflash_config"),
    *("block_size", "num_nextn_predict_layers", "num_heads", "text_config", "num_hidden_layers"),
)
WORDS = ("eagle", "Eagle3Llama", "PEagle", "DFlash", "dspark", "medusa", "mtp", "nemotron_h", "gemma4_mtp")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 20) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
)


@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES).filter(
        lambda config: isinstance(config.get("architectures"), list | None)
    )
)
def test_any_configuration_is_told_or_refused(config: dict[str, Any]) -> None:
    try:
        drafter = read_drafter(Path("nowhere"), config)
    except StartupError:
        return
    assert drafter.method in METHODS
    assert drafter.tokens is None or drafter.tokens > 0


def test_the_demo_is_told() -> None:
    folder = demo.draft_path()
    config = json.loads((folder / "config.json").read_text())
    assert read_drafter(folder, config).method == demo.draft_method()


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (
            {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"},
            "MLP speculator",
        ),
        ({"speculators_model_type": "mlp"}, "'mlp'"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, "format of speculators"),
        ({"speculators_model_type": "eagle"}, "'eagle'"),
    ],
)
def test_what_vllm_cannot_run_is_refused(tmp_path: Path, config: dict[str, Any], word: str) -> None:
    with pytest.raises(StartupError, match=word):
        tell(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "method", "tokens", "most"),
    [
        ({"medusa_num_heads": 3}, "medusa", 3, 3),
        ({"model_type": "medusa", "num_heads": 7}, "medusa", 4, 7),
        ({"model_type": "medusa"}, "medusa", 4, 5),
        ({"architectures": ["DFlashDraftModel"], "block_size": 16}, "dflash", 15, None),
        ({"architectures": ["DFlashDraftModel"]}, "dflash", None, None),
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7}, "dspark", 7, None),
        ({"speculators_model_type": "dspark", "block_size": 8}, "dspark", 7, None),
        (
            {"speculators_model_type": "dspark", "block_size": 8, "sample_from_anchor": True},
            "dspark",
            8,
            None,
        ),
        (
            {
                "speculators_model_type": "peagle",
                "speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]},
            },
            "peagle",
            6,
            None,
        ),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, "mtp", None, None),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 3}, "mtp", 3, None),
        ({"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 3}}, "mtp", 3, None),
        ({"architectures": ["MiMoV2ForCausalLM"], "num_nextn_predict_layers": 3}, "mtp", None, None),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle", None, None),
    ],
)
def test_how_many_tokens_suit_a_drafter(
    tmp_path: Path, config: dict[str, Any], method: str, tokens: int | None, most: int | None
) -> None:
    drafter = tell(tmp_path, config)
    assert (drafter.method, drafter.tokens, drafter.most) == (method, tokens, most)


def test_a_method_that_vllm_would_overrule_is_refused(tmp_path: Path) -> None:
    layers = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    with pytest.raises(StartupError, match="give mtp"):
        tell(tmp_path, layers, method="draft_model")
    with pytest.raises(StartupError, match="no layers"):
        tell(tmp_path, {"model_type": "llama"}, method="mtp")
    assert tell(tmp_path, {"model_type": "llama", "num_hidden_layers": 9}, method="eagle").method == "eagle"


def test_layers_of_the_targets_own() -> None:
    mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    assert within_target("mtp", mimo, "model").layers == 1
    assert within_target("dspark", {"model_type": "deepseek_v4", "dspark_block_size": 5}, "model").tokens == 5
    for method, config in (
        ("mtp", {"model_type": "llama"}),
        ("mtp", mimo | {"num_nextn_predict_layers": 0}),
        ("dspark", {"model_type": "qwen3"}),
    ):
        with pytest.raises(StartupError, match=f"no layers for drafting by {method}"):
            within_target(method, config, "model")


# What vLLM makes of a configuration.


def constants() -> list[str]:
    """Every text that vLLM's translation of drafters' configurations compares a name with, or writes."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(SpeculativeConfig.hf_config_override)))
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return sorted(text for text in found if isinstance(text, str) and text.isidentifier())


def translated(config: dict[str, Any]) -> str:
    """The model type that vLLM turns a configuration into."""
    known = PretrainedConfig()
    for key, value in config.items():
        setattr(known, key, value)
    text = config.get("text_config")
    if text is not None:
        known.text_config = PretrainedConfig(**text)
        known.text_config.model_type = text["model_type"]
    return str(SpeculativeConfig.hf_config_override(known).model_type)


def as_model_type(name: str) -> dict[str, Any]:
    text = {
        "model_type": "language",
        "num_nextn_predict_layers": 1,
        "hc_count": 1,
        "num_attention_heads": 1,
        "num_experts": 1,
        "mtp_num_experts": 1,
        "mtp_num_experts_per_tok": 1,
        "architectures": ["Language"],
    }
    return {
        "model_type": name,
        "architectures": ["Other"],
        "num_nextn_predict_layers": 1,
        "mtp_config": {"num_nextn_predict_layers": 1},
        "layer_types": ["full_attention"],
        "num_hidden_layers": 9,
        "hc_count": 1,
        "text_config": text,
    }


def as_architecture(name: str) -> dict[str, Any]:
    return as_model_type("other") | {"architectures": [name]}


def by_vllm(config: dict[str, Any]) -> bool:
    return translated(json.loads(json.dumps(config))) in get_args(MTPModelTypes)


@pytest.mark.parametrize("make", [as_model_type, as_architecture])
def test_the_layers_for_mtp_are_those_that_vllm_takes(tmp_path: Path, make: Any) -> None:
    """Each name in vLLM's own translation, as a model type and as an architecture."""
    expected, told = {}, {}
    for name in constants():
        config = make(name)
        try:
            expected[name] = by_vllm(config)
        except AttributeError:  # needs more of a configuration than this test has
            continue
        told[name] = tell(tmp_path, config).method == "mtp"
    # Of DeepSeek V4.1 vLLM itself says that it has no such layers.
    for names in (expected, told):
        names.pop("deepseek_v41", None)
    assert {name for name, is_mtp in expected.items() if is_mtp} == {
        name for name, is_mtp in told.items() if is_mtp
    }
    assert sum(expected.values()) >= 10


@pytest.mark.parametrize("kind", sorted(SUPPORTED_SPECULATORS_TYPES))
def test_each_type_of_speculators_is_known(tmp_path: Path, kind: str) -> None:
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    packed = {"proposal_methods": [{"speculative_tokens": 6}], "verifier": {"name_or_path": "owner/target"}}
    config = {"speculators_model_type": kind, "speculators_config": packed, "transformer_layer_config": {}}
    wanted = SpeculatorsConfig.extract_vllm_speculative_config(config)
    drafter = tell(tmp_path, config)
    tokens = wanted.pop("num_speculative_tokens")
    assert METHODS[drafter.method] == wanted
    assert drafter.tokens in (tokens, None)
