"""Claim: on a GPU, with vLLM's other features, `stage` answers as `off` does, and writes no rejected token.

Coverage: the demo model in bfloat16 on model runners V2 and V1 with full and piecewise CUDA graphs:
structured outputs, a LoRA adapter beside requests without, seeded sampling, several answers to a prompt,
penalties with banned words and stop tokens, prefix hits on what windows have committed, preemption, aborts in
the middle; on V2 also where windows are trees.
Tolerance: outputs may part where two tokens nearly tie, nowhere else; a seed gives the same tokens again;
grammars, banned words and stop tokens, cache slots and counts none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import adapters
from tests.gpu import demo_engine, feature_checks

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)


TREE = {"nodes": 8, "depth": 4, "width": 3}


@pytest.fixture(scope="module", params=["v2", "v1", "v2-trees"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    trees = request.param.endswith("trees")
    with demo_engine.start(
        request.param,
        {"mode": "off", "self_check_interval": 3, "tree": TREE if trees else None},
        TREE["nodes"] if trees else 4,
        worker_extension_cls="tests.gpu.slot_probe.SlotProbe",
        **feature_checks.SETTINGS,
    ) as llm:
        assert type(demo_engine.runner(llm)).__name__.endswith(request.param[:2].upper())
        yield llm


def test_structured_outputs(engine: Any) -> None:
    feature_checks.check_structured_outputs(engine)


def test_lora(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, taken = demo_engine.stage_graphs(engine), []
    take = stage.take

    def watched(batch: Any) -> bool:
        taken.append((batch.num_active_loras > 0, take(batch)))
        return taken[-1][1]

    monkeypatch.setattr(stage, "take", watched)
    # Weights that change every output, but leave the drafter right now and then.
    feature_checks.check_lora(engine, adapters.write(tmp_path / "adapter", spread=0.1))
    replayed = sum(staged for adapted, staged in taken if adapted)
    print(f"{replayed} of {len(taken)} steps in full graphs were those of stage with an adapter")
    assert replayed > 0, "LoRA: no step with an adapter replayed a graph of stage"


def test_seeded_sampling(engine: Any) -> None:
    if demo_engine.runner(engine).vllm_config.additional_config["nwor"]["tree"] is not None:
        pytest.skip("a tree's walk draws other numbers than rejection sampling: test_trees.py")
    feature_checks.check_seeded(engine)


def test_several_answers_to_a_prompt(engine: Any) -> None:
    feature_checks.check_several_answers(engine)


def test_penalties_banned_words_and_stop_tokens(engine: Any) -> None:
    feature_checks.check_penalties(engine)


def test_prefix_hits(engine: Any) -> None:
    feature_checks.check_prefix_hits(engine)


def test_preemption(engine: Any) -> None:
    feature_checks.check_preemption(engine)


def test_aborts_in_the_middle(engine: Any) -> None:
    feature_checks.check_aborts(engine)
