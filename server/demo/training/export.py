"""Write target and head in the form that transformers and vLLM load."""

import json
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from server.demo.training import tokenizer as tok
from server.demo.training.heads import EagleHead
from server.demo.training.model import Target, TargetShape


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous().clone()
        for name, weight in module.named_parameters()
    }


def export_target(target: Target, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights (bfloat16), configuration, generation defaults and tokenizer into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    bos, eos, pad, end = (tok.SPECIAL.index(t) for t in (tok.BOS, tok.EOS, tok.PAD, tok.END))
    _write_json(folder / "config.json", target.shape.hf_config(bos, eos, pad))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": [eos, end], "pad_token_id": pad},
    )
    save_file(_weights(target), str(folder / "model.safetensors"), metadata={"format": "pt"})
    tok.save(tokenizer, folder, target.shape.max_position_embeddings)


def load_target(target: Target, folder: Path) -> None:
    """Read the weights that ``export_target`` wrote into ``folder``.

    Raises:
        RuntimeError: names or shapes differ from those of ``target``.
    """
    target.load_state_dict(load_file(str(folder / "model.safetensors")))


def export_head(head: EagleHead, folder: Path) -> None:
    """Write the head's weights (bfloat16) and configuration into ``folder``.

    Embedding and output layer are left out: vLLM then shares the target's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", head.hf_config())
    save_file(_weights(head), str(folder / "model.safetensors"), metadata={"format": "pt"})


def load_head(folder: Path) -> EagleHead:
    """Read a head that ``export_head`` wrote into ``folder``, as float32.

    Raises:
        RuntimeError: the weights do not have the names and shapes that the configuration implies.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = TargetShape(**{f.name: config[f.name] for f in fields(TargetShape)})
    head = EagleHead(shape, tuple(config.get("eagle_aux_hidden_state_layer_ids", ())))
    head.load_state_dict(load_file(str(folder / "model.safetensors")))
    return head.requires_grad_(False)
