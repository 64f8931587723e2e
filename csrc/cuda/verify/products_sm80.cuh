// The mma.sync kernel's matrix products of a tile.
#pragma once

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "verify/swizzle.cuh"

namespace nwor {

// S^T of one tile: scores[j][e] is of key row lane/4 + e/2*8 and query row 8j + lane%4*2 + e%2.
template <class T, bool kE5m2>
__device__ __forceinline__ void multiply_keys(uint32_t key_tile, uint32_t query, float (&scores)[T::kRowTiles][4]) {
  constexpr int kKeyChunks = T::kRowBytes / 16;
  constexpr int kQueryChunks = T::kQueryRowBytes / 16;
  const int lane = threadIdx.x % 32;
  const int key_row = lane & 15;
  const uint32_t key_base = key_tile + key_row * T::kRowBytes;
  const int key_swizzle = ((lane >> 4) ^ row_swizzle<kKeyChunks>(key_row)) << 4;
  const uint32_t query_base = query + (lane & 7) * T::kQueryRowBytes;
  const int query_swizzle = ((lane >> 3) ^ row_swizzle<kQueryChunks>(lane & 7)) << 4;
#pragma unroll
  for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[j][e] = 0.f;
#pragma unroll
  for (int k = 0; k < T::kHeadSize / 16; k += 2) {
    uint32_t a[2][4];
    if constexpr (!T::kFp8) {
      load_matrix(a[0], chunk_further<kKeyChunks>(key_base, key_swizzle, 2 * k));
      load_matrix(a[1], chunk_further<kKeyChunks>(key_base, key_swizzle, 2 * k + 2));
    } else {
      uint32_t bytes[4];
      load_matrix(bytes, chunk_further<kKeyChunks>(key_base, key_swizzle, k));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        fp8x4_to_half2<kE5m2>(bytes[2 * i], a[i][0], a[i][2]);
        fp8x4_to_half2<kE5m2>(bytes[2 * i + 1], a[i][1], a[i][3]);
      }
    }
#pragma unroll
    for (int j = 0; j < T::kRowTiles; ++j) {
      uint32_t b[4];
      load_matrix(b, chunk_further<kQueryChunks>(query_base, query_swizzle, 2 * k) + j * 8 * T::kQueryRowBytes);
      mma16816<T::kKind>(scores[j], a[0], b[0], b[1]);
      mma16816<T::kKind>(scores[j], a[1], b[2], b[3]);
    }
  }
}

// O^T += V^T P^T, the probabilities as multiply_keys() laid the scores out.
template <class T, bool kE5m2>
__device__ __forceinline__ void multiply_values(uint32_t value_tile, const float (&probabilities)[T::kRowTiles][4],
                                                float (&accumulator)[T::kHeadSize / 16][T::kRowTiles][4]) {
  constexpr int kChunks = T::kRowBytes / 16;
  const int lane = threadIdx.x % 32;
  uint32_t b[T::kRowTiles][2];
#pragma unroll
  for (int j = 0; j < T::kRowTiles; ++j) {
    b[j][0] = transpose8x8(pack2<T::kKind>(probabilities[j][0], probabilities[j][1]));
    b[j][1] = transpose8x8(pack2<T::kKind>(probabilities[j][2], probabilities[j][3]));
  }
  if constexpr (!T::kFp8) {
    const int row = (lane & 7) + ((lane >> 4) << 3);
    const uint32_t base = value_tile + row * T::kRowBytes;
    const int swizzle = (((lane >> 3) & 1) ^ row_swizzle<kChunks>(row)) << 4;
#pragma unroll
    for (int d = 0; d < T::kHeadSize / 16; ++d) {
      uint32_t a[4];
      load_matrix_transposed(a, chunk_further<kChunks>(base, swizzle, 2 * d));
#pragma unroll
      for (int j = 0; j < T::kRowTiles; ++j) mma16816<T::kKind>(accumulator[d][j], a, b[j][0], b[j][1]);
    }
  } else {
    // A transposed 16-bit load moves pairs of neighbouring head positions: row g of a fragment is position 2g of
    // the slice, row g + 8 is 2g + 1. put_pair() undoes it.
    const int row = (lane & 7) + (((lane >> 3) & 1) << 3);
    const uint32_t base = value_tile + row * T::kRowBytes;
    const int swizzle = ((lane >> 4) ^ row_swizzle<kChunks>(row)) << 4;
#pragma unroll
    for (int d = 0; d < T::kHeadSize / 16; d += 2) {
      uint32_t bytes[4];
      load_matrix_transposed(bytes, chunk_further<kChunks>(base, swizzle, d));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t even_odd = __byte_perm(bytes[2 * i + half], 0, 0x3120);
          fp8x4_to_half2<kE5m2>(even_odd, a[2 * half], a[2 * half + 1]);
        }
#pragma unroll
        for (int j = 0; j < T::kRowTiles; ++j) mma16816<T::kKind>(accumulator[d + i][j], a, b[j][0], b[j][1]);
      }
    }
  }
}

}  // namespace nwor
