"""What differs between a CPU and a GPU in running the models: settings, imports, how many engines at once."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.architectures import weights
from tests.architectures.cases import Case
from tests.engine import runner

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # As many engines run as there are processors, and models are tiny.
    "OMP_NUM_THREADS": "1",
    # Compiling what finds n-grams takes longer than all that it finds here.
    "NUMBA_DISABLE_JIT": "1",
    # As many as Numba has it gives OpenMP, and so every kernel of the process.
    "NUMBA_NUM_THREADS": "1",
}
#: What every engine needs, imported once for all. Not Numba, beside which vLLM starts no engine.
IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
)
SETTINGS: dict[str, Any] = {
    "load_format": weights.FORMAT,
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "worker_extension_cls": "tests.architectures.probe.Probe",
    "disable_log_stats": False,
}


@dataclass(frozen=True)
class Device:
    """Where models run.

    Attributes:
        name: as it stands in records.
        environment: of all processes.
        imported: modules that are imported before processes are forked.
        settings: arguments of ``LLM`` for every case; ``dtype`` is among them.
        lengths: of the prompts; none is one more than a block, for stock vLLM draws a prompt's token by other
            numbers where a hit leaves one.
        new_tokens: that each prompt gets.
        logprobs: of how many tokens of each step; None where outputs are compared for equality alone.
        most_engines: engines that run at once, where there are as many processors.

    """

    name: str
    environment: Mapping[str, str]
    imported: Sequence[str]
    settings: Mapping[str, Any]
    lengths: Sequence[int]
    new_tokens: int
    logprobs: int | None
    most_engines: int


CPU = Device(
    name="CPU",
    environment={**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    imported=(
        *IMPORTED,
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.attention.backends.cpu_attn",
    ),
    settings={
        **SETTINGS,
        "dtype": "float32",
        "enforce_eager": True,
        # Less than the longest prompts: they come in chunks, beside windows.
        "max_num_batched_tokens": 64,
    },
    lengths=(5, 36, 100) if runner.V2 else (3, 5, 9, 14, 20, 36, 48, 64, 77, 100, 150, 200),
    # Less where kernels are interpreted.
    new_tokens=8 if runner.V2 else 24,
    logprobs=None,
    most_engines=1 << 10,
)
GPU = Device(
    name="GPU",
    environment={
        **ENVIRONMENT,
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # The parent asks whether there is a GPU, and must not open it: what it forks could not.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    },
    imported=(
        *IMPORTED,
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.worker.gpu_model_runner",
        "vllm.v1.worker.gpu.model_runner",
        "vllm.v1.attention.backends.flash_attn",
    ),
    settings={
        **SETTINGS,
        "dtype": "bfloat16",
        # Room for eight windows of 16 tokens, and again less than the longest prompts.
        "max_num_batched_tokens": 128,
        # Many engines share the GPU: none may take what it finds free, or count what others take.
        "gpu_memory_utilization": 0.02,
        "kv_cache_memory_bytes": 512 << 20,
    },
    lengths=CPU.lengths,
    new_tokens=CPU.new_tokens,
    logprobs=5,
    # Each has a context of its own on the GPU, and what several launch takes turns.
    most_engines=10,
)


def graphs(case: Case) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for a case's CUDA graphs, of few sizes."""
    if case.graphs == "none":
        return {"enforce_eager": True}
    window = 1 + case.speculation["num_speculative_tokens"]
    most = case.engine.get("max_num_seqs", SETTINGS["max_num_seqs"])
    sizes = [requests * window for requests in (1, 2, 4, 8) if requests <= most]
    modes = {"full": "FULL_DECODE_ONLY", "piecewise": "PIECEWISE", "both": "FULL_AND_PIECEWISE"}
    config: dict[str, Any] = {"cudagraph_mode": modes[case.graphs], "cudagraph_capture_sizes": sizes}
    if case.graphs == "full":
        config["mode"] = 0  # compiles nothing
    return {"compilation_config": config}


def settings(device: Device, case: Case) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for a case, without those of speculation and of NWOR."""
    own = graphs(case) if device is GPU else {}
    return {**device.settings, **own, **case.engine}


def tried_on(device: Device, case: Case, seen: Mapping[str, str]) -> str:
    """Return where a case ran, in words.

    Args:
        device: where.
        case: the case.
        seen: what the worker says of itself.

    """
    if device is CPU:
        return f"CPU, float32, {seen['runner']}"
    words = {"full": "full graphs", "piecewise": "pieces", "both": "full graphs, pieces", "none": "no graphs"}
    return f"{seen['device'].removeprefix('NVIDIA ')}, bfloat16, {seen['runner']}, {words[case.graphs]}"


def _absent(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ImportError:  # of a package around it
        return True


def _named(error: str) -> str | None:
    """Return the module that an error names as missing, if it is none of vLLM's or of the project's."""
    for name in re.findall(r"No module named '([\w.]+)'", error):
        if name.split(".")[0] not in ("vllm", "nwor", "server", "tests"):
            return str(name)
    return None


#: Parts of vLLM that may not be installed, and what an error says without them.
OPTIONAL: Mapping[str, str] = {
    "vllm.vllm_flash_attn._vllm_fa2_C": (
        r"Unsupported FA version: None|_vllm_fa2_C|FA2 is unavailable|FlashAttention version not detected"
    ),
    "vllm._moe_C_stable_libtorch": r"'_moe_C' object has no attribute",
    "vllm._flashmla_C": r"_flashmla_C",
    "vllm.third_party.deep_gemm": r"deep_gemm|DeepGEMM",
    "flashinfer": r"flashinfer|FlashInfer",
}


def missing(error: str, absent: Callable[[str], bool] = _absent) -> str | None:
    """Return which part that is not installed an error comes from; None where it comes from anything else.

    Args:
        error: the traceback.
        absent: tells whether a module is not installed.

    """
    # What the exception says, behind the last line of code: paths and code may name anything.
    said = re.split(r"\n(?=\S)", error.rsplit('\n  File "', 1)[-1], maxsplit=1)[-1]
    for module, words in OPTIONAL.items():
        if re.search(words, said) and absent(module):
            return module
    named = _named(said)
    if named is not None and absent(named):
        return named
    if "Transformers does not recognize this architecture" in error:
        import transformers

        return f"the architecture in transformers {transformers.__version__}"
    return None


def engines_at_once(device: Device) -> int:
    """Return how many engines run at once."""
    return min(len(os.sched_getaffinity(0)), device.most_engines)
