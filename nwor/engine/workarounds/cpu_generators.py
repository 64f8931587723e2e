"""Seeded requests on a CPU: a fault of vLLM 0.32.0 mended, for NWOR's runner and for the stock one alike.

For a seeded request whose prompt takes several steps, vLLM turns the generator back by an offset, which CPU
generators do not have: the engine dies, and any client can bring that about. Here the generator's state is
put back after sampling, and the generator is hidden while vLLM would turn it back.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import torch

_MARK = "_nwor_mended"


def unfinished_generators(runner: Any) -> dict[int, torch.Generator]:
    """Return the generators of seeded requests whose prompt is unfinished, by their row in the batch."""
    if not runner.input_batch.generators:
        return {}
    rows = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
    generators = runner.input_batch.generators
    return {int(row): generators[int(row)] for row in rows if int(row) in generators}


def mend_runner(runner_class: Any) -> None:
    """Exchange the two methods of a model runner's class, once; its subclasses have them too."""
    sample, bookkeeping = runner_class._sample, runner_class._bookkeeping_sync
    if getattr(sample, _MARK, False):
        return

    @wraps(sample)
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in unfinished_generators(self).values()]
        output = sample(self, *args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    @wraps(bookkeeping)
    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = unfinished_generators(self)
        for row in hidden:
            del self.input_batch.generators[row]
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)

    setattr(_sample, _MARK, True)
    runner_class._sample = _sample
    runner_class._bookkeeping_sync = _bookkeeping_sync


def mend() -> None:
    """Mend the stock class of model runner V1 on a CPU, in this process."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    mend_runner(CPUModelRunner)
