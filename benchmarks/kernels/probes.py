"""Where the time of a `verify_attention` launch goes: when its thread blocks come to their stations.

    cmake -S csrc -B build/probes -G Ninja -DNWOR_CUDA=ON -DNWOR_CUDA_ARCHS=90a -DNWOR_PROBES=ON
    cmake --build build/probes
    NWOR_LIBRARY_DIR=<both libraries' folder> python benchmarks/kernels/probes.py --cells 1x4096x4 [--product]

Layers run in one CUDA graph as in run.py; each notes its times in a place of its own. A line has, in
microseconds since the first thread block of the launch began, the least, the middle and the greatest over
its thread blocks, as medians over layers and replays. `gap` is from the end of one launch to the beginning
of the next; with `--product` what it puts there lies in it. The device's clock ticks in steps of its own
(the first line says which), so what is shorter stands in the second table, by the multiprocessors' clocks:
from each station to the next of the same thread block. Probes take time themselves, and registers, of which
kernels with many rows have none to spare.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable, Sequence

import torch
from cells import LAYERS, Cell
from device import CachePool, Graph, Product, Step, nothing, run_nwor
from run import parse_heads

from nwor import ops
from nwor.ops.library import CUDA_LIBRARY, find

#: As `Station` of csrc/cuda/verify/probes.cuh has them.
STATIONS = ("begin", "planned", "first tiles", "last tile", "passed on", "end")
#: Replays before those that count, and those.
SETTLE, REPLAYS = 200, 20
#: The first layers follow on the plan's launch, or on a graph's beginning.
FIRST_LAYER = 4
#: Least, middle and greatest.
Three = tuple[float, float, float]


def three(values: torch.Tensor) -> Three:
    """Least, median and greatest of int64 or floating-point values."""
    return values.min().item(), values.double().quantile(0.5).item(), values.max().item()


def of_launch(times: torch.Tensor) -> list[Three | None]:
    """When thread blocks come to each station, in nanoseconds since the first began.

    Args:
        times: int64 [thread blocks, stations], nanoseconds; 0 where a thread block did not come.

    """
    came = times > 0
    first = times[:, 0][came[:, 0]].min()
    found: list[Three | None] = []
    for station in range(times.shape[1]):
        own = times[:, station][came[:, station]]
        found.append(three(own - first) if own.numel() else None)
    return found


def of_blocks(clocks: torch.Tensor) -> list[Three | None]:
    """Cycles from each station to the next one, over the thread blocks that came to both.

    Args:
        clocks: int64 [thread blocks, stations]; 0 where a thread block did not come.

    """
    found: list[Three | None] = []
    for station in range(clocks.shape[1] - 1):
        both = (clocks[:, station] > 0) & (clocks[:, station + 1] > 0)
        own = (clocks[:, station + 1] - clocks[:, station])[both]
        found.append(three(own) if own.numel() else None)
    return found


def middle(of: Sequence[list[Three | None]]) -> list[Three | None]:
    """Medians of launches; None where hardly any thread block of theirs came to a station."""
    found: list[Three | None] = []
    for launches in zip(*of, strict=True):
        there = [own for own in launches if own is not None]
        if 2 * len(there) < len(launches):
            found.append(None)
            continue
        low, mid, high = (statistics.median(values) for values in zip(*there, strict=True))
        found.append((low, mid, high))
    return found


def line(name: str, own: Three | None) -> str:
    """A table's line in microseconds, from nanoseconds."""
    if own is None:
        return f"{name:>26} -"
    return f"{name:>26} " + " ".join(f"{value / 1e3:8.2f}" for value in own)


