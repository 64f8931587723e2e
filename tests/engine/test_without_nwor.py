"""Claim: with ``--no-nwor`` an engine under ``nwor-server`` has vLLM's own classes and methods throughout.

Coverage: the command line of the demo on the CPU, in an interpreter of its own: the objects of a running
engine, and every class, function and module of vLLM's that the process has loaded.
Tolerance: what docs/operations.md names: on CPUs the mends of sampling and adapters, and where the package is
installed the gate that looks for NWOR's settings. That the mends are found shows that the look works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import FunctionType
from typing import Any

import pytest

from tests.server_process import ROOT

pytestmark = pytest.mark.engine

_GENERATORS = "nwor.engine.workarounds.cpu_generators"
#: What is ours in an engine without NWOR, by what it is in the place of.
MENDS = {
    # Around that of _GENERATORS.
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner._sample": "server.cpu_sampling",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner.load_model": "server.cpu_sampling",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner._bookkeeping_sync": _GENERATORS,
    "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer._sample_from_logits": (
        "nwor.engine.workarounds.sampled_drafts"
    ),
    **{
        f"vllm.v1.worker.gpu_model_runner.GPUModelRunner.{name}": "nwor.engine.workarounds.sampled_drafts"
        for name in ("_get_spec_decode_draft_probs", "_update_states")
    },
    "vllm.utils.cpu_triton_utils._expand_kernel_impl": "nwor.engine.workarounds.cpu_expand",
    # Adapters on a CPU: where the operators are defined, and where they are called from.
    **{
        f"vllm.lora.{module}.{name}": "nwor.engine.workarounds.adapters"
        for module in ("ops.torch_ops.lora_ops", "punica_wrapper.punica_cpu")
        for name in ("bgmv_expand", "bgmv_expand_slice", "bgmv_shrink")
    },
}
#: Calls vLLM's own, and finds that nobody asked for NWOR.
GATE = "vllm.platforms.cpu.CpuPlatform.check_and_update_config"


def whose(function: Any) -> str:
    """Return the module that a function was written in, whatever it wraps."""
    return str(function.__globals__.get("__name__", ""))


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("nwor", "server")


def exchanged() -> dict[str, str]:
    """Return what is ours in vLLM's modules and classes, and whose it is."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm."):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and is_ours(whose(value)):
                found[f"{name}.{key}"] = whose(value)
            if isinstance(value, type) and is_ours(value.__module__):
                found[f"{name}.{key}"] = value.__module__
            if isinstance(value, type) and value.__module__ == name:
                for member, method in list(vars(value).items()):
                    function = getattr(method, "__func__", method)
                    if isinstance(function, FunctionType) and is_ours(whose(function)):
                        found[f"{name}.{key}.{member}"] = whose(function)
    return found


def describe(*flags: str) -> None:
    """Start the demo's engine in this process, let it answer, and print what it consists of."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from server import cli

    args = cli.parse(["--demo", "--dtype", "float32", "--max-model-len", "256", *flags])
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_vllm_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    engine.add_request("one", "def f(a):\n    return ", SamplingParams(max_tokens=8, stop=["never"]))
    while engine.has_unfinished_requests():
        engine.step()
    core: Any = engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    objects = [core.scheduler, core.scheduler.kv_cache_manager, worker, worker.model_runner]
    objects += [layer.impl for layer in layers if hasattr(layer, "impl")]
    classes = sorted({f"{type(each).__module__}.{type(each).__name__}" for each in objects})
    print("FOUND", json.dumps({"classes": classes, "exchanged": exchanged()}), flush=True)
    engine.engine_core.shutdown()


def found(*flags: str) -> dict[str, Any]:
    code = f"from tests.engine.test_without_nwor import describe; describe(*{flags!r})"
    environment = {key: value for key, value in os.environ.items() if key != "NWOR_DISABLE"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, result.stdout[-3000:] + result.stderr[-3000:]
    description: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return description


def test_without_nwor_the_engine_is_vllms_own() -> None:
    stock = found("--no-nwor")
    assert [name for name in stock["classes"] if not name.startswith("vllm.")] == []
    stock["exchanged"].pop(GATE, None)
    assert stock["exchanged"] == MENDS
