"""Claim: verification on GPUs runs steps where they fit, and calls passed only what showed that it passed.

Coverage: failures, logs that say nothing, programs that are missing, too few GPUs, a budget, records of the
same build and of another, GPUs that are shared and those that are not. The steps are small Python programs.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import verify
from tests.gpu.verify import Step, Verification


def _step(name: str, code: str, **options: Any) -> Step:
    return Step(name, (sys.executable, "-c", code), r"\b[1-9]\d* passed", **options)


def _outcomes(out: Path) -> dict[str, str]:
    steps = json.loads((out / "verified.json").read_text())["steps"]
    return {name: step["outcome"] for name, step in steps.items()}


def test_only_what_says_so_has_passed(tmp_path: Path) -> None:
    steps = [
        _step("right", "print('=== 3 passed, 1 skipped ===')"),
        _step("wrong", "print('1 failed, 2 passed'); raise SystemExit(1)"),
        _step("silent", "print('12 skipped')"),
        Step("absent", ("no-such-program-here",), "passed"),
        _step("two", "print('1 passed')", gpus=2),
    ]
    assert not Verification(tmp_path, ["0"], "build").execute(steps)
    expected = {
        "right": "passed",
        "wrong": "failed",
        "silent": "failed",
        "absent": "failed",
        "two": "not run",
    }
    assert _outcomes(tmp_path) == expected
    record = json.loads((tmp_path / "verified.json").read_text())["steps"]
    assert record["right"]["said"] == "3 passed, 1 skipped"
    assert record["two"]["said"] == "needs 2 GPUs, of which 1 are there"
    assert "no-such-program-here" in record["absent"]["said"]


def test_a_build_that_passed_is_not_run_again_and_another_is(tmp_path: Path) -> None:
    counter = tmp_path / "runs"
    count = f"open({str(counter)!r}, 'a').write('x'); print('1 passed')"
    out = tmp_path / "out"
    for build in ("first", "first", "second"):
        assert Verification(out, ["0"], build).execute([_step("count", count)])
    assert counter.read_text() == "xx"


def test_a_failure_runs_again(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    code = f"import pathlib as p; f = p.Path({str(flag)!r}); print(f'{{f.exists():d}} passed'); f.touch()"
    assert not Verification(tmp_path, ["0"], "build").execute([_step("second try", code)])
    assert Verification(tmp_path, ["0"], "build").execute([_step("second try", code)])


def test_a_budget_ends_what_runs_and_what_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    grandchild = f"import time, pathlib; time.sleep(2); pathlib.Path({str(child)!r}).touch()"
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}]); print('1 passed')"
    )
    began = time.monotonic()
    steps = [_step("long", code), _step("after it", "print('1 passed')")]
    assert not Verification(tmp_path, ["0"], "build").execute(steps, seconds=0.5)
    assert _outcomes(tmp_path) == {"long": "not run", "after it": "not run"}
    time.sleep(max(0.0, began + 3 - time.monotonic()))
    assert not child.exists()


def test_steps_share_gpus_unless_they_want_them_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    # Those that may share end when all three have begun: they run side by side or not at all.
    code = """
import os, sys, time
path, name = sys.argv[1:]
me = name + " " + os.environ["CUDA_VISIBLE_DEVICES"]
log = open(path, "a", buffering=1)
print("begin", me, file=log)
ends = time.monotonic() + 60
while name != "alone" and open(path).read().count("begin") < 3 and time.monotonic() < ends:
    time.sleep(0.05)
