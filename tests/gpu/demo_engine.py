"""An engine with NWOR in this process, on the demo model, as all GPU tests of one GPU start it."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import nwor
from server import demo
from tests.gpu import flashinfer_modules

#: Bytes that the KV cache may take. With them given vLLM does not measure the GPU's free memory at the start,
#: and so does not end where another process frees some meanwhile.
CACHE_BYTES = 2 << 30
#: vLLM's names of attention backends, by those that the setting has for them; "flash" is vLLM's own choice.
STOCK_NAMES = {"triton": "TRITON_ATTN", "flashinfer": "FLASHINFER"}
#: The attention backend of engines for which a test names none: "flash" or one of these.
BACKEND = os.environ.get("NWOR_TEST_ATTENTION", "flash")


@contextmanager
def start(
    name: str,
    nwor: dict[str, Any],
    drafts: int = 4,
    schedule: Any = None,
    backend: str = BACKEND,
    asked: bool = True,
    adaptive: bool = False,
    **settings: Any,
) -> Iterator[Any]:
    """Start an engine and stop it after the block.

    Args:
        name: what it is: "v1" in front for model runner V1, else V2; "fp8" in front for an fp8 cache;
            "eager" or "piecewise" at the end, else full and piecewise CUDA graphs.
        nwor: NWOR's settings.
        drafts: draft tokens of a step.
        schedule: vLLM's draft tokens by batch size; None where their number is fixed.
        backend: the attention backend, "flash" for vLLM's own choice, or one of :data:`STOCK_NAMES`.
        asked: whether windows are to be staged with it.
        adaptive: whether vLLM trims draft tokens on the device, by what it expects of each.
        settings: the engine's other settings.

    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0" if name.startswith("v1") else "1")
        from vllm import LLM, envs
        from vllm.compilation import monitor

        from nwor.engine.plugin import register

        # An engine of model runner V1 forbids capturing when it has started, and V2 does not allow it again.
        monitor.set_cudagraph_capturing_enabled(True)
        envs.disable_envs_cache()  # the engine before this one has frozen what it read
        register()  # what vLLM does by itself where the package is installed
        if backend != "flash":
            settings["attention_backend"] = STOCK_NAMES[backend]
            if asked:
                nwor = {**nwor, "attention_backends": ["flash", backend]}
        if backend == "flashinfer":
            if (why_not := flashinfer_modules.why_not()) is not None:
                pytest.skip(why_not)
            if name.startswith("fp8"):
                pytest.skip("FlashInfer has no kernel of prompts for heads of 64 and an fp8 cache on Hopper")
            flashinfer_modules.use()
            settings["kernel_config"] = {"enable_flashinfer_autotune": False}
        if name.startswith("fp8"):
            settings["kv_cache_dtype"] = "fp8"
        if name.endswith("eager"):
            settings["enforce_eager"] = True
        else:
            mode = "PIECEWISE" if name.endswith("piecewise") else "FULL_AND_PIECEWISE"
            settings["compilation_config"] = {"cudagraph_mode": mode}
        llm = LLM(
            str(demo.model_path()),
            dtype="bfloat16",
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=CACHE_BYTES,
            speculative_config={
                "model": str(demo.draft_path()),
                "method": demo.draft_method(),
                "num_speculative_tokens": drafts,
                **({} if schedule is None else {"num_speculative_tokens_per_batch_size": schedule}),
                **({"enable_adaptive_verification": True} if adaptive else {}),
            },
            additional_config={"nwor": nwor},
            disable_log_stats=False,
            **settings,
        )
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            torch.cuda.empty_cache()


def runner(llm: Any) -> Any:
    """Return the model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def stage_graphs(llm: Any) -> Any:
    """Return the set of full graphs for ``stage`` of an engine in this process."""
    model_runner = runner(llm)
    if type(model_runner).__name__.endswith("V1"):
        return model_runner._nwor_graphs.stage
    return model_runner.cudagraph_manager.stage


def own_synchronizations(llm: Any, run: Callable[[], Any]) -> list[tuple[str, int]]:
    """Return the lines of NWOR's that made the host wait for the device in the second of two runs.

    The self-check, which waits, is off meanwhile.

    Args:
        llm: an engine in this process.
        run: has it run some steps.

    """
    config = runner(llm).nwor.state.config
    interval = config.self_check_interval
    object.__setattr__(config, "self_check_interval", 0)
    try:
        run()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    finally:
        object.__setattr__(config, "self_check_interval", interval)
    calls = [entry for entry in caught if "synchronizing" in str(entry.message)]
    print(len(calls), "synchronizing calls")
    ours = str(Path(nwor.__file__).parent)
    return [(call.filename, call.lineno) for call in calls if call.filename.startswith(ours)]
