"""FlashInfer's package as vLLM's backend imports it, with kernels that attend on a CPU in plain torch.

Wrappers keep one plan, as FlashInfer's do: a second `plan` makes what was planned before worthless.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

STOCK = "vllm.v1.attention.backends.flashinfer"
OWN = "nwor.engine.attention.flashinfer"


def attend(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    heads_first: bool,
    blocks: list[list[int]],
    rows: list[int],
    lengths: list[int],
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend causally from the last `rows` of each request's `lengths` tokens, all read from the cache."""
    keys, values = (cache if heads_first else cache.transpose(1, 2) for cache in caches)
    first, group = 0, query.shape[1] // keys.shape[1]
    for table, count, length in zip(blocks, rows, lengths, strict=True):
        key, value = (
            side[table].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 0).float()
            for side in (keys, values)
        )
        own = query[first : first + count].transpose(0, 1).float()
        logits = scale * own @ key.transpose(1, 2)
        places = torch.arange(length - count, length)
        logits.masked_fill_(torch.arange(length) > places[:, None], -torch.inf)
        out[first : first + count] = (logits.softmax(-1) @ value).transpose(0, 1).to(out.dtype)
        first += count


class Wrapper:
    """A paged wrapper of FlashInfer's: of prompts, or of decodes, which have one row each."""

    calls: list[str]
    is_cuda_graph_enabled = False

    def __init__(self, workspace: Any, layout: str, **_: Any) -> None:
        self.layout = layout

    def plan(self, **settings: Any) -> None:
        self.calls.append(f"plan {self.name}")
        self._window_left, self._sm_scale = settings["window_left"], settings["sm_scale"]
        self._logits_soft_cap = settings["logits_soft_cap"] or 0.0
        self._causal = settings.get("causal", True)
        begins = settings.get("paged_kv_indptr", settings.get("indptr")).tolist()
        indices = settings.get("paged_kv_indices", settings.get("indices"))
        last = settings.get("paged_kv_last_page_len", settings.get("last_page_len")).tolist()
        if self.name == "prompts":
            # The indices are of the whole step: a plan of some of its requests begins where theirs do.
            starts = settings["qo_indptr"].tolist()
            self.rows = [stop - start for start, stop in itertools.pairwise(starts)]
        else:
            self.rows = [1] * len(last)
        pairs = list(itertools.pairwise(begins))
        self.blocks = [indices[start:stop].tolist() for start, stop in pairs]
        size = settings["page_size"]
        self.lengths = [
            (stop - start - 1) * size + tail for (start, stop), tail in zip(pairs, last, strict=True)
        ]

    def run(self, query: torch.Tensor, caches: Any, *, out: torch.Tensor, **_: Any) -> None:
        self.calls.append(f"run {self.name} {len(query)}")
        attend(query, caches, self.layout == "HND", self.blocks, self.rows, self.lengths, self._sm_scale, out)


class Prompts(Wrapper):
    name = "prompts"


class Decodes(Wrapper):
    name = "decodes"


