"""Every change to vLLM's own objects, with its ledger. Anything that a seam can do is not done here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any

from nwor.config import NworConfig


@dataclass(frozen=True)
class Patch:
    """One entry of the ledger.

    Attributes:
        target: dotted path of what is replaced.
        why: what cannot be had otherwise.
        how: what the replacement does.
        removal: when the patch can go.

    """

    target: str
    why: str
    how: str
    removal: str


LEDGER = (
    Patch(
        target="vllm.platforms.current_platform.check_and_update_config",
        why="plain `vllm serve` has to get the NWOR worker from its additional_config alone",
        how="calls the original; where NWOR is asked for, exchanges the stock worker class and names the "
        "scheduler that gathers figures, if none is named",
        removal="when vLLM lets a general plugin see or change a VllmConfig before workers start",
    ),
    Patch(
        target="vllm.v1.worker.cpu_worker.CPUModelRunner",
        why="CPUWorker.init_device names the runner class itself and does not call _make_model_runner",
        how="names the NWOR subclass instead, in the worker process of an engine that asked for NWOR",
        removal="when CPUWorker builds its runner through _make_model_runner as the GPU worker does",
    ),
    Patch(
        target="vllm.v1.worker.cpu.model_runner.CPUModelRunner",
        why="CPUWorker.init_device names runner V2, too, which it takes where Triton knows the CPU",
        how="names the NWOR subclass instead, in the worker process of an engine that asked for NWOR",
        removal="with the entry before",
    ),
    Patch(
        target="vllm.v1.engine.EngineCoreOutput",
        why="a request's windows have to reach the front end beside its acceptance figures",
        how="annotates spec_decode_metrics with a subclass of two more fields, which the decoder then fills",
        removal="when vLLM carries a plugin's own figures of a request",
    ),
    Patch(
        target="vllm.v1.engine.EngineCoreOutputs",
        why="the engine's counters have to reach the front end that serves /metrics",
        how="annotates scheduler_stats with a subclass of one more field, which the decoder then fills",
        removal="when vLLM carries a plugin's own scheduler statistics",
    ),
)

#: What `lean_host` and `lean_sampling` exchange in the worker process of an engine that asked for NWOR; see
#: the modules named.
LEAN_LEDGER = (
    Patch(
        target="vllm.v1.worker.gpu.model_runner.async_tensor_h2d",
        why="two inputs that seldom change are sent to the GPU in each step",
        how="nwor.engine.lean_inputs: sends again what has changed",
        removal="when model runner V2 keeps them on the device",
    ),
    Patch(
        target="vllm.v1.worker.gpu.input_batch._post_update_kernel",
        why="Triton works the way from arguments to compiled kernel anew in each launch",
        how="nwor.engine.lean_launches: gives this and each other Triton kernel of vllm.v1.worker.gpu a "
        "`run` of its own, on the kernel object alone, that remembers the way",
        removal="when Triton's launches cost no more",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.sample_draft",
        why="the drafter's argmax leaves most of the GPU idle with few rows, and no seam lies before it",
        how="nwor.engine.lean_sampling: on the speculator alone, takes nwor.argmax_rows for it and leaves "
        "other ways to draft to the original; only where the original's source is the known one",
        removal="when vLLM's argmax of a few rows of logits fills the GPU",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler._verify",
        why="greedy batches pass through kernels made for random ones, and no seam lies before them",
        how="nwor.engine.lean_sampling: on the sampler alone, and for greedy batches alone, takes "
        "nwor.argmax_rows and one small kernel; only where what it stands for has the known sources",
        removal="when vLLM has a way of its own for greedy batches",
    ),
)

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
        ConfigError: if the NWOR settings are not valid.

    """
    if NworConfig.from_additional_config(vllm_config.additional_config) is None:
        return
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
    from nwor.engine import figures

    figures.apply_decoder_patch()


def apply_cpu_runner_patch() -> None:
    """Apply the second entry of the ledger, once a process."""
    import vllm.v1.worker.cpu_worker as cpu_worker

    from nwor.engine.runner_v1_cpu import NworCPUModelRunnerV1

    cpu_worker.CPUModelRunner = NworCPUModelRunnerV1


def apply_cpu_runner_v2_patch() -> None:
    """Apply the third entry of the ledger, once a process."""
    import vllm.v1.worker.cpu.model_runner as model_runner

    from nwor.engine.runner_v2_cpu import NworCPUModelRunnerV2

    model_runner.CPUModelRunner = NworCPUModelRunnerV2
