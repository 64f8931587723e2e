"""A kernel that does nothing but read a cell's context from the cache: what is left for attention to gain.

It takes the blocks in the table's order, as whole as they lie in memory, and spreads them evenly, piece by
piece, over workers that all fit on the device at once; no worker waits for another, nothing is computed but
the sum of all words, which shows that they were read. It is launched once a layer, as attention is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from cells import BLOCK_SIZE, LAYERS
from device import Step


@dataclass(frozen=True)
class Way:
    """How a reader is cut; which is the fastest depends on how much there is to read.

    Attributes:
        words: 4-byte words of a piece, a power of 2.
        warps: of a worker.
        workers: for each multiprocessor.
        stages: pieces under way at once, of one worker.

    """

    words: int
    warps: int
    workers: int
    stages: int


#: All have 32 to 128 KiB under way on each multiprocessor.
WAYS = (Way(1024, 4, 8, 2), Way(2048, 4, 8, 1), Way(2048, 4, 4, 3), Way(4096, 8, 4, 1), Way(4096, 8, 2, 4))


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    cache_ptr,  # int32, blocks of PIECES * WORDS each
    blocks_ptr,  # int32 [count]
    sums_ptr,  # int32 [workers]
    count,
    PIECES: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
):
    total = tl.zeros([WORDS], tl.int32)
    for piece in tl.range(tl.program_id(0), count * PIECES, tl.num_programs(0), num_stages=STAGES):
        block = tl.load(blocks_ptr + piece // PIECES).to(tl.int64)
        begin = (block * PIECES + piece % PIECES) * WORDS
        total += tl.load(cache_ptr + begin + tl.arange(0, WORDS))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


class Reader:
    """Reads the context of a step's layers.

    Args:
        step: the step.
        way: how it is cut.

    """

    def __init__(self, step: Step, way: Way) -> None:
        own = step.blocks.split(step.cell.block_counts)
        counts = [-(-context // BLOCK_SIZE) for context in step.cell.contexts]
        #: Cache blocks that hold context, in the table's order: int32.
        self.blocks = torch.cat([part[:count] for part, count in zip(own, counts, strict=True)])
        self.caches = [cache.flatten().view(torch.int32) for cache in step.caches]
        words = self.caches[0].numel() // step.cell.blocks
        self.way = way
        self.piece = min(way.words, words)
        self.pieces = words // self.piece
        processors = 1
        if self.blocks.is_cuda:
            processors = torch.cuda.get_device_properties(self.blocks.device).multi_processor_count
        #: What each worker has summed up: int32, which overflows as it may.
        self.sums = torch.zeros(way.workers * processors, dtype=torch.int32, device=self.blocks.device)

    def layer(self, index: int) -> None:
        """Read a layer's context."""
        _read[(self.sums.numel(),)](
            self.caches[index], self.blocks, self.sums, self.blocks.numel(), PIECES=self.pieces,
            WORDS=self.piece, STAGES=self.way.stages, num_warps=self.way.warps,
        )  # fmt: skip

    def check(self) -> None:
        """Read the first layer.

        Raises:
            RuntimeError: not every word was read, and once.

        """
        self.layer(0)
        words = self.caches[0].view(-1, self.pieces * self.piece)
        # A sum in int32 overflows to the same bits whichever way it is added up.
        wanted = torch.zeros((), dtype=torch.int64, device=words.device)
        for part in self.blocks.long().split(1024):
            wanted += words[part].sum(dtype=torch.int64)
        seen = self.sums.sum(dtype=torch.int64)
        if (int(wanted) - int(seen)) % (1 << 32):
            raise RuntimeError(f"{self.way} did not read what it was to: {int(seen)}, {int(wanted)} is right")

    def run(self) -> None:
        """Read all layers' contexts, a launch each."""
        for layer in range(LAYERS):
            self.layer(layer)


def run_reading(step: Step) -> dict[str, Callable[[], None]]:
    """Return all ways to read the step's context, each after it has shown that it reads everything."""
    readers = {"reading " + "/".join(map(str, vars(way).values())): Reader(step, way) for way in WAYS}
    for reader in readers.values():
        reader.check()
    return {name: reader.run for name, reader in readers.items()}
