"""Checks of arguments. Each error names the argument, what it is and what is wanted.

They read metadata only, never a tensor's values: nothing here makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

SOURCE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_INTEGER = 2**63 - 1
_LARGEST_FLOAT = torch.finfo(torch.float32).max
#: What vLLM quantizes queries to; only beside fp8 caches.
QUANTIZED_QUERY = torch.float8_e4m3fn
#: vLLM's names of cache formats that the ops know; "auto" stands for the dtype of the keys.
CACHE_DTYPES = {
    "auto": None,
    "fp8": (torch.uint8, torch.float8_e4m3fn),
    "fp8_e4m3": (torch.uint8, torch.float8_e4m3fn),
    "fp8_e5m2": (torch.uint8, torch.float8_e5m2),
}


def tensor(name: str, value: Any, *, dim: int | None = None) -> torch.Tensor:
    """Check that ``value`` is a tensor of ``dim`` dimensions."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: is {type(value).__name__}, wanted a tensor")
    if dim is not None and value.dim() != dim:
        raise ValueError(f"{name}: shape is {list(value.shape)}, wanted {dim} dimensions")
    return value


def dtype(name: str, value: torch.Tensor, wanted: torch.dtype | tuple[torch.dtype, ...]) -> None:
    """Check the dtype."""
    if isinstance(wanted, torch.dtype):
        wanted = (wanted,)
    if value.dtype not in wanted:
        names = " or ".join(str(one) for one in wanted)
        raise TypeError(f"{name}: dtype is {value.dtype}, wanted {names}")


def device(name: str, value: torch.Tensor, wanted: torch.device) -> None:
    """Check the device."""
    if value.device != wanted:
        raise ValueError(f"{name}: device is {value.device}, wanted {wanted} as for the other tensors")


def shape(name: str, value: torch.Tensor, wanted: tuple[int, ...]) -> None:
    """Check the whole shape."""
    if tuple(value.shape) != wanted:
        raise ValueError(f"{name}: shape is {list(value.shape)}, wanted {list(wanted)}")


def last_contiguous(name: str, value: torch.Tensor) -> None:
    """Check that the last dimension's elements lie next to each other."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name}: strides are {list(value.stride())}, wanted 1 in the last dimension")


def apart(name: str, value: torch.Tensor) -> None:
    """Check that no two elements lie in one place, as those of an expanded tensor do: each is written."""
    if not value.numel():
        return
    span = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < span:
            raise ValueError(
                f"{name}: strides are {list(value.stride())} for shape {list(value.shape)},"
                " wanted a place of its own for each element"
            )
        span += (size - 1) * stride


def vector(
    name: str,
    value: Any,
    wanted_dtype: torch.dtype,
    on: torch.device,
    *,
    size: int | None = None,
    at_least: int | None = None,
) -> torch.Tensor:
    """Check a contiguous tensor of one dimension."""
    tensor(name, value, dim=1)
    dtype(name, value, wanted_dtype)
    device(name, value, on)
    if size is not None:
        shape(name, value, (size,))
    if at_least is not None and value.shape[0] < at_least:
        raise ValueError(f"{name}: shape is {list(value.shape)}, wanted at least {at_least} elements")
    if not value.is_contiguous():
        raise ValueError(f"{name}: strides are {list(value.stride())}, wanted [1]")
    return value


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Check an int (bool is none) in low..high."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: is {value!r} of type {type(value).__name__}, wanted an int")
    most = _LARGEST_INTEGER if high is None else high
    if not low <= value <= most:
        wanted = f"at least {low}" if high is None and value < low else f"{low} to {most}"
        raise ValueError(f"{name}: is {value}, wanted {wanted}")
    return value


def boolean(name: str, value: Any) -> bool:
    """Check a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: is {value!r} of type {type(value).__name__}, wanted a bool")
    return value


def number(name: str, value: Any, *, low: float | None = None) -> float:
    """Check a float or int that is finite in float32, which the kernels compute in."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: is {value!r} of type {type(value).__name__}, wanted a number")
    if not abs(value) <= _LARGEST_FLOAT or (low is not None and value < low):
        wanted = "a finite number in float32" + (f" of at least {low}" if low is not None else "")
        raise ValueError(f"{name}: is {value}, wanted {wanted}")
    return value


def sliding_window(value: Any) -> None:
    """Check a number of tokens that a query sees: -1 for all, or at least itself."""
    if integer("sliding_window", value, -1) == 0:
        raise ValueError("sliding_window: is 0, wanted -1 or at least 1 (a query sees itself)")


def cache_dtype(name: str, value: Any, source: torch.dtype) -> tuple[torch.dtype, ...]:
    """Check vLLM's name of a cache format and return the dtypes that its tensors may have."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: is {value!r} of type {type(value).__name__}, wanted a string")
    if value not in CACHE_DTYPES:
        raise ValueError(f"{name}: is {value!r}, wanted one of {', '.join(CACHE_DTYPES)}")
    return CACHE_DTYPES[value] or (source,)


def query_dtype(name: str, value: torch.Tensor, sources: tuple[torch.dtype, ...], cache_name: str) -> bool:
    """Check the dtype of queries, one of ``sources`` or quantized; return whether it is the latter."""
    if value.dtype is not QUANTIZED_QUERY:
        dtype(name, value, sources if cache_name == "auto" else (*sources, QUANTIZED_QUERY))
        return False
    if cache_name == "auto":
        raise TypeError(
            f"{name}: dtype is {value.dtype}, wanted that of key, as kv_cache_dtype is {cache_name!r}"
            " (quantized queries go with fp8 caches)"
        )
    return True


def tensors(name: str, value: Any, *, size: int | None = None) -> Sequence[torch.Tensor]:
    """Check a non-empty list of tensors."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}: is {type(value).__name__}, wanted a list of tensors")
    if not value:
        raise ValueError(f"{name}: is empty, wanted one tensor a layer")
    if size is not None and len(value) != size:
        raise ValueError(f"{name}: has {len(value)} tensors, wanted {size}")
    for i, one in enumerate(value):
        tensor(f"{name}[{i}]", one)
    return value


def scales(name: str, value: Any, on: torch.device, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Check an optional float32 tensor of scales that has one of ``shapes``."""
    if value is None:
        return
    tensor(name, value)
    dtype(name, value, torch.float32)
    device(name, value, on)
    if tuple(value.shape) not in shapes:
        wanted = " or ".join(str(list(one)) for one in shapes)
        raise ValueError(f"{name}: shape is {list(value.shape)}, wanted {wanted}")
    if not value.is_contiguous():
        raise ValueError(f"{name}: strides are {list(value.stride())}, wanted a contiguous tensor")
