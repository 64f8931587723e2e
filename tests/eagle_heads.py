"""An EAGLE-1 head for the demo model, made of random numbers; the bundled head is of EAGLE-3's kind."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from server import demo


def write(folder: Path) -> Path:
    """Write the head into ``folder`` and return it.

    It hands the target's hidden state on, stirred a little by one layer of small random weights. So it mostly
    guesses that the last token comes once more, which is right now and then.
    """
    config = json.loads((demo.model_path() / "config.json").read_text())
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    source = torch.Generator().manual_seed(0)

    def small(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=source) * 0.02

    layer = "layers.0."
    weights = {
        "fc.weight": torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1),
        f"{layer}self_attn.q_proj.weight": small(heads, hidden),
        f"{layer}self_attn.k_proj.weight": small(kv_heads, hidden),
        f"{layer}self_attn.v_proj.weight": small(kv_heads, hidden),
        f"{layer}self_attn.o_proj.weight": small(hidden, heads),
        f"{layer}mlp.gate_proj.weight": small(inner, hidden),
        f"{layer}mlp.up_proj.weight": small(inner, hidden),
        f"{layer}mlp.down_proj.weight": small(hidden, inner),
        f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder
