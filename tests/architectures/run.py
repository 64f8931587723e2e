"""Runs tiny models in engines of their own and writes one record of each, as a line of JSON.

``python -m tests.architectures.run RECORDS [--gpu] [--all] [--names NAME...]``. vLLM is imported once. Each
engine then runs in a forked process, with one thread: two of a model, one with NWOR and one of plain vLLM.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.architectures import experts, weights
from tests.architectures.cases import CASES, VOCABULARY, Case
from tests.architectures.devices import CPU, GPU, Device, engines_at_once, missing, settings, tried_on
from tests.architectures.drafters import DRAFTERS
from tests.architectures.gpu_cases import GPU_DRAFTERS, GPU_MODELS
from tests.engine import runner
from tests.gpu import near_ties
from tests.pipeline_runs import drain

#: Of the counters of a rank.
COUNTED = ("windows", "draft_tokens", "accepted_tokens", "direct_windows", "commit_bytes", "log_bytes")
#: Kinds of outputs.
KINDS = ("greedy", "hits", "alone", "seeded")
#: How much farther outputs may be with an fp8 cache. On a CPU two of vLLM's own attentions, beside such a
#: cache, made 1.3 times as much of a dense model's log-probabilities as beside one in bfloat16.
FP8_SCALE = 2.0


def prompts(device: Device) -> list[dict[str, list[int]]]:
    """Return prompts of tokens, some of which come back, so that n-grams are found."""
    import random

    chosen = random.Random(7)
    made = []
    for length in device.lengths:
        part = [chosen.randrange(3, VOCABULARY) for _ in range(min(length, 12))]
        made.append({"prompt_token_ids": [*part * (length // len(part)), *part][:length]})
    return made


def generate(llm: Any, device: Device, *, seeded: bool = False, alone: int = 0) -> dict[str, Any]:
    """Return tokens, and log-probabilities where a device has them.

    Args:
        llm: the engine.
        device: where it runs.
        seeded: whether tokens are drawn.
        alone: how many of the last prompts are answered, one by one; 0 for all prompts together.

    """
    from vllm import SamplingParams

    asked = prompts(device)
    params = [
        SamplingParams(
            temperature=0.8 if seeded else 0.0,
            seed=100 + index,
            max_tokens=device.new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=device.logprobs,
        )
        for index in range(len(asked))
    ]
    parts = (
        [slice(0, None)] if not alone else [slice(i, i + 1) for i in range(len(asked) - alone, len(asked))]
    )
    made: list[Any] = []
    for part in parts:
        made += llm.generate(asked[part], params[part], use_tqdm=False)
    # A step that was scheduled ahead belongs to this run and to its mode.
    drain(llm)
    if device.logprobs is None:
        return {"tokens": [tuple(output.outputs[0].token_ids) for output in made]}
    return dict(zip(("tokens", "logprobs"), near_ties.read(made), strict=True))


def outputs(llm: Any, device: Device) -> dict[str, dict[str, Any]]:
    """Return what one engine answers: together, with prefix hits, one by one, and sampled by seeds."""
    assert llm.reset_prefix_cache()
    first = generate(llm, device)
    again = generate(llm, device)
    alone = generate(llm, device, alone=3)
    seeded = generate(llm, device, seeded=True)
    return dict(zip(KINDS, (first, again, alone, seeded), strict=True))


def prepare(case: Case, device: Device) -> None:
    """Settle what a process has to know before its engine starts."""
    from vllm.model_executor.models import registry

    if runner.AHEAD:
        runner.schedule_asynchronously()
    weights.register()
    # Classes are looked at here: vLLM would do so in one more process each, which imports everything anew.
    registry._run_in_subprocess = lambda look: look()
    if device is GPU:
        if case.runner is not None:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if case.runner == "V2" else "0"
        experts.stand_in()


def engine(case: Case, device: Device, folder: Path, *, nwor: bool) -> Any:
    """Start an engine of a case in this process."""
    (folder / "config.json").write_text(json.dumps(case.config_json()))
    speculation = dict(case.speculation)
    if case.draft is not None:
        speculation["model"] = str(folder / "draft")
        (folder / "draft").mkdir()
        (folder / "draft" / "config.json").write_text(json.dumps(case.draft))
    if nwor:
        from nwor.engine.plugin import register

        register()
    from vllm import LLM

    prepare(case, device)
    extra: dict[str, Any] = {}
    if nwor:
        extra["additional_config"] = {"nwor": {"mode": "off", "self_check_interval": 2}}
    return LLM(str(folder), speculative_config=speculation, **settings(device, case), **extra)


def with_nwor(case: Case, device: Device, folder: Path) -> dict[str, Any]:
    """Return what an engine with NWOR answers in each mode, and what became of its windows."""
    llm = engine(case, device, folder, nwor=True)
    llm.collective_rpc("count_replays")
    modes: dict[str, Any] = {}
    for mode in ("off", "stage", "cow"):
        llm.collective_rpc("nwor_set_mode", args=(mode,))
        llm.collective_rpc("nwor_reset_stats")
        modes[mode] = {"outputs": outputs(llm, device)}
        modes[mode]["counts"] = llm.collective_rpc("nwor_report")[0]["counts"]
    report = llm.collective_rpc("nwor_report")[0]
    found = {
        "modes": modes,
        "report": report,
        "control": None,
        "layers": llm.collective_rpc("layers")[0],
        "replays": llm.collective_rpc("replays")[0],
        "about": llm.collective_rpc("about")[0],
    }
    if report["unsupported"] is None and report["fault"] is None:
        llm.collective_rpc("nwor_set_mode", args=("stage",))
        llm.collective_rpc("write_nothing")
        assert llm.reset_prefix_cache()
        found["control"] = generate(llm, device)
    return found


def plain(case: Case, device: Device, folder: Path) -> dict[str, Any]:
    """Return what an engine of plain vLLM answers."""
    llm = engine(case, device, folder, nwor=False)
    return {"outputs": outputs(llm, device), "about": llm.collective_rpc("about")[0]}


def work(case: Case, device: Device, part: str, sender: Any) -> None:
    """Run one engine of a case in this process and send what it found."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = {"plain": plain, "nwor": with_nwor}[part](case, device, Path(folder))
        except BaseException:  # whatever it is, it goes into the record
            error = traceback.format_exc()
            found = {"error": error[-4000:], "missing": missing(error)}
    spent = resource.getrusage(resource.RUSAGE_SELF)
    found["seconds"] = round(spent.ru_utime + spent.ru_stime, 1)
    found["waited"] = round(time.monotonic() - started, 1)
    sender.send(found)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what a forked process inherited is not its own to clean up


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, int]:
    """Return how many outputs of each kind have other tokens."""
    return {
        kind: sum(a != b for a, b in zip(one[kind]["tokens"], other[kind]["tokens"], strict=True))
        for kind in KINDS
    }


