// The warpgroup kernel's matrix products of a tile, and the conversion of an fp8 cache's tiles that precedes them.
#pragma once

#include "verify_warpgroup_shape.cuh"

namespace nwor {

// This warp's 16 tokens of a tile of fp8 keys as fragments, 16 head positions each. See multiply_keys().
template <class S, bool kE5m2>
__device__ __forceinline__ void convert_keys(uint32_t tile, uint32_t (&fragments)[S::kHeadSize / 16][4]) {
  constexpr int kChunks = S::kPitch / 16;
  const int lane = threadIdx.x % 32, row = lane & 15;
  const uint32_t base = tile + (S::warp() * 16 + row) * S::kPitch;
  const int swizzle = ((lane >> 4) ^ row_swizzle<kChunks>(row)) << 4;
#pragma unroll
  for (int k = 0; k < S::kHeadSize / 16; k += 2) {
    uint32_t bytes[4];
    load_matrix(bytes, chunk_further<kChunks>(base + k / kChunks * S::kPanelBytes, swizzle, k % kChunks));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      fp8x4_to_half2<kE5m2>(bytes[2 * i], fragments[k + i][0], fragments[k + i][2]);
      fp8x4_to_half2<kE5m2>(bytes[2 * i + 1], fragments[k + i][1], fragments[k + i][3]);
    }
  }
}

// Where the part of a tile of values begins that this warpgroup multiplies.
template <class S>
__device__ __forceinline__ uint32_t own_values(uint32_t tile) {
  constexpr int kPanels = S::kBlocks * 64 * (S::kRowBytes / S::kHeadSize) / S::kPitch;
  static_assert(kPanels * S::kStageTiles * S::kPanelBytes == S::kTileBytes);
  return tile + S::of_pair() * kPanels * S::kPanelBytes;
}

// This warp's 16 positions of each 64 of its part of a tile of fp8 values as fragments, 16 tokens each; even positions in
// the first eight rows, odd ones in the others. See multiply_values().
template <class S, bool kE5m2>
__device__ __forceinline__ void convert_values(uint32_t tile, uint32_t (&fragments)[S::kBlocks][4][4]) {
  constexpr int kChunks = S::kPitch / 16;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) {
    const uint32_t address = tile + 4 * b / kChunks * S::kPanelBytes + lane * S::kPitch +
                             (((4 * b % kChunks + S::warp()) ^ row_swizzle<kChunks>(lane)) << 4);
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      uint32_t bytes[4];
      load_matrix_transposed(bytes, address + k * 16 * S::kPitch);
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
template <class S>
struct TileOperands {
  static constexpr bool kKeys = S::kFp8 && !S::kFp8Query;
  uint32_t keys[kKeys ? S::kHeadSize / 16 : 1][4];
  uint32_t values[S::kFp8 ? S::kStageTiles : 1][S::kBlocks][4][4];

  __device__ __forceinline__ void hold_keys() const {
    if constexpr (kKeys) {
#pragma unroll
      for (int k = 0; k < S::kHeadSize / 16; ++k) hold(keys[k]);
    }
  }
  __device__ __forceinline__ void hold_values() const {
    if constexpr (S::kFp8) {
#pragma unroll
      for (int g = 0; g < S::kStageTiles; ++g)
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b)
#pragma unroll
          for (int k = 0; k < 4; ++k) hold(values[g][b][k]);
    }
  }
  static __device__ __forceinline__ void hold(const uint32_t (&fragment)[4]) {
    asm volatile("" ::"r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]));
  }
};

// scores = K Q^T, both fp8.
template <class S, bool kE5m2>
__device__ __forceinline__ void multiply_fp8_keys(const WgmmaOperand<S::kPitch>& keys,
                                                  const WgmmaOperand<S::kQueryPitch>& rows,
                                                  float (&scores)[S::kRowTiles][4]) {
  constexpr int kSteps = S::kPitch / 32;  // of 32 numbers each, in a panel
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < S::kHeadSize / 32; ++k)
    WgmmaFp8<S::kRowTiles, kE5m2>::run(scores, keys.at(k / kSteps * S::kPanelBytes + k % kSteps * 32),
                                       rows.at(k / kSteps * S::kQueryPanelBytes + k % kSteps * 32), k > 0);
}

// scores = K Q^T of a tile, under way when this returns.
template <class S>
__device__ __forceinline__ void multiply_tile_keys(uint32_t tile, uint32_t query, bool e5m2, TileOperands<S>& operands,
                                                   float (&scores)[S::kRowTiles][4]) {
  const WgmmaOperand<S::kQueryPitch> rows(query);
  const auto query_of = [&](int k) { return rows.at(k / 4 * S::kQueryPanelBytes + k % 4 * 32); };
  if constexpr (S::kFp8Query) {
    const WgmmaOperand<S::kPitch> keys(tile);
    if (e5m2) {
      multiply_fp8_keys<S, true>(keys, rows, scores);
    } else {
      multiply_fp8_keys<S, false>(keys, rows, scores);
    }
  } else if constexpr (S::kFp8) {
    if (e5m2) {
      convert_keys<S, true>(tile, operands.keys);
    } else {
      convert_keys<S, false>(tile, operands.keys);
    }
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < S::kHeadSize / 16; ++k)
      WgmmaFragments<S::kRowTiles>::run(scores, operands.keys[k], query_of(k), k > 0);
  } else {
    const WgmmaOperand<> keys(tile);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < S::kHeadSize / 16; ++k)
      Wgmma<S::kRowTiles, S::kKind, 0>::run(scores, keys.at(k / 4 * S::kPanelBytes + k % 4 * 32), query_of(k), k > 0);
  }
}

// O^T += V^T P^T of a tile or a pair of tiles, for this warpgroup's part of the head; under way when this returns.
template <class S>
__device__ __forceinline__ void multiply_tile_values(uint32_t tiles, uint32_t probabilities, bool e5m2,
                                                     TileOperands<S>& operands,
                                                     float (&accumulator)[S::kBlocks][S::kRowTiles][4]) {
#pragma unroll
  for (int g = 0; g < S::kStageTiles; ++g) {
    const uint32_t tile = own_values<S>(tiles + g * S::kTileBytes);
    const WgmmaOperand<> rows(probabilities + g * S::kProbabilityBytes);
    if constexpr (S::kFp8) {
      if (e5m2) {
        convert_values<S, true>(tile, operands.values[g]);
      } else {
        convert_values<S, false>(tile, operands.values[g]);
      }
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b)
          WgmmaFragments<S::kRowTiles>::run(accumulator[b], operands.values[g][b][k], rows.at(k * 32), true);
    } else {
      const WgmmaOperand<> values(tile);
      if (g == 0) wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b)
          Wgmma<S::kRowTiles, S::kKind, 1>::run(accumulator[b], values.at(b * S::kPanelBytes + k * 16 * 128),
                                                rows.at(k * 32), true);
    }
  }
}

}  // namespace nwor
