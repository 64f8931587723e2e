"""Model folders that hold a configuration and no weights: Llama shapes with an EAGLE head, for speed only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """A Llama shape.

    Attributes:
        hidden: hidden size.
        intermediate: inner size of the MLP.
        layers: transformer layers.
        heads: query heads.
        kv_heads: KV heads.
        head_size: elements per head.
        vocabulary: tokens.

    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int = 128256


#: The shapes of Llama 3.2 1B and Llama 3.1 8B, and a small one to try a benchmark with, on a CPU too.
SHAPES = {
    "tiny": Shape(256, 512, 2, 4, 2, 64, 8192),
    "1b": Shape(2048, 8192, 16, 32, 8, 64),
    "8b": Shape(4096, 14336, 32, 32, 8, 128),
}


def label(name: str, cache_dtype: str, attention: str = "") -> str:
    """Return what a shape is called in results.

    Args:
        name: of the shape.
        cache_dtype: of the KV cache; "auto" for the model's, which goes without saying.
        attention: vLLM's attention backend; empty for its own choice, likewise.

    """
    words = [
        name,
        *([] if cache_dtype == "auto" else [f"{cache_dtype} cache"]),
        *([attention] if attention else []),
    ]
    return ", ".join(words)


def dimensions(shape: Shape, layers: int) -> dict[str, object]:
    """Return what ``config.json`` says of a shape."""
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocabulary,
    }


def _config(shape: Shape, layers: int, max_len: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **dimensions(shape, layers),
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def write(folder: Path, name: str, max_len: int) -> tuple[Path, Path]:
    """Write target and draft folders of a shape and return them."""
    shape = SHAPES[name]
    target, draft = folder / name, folder / f"{name}-eagle"
    for path, layers in ((target, shape.layers), (draft, 1)):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(_config(shape, layers, max_len)))
    return target, draft
