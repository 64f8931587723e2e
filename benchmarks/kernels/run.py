"""Measures the grid on one GPU and writes JSON.

    python benchmarks/kernels/run.py --out results.json [--heads 32/8/128 ...] [--fp8] [--cells 16x600x4 ...]
        [--flashinfer [modules]] [--reading] [--product]

Both ways run 32 layers in one CUDA graph, in turns of `TIMES` times; what counts is the median over all of a
way's times, its noise half the distance between the quartiles. Needs vLLM with FlashAttention 3 for the stock
column. `--flashinfer` adds FlashInfer's ways (flashinfer_ways.py), with modules that flashinfer_modules.py
compiled before, or compiled now; how much each way's output differs from stock's is then noted as well.
`--reading` adds what a kernel takes that only reads the context (reading.py), in the cells with the shortest
windows, and one that reads it as attention must and joins what parts have found (joining.py), in those with
`JOINED_DRAFTS`; for contexts of 100 MB to 1 GB. `--product` puts a matrix product and a small kernel over
query, key and value before each layer, as a model does, and takes their own time off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cells import DRAFTS, FLASHINFER, HEADS, JOINED_DRAFTS, LAYERS, Cell, grid
from device import (
    CachePool,
    Graph,
    Product,
    Step,
    copy_bandwidth,
    interleaved,
    nothing,
    run_copy,
    run_nwor,
    run_stock,
)

from nwor import ops

if TYPE_CHECKING:
    from flashinfer_ways import FlashInfer

#: Of a way in each of its turns.
TIMES = 3
#: Cells that read more bytes of context than the first, and fewer than the second, stand beside a copy that
#: moves as many. Larger ones stand beside one of 4 GiB.
LARGE_BYTES, LARGEST_BYTES = 100e6, 1e9


def summary(times: Sequence[float]) -> tuple[float, float]:
    """Median, and half the distance between the quartiles."""
    low, _, high = statistics.quantiles(times, n=4)
    return statistics.median(times), (high - low) / 2


def differences(
    step: Step, write: Callable[[int], None], attend: dict[str, Callable[[int], None]]
) -> dict[str, float]:
    """Largest difference of each way's output from the first one's, in one layer whose window is written."""
    write(0)
    outputs = []
    for way in attend.values():
        step.output.fill_(torch.nan)
        way(0)
        outputs.append(step.output.float())
    return {name: (own - outputs[0]).abs().max().item() for name, own in zip(attend, outputs, strict=True)}


def measure(
    cell: Cell,
    cache_pool: CachePool,
    workspace: torch.Tensor,
    flashinfer: FlashInfer | None,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Times of one cell in microseconds: per layer, `commit` for all layers."""
    row: dict[str, Any] = {
        "heads": "/".join(map(str, cell.heads)), "fp8": cell.fp8, "batch": cell.batch,
        "context": cell.context,
        "drafts": cell.drafts, "cache_bytes": cell.cache_bytes_read, "least_bytes": cell.least_bytes,
        "flops": cell.flops, "spread": cell.spread, "after_product": args.product,
    }  # fmt: skip
    step = Step(cell, cache_pool)
    row["distinct_layers"] = step.distinct if step.caches else 0
    if not step.caches:
        return row
    product = Product(step) if args.product else None
    between = product or nothing
    own = run_nwor(step, workspace, between)
    functions = {"nwor": own, "commit": own.commit}  # type: ignore[attr-defined]
    if not args.no_stock:
        stock = run_stock(step, between)
        functions |= {"stock": stock}
        if args.parts:
            functions["write"] = lambda: [stock.write(i) for i in range(LAYERS)]  # type: ignore[attr-defined]
        if flashinfer is not None:
            from flashinfer_ways import run_flashinfer

            write = stock.write  # type: ignore[attr-defined]
            ways, row["refused"] = flashinfer.ways(step)
            own.plan()  # type: ignore[attr-defined]
            attend = {"stock": stock.attend, "nwor": own.verify} | ways  # type: ignore[attr-defined]
            row["differences"] = differences(step, write, attend)
            functions |= {name: run_flashinfer(way, write) for name, way in ways.items()}
    if product is not None:
        functions["product"] = product.alone
    large = LARGE_BYTES < cell.cache_bytes_read < LARGEST_BYTES
    if args.reading and large and cell.drafts == DRAFTS[0]:
        from reading import run_reading

        functions |= run_reading(step)
    if args.reading and large and cell.drafts == JOINED_DRAFTS:
        from joining import run_joining

        functions |= run_joining(step)
    graph_pool = torch.cuda.graph_pool_handle()
    graphs = {name: Graph(function, graph_pool) for name, function in functions.items()}
    times = interleaved(list(graphs.values()), args.turns, args.least_us, TIMES)
    for name, series in zip(graphs, times, strict=True):
        middle, noise = summary(series)
        share = 1 if name == "commit" else LAYERS
        row[name] = middle / share
        row[name + "_noise"] = noise / share
    if product is not None:  # both ways have its time in theirs
        for name in ("nwor", "stock"):
            if name in row:
                row[name] -= row["product"]
                row[name + "_noise"] += row["product_noise"]
    for kind in ("reading", "joining"):
        if ways := [name for name in graphs if name.startswith(kind + " ")]:
            fastest = min(ways, key=lambda name: row[name])
            row |= {kind: row[fastest], f"{kind}_noise": row[f"{fastest}_noise"]}
    return row


