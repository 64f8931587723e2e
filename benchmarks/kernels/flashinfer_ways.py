"""FlashInfer's ways to run a verify step's layers, beside stock's and nwor's.

`fa2` and `fa3` are its paged prefill, with plans made for exactly these lengths; `xqa` is its decode that
takes whole windows, which vLLM's FlashInfer backend uses on Hopper. All are given what is best for them:
queries that are contiguous and in the dtype that they want, made beforehand; plans, which are not timed.
Keys and values are written by vLLM's `reshape_and_cache_flash`, as that backend does, and are timed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from cells import BLOCK_SIZE, FLASHINFER, LAYERS
from device import Step
from flashinfer_modules import BF16, FP8, VERSION, prefill_dtypes, prefill_serves

#: Bytes of each workspace; FlashInfer refuses where that is too little.
WORKSPACE = 512 << 20


def draft_mask(window: int, batch: int) -> torch.Tensor:
    """The causal mask of windows as XQA takes it: uint16 [batch, window, 2 * ceil(window / 32)], on the CPU.

    Bit `j` of a row's word `w` says whether it sees the window's token `32 * w + j`.
    """
    words = -(-window // 32)
    sees = torch.arange(32 * words) <= torch.arange(window)[:, None]
    bits = sees.view(window, words, 32).long() << torch.arange(32)
    rows = bits.sum(-1).to(torch.uint32).view(torch.uint16).view(window, 2 * words)
    return rows.expand(batch, -1, -1).contiguous()


class FlashInfer:
    """Workspaces of the ways, shared by all cells.

    Args:
        modules: folder of modules that flashinfer_modules.py compiled; None compiles what is asked for.

    """

    def __init__(self, modules: Path | None) -> None:
        import flashinfer
        from flashinfer.jit import env

        # Modules that were linked where there is no driver do not name the library whose functions they call.
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)

        if flashinfer.__version__ != VERSION:
            raise SystemExit(f"flashinfer-python is {flashinfer.__version__}; {VERSION} is wanted")
        if modules is not None:
            if not modules.is_dir():
                raise SystemExit(f"{modules} is no folder; flashinfer_modules.py makes one")
            env.FLASHINFER_AOT_DIR = modules.resolve()
        self.prefill = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self.decode = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")

    def ways(self, step: Step) -> tuple[dict[str, Callable[[int], None]], dict[str, str]]:
        """One layer's attention of each way, and for ways that refuse this step their error."""
        ways: dict[str, Callable[[int], None]] = {}
        refused: dict[str, str] = {}
        for name in FLASHINFER:
            try:
                way = self._xqa(step) if name == "xqa" else self._prefill(step, name)
                way(0)
                torch.cuda.synchronize()
            except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
                refused[name] = f"{type(error).__name__}: {error}"[:300]
            else:
                ways[name] = way
        return ways, refused

    def _prefill(self, step: Step, backend: str) -> Callable[[int], None]:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        cell = step.cell
        query_heads, kv_heads, size = cell.heads
        if not prefill_serves(backend, size, cell.fp8):
            raise NotImplementedError(f"{backend} has no fp8 kernel for a head size of {size}")
        query_dtype, cache_dtype = prefill_dtypes(backend, cell.fp8)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(self.prefill, "HND", backend=backend)
        lengths = [context + cell.window for context in cell.contexts]
        counts = torch.tensor(cell.block_counts)
        begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        last = torch.tensor([(length - 1) % BLOCK_SIZE + 1 for length in lengths], dtype=torch.int32)
        wrapper.plan(
            step.query_start_loc.cpu(), begins, step.blocks, last, query_heads, kv_heads, size, BLOCK_SIZE,
            causal=True, sm_scale=size**-0.5, q_data_type=query_dtype, kv_data_type=cache_dtype,
            o_data_type=BF16,
        )  # fmt: skip
        queries = [q.to(query_dtype).contiguous() for q in step.plain_queries]
        caches = self._caches(step, cache_dtype)
        scales = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0} if cell.fp8 else {}

        def attend(layer: int) -> None:
            wrapper.run(queries[layer], caches[layer], out=step.output, **scales)

        return attend

    def _xqa(self, step: Step) -> Callable[[int], None]:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        cell = step.cell
        caches = self._caches(step, FP8 if cell.fp8 else BF16)
        queries = [q.contiguous() for q in step.plain_queries]
        mask = draft_mask(cell.window, cell.batch).cuda()
        output = step.output.view(cell.batch, cell.window, *step.output.shape[1:])

        def attend(layer: int) -> None:
            xqa_batch_decode_with_kv_cache(
                queries[layer], caches[layer], self.decode, step.block_table, step.seq_lens,
                max(cell.contexts) + cell.window, bmm1_scale=cell.heads[2] ** -0.5, bmm2_scale=1.0,
                out=output, kv_layout="HND", q_len_per_req=cell.window, mask=mask,
            )  # fmt: skip

        return attend

    def _caches(self, step: Step, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values as [blocks, KV heads, block size, head size], which lie side by side as in vLLM."""
        size = step.cell.heads[2]
        views = [cache.view(dtype).split(size, dim=-1) for cache in step.caches]
        return [(keys, values) for keys, values in views]


def run_flashinfer(attend: Callable[[int], None], write: Callable[[int], None]) -> Callable[[], None]:
    """One step of a way: each layer's window is written to the cache, then attended to."""

    def run() -> None:
        for layer in range(LAYERS):
            write(layer)
            attend(layer)

    return run
