"""The device that the op tests run on: the CPU always, CUDA where there is a GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# The shared modules are imported as tests.ops.*, whatever directory pytest was started from.
ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@pytest.fixture
def stock_cpu() -> Any:
    """vLLM's ops with its kernels for CPUs, which builds for GPUs are without."""
    stock = pytest.importorskip("vllm._custom_ops")
    if torch.version.cuda and not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM was built without kernels for CPUs")
    return stock
