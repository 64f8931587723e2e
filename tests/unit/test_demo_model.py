"""The bundled demo model: it is complete, small enough, consistent, and shaped as the engine reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from server import demo
from server.demo.training.export import load_target
from server.demo.training.model import Target, TargetShape

PROMPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "acceptance" / "prompts.jsonl"


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        names = list(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(demo.model_path()))


def test_weights_and_tokenizer_stay_under_24_megabytes() -> None:
    files = [*demo.model_path().iterdir(), *demo.draft_path().iterdir()]
    assert sum(f.stat().st_size for f in files) < 24_000_000


def test_draft_fits_the_target() -> None:
    target, draft = config(demo.model_path()), config(demo.draft_path())
    for key in ("vocab_size", "hidden_size", "head_dim", "max_position_embeddings", "rope_theta"):
        assert draft[key] == target[key]
    assert draft["num_hidden_layers"] == 1


def test_heads_divide_over_two_devices() -> None:
    for folder in (demo.model_path(), demo.draft_path()):
        values = config(folder)
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
            assert values[key] % 2 == 0


def test_draft_holds_what_the_engine_reads_and_no_copy_of_the_target() -> None:
    values, found = config(demo.draft_path()), shapes(demo.draft_path())
    hidden, inner = values["hidden_size"], values["intermediate_size"]
    q = values["num_attention_heads"] * values["head_dim"]
    kv = values["num_key_value_heads"] * values["head_dim"]
    eagle3 = demo.draft_method() == "eagle3"
    width = 2 * hidden if eagle3 else hidden
    expected = {
        "fc.weight": (hidden, (3 if eagle3 else 2) * hidden),
        "layers.0.self_attn.q_proj.weight": (q, width),
        "layers.0.self_attn.k_proj.weight": (kv, width),
        "layers.0.self_attn.v_proj.weight": (kv, width),
        "layers.0.self_attn.o_proj.weight": (hidden, q),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
    }
    if eagle3:
        expected["layers.0.input_layernorm.weight"] = (hidden,)
        expected["layers.0.hidden_norm.weight"] = (hidden,)
        expected["norm.weight"] = (hidden,)
        assert len(values["eagle_aux_hidden_state_layer_ids"]) == values["num_aux_hidden_states"] == 3
    assert found == expected


def test_tokenizer_round_trips_source(tokenizer) -> None:
    text = Path(__file__).read_text(encoding="utf-8") + "\tübrig 漢字 \u200b\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text
    assert max(ids) < config(demo.model_path())["vocab_size"] == len(tokenizer)


def test_special_tokens_agree_with_the_configuration(tokenizer) -> None:
    values = config(demo.model_path())
    assert tokenizer.bos_token_id == values["bos_token_id"]
    assert tokenizer.eos_token_id == values["eos_token_id"]
    assert tokenizer.pad_token_id == values["pad_token_id"]
    defaults = json.loads((demo.model_path() / "generation_config.json").read_text(encoding="utf-8"))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert defaults["eos_token_id"] == [tokenizer.eos_token_id, end]


def test_chat_template_renders(tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write a Python function."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>\nBe brief.<|end|>\n<|user|>\nWrite a Python function.<|end|>\n<|assistant|>\n"
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids.count(tokenizer.convert_tokens_to_ids("<|end|>")) == 2


def test_training_model_equals_transformers_llama(tokenizer) -> None:
    """Claim: the training code's decoder computes what transformers' Llama does, on the bundled weights."""
    folder = str(demo.model_path())
    assert AutoConfig.from_pretrained(folder).model_type == "llama"
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = Target(TargetShape())
    load_target(ours, demo.model_path())
    ids = torch.tensor([tokenizer("def read(path):\n    with open(path) as file:\n")["input_ids"]])
    with torch.no_grad():
        expected, found = reference(ids).logits, ours(ids)
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_target_has_learned_python(tokenizer) -> None:
    """Held-out source costs well under what an untrained model pays (ln 4096 = 8.3 nats per token)."""
    target = Target(TargetShape())
    load_target(target, demo.model_path())
    losses = []
    for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:16]:
        ids = torch.tensor([tokenizer(json.loads(line)["prompt"])["input_ids"]])
        with torch.no_grad():
            logits = target(ids[:, :-1])
        losses.append(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).item())
    assert sum(losses) / len(losses) < 3.0


def test_prompts_come_from_held_out_modules() -> None:
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 128
    assert {row["licence"] for row in rows} == {"PSF-2.0"}
    assert len({row["module"] for row in rows}) == 40
    assert len({row["prompt"] for row in rows}) == 128
