"""A commit prepared once and launched in each step: the library's own entry point, past torch's dispatcher.

``commit_window`` is called with every layer's cache, which is what it declares as mutated and what costs its
caller most. A commit of windows whose places stay the same, as under CUDA graphs, differs from the one before
by its counts alone; elsewhere the windows' places are given anew. The entry point takes the address of a
block of arguments that is filled in once; its C side is ``csrc/commit_call.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from nwor.ops import checks
from nwor.ops.layer_table import COLUMNS
from nwor.ops.registry import LIBRARIES


def _no_stream(index: int) -> int:
    raise RuntimeError(f"commit: a table on CUDA device {index}, but this torch is built without CUDA")


# Looked up once: from one commit of a running engine to the next, the processor's caches forget what lies on
# the way through modules.
_INT32 = torch.int32
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream)

_SOURCES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_CACHES = {"auto": 0, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 2}

_POINTERS = ("table", "slots", "query_start_loc", "source_index", "k_scales", "v_scales")
_NUMBERS = (
    "layers",
    "tokens",
    "batch",
    "num_kv_heads",
    "head_size",
    "block_size",
    "num_blocks",
    "k_scales_per_layer",
    "v_scales_per_layer",
    "source",
    "cache",
)


class _CommitCall(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


class PreparedCommit:
    """Writes each window of a batch but its rejected tokens, all layers of a table in one launch.

    Calling it does what ``commit_window`` does with ``rejected_counts``, to the byte. The tensors given here
    are kept alive; their contents are read in each call, and so is the memory that the table points to.

    Args:
        layer_table: int64 [L, 16] from :func:`make_layer_table`.
        slots: int64 [T]; as for ``commit_window``, like all that follow.
        query_start_loc: int32 [B + 1].
        num_kv_heads: KV heads of every layer.
        head_size: elements of a head.
        block_size: tokens of a block.
        num_blocks: blocks of a cache.
        source_dtype: dtype of the sources.
        kv_cache_dtype: "auto" or an fp8 kind.
        k_scales: float32 [L], [L, 1] or [L, num_kv_heads]; None stands for 1.
        v_scales: likewise for values.
        source_index: int32 [T]: row t of ``slots`` receives row source_index[t] of the sources, none where
            that is negative; the rejected counts are then not read. None where windows are chains.

    Raises:
        TypeError, ValueError: if an argument is wrong; the message names it.

    """

    __slots__ = ("_address", "_batch", "_call", "_device", "_kept", "_launch", "_windows")

    def __init__(
        self,
        layer_table: torch.Tensor,
        slots: torch.Tensor,
        query_start_loc: torch.Tensor,
        *,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        num_blocks: int,
        source_dtype: torch.dtype,
        kv_cache_dtype: str,
        k_scales: torch.Tensor | None,
        v_scales: torch.Tensor | None,
        source_index: torch.Tensor | None = None,
    ) -> None:
        device = checks.tensor("layer_table", layer_table, dim=2).device
        LIBRARIES.require(device)
        layers = layer_table.shape[0]
        checks.dtype("layer_table", layer_table, torch.int64)
        checks.shape("layer_table", layer_table, (layers, COLUMNS))
        if not layer_table.is_contiguous():
            raise ValueError(f"layer_table: strides are {list(layer_table.stride())}, wanted [{COLUMNS}, 1]")
        if source_dtype not in _SOURCES:
            raise TypeError(f"source_dtype: is {source_dtype}, wanted float32, float16 or bfloat16")
        checks.cache_dtype("kv_cache_dtype", kv_cache_dtype, source_dtype)
        checks.integer("num_kv_heads", num_kv_heads, 1)
        checks.integer("head_size", head_size, 1)
        checks.integer("block_size", block_size, 1)
        checks.integer("num_blocks", num_blocks, 0)
        shapes = ((layers,), (layers, 1), (layers, num_kv_heads))
        checks.scales("k_scales", k_scales, device, shapes)
        checks.scales("v_scales", v_scales, device, shapes)
        call = _CommitCall(
            table=layer_table.data_ptr(),
            k_scales=None if k_scales is None else k_scales.data_ptr(),
            v_scales=None if v_scales is None else v_scales.data_ptr(),
            layers=layers,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=block_size,
            num_blocks=num_blocks,
            k_scales_per_layer=_per_layer(k_scales),
            v_scales_per_layer=_per_layer(v_scales),
            source=_SOURCES[source_dtype],
            cache=_CACHES[kv_cache_dtype],
        )
        self._address = ctypes.addressof(call)
        self._call, self._kept = call, (layer_table, k_scales, v_scales)
        self.retarget(slots, query_start_loc, source_index)
        self._device = device.index if device.type == "cuda" else -1
        self._launch = LIBRARIES.commit_entry(device)

    def retarget(
        self, slots: torch.Tensor, query_start_loc: torch.Tensor, source_index: torch.Tensor | None = None
    ) -> None:
        """Commit other windows from now on; the table's memory stays, whatever it holds by then.

        Args:
            slots: as for the constructor, like all that follow.
            query_start_loc: likewise.
            source_index: likewise.

        Raises:
            TypeError, ValueError: likewise.

        """
        call, device = self._call, self._kept[0].device
        checks.vector("slots", slots, torch.int64, device)
        checks.vector("query_start_loc", query_start_loc, torch.int32, device, at_least=1)
        if source_index is not None:
            checks.vector("source_index", source_index, torch.int32, device, size=slots.shape[0])
        self._batch = query_start_loc.shape[0] - 1
        call.slots, call.query_start_loc = slots.data_ptr(), query_start_loc.data_ptr()
        call.source_index = None if source_index is None else source_index.data_ptr()
        call.tokens, call.batch = slots.shape[0], self._batch
        self._windows = slots, query_start_loc, source_index

    def __call__(self, rejected: torch.Tensor) -> None:
        """Commit; on CUDA on the current stream, without waiting. The current device must be the table's.

        Args:
            rejected: int32 [at least B], contiguous, on the table's device: tokens at the end of each window
                that are not written.

        Raises:
            TypeError, ValueError: if ``rejected`` is not that.
            RuntimeError: on CUDA if the launch fails; on a CPU for counts, slots and rows out of range,
                before anything is written.

        """
        if getattr(rejected, "dtype", None) is not _INT32:
            checks.tensor("rejected", rejected)
            raise TypeError(f"rejected: dtype is {rejected.dtype}, wanted torch.int32")
        if rejected.numel() < self._batch or not rejected.is_contiguous():
            raise ValueError(
                f"rejected: shape is {list(rejected.shape)}, strides are {list(rejected.stride())},"
                f" wanted at least {self._batch} contiguous elements"
            )
        index = rejected.get_device()
        # Neither a CPU nor what has no memory, such as meta tensors, has an index.
        if index != self._device or (index < 0 and not rejected.is_cpu):
            raise ValueError(f"rejected: is on {rejected.device}, not on the layer table's device")
        stream = _current_stream(index) if index >= 0 else None
        message = self._launch(self._address, rejected.data_ptr(), stream)
        if message is not None:
            raise RuntimeError(f"commit: {message.decode()}")


def _per_layer(scales: torch.Tensor | None) -> int:
    return 1 if scales is None or scales.dim() == 1 else scales.shape[1]
