"""The two EAGLE heads and their training objective.

EAGLE-1: Li et al. 2024 (arXiv:2401.15077). EAGLE-3, with auxiliary hidden states and training-time test:
Li et al. 2025 (arXiv:2503.01840). The computation follows what vLLM's ``llama_eagle`` and ``llama_eagle3``
models do at inference, position by position, so that training sees what drafting will see.

Indexing. Row ``a`` of a sequence is an anchor: the target has processed token ``x[a]`` and sampled
``x[a+1]``. Draft step 0 reads the target's features of row ``a`` and the embedding of ``x[a+1]`` at position
``a``; draft step ``j`` reads the head's own state of step ``j-1`` and the embedding of ``x[a+1+j]`` at
position ``a+j``, and predicts ``x[a+2+j]``. Its attention sees step 0 of all rows up to ``a``, and its own
steps 1 to ``j`` of row ``a`` alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.demo.training.model import MLP, Attention, RMSNorm, Target, TargetShape


class HeadLayer(nn.Module):
    """The head's layer; EAGLE-1 has no input norm, EAGLE-3 norms embedding and state and joins them."""

    def __init__(self, shape: TargetShape, eagle3: bool) -> None:
        super().__init__()
        self.self_attn = Attention(shape, 2 * shape.hidden_size if eagle3 else None)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)
        if eagle3:
            self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
            self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class EagleHead(nn.Module):
    """An EAGLE-1 (``aux_layers`` empty) or EAGLE-3 head for a given target shape.

    Args:
        shape: shape of the target.
        aux_layers: indices of the target's auxiliary hidden states (0: embedding, i: after layer i); three
            for EAGLE-3, none for EAGLE-1.
    """

    def __init__(self, shape: TargetShape, aux_layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shape = shape
        self.aux_layers = aux_layers
        self.eagle3 = bool(aux_layers)
        pieces = len(aux_layers) if self.eagle3 else 2
        self.fc = nn.Linear(pieces * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(shape, self.eagle3)])
        if self.eagle3:
            self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def initialize(self, generator: torch.Generator) -> None:
        """Draw all weights: normal, scaled by fan-in."""
        for weight in self.parameters():
            if weight.dim() == 2:
                with torch.no_grad():
                    weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)

    def features(self, final: Tensor, stream: list[Tensor]) -> Tensor:
        """What the head reads of ``Target.hidden_states``' two results: ``[B, T, hidden]``."""
        if not self.eagle3:
            return final
        out: Tensor = self.fc(torch.cat([stream[i] for i in self.aux_layers], dim=-1))
        return out

    def _layer_input(self, embeds: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layers[0]
        assert isinstance(layer, HeadLayer)
        if self.eagle3:
            joined = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(state)), dim=-1)
            return joined, state
        mixed: Tensor = self.fc(torch.cat((embeds, state), dim=-1))
        return mixed, mixed

    def unroll(self, target: Target, ids: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """Training-time test: the states from which draft steps 0 to ``steps - 1`` predict.

        Args:
            target: gives embedding and rotary tables; not trained here.
            ids: int64 ``[B, T]``.
            features: ``[B, T, hidden]`` from ``features``.
            steps: number of draft steps.

        Returns:
            ``steps`` tensors ``[B, R, hidden]`` with ``R = T - 1 - steps``; row ``a`` of the ``j``-th one
            predicts ``ids[:, a + 2 + j]``. The output layer is the target's.
        """
        layer = self.layers[0]
        assert isinstance(layer, HeadLayer)
        attention = layer.self_attn
        rows = ids.shape[1] - 1 - steps
        state = features[:, :rows]
        group = attention.heads // attention.kv_heads
        causal = torch.ones(rows, rows, dtype=torch.bool, device=ids.device).tril()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for j in range(steps):
            embeds = F.embedding(ids[:, 1 + j : 1 + j + rows], target.model.embed_tokens.weight.detach())
            x, residual = self._layer_input(embeds.to(state.dtype), state)
            q, k, v = attention.project(x, target.cos[j : j + rows], target.sin[j : j + rows])
            keys.append(k.repeat_interleave(group, dim=1))
            values.append(v.repeat_interleave(group, dim=1))
            scale = attention.head_dim**-0.5
            scores = (q @ keys[0].transpose(-1, -2)).float() * scale
            scores = scores.masked_fill(~causal, float("-inf"))
            own = [(q * key).float().sum(-1, keepdim=True) * scale for key in keys[1:]]
            weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1).to(q.dtype)
            mixed = weights[..., :rows] @ values[0]
            for i, value in enumerate(values[1:]):
                mixed = mixed + weights[..., rows + i : rows + i + 1] * value
            residual = residual + attention.output(mixed)
            state = residual + layer.mlp(layer.post_attention_layernorm(residual))
            outputs.append(self.norm(state) if self.eagle3 else state)
        return outputs

    def hf_config(self) -> dict[str, Any]:
        """The ``config.json`` of this head, as vLLM reads it for method ``eagle`` or ``eagle3``."""
        config = self.shape.hf_config(0, 0, 0)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            del config[key]
        config["num_hidden_layers"] = 1
        if self.eagle3:
            config["architectures"] = ["LlamaForCausalLMEagle3"]
            config["draft_vocab_size"] = self.shape.vocab_size
            config["num_aux_hidden_states"] = len(self.aux_layers)
            config["eagle_aux_hidden_state_layer_ids"] = list(self.aux_layers)
            config["norm_before_residual"] = False
        return config


def draft_losses(
    head: EagleHead, target: Target, ids: Tensor, final: Tensor, stream: list[Tensor], steps: int
) -> tuple[Tensor, Tensor]:
    """Loss of each draft step and the share of predictions that equal the target's greedy token.

    The loss is half cross-entropy to the target's distribution, half to its most likely token.

    Args:
        ids: int64 ``[B, T]``.
        final, stream: ``Target.hidden_states(ids)``.
        steps: number of draft steps.

    Returns:
        Two float32 tensors ``[steps]``.
    """
    states = head.unroll(target, ids, head.features(final, stream), steps)
    output = target.model.embed_tokens.weight.detach()
    rows = states[0].shape[1]
    losses, hits = [], []
    for j, state in enumerate(states):
        with torch.no_grad():
            wanted = F.linear(final[:, 1 + j : 1 + j + rows], output.to(final.dtype)).float()
            best = wanted.argmax(dim=-1)
            soft = wanted.softmax(dim=-1)
        logp = F.linear(state, output.to(state.dtype)).float().log_softmax(dim=-1)
        hard = -logp.gather(-1, best[..., None]).squeeze(-1)
        losses.append(0.5 * (hard - (soft * logp).sum(-1)).mean())
        hits.append((logp.argmax(dim=-1) == best).float().mean())
    return torch.stack(losses), torch.stack(hits)
