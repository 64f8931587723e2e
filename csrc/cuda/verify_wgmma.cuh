// The verify attention kernel for Hopper's warpgroup matrix unit. The same transposed products as in
// verify_kernel.cuh, 64 tokens at a time: S^T = K Q^T leaves 16 tokens to each of a warpgroup's four warps,
// O^T += V^T P^T a quarter of each 64 head positions. A thread block has one ring and one result, so windows with
// many query rows stay bound by memory. A 16-bit cache's tiles never pass through registers; an fp8 cache's become
// fp16 there, each byte once per warpgroup, and are the product's operand from there. With an fp8 query only values do.
#pragma once

#include "verify_warpgroup_products.cuh"

namespace nwor {

template <class S>
struct WarpgroupState {
  float accumulator[S::kHeadSize / 64][S::kRowTiles][4];  // O^T; block b, this warp: slice 4b + warp
  float minus_maximum[S::kRowTiles][2];  // base 2; negative, since that is what is added to a score
  float sum[S::kRowTiles][2];            // this lane's part
};

// The running maxima of all rows after a tile that exceeds them, and what was added up shrunk to fit. Called by the
// whole thread block, while nothing reads the probabilities.
template <class S>
__device__ __forceinline__ void raise_maxima(float scale, bool first, const float (&scores)[S::kRowTiles][4],
                                             WarpgroupState<S>& state, char* shared) {
  const int lane = threadIdx.x % 32;
  // [4][rows]; this warpgroup's rows
  float* exchange = reinterpret_cast<float*>(shared + S::kProbabilityOffset) + S::first_row();
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float highest = fmaxf(scores[j][c], scores[j][2 + c]) * scale;
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 4));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 8));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 16));
      if (lane < 4) exchange[S::warp() * S::kRows + 8 * j + 2 * lane + c] = highest;
    }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float highest = -state.minus_maximum[j][c];
#pragma unroll
      for (int w = 0; w < 4; ++w) highest = fmaxf(highest, exchange[w * S::kRows + 8 * j + 2 * (lane % 4) + c]);
      const float shrink = exp2_fast(-state.minus_maximum[j][c] - highest);
      state.minus_maximum[j][c] = -highest;
      if (first) continue;
      state.sum[j][c] *= shrink;
#pragma unroll
      for (int b = 0; b < S::kHeadSize / 64; ++b) {
        state.accumulator[b][j][c] *= shrink;
        state.accumulator[b][j][2 + c] *= shrink;
      }
    }
  __syncthreads();  // the probabilities may overwrite the exchanged maxima
}

// Scores to probabilities relative to the running maxima, and those to shared memory. `sum`: this lane's part with them;
// may be the state's own.
template <class S>
__device__ __forceinline__ void store_probabilities(uint32_t to, float scale, const float (&scores)[S::kRowTiles][4],
                                                    const WarpgroupState<S>& state, float (&sum)[S::kRowTiles][2]) {
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j) {
    float weights[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) weights[e] = exp2_fast(fmaf(scores[j][e], scale, state.minus_maximum[j][e % 2]));
#pragma unroll
    for (int c = 0; c < 2; ++c) sum[j][c] = state.sum[j][c] + weights[c] + weights[2 + c];
    store_matrix2_transposed(to + j * 1024, pack2<S::kKind>(weights[0], weights[1]),
                             pack2<S::kKind>(weights[2], weights[3]));
  }
}

