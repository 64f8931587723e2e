"""Engines whose ranks are processes of their own, with the scheduler in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from server import demo
from tests.gpu import entry_points


@contextmanager
def started(
    folder: Path,
    *,
    drafts: int,
    self_check_interval: int,
    tree: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Any]:
    """Start the demo model in bfloat16 in mode ``off``, and end it with the block.

    Args:
        folder: an empty folder of the test.
        drafts: draft tokens a step.
        self_check_interval: as the setting.
        tree: as the setting.
        settings: further arguments of ``LLM``.

    """
    with pytest.MonkeyPatch.context() as patch:
        entry_points.provide(folder, patch)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the scheduler runs here, the workers do not
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        import vllm.envs
        import vllm.plugins
        from vllm import LLM

        # Another engine of this process may have read both before.
        vllm.envs.disable_envs_cache()
        patch.setattr(vllm.plugins, "plugins_loaded", False)
        llm = LLM(
            str(demo.model_path()),
            dtype="bfloat16",
            distributed_executor_backend="mp",
            speculative_config={
                "model": str(demo.draft_path()),
                "method": demo.draft_method(),
                "num_speculative_tokens": drafts,
            },
            additional_config={
                "nwor": {"mode": "off", "self_check_interval": self_check_interval, "tree": tree}
            },
            disable_log_stats=False,
            **settings,
        )
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def prompts(count: int) -> list[str]:
    """Return beginnings of code for the demo model, of three lengths."""
    bodies = ["return a + b", "for i in range(10):\n        total += i", "raise ValueError(message)", "x = {"]
    return [
        f"class Item{i % 9}:\n    def method_{i}(self, a, b):\n        " + bodies[i % 4] * (1 + i % 3)
        for i in range(count)
    ]
