"""vLLM's model runner V1 on the CPU with windows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from nwor.engine.attention_cpu import NworCPUAttentionBackend, layer_cache_views
from nwor.engine.runner_v1 import NworRunnerV1


class NworCPUModelRunnerV1(NworRunnerV1, CPUModelRunner):  # type: ignore[misc]
    """The CPU runner with windows; no device to wait for, so counts are read at once."""

    nwor_backend = NworCPUAttentionBackend
    nwor_cache_views = staticmethod(layer_cache_views)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        generators = self._nwor_unfinished_generators()
        states = {index: generator.get_state() for index, generator in generators.items()}
        output = super()._sample(*args, **kwargs)
        for index, generator in generators.items():
            generator.set_state(states[index])
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        with self._nwor_without_unfinished_generators():
            return super()._bookkeeping_sync(*args, **kwargs)

    def _nwor_unfinished_generators(self) -> dict[int, torch.Generator]:
        """Return the generators of seeded requests whose sample is dropped, their prompt being unfinished."""
        requests = self.input_batch.num_reqs
        unfinished = np.nonzero(self.discard_request_mask.np[:requests])[0]
        generators = self.input_batch.generators
        return {int(index): generators[int(index)] for index in unfinished if int(index) in generators}

    @contextmanager
    def _nwor_without_unfinished_generators(self) -> Iterator[None]:
        """Hide them: vLLM would turn them back by an offset, which CPU generators do not have, and die of it.

        Their state was put back after sampling instead.
        """
        hidden = self._nwor_unfinished_generators()
        for index in hidden:
            del self.input_batch.generators[index]
        try:
            yield
        finally:
            self.input_batch.generators.update(hidden)
