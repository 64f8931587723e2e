"""All of vLLM's code that fast paths have copies of, by path; for a look without an engine."""

from __future__ import annotations

from nwor.engine.fastpath import (
    first_pass,
    greedy_sampling,
    h2d_cache,
    kv_cache_manager,
    results,
    scheduler,
)
from nwor.engine.fastpath.stock import Sources, changed

#: By fast path, what it stands for. How Triton launches kernels is looked at in Triton's own objects.
COPIES: dict[str, tuple[Sources, ...]] = {
    "scheduler": (results.TOKENS, kv_cache_manager.BLOCKS),
    "scheduler_steps": (results.TOKENS, kv_cache_manager.BLOCKS, results.RESULTS, scheduler.STEPS),
    "inputs": (h2d_cache.INPUTS,),
    "drafting": (greedy_sampling.DRAFTING,),
    "verifying": (greedy_sampling.VERIFYING,),
    "first_pass": (first_pass.FIRST_PASS,),
}


def standing_aside() -> dict[str, str]:
    """Return the fast paths that the installed vLLM does not have, and why: by path."""
    found = {path: changed(*sources) for path, sources in COPIES.items()}
    return {path: why for path, why in found.items() if why is not None}
