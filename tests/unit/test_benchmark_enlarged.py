"""Claim: the demo model at a larger size computes the same, and so does its head.

Coverage: logits of the target by transformers, of the head by a reference of its one layer, both in float32.
The shapes scale norms and queries by powers of two, so that bfloat16 rounds nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from benchmarks.engine.shapes import Shape
from benchmarks.serving import enlarged, models
from server import demo

#: Four times as many channels, and four times as many in a head.
LARGE = Shape(hidden=1536, intermediate=1024, layers=6, heads=16, kv_heads=4, head_size=256, vocabulary=4200)
TOKENS = 48


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("enlarged")
    enlarged.write_target(demo.model_path(), folder / "target", LARGE)
    enlarged.write_draft(demo.model_path(), demo.draft_path(), folder / "draft", LARGE)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo.model_path() / "tokenizer.json"))
    text = Path(demo.__file__).read_text("utf-8")
    return torch.tensor(tokenizer.encode(text).ids[:TOKENS])


def _target_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(ids[None]).logits[0]
    return logits


def test_the_target_computes_the_same(folders: tuple[Path, Path], ids: torch.Tensor) -> None:
    wanted, found = _target_logits(demo.model_path(), ids), _target_logits(folders[0], ids)
    known = wanted.shape[1]
    torch.testing.assert_close(found[:, :known], wanted, rtol=0, atol=5e-3)
    assert found.shape[1] == LARGE.vocabulary
    assert float(found[:, known:].max()) < 0.9 * enlarged.NEVER


def _weights(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return config, {name: weight.float() for name, weight in found.items()}


def _rotate(states: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate [tokens, heads, size] by position."""
    half = states.shape[-1] // 2
    angles = torch.arange(len(states))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = states[..., :half], states[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _head_logits(
    folder: Path, embeds: torch.Tensor, states: torch.Tensor, output: torch.Tensor | None
) -> Any:
    """Return the logits of an EAGLE-3 head: [tokens, tokens of its vocabulary].

    Args:
        folder: of the head.
        embeds: [tokens, hidden] of the tokens.
        states: [tokens, 3 hidden] of the target's layers.
        output: [vocabulary, hidden] where the head has no output layer of its own.

    """
    config, found = _weights(folder)
    hidden, size = config["hidden_size"], config["head_dim"]

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(values, (hidden,), found[f"{name}.weight"], config["rms_norm_eps"])

    def apply(values: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(values, found[f"layers.0.{name}_proj.weight"])

    residual = functional.linear(states, found["fc.weight"])
    both = torch.cat(
        [norm(embeds, "layers.0.input_layernorm"), norm(residual, "layers.0.hidden_norm")], dim=-1
    )
    query, key, value = (apply(both, f"self_attn.{name}").unflatten(-1, (-1, size)) for name in "qkv")
    query, key = _rotate(query, config["rope_theta"]), _rotate(key, config["rope_theta"])
    attended = functional.scaled_dot_product_attention(
        *(one.transpose(0, 1)[None] for one in (query, key, value)), is_causal=True, enable_gqa=True
    )
    residual = residual + apply(attended[0].transpose(0, 1).flatten(1), "self_attn.o")
    inner = norm(residual, "layers.0.post_attention_layernorm")
    residual = residual + apply(
        functional.silu(apply(inner, "mlp.gate")) * apply(inner, "mlp.up"), "mlp.down"
    )
    return functional.linear(norm(residual, "norm"), found.get("lm_head.weight", output))


def _states(folder: Path, ids: torch.Tensor, layers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token embeddings and the hidden states that the head reads."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *told: seen.append(told[2][0] if told[2].dim() == 3 else told[2]))
    with torch.no_grad():
        model(ids[None])
        embeds: torch.Tensor = model.model.embed_tokens(ids)
    return embeds, torch.cat([seen[layer - 1] for layer in layers], dim=-1)


def test_the_head_computes_the_same(folders: tuple[Path, Path], ids: torch.Tensor) -> None:
    layers = json.loads((demo.draft_path() / "config.json").read_text("utf-8"))[
        "eagle_aux_hidden_state_layer_ids"
    ]
    output = load_file(demo.model_path() / "model.safetensors")["model.embed_tokens.weight"].float()
    wanted = _head_logits(demo.draft_path(), *_states(demo.model_path(), ids, layers), output)
    found = _head_logits(folders[1], *_states(folders[0], ids, layers), None)
    known = wanted.shape[1]
    torch.testing.assert_close(found[:, :known], wanted, rtol=0, atol=5e-3)
    assert float(found[:, known:].max()) < 0.9 * enlarged.NEVER


def test_layers_behind_the_models_cost_but_add_nothing(folders: tuple[Path, Path]) -> None:
    config, found = _weights(folders[0])
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    assert config["num_hidden_layers"] == LARGE.layers
    assert float(found[f"{last}mlp.up_proj.weight"].std()) == pytest.approx(enlarged.NOISE, rel=0.1)
    assert not found[f"{last}mlp.down_proj.weight"].any()
    assert not found[f"{last}self_attn.o_proj.weight"].any()


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 384},
        {"intermediate": 512},
        {"head_size": 96},
        {"heads": 8},
        {"layers": 4},
        {"vocabulary": 100},
    ],
)
def test_a_shape_without_room_is_refused(change: dict[str, int], tmp_path: Path) -> None:
    shape = Shape(**{**LARGE.__dict__, **change})
    with pytest.raises(ValueError, match=r"room|layers"):
        enlarged.write_target(demo.model_path(), tmp_path / "target", shape)


def test_all_enlarged_shapes_have_room() -> None:
    named = [name for name in models.known_shapes() if name.startswith(models.ENLARGED)]
    assert named == ["demo-1b", "demo-8b"]
    config = json.loads((demo.model_path() / "config.json").read_text("utf-8"))
    for name in named:
        enlarged.Enlarged(config, models.shapes.SHAPES[name.removeprefix(models.ENLARGED)])
