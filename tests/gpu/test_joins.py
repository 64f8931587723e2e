"""Parts of a unit that several thread blocks leave are joined, also where these do not run at the same time.

Coverage: units cut into pieces, all or those left when whole ones were dealt out, and units that straddle
workers, for which a batch has more requests than are dealt out; head sizes 64, 128 and 256, both formats.
Another kernel keeps multiprocessors to itself, so that some of a launch's thread blocks begin only when
others have gone.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.verify_batch import Batch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HELD = 40  # multiprocessors


@triton.jit
def hold_multiprocessor(source, target, steps, tile: tl.constexpr, width: tl.constexpr):
    """Multiplies tiles for `steps` steps, with some 128 KiB of shared memory."""
    rows = tl.arange(0, tile)
    columns = tl.arange(0, width)
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for step in range(steps):
        offset = step % 8 * tile * width
        left = tl.load(source + offset + rows[:, None] * width + columns[None, :])
        right = tl.load(source + offset + columns[:, None] * tile + rows[None, :])
        total = tl.dot(left, right, total)
    place = tl.program_id(0) * tile * tile + rows[:, None] * tile + rows[None, :]
    tl.store(target + place, total)


class Holder:
    """Runs `hold_multiprocessor` on a stream of its own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.source = torch.zeros(9 * 128 * 64, dtype=torch.bfloat16, device="cuda")
        self.target = torch.empty(HELD * 128 * 128, device="cuda")
        self.run(16)
        torch.cuda.synchronize()

    def run(self, steps: int) -> torch.cuda.Event:
        """Returns the event of its end."""
        with torch.cuda.stream(self.stream):
            hold_multiprocessor[(HELD,)](
                self.source, self.target, steps, tile=128, width=64, num_warps=8, num_stages=4
            )
            return self.stream.record_event()


@pytest.mark.parametrize(
    ("heads", "window", "contexts"),
    [
        ((32, 8, 128), 5, [16000, 9000, 300, 12000]),
        ((32, 8, 64), 5, [16000, 9000, 300, 12000]),
        ((16, 2, 256), 9, [16000, 9000, 300, 12000]),
        ((16, 2, 256), 9, [1000 + 100 * (i % 7) for i in range(24)]),
        ((32, 8, 128), 5, [700 + 9 * (i % 7) for i in range(40)]),
        ((32, 8, 128), 5, [400 + 40 * (i % 9) for i in range(140)]),
        ((16, 2, 256), 9, [400 + 40 * (i % 9) for i in range(140)]),
    ],
    ids=[
        "pieces-128",
        "pieces-64",
        "pieces-256",
        "many-256",
        "left-over-128",
        "straddling-128",
        "straddling-256",
    ],
)
@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
def test_parts_are_joined_while_another_kernel_holds_multiprocessors(
    heads: tuple[int, int, int], window: int, contexts: list[int], quantized: bool
) -> None:
    """The same bits as undisturbed, long before the other kernel ends; the workspace serves the next call."""
    from nwor import ops

    batch = Batch(heads, window, contexts, quantized)
    size = ops.verify_attention_workspace_size("cuda", *heads, window)
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
    want = batch.attend(workspace).clone()
    torch.testing.assert_close(want.double(), batch.exact(), atol=2e-2, rtol=2e-2)
    holder = Holder()
    for _ in range(3):
        batch.output.fill_(float("nan"))
        torch.cuda.synchronize()
        ended = holder.run(400_000)
        batch.attend(workspace)
        attended = torch.cuda.current_stream().record_event()
        attended.synchronize()
        assert not ended.query(), "the other kernel ended too early to be in the way"
        assert torch.equal(batch.output, want)
    torch.cuda.synchronize()
    assert torch.equal(batch.attend(workspace), want)
