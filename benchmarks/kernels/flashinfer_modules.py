"""Compiles the FlashInfer modules that the grid needs, ahead of time; needs nvcc, but no GPU.

    python benchmarks/kernels/flashinfer_modules.py --out modules [--only xqa] [--engine]

FlashInfer compiles a module when it is first asked for, which takes minutes. Where the machine that measures
has little time, or no compiler, build them elsewhere and give the folder to `run.py --flashinfer modules`.
`--engine` compiles those that engines of the demo model ask for instead (tests/gpu/test_flashinfer_attn.py).
Wants the packages flashinfer-python, in the version that vLLM 0.32 pins, and apache-tvm-ffi; and of CUDA's
toolkit the compiler, the headers with cuRAND's, libcudart, and a libcuda to link with (a stub does).
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cells import BLOCK_SIZE, DRAFTS, HEADS

#: The version whose internal generators are used here, and which vLLM 0.32 pins.
VERSION = "0.7.0.post1"
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
#: Of the demo model: query heads, KV heads, head size; and rows of the longest window in its tests.
DEMO_HEADS, LONGEST_WINDOW = (6, 2, 64), 5
#: Hopper.
ARCHITECTURE = "9.0a"


def prefill_dtypes(backend: str, fp8: bool) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of query and cache: fa3 multiplies fp8 with fp8, fa2 converts the cache's fp8 to the query's."""
    return (FP8 if fp8 and backend == "fa3" else BF16), (FP8 if fp8 else BF16)


def prefill_serves(backend: str, head_size: int, fp8: bool) -> bool:
    """Whether FlashInfer has the module: fa3 with fp8 wants heads of 128 or 256."""
    return not (backend == "fa3" and fp8 and head_size == 64)


def specifications() -> Iterator[Any]:
    """FlashInfer's build specifications: paged prefill (fa2, fa3) and XQA decode of whole windows."""
    from flashinfer.jit.attention import modules
    from flashinfer.jit.xqa import gen_xqa_module

    generators = {
        "fa2": modules._gen_batch_prefill_primary_module,
        "fa3": modules.gen_batch_prefill_module,
    }
    for fp8 in (False, True):
        for query_heads, kv_heads, size in HEADS:
            for drafts in DRAFTS:
                yield gen_xqa_module(
                    BF16, FP8 if fp8 else BF16, BLOCK_SIZE, size, query_heads // kv_heads, False, BF16,
                    drafts + 1,
                )  # fmt: skip
        for backend, generate in generators.items():
            for size in sorted({heads[2] for heads in HEADS}):
                if prefill_serves(backend, size, fp8):
                    query, cache = prefill_dtypes(backend, fp8)
                    yield generate(
                        backend, query, cache, BF16, torch.int32, size, size, 0, False, False, False
                    )


def engine_specifications() -> Iterator[Any]:
    """Those of the demo model in vLLM's FlashInfer attention: prompts, single rows, windows of any length."""
    from flashinfer.jit.attention import modules
    from flashinfer.jit.xqa import gen_xqa_module

    query_heads, kv_heads, size = DEMO_HEADS
    shape = (BF16, BF16, BF16, torch.int32, size, size, 0, False, False, False)
    yield modules.gen_batch_prefill_module("fa3", *shape)
    yield modules._gen_batch_prefill_primary_module("fa2", *shape)
    for rows in range(1, LONGEST_WINDOW + 1):
        for ragged in {False, rows > 1}:
            yield gen_xqa_module(
                BF16, BF16, BLOCK_SIZE, size, query_heads // kv_heads, False, BF16, rows, ragged
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--only", default="", help="modules whose name contains this")
    parser.add_argument("--engine", action="store_true", help="those of the GPU tests' engines")
    args = parser.parse_args()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", ARCHITECTURE)
    import flashinfer

    if flashinfer.__version__ != VERSION:
        raise SystemExit(f"flashinfer-python is {flashinfer.__version__}; {VERSION} is wanted")
    done: set[str] = set()
    for specification in engine_specifications() if args.engine else specifications():
        name = specification.name
        target = args.out / name / f"{name}.so"
        if name in done or args.only not in name or target.exists():
            continue
        done.add(name)
        begin = time.time()
        specification.build()
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(specification.jit_library_path, target)
        print(f"{time.time() - begin:6.0f} s {target.stat().st_size >> 10:6} KiB {name}", flush=True)


if __name__ == "__main__":
    main()
