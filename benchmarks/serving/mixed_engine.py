"""One engine of the mixed-step benchmark, stepped by hand; a process of its own, started by mixed_steps.py.

The core's own loop runs: schedule, launch, wait for the step before, account. No front end takes part, so a
step's wall time is the engine's alone.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.serving import mixed_cells, models, results
from benchmarks.serving.mixed_cells import LONG, Cell, Step
from benchmarks.serving.plan import Arm
from nwor.config import DraftBounds

#: Context of the requests that decode, when a cell begins: this and a little more each.
CONTEXT = 512
#: Steps after a change of mode that are not measured: the one ahead was launched before.
SETTLE = 4
_JOINS = "join-"


def _values(settings: list[str]) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in (one.split("=", 1) for one in settings)}


class Rig:
    """The engine and the requests on it.

    A mode with a number, such as ``stage@0``, has the engine choose among numbers of draft tokens, and keeps
    it to that one. So steps of several numbers are measured on one engine.

    Args:
        args: the command line.

    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.modes: list[str] = args.modes.split(",")
        self._parsed = {mode: mixed_cells.parse_mode(mode, args.k) for mode in self.modes}
        self._chooses = any(drafts is not None for _, drafts in self._parsed.values())
        self._drafts: int = args.k
        self._numbers = itertools.count()
        self._random = random.Random(1)
        self._arrived: list[tuple[float, float, dict[str, int]]] = []
        self._waited = 0.0
        self._ids: list[str] = []
        self.steps = 0

    def start(self) -> dict[str, Any]:
        """Start the engine and return what it took, and what NWOR says of it."""
        from vllm import LLM

        args = self.args
        target, draft, _ = models.write(Path(args.folder), args.shape, args.max_len)
        extra: dict[str, Any] = {}
        if self.modes == ["stock"]:
            os.environ["NWOR_DISABLE"] = "1"
        else:
            from nwor.engine.plugin import register

            register()
            modes = list(dict.fromkeys(mode for mode, _ in self._parsed.values()))
            settings = {"mode": modes[0], "modes": modes}
            if self._chooses:
                settings["draft_tokens"] = str(DraftBounds(0, args.k))
            settings |= _values(args.nwor)
            extra["additional_config"] = {"nwor": settings}
        extra |= _values(args.engine)
        began = time.perf_counter()
        self.llm = LLM(
            str(target),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=args.max_len,
            max_num_seqs=max(cell.requests for cell in args.cells) + 8,
            # Room for a chunk beside all windows. vLLM's bound for chunks would turn NWOR's short way off.
            max_num_batched_tokens=args.chunk + max(cell.requests for cell in args.cells) * (args.k + 1),
            gpu_memory_utilization=0.8,
            enable_prefix_caching=False,
            kv_cache_dtype=args.cache_dtype,
            kv_cache_memory_bytes=int(args.cache_gib * 2**30),
            speculative_config=models.speculation(
                draft, "eagle", Arm("stage", "stage", args.k, self._chooses), args.acceptance, 1
            ),
            disable_log_stats=False,  # as a server
            seed=0,
            **extra,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self._watch()
        config = self.llm.llm_engine.vllm_config
        report = None if self.modes == ["stock"] else self.llm.collective_rpc("nwor_report")[0]
        return {
            "start_s": time.perf_counter() - began,
            "cache_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            "graph_mode": str(config.compilation_config.cudagraph_mode).rsplit(".", 1)[-1],
            "graph_tokens": config.compilation_config.max_cudagraph_capture_size,
            "batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "unsupported": report and report["unsupported"],
        }

    def _watch(self) -> None:
        """Note when each step's results come, and how long the host waits for the device."""
        scheduler, own = self.core.scheduler, self.core.scheduler.update_from_output

        def update(scheduled: Any, output: Any) -> Any:
            self._arrived.append((time.perf_counter(), self._waited, scheduled.num_scheduled_tokens))
            return own(scheduled, output)

        scheduler.update_from_output = update
        import torch

        if torch.cuda.is_available():
            # The only wait of a step: for the event behind its results' copy to the host.
            wait = torch.cuda.Event.synchronize

            def synchronize(event: Any) -> None:
                began = time.perf_counter()
                wait(event)
                self._waited += time.perf_counter() - began

            torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign,assignment]

    def request(self, prompt: int, answer: int, name: str, bound: int | None = None) -> Any:
        """Return a request for the core; NWOR bounds the draft tokens of its windows."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        from nwor.engine.draft_lengths.request_bounds import MAX_DRAFT_TOKENS

        number = next(self._numbers)
        extra = None if bound is None else {MAX_DRAFT_TOKENS: bound}
        params = SamplingParams(
            temperature=0.0, seed=number, max_tokens=answer, ignore_eos=True, extra_args=extra
        )
        words = self._random.choices(range(8, models.vocabulary(self.args.shape)), k=prompt)
        made = EngineCoreRequest(f"{name}{number}", words, None, params, None, time.time(), None, None, None)
        return self.core.preprocess_add_request(made)[0]

    def begin(self, cell: Cell) -> None:
        """Start the requests that decode, and step until all of them do."""
        self._ids = []
        self.switch(self.modes[0])
        answer, stock = self.args.max_len - 2 * CONTEXT, self.modes == ["stock"]
        bounds = [None if stock else cell.bound(index) for index in range(cell.requests)]
        for index, bound in enumerate(bounds):
            made = self.request(CONTEXT + 13 * (index % 17), answer, "decode-", bound)
            self._ids.append(made.request_id)
            self.core.add_request(made)
        k = self._drafts
        wanted = sum(1 + (k if bound is None else min(bound, k)) for bound in bounds)
        for _ in range(10000):
            self.step()
            if self._arrived and sum(self._arrived[-1][2].values()) == wanted:
                break
        else:
            raise RuntimeError("the requests did not come to decode")
        for _ in range(SETTLE):
            self.step()

    def step(self) -> None:
        """Let the core do a step as its own loop does."""
        self.steps += 1
        _, executed = self.core.step_fn()
        self.core.post_step(executed)

    def block(self, mode: str, cell: Cell, steps: int) -> dict[str, Any]:
        """Measure a block of steps in a mode.

        Raises:
            RuntimeError: if the mode did not stay in force.

        """
        self.switch(mode)
        in_chunks = cell.prompt > self.args.chunk
        count = steps * self.args.chunk // cell.prompt if in_chunks else steps // cell.every
        joining = iter([self.request(cell.prompt, 1, _JOINS) for _ in range(count + 2 if cell.prompt else 0)])
        for _ in range(SETTLE):
            self.step()
        before = self.counts()
        gc.collect()
        self._arrived.clear()
        number, current = 0, None
        # The step ahead of the first prompt's is the block's start.
        while len(self._arrived) < steps + 2:
            if in_chunks:
                if current is None or current.num_computed_tokens >= cell.prompt:
                    current = next(joining)
                    self.core.add_request(current)
            elif cell.prompt and number % cell.every == 0:
                self.core.add_request(next(joining))
            self.step()
            number += 1
        arrived = self._arrived[1 : steps + 2]
        if current is not None and current.num_computed_tokens < cell.prompt:
            self.core.abort_requests([current.request_id])
        for _ in range(2):
            self.step()
        found = [_as_step(after, before_it) for before_it, after in itertools.pairwise(arrived)]
        return {**mixed_cells.describe(found), "counts": _grown(before, self.counts())}

    def switch(self, mode: str) -> None:
        """Put a mode in force, and its number of draft tokens where the engine has several."""
        name, drafts = self._parsed[mode]
        if name != "stock":
            self.llm.collective_rpc("nwor_set_mode", args=(name,))
        if self._chooses:
            self._drafts = self.args.k if drafts is None else drafts
            self.llm.collective_rpc("nwor_set_draft_tokens", args=(str(self._drafts),))

    def counts(self) -> dict[str, Any]:
        """Return NWOR's counters."""
        if self.modes == ["stock"]:
            return {}
        report = self.llm.collective_rpc("nwor_report")[0]
        if report["fault"] is not None:
            raise RuntimeError(f"NWOR stopped: {report['fault']}")
        counts = report["counts"]
        return {"windows": counts["windows"], "direct": dict(counts["direct_windows"])}

    def end(self) -> None:
        """Abort everything and take in what is under way."""
        left = list(self.core.scheduler.requests)
        self.core.abort_requests(left)
        for _ in range(16):
            if not self.core.batch_queue and not self.core.scheduler.has_requests():
                return
            self.step()
        raise RuntimeError("steps were still under way after their requests had been aborted")


