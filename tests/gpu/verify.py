"""Runs what shows a build to be right, and fast, on NVIDIA GPUs, and keeps a record of it.

    python -m tests.gpu.verify [--budget-seconds 1500] [--steps engine,memcheck] [--measure]

Steps run side by side on all GPUs that are visible. The record says of each how it ended, on which build: one
that passed does not run again on the same build, so a short lease of a machine takes up where another ended.
Exits with 1 while a step has failed or has not run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: What a result is of: the sources that a step may run, besides the CUDA library.
SOURCES = ("nwor", "server", "tests/gpu", "tests/ops", "tests/architectures")
ENGINES = ("graphs", "piecewise", "eager", "v1-graphs", "v1-piecewise", "v1-eager", "fp8")
PIPELINES = ("graphs", "piecewise", "eager")
#: Tools of compute-sanitizer, and what the last word of each is where it found nothing.
CLEAN = {
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed",
    "memcheck": "ERROR SUMMARY: 0 errors",
    "initcheck": "ERROR SUMMARY: 0 errors",
    "synccheck": "ERROR SUMMARY: 0 errors",
}


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: what it is called in the record; its log is OUT/name.log.
        command: the command line.
        passed: what one of its log's lines must match besides an exit status of 0.
        gpus: how many it needs.
        alone: whether nothing else may run on its GPUs meanwhile.
        libraries: folder of the compiled libraries that it runs; None for the installed ones.

    """

    name: str
    command: tuple[str, ...]
    passed: str
    gpus: int = 1
    alone: bool = False
    libraries: Path | None = None


def _pytest(name: str, *arguments: str, gpus: int = 1) -> Step:
    # Where all is skipped pytest is content; here something has to pass. P: the log has what tests print.
    return Step(name, (sys.executable, "-m", "pytest", "-q", "-rfP", *arguments), r"\b[1-9]\d* passed", gpus)


def checks(racecheck: Path | None = None) -> list[Step]:
    """Return the steps that show a build to be right, those that say most first, of these the longest.

    Args:
        racecheck: folder of the libraries that racecheck runs, which has its own (docs/kernels/testing.md).

    """
    tests = "tests/gpu"
    steps = [
        _pytest("ops", "tests/ops"),
        _pytest("kernels", f"{tests}/test_kernels_verify.py", f"{tests}/test_kernels_commit.py"),
        _pytest("joins", f"{tests}/test_joins.py"),
    ]
    for tool, clean in CLEAN.items():
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1")
        command += (sys.executable, f"{tests}/sanitize_kernels.py")
        if tool == "racecheck":
            steps.append(Step(tool, (*command, "--racecheck"), clean, libraries=racecheck))
        else:
            steps.append(Step(tool, command, clean))
    # "[graphs" is the first part of a test's parameters, and none of "[v1-graphs".
    steps += [_pytest(f"engine-{name}", f"{tests}/test_engine.py", "-k", f"[{name}") for name in ENGINES]
    steps += [
        _pytest("features", f"{tests}/test_features.py"),
        _pytest("mixed", f"{tests}/test_mixed_steps.py"),
        _pytest("mixed-graphs", f"{tests}/test_mixed_graphs.py"),
        _pytest("first-pass", f"{tests}/test_first_pass.py"),
        _pytest("capture-errors", f"{tests}/test_capture_errors.py"),
        _pytest("draft-lengths", f"{tests}/test_draft_lengths.py"),
        _pytest("trees", f"{tests}/test_trees.py"),
        _pytest("greedy-sampling", f"{tests}/test_greedy_sampling.py"),
        _pytest("server", f"{tests}/test_server.py"),
        _pytest("rounding", f"{tests}/test_rounding.py"),
        _pytest("architectures", f"{tests}/test_architectures.py", "-k", "test_model"),
        _pytest("drafters", f"{tests}/test_architectures.py", "-k", "test_drafter"),
        _pytest("tensor-parallel", f"{tests}/test_tensor_parallel.py", gpus=2),
        _pytest("two-gpu-trees", f"{tests}/test_trees_tensor_parallel.py", gpus=2),
        _pytest("triton", f"{tests}/test_triton_attn.py"),
    ]
    # The engine's tests once more, with Triton's attention.
    names = ("engine", "mixed_steps", "features", "capture_errors", "rounding")
    again = _pytest("triton-engines", *(f"{tests}/test_{name}.py" for name in names))
    steps.append(replace(again, command=("env", "NWOR_TEST_ATTENTION=triton", *again.command)))
    # vLLM's images have FlashInfer, its wheel alone has not: there all of it is skipped, and says why.
    steps.append(_pytest("adaptive", f"{tests}/test_adaptive.py"))
    flashinfer = _pytest("flashinfer", f"{tests}/test_flashinfer_attn.py")
    steps.append(replace(flashinfer, passed=r"\b[1-9]\d* (passed|skipped)"))
    steps += [
        _pytest(f"pipeline-{name}", f"{tests}/test_pipeline_parallel.py", "-k", name, gpus=2)
        for name in PIPELINES
    ]
    return steps


