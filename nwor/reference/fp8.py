"""Quantization to fp8 as vLLM's two cache writers do it.

vLLM's CUDA writer divides by the scale in float32, rounds to nearest even and saturates. Its CPU writer
multiplies by the reciprocal scale in float32, clamps (NaN becomes the maximum), truncates towards zero and
writes -0 as +0.
"""

from __future__ import annotations

from typing import Literal

import torch

Rounding = Literal["nearest", "truncate"]

#: (mantissa bits, exponent of the smallest normal number, largest number) by vLLM's name.
_FORMATS = {
    "fp8": (3, -6, 448.0),
    "fp8_e4m3": (3, -6, 448.0),
    "fp8_e5m2": (2, -14, 57344.0),
}
_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def rounding_of(device: torch.device) -> Rounding:
    """Return how vLLM's writer on ``device`` rounds."""
    return "truncate" if device.type == "cpu" else "nearest"


def quantize(x: torch.Tensor, scale: torch.Tensor, name: str, rounding: Rounding) -> torch.Tensor:
    """Return the bytes that a cache of format ``name`` holds for ``x``.

    Args:
        x: float tensor.
        scale: float32, broadcastable to x; stored = x / scale.
        name: "fp8", "fp8_e4m3" or "fp8_e5m2".
        rounding: "nearest" (vLLM's CUDA writer) or "truncate" (its CPU writer).

    Returns:
        uint8, x's shape.

    """
    mantissa, smallest, largest = _FORMATS[name]
    wide = x.to(torch.float32)
    scaled = wide / scale if rounding == "nearest" else wide * (1.0 / scale)
    exact = scaled.to(torch.float64).clamp(-largest, largest)
    if rounding == "truncate":
        exact = torch.where(scaled.isnan(), torch.full_like(exact, largest), exact)
        exact = torch.where(exact == 0, torch.zeros_like(exact), exact)  # no negative zero
    # The distance of neighbouring numbers of the format around each element.
    _, exponent = torch.frexp(exact)
    step = torch.ldexp(torch.ones_like(exact), (exponent - 1).clamp(min=smallest) - mantissa)
    if rounding == "truncate":
        if mantissa == 3:
            # Numbers are cut out of a float32 that was scaled by 2^-120, where small ones lose bits by
            # rounding.
            unit = torch.tensor(2.0**-29, dtype=torch.float64)
            exact = torch.where(exact.abs() < 2.0**-6, torch.round(exact / unit) * unit, exact)
        rounded = torch.trunc(exact / step) * step
    else:
        rounded = torch.round(exact / step) * step  # torch.round takes halves to even
    rounded = torch.copysign(rounded, exact).clamp(-largest, largest)
    return rounded.to(torch.float32).to(_DTYPES[name]).view(torch.uint8)


def dequantize(stored: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    """Return stored * scale in float64.

    Args:
        stored: uint8 or float8 bytes of format ``name``.
        scale: float32, broadcastable.
        name: "fp8", "fp8_e4m3" or "fp8_e5m2".

    """
    return stored.view(torch.uint8).view(_DTYPES[name]).to(torch.float64) * scale.to(torch.float64)
