"""The engine tests once more, on vLLM's model runner V2, which a process chooses before it imports vLLM.

By hand: ``NWOR_TEST_RUNNER=v2 python -m tests.engine.runner tests/engine/test_exactness_cpu.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine.again import run_again
from tests.engine.runner import V2

pytestmark = [pytest.mark.engine, pytest.mark.skipif(V2, reason="runs only beside V1")]


#: What runs in one process, by what it is. Each can be in another lane than the others.
FILES = {
    "modes": "exactness_cpu switches_cpu mixed_steps_cpu",
    "faults": "faults_cpu isolation_cpu greedy_rejection_cpu",
    "features": "features_cpu",
    "processes": "pipeline_parallel tensor_parallel_cpu",
}

#: What knows of runner V2 and is run on it by hand alone; adapters are nothing for it on a CPU.
BY_HAND = {
    *("test_adapters_cpu.py", "test_draft_lengths_cpu.py", "test_draft_vocabulary_cpu.py"),
    *("test_request_bounds_cpu.py", "test_sampled_drafts_cpu.py"),
}


@pytest.mark.parametrize("name", FILES)
def test_on_model_runner_v2(name: str) -> None:
    pytest.importorskip("triton")
    run_again(FILES[name], "v2", "tests.engine.runner")


def test_each_file_runs_here_once() -> None:
    runs = [f"test_{name}.py" for files in FILES.values() for name in files.split()]
    folder = Path(__file__).parent
    named = {
        path.name for path in folder.glob("test_*.py") if re.search(r"\bV2\b|INHERITED", path.read_text())
    }
    assert len(runs) == len(set(runs))
    assert set(runs) == named - {Path(__file__).name} - BY_HAND
