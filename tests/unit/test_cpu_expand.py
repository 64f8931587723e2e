"""Claim: an engine with NWOR on a CPU samples its windows by their requests' parameters, whoever started it.

Coverage: the worker's start, from vLLM's own implementation of the kernel on. What the kernel computes:
tests/unit/test_server_engine.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cpu_build import needs_cpu_build

pytestmark = needs_cpu_build


@pytest.mark.parametrize("v2", [False, True])
def test_a_worker_mends_the_kernel(monkeypatch: pytest.MonkeyPatch, v2: bool) -> None:
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.cpu_worker import CPUWorker

    from nwor.engine import worker_cpu
    from nwor.engine.workarounds import cpu_expand

    cpu_expand.mend()
    stock = vars(cpu_expand.expand)["stock"]
    values, ends = torch.tensor([0.5, 0.0]), torch.tensor([2, 3])

    def expanded() -> list[float]:
        result: list[float] = rejection_sampler.expand_batch_to_tokens(values, ends, 3, 0, 1).tolist()
        return result

    # As in a process whose server is vLLM's own.
    cpu_triton_utils._expand_kernel_impl = stock
    register_kernels({cpu_expand.KERNEL: stock})
    try:
        assert expanded() != [0.5, 0.5, 1.0]
        monkeypatch.setattr(worker_cpu, "register_backend", lambda *_: None)
        for name in ("cpu_runner_patch", "cpu_runner_v2_patch"):
            monkeypatch.setattr(worker_cpu, name, nullcontext)
        monkeypatch.setattr(CPUWorker, "init_device", lambda _: None)
        worker: Any = object.__new__(worker_cpu.NworCPUWorker)
        worker.use_v2_model_runner, worker.vllm_config = v2, SimpleNamespace(lora_config=None)
        worker.init_device()
        # V2 samples by kernels of its own.
        assert (expanded() == [0.5, 0.5, 1.0]) == (not v2)
    finally:
        cpu_expand.mend()
