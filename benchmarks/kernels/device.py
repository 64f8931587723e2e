"""Tensors of a cell on the GPU, and the two ways to run its layers: vLLM's own kernels and nwor's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from cells import BLOCK_SIZE, LAYERS, Cell

from nwor import ops

#: Where everything lies.
DEVICE = "cuda"
#: Replays that do not count take so long before those that do, with graphs shorter than `LONG_US` and longer.
SETTLE_US, LONG_SETTLE_US = 12_000.0, 200_000.0
LONG_US = 3000.0


class CachePool:
    """One allocation that all cells' caches are cut from, filled once with normal random numbers."""

    def __init__(self, bytes_: int, fp8: bool) -> None:
        self.fp8 = fp8
        self.bytes = bytes_ // 4096 * 4096
        self.storage = torch.empty(self.bytes, dtype=torch.uint8, device=DEVICE)
        numbers = torch.randn(16 << 20, device=DEVICE)
        tile = numbers.to(torch.float8_e4m3fn if fp8 else torch.bfloat16).view(torch.uint8)
        for begin in range(0, self.bytes, tile.numel()):
            part = self.storage[begin : begin + tile.numel()]
            part.copy_(tile[: part.numel()])

    def layers(self, cell: Cell) -> list[torch.Tensor]:
        """Caches [blocks, KV heads, block size, 2 * head size] of all layers; distinct as far as they fit."""
        _, kv_heads, head_size = cell.heads
        distinct = min(LAYERS, self.bytes // cell.layer_bytes)
        if distinct == 0:
            return []
        dtype = torch.uint8 if self.fp8 else torch.bfloat16
        shape = (cell.blocks, kv_heads, BLOCK_SIZE, 2 * head_size)
        caches = [
            self.storage[i * cell.layer_bytes : (i + 1) * cell.layer_bytes].view(dtype).view(shape)
            for i in range(distinct)
        ]
        return [caches[i % distinct] for i in range(LAYERS)]


class Step:
    """A verify step of `LAYERS` layers: the layers' Q, K, V, the cache, and the batch's lengths and slots."""

    def __init__(self, cell: Cell, pool: CachePool) -> None:
        query_heads, kv_heads, size = cell.heads
        self.cell = cell
        self.caches = pool.layers(cell)
        self.distinct = len({c.data_ptr() for c in self.caches})
        if not self.caches:
            return
        views = [c.transpose(1, 2).split(size, dim=-1) for c in self.caches]
        self.key_caches, self.value_caches = [v[0] for v in views], [v[1] for v in views]
        heads = query_heads + 2 * kv_heads
        self.fused = fused = torch.randn(
            LAYERS, cell.tokens, heads, size, device=DEVICE, dtype=torch.bfloat16
        )
        self.plain_queries = self.queries = [x[:, :query_heads] for x in fused]
        if cell.fp8:  # as vLLM quantizes them before attention
            self.queries = [q.to(torch.float8_e4m3fn) for q in self.plain_queries]
        self.keys = [x[:, query_heads : query_heads + kv_heads] for x in fused]
        self.values = [x[:, query_heads + kv_heads :] for x in fused]
        self.output = torch.empty(cell.tokens, query_heads, size, device=DEVICE, dtype=torch.bfloat16)
        #: Blocks of all requests, one after the other's.
        self.blocks = torch.randperm(cell.blocks, device=DEVICE).to(torch.int32)
        own = self.blocks.split(cell.block_counts)
        self.block_table = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
        contexts = torch.tensor(cell.contexts, device=DEVICE)
        int32 = {"dtype": torch.int32, "device": DEVICE}
        self.query_start_loc = torch.arange(0, cell.tokens + 1, cell.window, **int32)
        self.seq_lens = (contexts + cell.window).to(torch.int32)
        positions = contexts[:, None] + torch.arange(cell.window, device=DEVICE)
        blocks = self.block_table.gather(1, positions // BLOCK_SIZE).long()
        self.slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).reshape(-1).contiguous()
        self.one = torch.ones(1, device=DEVICE)
        self.dtype_name = "fp8" if cell.fp8 else "auto"


def nothing(layer: int) -> None:
    """Stand between layers where nothing does."""


def run_nwor(
    step: Step, workspace: torch.Tensor, between: Callable[[int], None] = nothing
) -> Callable[[], None]:
    """One step of nwor: plan, `verify_attention` in each layer, then one `commit_window` of every token.

    `between` runs before each layer, whose number it gets.
    """
    cell = step.cell
    plan = ops.make_verify_plan(DEVICE)
    counts = torch.full((cell.batch,), cell.window, dtype=torch.int32, device=DEVICE)
    table = ops.make_layer_table(step.keys, step.values, step.key_caches, step.value_caches)
    scales = torch.ones(LAYERS, device=DEVICE) if cell.fp8 else None
    scale = step.one if cell.fp8 else None

    def commit() -> None:
        torch.ops.nwor.commit_window(
            table, step.caches, step.slots, step.query_start_loc, counts, None,
            cell.heads[1], cell.heads[2], BLOCK_SIZE, cell.blocks, torch.bfloat16, step.dtype_name,
            scales, scales,
        )  # fmt: skip

    def verify(layer: int) -> None:
        torch.ops.nwor.verify_attention(
            step.queries[layer], step.keys[layer], step.values[layer],
            step.key_caches[layer], step.value_caches[layer],
            step.block_table, step.query_start_loc, step.seq_lens, step.output, workspace, None,
            cell.heads[2] ** -0.5, cell.window, step.dtype_name, scale, scale, -1, 0.0, None, None, plan,
            scale,
        )  # fmt: skip

    def make_plan() -> None:
        torch.ops.nwor.plan_verify_attention(
            step.query_start_loc, step.seq_lens, plan, *cell.heads, cell.window, torch.bfloat16,
            step.dtype_name, -1, cell.fp8,
        )  # fmt: skip

    def run() -> None:
        make_plan()
        for layer in range(LAYERS):
            between(layer)
            verify(layer)
        commit()

    run.commit = commit  # type: ignore[attr-defined]
    run.verify = verify  # type: ignore[attr-defined]
    run.plan = make_plan  # type: ignore[attr-defined]
    return run


def run_stock(step: Step, between: Callable[[int], None] = nothing) -> Callable[[], None]:
    """vLLM's step: `reshape_and_cache_flash`, then FlashAttention 3 with the schedule that vLLM precomputes.

    `between` runs before each layer, whose number it gets. With an fp8 cache vLLM quantizes the query as
    well; that is done beforehand and not timed, on either side.
    """
    import vllm._custom_ops as vllm_ops
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    cell = step.cell
    query_heads, kv_heads, size = cell.heads
    splits = 32  # flash_attn_max_num_splits_for_cuda_graph
    dtype = torch.float8_e4m3fn if cell.fp8 else torch.bfloat16
    metadata = get_scheduler_metadata(
        batch_size=cell.batch, max_seqlen_q=cell.window, max_seqlen_k=max(cell.contexts) + cell.window,
        num_heads_q=query_heads, num_heads_kv=kv_heads, headdim=size, cache_seqlens=step.seq_lens,
        qkv_dtype=dtype, cu_seqlens_q=step.query_start_loc, page_size=BLOCK_SIZE, causal=True,
        window_size=(-1, -1), num_splits=splits,
    )  # fmt: skip
    descale = step.one.expand(cell.batch, kv_heads) if cell.fp8 else None
    keys = [c.view(dtype) for c in step.key_caches]
    values = [c.view(dtype) for c in step.value_caches]

    def write(layer: int) -> None:
        vllm_ops.reshape_and_cache_flash(
            step.keys[layer], step.values[layer], step.key_caches[layer], step.value_caches[layer],
            step.slots, step.dtype_name, step.one, step.one,
        )  # fmt: skip

    def attend(layer: int) -> None:
        flash_attn_varlen_func(
            q=step.queries[layer], k=keys[layer], v=values[layer], out=step.output,
            cu_seqlens_q=step.query_start_loc, max_seqlen_q=cell.window, seqused_k=step.seq_lens,
            max_seqlen_k=max(cell.contexts) + cell.window, softmax_scale=size**-0.5, causal=True,
            block_table=step.block_table, scheduler_metadata=metadata, fa_version=3, num_splits=splits,
            q_descale=descale, k_descale=descale, v_descale=descale,
        )  # fmt: skip

    def run() -> None:
        for layer in range(LAYERS):
            between(layer)
            write(layer)
            attend(layer)

    run.write = write  # type: ignore[attr-defined]
    run.attend = attend  # type: ignore[attr-defined]
    return run


class Product:
    """What a model has before a layer's attention: a matrix product and a small kernel.

    The product reads `MEGABYTES` of weights, more than the L2 cache holds, and runs code of its own, so what
    comes behind it finds neither its instructions nor what it left there. The small kernel, in the place of a
    rotation, reads and writes the layer's query, key and value, which stay what they are.
    """

    MEGABYTES = 117

    def __init__(self, step: Step) -> None:
        rows, self.fused = step.cell.tokens, step.fused
        width = 4096
        height = self.MEGABYTES * 1_000_000 // (2 * width) // 128 * 128
        bf16 = {"dtype": torch.bfloat16, "device": DEVICE}
        self.weights = torch.randn(width, height, **bf16)
        self.inputs = torch.randn(rows, width, **bf16)
        self.outputs = torch.empty(rows, height, **bf16)

    def __call__(self, layer: int) -> None:
        """Run it before a layer."""
        torch.mm(self.inputs, self.weights, out=self.outputs)
        self.fused[layer].mul_(1.0)

    def alone(self) -> None:
        """Run it as before all layers."""
        for layer in range(LAYERS):
            self(layer)


class Graph:
    """A captured function, and the time of its replays."""

    def __init__(self, function: Callable[[], None], pool: tuple[int, int]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            function()

    def microseconds(self, replays: int, before: int = 0) -> float:
        """Mean time of one replay over `replays` in a row, right after `before` that do not count."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(before):
            self.graph.replay()
        begin.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / replays


def interleaved(graphs: Sequence[Graph], turns: int, least_us: float, times: int = 1) -> list[list[float]]:
    """Times of each graph, `times` in each of `turns` turns; each over at least `least_us`.

    Replays that do not count begin a turn: what ran before shows in a graph's time, by way of the clocks,
    which follow the power that is drawn. With graphs that draw all that the device may draw that takes a
    tenth of a second and more. So a time is that of a device which does nothing else.
    """
    once = [g.microseconds(1) for g in graphs]
    counts = [max(1, min(40, round(least_us / us))) for us in once]
    before = [max(1, round((SETTLE_US if us < LONG_US else LONG_SETTLE_US) / us)) for us in once]
    series: list[list[float]] = [[] for _ in graphs]
    for _ in range(turns):
        for own, graph, count, settle in zip(series, graphs, counts, before, strict=True):
            own.append(graph.microseconds(count, settle))
            own.extend(graph.microseconds(count) for _ in range(times - 1))
    return series


def run_copy(pool: CachePool, moved: int) -> Callable[[], None]:
    """A device copy in the place of each layer's attention, which moves `moved` bytes, half of them read.

    Layers have bytes of their own as far as the pool holds them.
    """
    each = moved // 2 // 4096 * 4096
    distinct = min(LAYERS, pool.bytes // (2 * each))
    parts = pool.storage[: 2 * each * distinct].view(distinct, 2, each)

    def run() -> None:
        for layer in range(LAYERS):
            source, target = parts[layer % distinct]
            target.copy_(source)

    return run


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a device-to-device copy of 4 GiB."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    best = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best.append(begin.elapsed_time(end))
    return 2 * source.numel() / (sorted(best)[3] * 1e-3)
