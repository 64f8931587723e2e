// The epilogue of the mma.sync kernel.
#pragma once

#include "verify/epilogue.cuh"

namespace nwor {

// Where the groups leave their sums, and how far apart, in floats.
template <class T>
__device__ __forceinline__ float* merge_buffer(const SharedMemory<T>& smem, int& group_stride) {
  const bool overlap = T::kOverlap && smem.cluster() == 1;
  group_stride = (overlap ? T::kStages * T::kStageBytes : T::kMergeBytes) / 4;
  return smem.ring() + (overlap ? (T::kStages - 1) * T::kStageBytes / 4 : 0);
}

// Adds the groups of this thread block up.
template <class T>
__device__ __forceinline__ void add_groups(const VerifyParams& p, const Split& split, int group_index, int warp_row,
                                           int slot, const float (&accumulator)[T::kHeadSize / 16][T::kRowTiles][4],
                                           const SharedMemory<T>& smem) {
  const int lane = recomputed_thread() % 32;
  int group_stride;
  float* merge = merge_buffer<T>(smem, group_stride);
  float* mine = merge + group_index * group_stride + (warp_row + lane % 4 * 2) * T::kMergeStride;
#pragma unroll
  for (int begin = 0; begin < T::kHeadSize / 16; begin += T::kMergeSlices) {
    if (begin > 0) __syncthreads();
#pragma unroll
    for (int s = 0; s < T::kMergeSlices; ++s)
#pragma unroll
      for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          put_pair<T>(mine + (8 * j + e) * T::kMergeStride + s * 16, lane / 4, accumulator[begin + s][j][e],
                      accumulator[begin + s][j][2 + e]);
    __syncthreads();
    emit_slices<T>(p, split, slot, begin, merge, group_stride, smem);
  }
}

}  // namespace nwor