def measurements(out: Path) -> list[Step]:
    """Return the benchmarks against stock vLLM; their results are put into ``out``."""
    steps = []
    for cache, flags in (("bf16", ()), ("fp8", ("--fp8",))):
        command = (sys.executable, "benchmarks/kernels/run.py", "--out", str(out / f"kernels-{cache}.json"))
        steps.append(Step(f"speed-kernels-{cache}", (*command, *flags), r"^copy .* TB/s", alone=True))
    for shape in ("1b", "8b"):
        for k in ("4", "8"):
            result = str(out / f"engine-{shape}-k{k}.json")
            command = (sys.executable, "benchmarks/engine/compare.py", "--shapes", shape, "--k", k)
            # As for the results in the documentation: short, for all of them are to fit into half an hour, in
            # contexts that the cache has room for, with graphs for 64 windows of nine tokens.
            brief = ("--run-seconds", "0.2", "--host-steps", "100", "--most-tokens", "512")
            if k == "8":
                brief += ("--capture-tokens", "576")
            steps.append(
                Step(f"speed-{shape}-k{k}", (*command, *brief, "--output", result), r".", alone=True)
            )
    return steps


def build_digest(*libraries: Path) -> str:
    """Return a digest of compiled libraries and of the sources that steps run."""
    digest = hashlib.sha256()
    for library in libraries:
        digest.update(library.read_bytes())
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@dataclass
class Run:
    """A step that runs."""

    step: Step
    process: subprocess.Popen[bytes]
    gpus: list[str]
    began: float = field(default_factory=time.monotonic)


