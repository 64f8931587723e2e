"""A batch of windows over paged caches on the GPU, and three ways to attend: nwor's, vLLM's and float64's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

BLOCK = 16
E4M3 = torch.float8_e4m3fn


def raw(numbers: torch.Tensor) -> torch.Tensor:
    """Return a view that can be indexed and written: of bytes, where numbers are float8."""
    return numbers.view(torch.uint8) if numbers.dtype is E4M3 else numbers


class Batch:
    """Requests of one window length over caches in vLLM's layout, filled for both ways to attend.

    ``quantized``: caches and query in e4m3, with scales for each KV head; key, value and output in bf16.
    """

    def __init__(
        self, heads: tuple[int, int, int], window: int, contexts: list[int], quantized: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.query_heads, self.kv_heads, self.size = heads
        self.window, self.contexts, self.quantized = window, contexts, quantized
        batch, tokens = len(contexts), len(contexts) * window
        pages = max(-(-(c + window) // BLOCK) for c in contexts)
        numbers = {"dtype": torch.bfloat16, "device": "cuda"}
        fused = torch.randn(tokens, self.query_heads + 2 * self.kv_heads, self.size, **numbers)
        self.query = fused[:, : self.query_heads]
        self.key = fused[:, self.query_heads : self.query_heads + self.kv_heads]
        self.value = fused[:, self.query_heads + self.kv_heads :]
        self.cache = torch.randn(batch * pages, self.kv_heads, BLOCK, 2 * self.size, **numbers)
        self.output = torch.full_like(self.query, float("nan"))
        # Dequantized numbers are normal, whatever the scales: what is stored is divided by them.
        self.q_scale = self.k_scale = self.v_scale = None
        if quantized:
            scales = torch.rand(3, self.kv_heads, device="cuda") + 0.5
            self.q_scale, self.k_scale, self.v_scale = scales
            group = self.query_heads // self.kv_heads
            self.query = (self.query.float() / self.q_scale.repeat_interleave(group)[:, None]).to(E4M3)
            keys, values = self.cache.float().split(self.size, dim=-1)
            factors = [scale[:, None, None] for scale in (self.k_scale, self.v_scale)]
            self.cache = torch.cat([keys / factors[0], values / factors[1]], dim=-1).to(E4M3)
        self.key_cache, self.value_cache = self.cache.transpose(1, 2).split(self.size, dim=-1)
        order = torch.randperm(batch * pages, device="cuda").to(torch.int32)
        self.table = order.view(batch, pages)
        ints = {"dtype": torch.int32, "device": "cuda"}
        self.starts = torch.arange(0, tokens + 1, window, **ints)
        self.lengths = torch.tensor([c + window for c in contexts], **ints)
        self.scale = self.size**-0.5

    def write_plan(self, plan: torch.Tensor, **changes: Any) -> None:
        """Plan for these lengths."""
        from nwor import ops

        layers = {
            "num_heads": self.query_heads,
            "num_kv_heads": self.kv_heads,
            "head_size": self.size,
            "max_query_len": self.window,
            "source_dtype": torch.bfloat16,
            "kv_cache_dtype": "fp8" if self.quantized else "auto",
            "quantized_query": self.quantized,
        }
        ops.plan_verify_attention(self.starts, self.lengths, plan, **(layers | changes))

    def attend(self, workspace: torch.Tensor | None = None, plan: torch.Tensor | None = None) -> torch.Tensor:
        """nwor's way; the window's slots in the cache stay as they are."""
        from nwor import ops

        heads = (self.query_heads, self.kv_heads, self.size)
        if workspace is None:
            size = ops.verify_attention_workspace_size("cuda", *heads, self.window)
            workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        ops.verify_attention(
            self.query,
            self.key,
            self.value,
            self.key_cache,
            self.value_cache,
            self.table,
            self.starts,
            self.lengths,
            self.output,
            workspace,
            scale=self.scale,
            max_query_len=self.window,
            kv_cache_dtype="fp8" if self.quantized else "auto",
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            q_scale=self.q_scale,
            plan=plan,
        )
        return self.output.clone()

    def stored(self, rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Return what the cache holds of a window's keys or values once they are written."""
        return rows if scale is None else (rows.float() / scale[:, None]).to(E4M3)

    def exact(self) -> torch.Tensor:
        """The same in float64."""
        rows = []
        group = self.query_heads // self.kv_heads
        one = torch.ones(self.kv_heads, device="cuda")
        q_scale, k_scale, v_scale = (
            (one if scale is None else scale).double()[:, None]
            for scale in (self.q_scale, self.k_scale, self.v_scale)
        )
        query = self.query.double() * q_scale.repeat_interleave(group, 0)
        own_keys = self.stored(self.key, self.k_scale).double() * k_scale
        own_values = self.stored(self.value, self.v_scale).double() * v_scale
        for i, context in enumerate(self.contexts):
            own = slice(i * self.window, (i + 1) * self.window)
            at = torch.arange(context, device="cuda")
            pages, offsets = self.table[i, at // BLOCK].long(), at % BLOCK
            past_keys, past_values = (
                raw(cache)[pages, offsets].view(cache.dtype).double()
                for cache in (self.key_cache, self.value_cache)
            )
            keys = torch.cat([past_keys * k_scale, own_keys[own]])
            values = torch.cat([past_values * v_scale, own_values[own]])
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            logits = torch.einsum("qhd,khd->hqk", query[own], keys) * self.scale
            hidden = torch.ones(self.window, context + self.window, device="cuda").triu(context + 1).bool()
            weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(rows)

    def stock(self) -> torch.Tensor:
        """vLLM's way: write the window to the cache, then FlashAttention 3 on the very same query."""
        flash = pytest.importorskip("vllm.vllm_flash_attn")
        keys = raw(self.stored(self.key, self.k_scale))
        values = raw(self.stored(self.value, self.v_scale))
        for i, context in enumerate(self.contexts):
            at = context + torch.arange(self.window, device="cuda")
            pages, offsets = self.table[i, at // BLOCK].long(), at % BLOCK
            raw(self.key_cache)[pages, offsets] = keys[i * self.window : (i + 1) * self.window]
            raw(self.value_cache)[pages, offsets] = values[i * self.window : (i + 1) * self.window]
        q_descale, k_descale, v_descale = (
            None if scale is None else scale.expand(len(self.contexts), self.kv_heads)
            for scale in (self.q_scale, self.k_scale, self.v_scale)
        )
        return flash.flash_attn_varlen_func(
            q=self.query.contiguous(),
            k=self.key_cache,
            v=self.value_cache,
            out=torch.empty_like(self.output),
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.window,
            seqused_k=self.lengths,
            max_seqlen_k=int(self.lengths.max()),
            softmax_scale=self.scale,
            causal=True,
            block_table=self.table,
            fa_version=3,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
        )
