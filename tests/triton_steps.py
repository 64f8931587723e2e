"""One layer of vLLM's Triton attention in a step of windows and prompts: stock and staged, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadata

from nwor import ops
from nwor.config import NworConfig
from nwor.engine.attention.attachment import staged_layer
from nwor.engine.attention.layer_context import AttentionPlan, LayerContext, parameters_of
from nwor.engine.attention.staged_attention import layer_cache_views
from nwor.engine.attention.triton_attn import NworTritonAttentionImpl
from nwor.engine.window_manager import WindowManager
from nwor.windows.window import Window, group_layers

BLOCK, PER_REQUEST, LONGEST = 16, 3, 5
#: Windows, the last of a short request without drafts; a prompt's chunk and a whole prompt.
LENGTHS, DRAFTS, CONTEXTS = [5, 4, 1, 7, 2], [4, 3, 0, 0, 0], [20, 33, 7, 9, 0]
REQUESTS, WINDOWS, WINDOW_ROWS, ROWS = 5, 3, 10, 19
BLOCKS = REQUESTS * PER_REQUEST + 1
#: Drafts rejected in each window, and the rows that they are.
REJECTED, REJECTED_ROWS = [2, 0, 0], [3, 4]

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding-window": {"sliding_window": 9},
    "soft-cap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0]},
}


@dataclass(frozen=True)
class Case:
    """What a step is made of.

    Attributes:
        device: where it runs.
        dtype: of queries, keys and values.
        cache: vLLM's name of the cache's dtype.
        heads_first: whether a block of the cache holds head by head, not token by token.
        feature: one of :data:`FEATURES`.
        heads: query heads, KV heads and their size.
        scale: of keys, values and queries in an fp8 cache.

    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    cache: str = "auto"
    heads_first: bool = True
    feature: str = "plain"
    heads: tuple[int, int, int] = (4, 2, 16)
    scale: float = 1.0

    def __str__(self) -> str:
        order = "HND" if self.heads_first else "NHD"
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}-{self.cache}-{order}-{self.feature}-{self.heads[2]}-{self.scale}"


