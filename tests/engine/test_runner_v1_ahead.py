"""Engine tests once more, on model runner V1 with steps scheduled ahead, as vLLM does on a GPU.

By hand: ``NWOR_TEST_RUNNER=v1-ahead python -m pytest tests/engine/test_exactness_cpu.py``.
"""

from __future__ import annotations

import pytest

from tests.engine.again import run_again
from tests.engine.runner import AHEAD

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(AHEAD, reason="runs only beside plain V1"),
]


def test_on_model_runner_v1_with_steps_ahead() -> None:
    files = "exactness_cpu faults_cpu switches_cpu mixed_steps_cpu request_bounds_cpu draft_lengths_cpu"
    run_again(files, "v1-ahead", "pytest")
