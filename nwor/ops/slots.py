"""``commit_window``, ``log_slots``, ``restore_slots``: single tokens in and out of all layers' paged
caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nwor.ops import checks
from nwor.ops.layer_table import COLUMNS
from nwor.ops.registry import LIBRARIES

_LARGEST_ELEMENT = 4  # bytes

_commit = torch.ops.nwor.commit_window.default
_log = torch.ops.nwor.log_slots.default
_restore = torch.ops.nwor.restore_slots.default


def commit_window(
    layer_table: torch.Tensor,
    caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    commit_counts: torch.Tensor | None = None,
    rejected_counts: torch.Tensor | None = None,
    source_index: torch.Tensor | None = None,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    num_blocks: int | None = None,
    source_dtype: torch.dtype,
    kv_cache_dtype: str = "auto",
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    validate: bool = True,
) -> None:
    """Write the accepted tokens of all layers' windows to the paged caches, in one launch.

    What is written is bit-identical to what vLLM's own writer of the device writes
    (``reshape_and_cache_flash`` on CUDA, ``cpu_attn_reshape_and_cache`` on CPU); no other byte of the caches
    changes.

    Args:
        layer_table: int64 [L, 16] from :func:`make_layer_table`; the memory it points to must be alive.
        caches: the tensors that the table's caches lie in: one a layer, or the keys' followed by the values'.
        slots: int64 [T], the flat slot (block * block_size + offset) of each window row; negative rows are
            skipped.
        query_start_loc: int32 [B + 1]; the windows' rows.
        commit_counts: int32 [>= B], how many leading tokens of each window to write, its first token
            included.
        rejected_counts: int32 [>= B], instead: how many tokens at the end of each window not to write.
        source_index: int32 [T], instead, for trees and sparse acceptance: row t of ``slots`` receives row
            source_index[t] of the sources; negative to skip. Exactly one of the three is given.
        num_kv_heads: KV heads of every layer.
        head_size: elements of a head.
        block_size: tokens of a block.
        num_blocks: blocks of a cache; None takes the first dimension of caches[0]. Slots beyond are an error
            on CPU and skipped on CUDA.
        source_dtype: dtype of the sources: float32, float16 or bfloat16.
        kv_cache_dtype: "auto" (the sources' dtype), "fp8", "fp8_e4m3" or "fp8_e5m2".
        k_scales: float32 [L], [L, 1] or [L, num_kv_heads]; stored = value / scale. None stands for 1.
        v_scales: likewise for values.
        validate: False leaves out the checks of this function; those of the op itself remain.

    Raises:
        TypeError, ValueError: if an argument is wrong; the message names it, what it is and what is wanted.
        RuntimeError: on CPU also for counts, slots and rows out of range, for a table without sources and for
            one of another shape, before anything is written.

    """
    if num_blocks is None:
        num_blocks = _first_blocks(caches)
    if validate:
        layers = _check_common(
            layer_table, caches, slots, query_start_loc, num_kv_heads, head_size, block_size, num_blocks
        )
        device = layer_table.device
        if source_dtype not in checks.SOURCE_DTYPES:
            raise TypeError(f"source_dtype: is {source_dtype}, wanted float32, float16 or bfloat16")
        wanted = checks.cache_dtype("kv_cache_dtype", kv_cache_dtype, source_dtype)
        for i, cache in enumerate(caches):
            checks.dtype(f"caches[{i}]", cache, wanted)
        _check_one(commit_counts=commit_counts, rejected_counts=rejected_counts, source_index=source_index)
        batch = query_start_loc.shape[0] - 1
        for name, counts in (("commit_counts", commit_counts), ("rejected_counts", rejected_counts)):
            if counts is not None:
                checks.vector(name, counts, torch.int32, device, at_least=batch)
        if source_index is not None:
            checks.vector("source_index", source_index, torch.int32, device, size=slots.shape[0])
        shapes = ((layers,), (layers, 1), (layers, num_kv_heads))
        checks.scales("k_scales", k_scales, device, shapes)
        checks.scales("v_scales", v_scales, device, shapes)
    _commit(
        layer_table,
        caches,
        slots,
        query_start_loc,
        commit_counts if rejected_counts is None else rejected_counts,
        source_index,
        num_kv_heads,
        head_size,
        block_size,
        num_blocks,
        source_dtype,
        kv_cache_dtype,
        k_scales,
        v_scales,
        rejected_counts is not None,
    )


def make_slot_log(
    layers: int, rows: int, num_kv_heads: int, head_size: int, element_size: int, device: torch.device | str
) -> torch.Tensor:
    """Return a log for :func:`log_slots`: uint8 [layers, 2, rows, num_kv_heads * head_size * element_size].

    Args:
        layers: layers in the table.
        rows: most window rows of a step; size it from the engine's limits.
        num_kv_heads: KV heads of every layer.
        head_size: elements of a head.
        element_size: bytes of a cache element.
        device: the caches' device.

    Raises:
        TypeError, ValueError: if a number is no int or negative; the message names it.

    """
    sizes = {
        "layers": layers,
        "rows": rows,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "element_size": element_size,
    }
    for name, size in sizes.items():
        checks.integer(name, size, 0)
    shape = (layers, 2, rows, num_kv_heads * head_size * element_size)
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def log_slots(
    layer_table: torch.Tensor,
    caches: Sequence[torch.Tensor],
    log: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    num_blocks: int | None = None,
    validate: bool = True,
) -> None:
    """Copy the raw bytes of all layers' draft slots (window rows from the second on) to ``log``.

    Args:
        layer_table: int64 [L, 16], from :func:`make_cache_table` or :func:`make_layer_table`.
        caches: as in :func:`commit_window`.
        log: uint8 [L, 2, R, num_kv_heads * head_size * element size], R >= T, contiguous; K at index 0, V at
            1. Row t is written for draft rows t whose slot is not negative; other rows are left alone.
        slots: int64 [T].
        query_start_loc: int32 [B + 1].
        num_kv_heads: KV heads of every layer.
        head_size: elements of a head.
        block_size: tokens of a block.
        num_blocks: as in :func:`commit_window`.
        validate: as in :func:`commit_window`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`commit_window`.

    """
    if num_blocks is None:
        num_blocks = _first_blocks(caches)
    if validate:
        layers = _check_common(
            layer_table, caches, slots, query_start_loc, num_kv_heads, head_size, block_size, num_blocks
        )
        _check_log(log, layers, slots, caches, num_kv_heads * head_size)
    _log(layer_table, caches, log, slots, query_start_loc, num_kv_heads, head_size, block_size, num_blocks)


def restore_slots(
    layer_table: torch.Tensor,
    caches: Sequence[torch.Tensor],
    log: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    commit_counts: torch.Tensor | None = None,
    *,
    rejected_counts: torch.Tensor | None = None,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    num_blocks: int | None = None,
    validate: bool = True,
) -> None:
    """Put the logged bytes of rejected tokens' slots back, in all layers.

    Args:
        layer_table: as in :func:`log_slots`.
        caches: as in :func:`commit_window`; written.
        log: what :func:`log_slots` filled for the same slots.
        slots: int64 [T], as given to :func:`log_slots`.
        query_start_loc: int32 [B + 1], likewise.
        commit_counts: int32 [>= B]; rows from commit_counts[i] on of window i are restored. The first row of
            a window was never logged and is never restored.
        rejected_counts: int32 [>= B], instead: how many rows at the end of each window are restored.
        num_kv_heads: KV heads of every layer.
        head_size: elements of a head.
        block_size: tokens of a block.
        num_blocks: as in :func:`commit_window`.
        validate: as in :func:`commit_window`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`commit_window`.

    """
    if num_blocks is None:
        num_blocks = _first_blocks(caches)
    if validate:
        layers = _check_common(
            layer_table, caches, slots, query_start_loc, num_kv_heads, head_size, block_size, num_blocks
        )
        _check_log(log, layers, slots, caches, num_kv_heads * head_size)
        _check_one(commit_counts=commit_counts, rejected_counts=rejected_counts)
        batch = query_start_loc.shape[0] - 1
        for name, counts in (("commit_counts", commit_counts), ("rejected_counts", rejected_counts)):
            if counts is not None:
                checks.vector(name, counts, torch.int32, layer_table.device, at_least=batch)
    _restore(
        layer_table,
        caches,
        log,
        slots,
        query_start_loc,
        commit_counts if rejected_counts is None else rejected_counts,
        num_kv_heads,
        head_size,
        block_size,
        num_blocks,
        rejected_counts is not None,
    )


def _check_one(**tensors: torch.Tensor | None) -> None:
    given = [name for name, tensor in tensors.items() if tensor is not None]
    if len(given) != 1:
        raise ValueError(f"{', '.join(tensors)}: given {', '.join(given) or 'none'}, wanted exactly one")


def _first_blocks(caches: Sequence[torch.Tensor]) -> int:
    first = checks.tensors("caches", caches)[0]
    return first.shape[0] if first.dim() else 0


def _check_common(
    layer_table: torch.Tensor,
    caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    num_blocks: int,
) -> int:
    checks.tensor("layer_table", layer_table, dim=2)
    checks.dtype("layer_table", layer_table, torch.int64)
    layers = layer_table.shape[0]
    checks.shape("layer_table", layer_table, (layers, COLUMNS))
    if not layer_table.is_contiguous():
        raise ValueError(f"layer_table: strides are {list(layer_table.stride())}, wanted [{COLUMNS}, 1]")
    device = layer_table.device
    LIBRARIES.require(device)
    count = len(checks.tensors("caches", caches))
    if count not in (layers, 2 * layers):
        raise ValueError(f"caches: has {count} tensors, wanted {layers} (one a layer) or {2 * layers}")
    for i, cache in enumerate(caches):
        checks.dtype(f"caches[{i}]", cache, caches[0].dtype)
        checks.device(f"caches[{i}]", cache, device)
        if cache.element_size() > _LARGEST_ELEMENT:
            raise TypeError(f"caches[{i}]: dtype is {cache.dtype}, wanted one of 1, 2 or 4 bytes")
    checks.vector("slots", slots, torch.int64, device)
    checks.vector("query_start_loc", query_start_loc, torch.int32, device, at_least=1)
    checks.integer("num_kv_heads", num_kv_heads, 1)
    checks.integer("head_size", head_size, 1)
    checks.integer("block_size", block_size, 1)
    checks.integer("num_blocks", num_blocks, 0)
    sides = 2 if count == layers else 1
    wanted = sides * num_kv_heads * head_size * block_size * num_blocks
    for i, cache in enumerate(caches):
        if cache.numel() < wanted:
            raise ValueError(
                f"caches[{i}]: has {cache.numel()} elements, wanted at least {wanted}, for "
                f"{'keys and values' if sides == 2 else 'keys or values'} of num_kv_heads {num_kv_heads} x "
                f"head_size {head_size} x block_size {block_size} x num_blocks {num_blocks}"
            )
    return layers


def _check_log(
    log: torch.Tensor, layers: int, slots: torch.Tensor, caches: Sequence[torch.Tensor], elements: int
) -> None:
    checks.tensor("log", log, dim=4)
    checks.dtype("log", log, torch.uint8)
    checks.device("log", log, slots.device)
    size = elements * caches[0].element_size()
    if log.shape[:2] != (layers, 2) or log.shape[2] < slots.shape[0] or log.shape[3] != size:
        raise ValueError(
            f"log: shape is {list(log.shape)}, wanted [{layers}, 2, at least {slots.shape[0]}, {size}]"
        )
    if not log.is_contiguous():
        raise ValueError(f"log: strides are {list(log.stride())}, wanted a contiguous tensor")
