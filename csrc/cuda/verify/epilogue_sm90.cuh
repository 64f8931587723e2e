// The epilogue of the wgmma kernel.
#pragma once

#include "verify/epilogue.cuh"

namespace nwor {

// Passes the result on: to the output or the workspace through shared memory, so that rows are written whole; where
// a cluster adds up, it stays in shared memory.
template <class T>
__device__ __forceinline__ void write_result(const VerifyParams& p, const Split& split, int slot,
                                             const float (&accumulator)[T::kBlocks][T::kRowTiles][4],
                                             const SharedMemory<T>& smem) {
  const int lane = recomputed_thread() % 32;
  const int row = T::first_row() + lane % 4 * 2, column = T::warp() * 16;
  const auto put = [&](float* to, int stride, int begin, int slices) {
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
      const int block = T::of_pair() * T::kBlocks + b - begin / 4;
      if (block < 0 || block >= slices / 4) continue;
#pragma unroll
      for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          put_pair<T>(to + (row + 8 * j + e) * stride + column + block * 64, lane / 4, accumulator[b][j][e],
                      accumulator[b][j][2 + e]);
    }
  };
  if (!T::kInTurns && smem.cluster() > 1) {
    put(smem.sum(), T::kSumStride, 0, T::kHeadSize / 16);
    return;
  }
  float* merge = reinterpret_cast<float*>(smem.base + T::kMergeOffset);
#pragma unroll
  for (int begin = 0; begin < T::kHeadSize / 16; begin += T::kMergeSlices) {
    if (begin > 0) __syncthreads();
    put(merge + T::ring() * (T::kMergeBytes / 4), T::kMergeStride, begin, T::kMergeSlices);
    __syncthreads();
    emit_slices<T>(p, split, slot, begin, merge, T::kMergeBytes / 4, smem);
  }
}

}  // namespace nwor
