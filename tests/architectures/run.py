"""Runs tiny models in engines of their own and writes one record of each, as a line of JSON.

``python -m tests.architectures.run RECORDS [--all] [--names NAME...]``. vLLM is imported once. Each engine
then runs in a forked process, with one thread: two of a model, one with NWOR and one of plain vLLM.
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

from tests.architectures import weights
from tests.architectures.cases import CASES, VOCABULARY, Case
from tests.architectures.drafters import DRAFTERS
from tests.engine import runner

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # As many engines run as there are processors, and models are tiny.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Compiling what finds n-grams takes longer than all that it finds here.
    "NUMBA_DISABLE_JIT": "1",
    # As many as Numba has it gives OpenMP, and so every kernel of the process.
    "NUMBA_NUM_THREADS": "1",
}
#: What every engine needs, imported once for all. Not Numba, beside which vLLM starts no engine.
IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "load_format": weights.FORMAT,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    # Less than the longest prompts: they come in chunks, beside windows.
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "worker_extension_cls": "tests.architectures.probe.Probe",
    "disable_log_stats": False,
}
#: None is one more than a block: stock vLLM draws a prompt's token by other numbers where a hit leaves one.
LENGTHS = (5, 36, 100) if runner.V2 else (3, 5, 9, 14, 20, 36, 48, 64, 77, 100, 150, 200)
#: Less where kernels are interpreted.
NEW_TOKENS = 8 if runner.V2 else 24
#: Of the counters of a rank.
COUNTED = ("windows", "draft_tokens", "accepted_tokens", "direct_windows", "commit_bytes", "log_bytes")


def prompts() -> list[dict[str, list[int]]]:
    """Return prompts of tokens, some of which come back, so that n-grams are found."""
    import random

    chosen = random.Random(7)
    made = []
    for length in LENGTHS:
        part = [chosen.randrange(3, VOCABULARY) for _ in range(min(length, 12))]
        made.append({"prompt_token_ids": [*part * (length // len(part)), *part][:length]})
    return made


def generate(llm: Any, *, seeded: bool = False, alone: int = 0) -> list[list[int]]:
    """Return the tokens of each prompt; of the last so many one at a time."""
    from vllm import SamplingParams

    asked = prompts()
    params = [
        SamplingParams(
            temperature=0.8 if seeded else 0.0,
            seed=100 + index,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            detokenize=False,
        )
        for index in range(len(asked))
    ]
    parts = (
        [slice(0, None)] if not alone else [slice(i, i + 1) for i in range(len(asked) - alone, len(asked))]
    )
    made: list[list[int]] = []
    for part in parts:
        outputs = llm.generate(asked[part], params[part], use_tqdm=False)
        made += [list(output.outputs[0].token_ids) for output in outputs]
    return made


def outputs(llm: Any) -> dict[str, list[list[int]]]:
    """Return what one engine answers: together, with prefix hits, one by one, and sampled by seeds."""
    assert llm.reset_prefix_cache()
    first = generate(llm)
    again = generate(llm)
    alone = generate(llm, alone=3)
    seeded = generate(llm, seeded=True)
    return {"greedy": first, "hits": again, "alone": alone, "seeded": seeded}


def engine(case: Case, folder: str, *, nwor: bool) -> Any:
    """Start an engine of a case in this process."""
    (Path(folder) / "config.json").write_text(json.dumps(case.config_json()))
    if nwor:
        from nwor.engine.plugin import register

        register()
    from vllm import LLM, ModelRegistry

    if runner.AHEAD:
        runner.schedule_asynchronously()
    weights.register()
    # The class itself: otherwise vLLM looks at it in one more process, which imports everything anew.
    loaded = ModelRegistry.models[case.architecture].load_model_cls()
    ModelRegistry.register_model(case.architecture, loaded)
    speculation = dict(case.speculation)
    if case.draft is not None:
        speculation["model"] = str(Path(folder) / "draft")
        (Path(folder) / "draft").mkdir()
        (Path(folder) / "draft" / "config.json").write_text(json.dumps(case.draft))
    settings = {**SETTINGS, "speculative_config": speculation, **case.engine}
    if nwor:
        settings["additional_config"] = {"nwor": {"mode": "off", "self_check_interval": 2}}
    return LLM(folder, **settings)


def with_nwor(case: Case, folder: str) -> dict[str, Any]:
    """Return what an engine with NWOR answers in each mode, and what became of its windows."""
    llm = engine(case, folder, nwor=True)
    modes: dict[str, Any] = {}
    for mode in ("off", "stage", "cow"):
        llm.collective_rpc("nwor_set_mode", args=(mode,))
        llm.collective_rpc("nwor_reset_stats")
        modes[mode] = outputs(llm)
        modes[mode]["counts"] = llm.collective_rpc("nwor_report")[0]["counts"]
    report = llm.collective_rpc("nwor_report")[0]
    found = {"modes": modes, "report": report, "control": None, "layers": llm.collective_rpc("layers")[0]}
    if report["unsupported"] is None and report["fault"] is None:
        llm.collective_rpc("nwor_set_mode", args=("stage",))
        llm.collective_rpc("write_nothing")
        assert llm.reset_prefix_cache()
        found["control"] = generate(llm)
    return found


def plain(case: Case, folder: str) -> dict[str, Any]:
    """Return what an engine of plain vLLM answers."""
    return outputs(engine(case, folder, nwor=False))


def work(case: Case, part: str, sender: Any) -> None:
    """Run one engine of a case in this process and send what it found."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = {"plain": plain, "nwor": with_nwor}[part](case, folder)
        except BaseException:  # whatever it is, it goes into the record
            found = {"error": traceback.format_exc()[-4000:]}
    spent = resource.getrusage(resource.RUSAGE_SELF)
    found["seconds"] = round(spent.ru_utime + spent.ru_stime, 1)
    sender.send(found)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what a forked process inherited is not its own to clean up


