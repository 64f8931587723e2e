"""The demo model at the size of a larger shape: its answers and its head's acceptance, at that shape's cost.

Dummy weights cost what real ones cost, but nothing real would be accepted. The demo model's acceptance is
real, but its steps are the host's work alone. So its weights are laid into zeros of the larger shape, which
computes the same function (function-preserving, as in Chen, Goodfellow and Shlens, "Net2Net", 2016). Further
layers have random weights and add nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.engine.shapes import Shape, dimensions

#: Standard deviation of weights that only cost time.
NOISE = 0.02
#: What a channel of every hidden state holds that no layer changes, relative to the smallest token embedding.
#: Tokens that the demo model does not have get their logits from it.
CONSTANT = 0.01
#: Hidden states of the demo model are hardly longer (Euclidean norm) before its last RMSNorm.
LONGEST = 1000.0
#: Logits of tokens that the demo model does not have are about this, or less.
NEVER = -200.0
#: Tokens of a head's own vocabulary, as EAGLE-3 heads of Llama 3.1 have it.
DRAFT_VOCABULARY = 32000
#: Random numbers that are drawn. A prime: no row of a weight is another's.
_DRAWN = 16_777_213
#: Most shards that are written at the same time.
_WRITERS = 8

_Tensors = dict[str, torch.Tensor]


class Enlarged:
    """Lays the weights of a Llama model into those of a larger one.

    Args:
        small: ``config.json`` of the model.
        shape: of the larger one. It has at least as much of everything, and as many queries for each KV head.

    Raises:
        ValueError: if the shape has no room for the model.

    """

    def __init__(self, small: dict[str, Any], shape: Shape) -> None:
        self.small, self.shape = small, shape
        self.hidden: int = small["hidden_size"]
        self.head: int = small["head_dim"]
        self.heads: int = small["num_attention_heads"]
        self.kv_heads: int = small["num_key_value_heads"]
        room = (
            shape.hidden > self.hidden,  # one channel more
            shape.intermediate >= small["intermediate_size"],
            shape.head_size % self.head == 0,
            shape.kv_heads >= self.kv_heads,
            shape.heads // shape.kv_heads >= self.heads // self.kv_heads,
            shape.vocabulary >= small["vocab_size"],
        )
        if not all(room):
            raise ValueError(f"{shape} has no room for a model of hidden size {self.hidden}")
        drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0))
        self._noise = (NOISE * drawn).to(torch.bfloat16)
        # RMSNorm divides by the root of the mean square, and the mean is over more channels.
        self.norm_scale = (self.hidden / shape.hidden) ** 0.5
        # Attention scales scores by the head size.
        self.query_scale = (shape.head_size / self.head) ** 0.5
        # Rotary embedding pairs channel i with i + half. With this base the angles of both are the same.
        half, larger = self.head // 2, shape.head_size // 2
        self.channels = torch.cat([torch.arange(half), larger + torch.arange(half)])
        self.theta = float(small["rope_theta"]) ** (shape.head_size / self.head)

    def noise(self, *size: int) -> torch.Tensor:
        """Return random weights: the same numbers again and again, since billions would take long to draw."""
        wanted = math.prod(size)
        return self._noise.repeat(-(-wanted // len(self._noise)))[:wanted].reshape(size)

    def _zeros(self, *size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.bfloat16)

    def _rows(self, heads: int, group: int) -> torch.Tensor:
        """Return where the rows of the model's heads lie among those of the larger one's.

        Args:
            heads: of the model.
            group: heads of the larger one for each KV head, as many as one of the model's or more.

        """
        own = heads // self.kv_heads
        places = torch.tensor([head // own * group + head % own for head in range(heads)])
        return (places[:, None] * self.shape.head_size + self.channels).flatten()

    def norm(self, weight: torch.Tensor, constant: float = 0.0) -> torch.Tensor:
        """Return the weight of an RMSNorm: [hidden], ``constant`` for the constant channel."""
        result = self._zeros(self.shape.hidden)
        result[: self.hidden] = (weight.float() * self.norm_scale).to(result.dtype)
        result[self.hidden] = constant
        return result

    def layer(
        self, found: _Tensors | None, prefix: str, inputs: int = 1
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights of a layer's projections.

        Args:
            found: the model's, with the same names; None for a layer that adds nothing.
            prefix: of the names.
            inputs: hidden states that queries, keys and values are of, behind each other.

        """
        shape = self.shape
        group = shape.heads // shape.kv_heads
        sizes = {"q": (self.heads, group, shape.heads), "k": (self.kv_heads, 1, shape.kv_heads)}
        sizes["v"] = sizes["k"]
        for name, (own, each, all_heads) in sizes.items():
            weight = self.noise(all_heads * shape.head_size, inputs * shape.hidden)
            if found is not None:
                small = found[f"{prefix}self_attn.{name}_proj.weight"].float()
                small *= self.query_scale if name == "q" else 1.0
                # The KV heads in use hold nothing but the model's.
                weight[: self.kv_heads * each * shape.head_size] = 0.0
                rows = self._rows(own, each)
                for index, part in enumerate(small.to(weight.dtype).split(self.hidden, dim=1)):
                    start = index * shape.hidden
                    weight[rows, start : start + self.hidden] = part
            yield f"{prefix}self_attn.{name}_proj.weight", weight
        output = self._zeros(shape.hidden, shape.heads * shape.head_size)
        down = self._zeros(shape.hidden, shape.intermediate)
        gates = {name: self.noise(shape.intermediate, shape.hidden) for name in ("gate", "up")}
        if found is not None:
            output[: self.hidden, self._rows(self.heads, group)] = found[f"{prefix}self_attn.o_proj.weight"]
            inner = self.small["intermediate_size"]
            down[: self.hidden, :inner] = found[f"{prefix}mlp.down_proj.weight"]
            for name, weight in gates.items():
                weight[:inner] = 0.0
                weight[:inner, : self.hidden] = found[f"{prefix}mlp.{name}_proj.weight"]
        yield f"{prefix}self_attn.o_proj.weight", output
        yield f"{prefix}mlp.down_proj.weight", down
        yield from ((f"{prefix}mlp.{name}_proj.weight", weight) for name, weight in gates.items())

    def embedding(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the token embeddings: [vocabulary, hidden]."""
        result = self._zeros(self.shape.vocabulary, self.shape.hidden)
        result[: len(weight), : self.hidden] = weight
        result[:, self.hidden] = _constant(weight)
        return result

    def output(self, weight: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the weight of an output layer: [rows, hidden].

        Args:
            weight: embeddings of the model's tokens, which are its output layer as well.
            rows: tokens.

        """
        result = self.noise(rows, self.shape.hidden)
        result[:, : self.hidden + 1] = 0.0
        result[: len(weight), : self.hidden] = weight
        # The last RMSNorm leaves hardly less than this of the constant channel.
        least = _constant(weight) * float(self.shape.hidden) ** 0.5 / LONGEST
        result[len(weight) :, self.hidden] = NEVER / least
        return result

    def config(self, layers: int, **more: object) -> dict[str, Any]:
        """Return the larger model's ``config.json``."""
        return self.small | {
            **dimensions(self.shape, layers),
            "rms_norm_eps": self.small["rms_norm_eps"] * self.norm_scale**2,
            "rope_theta": self.theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "tie_word_embeddings": False,
            **more,
        }


def _constant(embedding: torch.Tensor) -> float:
    """Return what the constant channel holds, so little that no RMSNorm sees it."""
    return CONSTANT * float(embedding.float().norm(dim=1).min())


def write_target(source: Path, folder: Path, shape: Shape) -> None:
    """Write the enlarged target, a shard for each layer.

    Args:
        source: folder of the demo model.
        folder: to write.
        shape: of the larger model.

    Raises:
        ValueError: if the shape has no room for the demo model.

    """
    found = load_file(source / "model.safetensors")
    large = Enlarged(json.loads((source / "config.json").read_text("utf-8")), shape)
    own: int = large.small["num_hidden_layers"]
    if shape.layers < own:
        raise ValueError(f"{shape} has fewer layers than the {own} of the demo model")
    embedding = found["model.embed_tokens.weight"]

    def layer(index: int) -> _Tensors:
        prefix = f"model.layers.{index}."
        result = dict(large.layer(found if index < own else None, prefix))
        for name in ("input_layernorm", "post_attention_layernorm"):
            full = f"{prefix}{name}.weight"
            weight = found[full] if index < own else torch.full([large.hidden], 1.0)
            result[full] = large.norm(weight)
        return result

    def ends() -> _Tensors:
        return {
            "model.embed_tokens.weight": large.embedding(embedding),
            "model.norm.weight": large.norm(found["model.norm.weight"], 1.0),
            "lm_head.weight": large.output(embedding, shape.vocabulary),
        }

    parts = [ends, *(lambda index=index: layer(index) for index in range(shape.layers))]
    _write(folder, large.config(shape.layers), parts)


def write_draft(source: Path, head: Path, folder: Path, shape: Shape) -> None:
    """Write the enlarged EAGLE-3 head, with an output layer of its own as such heads of large models have.

    Args:
        source: folder of the demo model.
        head: folder of its head.
        folder: to write.
        shape: of the larger model.

    """
    found = load_file(head / "model.safetensors")
    large = Enlarged(json.loads((head / "config.json").read_text("utf-8")), shape)
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    small, states = large.hidden, large.small["num_aux_hidden_states"]
    vocabulary = min(DRAFT_VOCABULARY, shape.vocabulary)

    def everything() -> _Tensors:
        joined = torch.zeros(shape.hidden, states * shape.hidden, dtype=torch.bfloat16)
        for index in range(states):
            start = index * shape.hidden
            joined[:small, start : start + small] = found["fc.weight"][:, index * small :][:, :small]
        joined[small, small] = 1.0  # the constant channel goes on
        result = dict(large.layer(found, "layers.0.", 2))
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            result[f"layers.0.{name}.weight"] = large.norm(found[f"layers.0.{name}.weight"])
        if vocabulary < shape.vocabulary:
            result["d2t"] = torch.zeros(vocabulary, dtype=torch.int64)  # a draft's id is the target's
        return result | {
            "fc.weight": joined,
            "norm.weight": large.norm(found["norm.weight"], 1.0),
            "lm_head.weight": large.output(embedding, vocabulary),
        }

    _write(folder, large.config(1, draft_vocab_size=vocabulary), [everything])


def _write(folder: Path, config: dict[str, Any], parts: list[Callable[[], _Tensors]]) -> None:
    """Write a model folder, a file for each part."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))

    def one(number: int) -> dict[str, str]:
        name = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        tensors = parts[number]()
        save_file(tensors, folder / name, {"format": "pt"})
        return dict.fromkeys(tensors, name)

    places: dict[str, str] = {}
    with ThreadPoolExecutor(_WRITERS) as pool:
        for found in pool.map(one, range(len(parts))):
            places |= found
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
