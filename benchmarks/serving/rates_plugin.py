"""Lets a run change vLLM's synthetic acceptance between loads, the same way in every arm.

vLLM loads it as a general plugin in each process. It adds a method to GPU workers, which vLLM's developer
API calls; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Name of the workers' method.
METHOD = "benchmark_acceptance"


def accept(worker: Any, rates: Sequence[float]) -> None:
    """Put other rates in the place of a worker's own.

    Args:
        worker: of model runner V2, started with ``rejection_sample_method`` "synthetic".
        rates: one a position, unconditional as vLLM's ``synthetic_acceptance_rates``.

    Raises:
        RuntimeError: if the worker has none.

    """
    from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

    own = getattr(
        getattr(worker.model_runner, "rejection_sampler", None), "synthetic_conditional_rates", None
    )
    if own is None or len(own) != len(rates):
        raise RuntimeError(f"the worker has no {len(rates)} synthetic rates")
    own.copy_(own.new_tensor(unconditional_to_conditional_rates(list(rates))))


def register() -> None:
    """Add the method."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        from vllm.v1.worker.gpu_worker import Worker

        setattr(Worker, METHOD, accept)
