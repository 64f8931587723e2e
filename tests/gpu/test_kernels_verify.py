"""Claims about verify_attention that need a GPU: its error beside FlashAttention's, and CUDA graphs.

Coverage: the benchmark's head configurations; contexts for one thread block, a cluster, several workers;
bf16 throughout, and quantized queries (e4m3) beside fp8 caches, each with scales.
Tolerance: 1.5 times FlashAttention 3's own error against float64 on the same inputs.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.verify_batch import Batch, raw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HEADS = [(32, 8, 128), (32, 8, 64), (64, 8, 128), (16, 2, 256)]
each_head_configuration = pytest.mark.parametrize("heads", HEADS, ids=lambda h: "/".join(map(str, h)))
each_format = pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])


#: By what they have thread blocks do: more than one unit each, of lengths that differ, one of which is cut;
#: or one unit and a part of another; or, of 16 requests with 8 KV heads, about as many units as there are
#: multiprocessors.
MANY = {
    "even": [700 + 11 * (i % 5) for i in range(16)],
    "many": [300] * 70,
    "uneven": [9000, *(100 + 37 * (i % 23) for i in range(69))],
    "between": [700 + 9 * (i % 7) for i in range(40)],
}


@each_format
@each_head_configuration
@pytest.mark.parametrize("window", [2, 5, 9])
@pytest.mark.parametrize(
    "contexts",
    [[40], [600, 17, 0, 1200], [20000], *MANY.values()],
    ids=["short", "mixed", "long", *MANY],
)
def test_error_beside_flash_attention(
    heads: tuple[int, int, int],
    window: int,
    contexts: list[int],
    quantized: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    batch = Batch(heads, window, contexts, quantized)
    want = batch.exact()
    own = (batch.attend().double() - want).norm() / want.norm()
    stock = (batch.stock().double() - want).norm() / want.norm()
    with capsys.disabled():
        print(f" error {own:.3e}, FlashAttention 3 {stock:.3e}, ratio {own / stock:.3f}")
    assert own <= 1.5 * stock


@pytest.mark.parametrize("window", [1, 3, 4, 6, 7, 10, 12, 16])
@each_format
@each_head_configuration
def test_every_kernel_keeps_to_the_workspace(
    heads: tuple[int, int, int], window: int, quantized: bool
) -> None:
    """Of all numbers of query rows between those that kernels are made for; partial results included."""
    from nwor import ops

    batch = Batch(heads, window, [3000, 700, 40, 9000], quantized)
    size = ops.verify_attention_workspace_size("cuda", *heads, window)
    memory = torch.zeros(size + (8 << 20), dtype=torch.uint8, device="cuda")
    memory[size:] = 0xAB
    own = batch.attend(workspace=memory[:size])
    assert (memory[size:] == 0xAB).all()
    torch.testing.assert_close(own.double(), batch.exact(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("contexts", [[40], [600, 17, 0, 1200], [20000], *MANY.values(), [50] * 200])
@each_format
@each_head_configuration
def test_a_plan_changes_nothing(heads: tuple[int, int, int], contexts: list[int], quantized: bool) -> None:
    """Neither the one of these lengths nor, as it is not taken, one that was made for other launches."""
    from nwor import ops

    batch = Batch(heads, 5, contexts, quantized)
    want = batch.attend()
    plan = ops.make_verify_plan("cuda")
    assert plan is not None
    assert torch.equal(batch.attend(plan=plan), want)  # an empty one
    for changes in (
        {"num_kv_heads": heads[1] // 2},
        {"sliding_window": 30},
        {"max_query_len": 64},
        {"kv_cache_dtype": "fp8", "quantized_query": not quantized},
        {"source_dtype": torch.float16},  # the same launches: this one is taken
        {},
    ):
        batch.write_plan(plan, **changes)
        batch.output.fill_(float("nan"))
        assert torch.equal(batch.attend(plan=plan), want), changes
    # And it is what decides: a plan in which nobody has anything to do leaves the output alone.
    # There is room for four entries a multiprocessor; an entry's last words are "there is work" and its key.
    entries = plan.view(torch.int32).view(4 * torch.cuda.get_device_properties(0).multi_processor_count, -1)
    assert entries[:, -2].any()
    assert set(entries[:, -2].tolist()) <= {0, 1}
    entries[:, -2] = 0
    batch.output.fill_(float("nan"))
    assert batch.attend(plan=plan).isnan().all()


def _captured(
    batch: Batch, workspace: torch.Tensor, planned: bool
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor | None]:
    """Return a graph that attends, and the plan that it writes before; it has to live as long."""
    from nwor import ops

    batch.attend(workspace)
    plan = ops.make_verify_plan("cuda") if planned else None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if plan is not None:
            batch.write_plan(plan)
        batch.attend(workspace, plan)
    return graph, plan


@pytest.mark.parametrize("planned", [False, True], ids=["alone", "planned"])
@each_format
@each_head_configuration
def test_a_graph_captured_at_full_length_serves_any_batch(
    heads: tuple[int, int, int], planned: bool, quantized: bool
) -> None:
    """Lengths are read on the device: a replay follows them, empty windows and padded requests included."""
    from nwor import ops

    batch = Batch(heads, 5, [4000, 3000, 4000, 4000], quantized)
    size = ops.verify_attention_workspace_size("cuda", *heads, 5)
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
    graph, _plan = _captured(batch, workspace, planned)
    for contexts in ([4000, 3000, 4000, 4000], [7, 0, 900, 33], [0, 0, 0, 3999]):
        batch.contexts = contexts
        batch.lengths.copy_(torch.tensor([c + 5 for c in contexts], dtype=torch.int32))
        batch.output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(batch.output.double(), batch.exact(), atol=2e-2, rtol=2e-2)
        first = batch.output.clone()
        batch.attend(workspace)
        assert torch.equal(first, batch.output)
    # The last two requests are padding: their windows are empty.
    batch.starts.copy_(torch.tensor([0, 5, 10, 10, 10], dtype=torch.int32))
    batch.lengths.copy_(torch.tensor([105, 205, 0, 1], dtype=torch.int32))
    batch.output.fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    batch.contexts = [100, 200, 0, 0]
    torch.testing.assert_close(batch.output[:10].double(), batch.exact()[:10], atol=2e-2, rtol=2e-2)
    assert (batch.output[10:] == 7.0).all()


@pytest.mark.parametrize("planned", [False, True], ids=["alone", "planned"])
@each_format
@each_head_configuration
def test_a_graph_for_many_requests_serves_few(
    heads: tuple[int, int, int], planned: bool, quantized: bool
) -> None:
    """The requests behind the last window count for nothing, wherever those with a window end."""
    from nwor import ops

    requests, window = 300, 2
    contexts = [(37 * place) % 190 for place in range(requests)]
    batch = Batch(heads, window, contexts, quantized)
    want = batch.exact()
    size = ops.verify_attention_workspace_size("cuda", *heads, window)
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
    starts = batch.starts.clone()
    graph, _plan = _captured(batch, workspace, planned)
    for there in (0, 1, 5, 31, 100, 127, 128, 129, 257, requests):
        batch.starts.copy_(starts.clamp(max=there * window))
        batch.output.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        own, rest = batch.output[: there * window], batch.output[there * window :]
        torch.testing.assert_close(own.double(), want[: there * window], atol=2e-2, rtol=2e-2)
        assert (rest == 7.0).all()
    # Requests without a window stand among the others, too.
    kept = [place for place in range(requests) if place % 3]
    lengths = torch.tensor([window * (place % 3 > 0) for place in range(requests)], device="cuda")
    batch.starts[1:] = lengths.cumsum(0)
    rows = [window * place + row for place in kept for row in range(window)]
    for own in (batch.query, batch.key, batch.value):
        raw(own)[: len(rows)] = raw(own)[rows].clone()
    batch.output.fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(batch.output[: len(rows)].double(), want[rows], atol=2e-2, rtol=2e-2)
    assert (batch.output[len(rows) :] == 7.0).all()
