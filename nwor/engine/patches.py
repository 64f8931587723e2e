"""The changes to vLLM that are made at the start, before an engine exists; the ledger has them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from nwor.config import NworConfig
from nwor.engine.trees.requirements import settle as settle_trees

#: What an engine that asked for NWOR is scheduled by, where its configuration names nothing else.
SCHEDULER = "nwor.engine.scheduler.create_scheduler"

#: Stock worker classes and what takes their place.
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "nwor.engine.worker_cpu.NworCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "nwor.engine.worker_gpu.NworGPUWorker",
}

_MARK = "_nwor_patched"


def choose_worker(vllm_config: Any) -> None:
    """Exchange the stock worker class of a configuration that asks for NWOR, and name its scheduler.

    Raises:
        ConfigError: if the NWOR settings are not valid, or the engine cannot have what they ask for.

    """
    config = NworConfig.from_additional_config(vllm_config.additional_config)
    if config is None:
        return
    if config.tree is not None:
        settle_trees(vllm_config, config)
    parallel_config = vllm_config.parallel_config
    if parallel_config.worker_cls in WORKERS:
        parallel_config.worker_cls = WORKERS[parallel_config.worker_cls]
        if vllm_config.scheduler_config.scheduler_cls is None:
            vllm_config.scheduler_config.scheduler_cls = SCHEDULER


def apply_config_patch() -> None:
    """Apply the first entry of the ledger, once a process."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config
    if getattr(original, _MARK, False):
        return

    @wraps(original)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(vllm_config)
        choose_worker(vllm_config)
        if NworConfig.from_additional_config(vllm_config.additional_config) is not None:
            # A configuration is made before the client that decodes what its engine sends.
            apply_decoder_patch()

    setattr(check_and_update_config, _MARK, True)
    platform.check_and_update_config = classmethod(check_and_update_config)


def apply_decoder_patch() -> None:
    """Apply the last two entries of the ledger, in a process that will hold an engine's client."""
    from nwor.engine.stats import figures

    figures.apply_decoder_patch()


@contextmanager
def cpu_runner_patch() -> Iterator[None]:
    """Apply the second entry of the ledger within this block, and mend the class that the new one builds on.

    Workers name their runner's class when they start. One of stock vLLM that starts in the same process later
    gets the stock class.
    """
    import vllm.v1.worker.cpu_worker as cpu_worker

    from nwor.engine.model_runner.v1_cpu import NworCPUModelRunnerV1
    from nwor.engine.workarounds import cpu_generators

    cpu_generators.mend()
    stock = cpu_worker.CPUModelRunner
    cpu_worker.CPUModelRunner = NworCPUModelRunnerV1
    try:
        yield
    finally:
        cpu_worker.CPUModelRunner = stock


@contextmanager
def cpu_runner_v2_patch() -> Iterator[None]:
    """Apply the third entry of the ledger within this block; likewise."""
    import vllm.v1.worker.cpu.model_runner as model_runner

    from nwor.engine.model_runner.v2_cpu import NworCPUModelRunnerV2

    stock = model_runner.CPUModelRunner
    model_runner.CPUModelRunner = NworCPUModelRunnerV2
    try:
        yield
    finally:
        model_runner.CPUModelRunner = stock