def copy_time(pool: CachePool, moved: int, args: argparse.Namespace) -> float:
    """Microseconds that a copy takes to move as many bytes, one of `LAYERS` in a graph."""
    graph = Graph(run_copy(pool, moved), torch.cuda.graph_pool_handle())
    return summary(interleaved([graph], args.turns, args.least_us, TIMES)[0])[0] / LAYERS


def parse_heads(text: str) -> tuple[int, int, int]:
    query_heads, kv_heads, size = map(int, text.split("/"))
    return query_heads, kv_heads, size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--heads", nargs="*", type=parse_heads, default=list(HEADS))
    parser.add_argument("--fp8", action="store_true", help="fp8_e4m3 cache instead of bf16")
    parser.add_argument("--cells", nargs="*", help="only these, as batch x context x drafts: 16x600x4")
    parser.add_argument("--spread", type=float, default=0.0, help="contexts that differ: 0.3 for up to 30%%")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--least-us", type=float, default=4000.0, help="least span of a time")
    parser.add_argument("--pool-gib", type=float, default=116.0)
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--parts", action="store_true", help="also time vLLM's cache write alone")
    parser.add_argument("--product", action="store_true", help="what a model has before each layer")
    parser.add_argument("--reading", action="store_true", help="also time kernels that only read")
    parser.add_argument(
        "--flashinfer", nargs="?", const="", metavar="MODULES", help="FlashInfer's ways as well"
    )
    args = parser.parse_args()
    if args.no_stock and args.flashinfer is not None:
        parser.error("--flashinfer writes the cache as stock does: leave --no-stock out")
    if args.product and (args.flashinfer is not None or args.reading):
        parser.error("--product stands between the layers of stock and nwor only")

    begin = time.time()
    properties = torch.cuda.get_device_properties(0)
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    pool = CachePool(int(args.pool_gib * (1 << 30)), args.fp8)
    flashinfer = None
    if args.flashinfer is not None:
        from flashinfer_ways import FlashInfer

        flashinfer = FlashInfer(Path(args.flashinfer) if args.flashinfer else None)
    rows = []
    copies: dict[int, float] = {}
    for heads in args.heads:
        size = ops.verify_attention_workspace_size("cuda", *heads, 9)
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        for cell in grid(heads, args.fp8, args.spread):
            if args.cells and f"{cell.batch}x{cell.context}x{cell.drafts}" not in args.cells:
                continue
            row = measure(cell, pool, workspace, flashinfer, args)
            moved = cell.cache_bytes_read
            if LARGE_BYTES < moved < LARGEST_BYTES and "nwor" in row:
                if moved not in copies:
                    copies[moved] = copy_time(pool, moved, args)
                row["copy"] = copies[moved]
            rows.append(row)
            line = f"{row['heads']:>10} b{cell.batch:<4}c{cell.context:<6}k{cell.drafts}"
            if "nwor" in row:
                bound = row["cache_bytes"] / (row["nwor"] - row["commit"] / LAYERS) / 1e6
                line += f" nwor {row['nwor']:9.2f} commit {row['commit']:7.2f} TB/s {bound:5.2f}"
                if "stock" in row:
                    line += f" stock {row['stock']:9.2f} x{row['stock'] / row['nwor']:5.2f}"
                for name in ("write", "product", "copy", "reading", "joining", *FLASHINFER):
                    if name in row:
                        line += f" {name} {row[name]:6.2f}"
                if "differences" in row:
                    apart = torch.tensor(list(row["differences"].values())).max()  # NaN, if there is one
                    line += f" apart {apart:.4f}"
            else:
                line += " does not fit"
            print(line, flush=True)
            with open(args.out, "w") as file:
                json.dump(
                    {
                        "device": properties.name, "torch": torch.__version__, "layers": LAYERS,
                        "copy_bytes_per_second": bandwidth, "pool_gib": args.pool_gib,
                        "date": time.strftime("%Y-%m-%d"), "turns": args.turns, "times": TIMES, "rows": rows,
                    },
                    file,
                )  # fmt: skip
    print(f"copy {bandwidth / 1e12:.3f} TB/s, {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
