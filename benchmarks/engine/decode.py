"""Decode throughput of one engine, without the prefill; run by compare.py, which gives it its turns.

Weights are dummies and acceptance is synthetic (forced by vLLM itself): what is measured is the cost of
a verify step, never the quality of a model. Everything is written to the output file after each cell.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import grid
import host_time
import shapes
from drive import Batch
from turns import Turns

#: Name of the only "mode" of an engine without NWOR.
STOCK = "stock"
#: Attention backends with which NWOR stages only where that is asked for: the setting's name by vLLM's.
ASKED_FOR = {"TRITON_ATTN": "triton", "FLASHINFER": "flashinfer"}
#: The repository: NWOR's package is taken from here where it is not installed.
ROOT = Path(__file__).resolve().parents[2]
#: Requests that every engine is started for, whichever batches are measured.
MAX_REQUESTS = 64


class Engine:
    """The engine of this process and its record.

    Args:
        args: the command line.

    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.nwor_modes: list[str] = [mode for mode in args.modes.split(",") if mode]
        self.modes = self.nwor_modes or [STOCK]
        self.turns = Turns(args.turns)
        self.record: dict[str, Any] = {
            "kind": "nwor" if self.nwor_modes else STOCK,
            "shape": shapes.label(args.shape, args.cache_dtype, args.attention_backend),
            "k": args.k,
            "modes": self.modes,
            "tree": args.tree,
            "adaptive": args.adaptive,
            "draft_vocabulary": args.draft_vocabulary,
            "error": None,
            "cells": [],
            "skipped": [],
        }
        self.llm: Any = None

    def start(self) -> None:
        """Start the engine, with NWOR where modes were asked for, and note what it took.

        Raises:
            RuntimeError: if NWOR cannot stage on it.

        """
        import torch
        import vllm
        from vllm import LLM

        args = self.args
        target, draft = shapes.write(Path(args.folder), args.shape, args.max_len)
        extra: dict[str, Any] = {}
        if self.nwor_modes:
            from nwor.engine.plugin import register

            register()  # what vLLM does by itself where the package is installed
            settings: dict[str, Any] = {"mode": self.modes[0], "modes": self.modes}
            if args.tree:
                *size, kind = args.tree.split(",")
                tree = dict(zip(("nodes", "depth", "width"), map(int, size), strict=True))
                settings["tree"] = {**tree, "kind": kind}
            if args.draft_vocabulary:
                settings["draft_vocabulary"] = args.draft_vocabulary
            if args.attention_backend in ASKED_FOR:
                settings["attention_backends"] = [ASKED_FOR[args.attention_backend]]
            extra["additional_config"] = {"nwor": settings}
        if args.attention_backend:
            extra["attention_backend"] = args.attention_backend
        if args.capture_tokens:
            extra["compilation_config"] = {"max_cudagraph_capture_size": args.capture_tokens}
        started = time.perf_counter()
        self.llm = LLM(
            str(target),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=args.max_len,
            max_num_seqs=max(MAX_REQUESTS, *args.batches),
            # Two engines share the GPU, so neither may take what it finds free.
            gpu_memory_utilization=0.4,
            kv_cache_dtype=args.cache_dtype,
            kv_cache_memory_bytes=int(args.cache_gib * 2**30),
            speculative_config={
                "model": str(draft),
                "method": "eagle",
                "num_speculative_tokens": args.k,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [args.acceptances[0] ** i for i in range(1, args.k + 1)],
                **({"enable_adaptive_verification": True} if args.adaptive else {}),
            },
            worker_extension_cls="worker_tools.WorkerTools",
            seed=0,
            **extra,
        )
        self.record["start_seconds"] = time.perf_counter() - started
        config = self.llm.llm_engine.vllm_config
        cache = config.cache_config
        self.block_size: int = cache.block_size
        self.cache_tokens: int = cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size
        on_gpu = torch.cuda.is_available()
        self.record |= {
            "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "CPU",
            "date": time.strftime("%Y-%m-%d"),
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "cache_blocks": cache.num_gpu_blocks,
            "block_size": self.block_size,
            "cache_tokens": self.cache_tokens,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "graph_mode": str(config.compilation_config.cudagraph_mode).rsplit(".", 1)[-1],
            "graph_tokens": config.compilation_config.max_cudagraph_capture_size,
        }
        self.save()
        if self.nwor_modes and self.report()["unsupported"] is not None:
            raise RuntimeError(f"NWOR stages nothing on this engine: {self.report()['unsupported']}")

    def report(self) -> dict[str, Any]:
        """Return NWOR's report of the only rank, and keep it in the record."""
        report: dict[str, Any] = self.llm.collective_rpc("nwor_report")[0]
        self.record["report"] = report
        return report

    def save(self) -> None:
        """Write the record; a reader never finds half of one."""
        path = Path(self.args.output)
        draft = path.with_name(path.name + ".new")
        draft.write_text(json.dumps(self.record))
        draft.replace(path)

    def batch(self, context: int, batch: int) -> Batch:
        """Return a batch of requests on this engine."""
        return Batch(self.llm.llm_engine, context, batch, self.args.max_len)

    def set_acceptance(self, rate: float) -> None:
        """Set the synthetic acceptance of the steps to come."""
        self.llm.collective_rpc("bench_set_acceptance", args=(rate,))

    def set_mode(self, mode: str) -> None:
        """Put an NWOR mode in force; an engine without NWOR has none."""
        if self.nwor_modes:
            self.llm.collective_rpc("nwor_set_mode", args=(mode,))

    def run(self, mode: str, cell: grid.Cell, steps: int) -> tuple[float, int, int]:
        """Return a run's seconds and tokens, and how many windows were written directly against its mode.

        Raises:
            RuntimeError: if the mode did not stay in force.

        """
        self.set_mode(mode)
        gc.collect()  # not in the middle of it
        before = self.report() if self.nwor_modes else None
        with self.batch(cell.context, cell.batch) as batch:
            seconds, tokens = batch.run(steps)
        if before is None:
            return seconds, tokens, 0
        after = self.report()
        if after["fault"] is not None or after["mode"] != mode:
            raise RuntimeError(f"NWOR's mode is {after['mode']} after a run in {mode}: {after['fault']}")
        direct = [sum(report["counts"]["direct_windows"].values()) for report in (before, after)]
        return seconds, tokens, direct[1] - direct[0]

    def measure(self, cells: list[grid.Cell]) -> None:
        """Measure the cells of one context and batch, in turns with the other engine.

        Args:
            cells: the cells.

        """
        args = self.args
        growth = int(1.5 * args.most_tokens)
        needed = grid.tokens_needed(cells[0].context, cells[0].batch, growth, self.block_size)
        if needed > self.cache_tokens:
            self.skip(cells, f"needs {needed} tokens of KV cache, the engine has {self.cache_tokens}")
            return
        group = f"{cells[0].context}x{cells[0].batch}"
        if not self.turns.ask("group", cell=group)["go"]:
            self.skip(cells, "time was up")
            return
        self.set_acceptance(cells[0].acceptance)
        warm = [self.run(mode, cells[0], grid.WARM_STEPS)[0] / grid.WARM_STEPS for mode in self.modes]
        for cell in cells:
            steps = grid.steps_of_run(warm[0], args.run_seconds, args.k, cell.acceptance, args.most_tokens)
            result: dict[str, Any] = {**vars(cell), "seconds": {}, "tokens": {}, "direct": {}}
            for repeat in range(args.repeats):
                # The engine without NWOR comes first and says how many steps both take.
                steps = self.turns.ask("run", cell=f"{group}x{cell.acceptance}", steps=steps)["steps"]
                self.set_acceptance(cell.acceptance)
                turn = repeat % len(self.modes)  # no mode always follows the same one
                for mode in self.modes[turn:] + self.modes[:turn]:
                    seconds, tokens, direct = self.run(mode, cell, steps)
                    result["seconds"].setdefault(mode, []).append(seconds)
                    result["tokens"].setdefault(mode, []).append(tokens)
                    result["direct"][mode] = result["direct"].get(mode, 0) + direct
            result["steps"] = steps
            self.record["cells"].append(result)
            self.save()
            rates = {mode: self._rates(result, mode) for mode in self.modes}
            print(args.shape, f"k={args.k}", cell, f"{steps} steps", rates, flush=True)

    @staticmethod
    def _rates(result: dict[str, Any], mode: str) -> list[int]:
        pairs = zip(result["tokens"][mode], result["seconds"][mode], strict=True)
        return [round(tokens / seconds) for tokens, seconds in pairs]

    def skip(self, cells: list[grid.Cell], reason: str) -> None:
        """Note cells that are not measured, and why."""
        self.record["skipped"] += [{**vars(cell), "reason": reason} for cell in cells]
        self.save()
        print(self.args.shape, f"k={self.args.k}", "skipped:", len(cells), "cells,", reason, flush=True)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(shapes.SHAPES), required=True)
    parser.add_argument("--k", type=int, default=4, help="draft tokens of a step")
    parser.add_argument("--modes", default="", help="comma-separated NWOR modes; empty for stock vLLM")
    parser.add_argument("--tree", default="", help="NODES,DEPTH,WIDTH,KIND of trees; k is the nodes")
    parser.add_argument("--adaptive", action="store_true", help="vLLM's adaptive verification; k is the most")
    parser.add_argument("--draft-vocabulary", type=int, default=0, help="ids that are drafted; 0 for all")
    parser.add_argument("--contexts", type=grid.numbers, default=[512, 4096, 16384])
    parser.add_argument("--batches", type=grid.numbers, default=[1, 16, 64])
    parser.add_argument("--acceptances", type=grid.fractions, default=[0.3, 0.6, 0.9])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run-seconds", type=float, default=0.5)
    parser.add_argument("--most-tokens", type=int, default=1024, help="most tokens a request gains in a run")
    parser.add_argument("--host-steps", type=int, default=0, help="steps of the host's time; 0 for none")
    parser.add_argument("--turns", default="", help="ends of the pipes over which turns are given")
    parser.add_argument("--cache-gib", type=float, default=40.0, help="size of the KV cache")
    parser.add_argument("--cache-dtype", default="auto", help="of the KV cache, as vLLM's --kv-cache-dtype")
    parser.add_argument("--attention-backend", default="", help="vLLM's name; empty for its own choice")
    parser.add_argument("--capture-tokens", type=int, default=0, help="largest CUDA graph; 0 for vLLM's own")
    parser.add_argument("--max-len", type=int, default=20480)
    parser.add_argument("--folder", default="/tmp/nwor-shapes")
    parser.add_argument("--output", required=True)
    return parser.parse_args()


def main() -> None:
    """Measure what the command line asks for; exits with 1 after an error, the record being written."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the batches are stepped in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    sys.path.append(str(ROOT))
    args = parse()
    engine = Engine(args)
    try:
        engine.start()
        engine.turns.ask("start")
        if args.host_steps:
            try:
                host_time.measure(engine, args.host_steps)
            except Exception:
                traceback.print_exc()
                engine.record.setdefault("host_time", {})["error"] = traceback.format_exc(limit=-2)
            engine.save()
        for cells in grid.groups(args.contexts, args.batches, args.acceptances):
            try:
                engine.measure(cells)
            except Exception as error:
                traceback.print_exc()
                done = {(e["context"], e["batch"], e["acceptance"]) for e in engine.record["cells"]}
                left = [c for c in cells if (c.context, c.batch, c.acceptance) not in done]
                engine.skip(left, f"{type(error).__name__}: {error}")
    except Exception:
        traceback.print_exc()
        engine.record["error"] = traceback.format_exc(limit=-2)
        engine.save()
        sys.exit(1)
    finally:
        engine.turns.end()


if __name__ == "__main__":
    main()
