"""Claim: the kernel benchmark's readers read every word of a context once, and say so where they do not.

Coverage: all ways of the one that only reads, and cuts of the one that joins parts, in Triton's interpreter
on the CPU: 16-bit and 8-bit caches, contexts that differ and do not fill their last block, blocks smaller
than a piece, parts without blocks. Tolerance: none, sums of whole numbers.
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
import cells, joining, reading

def found_out(checked, name, wrong):
    # Whether a check fails whose launch alone has something wrong.
    layer, right = checked.layer, getattr(checked, name)
    def amiss(index):
        setattr(checked, name, wrong)
        layer(index)
        setattr(checked, name, right)
    checked.layer = amiss
    try:
        checked.check()
    except RuntimeError:
        return True
    finally:
        checked.layer = layer
    return False

random = torch.Generator().manual_seed(1)
for heads, fp8 in (((4, 2, 64), False), ((4, 1, 64), True), ((8, 4, 128), False)):
    cell = cells.Cell(heads, fp8, 3, 160, 4, 0.5)
    raw = torch.randint(0, 256, (cell.layer_bytes,), dtype=torch.uint8, generator=random)
    cache = raw.view(torch.uint8 if fp8 else torch.bfloat16)
    cache = cache.view(cell.blocks, heads[1], cells.BLOCK_SIZE, 2 * heads[2])
    blocks = torch.randperm(cell.blocks, generator=random).int()
    table = torch.nn.utils.rnn.pad_sequence(blocks.split(cell.block_counts), batch_first=True)
    step = SimpleNamespace(cell=cell, caches=[cache], blocks=blocks, block_table=table)
    for way in reading.WAYS:
        reader = reading.Reader(step, way)
        assert reader.blocks.numel() == sum(-(-context // 16) for context in cell.contexts) < cell.blocks
        reader.check()
        # The check can fail: one that leaves a block out, or reads it twice, is found out.
        read = reader.blocks
        for wrong in (read[1:], torch.cat([read, read[:1]])):
            assert found_out(reader, "blocks", wrong), way
    for cut in (joining.Cut(1, 4), joining.Cut(4, 4), joining.Cut(4, 8), joining.Cut(32, 4)):
        joiner = joining.Joiner(step, cut)
        joiner.check()
        joiner.check()  # the first left no ticket
        # The check can fail: by a block less or more, or where parts are added up before the last is there.
        for wrong in (-1, 1):
            counts = joiner.counts + torch.tensor([0, wrong, 0], dtype=torch.int32)
            assert found_out(joiner, "counts", counts), cut
        if cut.parts > 1:
            assert found_out(joiner, "tickets", torch.ones_like(joiner.tickets)), cut
        joiner.check()
    assert [cut.parts for cut in joining.cuts(128, 132)] == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]
    assert [cut.parts for cut in joining.cuts(8, 132)] == [16, 16, 32, 32, 64, 64, 128, 128]
    assert [cut.parts for cut in joining.cuts(4096, 132)] == [1, 1]
print("all ways read everything")
"""


def test_every_way_reads_everything_once() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(FOLDER)}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "all ways read everything" in ended.stdout
