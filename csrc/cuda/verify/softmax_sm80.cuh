// What a warp of the mma.sync kernel keeps of a split, and how scores become probabilities.
#pragma once

#include "verify/softmax.cuh"

namespace nwor {

template <class T>
struct WarpState {
  float accumulator[T::kHeadSize / 16][T::kRowTiles][4];  // O^T
  // Per column, base 2; the same in all lanes of a column. Negative, since that is what is added to a score.
  float minus_maximum[T::kRowTiles][2];
  float sum[T::kRowTiles][2];  // per column, this lane's part
};

// Scores to probabilities relative to the running maximum. The maximum is moved, and what has been added up
// rescaled, only where a score exceeds it by more than kRescaleAbove.
template <class T>
__device__ __forceinline__ void softmax_step(float scale, bool first, float (&scores)[T::kRowTiles][4],
                                             WarpState<T>& state) {
  if (__any_sync(0xffffffffu, highest_excess(scale, scores, state.minus_maximum) > kRescaleAbove)) {
    float shrink[T::kRowTiles][2];
#pragma unroll
    for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float highest = fmaxf(scores[j][c], scores[j][2 + c]) * scale;
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 4));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 8));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 16));
        highest = fmaxf(highest, -state.minus_maximum[j][c]);
        shrink[j][c] = exp2_fast(-state.minus_maximum[j][c] - highest);
        state.minus_maximum[j][c] = -highest;
      }
    if (!first) {
#pragma unroll
      for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          state.sum[j][c] *= shrink[j][c];
#pragma unroll
          for (int d = 0; d < T::kHeadSize / 16; ++d) {
            state.accumulator[d][j][c] *= shrink[j][c];
            state.accumulator[d][j][2 + c] *= shrink[j][c];
          }
        }
    }
  }
#pragma unroll
  for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[j][e] = exp2_fast(fmaf(scores[j][e], scale, state.minus_maximum[j][e % 2]));
      state.sum[j][e % 2] += scores[j][e];
    }
}

}  // namespace nwor