// The tiles of a segment whose first ones are on their way. A tile's values are multiplied while the next one's scores
// are computed. Where two tiles' probabilities have room, also while those become probabilities: one barrier a tile says
// that probabilities and tiles are there, that what was multiplied may be overwritten, and whether a score asks for higher
// maxima. Where one does, which is seldom, the probabilities are computed once more. With room for one tile's, the
// barrier that says the last two comes first, and another when the probabilities are there.
template <class S>
__device__ __forceinline__ void attend_segment(const VerifyParams& p, const Segment& segment, TileQueue<S>& queue,
                                               WarpgroupState<S>& state, char* shared) {
  const int lane = threadIdx.x % 32;
  const uint32_t query = smem_address(shared) + S::first_row() * S::kQueryPitch;
  const uint32_t probabilities = smem_address(shared) + S::kProbabilityOffset + S::first_row() * 128;
  // Where this lane's row of a probability fragment goes: row lane % 8 of eight, tokens 16 * warp and eight further.
  const uint32_t store_to = probabilities + lane % 8 * 128 + (((2 * S::warp() + lane / 8 % 2) ^ (lane % 8)) << 4);
  const float logit_scale = p.scale * logit_descale<S>(p, segment.head);
  const float exponent_scale = logit_scale * kLog2e;
  const int masked_before = p.sliding_window > 0 ? segment.work.context + segment.work.window - p.sliding_window : 0;
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j) {
#pragma unroll
    for (int b = 0; b < S::kHeadSize / 64; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e) state.accumulator[b][j][e] = 0.f;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      state.minus_maximum[j][c] = -kNoScore;
      state.sum[j][c] = 0.f;
    }
  }

  copy_async_wait<S::kPendingAtFirst>();
  if constexpr (S::kFp8) finish_query<S>(p, shared);
  fence_async_proxy();
  __syncthreads();  // the query rows are there, and the first keys
  // Asked of the whole warp, which tells the compiler that it does not diverge around the products.
  const auto exists = [&](int step) {
    return __any_sync(0xffffffffu, queue.stream.first + queue.stream.stride * step < segment.end);
  };
  if (exists(0)) {
    TileOperands<S> operands;
    float scores[S::kRowTiles][4];
    multiply_tile_keys<S>(S::key_tile(shared, 0), query, p.is_e5m2, operands, scores);
    wgmma_commit();
    wgmma_wait<0>();
    operands.hold_keys();
    int key_slot = 1, value_slot = 0, parity = 0;
#pragma unroll 1
    for (int step = 0;; ++step) {
      const int tile = queue.stream.first + queue.stream.stride * step;
      const bool window = tile >= segment.context_tiles;
      const int token =
          (window ? tile - segment.context_tiles : segment.first_context_tile + tile) * S::kTile + 16 * S::warp();
      const int valid = (window ? segment.work.window : segment.work.context) - token;
      if (p.softcap != 0.f) soft_cap(p.softcap, logit_scale, exponent_scale, scores);
      if (window || valid < 16 || token < masked_before)
        mask_scores<S>(p, segment, S::first_row(), window, token, valid, scores);
      bool exceeds = highest_excess(exponent_scale, scores, state.minus_maximum) > kRescaleAbove, raise = step == 0;
      if constexpr (S::kProbabilities == 1) {
        wgmma_wait<0>();  // for the previous tile's values
        operands.hold_values();
        raise |= __syncthreads_or(exceeds) != 0;
        queue.advance(p, segment, step, shared);
        if (raise) raise_maxima<S>(exponent_scale, step == 0, scores, state, shared);
        store_probabilities<S>(store_to, exponent_scale, scores, state, state.sum);
        copy_async_wait<S::kPending>();
        fence_async_proxy();
        __syncthreads();
      } else {
        float sum[S::kRowTiles][2];
#pragma unroll 1
        do {
          if (raise) {
            wgmma_wait<0>();
            raise_maxima<S>(exponent_scale, step == 0, scores, state, shared + parity);
            exceeds = false;
          }
          store_probabilities<S>(store_to + parity, exponent_scale, scores, state, sum);
          copy_async_wait<S::kPending>();
          wgmma_wait<0>();  // for the previous tile's values
          fence_async_proxy();
          raise = __syncthreads_or(exceeds) != 0;
        } while (raise);
        operands.hold_values();
#pragma unroll
        for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) state.sum[j][c] = sum[j][c];
      }
      if (!exists(step + 1)) break;
      multiply_tile_keys<S>(S::key_tile(shared, key_slot), query, p.is_e5m2, operands, scores);
      wgmma_commit();
      multiply_tile_values<S>(S::value_tile(shared, value_slot), probabilities + parity, p.is_e5m2, operands,
                              state.accumulator);
      wgmma_commit();
      if constexpr (S::kProbabilities == 2) queue.advance(p, segment, step, shared);
      key_slot = key_slot + 1 == S::kKeyStages ? 0 : key_slot + 1;
      value_slot = value_slot + 1 == S::kValueStages ? 0 : value_slot + 1;
      if constexpr (S::kProbabilities == 2) parity = S::kProbabilityBytes - parity;
      wgmma_wait<1>();  // the next tile's scores are there
      operands.hold_keys();
    }
    multiply_tile_values<S>(S::value_tile(shared, value_slot), probabilities + parity, p.is_e5m2, operands,
                            state.accumulator);
    wgmma_commit();
    wgmma_wait<0>();
    operands.hold_values();
  }
  copy_async_wait<0>();
  __syncthreads();  // the statistics may take the probabilities' place
}