class Kernels:
    """The kernels, and what of them was called, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def take(self) -> list[str]:
        """Return the calls since the last time."""
        calls = list(self.calls)
        self.calls.clear()
        return calls

    def context(self, *, query: Any, kv_cache: Any, out: torch.Tensor, **settings: Any) -> None:
        """Stand in for trtllm-gen's kernel of prompts."""
        self.calls.append(f"trtllm prompts {len(query)}")
        self._trtllm(query, kv_cache, settings["cum_seq_lens_q"].tolist(), out, settings)

    def decode(self, *, query: Any, kv_cache: Any, out: torch.Tensor, **settings: Any) -> None:
        """Stand in for trtllm-gen's kernel of decodes, and for XQA."""
        self.calls.append(f"decodes {len(query)}")
        starts = settings.get("cum_seq_lens_q", settings.get("q_cu_seq_lens"))
        if starts is None:
            rows = settings["q_len_per_req"]
            starts = torch.arange(0, len(settings["seq_lens"]) * rows + 1, rows)
        self._trtllm(query, kv_cache, starts.tolist(), out, settings)

    def _trtllm(self, query: Any, caches: Any, starts: list[int], out: Any, settings: Any) -> None:
        rows = [stop - start for start, stop in itertools.pairwise(starts)]
        assert sum(rows) == len(query) == len(out)
        attend(
            query,
            caches,
            settings.get("kv_layout", "HND") == "HND",
            settings["block_tables"].tolist(),
            rows,
            settings["seq_lens"].tolist(),
            settings["bmm1_scale"],
            out,
        )

    def write(self, key: Any, value: Any, keys: Any, values: Any, slots: torch.Tensor, *_: Any) -> None:
        """Stand in for vLLM's writer."""
        there = slots >= 0
        self.calls.append(f"write {int(there.sum())}")
        size = keys.shape[1]
        for rows, cache in ((key, keys), (value, values)):
            cache[slots[there] // size, slots[there] % size] = rows[: len(slots)][there].to(cache.dtype)

    def copy_indices(self, indices: Any, table: Any, _: int, begins: Any, **__: Any) -> None:
        """Stand in for vLLM's kernel that lists a step's blocks, request by request."""
        for request, (start, stop) in enumerate(zip(begins.tolist(), begins.tolist()[1:], strict=False)):
            indices[start:stop] = table[request, : stop - start]


class _Module(ModuleType):
    """A module of the package; names that other versions of vLLM import stand for nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _modules(kernels: Kernels) -> dict[str, ModuleType]:
    def module(name: str, **names: Any) -> ModuleType:
        made = _Module(name)
        vars(made).update(names)
        return made

    def seq_lens(begins: torch.Tensor, last: torch.Tensor, size: int) -> torch.Tensor:
        return (begins[1:] - begins[:-1] - 1) * size + last

    prompts, decodes = (type(kind.__name__, (kind,), {"calls": kernels.calls}) for kind in (Prompts, Decodes))
    other = type("Other", (), {})
    return {
        "flashinfer": module(
            "flashinfer",
            BatchAttentionWithAttentionSinkWrapper=other,
            BatchDecodeWithPagedKVCacheWrapper=decodes,
            BatchPrefillWithPagedKVCacheWrapper=prompts,
            BatchPrefillWithRaggedKVCacheWrapper=other,
            get_seq_lens=seq_lens,
            nvfp4_quantize_append_paged_kv_cache_with_slot_mapping=None,
        ),
        "flashinfer.decode": module(
            "flashinfer.decode",
            fast_decode_plan=None,
            trtllm_batch_decode_with_kv_cache=kernels.decode,
        ),
        "flashinfer.prefill": module(
            "flashinfer.prefill", trtllm_batch_context_with_kv_cache=kernels.context
        ),
        "flashinfer.utils": module("flashinfer.utils", FP4Tensor=other),
    }


#: The kernels of FlashInfer that vLLM takes: by its own choice on compute capability 10, on 9 with what XQA
#: needs, and otherwise.
WAYS = ("trtllm-gen", "xqa", "native")


@contextmanager
def installed(way: str) -> Iterator[tuple[Any, Any, Kernels]]:
    """Import vLLM's backend and NWOR's with this package in FlashInfer's place, for the time of the block.

    Args:
        way: one of :data:`WAYS`.

    Returns:
        vLLM's module, NWOR's and the kernels.

    """
    kernels = Kernels()
    major = 10 if way == "trtllm-gen" else 9
    capable = way != "native"
    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability=lambda capability: capability == 90 and major == 9,
        is_device_capability_family=lambda family: family == 100 and major == 10,
        has_device_capability=lambda capability: capability <= 10 * major,
        get_device_capability=lambda: SimpleNamespace(major=major, minor=0),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
            patch.delitem(sys.modules, name)
        for name in (STOCK, OWN):
            # Whatever is imported within the block is forgotten behind it.
            patch.setitem(sys.modules, name, ModuleType(name))
            del sys.modules[name]
        # What asks whether FlashInfer is installed has to have asked before.
        importlib.import_module("vllm.utils.flashinfer")
        for name, module in _modules(kernels).items():
            patch.setitem(sys.modules, name, module)
        stock = importlib.import_module(STOCK)
        changed: dict[str, Any] = {
            "current_platform": platform,
            "can_use_trtllm_attention": lambda *_, **__: capable,
            "supports_trtllm_attention": lambda is_prefill=False: capable and (major == 10 or not is_prefill),
            "use_trtllm_attention": lambda *_, **__: major == 10,
            "force_use_trtllm_attention": lambda: None if capable else False,
            "flashinfer_xqa_batch_decode_with_kv_cache": kernels.decode,
            "get_dcp_world_size_and_rank": lambda *_: (1, 0),
            "get_num_attention_heads_from_layers": lambda *_: None,
            "pin_host_range_buf": lambda _: None,
            "PIN_MEMORY": False,
            "_copy_page_indices_kernel": SimpleNamespace(),
            "_get_trtllm_workspace_buffer": lambda: torch.zeros(1, dtype=torch.uint8),
        }
        changed["_copy_page_indices_kernel"] = _Launched(kernels.copy_indices)
        for name, value in changed.items():
            patch.setattr(stock, name, value)
        patch.setattr(torch.ops._C_cache_ops, "reshape_and_cache_flash", kernels.write, raising=False)
        yield stock, importlib.import_module(OWN), kernels


class _Launched:
    def __init__(self, run: Any) -> None:
        self._run = run

    def __getitem__(self, grid: Any) -> Any:
        return self._run
