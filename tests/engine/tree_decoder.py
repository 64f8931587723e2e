"""Decoding by trees of draft tokens in plain torch: no cache, no masks, no vLLM. For tests alone.

The demo model and its EAGLE-3 head, in float32. Each path of a tree is a sequence of its own: the drafter
runs over the whole text and the path, and so does the target. What a tree is follows EAGLE-2
(arXiv:2406.16858): each level expands the best nodes of the one before by the product of the drafter's
probabilities, and the best of all candidates are verified.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

#: Tokens from the root, which is not among them, to a node.
TreePath = tuple[int, ...]


class TreeDecoder:
    """Weights of a target and of its head.

    Args:
        model: folder of the target, with one file of weights.
        draft: folder of the head.

    """

    def __init__(self, model: Path, draft: Path) -> None:
        from safetensors.torch import load_file

        self._config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self._target = {n: w.float() for n, w in load_file(model / "model.safetensors").items()}
        self._draft = {n: w.float() for n, w in load_file(draft / "model.safetensors").items()}
        drafter: dict[str, Any] = json.loads((draft / "config.json").read_text(encoding="utf-8"))
        self._read: list[int] = drafter["eagle_aux_hidden_state_layer_ids"]
        self._embeddings = self._target["model.embed_tokens.weight"]

    def _norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states, weight.shape, weight, self._config["rms_norm_eps"])

    def _attend(self, states: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        size = self._config["head_dim"]

        def heads(part: str) -> torch.Tensor:
            return (
                (states @ weights[f"{name}.{part}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(0, 1)
            )

        angles = torch.outer(
            torch.arange(len(states), dtype=torch.float32),
            self._config["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32) / size),
        )
        cos, sin = angles.cos(), angles.sin()

        def turn(rows: torch.Tensor) -> torch.Tensor:
            first, second = rows.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        found = functional.scaled_dot_product_attention(
            turn(heads("q"))[None], turn(heads("k"))[None], heads("v")[None], is_causal=True, enable_gqa=True
        )
        return found[0].transpose(0, 1).flatten(1) @ weights[f"{name}.o_proj.weight"].T

    def _feed(self, states: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        gate = functional.silu(states @ weights[f"{name}.gate_proj.weight"].T)
        up = states @ weights[f"{name}.up_proj.weight"].T
        return (gate * up) @ weights[f"{name}.down_proj.weight"].T

    def target(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [tokens, V], and what the drafter reads [tokens, hidden of some layers]."""
        weights, read = self._target, []
        states = self._embeddings[tokens]
        for layer in range(self._config["num_hidden_layers"]):
            if layer in self._read:
                read.append(states)
            name = f"model.layers.{layer}"
            normed = self._norm(states, weights[f"{name}.input_layernorm.weight"])
            states = states + self._attend(normed, weights, f"{name}.self_attn")
            normed = self._norm(states, weights[f"{name}.post_attention_layernorm.weight"])
            states = states + self._feed(normed, weights, f"{name}.mlp")
        if self._config["num_hidden_layers"] in self._read:
            read.append(states)
        logits = self._norm(states, weights["model.norm.weight"]) @ self._embeddings.T
        return logits, torch.cat(read, dim=-1)

    def _drafter(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities after the last row [V], and what the next row reads [hidden]."""
        weights = self._draft
        embedded = self._norm(self._embeddings[tokens], weights["layers.0.input_layernorm.weight"])
        normed = self._norm(states, weights["layers.0.hidden_norm.weight"])
        attended = self._attend(torch.cat([embedded, normed], dim=-1), weights, "layers.0.self_attn")
        states = (states + attended)[-1]
        normed = self._norm(states, weights["layers.0.post_attention_layernorm.weight"])
        states = states + self._feed(normed, weights, "layers.0.mlp")
        logits = self._norm(states, weights["norm.weight"]) @ self._embeddings.T
        return logits.log_softmax(dim=-1), states

    def candidates(self, tokens: list[int], depth: int, width: int, grown: bool) -> dict[TreePath, float]:
        """Return all candidates of the next tree with their scores, which are log-probabilities.

        Args:
            tokens: the text so far; of the last token the target knows nothing yet.
            depth: levels.
            width: continuations of a node, and nodes that a grown tree expands on each level.
            grown: whether runners-up are expanded too.

        """
        _, read = self.target(tokens[:-1])
        text = read @ self._draft["fc.weight"].T
        states: dict[TreePath, torch.Tensor] = {(): text}
        found: dict[TreePath, float] = {}
        level: list[TreePath] = [()]
        for _ in range(depth):
            new: dict[TreePath, float] = {}
            for path in level:
                logprobs, state = self._drafter(tokens[1:] + list(path), states[path])
                for logprob, token in zip(*(part.tolist() for part in logprobs.topk(width)), strict=True):
                    new[*path, token] = found.get(path, 0.0) + logprob
                    states[*path, token] = torch.cat([states[path], state[None]])
            found |= new
            level = sorted(new, key=new.__getitem__, reverse=True)[: width if grown else 1]
        return found

    def walk(self, tokens: list[int], tree: set[TreePath]) -> list[int]:
        """Return the tokens of a step: the target's own, as long as the tree has them, and one more."""
        path: TreePath = ()
        while True:
            logits, _ = self.target(tokens + list(path))
            path = (*path, int(logits[-1].argmax()))
            if path not in tree:
                return list(path)
