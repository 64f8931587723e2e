"""The engine tests once more, on vLLM's model runner V2, which a process chooses before it imports vLLM.

By hand: ``NWOR_TEST_RUNNER=v2 python -m tests.engine.runner tests/engine/test_exactness_cpu.py``.
"""

from __future__ import annotations

import pytest

from tests.engine.again import run_again
from tests.engine.runner import V2

pytestmark = [pytest.mark.engine, pytest.mark.skipif(V2, reason="runs only beside V1")]


@pytest.mark.parametrize(
    "file",
    [
        "test_greedy_rejection_cpu.py",
        "test_exactness_cpu.py",
        "test_faults_cpu.py",
        "test_isolation_cpu.py",
        "test_switches_cpu.py",
        "test_features_cpu.py",
        "test_mixed_steps_cpu.py",
        "test_pipeline_parallel.py",
        "test_tensor_parallel_cpu.py",
    ],
)
def test_on_model_runner_v2(file: str) -> None:
    pytest.importorskip("triton")
    run_again(file, "v2", "tests.engine.runner")
