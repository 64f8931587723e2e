"""Shapes, layouts and formats that the op tests cover, and their inputs with poison all around.

Every cache lies inside a larger buffer filled with a pattern, and every cache element that an op has no
business with is a NaN: a read of it spoils the result, a write to it is seen by comparing the whole buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
GUARD = 512  # bytes before and after every buffer
PATTERN = 0xA5


@dataclass
class Buffer:
    """A tensor inside a larger one of bytes, whose margins must never change."""

    raw: torch.Tensor
    view: torch.Tensor

    def margins_untouched(self) -> bool:
        return bool((self.raw[:GUARD] == PATTERN).all()) and bool((self.raw[-GUARD:] == PATTERN).all())


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Buffer:
    """Return a contiguous tensor between two guard regions, all of it filled with the pattern."""
    count = 1
    for size in shape:
        count *= size
    size = count * dtype.itemsize
    raw = torch.full((GUARD + (size + 15) // 16 * 16 + GUARD,), PATTERN, dtype=torch.uint8, device=device)
    return Buffer(raw, raw[GUARD : GUARD + size].view(dtype).view(shape))


# Layouts of a pair of caches, each as [num_blocks, block_size, heads, size] views. "combined" is vLLM 0.32's
# on CUDA, "columns" its CPU backend's, "gaps" has padding between heads and blocks.
LAYOUTS = ("nhd", "hnd", "combined", "columns", "gaps")


def make_caches(
    layout: str, blocks: int, block_size: int, heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Buffer], torch.Tensor, torch.Tensor]:
    """Return the buffers that a layer's caches lie in, and the key and value views of them."""
    if layout == "combined":
        both = guarded((blocks, heads, block_size, 2 * size), dtype, device)
        by_token = both.view.permute(0, 2, 1, 3)
        return [both], by_token[..., :size], by_token[..., size:]
    if layout == "columns":
        both = guarded((blocks, heads, 2, block_size * size), dtype, device)
        key = both.view[:, :, 0].view(blocks, heads, size, block_size).permute(0, 3, 1, 2)
        value = both.view[:, :, 1].view(blocks, heads, block_size, size).permute(0, 2, 1, 3)
        return [both], key, value
    shapes = {
        "nhd": (blocks, block_size, heads, size),
        "hnd": (blocks, heads, block_size, size),
        "gaps": (blocks + 1, block_size + 3, heads + 1, size + 16),
    }
    buffers = [guarded(shapes[layout], dtype, device) for _ in range(2)]
    views = [buffer.view for buffer in buffers]
    if layout == "hnd":
        views = [view.permute(0, 2, 1, 3) for view in views]
    if layout == "gaps":
        views = [view[1:, :block_size, 1:, 8 : 8 + size] for view in views]
    return buffers, views[0], views[1]


@dataclass(frozen=True)
class AttentionCase:
    """One call of verify_attention; windows[i] is request i's window length, contexts[i] its context."""

    windows: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: str = "auto"
    per_head_scales: bool = False
    query_scales: str | None = None  # of a query in e4m3: none, scalar, head; None: the query is in `dtype`
    layout: str = "nhd"
    sliding_window: int = -1
    softcap: float = 0.0
    sinks: torch.dtype | None = None
    tree: bool = False
    with_lse: bool = True
    padding_rows: int = 2
    seed: int = 0
    cpu_only: bool = field(default=False, compare=False)
    name: str = field(default="", compare=False)  # for lengths that fill no line

    def __str__(self) -> str:
        parts = [
            self.name or f"w{'.'.join(map(str, self.windows))}-c{'.'.join(map(str, self.contexts))}",
            f"h{self.heads}.{self.kv_heads}.{self.size}",
            f"b{self.block_size}",
            str(self.dtype).removeprefix("torch."),
            self.kv_cache_dtype,
            self.layout,
        ]
        parts += ["perhead"] * self.per_head_scales + ["tree"] * self.tree + ["sinks"] * bool(self.sinks)
        parts += [f"q8{self.query_scales}"] * (self.query_scales is not None)
        parts += [f"sw{self.sliding_window}"] * (self.sliding_window > 0)
        parts += ["softcap"] * (self.softcap > 0)
        return "-".join(parts)

    @property
    def runs_on_cuda(self) -> bool:
        """CUDA wants bf16 or fp16, rows of contiguous, 16-byte aligned heads of a compiled size."""
        item = 1 if self.kv_cache_dtype != "auto" else self.dtype.itemsize
        return (
            not self.cpu_only
            and self.dtype != torch.float32
            and self.layout != "columns"
            and self.size in (64, 96, 128, 256)
            and not (self.layout == "gaps" and 8 * item % 16)
        )


