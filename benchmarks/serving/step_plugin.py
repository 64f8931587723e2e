"""The class that vLLM loads for :mod:`benchmarks.serving.step_log`."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from benchmarks.serving.step_log import VARIABLE, StepLog


class StepLogger(StatLoggerBase):
    """Writes a line for every step that had results; does nothing where no file is named."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        path = os.environ.get(VARIABLE)
        self._log = StepLog(path) if path else None

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Keep a step's figures."""
        if self._log is not None and iteration_stats is not None and iteration_stats.num_generation_tokens:
            self._log.add(iteration_stats)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
