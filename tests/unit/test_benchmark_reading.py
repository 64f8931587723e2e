"""Claim: the kernel benchmark's reader reads every word of a context once, and says so where it does not.

Coverage: all its ways, in Triton's interpreter on the CPU: 16-bit and 8-bit caches, contexts that differ and
do not fill their last block, blocks smaller than a piece. Tolerance: none, sums of whole numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"
#: Triton reads TRITON_INTERPRET when kernels are made: so in a process of its own.
SCRIPT = """
from types import SimpleNamespace
import torch
import cells, reading

random = torch.Generator().manual_seed(1)
for heads, fp8 in (((4, 2, 64), False), ((4, 1, 64), True), ((8, 4, 128), False)):
    cell = cells.Cell(heads, fp8, 3, 160, 4, 0.5)
    raw = torch.randint(0, 256, (cell.layer_bytes,), dtype=torch.uint8, generator=random)
    cache = raw.view(torch.uint8 if fp8 else torch.bfloat16)
    cache = cache.view(cell.blocks, heads[1], cells.BLOCK_SIZE, 2 * heads[2])
    blocks = torch.randperm(cell.blocks, generator=random).int()
    step = SimpleNamespace(cell=cell, caches=[cache], blocks=blocks)
    for way in reading.WAYS:
        reader = reading.Reader(step, way)
        assert reader.blocks.numel() == sum(-(-context // 16) for context in cell.contexts) < cell.blocks
        reader.check()
        # The check can fail: one that leaves a block out, or reads it twice, is found out.
        layer, blocks_read = reader.layer, reader.blocks
        for wrong in (blocks_read[1:], torch.cat([blocks_read, blocks_read[:1]])):
            def amiss(index, wrong=wrong):
                reader.blocks = wrong
                layer(index)
                reader.blocks = blocks_read
            reader.layer = amiss
            try:
                reader.check()
            except RuntimeError:
                continue
            raise AssertionError(way)
print("all ways read everything")
"""


def test_every_way_reads_everything_once() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(FOLDER)}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "all ways read everything" in ended.stdout