ENDS_IN_A_TILE = (0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63)
MIXED = AttentionCase(windows=(5, 1, 0, 3, 5), contexts=(33, 100, 7, 0, 64))
LONG = AttentionCase(windows=(5, 2), contexts=(3000, 1))
# Many query rows of large heads: warpgroups take tiles in pairs, of which the last may lack one.
PAIRS = AttentionCase(
    windows=(9, 5, 0, 6, 9, 1, 8, 9) * 2,
    contexts=(40, 64, 9, 0, 130, 200, 191, 320, 0, 1, 3, 65, 600, 1000, 128, 77),
    heads=16,
    kv_heads=2,
    size=256,
)
# Contexts that end anywhere in a tile, and windows that still fit behind them there, or do not.
ENDS = tuple(
    AttentionCase(
        windows=windows * 12,
        contexts=tuple(64 * (i % 3) + end for i, end in enumerate(ENDS_IN_A_TILE) for _ in windows),
        heads=4,
        kv_heads=1,
        size=size,
        name=f"ends.{'.'.join(map(str, windows))}",
    )
    for windows, size in [
        ((1, 3, 5), 128),
        ((1, 6, 9), 128),
        ((1, 6, 9), 64),
        ((4, 9, 16), 256),
        ((17, 33, 64), 128),
    ]
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

ATTENTION_CASES = [
    MIXED,
    replace(MIXED, dtype=FP16),
    replace(MIXED, dtype=FP32),
    # Every layout, and what makes layouts hard to tell apart by shape: block_size == kv_heads, one KV head,
    # tiny heads.
    *[replace(MIXED, layout=layout) for layout in LAYOUTS[1:]],
    *[replace(MIXED, layout=layout, dtype=FP32, block_size=32) for layout in LAYOUTS],
    *[replace(MIXED, layout=layout, block_size=16, heads=16, kv_heads=16) for layout in LAYOUTS[:3]],
    *[replace(MIXED, layout=layout, kv_heads=1) for layout in LAYOUTS[:3]],
    *[replace(MIXED, layout=layout, heads=4, kv_heads=2, size=8, dtype=FP32) for layout in LAYOUTS],
    # Heads: MHA, GQA with odd groups, MQA; all sizes, and sizes that fill no vector.
    replace(MIXED, heads=4, kv_heads=4),
    replace(MIXED, heads=21, kv_heads=3),
    replace(MIXED, heads=32, kv_heads=1, size=128),
    *[replace(MIXED, size=size) for size in (96, 128, 256)],
    *[replace(MIXED, size=size, dtype=FP32) for size in (20, 33, 80)],
    # Blocks and lengths: block ends, one token, long contexts cut into pieces, the longest window.
    *[replace(MIXED, block_size=block_size) for block_size in (32, 128, 256)],
    AttentionCase(windows=(1,), contexts=(0,)),
    AttentionCase(windows=(4, 4, 4, 4), contexts=(15, 16, 17, 31)),
    AttentionCase(windows=(0, 0, 2, 0), contexts=(0, 1, 16, 0)),
    AttentionCase(windows=(64, 1, 33), contexts=(100, 63, 65)),
    AttentionCase(windows=(64,), contexts=(500,), heads=8, kv_heads=1, size=128),
    LONG,
    PAIRS,
    replace(PAIRS, dtype=FP16, layout="hnd"),
    replace(PAIRS, block_size=24, sinks=FP32, softcap=20.0),
    replace(PAIRS, sliding_window=70),
    replace(PAIRS, tree=True),
    replace(PAIRS, windows=(5, 4, 0, 3, 2, 1, 4, 5) * 2),
    *ENDS,
    *[replace(case, kv_cache_dtype="fp8") for case in ENDS],
    replace(ENDS[1], sliding_window=50),
    replace(ENDS[1], tree=True, block_size=24),
    replace(ENDS[1], kv_cache_dtype="fp8", sliding_window=50),
    replace(ENDS[1], kv_cache_dtype="fp8", tree=True, block_size=24),
    replace(ENDS[3], kv_cache_dtype="fp8", heads=8),
    replace(LONG, dtype=FP32, layout="columns", block_size=32),
    replace(LONG, kv_heads=1, size=128, sliding_window=700),
    replace(LONG, kv_cache_dtype="fp8"),
    # fp8 caches: formats, scales of one and per head, all layouts.
    replace(PAIRS, kv_cache_dtype="fp8", per_head_scales=True),
    replace(PAIRS, kv_cache_dtype="fp8_e5m2", windows=(5, 4, 0, 3, 2, 1, 4, 5) * 2, block_size=24),
    *[replace(MIXED, kv_cache_dtype=name) for name in FP8],
    *[replace(MIXED, kv_cache_dtype=name, per_head_scales=True, dtype=FP16) for name in ("fp8", "fp8_e5m2")],
    *[replace(MIXED, kv_cache_dtype="fp8", layout=layout, size=128) for layout in LAYOUTS[1:]],
    replace(MIXED, kv_cache_dtype="fp8_e4m3", dtype=FP32, per_head_scales=True),
    # Sliding windows shorter than the window of tokens, about the context, at tile and block ends.
    *[replace(MIXED, sliding_window=tokens) for tokens in (1, 2, 4, 16, 64, 65, 1000)],
    replace(MIXED, sliding_window=40, dtype=FP32, layout="columns", block_size=32),
    replace(MIXED, softcap=20.0),
    replace(MIXED, softcap=5.0, dtype=FP32, sinks=FP32),
    replace(MIXED, sinks=FP32),
    replace(MIXED, sinks=BF16, heads=16),
    replace(LONG, sinks=BF16, softcap=30.0, sliding_window=1500),
    # Trees.
    replace(MIXED, tree=True),
    replace(MIXED, tree=True, dtype=FP32),
    replace(MIXED, tree=True, sliding_window=4),
    replace(MIXED, tree=True, kv_cache_dtype="fp8"),
    AttentionCase(windows=(64, 20, 1, 63), contexts=(70, 500, 3, 0), tree=True),
    AttentionCase(
        windows=(64, 20, 1, 63), contexts=(70, 500, 3, 0), tree=True, sliding_window=10, sinks=FP32
    ),
    replace(MIXED, with_lse=False, padding_rows=0),
]

TOLERANCE = {FP32: 2e-6, FP16: 2e-3, BF16: 1.2e-2}


def fp8_sum_rounding(case: AttentionCase) -> float:
    """Of scores, relative: Hopper's matrix unit keeps 14 bits of a sum, each time it adds 32 products."""
    return case.size / 32 * 2.0**-13


#: Of scores that are added up in float32, relative. With scales of cache and query they grow beyond what
#: `TOLERANCE` in float32 allows for. With it 15,000 random batches came to 0.75 of what is allowed.
FLOAT_SUM_ROUNDING = 2.0**-20


def random_tree_masks(window: int, generator: torch.Generator) -> list[int]:
    """Return ancestor masks of a random tree: row i descends from a random earlier row."""
    masks = [1]
    for i in range(1, window):
        parent = int(torch.randint(0, i, (), generator=generator))
        masks.append(masks[parent] | 1 << i)
    return [mask - 2**64 if mask >= 2**63 else mask for mask in masks]


@dataclass
class AttentionInputs:
    """Arguments of verify_attention by name, and the buffers that they lie in."""

    arguments: dict[str, Any]
    output: Buffer
    lse: Buffer | None
    caches: list[Buffer]


def attention_inputs(case: AttentionCase, device: torch.device) -> AttentionInputs:
    """Return inputs of a case: random, with NaN in every cache element that is not context."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch, rows = len(case.windows), sum(case.windows) + case.padding_rows
    # Query, key and value are slices of one projection, as a fused QKV layer makes them.
    width = case.heads + 2 * case.kv_heads
    qkv = normal(rows, width, case.size).to(case.dtype).to(device)
    query, key, value = qkv.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
    needed = [(context + case.block_size - 1) // case.block_size for context in case.contexts]
    blocks = sum(needed) + 3
    numbers = torch.randperm(blocks, generator=generator).to(torch.int32)
    block_table = torch.full((batch + 1, max(needed) + 2), 2**31 - 1, dtype=torch.int32)
    cache_dtype = case.dtype if case.kv_cache_dtype == "auto" else torch.uint8
    buffers, key_cache, value_cache = make_caches(
        case.layout, blocks, case.block_size, case.kv_heads, case.size, cache_dtype, device
    )
    nan = torch.full((blocks, case.block_size, case.kv_heads, case.size), float("nan"))
    contents = [nan.clone(), nan]
    used = 0
    for i, context in enumerate(case.contexts):
        own = numbers[used : used + needed[i]]
        used += needed[i]
        block_table[i, : needed[i]] = own
        for content in contents:
            for n, block in enumerate(own.tolist()):
                count = min(context - n * case.block_size, case.block_size)
                content[block, :count] = normal(count, case.kv_heads, case.size)
    for content, cache in zip(contents, (key_cache, value_cache), strict=True):
        if case.kv_cache_dtype == "auto":
            cache.copy_(content.to(case.dtype))
        else:
            cache.copy_(content.to(FP8[case.kv_cache_dtype]).view(torch.uint8))

    starts = torch.tensor([0, *case.windows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = [c + w if w else min(c, 1) for c, w in zip(case.contexts, case.windows, strict=True)]
    scales: list[torch.Tensor | None] = [None, None]
    if case.kv_cache_dtype != "auto":
        count = case.kv_heads if case.per_head_scales else 1
        scales = [(torch.rand(count, generator=generator) + 0.5).to(device) for _ in range(2)]
    q_scale = None
    if case.query_scales is not None:
        query = query.to(torch.float8_e4m3fn)
        count = {"none": 0, "scalar": 1, "head": case.kv_heads}[case.query_scales]
        q_scale = (torch.rand(count, generator=generator) + 0.5).to(device) if count else None
    masks = None
    if case.tree:
        flat = [mask for window in case.windows for mask in random_tree_masks(window, generator)[:window]]
        masks = torch.tensor([*flat, *[0] * case.padding_rows], dtype=torch.int64, device=device)
    output = guarded((rows, case.heads, case.size), case.dtype, device)
    lse = guarded((case.heads, rows), torch.float32, device) if case.with_lse else None
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": block_table.to(device),
        "query_start_loc": starts.to(device),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
        "scale": case.size**-0.5,
        "kv_cache_dtype": case.kv_cache_dtype,
        "k_scale": scales[0],
        "v_scale": scales[1],
        "q_scale": q_scale,
        "sliding_window": case.sliding_window,
        "softcap": case.softcap,
        "sinks": None if case.sinks is None else normal(case.heads).to(case.sinks).to(device),
        "ancestor_mask": masks,
    }
    return AttentionInputs(arguments, output, lse, buffers)


@dataclass(frozen=True)
class SlotCase:
    """Windows whose tokens go to random slots of several layers' caches."""

    windows: tuple[int, ...] = (5, 1, 0, 3)
    counts: tuple[int, ...] = (2, 1, 0, 3)
    layers: int = 3
    heads: int = 2
    size: int = 64
    block_size: int = 16
    blocks: int = 9
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: str = "auto"
    scales: str = "none"  # none, scalar, head
    layout: str = "nhd"
    seed: int = 0

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        shape = f"L{self.layers}-h{self.heads}.{self.size}-b{self.block_size}"
        return f"{shape}-{name}-{self.kv_cache_dtype}-{self.scales}-{self.layout}"


SLOT = SlotCase()
SLOT_CASES = [
    *[replace(SLOT, dtype=dtype, layout=layout) for dtype in (BF16, FP16, FP32) for layout in LAYOUTS],
    *[
        replace(SLOT, dtype=dtype, kv_cache_dtype=name, scales=scales, layout=layout)
        for dtype, layout in ((BF16, "nhd"), (FP16, "combined"), (FP32, "columns"), (BF16, "gaps"))
        for name in FP8
        for scales in ("none", "scalar", "head")
    ],
    replace(SLOT, heads=16, block_size=16),
    replace(SLOT, heads=1, layout="hnd"),
    *[replace(SLOT, heads=2, size=8, layout=layout) for layout in LAYOUTS],
    replace(SLOT, heads=1, size=1, block_size=1, blocks=30),
    replace(SLOT, heads=3, size=20, block_size=256, blocks=2, dtype=FP32),
    replace(SLOT, heads=8, size=256, block_size=128, blocks=2, layers=1),
    # Rows that are no power of two of 16-byte pieces; more of these than a thread block has threads.
    replace(SLOT, heads=3, size=80),
    replace(SLOT, heads=9, size=256, layout="combined"),
    replace(SLOT, heads=9, size=256, layout="columns"),
    *[
        replace(SLOT, kv_cache_dtype="fp8_e5m2", scales="head", layout=layout, heads=heads, size=size)
        for heads, size in ((3, 80), (5, 72), (17, 256))
        for layout in ("combined", "gaps", "columns")
    ],
    replace(SLOT, windows=(64, 64, 1), counts=(64, 7, 1), layers=5, blocks=20),
    replace(SLOT, windows=(9,) * 70, counts=tuple(i % 9 + 1 for i in range(70)), blocks=50, layers=2),
]


@dataclass
class SlotInputs:
    """Sources and caches per layer, slots and counts; the last three rows are padding with wild slots."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    buffers: list[Buffer]
    caches: list[torch.Tensor]
    key_caches: list[torch.Tensor]
    value_caches: list[torch.Tensor]
    slots: torch.Tensor
    query_start_loc: torch.Tensor
    commit_counts: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    shape: dict[str, int]

    def snapshots(self) -> list[torch.Tensor]:
        return [buffer.raw.clone() for buffer in self.buffers]


PADDING_ROWS = 3


def slot_inputs(case: SlotCase, device: torch.device) -> SlotInputs:
    """Return inputs of a case; caches hold the pattern everywhere, every fourth slot is negative."""
    generator = torch.Generator().manual_seed(case.seed)
    rows = sum(case.windows) + PADDING_ROWS
    cache_dtype = case.dtype if case.kv_cache_dtype == "auto" else torch.uint8
    keys, values, buffers, key_caches, value_caches = [], [], [], [], []
    for _ in range(case.layers):
        qkv = torch.randn(rows, 3 * case.heads, case.size, generator=generator) * 4
        qkv = qkv.to(case.dtype).to(device)
        keys.append(qkv[:, case.heads : 2 * case.heads])
        # Values with strides of their own: another tensor, another head stride.
        values.append(qkv[:, 2 * case.heads :].transpose(0, 1).contiguous().transpose(0, 1))
        pair, key_cache, value_cache = make_caches(
            case.layout, case.blocks, case.block_size, case.heads, case.size, cache_dtype, device
        )
        buffers += pair
        key_caches.append(key_cache)
        value_caches.append(value_cache)
    slots = torch.randperm(case.blocks * case.block_size, generator=generator)[:rows].to(torch.int64)
    assert len(slots) == rows, "the case has too few slots"
    slots[3::4] = -1
    slots[-PADDING_ROWS:] = 2**62  # padding rows are never looked at
    scales: list[torch.Tensor | None] = [None, None]
    if case.scales != "none":
        shape = (case.layers,) if case.scales == "scalar" else (case.layers, case.heads)
        scales = [(torch.rand(shape, generator=generator) + 0.3).to(device) for _ in range(2)]
    starts = torch.tensor([0, *case.windows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    # One tensor a layer where the layout keeps both in one, else the keys' then the values'.
    views = [buffer.view for buffer in buffers]
    per_layer = len(buffers) // case.layers
    caches = views if per_layer == 1 else views[::2] + views[1::2]
    return SlotInputs(
        keys,
        values,
        buffers,
        caches,
        key_caches,
        value_caches,
        slots.to(device),
        starts.to(device),
        torch.tensor(case.counts, dtype=torch.int32, device=device),
        scales[0],
        scales[1],
        {
            "num_kv_heads": case.heads,
            "head_size": case.size,
            "block_size": case.block_size,
            "num_blocks": case.blocks,
        },
    )