print("end", me, file=log)
print("1 passed" if time.monotonic() < ends else "waited in vain")
"""
    steps = [
        Step(name, (sys.executable, "-c", code, str(log), name), "passed", gpus=gpus, alone=alone)
        for name, gpus, alone in [("a", 1, False), ("b", 1, False), ("both", 2, False), ("alone", 1, True)]
    ]
    assert Verification(tmp_path / "out", ["5", "7"], "build", share=2).execute(steps)
    running: dict[str, set[str]] = {"5": set(), "7": set()}
    for line in log.read_text().splitlines():
        event, name, gpus = line.split()
        assert len(gpus.split(",")) == (2 if name == "both" else 1)
        for gpu in gpus.split(","):
            if event == "begin":
                running[gpu].add(name)
            else:
                running[gpu].remove(name)
            assert len(running[gpu]) <= 2
            assert "alone" not in running[gpu] or len(running[gpu]) == 1


@pytest.mark.parametrize(
    ("alone", "given", "seen"), [(False, None, "4"), (True, None, "-"), (False, "3", "3")]
)
def test_steps_side_by_side_divide_the_cores(
    alone: bool, given: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(verify.os, "cpu_count", lambda: 16)
    step = _step("threads", "import os; print(os.environ.get('OMP_NUM_THREADS', '-'), 'passed')")
    step = Step(step.name, step.command, "passed", alone=alone)
    assert Verification(tmp_path, ["0", "1"], "build", share=2).execute([step])
    record = json.loads((tmp_path / "verified.json").read_text())["steps"]
    assert record["threads"]["said"] == f"{seen} passed"


def test_the_record_follows_sources_and_library(tmp_path: Path, monkeypatch: Any) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"one")
    monkeypatch.setattr(verify, "ROOT", tmp_path)
    source = tmp_path / "nwor" / "code.py"
    source.parent.mkdir()
    source.write_text("a = 1\n")
    digests = [verify.build_digest(library), verify.build_digest(library)]
    source.write_text("a = 2\n")
    digests.append(verify.build_digest(library))
    library.write_bytes(b"two")
    digests.append(verify.build_digest(library))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_racecheck_runs_its_own_libraries(tmp_path: Path) -> None:
    steps = {step.name: step for step in verify.checks(tmp_path / "racecheck")}
    assert {name for name, step in steps.items() if step.libraries} == {"racecheck"}
    assert steps["racecheck"].command[-1] == "--racecheck"
    verification = Verification(tmp_path / "out", ["0"], "build")
    show = "import os; print(os.environ.get('NWOR_LIBRARY_DIR'))"
    own = Step("own", (sys.executable, "-c", show), "racecheck$", libraries=tmp_path / "racecheck")
    assert verification.execute([own])


def test_every_test_of_the_folder_belongs_to_a_step() -> None:
    commands = " ".join(part for step in verify.checks() for part in step.command)
    files = {path.name for path in Path(verify.__file__).parent.glob("test_*.py")}
    files.add("sanitize_kernels.py")
    assert files == set(re.findall(r"tests/gpu/(\w+\.py)", commands))


def test_scripts_find_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A script's own folder is on its path, the one that it is called from is not.
    script = tmp_path / "script.py"
    script.write_text("import sys; print(*sys.path)\n")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    verification = Verification(tmp_path / "out", ["0"], "build")
    root = re.escape(str(verify.ROOT))
    assert verification.execute([Step("script", (sys.executable, str(script)), f"{root} .*/elsewhere")])


def test_every_pipeline_belongs_to_one_step() -> None:
    source = (Path(verify.__file__).parent / "test_pipeline_parallel.py").read_text()
    kinds = re.search(r"^KINDS: .* = \{\n(.*?)^\}$", source, re.MULTILINE | re.DOTALL)
    assert kinds is not None
    assert tuple(re.findall(r'^ {4}"(\w+)":', kinds[1], re.MULTILINE)) == verify.PIPELINES
    # Steps choose by name: no test may have a kind's in its own.
    tests = re.findall(r"^def (test_\w+)", source, re.MULTILINE)
    assert not [name for name in tests for kind in verify.PIPELINES if kind in name]


def test_every_engine_belongs_to_one_step() -> None:
    source = (Path(verify.__file__).parent / "test_engine.py").read_text()
    match = re.search(r"^ENGINES = \[(.*)\]$", source, re.MULTILINE)
    assert match is not None
    for engine in re.findall(r'"([^"]+)"', match[1]):
        steps = [name for name in verify.ENGINES if f"[{name}" in f"[{engine}]"]
        assert len(steps) == 1, (engine, steps)
