"""A LoRA adapter for the demo model, for tests on CPUs and GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from server import demo


def write(folder: Path, rank: int = 8, spread: float = 0.2) -> str:
    """Write a LoRA adapter with random weights for every layer's query and value projection.

    Args:
        folder: where to; it must not exist.
        rank: the adapter's rank.
        spread: standard deviation of its weights.

    Returns:
        The folder, as vLLM wants it.

    """
    model = json.loads((Path(demo.model_path()) / "config.json").read_text(encoding="utf-8"))
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    head = model.get("head_dim") or hidden // heads
    sizes = {"q_proj": heads * head, "v_proj": model["num_key_value_heads"] * head}
    source = torch.Generator().manual_seed(5)
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        for name, size in sizes.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = torch.randn(rank, hidden, generator=source) * spread
            weights[f"{path}.lora_B.weight"] = torch.randn(size, rank, generator=source) * spread
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}), encoding="utf-8")
    return str(folder)
