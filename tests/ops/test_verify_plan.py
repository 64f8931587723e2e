"""Claim: a plan of the CUDA kernels gives each tile of each work tile to one worker, and workers agree on it.

Coverage: the plan's own device code, compiled for the CPU with threads emulated (`plan_emulation`): equal and
unequal lengths, empty windows, windows in chunks, sliding windows, more requests than a thread block keeps,
clusters; planned by a kernel of its own and by each thread block; memory that held another plan before.
Reference: work tiles and their tiles counted from the lengths in Python. Tolerance: none.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent / "plan_emulation"
SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "cuda"
NUMBERS = 12
ROOM = 1 << 16
#: An H200's multiprocessors.
PROCESSORS = 132
GROUP = 4


@dataclass(frozen=True)
class Split:
    """A worker's part of a work tile, as `Split` and `Scheduler` of csrc/cuda have it."""

    block: int
    worker: int
    cluster: int
    request: int
    head: int
    first_row: int
    row_count: int
    tile: int
    end: int
    first_worker: int
    worker_count: int
    window_begin: int


@dataclass(frozen=True)
class Batch:
    """Lengths of a batch, and the launch: query rows and tokens of a tile that a kernel is made for."""

    rows: int
    tile: int
    windows: list[int]
    contexts: list[int]
    kv_heads: int
    clusters: int
    cluster: int = 1
    sliding_window: int = -1

    def window_begin(self, request: int) -> int:
        """Where the window begins, in tokens from the first tile with context that is seen.

        At the next multiple of 16 tokens where it ends in the same tile, else with a tile.
        """
        window, context = self.windows[request], self.contexts[request]
        first = 0
        if self.sliding_window > 0:
            first = max(context - self.sliding_window + 1, 0) // self.tile
        seen = context - first * self.tile
        begin = -(-seen // 16) * 16
        in_one_tile = begin // self.tile == (begin + window - 1) // self.tile
        return begin if in_one_tile else -(-seen // self.tile) * self.tile

    def tiles(self, request: int) -> int:
        """Tiles of each of a request's work tiles: of the context that is seen, and of the window."""
        if self.windows[request] == 0:
            return 0
        return -(-(self.window_begin(request) + self.windows[request]) // self.tile)


Plan = Callable[..., list[Split]]


def integers(of: list[int]) -> ctypes.Array[ctypes.c_int]:
    """Return numbers as C has them."""
    return (ctypes.c_int * len(of))(*of)


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler (set CXX)")
    library = tmp_path_factory.mktemp("plan") / "plan.so"
    command = [compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-D__CUDACC__", f"-I{HERE}", f"-I{SOURCES}"]
    subprocess.run([*command, str(HERE / "plan_emulation.cpp"), "-o", str(library)], check=True)
    emulate = ctypes.CDLL(str(library)).emulate_plan

    def splits(batch: Batch, planned: bool, threads: int = 128, left_over: bool = False) -> list[Split]:
        starts = integers([0, *itertools.accumulate(batch.windows)])
        lengths = integers([c + w for c, w in zip(batch.contexts, batch.windows, strict=True)])
        numbers = integers([0] * (NUMBERS * ROOM))
        count = emulate(
            batch.rows, batch.tile, starts, lengths, len(lengths), batch.kv_heads, GROUP, batch.clusters,
            batch.cluster, batch.sliding_window, 2 if left_over else int(planned), threads, numbers, ROOM,
        )  # fmt: skip
        assert 0 <= count <= ROOM
        return [Split(*numbers[NUMBERS * i : NUMBERS * (i + 1)]) for i in range(count)]

    return splits


def check(batch: Batch, splits: list[Split]) -> None:
    """Hold a plan against the batch."""
    by_block: dict[int, list[Split]] = defaultdict(list)
    for split in splits:
        by_block[split.block].append(split)
    # The thread blocks of a cluster have the same way; one of them counts.
    by_worker: dict[int, list[list[Split]]] = defaultdict(list)
    for own in by_block.values():
        by_worker[own[0].worker].append(own)
    (cluster,) = {split.cluster for split in splits}
    parts: dict[tuple[int, int, int], list[Split]] = defaultdict(list)
    for ways in by_worker.values():
        assert len(ways) == cluster
        assert len({tuple((s.request, s.head, s.first_row, s.tile, s.end) for s in way) for way in ways}) == 1
        # A worker has room for two parts that others wait for: its first split's and its last one's.
        assert all(s.worker_count == 1 for s in ways[0][1:-1])
        for split in ways[0]:
            parts[split.request, split.head, split.first_row].append(split)
    work_tiles = {
        (request, head, row): batch.tiles(request)
        for request, window in enumerate(batch.windows)
        for head in range(batch.kv_heads)
        for row in range(0, window * GROUP, batch.rows)
    }
    assert parts.keys() == work_tiles.keys()
    for work_tile, own in parts.items():
        request, _, first_row = work_tile
        own.sort(key=lambda s: s.tile)
        assert own[0].tile == 0
        assert own[-1].end == work_tiles[work_tile]
        assert all(a.end == b.tile for a, b in itertools.pairwise(own))
        assert all(s.tile < s.end and s.row_count == batch.windows[request] * GROUP - first_row for s in own)
        assert [s.worker for s in own] == list(range(own[0].worker, own[0].worker + len(own)))
        assert all((s.first_worker, s.worker_count) == (own[0].worker, len(own)) for s in own if len(own) > 1)
        assert all(s.worker_count == 1 for s in own if len(own) == 1)
        assert {s.window_begin for s in own} == {batch.window_begin(request)}


def check_balance(batch: Batch, splits: list[Split]) -> None:
    """No worker has much more than an even share: a sixth and as much as the combine takes."""
    loads: dict[int, int] = defaultdict(int)
    for split in splits:
        loads[split.block] += split.end - split.tile
    even = sum(loads.values()) // (batch.clusters * batch.cluster) + 1
    assert max(loads.values()) <= even + even // 6 + 5


def uneven(seed: int, count: int, low: int, high: int) -> list[int]:
    """Random lengths, the same in each run."""
    numbers = random.Random(seed)
    return [numbers.randint(low, high) for _ in range(count)]


ONE, TWO = PROCESSORS, 2 * PROCESSORS
BATCHES = {
    "one": Batch(40, 64, [5], [600], 8, TWO),
    "clusters": Batch(40, 64, [5] * 2, [4096, 600], 8, 16, 8),
    "splits": Batch(40, 64, [5] * 16, uneven(1, 16, 0, 900), 8, TWO),
    "one-long": Batch(40, 64, [5] * 16, [40_000, *uneven(2, 15, 100, 1600)], 8, TWO),
    "equal": Batch(40, 64, [9] * 64, [600] * 64, 8, TWO),
    "nearly-equal": Batch(40, 64, [5] * 64, uneven(3, 64, 600, 760), 8, TWO),
    "nearly-equal-warps": Batch(24, 16, [5] * 64, uneven(3, 64, 600, 760), 8, TWO),
    "between": Batch(40, 64, [5] * 40, uneven(13, 40, 550, 750), 8, TWO),
    "between-equal": Batch(40, 64, [5] * 48, [4096] * 48, 8, TWO),
    "between-warps": Batch(24, 16, [5] * 70, uneven(14, 70, 550, 750), 8, TWO),
    "uneven": Batch(40, 64, uneven(4, 128, 1, 9), uneven(5, 128, 0, 3000), 8, TWO),
    "one-head": Batch(40, 64, [5] * 128, uneven(6, 128, 500, 900), 1, 66),
    "many-with-one-long": Batch(40, 64, [5] * 64, [30_000, *uneven(7, 63, 100, 800)], 8, TWO),
    "empty-windows": Batch(40, 64, [5 * (i % 3 > 0) for i in range(100)], uneven(8, 100, 400, 900), 8, TWO),
    "chunks": Batch(72, 64, uneven(9, 40, 1, 64), uneven(10, 40, 0, 2000), 4, ONE),
    "sliding": Batch(40, 64, [5] * 64, uneven(11, 64, 100, 2000), 8, TWO, sliding_window=512),
    "more-than-are-kept": Batch(40, 64, [5] * 200, uneven(12, 200, 100, 1500), 2, TWO),
    "no-context": Batch(40, 64, [5] * 64, [0] * 64, 8, TWO),
}


@pytest.mark.parametrize(
    "name", ["nearly-equal", "nearly-equal-warps", "uneven", "one-head", "empty-windows", "sliding"]
)
def test_work_tiles_of_differing_lengths_stay_whole(plan: Plan, name: str) -> None:
    assert {split.worker_count for split in plan(BATCHES[name], True, 128)} == {1}


def test_only_a_long_work_tile_is_cut(plan: Plan) -> None:
    batch = BATCHES["many-with-one-long"]
    cut = {split.request for split in plan(batch, True, 128) if split.worker_count > 1}
    assert cut == {0}


@pytest.mark.parametrize("name", ["between", "between-equal"])
def test_only_what_is_left_is_cut(plan: Plan, name: str) -> None:
    splits = plan(BATCHES[name], True, 128)
    shared = [split.block for split in splits if split.worker_count > 1]
    assert shared
    assert len(shared) == len(set(shared))
    whole = [split.block for split in splits if split.worker_count == 1]
    assert len(whole) == BATCHES[name].clusters


@pytest.mark.parametrize("name", BATCHES)
def test_every_tile_has_one_worker(plan: Plan, name: str) -> None:
    splits = plan(BATCHES[name], True, 128)
    check(BATCHES[name], splits)
    if splits[0].cluster == 1:
        check_balance(BATCHES[name], splits)
    # What a thread block finds for itself is what a plan says.
    assert plan(BATCHES[name], False, 64) == splits


@pytest.mark.parametrize(
    "name", ["one", "clusters", "splits", "uneven", "empty-windows", "chunks", "sliding"]
)
@pytest.mark.parametrize("padding", [1, 40, 300])
def test_requests_behind_the_last_window_count_for_nothing(plan: Plan, name: str, padding: int) -> None:
    """A graph takes more requests than it is replayed with, also more than a thread block keeps."""
    batch = BATCHES[name]
    padded = replace(
        batch,
        windows=batch.windows + [0] * padding,
        contexts=batch.contexts + [i % 7 for i in range(padding)],
    )
    expected = plan(batch, True)
    assert plan(padded, True) == expected
    assert plan(padded, False, 64) == expected


@pytest.mark.parametrize("between", ["chunks", "one-head", "clusters"])
def test_what_a_larger_launch_left_in_the_memory_is_nobodys_plan(plan: Plan, between: str) -> None:
    before = BATCHES["splits"]
    now = Batch(40, 64, before.windows, uneven(15, 16, 0, 900), 8, TWO)
    plan(before, True)
    plan(BATCHES[between], True)
    # The plan in the memory is another launch's: each thread block finds its way by itself.
    assert plan(now, True, 128, left_over=True) == plan(now, False)
