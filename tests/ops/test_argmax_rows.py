"""argmax_rows gives what torch.argmax gives, reads nothing outside its rows and leaves its workspace zero.

Coverage: every dtype; vocabularies that fill no vector, few, and many thread blocks; rows that begin at any
alignment; ties, infinities, both zeros, NaNs. All that surrounds a row is NaN, which would win if it were
read. Tolerance: none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nwor import ops
from tests.ops.cases import BF16, FP16, FP32, Buffer, guarded

NAN, INF = float("nan"), float("inf")
DTYPES = [BF16, FP16, FP32]


def by_hand(logits: torch.Tensor) -> list[int]:
    """The first NaN, else the first of the largest; NumPy's comparisons alone."""
    found = []
    for row in logits.float().cpu().numpy():
        nans = np.flatnonzero(np.isnan(row))
        found.append(int(nans[0] if nans.size else np.flatnonzero(row == row.max())[0]))
    return found


@dataclass
class Call:
    """Rows of logits inside a tensor of NaNs, and what a call writes to, each between guards."""

    logits: torch.Tensor
    around: torch.Tensor
    output: Buffer
    workspace: Buffer

    def run(self) -> list[int]:
        """Call the op and return its indices; nothing but them may have changed."""
        before = self.around.clone()
        ops.argmax_rows(self.logits, self.output.view, self.workspace.view)
        assert torch.equal(self.around.view(torch.uint8), before.view(torch.uint8))
        assert not self.workspace.view.any()
        assert self.output.margins_untouched()
        assert self.workspace.margins_untouched()
        indices: list[int] = self.output.view.tolist()
        return indices


def make_call(values: torch.Tensor, device: torch.device, *, offset: int = 0, padding: int = 0) -> Call:
    """Put rows at `offset` elements from an aligned address, with `padding` elements between them."""
    rows, vocab = values.shape
    stride = vocab + padding
    around = torch.full((offset + rows * stride + 16,), NAN, dtype=values.dtype, device=device)
    logits = around.as_strided((rows, vocab), (stride, 1), offset)
    logits.copy_(values)
    output = guarded((rows,), torch.int64, device)
    workspace = guarded((2 * rows + 2,), torch.int64, device)
    workspace.view.zero_()
    return Call(logits, around, output, workspace)


def check(values: torch.Tensor, device: torch.device, *, offset: int = 0, padding: int = 0) -> None:
    call = make_call(values, device, offset=offset, padding=padding)
    want = by_hand(values)
    assert torch.argmax(call.logits, dim=-1).tolist() == want
    for _ in range(2):  # the second call finds the first one's workspace
        call.output.view.fill_(-7)
        assert call.run() == want


