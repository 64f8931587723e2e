// Numbers to fp8, bit for bit as vLLM's cache writer does it: divided by the scale in float, rounded to the nearest,
// ties to even, and saturated.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace nwor {

// By scales for which the reciprocal does not serve. Seldom called, so nobody pays for its code but who calls it.
static __device__ __noinline__ float divide_exactly(float x, float scale) { return x / scale; }

// x / scale, rounded as division rounds, from the scale's reciprocal: a product, its exact error, and its correction
// (Markstein). Where that does not hold, the quotient is far beyond what fp8 holds (whose overflow saturates), below
// what it can tell from zero, or the scale is no ordinary number and `exact` is false.
struct Quotient {
  float scale, reciprocal;
  bool exact, one;  // `one`: every number is its own quotient, as where no scale was calibrated

  static __device__ __forceinline__ bool is_exact(float scale) {
    const float magnitude = fabsf(scale);
    return magnitude >= 0x1p-60f && magnitude <= 0x1p60f;
  }

  __device__ __forceinline__ explicit Quotient(float by) : scale(by), reciprocal(1.f), one(by == 1.f) {
    exact = is_exact(by);
    if (!one) reciprocal = 1.f / by;
  }

  __device__ __forceinline__ float of(float x) const {
    const float product = x * reciprocal;
    const float corrected = fmaf(fmaf(-product, scale, x), reciprocal, product);
    const float magnitude = fabsf(product);
    return magnitude >= 0x1p-20f && magnitude < 0x1p40f ? corrected : product;  // the latter keeps a zero's sign
  }

  // Divides all of them, where `exact`.
  template <int kCount>
  __device__ __forceinline__ void divide_exact(float (&x)[kCount]) const {
    if (one) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = of(x[i]);
  }

  // Divides all of them, with one decision for all of them.
  template <int kCount>
  __device__ __forceinline__ void divide(float (&x)[kCount]) const {
    if (one) return;
    if (exact) {
      divide_exact(x);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = divide_exactly(x[i], scale);
    }
  }
};

// Two numbers rounded; the first in the low byte.
__device__ __forceinline__ uint32_t round_pair(float first, float second, bool e5m2) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, e5m2 ? __NV_E5M2 : __NV_E4M3);
}

// Eight numbers divided and rounded; the first in the lowest byte.
__device__ __forceinline__ uint2 quantize_eight(float (&x)[8], const Quotient& by, bool e5m2) {
  by.divide(x);
  return make_uint2(round_pair(x[0], x[1], e5m2) | round_pair(x[2], x[3], e5m2) << 16,
                    round_pair(x[4], x[5], e5m2) | round_pair(x[6], x[7], e5m2) << 16);
}

}  // namespace nwor
