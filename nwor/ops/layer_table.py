"""The layer table: addresses and strides of all layers, as the one-launch ops read them on the device.

The columns are those of ``csrc/layer_table.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from nwor.ops import checks

#: int64 numbers per layer: 2 source addresses, 4 source strides, 2 cache addresses, 4 + 4 cache strides.
COLUMNS = 16


def make_layer_table(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the layer table of ``commit_window`` for these tensors.

    The table holds addresses, not references: it is valid as long as the memory of all tensors is. On CUDA it
    is uploaded without making the host wait.

    Args:
        keys: per layer [T, Hk, D], last dimension contiguous.
        values: likewise.
        key_caches: per layer [num_blocks, block_size, Hk, D], any strides.
        value_caches: likewise.

    Returns:
        int64 [L, 16] on the tensors' device.

    Raises:
        TypeError, ValueError: if an argument is wrong; the message names it.
        ValueError: while a CUDA graph is being captured, since the upload would be replayed with it. Make the
            table before or after.

    """
    layers = len(checks.tensors("key_caches", key_caches))
    checks.tensors("value_caches", value_caches, size=layers)
    checks.tensors("keys", keys, size=layers)
    checks.tensors("values", values, size=layers)
    rows = []
    device = key_caches[0].device
    for i in range(layers):
        cache_row = _cache_columns(i, key_caches, value_caches)
        heads, head_size = key_caches[0].shape[2:]
        for name, one in (("keys", keys[i]), ("values", values[i])):
            checks.tensor(f"{name}[{i}]", one, dim=3)
            checks.shape(f"{name}[{i}]", one, (keys[0].shape[0], heads, head_size))
            checks.dtype(f"{name}[{i}]", one, checks.SOURCE_DTYPES)
            checks.dtype(f"{name}[{i}]", one, keys[0].dtype)
            checks.device(f"{name}[{i}]", one, device)
            checks.last_contiguous(f"{name}[{i}]", one)
        key, value = keys[i], values[i]
        strides = (*key.stride()[:2], *value.stride()[:2])
        rows.append([key.data_ptr(), value.data_ptr(), *strides, *cache_row])
    return _upload(rows, device)


class LayerTables:
    """Layer tables of the same caches, made step after step: what is known of the caches is found out once.

    Args:
        key_caches: per layer [num_blocks, block_size, Hk, D], any strides.
        value_caches: likewise.

    Raises:
        TypeError, ValueError: as :func:`make_layer_table`.

    """

    def __init__(self, key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor]) -> None:
        layers = len(checks.tensors("key_caches", key_caches))
        checks.tensors("value_caches", value_caches, size=layers)
        self._caches = tuple(key_caches), tuple(value_caches)
        self._columns = [_cache_columns(i, key_caches, value_caches) for i in range(layers)]
        self._heads = tuple(key_caches[0].shape[2:])
        self._device = key_caches[0].device

    def of(self, sources: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Return the layer table for these sources, as :func:`make_layer_table` does.

        Args:
            sources: per layer key and value, [T, Hk, D], last dimension contiguous.

        """
        rows = [number for row in self._rows(sources) for number in row]
        return _upload(rows, self._device).view(-1, COLUMNS)

    def refill(self, table: torch.Tensor, sources: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put other sources into a table of the host's.

        Args:
            table: [L, 16], what :meth:`of` returned; written.
            sources: as for :meth:`of`.

        """
        table.numpy()[:] = self._rows(sources)

    def _rows(self, sources: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[list[int]]:
        """Return the numbers of each layer."""
        if len(sources) != len(self._columns):
            self._refuse(sources)
        rows: list[list[int]] = []
        dtype, tokens = sources[0][0].dtype, sources[0][0].shape[0]
        fits, shape = dtype in checks.SOURCE_DTYPES, (tokens, *self._heads)
        for (key, value), columns in zip(sources, self._columns, strict=True):
            if key.dim() != 3 or value.dim() != 3:
                self._refuse(sources)
            key_token, key_head, key_element = key.stride()
            value_token, value_head, value_element = value.stride()
            fits &= (
                key.shape == shape
                and value.shape == shape
                and key.dtype is dtype
                and value.dtype is dtype
                and key_element == value_element == 1
                and key.device == self._device
                and value.device == self._device
            )
            sides = [key.data_ptr(), value.data_ptr(), key_token, key_head, value_token, value_head]
            rows.append(sides + columns)
        if not fits:
            self._refuse(sources)
        return rows

    def _refuse(self, sources: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> NoReturn:
        """Say what is wrong with the sources."""
        make_layer_table([key for key, _ in sources], [value for _, value in sources], *self._caches)
        raise ValueError("sources: do not fit the caches")


def make_cache_table(
    key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return a layer table without sources, for ``log_slots`` and ``restore_slots``.

    Args:
        key_caches: per layer [num_blocks, block_size, Hk, D], any strides.
        value_caches: likewise.

    Returns:
        int64 [L, 16] on the tensors' device.

    Raises:
        TypeError, ValueError: as :func:`make_layer_table`.

    """
    layers = len(checks.tensors("key_caches", key_caches))
    checks.tensors("value_caches", value_caches, size=layers)
    rows = [[0] * 6 + _cache_columns(i, key_caches, value_caches) for i in range(layers)]
    return _upload(rows, key_caches[0].device)


def _cache_columns(
    i: int, key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor]
) -> list[int]:
    first = key_caches[0]
    for name, cache in (("key_caches", key_caches[i]), ("value_caches", value_caches[i])):
        checks.tensor(f"{name}[{i}]", cache, dim=4)
        checks.shape(f"{name}[{i}]", cache, tuple(first.shape))
        checks.dtype(f"{name}[{i}]", cache, first.dtype)
        checks.device(f"{name}[{i}]", cache, first.device)
    key, value = key_caches[i], value_caches[i]
    return [key.data_ptr(), value.data_ptr(), *key.stride(), *value.stride()]


def _upload(rows: list[list[int]] | list[int], device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.tensor(rows, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a layer table cannot be made while a CUDA graph is captured: make it before or after"
        )
    pinned = torch.tensor(rows, dtype=torch.int64, pin_memory=True)
    return pinned.to(device, non_blocking=True)