def rounding(one: dict[str, Any], off: dict[str, Any], scale: float, greedy: bool = True) -> dict[str, Any]:
    """Return how far outputs of one kind are from those of `off`, and how many part at no near-tie.

    Args:
        one: tokens and log-probabilities.
        off: likewise.
        scale: how much farther than :mod:`near_ties` says outputs may be.
        greedy: whether each token is the likeliest; others say nothing by where they part.

    """
    largest, widest, far = 0.0, 0.0, 0
    for index in range(len(off["tokens"])):
        ours, theirs = ({name: [values[index]] for name, values in each.items()} for each in (one, off))
        difference, gap = near_ties.differences(ours, theirs)
        gap = gap if greedy else 0.0
        far += difference > near_ties.MOST_DIFFERENCE * scale or gap > near_ties.MOST_GAP * scale
        largest, widest = max(largest, difference), max(widest, gap)
    # What has nothing in common is infinitely far, for which JSON has no number.
    return {"difference": round(min(largest, 99.0), 3), "gap": round(min(widest, 99.0), 3), "far": far}


def record(case: Case, device: Device, found: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a case: what is compared, in words and numbers."""
    nwor, stock = found["nwor"], found["plain"]
    base = {
        "name": case.name,
        "architecture": case.architecture,
        "device": device.name,
        "seconds": {part: each.get("waited", 0.0) for part, each in found.items()},
    }
    errors = {part: each["error"] for part, each in found.items() if "error" in each}
    if errors:
        absent = {part: each.get("missing") for part, each in found.items() if "error" in each}
        return base | {"errors": errors, "missing": absent}
    modes = {mode: each["outputs"] for mode, each in nwor["modes"].items()} | {"plain": stock["outputs"]}
    off, control = modes.pop("off"), nwor["control"]
    report = nwor["report"]
    if device.logprobs is not None:
        scale = FP8_SCALE if str(case.engine.get("kv_cache_dtype")).startswith("fp8") else 1.0
        base["rounding"] = {
            mode: {kind: rounding(seen[kind], off[kind], scale, kind != "seeded") for kind in KINDS}
            for mode, seen in modes.items()
        }
        base["control_rounding"] = None if control is None else rounding(control, off["greedy"], scale)
    return base | {
        "drafter": f"{case.speculation['method']}, {case.speculation['num_speculative_tokens']}",
        "direct": report["unsupported"],
        "fault": report["fault"],
        "self_checks": report["self_checks"],
        "layers": nwor["layers"],
        "replays": nwor["replays"],
        "runners": {part: each["about"]["runner"] for part, each in found.items()},
        "differing": {mode: differing(seen, off) for mode, seen in modes.items()},
        "outputs": sum(len(off[kind]["tokens"]) for kind in KINDS),
        "distinct_tokens": len({token for answer in off["greedy"]["tokens"] for token in answer}),
        "control": None
        if control is None
        else sum(a != b for a, b in zip(control["tokens"], off["greedy"]["tokens"], strict=True)),
        "prompts": len(device.lengths),
        "counts": {
            mode: {name: each["counts"][name] for name in COUNTED} for mode, each in nwor["modes"].items()
        },
        "tried_on": tried_on(device, case, nwor["about"]),
        "processor_seconds": {part: each["seconds"] for part, each in found.items()},
    }


def run(cases: Sequence[Case], path: Path, device: Device, limit: float = 900.0) -> None:
    """Run cases, several engines at a time, and write their records.

    Args:
        cases: what to run.
        path: a file, which is written anew.
        device: where.
        limit: seconds after which an engine is given up.

    Raises:
        RuntimeError: if importing vLLM has opened the GPU, which no process that is forked then can.

    """
    for module in device.imported:
        importlib.import_module(module)
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA is initialized before processes are forked")
    gc.collect()
    gc.freeze()  # an engine that starts collects garbage five times
    fork = multiprocessing.get_context("fork")
    most = engines_at_once(device)
    jobs = [(case, part) for case in cases for part in ("nwor", "plain")]
    jobs.sort(key=lambda job: job[0].graphs in ("piecewise", "both"))  # the last begins; these take longest
    running: list[tuple[Case, str, Any, Any, float]] = []
    found: dict[str, dict[str, Any]] = {case.name: {} for case in cases}
    path.write_text("")
    while jobs or running:
        while jobs and len(running) < most:
            case, part = jobs.pop()
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=work, args=(case, device, part, sender))
            process.start()
            sender.close()
            running.append((case, part, process, receiver, time.monotonic()))
        ready = multiprocessing.connection.wait([each[3] for each in running], timeout=1.0)
        for each in list(running):
            case, part, process, receiver, start = each
            took = time.monotonic() - start
            if receiver in ready:
                try:
                    answer = receiver.recv()
                except EOFError:
                    answer = {"error": "the process died", "waited": took}
            elif took > limit:
                process.kill()
                answer = {"error": f"no answer within {limit:.0f} s", "waited": took}
            else:
                continue
            process.join()
            running.remove(each)
            found[case.name][part] = answer
            if len(found[case.name]) == 2:
                with path.open("a") as file:
                    file.write(json.dumps(record(case, device, found[case.name])) + "\n")


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description="Run tiny models of many architectures.")
    parser.add_argument("records", type=Path)
    parser.add_argument("--gpu", action="store_true", help="on a GPU, its own cases among them")
    parser.add_argument("--all", action="store_true", help="not only those of continuous integration")
    parser.add_argument(
        "--names", nargs="*", help="those of these names, whether in continuous integration or not"
    )
    args = parser.parse_args()
    device = GPU if args.gpu else CPU
    if any(os.environ.get(name) != value for name, value in device.environment.items()):
        # Torch is loaded already, and its threads were counted then.
        again = [sys.executable, "-m", "tests.architectures.run", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | device.environment)
    every = [*GPU_MODELS, *GPU_DRAFTERS] if args.gpu else [*CASES, *DRAFTERS]
    chosen = [case for case in every if args.all or case.quick]
    if args.names is not None:
        chosen = [case for case in every if case.name in args.names]
    run(chosen, args.records, device)


if __name__ == "__main__":
    main()
