"""The engine tests once more, on vLLM's model runner V2, which a process chooses before it imports vLLM.

By hand: ``NWOR_TEST_RUNNER=v2 python -m tests.engine.runner tests/engine/test_exactness_cpu.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine.again import path_of, run_again
from tests.engine.runner import V2
from tests.server_process import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.skipif(V2, reason="runs only beside V1")]


#: What runs in one process, by what it is. Each can be in another lane than the others.
FILES = {
    "modes": "exactness_cpu switches_cpu mixed_steps_cpu adaptive_cpu",
    "faults": "faults_cpu isolation_cpu greedy_rejection_cpu unit/triton_attn_interpreted",
    "features": "features_cpu",
    "drafter": "first_pass_cpu",
    "trees": "unit/tree_kernels unit/tree_sampling trees_cpu tree_choice_cpu",
    "processes": "pipeline_parallel tensor_parallel_cpu trees_tensor_parallel",
}

#: What knows of runner V2 and is run on it by hand alone; adapters are nothing for it on a CPU.
BY_HAND = {
    *("test_adapters_cpu.py", "test_draft_lengths_cpu.py", "test_draft_vocabulary_cpu.py"),
    *("test_request_bounds_cpu.py", "test_sampled_drafts_cpu.py"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_on_model_runner_v2(name: str) -> None:
    pytest.importorskip("triton")
    run_again(FILES[name], "v2", "tests.engine.runner")


def test_each_file_runs_here_once() -> None:
    runs = [path_of(name) for files in FILES.values() for name in files.split()]
    named = {
        str(path.relative_to(ROOT))
        for folder in ("engine", "unit")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
        # Files of units import the name where they need the interpreter.
        if re.search(r"\bV2\b|INHERITED" if folder == "engine" else r"import.*\bV2\b", path.read_text())
    }
    others = {Path(__file__).name, *BY_HAND}
    assert len(runs) == len(set(runs))
    assert set(runs) == named - {f"tests/engine/{name}" for name in others}
