"""Claims about verify_attention that need a GPU: its error beside FlashAttention's, and CUDA graphs.

Coverage: the benchmark's head configurations; contexts for one thread block, a cluster, several workers;
bf16 throughout, and quantized queries (e4m3) beside fp8 caches, each with scales.
Tolerance: 1.5 times FlashAttention 3's own error against float64 on the same inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BLOCK = 16
HEADS = [(32, 8, 128), (32, 8, 64), (64, 8, 128), (16, 2, 256)]
E4M3 = torch.float8_e4m3fn
each_head_configuration = pytest.mark.parametrize("heads", HEADS, ids=lambda h: "/".join(map(str, h)))
each_format = pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])


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
            size = ops.verify_attention_workspace_size("cuda", len(self.contexts), *heads, self.window)
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


def raw(numbers: torch.Tensor) -> torch.Tensor:
    """Return a view that can be indexed and written: of bytes, where numbers are float8."""
    return numbers.view(torch.uint8) if numbers.dtype is E4M3 else numbers


@each_format
@each_head_configuration
@pytest.mark.parametrize("window", [2, 5, 9])
@pytest.mark.parametrize(
    "contexts", [[40], [600, 17, 0, 1200], [20000], [300] * 70], ids=["short", "mixed", "long", "many"]
)
def test_error_beside_flash_attention(
    heads: tuple[int, int, int],
    window: int,
    contexts: list[int],
    quantized: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    batch = Batch(heads, window, contexts, quantized)
    want = batch.exact()
    own = (batch.attend().double() - want).norm() / want.norm()
    stock = (batch.stock().double() - want).norm() / want.norm()
    with capsys.disabled():
        print(f" error {own:.3e}, FlashAttention 3 {stock:.3e}, ratio {own / stock:.3f}")
    assert own <= 1.5 * stock


@pytest.mark.parametrize("window", [1, 3, 4, 6, 7, 10, 12, 16])
@each_format
@each_head_configuration
def test_every_kernel_keeps_to_the_workspace(
    heads: tuple[int, int, int], window: int, quantized: bool
) -> None:
    """Of all numbers of query rows between those that kernels are made for; partial results included."""
    from nwor import ops

    batch = Batch(heads, window, [3000, 700, 40, 9000], quantized)
    size = ops.verify_attention_workspace_size("cuda", 4, *heads, window)
    memory = torch.zeros(size + (8 << 20), dtype=torch.uint8, device="cuda")
    memory[size:] = 0xAB
    own = batch.attend(workspace=memory[:size])
    assert (memory[size:] == 0xAB).all()
    torch.testing.assert_close(own.double(), batch.exact(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("contexts", [[40], [600, 17, 0, 1200], [20000], [300] * 70, [50] * 200])
@each_format
@each_head_configuration
def test_a_plan_changes_nothing(heads: tuple[int, int, int], contexts: list[int], quantized: bool) -> None:
    """Neither the one of these lengths nor, as it is not taken, one that was made for other launches."""
    from nwor import ops

    batch = Batch(heads, 5, contexts, quantized)
    want = batch.attend()
    plan = ops.make_verify_plan("cuda")
    assert plan is not None
    assert torch.equal(batch.attend(plan=plan), want)  # an empty one
    for changes in (
        {"num_kv_heads": heads[1] // 2},
        {"sliding_window": 30},
        {"max_query_len": 64},
        {"kv_cache_dtype": "fp8", "quantized_query": not quantized},
        {"source_dtype": torch.float16},  # the same launches: this one is taken
        {},
    ):
        batch.write_plan(plan, **changes)
        batch.output.fill_(float("nan"))
        assert torch.equal(batch.attend(plan=plan), want), changes
    # And it is what decides: a plan in which nobody has anything to do leaves the output alone.
    # There is room for four entries a multiprocessor; an entry's last words are "there is work" and its key.
    entries = plan.view(torch.int32).view(4 * torch.cuda.get_device_properties(0).multi_processor_count, -1)
    assert entries[:, -2].any()
    assert set(entries[:, -2].tolist()) <= {0, 1}
    entries[:, -2] = 0
    batch.output.fill_(float("nan"))
    assert batch.attend(plan=plan).isnan().all()


@pytest.mark.parametrize("planned", [False, True], ids=["alone", "planned"])
@each_format
@each_head_configuration
def test_a_graph_captured_at_full_length_serves_any_batch(
    heads: tuple[int, int, int], planned: bool, quantized: bool
) -> None:
    """Lengths are read on the device: a replay follows them, empty windows and padded requests included."""
    from nwor import ops

    batch = Batch(heads, 5, [4000, 3000, 4000, 4000], quantized)
    size = ops.verify_attention_workspace_size("cuda", 4, *heads, 5)
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
    batch.attend(workspace)
    plan = ops.make_verify_plan("cuda") if planned else None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if plan is not None:
            batch.write_plan(plan)
        batch.attend(workspace, plan)
    for contexts in ([4000, 3000, 4000, 4000], [7, 0, 900, 33], [0, 0, 0, 3999]):
        batch.contexts = contexts
        batch.lengths.copy_(torch.tensor([c + 5 for c in contexts], dtype=torch.int32))
        batch.output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(batch.output.double(), batch.exact(), atol=2e-2, rtol=2e-2)
        first = batch.output.clone()
        batch.attend(workspace)
        assert torch.equal(first, batch.output)
    # The last two requests are padding: their windows are empty.
    batch.starts.copy_(torch.tensor([0, 5, 10, 10, 10], dtype=torch.int32))
    batch.lengths.copy_(torch.tensor([105, 205, 0, 1], dtype=torch.int32))
    batch.output.fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    batch.contexts = [100, 200, 0, 0]
    torch.testing.assert_close(batch.output[:10].double(), batch.exact()[:10], atol=2e-2, rtol=2e-2)
    assert (batch.output[10:] == 7.0).all()