class Verification:
    """Runs steps on GPUs and keeps the record.

    Args:
        out: folder of the record and the logs.
        gpus: their names, as CUDA_VISIBLE_DEVICES takes them.
        digest: of the build.
        share: steps that may run on one GPU at once.

    """

    def __init__(self, out: Path, gpus: Sequence[str], digest: str, share: int = 1) -> None:
        self.out = out
        self.free = dict.fromkeys(gpus, share)
        self.share = share
        self.threads = max((os.cpu_count() or 1) // (share * max(len(gpus), 1)), 1)
        self.runs: list[Run] = []
        self.record: dict[str, Any] = {"build": digest, "steps": {}}
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "verified.json"
        if self.path.exists():
            before = json.loads(self.path.read_text())
            if before["build"] == digest:
                self.record["steps"] = before["steps"]

    def execute(self, steps: Iterable[Step], seconds: float = float("inf")) -> bool:
        """Run what has not passed on this build yet; end what still runs after so many seconds.

        Returns:
            Whether all steps have passed.

        """
        steps = list(steps)
        ends = time.monotonic() + seconds
        waiting = []
        for step in steps:
            if self._outcome(step) == "passed":
                print(f"{step.name}: passed before on this build", flush=True)
            elif step.gpus > len(self.free):
                self._note(step, "not run", f"needs {step.gpus} GPUs, of which {len(self.free)} are there", 0)
            else:
                self._note(step, "not run", "no time was left", 0, say=False)
                waiting.append(step)
        while (waiting or self.runs) and time.monotonic() < ends:
            for step in list(waiting):
                if gpus := self._take(step):
                    waiting.remove(step)
                    self._start(step, gpus)
            for run in [run for run in self.runs if run.process.poll() is not None]:
                self._finish(run)
            time.sleep(0.05)
        for run in self.runs:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
            self._note(run.step, "not run", "time was up", time.monotonic() - run.began)
        self.runs.clear()
        return all(self._outcome(step) == "passed" for step in steps)

    def _outcome(self, step: Step) -> str:
        outcome: str = self.record["steps"].get(step.name, {}).get("outcome", "not run")
        return outcome

    def _take(self, step: Step) -> list[str]:
        """Return GPUs for the step, or none while there are too few."""
        wanted = self.share if step.alone else 1
        gpus = sorted((g for g in self.free if self.free[g] >= wanted), key=lambda g: -self.free[g])
        if len(gpus) < step.gpus:
            return []
        for gpu in gpus[: step.gpus]:
            self.free[gpu] -= wanted
        return gpus[: step.gpus]

    def _start(self, step: Step, gpus: list[str]) -> None:
        # Benchmarks are scripts, whose path has their own folder and not this one.
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {
            **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path,
        }  # fmt: skip
        if step.libraries:
            environment["NWOR_LIBRARY_DIR"] = str(step.libraries)
        if not step.alone:  # references are computed on the host: steps side by side divide its cores
            environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        with (self.out / f"{step.name}.log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    step.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
                    process_group=0,
                )  # fmt: skip
            except OSError as error:
                self._give_back(step, gpus)
                self._note(step, "failed", f"{step.command[0]}: {error.strerror}", 0)
                return
        self.runs.append(Run(step, process, gpus))

    def _give_back(self, step: Step, gpus: Iterable[str]) -> None:
        for gpu in gpus:
            self.free[gpu] += self.share if step.alone else 1

    def _finish(self, run: Run) -> None:
        self.runs.remove(run)
        self._give_back(run.step, run.gpus)
        lines = (self.out / f"{run.step.name}.log").read_text(errors="replace").splitlines()
        status = run.process.returncode
        said = [line for line in lines if re.search(run.step.passed, line)]
        if status == 0 and said:
            self._note(run.step, "passed", said[-1].strip(" ="), time.monotonic() - run.began)
        else:
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            reason = f"status {status}" if status else f"nothing matches {run.step.passed!r}"
            self._note(run.step, "failed", f"{reason}; {last}", time.monotonic() - run.began)

    def _note(self, step: Step, outcome: str, said: str, seconds: float, say: bool = True) -> None:
        self.record["steps"][step.name] = {
            "outcome": outcome, "said": said[:500], "seconds": round(seconds, 1),
            "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(self.record, indent=1) + "\n")
        draft.replace(self.path)
        if say:
            print(f"{step.name}: {outcome} ({seconds:.0f} s): {said}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "verified", help="record and logs")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="for all of it")
    parser.add_argument("--steps", default="", help="only those whose names begin with one of these")
    parser.add_argument("--measure", action="store_true", help="the benchmarks as well")
    parser.add_argument("--racecheck-libraries", type=Path, help="what the target nwor_cuda_racecheck built")
    parser.add_argument("--share", type=int, default=1, help="tests that may run on one GPU at once")
    args = parser.parse_args()

    import torch

    from nwor.ops.library import CUDA_LIBRARY, find

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    library = find(CUDA_LIBRARY)
    if not torch.cuda.is_available() or library is None:
        missing = (
            "PyTorch sees no GPU" if library else f"{CUDA_LIBRARY} is not built: make test-gpu builds it"
        )
        print(f"{missing}; torch {torch.__version__}", file=sys.stderr)
        return 2
    out = args.out.resolve()
    racecheck = args.racecheck_libraries.resolve() if args.racecheck_libraries else None
    libraries = [library, racecheck / CUDA_LIBRARY] if racecheck else [library]
    steps = checks(racecheck) + (measurements(out) if args.measure else [])
    begins = tuple(filter(None, args.steps.split(",")))
    if begins:
        steps = [step for step in checks(racecheck) + measurements(out) if step.name.startswith(begins)]
        if not steps:
            print(f"no step begins with one of {args.steps!r}", file=sys.stderr)
            return 2
    verification = Verification(out, gpus, build_digest(*libraries), args.share)
    verification.record |= {
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(i) for i in range(len(gpus))],
    }
    return 0 if verification.execute(steps, args.budget_seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
