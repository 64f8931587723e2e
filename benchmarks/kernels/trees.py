"""Attention of windows with ancestor masks beside causal ones of as many rows, both with their plans made.

    PYTHONPATH=. python benchmarks/kernels/trees.py [--batches 1,4,16] [--contexts 600,4096]

Microseconds of a layer, of 32 that follow one another in a CUDA graph: causal / tree, and their ratio.
"""

from __future__ import annotations

import argparse

import device
import torch
from cells import Cell

from nwor import ops

HEADS = (32, 8, 128)


def mask_of(row: int) -> int:
    """Return the ancestor mask of a row of a binary tree, as int64 takes it."""
    mask = 1 << row
    while row:
        row = (row - 1) // 2
        mask |= 1 << row
    return mask - (1 << 64) if mask >> 63 else mask


def seconds(graph: torch.cuda.CUDAGraph, replays: int = 20) -> float:
    """Return the least time of a replay, of three measurements."""
    found = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / replays)
    return min(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--contexts", default="600,4096")
    parser.add_argument("--windows", default="9,17,33,64")
    args = parser.parse_args()
    pool = device.CachePool(20 << 30, False)
    heads, kv_heads, size = HEADS
    print(torch.cuda.get_device_name(), "us a layer: causal / tree = ratio", flush=True)
    for batch in map(int, args.batches.split(",")):
        for context in map(int, args.contexts.split(",")):
            row = []
            for window in map(int, args.windows.split(",")):
                cell = Cell(heads=HEADS, fp8=False, batch=batch, context=context, drafts=window - 1)
                step = device.Step(cell, pool)
                workspace = torch.zeros(
                    ops.verify_attention_workspace_size("cuda", heads, kv_heads, size, 64),
                    dtype=torch.uint8,
                    device="cuda",
                )
                plan = ops.make_verify_plan(torch.device("cuda"))
                masks = torch.tensor(
                    [mask_of(index) for index in range(window)] * batch, dtype=torch.int64, device="cuda"
                )
                times = []
                for mask in (None, masks):

                    def run(
                        step: device.Step = step,
                        window: int = window,
                        plan: torch.Tensor | None = plan,
                        workspace: torch.Tensor = workspace,
                        mask: torch.Tensor | None = mask,
                    ) -> None:
                        ops.plan_verify_attention(
                            step.query_start_loc,
                            step.seq_lens,
                            plan,
                            num_heads=heads,
                            num_kv_heads=kv_heads,
                            head_size=size,
                            max_query_len=window,
                            source_dtype=torch.bfloat16,
                            kv_cache_dtype="auto",
                            sliding_window=-1,
                            quantized_query=False,
                        )
                        for layer in range(device.LAYERS):
                            ops.verify_attention(
                                step.queries[layer],
                                step.keys[layer],
                                step.values[layer],
                                step.key_caches[layer],
                                step.value_caches[layer],
                                step.block_table,
                                step.query_start_loc,
                                step.seq_lens,
                                step.output,
                                workspace,
                                scale=size**-0.5,
                                max_query_len=window,
                                ancestor_mask=mask,
                                plan=plan,
                            )

                    run()
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        run()
                    graph.replay()
                    times.append(seconds(graph) / device.LAYERS * 1e6)
                row.append(f"{window}: {times[0]:.1f} / {times[1]:.1f} = {times[1] / times[0]:.2f}")
            print(f"{batch} x {context}: ", "   ".join(row), flush=True)


if __name__ == "__main__":
    main()
