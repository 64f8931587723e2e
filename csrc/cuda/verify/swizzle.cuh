// Where 16-byte chunks of a row lie in a tile in shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nwor {

// Byte offset of a 16-byte chunk in a tile of rows of kChunks chunks. Eight rows' chunks of one column always
// lie in eight different bank groups, so that ldmatrix has no conflicts.
template <int kChunks>
__device__ __forceinline__ int row_swizzle(int row) {
  if constexpr (kChunks % 8 == 0) return row & 7;
  if constexpr (kChunks % 8 == 4) return (row >> 1) & 3;
  return (row >> 2) & 1;
}

template <int kChunks>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  static_assert(kChunks % 2 == 0);
  return row * kChunks * 16 + ((chunk ^ row_swizzle<kChunks>(row)) << 4);
}

// The address `distance` chunks further along a row. `at` is that of a chunk below `distance`, swizzle included; for
// rows of a power of two bytes the swizzle's exclusive or commutes with the step's.
template <int kChunks>
__device__ __forceinline__ uint32_t chunk_further(uint32_t row, uint32_t swizzled, int distance) {
  if constexpr ((kChunks & (kChunks - 1)) == 0) return (row + swizzled) ^ (distance << 4);
  return row + (swizzled ^ (distance << 4));
}

}  // namespace nwor
