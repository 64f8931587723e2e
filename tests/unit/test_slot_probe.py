"""The probe of the GPU tests finds each slot that is not what it must be; here on CPU tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from nwor.config import NworConfig
from nwor.engine.window_manager import WindowManager
from nwor.modes import Mode
from nwor.windows.window import StagedLayer, Window, group_layers
from tests.gpu import slot_probe

HEADS, SIZE, BLOCK, BLOCKS = 2, 8, 4, 8
NAMES = ["layer.0", "layer.1"]
#: Two windows and, behind them, a prompt's chunk. Of the first window's drafts one is rejected.
LENGTHS, DRAFTS = [4, 2, 3], [3, 1, 0]
STARTS = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
SLOTS = torch.tensor([[5, 6, 7, 8, 20, 21, 12, 13, 14]])
REJECTED = torch.tensor([1, 0, 0], dtype=torch.int32)


class Stock:
    """Writes a cache of vLLM's layout: blocks, heads, slots of a block, keys beside values."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: torch.Tensor) -> None:
        there = slots >= 0
        rows = torch.cat([key[: len(slots)], value[: len(slots)]], dim=-1)[there]
        cache[slots[there] // BLOCK, :, slots[there] % BLOCK] = rows


class Impl(Stock):
    """Stands for NWOR's, whose parent is vLLM's."""


class Watched:
    """Two layers, bound to a rank, with the probe around it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(3)
        config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=3))
        self.window_manager = WindowManager(
            config, NworConfig.from_mapping({"mode": "stage"}), torch.device("cpu")
        )
        self.layers: dict[str, Any] = {
            name: SimpleNamespace(impl=Impl(), kv_cache=torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE))
            for name in NAMES
        }
        self.window_manager.window = Window(group_layers([(0, self._staged(name)) for name in NAMES]))
        patch.setattr(slot_probe, "target_layers", lambda runner: self.layers)
        self.probe = slot_probe.SlotProbe()
        self.probe.model_runner = SimpleNamespace(nwor=self.window_manager)

    def _staged(self, name: str) -> StagedLayer:
        layer = self.layers[name]

        def write(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)

        views = layer.kv_cache.transpose(1, 2).split(SIZE, dim=-1)
        return StagedLayer(name, layer.kv_cache, *views, "auto", None, None, torch.float32, write)

    def step(self, mode: Mode, spoil: Any) -> dict[str, Any]:
        """Run a step in which ``spoil`` is called with the last layer's cache right after the commit."""
        window_manager, window, cache = (
            self.window_manager,
            self.window_manager.window,
            self.layers[NAMES[-1]].kv_cache,
        )
        assert window is not None
        window_manager.state.switch(mode)
        commit = window.commit

        def spoiled(rejected: torch.Tensor) -> None:
            commit(rejected)
            spoil(cache)

        window.commit = spoiled  # type: ignore[method-assign]
        self.probe.probe_start()
        plan = window_manager.plan_step(["a", "b", "p"], LENGTHS, DRAFTS)
        assert plan is not None
        window_manager.begin(plan, STARTS, SLOTS)
        for name, layer in self.layers.items():
            # In a captured graph's memory there are more rows than the step has.
            key, value = torch.randn(2, 12, HEADS, SIZE).unbind()
            tokens = 0
            if window.staging:
                tokens = plan.num_tokens
                window.stage(name, key, value)
            rows = slice(tokens, len(SLOTS[0]))
            layer.impl.do_kv_cache_update(layer, key[rows], value[rows], layer.kv_cache, SLOTS[0][rows])
        assert window_manager.finish(REJECTED) is plan
        assert window_manager.state.fault is None
        return self.probe.probe_stop()


def line(cache: torch.Tensor, slot: int) -> torch.Tensor:
    return cache[slot // BLOCK, :, slot % BLOCK]


def one_more(slot: int, by: float = 1.0) -> Any:
    def spoil(cache: torch.Tensor) -> None:
        line(cache, slot)[0, 0] += by

    return spoil


@pytest.mark.parametrize("mode", [Mode.STAGE, Mode.COW])
@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda cache: None, {}),
        # The least that float32 tells apart, in an accepted token's key; a first token; another's keys.
        (lambda cache: line(cache, 7)[0, 0].copy_(torch.nextafter(line(cache, 7)[0, 0], torch.tensor(9.0))),
         {"wrong": 1}),
        (one_more(20), {"wrong": 1}),
        (lambda cache: line(cache, 5).copy_(line(cache, 6)), {"wrong": 1}),
        # A slot that keeps the poison, a rejected token's, and one that nobody had to touch.
        (lambda cache: line(cache, 6).fill_(12345.0), {"wrong": 1, "unwritten": 1}),
        (one_more(8), {"stray": 1}),
        (one_more(30), {"stray": 1}),
    ],
    ids=["right", "last-bit", "first-token", "another-token", "unwritten", "rejected", "elsewhere"],
)  # fmt: skip
def test_the_probe_finds_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, spoil: Any, found: dict[str, int]
) -> None:
    seen = Watched(monkeypatch).step(mode, spoil)
    expected = {"steps": 1, "rejected": 1, "accepted": 3, "stray": 0, "unwritten": 0, "wrong": 0, "direct": 0}
    assert seen == expected | found
