// What the softmax of both kernels has in common. It works in powers of two.
#pragma once

#include "common/ptx.cuh"
#include "verify/state.cuh"

namespace nwor {

constexpr float kRescaleAbove = 8.f;  // powers of two by which a score may exceed the running maximum unrescaled

// Scores soft-capped: softcap * tanh(logit / softcap), divided by logit_scale again, so that what follows scales them
// like any others. exponent_scale is logit_scale for powers of two.
template <int kRowTiles>
__device__ __forceinline__ void soft_cap(float softcap, float logit_scale, float exponent_scale,
                                         float (&scores)[kRowTiles][4]) {
  const float inner = __fdividef(2.f * exponent_scale, softcap), outer = __fdividef(softcap, logit_scale);
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[j][e] = outer * (1.f - __fdividef(2.f, exp2_fast(scores[j][e] * inner) + 1.f));
}

// By how many powers of two this lane's highest score exceeds its row's running maximum: minus_maximum[j][c] lowered it.
template <int kRowTiles>
__device__ __forceinline__ float highest_excess(float scale, const float (&scores)[kRowTiles][4],
                                                const float (&minus_maximum)[kRowTiles][2]) {
  float excess = -INFINITY;
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c)
      excess = fmaxf(excess, fmaf(fmaxf(scores[j][c], scores[j][2 + c]), scale, minus_maximum[j][c]));
  return excess;
}

}  // namespace nwor