def numbers(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator).mul_(4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 15, 63, 2047, 2048, 2049, 32000, 32001, 128256])
@pytest.mark.parametrize("rows", [0, 1, 3, 16])
def test_equals_torch(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    values = numbers(rows, vocab, dtype)
    check(values, device)
    check(values, device, offset=3, padding=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("vocab", [3, 20, 5000])
def test_every_alignment_and_every_place(
    vocab: int, offset: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The largest stands at each end of a row, and next to where heads, pieces and tails may meet."""
    places = sorted({place for place in (*range(18), *range(vocab - 18, vocab)) if 0 <= place < vocab})
    values = numbers(len(places), vocab, dtype).clamp_(max=3)
    for row, place in enumerate(places):
        values[row, place] = 9
    call = make_call(values, device, offset=offset, padding=1)
    assert call.run() == places


SPECIAL = {
    "all equal": ([1.0] * 6, 0),
    "ties": ([0.0, 5.0, 5.0, -1.0, 5.0], 1),
    "negative zero first": ([-1.0, -0.0, 0.0], 1),
    "positive zero first": ([-1.0, 0.0, -0.0], 1),
    "all -inf": ([-INF] * 5, 0),
    "-inf and one number": ([-INF, -INF, -3e4, -INF], 2),
    "inf": ([1.0, INF, 2.0, INF], 1),
    "NaN before inf": ([1.0, NAN, INF, NAN], 1),
    "NaN after inf": ([INF, 1.0, NAN, NAN], 2),
    "all NaN": ([NAN] * 4, 0),
    "NaN and -inf": ([-INF, -INF, NAN], 2),
    "all negative": ([-5.0, -2.0, -3.0, -2.0], 1),
    "tiny": ([0.0, 6e-8, 0.0], 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("apart", [1, 8, 100, 4096])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name: str, apart: int, dtype: torch.dtype, device: torch.device) -> None:
    """Each stands alone, and `apart` elements from the next, with copies of the first (and lowest) between.

    What decides then lies in other pieces, warps or thread blocks than what it beats.
    """
    few, index = SPECIAL[name]
    row = torch.tensor(few).repeat_interleave(apart)
    if apart > 1:
        lowest = min((x for x in few if x == x), default=NAN)
        filled = torch.full_like(row, lowest)
        filled[::apart] = torch.tensor(few)
        row = filled
        index = by_hand(row[None].to(dtype))[0]
        assert index == SPECIAL[name][1] * apart
    check(row[None].repeat(2, 1).to(dtype), device, offset=1)


def test_negative_nans_are_nans(device: torch.device) -> None:
    bits = torch.tensor([0x3F80, 0xFFC1, 0x7FC0, 0x7F80], dtype=torch.int32).to(torch.int16)
    check(bits.view(BF16)[None], device)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_one_workspace_serves_calls_of_any_size(rows: int, device: torch.device) -> None:
    """Later rows hold smaller numbers: what an earlier call had left behind would win."""
    workspace = ops.make_argmax_workspace(rows, device)
    for turn, count in enumerate([rows, 1, rows, (rows + 1) // 2]):
        values = (numbers(count, 9000, BF16, turn) - 30.0 * turn).to(device)
        output = torch.empty(count, dtype=torch.int64, device=device)
        ops.argmax_rows(values, output, workspace)
        assert output.tolist() == by_hand(values)
        assert not workspace.any()


def test_rows_may_be_slices_of_a_padded_vocabulary(device: torch.device) -> None:
    padded = torch.full((4, 1000), NAN, dtype=BF16, device=device)
    padded[:, 1:994] = numbers(4, 993, BF16)
    output = torch.empty(2, dtype=torch.int64, device=device)
    for rows in (padded[1:3, 1:994], padded[::2, 1:994]):
        ops.argmax_rows(rows, output, ops.make_argmax_workspace(2, device))
        assert output.tolist() == by_hand(rows)


def test_rows_may_be_the_same(device: torch.device) -> None:
    row = numbers(1, 5000, FP32).to(device)
    output = torch.empty(3, dtype=torch.int64, device=device)
    ops.argmax_rows(row.expand(3, -1), output, ops.make_argmax_workspace(3, device))
    assert output.tolist() == by_hand(row) * 3


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 5),
    vocab=st.one_of(st.integers(1, 100), st.integers(1, 40000)),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 20),
    padding=st.integers(0, 20),
    distinct=st.sampled_from([1, 2, 3, 50, 10000]),
    special=st.sampled_from([0.0, 0.001, 0.3]),
    seed=st.integers(0, 1000),
)
def test_random_shapes(
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    offset: int,
    padding: int,
    distinct: int,
    special: float,
    seed: int,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-distinct, distinct, (rows, vocab), generator=generator) / 7
    choice = torch.tensor([NAN, INF, -INF, -0.0])[torch.randint(4, (rows, vocab), generator=generator)]
    values = torch.where(torch.rand(rows, vocab, generator=generator) < special, choice, values)
    check(values.to(dtype), device, offset=offset, padding=padding)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 2_000_003), (80, 128256), (320, 32000), (2000, 777), (70000, 5)]
)
def test_many_rows_and_long_rows_on_cuda(rows: int, vocab: int, dtype: torch.dtype) -> None:
    values = torch.randn(rows, vocab, device="cuda").mul_(4).to(dtype)  # with many ties in 16 bits
    output = torch.empty(rows, dtype=torch.int64, device="cuda")
    workspace = ops.make_argmax_workspace(rows, "cuda")
    for _ in range(20):
        ops.argmax_rows(values, output.fill_(-7), workspace)
        assert torch.equal(output, values.argmax(dim=-1))
    assert not workspace.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_replays_of_a_graph_share_a_workspace() -> None:
    logits = torch.zeros(6, 50001, dtype=BF16, device="cuda")
    outputs = [torch.empty(rows, dtype=torch.int64, device="cuda") for rows in (6, 2, 5)]
    workspace = ops.make_argmax_workspace(6, "cuda")

    def calls() -> None:
        for output in outputs:
            ops.argmax_rows(logits[: len(output)], output, workspace)

    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for turn in range(30):
        logits.copy_(numbers(6, 50001, BF16, turn) - 10.0 * turn)
        graph.replay()
        want = by_hand(logits)
        for output in outputs:
            assert output.tolist() == want[: len(output)]
    assert not workspace.any()
