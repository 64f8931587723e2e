"""The target: a Llama decoder (RMSNorm, SwiGLU, rotary positions, grouped-query attention), in plain PyTorch.

Parameter names are those of the published Llama checkpoints, so that a state dict is a checkpoint.
Architecture: Touvron et al. 2023, "LLaMA" (arXiv:2302.13971); grouped-query attention: Ainslie et al. 2023
(arXiv:2305.13245); rotary positions: Su et al. 2021 (arXiv:2104.09864).
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TargetShape:
    """Shape of the target; the bundled model uses the defaults."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 960
    num_hidden_layers: int = 5
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def hf_config(self, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """The ``config.json`` of this shape, as transformers and vLLM read it."""
        shape = asdict(self)
        theta = shape.pop("rope_theta")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **shape,
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight.to(x.dtype)


def rotary_tables(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables, float32 ``[length, head_dim / 2]`` each."""
    freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * freq
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` ``[batch, heads, tokens, head_dim]`` by tables ``[tokens, head_dim / 2]``."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention; ``input_size`` differs from the hidden size in the EAGLE-3 head alone."""

    def __init__(self, shape: TargetShape, input_size: int | None = None) -> None:
        super().__init__()
        width = input_size or shape.hidden_size
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries ``[B, heads, T, D]``, rotated keys, and values ``[B, kv_heads, T, D]``."""
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def output(self, heads_out: Tensor) -> Tensor:
        """Project ``[B, heads, T, D]`` back to ``[B, T, hidden]``."""
        out: Tensor = self.o_proj(heads_out.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.self_attn.output(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))

    def decode(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        """One new token per row, or a prompt block, over a static cache.

        Args:
            x: ``[B, T, hidden]``.
            cache: ``[2, B, kv_heads, length, D]``, written at ``at``.
            at: int64 ``[T]``, the positions of the T tokens.
            mask: bool ``[T, length]``, true where a token may look.
        """
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        cache[0].index_copy_(2, at, k.to(cache.dtype))
        cache[1].index_copy_(2, at, v.to(cache.dtype))
        # Query heads of one KV head side by side: the cache is read once and never expanded.
        grouped = q.to(cache.dtype).unflatten(1, (cache.shape[2], -1)).flatten(2, 3)
        scores = (grouped @ cache[0].transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        scores = scores.unflatten(2, (-1, q.shape[2])).masked_fill(~mask, float("-inf"))
        weights = scores.softmax(dim=-1).flatten(2, 3).to(cache.dtype)
        mixed = (weights @ cache[1]).unflatten(2, (-1, q.shape[2])).flatten(1, 2)
        x = x + self.self_attn.output(mixed.to(x.dtype))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm: everything but the (tied) output layer."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Target(nn.Module):
    """The target language model with tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = rotary_tables(
            shape.max_position_embeddings, shape.head_dim, shape.rope_theta, torch.device("cpu")
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialize(self, generator: torch.Generator) -> None:
        """Draw all weights: normal, 0.02, and smaller where a layer adds to the residual stream."""
        depth = (2 * self.shape.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = 0.02 * (depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
                with torch.no_grad():
                    weight.copy_(torch.randn(weight.shape, generator=generator) * scale)

    def freeze_as_served(self) -> None:
        """Round the weights to bfloat16 and stop training them; the rotary tables stay float32."""
        for weight in self.parameters():
            weight.requires_grad_(False)
            weight.data = weight.data.to(torch.bfloat16)

    def logits(self, hidden: Tensor) -> Tensor:
        """Tied output layer: ``[..., hidden]`` to ``[..., vocab]``."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def hidden_states(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Final normed states ``[B, T, hidden]`` and the residual stream before layer 0 and after each layer.

        Element ``i`` of the list is what vLLM calls auxiliary hidden state ``i``.
        """
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        stream = [x]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
            stream.append(x)
        return self.model.norm(x), stream

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[B, T, vocab]`` of token ids ``[B, T]``."""
        return self.logits(self.hidden_states(ids)[0])

    def decode(self, ids: Tensor, caches: list[Tensor], at: Tensor) -> Tensor:
        """Logits ``[B, vocab]`` after the last of ``ids`` ``[B, T]`` at positions ``at``, over caches."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[at], self.sin[at]
        mask = torch.arange(caches[0].shape[3], device=at.device)[None, :] <= at[:, None]
        for layer, cache in zip(self.model.layers, caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = layer.decode(x, cos, sin, cache, at, mask)
        return self.logits(self.model.norm(x[:, -1]))
