// The mma.sync kernel's loop over the tiles of a split.
#pragma once

#include "verify/kv_load_sm80.cuh"
#include "verify/mask.cuh"
#include "verify/probes.cuh"
#include "verify/products_sm80.cuh"
#include "verify/scales.cuh"
#include "verify/softmax_sm80.cuh"

namespace nwor {

// The warps that share a ring wait for each other. Where a group has several of them, so does the whole thread block:
// a barrier for each group saves nothing measurable, and hides the order of accesses from the tools that check it.
template <class T>
__device__ __forceinline__ void sync_group() {
  if constexpr (T::kRowWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// The group's tiles of a split that begin_split() began.
template <class T>
__device__ __forceinline__ void attend_split(const VerifyParams& p, const Split& split, TileStream<T>& stream,
                                             WarpState<T>& state, char* shared) {
  const RequestWork& work = split.work;
  const int warp_row = stream.row();
  const uint32_t query = smem_address(shared) + warp_row * T::kQueryRowBytes;
  const float logit_scale = p.scale * logit_descale<T>(p, split.head);
  const float exponent_scale = logit_scale * kLog2e;
  // Context tokens before this one are outside some row's sliding window.
  const int masked_before = p.sliding_window > 0 ? work.context + work.window - p.sliding_window : 0;
#pragma unroll
  for (int j = 0; j < T::kRowTiles; ++j) {
#pragma unroll
    for (int d = 0; d < T::kHeadSize / 16; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) state.accumulator[d][j][e] = 0.f;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      state.minus_maximum[j][c] = -kNoScore;
      state.sum[j][c] = 0.f;
    }
  }

  copy_async_wait<T::kStages - 2>();
  finish_query<T>(p, shared);
  __syncthreads();  // the query rows are there
  probe(p, Station::kFirstTiles);
  int slot = 0, load_slot = T::kStages - 1;
  // All groups take as many steps where they wait for each other; a group's last one may find no tile.
  const int longest = T::kRowWarps == 1 ? stream.first : stream.first - stream.group();
#pragma unroll 1
  for (int step = 0; longest + stream.stride * step < split.end; ++step) {
    if (step > 0) {
      copy_async_wait<T::kStages - 2>();
      sync_group<T>();
    }
    load_tile<T>(p, split, stream, step + T::kStages - 1, load_slot, shared);
    copy_async_commit();
    load_slot = load_slot + 1 == T::kStages ? 0 : load_slot + 1;

    const int tile = stream.first + stream.stride * step;
    if (T::kRowWarps > 1 && tile >= split.end) continue;
    const int in_window = tile * kTileTokens - split.window_begin;
    const bool window = in_window >= 0;
    const int token = window ? in_window : (split.first_context_tile + tile) * kTileTokens;
    const int valid = (window ? work.window : work.context) - token;
    const uint32_t stage = stream.ring + slot * T::kStageBytes;
    slot = slot + 1 == T::kStages ? 0 : slot + 1;
    float scores[T::kRowTiles][4];
    if (T::kFp8 && p.is_e5m2) {
      multiply_keys<T, true>(stage, query, scores);
    } else {
      multiply_keys<T, false>(stage, query, scores);
    }
    if (p.softcap != 0.f) soft_cap(p.softcap, logit_scale, exponent_scale, scores);
    if (window || valid < kTileTokens || token < masked_before)
      mask_scores<T>(p, split, warp_row, window, token, valid, scores);
    softmax_step<T>(exponent_scale, step == 0, scores, state);
    if (T::kFp8 && p.is_e5m2) {
      multiply_values<T, true>(stage + T::kTileBytes, scores, state.accumulator);
    } else {
      multiply_values<T, false>(stage + T::kTileBytes, scores, state.accumulator);
    }
  }
  copy_async_wait<0>();
}

}  // namespace nwor
