// The wgmma kernel's matrix products of a tile, and the conversion of an fp8 cache's tiles that precedes them.
#pragma once

#include "common/convert.cuh"
#include "common/wgmma.cuh"
#include "verify/swizzle.cuh"

namespace nwor {

// This warp's 16 tokens of a tile of fp8 keys as fragments, 16 head positions each. See multiply_keys().
template <class T, bool kE5m2>
__device__ __forceinline__ void convert_keys(uint32_t tile, uint32_t (&fragments)[T::kHeadSize / 16][4]) {
  constexpr int kChunks = T::kPitch / 16;
  const int lane = threadIdx.x % 32, row = lane & 15;
  const uint32_t base = tile + (T::warp() * 16 + row) * T::kPitch;
  const int swizzle = ((lane >> 4) ^ row_swizzle<kChunks>(row)) << 4;
#pragma unroll
  for (int k = 0; k < T::kHeadSize / 16; k += 2) {
    uint32_t bytes[4];
    load_matrix(bytes, chunk_further<kChunks>(base + k / kChunks * T::kPanelBytes, swizzle, k % kChunks));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      fp8x4_to_half2<kE5m2>(bytes[2 * i], fragments[k + i][0], fragments[k + i][2]);
      fp8x4_to_half2<kE5m2>(bytes[2 * i + 1], fragments[k + i][1], fragments[k + i][3]);
    }
  }
}

// Where the part of a tile of values begins that this warpgroup multiplies.
template <class T>
__device__ __forceinline__ uint32_t own_values(uint32_t tile) {
  constexpr int kPanels = T::kBlocks * 64 * (T::kRowBytes / T::kHeadSize) / T::kPitch;
  static_assert(kPanels * T::kStageTiles * T::kPanelBytes == T::kTileBytes);
  return tile + T::of_pair() * kPanels * T::kPanelBytes;
}

// This warp's 16 positions of each 64 of its part of a tile of fp8 values as fragments, 16 tokens each; even positions in
// the first eight rows, odd ones in the others. See multiply_values().
template <class T, bool kE5m2>
__device__ __forceinline__ void convert_values(uint32_t tile, uint32_t (&fragments)[T::kBlocks][4][4]) {
  constexpr int kChunks = T::kPitch / 16;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < T::kBlocks; ++b) {
    const uint32_t address = tile + 4 * b / kChunks * T::kPanelBytes + lane * T::kPitch +
                             (((4 * b % kChunks + T::warp()) ^ row_swizzle<kChunks>(lane)) << 4);
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      uint32_t bytes[4];
      load_matrix_transposed(bytes, address + k * 16 * T::kPitch);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t even_odd = __byte_perm(bytes[2 * i + half], 0, 0x3120);
          fp8x4_to_half2<kE5m2>(even_odd, fragments[b][k + i][2 * half], fragments[b][k + i][2 * half + 1]);
        }
    }
  }
}

// The first operands of a tile's products where they are in registers: what a warp converted of an fp8 cache's tile. To
// be held until the products are done. A 16-bit cache's tiles are read where they lie.
template <class T>
struct TileOperands {
  static constexpr bool kKeys = T::kFp8 && !T::kFp8Query;
  uint32_t keys[kKeys ? T::kHeadSize / 16 : 1][4];
  uint32_t values[T::kFp8 ? T::kStageTiles : 1][T::kBlocks][4][4];

  __device__ __forceinline__ void hold_keys() const {
    if constexpr (kKeys) {
#pragma unroll
      for (int k = 0; k < T::kHeadSize / 16; ++k) hold(keys[k]);
    }
  }
  __device__ __forceinline__ void hold_values() const {
    if constexpr (T::kFp8) {
#pragma unroll
      for (int g = 0; g < T::kStageTiles; ++g)
#pragma unroll
        for (int b = 0; b < T::kBlocks; ++b)
#pragma unroll
          for (int k = 0; k < 4; ++k) hold(values[g][b][k]);
    }
  }
  static __device__ __forceinline__ void hold(const uint32_t (&fragment)[4]) {
    asm volatile("" ::"r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]));
  }
};

// scores = K Q^T, both fp8.
template <class T, bool kE5m2>
__device__ __forceinline__ void multiply_fp8_keys(const WgmmaOperand<T::kPitch>& keys,
                                                  const WgmmaOperand<T::kQueryPitch>& rows,
                                                  float (&scores)[T::kRowTiles][4]) {
  constexpr int kSteps = T::kPitch / 32;  // of 32 numbers each, in a panel
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < T::kHeadSize / 32; ++k)
    WgmmaFp8<T::kRowTiles, kE5m2>::run(scores, keys.at(k / kSteps * T::kPanelBytes + k % kSteps * 32),
                                       rows.at(k / kSteps * T::kQueryPanelBytes + k % kSteps * 32), k > 0);
}

// scores = K Q^T of a tile, under way when this returns.
template <class T>
__device__ __forceinline__ void multiply_tile_keys(uint32_t tile, uint32_t query, bool e5m2, TileOperands<T>& operands,
                                                   float (&scores)[T::kRowTiles][4]) {
  const WgmmaOperand<T::kQueryPitch> rows(query);
  const auto query_of = [&](int k) { return rows.at(k / 4 * T::kQueryPanelBytes + k % 4 * 32); };
  if constexpr (T::kFp8Query) {
    const WgmmaOperand<T::kPitch> keys(tile);
    if (e5m2) {
      multiply_fp8_keys<T, true>(keys, rows, scores);
    } else {
      multiply_fp8_keys<T, false>(keys, rows, scores);
    }
  } else if constexpr (T::kFp8) {
    if (e5m2) {
      convert_keys<T, true>(tile, operands.keys);
    } else {
      convert_keys<T, false>(tile, operands.keys);
    }
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < T::kHeadSize / 16; ++k)
      WgmmaFragments<T::kRowTiles>::run(scores, operands.keys[k], query_of(k), k > 0);
  } else {
    const WgmmaOperand<> keys(tile);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < T::kHeadSize / 16; ++k)
      Wgmma<T::kRowTiles, T::kKind, 0>::run(scores, keys.at(k / 4 * T::kPanelBytes + k % 4 * 32), query_of(k), k > 0);
  }
}

// O^T += V^T P^T of a tile or a pair of tiles, for this warpgroup's part of the head; under way when this returns.
template <class T>
__device__ __forceinline__ void multiply_tile_values(uint32_t tiles, uint32_t probabilities, bool e5m2,
                                                     TileOperands<T>& operands,
                                                     float (&accumulator)[T::kBlocks][T::kRowTiles][4]) {
#pragma unroll
  for (int g = 0; g < T::kStageTiles; ++g) {
    const uint32_t tile = own_values<T>(tiles + g * T::kTileBytes);
    const WgmmaOperand<> rows(probabilities + g * T::kProbabilityBytes);
    if constexpr (T::kFp8) {
      if (e5m2) {
        convert_values<T, true>(tile, operands.values[g]);
      } else {
        convert_values<T, false>(tile, operands.values[g]);
      }
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int b = 0; b < T::kBlocks; ++b)
          WgmmaFragments<T::kRowTiles>::run(accumulator[b], operands.values[g][b][k], rows.at(k * 32), true);
    } else {
      const WgmmaOperand<> values(tile);
      if (g == 0) wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int b = 0; b < T::kBlocks; ++b)
          Wgmma<T::kRowTiles, T::kKind, 1>::run(accumulator[b], values.at(b * T::kPanelBytes + k * 16 * 128),
                                                rows.at(k * 32), true);
    }
  }
}

}  // namespace nwor
