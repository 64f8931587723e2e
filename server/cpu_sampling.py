"""Faults of sampling and of adapters on a CPU, mended in the worker's process; the ledger has them all.

Parameters of verify steps: :mod:`nwor.engine.workarounds.cpu_expand`.

A step without drafts goes through the rejection sampler with tensors of no rows, of which the mask of
``top_k`` alone takes the largest: the engine dies. And ``min_tokens`` looks at a window's last row with the
length before the window. Both are mended as in NWOR's runner: :mod:`nwor.engine.request_isolation.v1`.
Adapters: :mod:`nwor.engine.workarounds.adapters`. Seeded requests:
:mod:`nwor.engine.workarounds.cpu_generators`. Sampled draft tokens:
:mod:`nwor.engine.workarounds.sampled_drafts`.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from nwor.engine.request_isolation.v1 import minimum_of_last_rows, without_empty_windows
from nwor.engine.workarounds import cpu_expand, cpu_generators, sampled_drafts
from nwor.engine.workarounds.adapters import mend_cpu_operators, mend_drafter
from nwor.engine.workarounds.cpu_expand import KERNEL, expand

__all__ = ["KERNEL", "WorkerExtension", "expand", "mend_windows", "register"]

_MARK = "_nwor_windows_mended"


def mend_windows(runner_class: Any) -> None:
    """Exchange two methods of a model runner's class, once: sampling of its windows, and its drafter."""
    sample, load = runner_class._sample, runner_class.load_model
    if getattr(load, _MARK, False):
        return

    @wraps(sample)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        metadata = without_empty_windows(spec_decode_metadata)
        if metadata is None:
            return sample(self, logits, None)
        with minimum_of_last_rows(self.input_batch.logitsprocs, metadata.num_draft_tokens):
            return sample(self, logits, metadata)

    @wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        mend_drafter(self)

    setattr(load_model, _MARK, True)
    runner_class._sample, runner_class.load_model = _sample, load_model


def register() -> None:
    """Apply all, in this process."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    cpu_expand.mend()
    cpu_generators.mend()
    sampled_drafts.mend()
    mend_windows(CPUModelRunner)
    mend_cpu_operators()


class WorkerExtension:
    """Named in vLLM's ``worker_extension_cls``: importing it is what reaches the worker's process."""


register()
