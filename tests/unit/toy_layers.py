"""Layers with real caches for tests of windows: each writes what it is told to, or stages it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from nwor.config import NworConfig
from nwor.engine.window_manager import WindowManager
from nwor.windows.window import StagedLayer, Window, group_layers

HEADS, SIZE, BLOCK, BLOCKS = 2, 8, 4, 8


class ToyLayers:
    """A few attention layers of a target model, bound to a rank.

    Attributes:
        window_manager: in mode ``stage``, windows of up to ``longest`` tokens.
        names: of the layers.
        made: the keys of the latest pass by layer; its values are their negatives.

    """

    def __init__(self, layers: int = 3, longest: int = 4) -> None:
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=longest - 1),
            scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=4096),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        )
        self.window_manager = WindowManager(
            config, NworConfig.from_mapping({"mode": "stage"}), torch.device("cpu")
        )
        self.names = [f"layer.{index}" for index in range(layers)]
        self.caches = {name: torch.zeros(BLOCKS, BLOCK, 2, HEADS, SIZE) for name in self.names}
        self.window = Window(group_layers([(0, self._layer(name)) for name in self.names]))
        self.window_manager.window = self.window
        self.window_manager.state.token_bytes = 10
        self.made: dict[str, torch.Tensor] = {}

    def _layer(self, name: str) -> StagedLayer:
        cache = self.caches[name]

        def direct_write(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
            there = slots >= 0
            cache[slots[there] // BLOCK, slots[there] % BLOCK, 0] = key[there]
            cache[slots[there] // BLOCK, slots[there] % BLOCK, 1] = value[there]

        views = cache[:, :, 0], cache[:, :, 1]
        return StagedLayer(name, cache, *views, "auto", None, None, torch.float32, direct_write)

    def forward(self, slots: torch.Tensor) -> torch.Tensor:
        """Run one pass of as many rows as there are slots, as the attention backends do."""
        for layer in self.window.groups[0].layers:
            key = self.made[layer.name] = torch.randn(len(slots), HEADS, SIZE)
            tokens = 0
            if self.window.staging:
                assert self.window.batch is not None
                tokens = self.window.batch.num_tokens
                self.window.stage(layer.name, key[:tokens], -key[:tokens])
            layer.direct_write(key[tokens:], -key[tokens:], slots[tokens:])
        return torch.zeros(len(slots))

    def forward_split(self) -> torch.Tensor:
        """Run one pass of a mixed step's graph: of its rows each layer writes those that have a slot."""
        split = self.window.split
        for layer in self.window.groups[0].layers:
            key = self.made[layer.name] = torch.randn(split.num_tokens, HEADS, SIZE)
            split.fork()
            split.keep(layer.name, key, -key)
            if split.windows_only:
                continue
            layer.direct_write(key, -key, split.slots[layer.name])
            split.join()
        return torch.zeros(split.num_tokens)

    def written(self, slots: torch.Tensor) -> list[int]:
        """Return the rows of the latest pass that stand in the cache, the same in all layers."""
        found = []
        for name in self.names:
            lines = self.caches[name].flatten(0, 1)[slots]
            found.append(
                [row for row in range(len(slots)) if torch.equal(lines[row, 0], self.made[name][row])]
            )
            assert all(torch.equal(lines[row, 1], -lines[row, 0]) for row in found[-1])
        assert all(rows == found[0] for rows in found)
        return found[0]