def _as_step(after: tuple[float, float, dict[str, int]], before: tuple[float, float, dict[str, int]]) -> Step:
    scheduled = after[2]
    rows = sum(tokens for name, tokens in scheduled.items() if name.startswith(_JOINS))
    joins = sum(name.startswith(_JOINS) for name in scheduled)
    return Step(after[0] - before[0], after[1] - before[1], len(scheduled) - joins, rows)


def _grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    if not after:
        return {}
    direct = {
        reason: count - before["direct"].get(reason, 0)
        for reason, count in after["direct"].items()
        if count != before["direct"].get(reason, 0)
    }
    return {"windows": after["windows"] - before["windows"], "direct": direct}


def measure(rig: Rig, cell: Cell, blocks: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Return the blocks of each mode: turn by turn, each turn in the other order."""
    rig.begin(cell)
    try:
        for mode in rig.modes:
            rig.block(mode, cell, min(steps, 12))
        found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in rig.modes}
        for number in range(blocks):
            for mode in rig.modes if number % 2 == 0 else rig.modes[::-1]:
                found[mode].append(rig.block(mode, cell, steps))
        return found
    finally:
        rig.end()


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line that mixed_steps.py makes."""
    parser = argparse.ArgumentParser()
    for name in (
        "--shape",
        "--cache-dtype",
        "--modes",
        "--acceptance",
        "--folder",
        "--out",
        "--cells",
        "--profile",
    ):
        parser.add_argument(name, required=True)
    for name in ("--k", "--chunk", "--every", "--blocks", "--steps", "--max-len"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--cache-gib", "--until"):
        parser.add_argument(name, type=float, required=True)
    parser.add_argument("--engine", action="append", default=[])
    parser.add_argument("--nwor", action="append", default=[])
    args = parser.parse_args(argv)
    args.cells = mixed_cells.parse(args.cells, args.every)
    args.profile = mixed_cells.parse(args.profile, args.every) if args.profile else []
    return args


def main(argv: list[str]) -> int:
    """Measure on one engine until the time is up; every cell is written when it is done."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    args = parse(argv)
    record: dict[str, Any] = {"cells": [], "profiles": [], "error": None, "skipped": []}
    out = Path(args.out)
    try:
        record |= results.machine()
        rig = Rig(args)
        record["engine"] = rig.start()
        record["engine"]["settings"] = [*args.engine, *args.nwor]
        print(f"{args.shape} {args.cache_dtype}: up after {record['engine']['start_s']:.0f} s", flush=True)
        if record["engine"]["unsupported"]:
            raise RuntimeError(f"NWOR stages nothing on this engine: {record['engine']['unsupported']}")
        took = 8.0
        for cell in args.cells:
            if time.time() + 1.3 * took > args.until:
                record["skipped"].append(cell.name)
                continue
            began = time.time()
            blocks = measure(rig, cell, args.blocks, args.steps)
            took = max(took, time.time() - began)
            record["cells"].append(asdict(cell) | {"blocks": blocks})
            out.write_text(json.dumps(record))
            print(describe(args, cell, blocks, time.time() - began), flush=True)
        if args.profile:
            from benchmarks.serving import mixed_profile

            for cell in args.profile:
                if time.time() + 15 > args.until:
                    break
                record["profiles"].append(mixed_profile.profile(rig, cell))
                out.write_text(json.dumps(record))
    except Exception:
        record["error"] = traceback.format_exc()
        traceback.print_exc()
    out.write_text(json.dumps(record))
    return 1 if record["error"] else 0


def describe(
    args: argparse.Namespace, cell: Cell, blocks: dict[str, list[dict[str, Any]]], took: float
) -> str:
    """Return a cell in a line."""
    prompt = "16k" if cell.prompt == LONG else str(cell.prompt)
    parts = [f"{args.shape} {args.cache_dtype} {cell.clients:>3} x {prompt:>5}"]
    base = next(iter(blocks))
    for mode, found in blocks.items():
        typical = mixed_cells.geometric_mean([one["typical"] for one in found])
        host = mixed_cells.geometric_mean([one["host"] for one in found])
        text = f"{mode} {typical:.3f} ms (host {host:.2f})"
        if mode != base:
            each = mixed_cells.ratios(blocks, base, mode, "typical")
            text += f" = {mixed_cells.geometric_mean(each):.3f} ({min(each):.3f} to {max(each):.3f})"
            direct = sum(sum(one["counts"]["direct"].values()) for one in found)
            text += f", direct {direct}"
        parts.append(text)
    return "  ".join(parts) + f"  [{took:.0f} s]"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
