// Numbers to fp8, bit for bit as vLLM's cache writer does it: divided by the scale in float, rounded to the nearest,
// ties to even, and saturated.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace nwor {

// x / scale, rounded as division rounds, from the scale's reciprocal: a product, its exact error, and its correction
// (Markstein). Where that does not hold, the quotient is far beyond what fp8 holds (whose overflow saturates), below
// what it can tell from zero, or the scale is no ordinary number and `exact` is false.
struct Quotient {
  float scale, reciprocal;
  bool exact, one;  // `one`: every number is its own quotient, as where no scale was calibrated

  __device__ __forceinline__ explicit Quotient(float by) : scale(by), reciprocal(1.f / by), one(by == 1.f) {
    const float magnitude = fabsf(by);
    exact = magnitude >= 0x1p-60f && magnitude <= 0x1p60f;
  }

  __device__ __forceinline__ float of(float x) const {
    if (!exact) return x / scale;
    const float product = x * reciprocal;
    const float corrected = fmaf(fmaf(-product, scale, x), reciprocal, product);
    const float magnitude = fabsf(product);
    return magnitude >= 0x1p-20f && magnitude < 0x1p40f ? corrected : product;  // the latter keeps a zero's sign
  }
};

// Two numbers divided and rounded; the first in the low byte.
__device__ __forceinline__ uint16_t quantize_pair(float2 pair, const Quotient& by, bool e5m2) {
  if (!by.one) pair = make_float2(by.of(pair.x), by.of(pair.y));
  return __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, e5m2 ? __NV_E5M2 : __NV_E4M3);
}

}  // namespace nwor
