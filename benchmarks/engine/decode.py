"""Decode throughput of one engine, without the prefill; run by compare.py, one process an engine.

Weights are dummies and acceptance is synthetic (forced by vLLM itself): what is measured is the cost of
a verify step, never the quality of a model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import shapes


def build(args: argparse.Namespace, modes: list[str]) -> Any:
    """Start an engine in this process; with NWOR where ``modes`` is not empty."""
    from vllm import LLM

    target, draft = shapes.write(Path(args.folder), args.shape, args.max_len)
    extra: dict[str, Any] = {}
    if modes:
        from nwor.engine.plugin import register

        register()  # what vLLM does by itself where the package is installed
        extra["additional_config"] = {"nwor": {"mode": modes[0], "modes": modes}}
    return LLM(
        str(target),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=args.max_len,
        max_num_seqs=64,
        gpu_memory_utilization=0.85,
        speculative_config={
            "model": str(draft),
            "method": "eagle",
            "num_speculative_tokens": args.k,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [args.acceptance**i for i in range(1, args.k + 1)],
        },
        seed=0,
        **extra,
    )


def decode_seconds(engine: Any, batch: int, context: int, tokens: int, seed: int) -> tuple[float, int]:
    """Return seconds and tokens from the moment when every request has its first tokens."""
    import numpy
    from vllm import SamplingParams

    generator = numpy.random.default_rng(seed)
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
    )
    for index in range(batch):
        prompt = generator.integers(10, 100000, context).tolist()
        engine.add_request(f"{seed}-{index}-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, params)
    made: dict[str, int] = {}
    while len(made) < batch:
        for output in engine.step():
            made[output.request_id] = len(output.outputs[0].token_ids)
    first = sum(made.values())
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            made[output.request_id] = len(output.outputs[0].token_ids)
    return time.perf_counter() - started, sum(made.values()) - first


def main() -> None:
    """Measure the cells given on the command line and print one JSON line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(shapes.SHAPES), required=True)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.6)
    parser.add_argument("--modes", default="", help="comma-separated NWOR modes; empty for stock vLLM")
    parser.add_argument("--cells", default="1x512,16x512,64x512", help="batch x context, comma-separated")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-len", type=int, default=20480)
    parser.add_argument("--folder", default="/tmp/nwor-shapes")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    modes = [mode for mode in args.modes.split(",") if mode]
    started = time.perf_counter()
    llm = build(args, modes)
    record: dict[str, Any] = {"start_seconds": time.perf_counter() - started, **vars(args), "runs": []}
    for cell in args.cells.split(","):
        batch, context = (int(part) for part in cell.split("x"))
        rates: dict[str, list[float]] = {}
        for repeat in range(args.repeats + 1):
            for mode in modes or ["stock"]:
                if modes:
                    llm.collective_rpc("nwor_set_mode", args=(mode,))
                seconds, tokens = decode_seconds(llm.llm_engine, batch, context, args.tokens, 17)
                if repeat:  # the first round warms up and fills the prefix cache
                    rates.setdefault(mode, []).append(tokens / seconds)
        for mode, values in rates.items():
            record["runs"].append(
                {"batch": batch, "context": context, "mode": mode, "tokens_per_second": values}
            )
            print(
                args.shape,
                cell,
                mode,
                round(statistics.median(values), 1),
                [round(v) for v in values],
                flush=True,
            )
    if modes:
        record["report"] = llm.collective_rpc("nwor_report")
        print(record["report"], flush=True)
    Path(args.output).write_text(json.dumps(record))


if __name__ == "__main__":
    main()