def measure(
    cell: Cell,
    pool: CachePool,
    workspace: torch.Tensor,
    product: bool,
    set_probes: Callable[[int | None], None],
) -> list[str]:
    """The lines of one cell."""
    step = Step(cell, pool)
    if not step.caches:
        return ["does not fit"]
    before_layer = Product(step) if product else nothing
    blocks = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    seen = torch.zeros(LAYERS, blocks, len(STATIONS), 2, dtype=torch.int64, device="cuda")

    def between(layer: int) -> None:
        before_layer(layer)
        set_probes(seen[layer].data_ptr())

    graph = Graph(run_nwor(step, workspace, between), torch.cuda.graph_pool_handle()).graph
    set_probes(None)
    launches, inside, gaps, ticks, cycles = [], [], [], set(), []
    for replay in range(SETTLE + REPLAYS):
        if replay >= SETTLE:
            seen.zero_()
            graph.replay()  # what zeroing left in the caches is gone after it
        graph.replay()
        if replay < SETTLE:
            continue
        times = seen.cpu()
        for layer in range(FIRST_LAYER, LAYERS):
            nanoseconds, clocks = times[layer].unbind(-1)
            launches.append(of_launch(nanoseconds))
            inside.append(of_blocks(clocks))
            before = times[layer - 1, ..., 0]
            gaps.append((nanoseconds[:, 0][nanoseconds[:, 0] > 0].min() - before.max()).item())
            ended = (nanoseconds[:, -1] > 0) & (nanoseconds[:, 0] > 0)
            took = (nanoseconds[:, -1] - nanoseconds[:, 0])[ended].sum().item()
            if took > 0:
                cycles.append((clocks[:, -1] - clocks[:, 0])[ended].sum().item() / took)
            whole = nanoseconds[nanoseconds > 0].unique()
            if whole.numel() > 1:
                ticks.add(whole.diff().min().item())
    rate = statistics.median(cycles)  # cycles a nanosecond
    lines = [f"gap {statistics.median(gaps) / 1e3:.2f} us; the device's clock ticks every {min(ticks)} ns"]
    lines += [line(name, own) for name, own in zip(STATIONS, middle(launches), strict=True)]
    lines.append("from station to station, by the multiprocessors' clocks")
    for index, cycle in enumerate(middle(inside)):
        nanoseconds = None if cycle is None else tuple(value / rate for value in cycle)
        lines.append(line(f"{STATIONS[index]} - {STATIONS[index + 1]}", nanoseconds))  # type: ignore[arg-type]
    return lines


def main() -> None:
    """Print the tables of the cells that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", nargs="*", type=parse_heads, default=[(32, 8, 128)])
    parser.add_argument("--cells", nargs="+", required=True, help="as batch x context x drafts: 16x600x4")
    parser.add_argument("--fp8", action="store_true", help="fp8_e4m3 cache instead of bf16")
    parser.add_argument("--spread", type=float, default=0.0, help="contexts that differ: 0.3 for up to 30%%")
    parser.add_argument("--product", action="store_true", help="what a model has before each layer")
    parser.add_argument("--pool-gib", type=float, default=40.0)
    args = parser.parse_args()
    path = find(CUDA_LIBRARY)
    set_probes = None if path is None else getattr(ctypes.CDLL(str(path)), "nwor_cuda_set_probes", None)
    if set_probes is None:
        raise SystemExit(f"{path or CUDA_LIBRARY} was built without NWOR_PROBES; see the top of this file")
    set_probes.argtypes, set_probes.restype = [ctypes.c_void_p], None
    pool = CachePool(int(args.pool_gib * (1 << 30)), args.fp8)
    for heads in args.heads:
        size = ops.verify_attention_workspace_size("cuda", *heads, 9)
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        for name in args.cells:
            batch, context, drafts = map(int, name.split("x"))
            cell = Cell(heads, args.fp8, batch, context, drafts, args.spread)
            print(f"\n{'/'.join(map(str, heads))} {name}{' after a product' if args.product else ''}")
            print("\n".join(measure(cell, pool, workspace, args.product, set_probes)), flush=True)


if __name__ == "__main__":
    main()
