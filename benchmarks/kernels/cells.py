"""The grid that the kernels are measured on, and what each of its cells must move through memory.

A cell is one shape of a verify step: `batch` requests, each with `context` tokens in the cache, or so many on
average, and a window of `drafts + 1` tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

LAYERS = 32
BLOCK_SIZE = 16
BATCHES = (1, 4, 16, 64, 128)
CONTEXTS = (128, 600, 4096, 16384, 65536)
DRAFTS = (1, 4, 8)
#: Those whose results joining.py joins.
JOINED_DRAFTS = 4
#: FlashInfer's ways, as results call them: paged prefill of two makes, and decode of whole windows.
FLASHINFER = ("fa2", "fa3", "xqa")
HEADS = ((32, 8, 128), (32, 8, 64), (64, 8, 128), (16, 2, 256))


@dataclass(frozen=True)
class Cell:
    """One shape. `heads` is (query heads, KV heads, head size); `fp8` says what the cache holds.

    Contexts lie evenly between `context * (1 - spread)` and `context * (1 + spread)`, in random order.
    """

    heads: tuple[int, int, int]
    fp8: bool
    batch: int
    context: int
    drafts: int
    spread: float = 0.0

    @property
    def contexts(self) -> list[int]:
        """Tokens in the cache of each request."""
        steps = [(2 * i + 1) / self.batch - 1 for i in range(self.batch)]
        contexts = [round(self.context * (1 + self.spread * step)) for step in steps]
        random.Random(0).shuffle(contexts)
        return contexts

    @property
    def window(self) -> int:
        """Tokens of a window: the last sampled token and the drafts."""
        return self.drafts + 1

    @property
    def tokens(self) -> int:
        """Window tokens of the batch."""
        return self.batch * self.window

    @property
    def block_counts(self) -> list[int]:
        """Cache blocks of each request in one layer, the window's slots included."""
        return [-(-(context + self.window) // BLOCK_SIZE) for context in self.contexts]

    @property
    def blocks(self) -> int:
        """Cache blocks of the batch in one layer."""
        return sum(self.block_counts)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's cache."""
        _, kv_heads, head_size = self.heads
        return self.blocks * BLOCK_SIZE * kv_heads * head_size * 2 * (1 if self.fp8 else 2)

    @property
    def cache_bytes_read(self) -> int:
        """Bytes of context that attention must read in one layer."""
        _, kv_heads, head_size = self.heads
        return sum(self.contexts) * kv_heads * head_size * 2 * (1 if self.fp8 else 2)

    @property
    def least_bytes(self) -> int:
        """Bytes that one layer's attention must move: context, window, queries and output, each once."""
        query_heads, kv_heads, head_size = self.heads
        numbers = query_heads * (1 if self.fp8 else 2) + 2 * query_heads + 2 * 2 * kv_heads
        return self.cache_bytes_read + self.tokens * head_size * numbers

    @property
    def flops(self) -> int:
        """Multiplications and additions of one layer's two matrix products."""
        query_heads, _, head_size = self.heads
        keys = sum(self.contexts) + self.tokens
        return 4 * self.window * query_heads * head_size * keys


def grid(heads: tuple[int, int, int], fp8: bool, spread: float = 0.0) -> Iterator[Cell]:
    """All cells of one head configuration, small ones first."""
    for context in CONTEXTS:
        for batch in BATCHES:
            for drafts in DRAFTS:
                yield Cell(heads, fp8, batch, context, drafts, spread)
