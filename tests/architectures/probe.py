"""Mixed into the worker of a tiny model's engine: looks at its layers, and breaks its commits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from server import cpu_sampling  # its import mends sampling in the worker's process, as the server does

    assert cpu_sampling.KERNEL


class Probe:
    """Named in vLLM's ``worker_extension_cls``."""

    model_runner: Any
    use_v2_model_runner: bool

    def layers(self) -> dict[str, Any]:
        """Return how many layers are staged, in how many groups, over how many KV-cache groups."""
        groups = len(self.model_runner.kv_cache_config.kv_cache_groups)
        window = self.model_runner.nwor.window
        if window is None:
            return {"staged": 0, "shapes": 0, "caches": groups}
        return {"staged": len(window.layer_names), "shapes": len(window.groups), "caches": groups}

    def about(self) -> dict[str, str]:
        """Return the model runner and the device."""
        version = "V2" if self.use_v2_model_runner else "V1"
        on_gpu = current_platform.is_cuda()
        return {"runner": version, "device": current_platform.get_device_name() if on_gpu else "CPU"}

    def count_replays(self) -> None:
        """Count from now on the verify steps that replay a graph of NWOR's, by kind."""
        self._replays = {"stage": 0, "mixed": 0}
        runner = self.model_runner
        if self.use_v2_model_runner:
            stage, mixed = (getattr(runner.cudagraph_manager, name, None) for name in ("stage", "mixed"))
        else:
            stage, mixed = getattr(getattr(runner, "_nwor_graphs", None), "stage", None), None
        if stage is not None:
            take = stage.take
            stage.take = lambda name: self._count("stage", take(name))
        if mixed is not None:
            prepare = mixed.prepare
            mixed.prepare = lambda desc: self._count("mixed", prepare(desc))

    def _count(self, kind: str, result: Any) -> Any:
        window = self.model_runner.nwor.window
        self._replays[kind] += result is not False and window is not None and window.staging
        return result

    def replays(self) -> dict[str, int]:
        """Return what was counted."""
        return self._replays

    def write_nothing(self) -> None:
        """Have each commit write nothing from now on, and nobody look."""
        state = self.model_runner.nwor.state
        state.config = replace(state.config, self_check_interval=0)
        for _, group_ops in self.model_runner.nwor.window.group_ops:
            group_ops.prepared = lambda *args: lambda rejected: None
