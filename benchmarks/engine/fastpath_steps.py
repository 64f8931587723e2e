"""Steps of a real engine with `fast_host`'s scheduler and with vLLM's own, in turns and in one engine.

Two starts of an engine differ by more than the two schedulers do, so both are had from one: what `fast_host`
put in place of the scheduler is switched off and on between runs of steps. Its other parts stay as they are.

    python benchmarks/engine/fastpath_steps.py --shape 1b --modes off,stage --contexts 512 --batches 1,16,64 \
        --acceptances 0.6 --host-steps 100 --repeats 6 --output /tmp/fast.json
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from typing import Any

import decode

#: Steps after a switch that do not count.
SKIPPED = 6


def set_fast(scheduler: Any, fast: bool) -> None:
    """Switch between the fast scheduler and vLLM's own, in place.

    Args:
        scheduler: of an engine that started with the fast one.
        fast: which of the two is wanted.

    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from nwor.engine.fastpath.kv_cache_manager import FastKVCacheManager

    scheduler._fast = scheduler._fast_steps = fast
    scheduler.kv_cache_manager.__class__ = FastKVCacheManager if fast else KVCacheManager


def main() -> None:
    """Print and record the microseconds of a step, for each mode, context, batch and acceptance."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the scheduler is in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    sys.path.append(str(decode.ROOT))
    args = decode.parse()
    steps = args.host_steps or 100
    engine = decode.Engine(args)
    engine.start()
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    if not getattr(scheduler, "_fast_steps", False):
        raise SystemExit("the engine's scheduler is not a fast one: NWOR's modes have to be named")
    results = engine.record["fast_steps"] = []
    for mode in engine.modes:
        engine.set_mode(mode)
        for context in args.contexts:
            for batch in args.batches:
                for acceptance in args.acceptances:
                    engine.set_acceptance(acceptance)
                    seen: dict[bool, list[float]] = {False: [], True: []}
                    with engine.batch(context, batch) as requests:
                        for turn in range(args.repeats):
                            for fast in (False, True) if turn % 2 else (True, False):
                                set_fast(scheduler, fast)
                                gc.collect()
                                requests.run(SKIPPED)
                                seconds, _ = requests.run(steps)
                                seen[fast].append(seconds / steps * 1e6)
                    set_fast(scheduler, True)
                    result = {
                        "mode": mode,
                        "context": context,
                        "batch": batch,
                        "acceptance": acceptance,
                        "steps": steps,
                        "stock_us": seen[False],
                        "fast_us": seen[True],
                    }
                    results.append(result)
                    engine.save()
                    stock, fast_us = (statistics.median(seen[fast]) for fast in (False, True))
                    print(
                        f"{args.shape} k={args.k} {mode} context {context} batch {batch} acceptance "
                        f"{acceptance}: {stock:.0f} us a step in stock, {fast_us:.0f} fast",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