def record(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a case: what is compared, in words and numbers."""
    nwor, stock = found["nwor"], found["plain"]
    errors = {part: each["error"] for part, each in found.items() if "error" in each}
    if errors:
        return {"name": case.name, "architecture": case.architecture, "errors": errors}
    off, stage = nwor["modes"]["off"], nwor["modes"]["stage"]
    kinds = ("greedy", "hits", "alone", "seeded")

    def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, int]:
        return {kind: sum(a != b for a, b in zip(one[kind], other[kind], strict=True)) for kind in kinds}

    report = nwor["report"]
    return {
        "name": case.name,
        "architecture": case.architecture,
        "drafter": f"{case.speculation['method']}, {case.speculation['num_speculative_tokens']}",
        "direct": report["unsupported"],
        "fault": report["fault"],
        "self_checks": report["self_checks"],
        "layers": nwor["layers"],
        "differing": {
            "stage": differing(stage, off),
            "cow": differing(nwor["modes"]["cow"], off),
            "plain": differing(stock, off),
        },
        "outputs": sum(len(off[kind]) for kind in kinds),
        "distinct_tokens": len({token for answer in off["greedy"] for token in answer}),
        "control": None
        if nwor["control"] is None
        else sum(a != b for a, b in zip(nwor["control"], off["greedy"], strict=True)),
        "prompts": len(LENGTHS),
        "counts": {
            mode: {name: each["counts"][name] for name in COUNTED} for mode, each in nwor["modes"].items()
        },
        "tried_on": f"CPU, float32, {'V2' if runner.V2 else 'V1'}",
        "processor_seconds": {part: each["seconds"] for part, each in found.items()},
    }


def run(cases: Sequence[Case], path: Path, limit: float = 150.0) -> None:
    """Run cases, as many engines at a time as there are processors, and write their records.

    Args:
        cases: what to run.
        path: a file, which is written anew.
        limit: seconds after which an engine is given up.

    """
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # an engine that starts collects garbage five times
    fork = multiprocessing.get_context("fork")
    most = len(os.sched_getaffinity(0))
    jobs = [(case, part) for case in cases for part in ("nwor", "plain")]
    jobs.reverse()
    running: list[tuple[Case, str, Any, Any, float]] = []
    found: dict[str, dict[str, Any]] = {case.name: {} for case in cases}
    path.write_text("")
    while jobs or running:
        while jobs and len(running) < most:
            case, part = jobs.pop()
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=work, args=(case, part, sender))
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
                    answer = {"error": "the process died"}
            elif took > limit:
                process.kill()
                answer = {"error": f"no answer within {limit:.0f} s"}
            else:
                continue
            process.join()
            running.remove(each)
            found[case.name][part] = answer
            if len(found[case.name]) == 2:
                with path.open("a") as file:
                    file.write(json.dumps(record(case, found[case.name])) + "\n")


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description="Run tiny models of many architectures.")
    parser.add_argument("records", type=Path)
    parser.add_argument("--all", action="store_true", help="not only those of continuous integration")
    parser.add_argument(
        "--names", nargs="*", help="those of these names, whether in continuous integration or not"
    )
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    every = [*CASES, *DRAFTERS]
    chosen = [case for case in every if args.all or case.quick]
    if args.names is not None:
        chosen = [case for case in every if case.name in args.names]
    run(chosen, args.records)


if __name__ == "__main__":
    main()
