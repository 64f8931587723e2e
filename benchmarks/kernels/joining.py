"""A kernel that reads a cell's context the way attention must, and computes nothing.

Attention cannot take blocks as they lie: a request and KV head is one unit, whose keys and values only its
own query rows want. Where there are fewer units than workers a unit is cut into parts, and what the parts
have found is added up, which for attention is the unit's output in float32 for each. That is done here: each
worker reads its part of one unit and leaves a partial result, of rows rounded up to eight, and the last of a
unit adds them up and writes the output. What is left out is all that attention computes. It is a mark, not a
bound: the last worker adds up alone, which takes its time where parts are many and large, and a step waits
for its blocks' numbers before it asks for them.
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
class Cut:
    """How units are cut.

    Attributes:
        parts: of each unit.
        warps: of a worker, which reads one part.

    """

    parts: int
    warps: int


#: Bytes that each thread has under way at a time.
THREAD_BYTES = 128
#: Fewest and most workers for each multiprocessor that are tried, and the most there may be of a unit.
LEAST_WORKERS, MOST_WORKERS, MOST_PARTS = 0.9, 16, 128


def cuts(units: int, processors: int) -> list[Cut]:
    """All that are tried for so many units: what fills the device, in powers of two.

    Args:
        units: requests times KV heads.
        processors: multiprocessors.

    """
    parts = [1 << i for i in range(MOST_PARTS.bit_length())]
    within = [n for n in parts if LEAST_WORKERS * processors <= units * n <= MOST_WORKERS * processors]
    return [Cut(n, warps) for n in within or [1] for warps in (4, 8)]


@triton.jit  # type: ignore[untyped-decorator]
def _read_and_join(  # type: ignore[no-untyped-def]
    cache_ptr,  # int32, blocks of HEADS * WORDS each
    table_ptr,  # int32 [requests, row]
    counts_ptr,  # int32 [requests], blocks of each that hold context
    partial_ptr,  # int32 [units, PARTS, result]
    output_ptr,  # int32 [units, result]
    tickets_ptr,  # int32 [units], zero between launches
    row,
    units,
    result,
    HEADS: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
):
    # Parts of one unit lie apart in the grid, so that what runs at the same time is of all units.
    unit = tl.program_id(0) % units
    part = tl.program_id(0) // units
    count = tl.load(counts_ptr + unit // HEADS)
    each = (count + PARTS - 1) // PARTS
    end = tl.minimum((part + 1) * each, count)
    total = tl.zeros([BLOCKS, WORDS], tl.int32)
    for first in range(part * each, end, BLOCKS):
        index = first + tl.arange(0, BLOCKS)
        block = tl.load(table_ptr + unit // HEADS * row + index, mask=index < end, other=0).to(tl.int64)
        begin = (block * HEADS + unit % HEADS) * WORDS
        words = begin[:, None] + tl.arange(0, WORDS)[None, :]
        total += tl.load(cache_ptr + words, mask=(index < end)[:, None], other=0)
    own = tl.arange(0, PADDED)
    inside = own < result
    # The sum stands for every number of the result.
    numbers = tl.sum(total) + tl.zeros([PADDED], tl.int32)
    if PARTS == 1:
        tl.store(output_ptr + unit * result + own, numbers, mask=inside)
    else:
        tl.store(partial_ptr + (unit * PARTS + part).to(tl.int64) * result + own, numbers, mask=inside)
        tl.debug_barrier()  # all threads' numbers are there before the first thread counts the part
        if tl.atomic_add(tickets_ptr + unit, 1, sem="acq_rel") == PARTS - 1:
            added = tl.zeros([PADDED], tl.int32)
            for other in tl.static_range(PARTS):
                at = partial_ptr + (unit * PARTS + other).to(tl.int64) * result + own
                added += tl.load(at, mask=inside, other=0, cache_modifier=".cg")
            tl.store(output_ptr + unit * result + own, added, mask=inside)
            tl.store(tickets_ptr + unit, 0)


class Joiner:
    """Reads the context of a step's layers unit by unit, and joins what each part found.

    Args:
        step: the step.
        cut: how units are cut.

    """

    def __init__(self, step: Step, cut: Cut) -> None:
        query_heads, kv_heads, size = step.cell.heads
        self.cut, self.heads = cut, kv_heads
        self.table = step.block_table
        counts = [-(-context // BLOCK_SIZE) for context in step.cell.contexts]
        int32 = {"dtype": torch.int32, "device": self.table.device}
        self.counts = torch.tensor(counts, **int32)
        self.units = len(counts) * kv_heads
        #: Numbers of a unit's result: its query rows, a multiple of eight as tensor cores take them.
        self.result = -(-step.cell.window * (query_heads // kv_heads) // 8) * 8 * size
        self.caches = [cache.flatten().view(torch.int32) for cache in step.caches]
        self.words = self.caches[0].numel() // (step.cell.blocks * kv_heads)
        self.blocks = max(1, cut.warps * 32 * THREAD_BYTES // 4 // self.words)
        self.partial = torch.zeros(self.units * cut.parts * self.result, **int32)
        self.output = torch.zeros(self.units, self.result, **int32)
        self.tickets = torch.zeros(self.units, **int32)

    def layer(self, index: int) -> None:
        """Read and join a layer's context."""
        _read_and_join[(self.units * self.cut.parts,)](
            self.caches[index], self.table, self.counts, self.partial, self.output, self.tickets,
            self.table.shape[1], self.units, self.result, HEADS=self.heads, WORDS=self.words,
            BLOCKS=self.blocks, PARTS=self.cut.parts, PADDED=triton.next_power_of_2(self.result),
            num_warps=self.cut.warps,
        )  # fmt: skip

    def check(self) -> None:
        """Read the first layer.

        Raises:
            RuntimeError: a unit's output is not the sum of all its words.

        """
        for tensor in (self.partial, self.output):  # what an earlier launch left must not pass for this one's
            tensor.fill_(-1)
        self.layer(0)
        words = self.caches[0].view(-1, self.heads, self.words).sum(-1, dtype=torch.int64)
        wanted = [
            words[self.table[request, :count].long()].sum(0)
            for request, count in enumerate(self.counts.tolist())
        ]
        # A sum in int32 overflows to the same bits whichever way it is added up.
        away = torch.stack(wanted).flatten()[:, None] - self.output.long()
        if bool((away % (1 << 32)).any()) or bool(self.tickets.any()):
            raise RuntimeError(f"{self.cut} did not read or join what it was to")

    def run(self) -> None:
        """Read all layers' contexts, a launch each."""
        for layer in range(LAYERS):
            self.layer(layer)


def run_joining(step: Step) -> dict[str, Callable[[], None]]:
    """Return all ways to read and join the step's units, each after it has shown that it does."""
    processors = torch.cuda.get_device_properties(step.blocks.device).multi_processor_count
    units = len(step.cell.contexts) * step.cell.heads[1]
    joiners = {f"joining {cut.parts}/{cut.warps}": Joiner(step, cut) for cut in cuts(units, processors)}
    for joiner in joiners.values():
        joiner.check()
    return {name: joiner.run for name, joiner in joiners.items()}
