"""Claim: a step smaller than the graph that it is replayed in is checked and finished by its own rows alone.

A captured graph leaves keys and values of as many rows as its batch size has; the rows behind the step's are
whatever the padding gave.
"""

from __future__ import annotations

import pytest
import torch

from nwor.config import NworConfig
from nwor.modes import Mode
from nwor.self_check import SelfCheck
from nwor.windows.window import StagedLayer, Window, WindowBatch, group_layers
from nwor.worker_state import WorkerState

BLOCKS, BLOCK_SIZE, HEADS, SIZE = 6, 4, 2, 8
GRAPH_ROWS, ROWS = 8, 5  # of the graph; of the step: windows of 3 and 2 tokens
DTYPE = torch.float32
SLOTS = torch.tensor([4, 5, 6, 17, 18])


def _window() -> tuple[Window, list[torch.Tensor]]:
    caches = [torch.randn(BLOCKS, HEADS, BLOCK_SIZE, 2 * SIZE) for _ in range(2)]
    layers = []
    for number, cache in enumerate(caches):
        key_cache, value_cache = cache.transpose(1, 2).split(SIZE, dim=-1)

        def write(
            key: torch.Tensor,
            value: torch.Tensor,
            slots: torch.Tensor,
            key_cache: torch.Tensor = key_cache,
            value_cache: torch.Tensor = value_cache,
        ) -> None:
            assert key.shape[0] == value.shape[0] == slots.shape[0]
            key_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = key
            value_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = value

        layers.append(
            (
                0,
                StagedLayer(
                    f"layer{number}", cache, key_cache, value_cache, "auto", None, None, DTYPE, write
                ),
            )
        )
    return Window(group_layers(layers)), caches


def _begin(window: Window) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    starts = torch.tensor([0, 3, ROWS], dtype=torch.int32)
    window.begin(WindowBatch(Mode.STAGE, 2, ROWS, starts, {0: SLOTS}))
    return {
        name: (torch.randn(GRAPH_ROWS, HEADS, SIZE), torch.randn(GRAPH_ROWS, HEADS, SIZE))
        for name in sorted(window.layer_names)
    }


def _rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache.transpose(1, 2)[slots // BLOCK_SIZE, slots % BLOCK_SIZE]


#: Places in a cache, and what they are: tokens of the first window, whose last one is rejected.
SPOILT = {"nothing": None, "accepted": (1, 1, 1, 3), "rejected": (1, 0, 2, SIZE + 1)}


@pytest.mark.parametrize("spoil", SPOILT)
def test_the_self_check_reads_the_steps_rows(spoil: str) -> None:
    window, caches = _window()
    sources = _begin(window)
    window.adopt(window.captured(sources))
    check = SelfCheck(window)
    rejected = torch.tensor([1, 0], dtype=torch.int32)
    held = dict(window.sources)
    window.commit(rejected)
    if place := SPOILT[spoil]:
        caches[1][place] += 1
    assert check.violations(held, rejected) == (spoil != "nothing")


@pytest.mark.parametrize("spoil", ["nothing", "rejected"])
def test_the_self_check_of_cow_finds_what_was_not_put_back(spoil: str) -> None:
    window, caches = _window()
    starts = torch.tensor([0, 3, ROWS], dtype=torch.int32)
    window.begin(WindowBatch(Mode.COW, 2, ROWS, starts, {0: SLOTS}))
    check = SelfCheck(window)
    for cache in caches:  # what the forward pass writes
        cache.transpose(1, 2)[SLOTS // BLOCK_SIZE, SLOTS % BLOCK_SIZE] = torch.randn(ROWS, HEADS, 2 * SIZE)
    rejected = torch.tensor([1, 0], dtype=torch.int32)
    window.commit(rejected)
    if place := SPOILT[spoil]:
        caches[0][place] += 1
    assert check.violations({}, rejected) == (spoil != "nothing")


@pytest.mark.parametrize("wrong", ["a spoilt slot", "rows that do not fit"])
def test_a_failed_check_turns_nwor_off_and_raises_nothing(wrong: str) -> None:
    window, caches = _window()
    sources = _begin(window)
    window.adopt(window.captured(sources))
    check, state = SelfCheck(window), WorkerState(NworConfig.from_mapping({"mode": "stage"}), Mode.STAGE)
    rejected = torch.tensor([1, 0], dtype=torch.int32)
    window.commit(rejected)
    if wrong == "a spoilt slot":
        caches[1][1, 1, 1, 3] += 1
    else:
        sources = {name: (key[:2], value[:2]) for name, (key, value) in sources.items()}
    check.report(state, sources, rejected)
    assert state.mode is Mode.OFF
    assert (state.fault or "").startswith("self-check: ")
    assert state.self_checks == 1


def test_finishing_directly_writes_the_steps_rows() -> None:
    window, caches = _window()
    before = [cache.clone() for cache in caches]
    sources = _begin(window)
    window.adopt(window.captured(sources))
    window.finish_direct()
    window.abort()
    for number, cache in enumerate(caches):
        key, value = sources[f"layer{number}"]
        expected = torch.cat([key, value], dim=-1)[:ROWS]
        assert torch.equal(_rows(cache, SLOTS), expected)
        others = torch.tensor([s for s in range(BLOCKS * BLOCK_SIZE) if s not in SLOTS.tolist()])
        assert torch.equal(_rows(cache, others), _rows(before[number], others))


def test_scales_that_change_are_those_of_the_next_commit() -> None:
    """Weights loaded anew bring other scales, in the tensors that the layers had."""
    caches = [torch.zeros(2, BLOCKS, BLOCK_SIZE, HEADS, SIZE, dtype=torch.uint8) for _ in range(2)]
    scales = [(torch.ones(1), torch.full((1,), 2.0)) for _ in caches]
    layers = [
        (0, StagedLayer(f"layer{n}", cache, cache[0], cache[1], "fp8", *scales[n], DTYPE, lambda *_: None))
        for n, cache in enumerate(caches)
    ]
    window = Window(group_layers(layers))
    sources = {name: (torch.ones(ROWS, HEADS, SIZE),) * 2 for name in sorted(window.layer_names)}
    starts = torch.tensor([0, 3, ROWS], dtype=torch.int32)
    window.begin(WindowBatch(Mode.STAGE, 2, ROWS, starts, {0: SLOTS}))
    for name, source in sources.items():
        window.stage(name, *source)
    commit = window.group_ops[0][1].prepared(
        window.group_ops[0][1].source_table(list(sources.values())), SLOTS, starts
    )
    for k_scale, v_scale in scales:
        k_scale.fill_(0.5)
        v_scale.fill_(4.0)
    for _, group in window.group_ops:
        group.take_scales()
    commit(torch.zeros(2, dtype=torch.int32))
    for cache in caches:
        stored = cache.view(torch.float8_e4m3fn).float()[:, SLOTS // BLOCK_SIZE, SLOTS % BLOCK_SIZE]
        assert (stored[0] == 2.0).all()
        assert (stored[1] == 0.25).all()
    window.abort()
