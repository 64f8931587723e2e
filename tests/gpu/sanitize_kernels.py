"""Runs every op over shapes that reach each branch of the CUDA kernels once; for compute-sanitizer.

    PYTHONPATH=. compute-sanitizer --tool memcheck python tests/gpu/sanitize_kernels.py
    PYTHONPATH=. NWOR_LIBRARY_DIR=<racecheck's libraries> compute-sanitizer --tool racecheck python \\
        tests/gpu/sanitize_kernels.py --racecheck

racecheck orders accesses by how many barriers each warp has passed. It wants libraries in which warps that
pass fewer make up for it: the build's target nwor_cuda_racecheck. `--racecheck` refuses others.

Allocations go straight to the driver, so that the tools see their bounds. Results are checked by the tests;
here only the accesses matter.
"""

from __future__ import annotations

import argparse
import itertools
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from nwor import ops
from nwor.ops.library import CUDA_LIBRARY, build_record, find

DEVICE = torch.device("cuda")
BLOCK = 16


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def attend(
    heads: tuple[int, int, int], windows: list[int], contexts: list[int], *, cache: str = "auto",
    block: int = BLOCK, tree: bool = False, sliding_window: int = -1, sinks: bool = False,
    softcap: float = 0.0, quantized: bool = False, rising: bool = False, aligned: bool = True,
) -> None:  # fmt: skip
    query_heads, kv_heads, size = heads
    tokens, batch = sum(windows), len(windows)
    pages = [-(-max(c + w, 1) // block) for c, w in zip(contexts, windows, strict=True)]
    table = torch.zeros(batch, max(pages), dtype=torch.int32)
    order = iter(torch.randperm(sum(pages)).tolist())
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor(list(itertools.islice(order, count)))
    dtype = {"auto": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[cache]
    caches = numbers(sum(pages), kv_heads, block, 2 * size).to(dtype).transpose(1, 2).split(size, dim=-1)
    if rising:  # the running maxima move in each tile
        for row, count in enumerate(pages):
            for page in range(count):
                keys = caches[0][int(table[row, page])]
                keys.copy_((keys.float() * (1 + page / 4)).clamp(-240, 240))
    mask = None
    if tree:
        mask = torch.tensor([(1 << i) | 1 for w in windows for i in range(w)], device=DEVICE)
    starts = torch.tensor([0, *itertools.accumulate(windows)], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(
        [c + w for c, w in zip(contexts, windows, strict=True)], dtype=torch.int32, device=DEVICE
    )
    longest = max(windows)
    space = ops.verify_attention_workspace_size(DEVICE, *heads, longest)
    scale = torch.ones(kv_heads, device=DEVICE) if cache != "auto" else None
    plan = ops.make_verify_plan(DEVICE)
    assert plan is not None
    ops.plan_verify_attention(
        starts, lengths, plan, num_heads=query_heads, num_kv_heads=kv_heads, head_size=size,
        max_query_len=longest, source_dtype=torch.bfloat16, kv_cache_dtype=cache,
        sliding_window=sliding_window, quantized_query=quantized,
    )  # fmt: skip

    def rows(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        wider = numbers(tokens, count, size + (0 if aligned else 3), dtype=dtype)
        return wider if aligned else wider[..., 1:-2]

    query = rows(query_heads, torch.float8_e4m3fn if quantized else torch.bfloat16)
    for given in (None, plan):
        ops.verify_attention(
            query, rows(kv_heads), rows(kv_heads), *caches,
            table.to(DEVICE), starts, lengths, rows(query_heads),
            torch.zeros(space, dtype=torch.uint8, device=DEVICE),
            scale=size**-0.5, max_query_len=longest, kv_cache_dtype=cache, k_scale=scale, v_scale=scale,
            q_scale=scale if quantized else None, sliding_window=sliding_window, softcap=softcap,
            sinks=torch.zeros(query_heads, device=DEVICE) if sinks else None, ancestor_mask=mask,
            lse=torch.zeros(query_heads, tokens, device=DEVICE), plan=given,
        )  # fmt: skip


def move(cache: str, block: int, heads: int, size: int) -> None:
    layers, blocks, windows = 3, 5, [3, 0, 2]
    tokens = sum(windows) + 1
    keys = [numbers(tokens, heads, size) for _ in range(layers)]
    values = [numbers(tokens, heads, size) for _ in range(layers)]
    dtype = torch.bfloat16 if cache == "auto" else torch.uint8
    pairs = [torch.zeros(2, blocks, block, heads, size, device=DEVICE, dtype=dtype) for _ in range(layers)]
    key_caches, value_caches = [p[0] for p in pairs], [p[1] for p in pairs]
    table = ops.make_layer_table(keys, values, key_caches, value_caches)
    slots = torch.tensor([3, 7, -1, 9, blocks * block - 1, 0], device=DEVICE)
    starts = torch.tensor([0, *itertools.accumulate(windows)], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    sources = torch.tensor([1, 0, 2, -1, 4, 3], dtype=torch.int32, device=DEVICE)
    element = 2 if cache == "auto" else 1
    log = torch.zeros(layers, 2, tokens, heads * size * element, dtype=torch.uint8, device=DEVICE)
    shape = (heads, size, block, blocks)
    op = torch.ops.nwor
    op.log_slots(table, pairs, log, slots, starts, *shape)
    op.commit_window(table, pairs, slots, starts, counts, None, *shape, torch.bfloat16, cache, None, None)
    op.commit_window(table, pairs, slots, starts, None, sources, *shape, torch.bfloat16, cache, None, None)
    op.restore_slots(table, pairs, log, slots, starts, counts, *shape)
    staged = [torch.zeros_like(k) for k in keys], [torch.zeros_like(v) for v in values]
    op.stage_window(keys, values, *staged, torch.tensor([tokens], dtype=torch.int32, device=DEVICE))


def largest(rows: int, vocab: int, dtype: torch.dtype, offset: int) -> None:
    logits = numbers(rows, offset + vocab, dtype=dtype)[:, offset:]
    output = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    workspace = ops.make_argmax_workspace(rows, DEVICE)
    for _ in range(2):
        ops.argmax_rows(logits, output, workspace)


def require_even_barriers() -> None:
    library = find(CUDA_LIBRARY)
    if library is None or not build_record(library).get("even_barriers"):
        raise SystemExit(
            f"{library} was not built for racecheck: build the target nwor_cuda_racecheck, and name the "
            "folder of its libraries with NWOR_LIBRARY_DIR (docs/kernels/testing.md#racecheck)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Run every op once.")
    parser.add_argument(
        "--racecheck", action="store_true", help="refuse libraries that racecheck takes for wrong"
    )
    if parser.parse_args().racecheck:
        require_even_barriers()
    for size in (64, 96, 128, 256):
        for query_heads, kv_heads in ((2, 2), (8, 2), (16, 2)):
            for cache, quantized in (("auto", False), ("fp8", False), ("fp8", True), ("fp8_e5m2", True)):
                heads = query_heads, kv_heads, size
                attend(heads, [5, 0, 9, 1], [200, 0, 33, 700], cache=cache, quantized=quantized)
    attend((8, 1, 128), [5], [3000])  # one request over many thread blocks
    attend((8, 8, 128), [2] * 40, [16 * (i % 7) + i for i in range(40)])  # many units to a thread block
    attend((16, 8, 64), [3] * 60, [90] * 60)
    attend((16, 1, 128), [64, 40], [100, 0])  # more rows than a thread block keeps
    attend((8, 2, 128), [5, 3], [100, 40], block=24, tree=True, sinks=True, softcap=20.0)
    attend((8, 2, 64), [5, 3], [300, 40], sliding_window=37)
    for size, windows in ((64, [5, 3]), (128, [9, 1]), (256, [9, 1]), (256, [20, 3])):
        for cache in ("auto", "fp8"):  # rows that are not aligned
            attend((16, 2, size), windows, [100, 40], cache=cache, aligned=False)
    for block in (16, 24):  # tiles in pairs
        attend((16, 2, 256), [9, 0, 6, 8] * 4, [40, 64, 9, 700] * 4, block=block, rising=True)
        for quantized in (False, True):
            for window in (5, 9):
                pairs = {"cache": "fp8", "quantized": quantized, "block": block}
                attend((16, 2, 256), [window, 0, 3, 4], [40, 64, 9, 700], rising=True, **pairs)
    attend((8, 2, 256), [9] * 16, [300] * 16, rising=True)
    # Units dealt out, one of them cut; the last ones cut; units that straddle workers.
    for heads, window in (((32, 8, 128), 5), ((16, 2, 256), 9)):
        attend(heads, [window] * 70, [100 + 37 * (i % 9) for i in range(70)])
        attend(heads, [window] * 70, [3000, *(100 + 37 * (i % 9) for i in range(69))])
        attend(heads, [window] * 40, [700 + 9 * (i % 7) for i in range(40)])
        attend(heads, [window] * 140, [30 + 37 * (i % 9) for i in range(140)])
    for size in (64, 96, 128, 256):  # the same with quantized queries
        fp8 = {"cache": "fp8", "quantized": True}
        attend((8, 1, size), [5], [3000], **fp8)
        attend((8, 8, size), [2] * 40, [16 * (i % 7) + i for i in range(40)], **fp8)
        for query_heads, window in ((64, 2), (32, 5)):  # 16 and 20 rows of many units
            attend((query_heads, 8, size), [window] * 24, [16 * (i % 7) + i for i in range(24)], **fp8)
        attend((16, 1, size), [64, 40], [100, 0], **fp8)
        for count in (12, 20):  # pairs of thread blocks
            attend((32, 8, size), [5] * count, [300] * count, **fp8)
        attend((8, 2, size), [5, 3], [100, 40], block=24, tree=True, sinks=True, softcap=20.0, **fp8)
        attend((8, 2, size), [5, 3], [300, 40], sliding_window=37, **fp8)
    for cache, block, heads, size in (
        ("auto", 16, 2, 64),
        ("fp8", 8, 8, 32),
        ("auto", 3, 2, 8),
        ("fp8", 16, 1, 9),
        ("auto", 16, 9, 256),  # rows of more 16-byte pieces than a thread block has threads
        ("fp8", 16, 17, 256),
        ("fp8", 16, 3, 80),
    ):
        move(cache, block, heads, size)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, vocab, offset in ((1, 50001, 0), (7, 9000, 3), (600, 2048, 1), (2, 5, 1), (1, 1, 0)):
            largest(rows, vocab, dtype, offset)
    torch.cuda.synchronize()
    print("all shapes ran")


if __name__ == "__main__":
    main()
