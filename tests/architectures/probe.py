"""Mixed into the worker of a tiny model's engine: looks at its layers, and breaks its commits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from server import cpu_sampling  # its import mends sampling in the worker's process, as the server does

assert cpu_sampling.KERNEL


class Probe:
    """Named in vLLM's ``worker_extension_cls``."""

    model_runner: Any

    def layers(self) -> dict[str, Any]:
        """Return how many layers are staged, in how many groups, over how many KV-cache groups."""
        groups = len(self.model_runner.kv_cache_config.kv_cache_groups)
        window = self.model_runner.nwor.window
        if window is None:
            return {"staged": 0, "shapes": 0, "caches": groups}
        return {"staged": len(window.layer_names), "shapes": len(window.groups), "caches": groups}

    def write_nothing(self) -> None:
        """Have each commit write nothing from now on, and nobody look."""
        state = self.model_runner.nwor.state
        state.config = replace(state.config, self_check_interval=0)
        for _, group_ops in self.model_runner.nwor.window.group_ops:
            group_ops.prepared = lambda *args: lambda rejected: None