// Passes the result on: to the output or the workspace through shared memory, so that rows are written whole; where
// a cluster adds up, it stays in shared memory.
template <class S>
__device__ __forceinline__ void pass_result(const VerifyParams& p, const Segment& segment, int slot,
                                            const float (&accumulator)[S::kHeadSize / 64][S::kRowTiles][4],
                                            const MergeSpace<S>& space) {
  const int lane = threadIdx.x % 32;
  const int row = S::first_row() + lane % 4 * 2, column = S::warp() * 16 + lane / 4 * 2;
  const auto put = [&](float* to, int stride, int begin, int slices) {
#pragma unroll
    for (int b = 0; b < slices / 4; ++b)
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          *reinterpret_cast<float2*>(to + (row + 8 * j + e) * stride + column + b * 64) =
              make_float2(accumulator[begin / 4 + b][j][e], accumulator[begin / 4 + b][j][2 + e]);
  };
  if (p.cluster > 1) {
    put(space.sum(), S::kSumStride, 0, S::kHeadSize / 16);
    return;
  }
  float* merge = reinterpret_cast<float*>(space.shared + S::kMergeOffset);
#pragma unroll
  for (int begin = 0; begin < S::kHeadSize / 16; begin += S::kMergeSlices) {
    if (begin > 0) __syncthreads();
    put(merge, S::kMergeStride, begin, S::kMergeSlices);
    __syncthreads();
    emit_slices<S>(p, segment, slot, begin, merge, 0, space);
  }
}

template <class S, int kBlocksPerSm>
__global__ void __launch_bounds__(S::kThreads, kBlocksPerSm)
    verify_warpgroup_kernel(const __grid_constant__ VerifyParams p) {
#if NWOR_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const Requests<S::kRows, S::kTile> requests{p, reinterpret_cast<int2*>(shared + S::kTableOffset)};
  Control& control = *reinterpret_cast<Control*>(shared + S::kControlOffset);
  const int rank = blockIdx.x % p.cluster;
  begin_walk(p, requests, blockIdx.x / p.cluster, control);
  if (!control.more) return;
  const int worker = control.walk.worker;

  TileQueue<S> queue;
  const MergeSpace<S> space{shared};
  const bool overlap = S::kOverlap && p.cluster == 1;
  queue.begin(p, control.segments[0], rank, shared);
  queue.load_last_keys(p, control.segments[0], shared);
  prepare_walk(p, requests, control);
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    const Segment& segment = control.segments[turn];
    Segment& next = control.segments[turn ^ 1];
    __syncthreads();  // everybody has read what the first thread now overwrites
    if (threadIdx.x == 0) continue_walk(p, requests, segment, next, control);
    WarpgroupState<S> state;
    attend_segment<S>(p, segment, queue, state, shared);
    share_stats<S>(S::warp(), S::first_row(), state.minus_maximum, state.sum, space);
    __syncthreads();  // the statistics are there
    const bool more = control.more;
    if (overlap && more) queue.begin(p, next, rank, shared);
    const int slot = 2 * worker + (worker == segment.first_worker ? 1 : 0);
    merge_stats<S>(p, segment, slot, space);
    pass_result<S>(p, segment, slot, state.accumulator, space);
    if (p.cluster > 1 || segment.worker_count > 1) join_parts<S>(p, segment, worker, rank, space);
    if (!more) return;
    __syncthreads();  // what the next segment's tiles overwrite has been read
    if (!overlap) queue.begin(p, next, rank, shared);
    queue.load_last_keys(p, next, shared);
  }
#endif
}

}  // namespace nwor
