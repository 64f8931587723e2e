"""Claim: on a GPU models of many kinds answer in all modes as plain vLLM does, or say why none is staged.

Coverage: the tiny models and drafters of tests/architectures, in bfloat16 with heads of 64 and 128, each on
the model runner that vLLM has it on, verify and mixed steps in full CUDA graphs, windows of up to 16 tokens.
Some once more: with fp8 caches, on model runner V1, in piecewise graphs, without graphs. Models with
multi-head latent attention and with recurrent layers, and models for images served for text. Those that are
not quick run where NWOR_TESTS_SLOW is set.
Control: where commits write nothing, at least a quarter of the outputs part at no near-tie.
Tolerance: outputs may part at near-ties (near_ties.py; fp8: twice as far); of dense models one in twenty may
part elsewhere, with an fp8 cache or with experts, which a rounding exchanges, three in twenty.
Skipped: what needs a part of vLLM, or a package, that is not installed.
Records: as in tests/architectures/test_modes.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.architectures import recorded
from tests.architectures.cases import Case
from tests.architectures.gpu_cases import GPU_DRAFTERS, GPU_MODELS, runner_of

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

#: Share of outputs that may part at no near-tie.
FEW, SOME = 0.05, 0.15
#: And that must, where commits write nothing.
MANY = 0.25
EXPERTS = ("num_local_experts", "num_experts")
#: Drafters whose windows have all the same length.
EQUAL = ("eagle", "eagle3", "draft_model", "medusa", "mtp", "dflash", "dspark")


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all models that tests of this run are about, and return their records by name."""
    return recorded.run(recorded.wanted(request), tmp_path_factory.mktemp("architectures"), "--gpu")


@pytest.mark.parametrize("case", recorded.parameters(GPU_MODELS))
def test_model(case: Case, records: dict[str, Any]) -> None:
    check(case, records[case.name])


@pytest.mark.parametrize("case", recorded.parameters(GPU_DRAFTERS))
def test_drafter(case: Case, records: dict[str, Any]) -> None:
    check(case, records[case.name])


def check(case: Case, record: dict[str, Any]) -> None:
    print(f"{case.name}: seconds {record['seconds']}")
    if "errors" in record:
        absent = set(record["missing"].values())
        assert None not in absent, "\n".join(record["errors"].values())
        last = next(iter(record["errors"].values())).strip().splitlines()[-1]
        pytest.skip(f"{', '.join(sorted(absent))} is not installed: {last}")
    print(f"{record['tried_on']}; replays {record['replays']}; tokens differ in {record['differing']}")
    print(f"rounding {record['rounding']}; control {record['control_rounding']}")
    assert record["fault"] is None
    assert set(record["runners"].values()) == {runner_of(case)}
    # Else being near says little.
    assert record["distinct_tokens"] > 5
    check_outputs(case, record)
    check_counts(case, record)
    if case.direct is not None:
        assert record["direct"]["reason"] == case.direct
        return
    assert record["direct"] is None
    assert record["self_checks"] > 0
    assert record["layers"]["staged"] > 0
    assert record["layers"]["shapes"] == case.shapes
    assert record["control_rounding"]["far"] >= record["prompts"] * MANY
    replays = record["replays"]
    if case.graphs in ("piecewise", "none"):
        assert replays == {"stage": 0, "mixed": 0}
    elif case.speculation["method"] in EQUAL:
        assert replays["stage"] > 0
    elif runner_of(case) == "V2":
        assert sum(replays.values()) > 0


def check_outputs(case: Case, record: dict[str, Any]) -> None:
    """Check that outputs of all modes, and of plain vLLM, are near those of `off`."""
    # Rounding to 3 bits, and rounding that gives a token to another expert; both at once go twice as far.
    rough = ("kv_cache_dtype" in case.engine) + any(case.config.get(name) for name in EXPERTS)
    for mode, kinds in record["rounding"].items():
        far = sum(kind["far"] for kind in kinds.values())
        assert far <= (SOME * rough if rough else FEW) * record["outputs"], f"{mode}: {kinds}"


def check_counts(case: Case, record: dict[str, Any]) -> None:
    """Check that windows were staged, or written directly for the reason that is expected."""
    counts = record["counts"]
    if case.accepted:
        assert sum(of_mode["accepted_tokens"] for of_mode in counts.values()) > 0
    for mode, of_mode in counts.items():
        assert of_mode["accepted_tokens"] < of_mode["draft_tokens"], mode
        written = of_mode["commit_bytes"] > 0, of_mode["log_bytes"] > 0
        assert written == (case.direct is None and mode == "stage", case.direct is None and mode == "cow")
        direct, windows = dict(of_mode["direct_windows"]), of_mode["windows"]
        if case.direct is None and mode == "stage":
            # A step with a prefix hit replays vLLM's graph.
            assert direct.pop("graph", 0) <= windows / 2, mode
        assert direct == ({} if case.direct is None or mode == "off" else {case.direct: windows}), mode