class Step:
    """A step's inputs.

    Args:
        case: what it is made of.

    Attributes:
        query: [rows, query heads, size], in float8 where the cache is.
        key: [rows, KV heads, size].
        value: likewise.
        cache: [blocks, KV heads, block, 2 * size], as it is before the step.
        slots: int64 [rows].
        metadata: that of the whole step.

    """

    def __init__(self, case: Case) -> None:
        self.case = case
        heads, kv_heads, size = case.heads
        generator = torch.Generator().manual_seed(5)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(case.device, case.dtype)

        self.fp8 = case.cache.startswith("fp8")
        cache = randn(BLOCKS, kv_heads, BLOCK, 2 * size)
        if not case.heads_first:
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        self.query, self.key, self.value = (randn(ROWS, count, size) for count in (heads, kv_heads, kv_heads))
        if self.fp8:
            cache = (cache.float() / case.scale).to(torch.float8_e4m3fn).view(torch.uint8)
            self.query = (self.query.float() / case.scale).to(torch.float8_e4m3fn)
        self.cache = cache
        starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
        table = torch.randperm(BLOCKS, generator=generator)[: REQUESTS * PER_REQUEST]
        table = table.view(REQUESTS, PER_REQUEST)
        places = [
            (request, context + row)
            for request, (length, context) in enumerate(zip(LENGTHS, CONTEXTS, strict=True))
            for row in range(length)
        ]
        slots = [int(table[request, at // BLOCK]) * BLOCK + at % BLOCK for request, at in places]
        self.slots = torch.tensor(slots, device=case.device)
        segments = torch.empty(0, device=case.device)
        lengths = [sum(pair) for pair in zip(LENGTHS, CONTEXTS, strict=True)]

        def int32(numbers: Any) -> torch.Tensor:
            return torch.as_tensor(numbers).to(case.device, torch.int32)

        self.metadata = TritonAttentionMetadata(
            num_actual_tokens=ROWS,
            max_query_len=max(LENGTHS),
            query_start_loc=int32(starts),
            max_seq_len=BLOCK * PER_REQUEST,
            seq_lens=int32(lengths),
            block_table=int32(table),
            slot_mapping=self.slots,
            seq_threshold_3D=16,
            num_par_softmax_segments=16,
            softmax_segm_output=segments,
            softmax_segm_max=segments,
            softmax_segm_expsum=segments,
            causal=True,
        )

    def layer(self, kind: Any) -> Any:
        """Return a layer with an implementation of a class, and a cache of its own."""
        case = self.case
        heads, kv_heads, size = case.heads
        more = dict(FEATURES[case.feature])
        if "sinks" in more:
            more["sinks"] = torch.tensor(more["sinks"], device=case.device, dtype=case.dtype)
        window = more.pop("sliding_window", None)
        scale = torch.tensor(case.scale, device=case.device)
        layer: Any = SimpleNamespace(
            impl=kind(heads, size, size**-0.5, kv_heads, None, window, case.cache, **more),
            kv_cache=self.cache.clone(),
            head_size=size,
            query_quant=object() if self.fp8 else None,
            _q_scale=scale,
            _k_scale=scale,
            _v_scale=scale,
        )
        assert layer.kv_cache.stride() == self.cache.stride()
        return layer

    def output(self) -> torch.Tensor:
        """Return memory for the step's results, filled with what none of them is."""
        shape = self.query.shape
        return torch.full(shape, torch.nan, dtype=self.case.dtype, device=self.case.device)

    def run(self, layer: Any) -> torch.Tensor:
        """Let a layer write its cache and attend; return the results."""
        output = self.output()
        layer.impl.do_kv_cache_update(layer, self.key, self.value, layer.kv_cache, self.slots)
        arguments = (layer, self.query, self.key, self.value, layer.kv_cache, self.metadata, output)
        layer.impl.forward(*arguments)
        return output

    def lines(self, cache: torch.Tensor, rows: Any) -> torch.Tensor:
        """Return the bytes of some rows' slots: [rows, KV heads, bytes]."""
        slots = self.slots[rows]
        return cache[slots // BLOCK, :, slots % BLOCK].contiguous().view(torch.uint8)

    def with_rows_of(self, cache: torch.Tensor, other: torch.Tensor, rows: Any) -> torch.Tensor:
        """Return a copy of a cache that has some rows' slots of another."""
        copy, slots = cache.clone(), self.slots[rows]
        place = slots // BLOCK, slice(None), slots % BLOCK
        copy[place] = other[place]
        return copy


class StagedStep:
    """A step with its windows staged, as a rank has it.

    Args:
        step: its inputs.

    """

    def __init__(self, step: Step) -> None:
        case = step.case
        device = torch.device(case.device)
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=LONGEST - 1),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=4096),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        )
        self.manager = WindowManager(config, NworConfig.from_mapping({"mode": "stage"}), device)
        self.manager.state.token_bytes = 10
        self.step, self.layer = step, step.layer(NworTritonAttentionImpl)
        staged = staged_layer("layer.0", self.layer, layer_cache_views, case.dtype)
        self.manager.window = window = Window(group_layers([(0, staged)]))
        parameters = parameters_of(self.layer, LONGEST)
        size = ops.verify_attention_workspace_size(device, *case.heads, LONGEST)
        self.layer.impl.nwor = LayerContext(
            window,
            self.manager.state,
            staged,
            parameters,
            torch.zeros(size, dtype=torch.uint8, device=device),
            AttentionPlan.share({}, device, case.heads[0], staged, parameters),
        )

    def attend(self) -> torch.Tensor:
        """Open the window batch and run the layer; return the results."""
        manager, step = self.manager, self.step
        plan = manager.plan_step(list("abcde"), LENGTHS, DRAFTS)
        assert plan is not None
        assert (plan.num_requests, plan.num_tokens) == (WINDOWS, WINDOW_ROWS)
        manager.begin(plan, step.metadata.query_start_loc, step.slots[None])
        output = step.run(self.layer)
        assert manager.state.fault is None
        return output

    def commit(self) -> None:
        """Finish the window batch."""
        rejected = torch.tensor(REJECTED, dtype=torch.int32, device=self.step.case.device)
        self.manager.finish(rejected)
        assert self.manager.state.fault is None


def check(case: Case, tolerance: float) -> None:
    """Check that a step whose windows are staged has the rows and the cache of a stock step.

    Args:
        case: what the step is made of.
        tolerance: of the windows' rows; none of others, and of the cache.

    """
    step = Step(case)
    stock = step.layer(TritonAttentionImpl)
    want = step.run(stock)
    staged = StagedStep(step)
    seen, cache = staged.attend(), staged.layer.kv_cache
    windows, others = slice(0, WINDOW_ROWS), slice(WINDOW_ROWS, None)
    assert not want.isnan().any()
    assert torch.equal(seen[others], want[others])
    torch.testing.assert_close(seen[windows].float(), want[windows].float(), atol=tolerance, rtol=tolerance)
    # The windows are not in the cache; the other rows are.
    assert torch.equal(cache, step.with_rows_of(stock.kv_cache, step.cache, windows))
    staged.commit()
    assert torch.equal(cache, step.with_rows_of(stock.kv_cache, step.cache, REJECTED_ROWS))
    assert not torch.equal(cache, stock.kv_cache)
