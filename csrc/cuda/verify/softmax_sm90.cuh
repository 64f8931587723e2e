// What the wgmma kernel keeps of a split, and how scores become probabilities.
#pragma once

#include "common/wgmma.cuh"
#include "verify/barriers_sm90.cuh"
#include "verify/kv_load_sm90.cuh"
#include "verify/mask.cuh"
#include "verify/softmax.cuh"

namespace nwor {

// By how many powers of two a split's first maxima are put above what its first tile has. That is the window's, of which
// a row sees a few keys, itself alone perhaps, and little context or none: else the context to come would often exceed it
// by more than is allowed.
constexpr float kHeadroom = 4.f;

template <class T>
struct WarpgroupState {
  float minus_maximum[T::kRowTiles][2];  // of the running maxima, base 2: what is added to a score
  float sum[T::kRowTiles][2];            // this lane's part
  float accumulator[T::kBlocks][T::kRowTiles][4];  // O^T; block b, this warp: slice 4b + warp of the warpgroup's part

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < T::kRowTiles; ++j) {
      minus_maximum[j][0] = minus_maximum[j][1] = -kNoScore;
      sum[j][0] = sum[j][1] = 0.f;
#pragma unroll
      for (int b = 0; b < T::kBlocks; ++b)
#pragma unroll
        for (int e = 0; e < 4; ++e) accumulator[b][j][e] = 0.f;
    }
  }
};

// Scores of a step's tile with soft cap and masks, in which the rest of the softmax may not tell them apart.
template <class T>
__device__ __forceinline__ void scale_and_mask(const VerifyParams& p, const Split& split, const TileQueue<T>& queue,
                                               int step, float logit_scale, float exponent_scale, int masked_before,
                                               float (&scores)[T::kRowTiles][4]) {
  const int tile = queue.stream.first + queue.stream.stride * step;
  const int in_window = tile * T::kTile + kTileTokens * T::warp() - split.window_begin;
  const bool window = in_window >= 0;
  const int token = window ? in_window : (split.first_context_tile + tile) * T::kTile + kTileTokens * T::warp();
  int valid = (window ? split.work.window : split.work.context) - token;
  if (!queue.is_whole(split, step)) valid = 0;
  if (p.softcap != 0.f) soft_cap(p.softcap, logit_scale, exponent_scale, scores);
  if (window || valid < kTileTokens || token < masked_before)
    mask_scores<T>(p, split, T::first_row(), window, token, valid, scores);
}

// Where this lane's row of a probability fragment goes: row lane % 8 of eight, tokens 16 * warp and eight further.
template <class T>
__device__ __forceinline__ uint32_t probability_place(uint32_t probabilities) {
  const int lane = threadIdx.x % 32;
  return probabilities + lane % 8 * 128 + (((2 * T::warp() + lane / 8 % 2) ^ (lane % 8)) << 4);
}

// The running maxima of all rows after a tile that exceeds them, and what was added up shrunk to fit. Each row's warps,
// those of both warpgroups where tiles come in pairs, leave what they found at `room`, one thread for each row joins it.
// Called by all threads; the room is that of probabilities which nothing reads.
template <class T>
__device__ __forceinline__ void raise_maxima(float scale, bool first, const float (&scores)[T::kRowTiles][4],
                                             WarpgroupState<T>& state, char* room, RowBarrier<T>& barrier) {
  constexpr int kWarps = 4 * T::kStageTiles, kThreads = 32 * kWarps;
  const int lane = threadIdx.x % 32, thread = threadIdx.x % kThreads;
  float* exchange = reinterpret_cast<float*>(room);  // [rows, kWarps]
  float* next = exchange + kWarps * 8 * T::kRowTiles;
  static_assert((kWarps + 1) * 4 <= 128);
#pragma unroll
  for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float highest = fmaxf(fmaxf(scores[j][c], scores[j][2 + c]) * scale, -state.minus_maximum[j][c]);
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 4));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 8));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 16));
      if (lane < 4) exchange[kWarps * (8 * j + 2 * lane + c) + thread / 32] = highest;
    }
  barrier.sync();
  if (thread < 8 * T::kRowTiles) {
    const float4* found = reinterpret_cast<const float4*>(exchange + kWarps * thread);
    float highest = kNoScore;
#pragma unroll
    for (int i = 0; i < kWarps / 4; ++i)
      highest = fmaxf(highest, fmaxf(fmaxf(found[i].x, found[i].y), fmaxf(found[i].z, found[i].w)));
    next[thread] = -(T::kWindowFirst && first ? highest + kHeadroom : highest);
  }
  barrier.sync();
#pragma unroll
  for (int j = 0; j < T::kRowTiles; ++j) {
    const float2 pair = *reinterpret_cast<const float2*>(next + 8 * j + lane % 4 * 2);
    const float raised[2] = {pair.x, pair.y};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float shrink = exp2_fast(raised[c] - state.minus_maximum[j][c]);
      state.minus_maximum[j][c] = raised[c];
      if (first) continue;
      state.sum[j][c] *= shrink;
#pragma unroll
      for (int b = 0; b < T::kBlocks; ++b) {
        state.accumulator[b][j][c] *= shrink;
        state.accumulator[b][j][2 + c] *= shrink;
      }
    }
  }
  barrier.sync();  // the probabilities may overwrite the maxima
}

// Scores to probabilities relative to the running maxima, and those to shared memory. `sum`: this lane's part with them;
// may be the state's own.
template <class T>
__device__ __forceinline__ void store_probabilities(uint32_t to, float scale, const float (&scores)[T::kRowTiles][4],
                                                    const WarpgroupState<T>& state, float (&sum)[T::kRowTiles][2]) {
#pragma unroll
  for (int j = 0; j < T::kRowTiles; ++j) {
    float weights[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) weights[e] = exp2_fast(fmaf(scores[j][e], scale, state.minus_maximum[j][e % 2]));
#pragma unroll
    for (int c = 0; c < 2; ++c) sum[j][c] = state.sum[j][c] + weights[c] + weights[2 + c];
    store_matrix2_transposed(to + j * 1024, pack2<T::kKind>(weights[0], weights[1]),
                             pack2<T::kKind>(weights[2], weights[3]));
  }
}

}  // namespace nwor
