// The verify attention kernel for Hopper's warpgroup matrix unit. The same transposed products as in
// verify_kernel.cuh, 64 tokens at a time: S^T = K Q^T leaves 16 tokens to each of a warpgroup's four warps,
// O^T += V^T P^T a quarter of each 64 head positions. A thread block has one ring and one result, so windows with
// many query rows stay bound by memory. A 16-bit cache's tiles never pass through registers; an fp8 cache's become
// fp16 there, each byte once per warpgroup, and are the product's operand from there. With an fp8 query only values do.
#pragma once

#include "verify_pairs.cuh"

namespace nwor {

// The tiles of a segment whose first ones are on their way. A tile's values are multiplied while the next one's scores
// are computed. Where two tiles' probabilities have room, also while those become probabilities: one barrier a tile says
// that probabilities and tiles are there, that what was multiplied may be overwritten, and whether a score asks for higher
// maxima. Where one does, which is seldom, the probabilities are computed once more. With room for one tile's, the
// barrier that says the last two comes first, and another when the probabilities are there.
template <class S>
__device__ __forceinline__ void attend_segment(const VerifyParams& p, const Segment& segment, TileQueue<S>& queue,
                                               WarpgroupState<S>& state, char* shared) {
  const uint32_t query = smem_address(shared) + S::first_row() * S::kQueryPitch;
  const uint32_t probabilities = smem_address(shared) + S::probability_offset();
  const uint32_t store_to = probability_place<S>(probabilities + S::of_pair() * S::kProbabilityBytes);
  char* exchange = shared + S::probability_offset();
  const float logit_scale = p.scale * logit_descale<S>(p, segment.head);
  const float exponent_scale = logit_scale * kLog2e;
  const int masked_before = p.sliding_window > 0 ? segment.work.context + segment.work.window - p.sliding_window : 0;
  RowBarrier<S> barrier;
  state.clear();
  copy_async_wait<S::kPendingAtFirst>();
  if constexpr (S::kFp8) finish_query<S>(p, shared);
  fence_async_proxy();
  __syncthreads();  // the query rows are there, and the first keys
  probe(p, Station::kFirstTiles);
  if (queue.exists(segment, 0)) {
    TileOperands<S> operands;
    float scores[S::kRowTiles][4];
    multiply_tile_keys<S>(S::key_tile(shared, 0), query, p.is_e5m2, operands, scores);
    wgmma_commit();
    wgmma_wait<0>();
    operands.hold_keys();
    int key_slot = 1, value_slot = 0, parity = 0;
#pragma unroll 1
    for (int step = 0;; ++step) {
      scale_and_mask<S>(p, segment, queue, step, logit_scale, exponent_scale, masked_before, scores);
      bool exceeds = highest_excess(exponent_scale, scores, state.minus_maximum) > kRescaleAbove, raise = step == 0;
      if constexpr (S::kProbabilities == 1) {
        wgmma_wait<0>();  // for the previous tile's values
        operands.hold_values();
        raise |= barrier.any(exceeds);
        queue.advance(p, segment, step, shared);
        if (raise) raise_maxima<S>(exponent_scale, step == 0, scores, state, exchange, barrier);
        store_probabilities<S>(store_to, exponent_scale, scores, state, state.sum);
        copy_async_wait<S::kPending>();
        fence_async_proxy();
        barrier.sync();
      } else {
        float sum[S::kRowTiles][2];
#pragma unroll 1
        do {
          if (raise) {
            wgmma_wait<0>();
            raise_maxima<S>(exponent_scale, step == 0, scores, state, exchange + parity, barrier);
            exceeds = false;
          }
          store_probabilities<S>(store_to + parity, exponent_scale, scores, state, sum);
          copy_async_wait<S::kPending>();
          wgmma_wait<0>();  // for the previous tile's values
          fence_async_proxy();
          raise = barrier.any(exceeds);
        } while (raise);
        operands.hold_values();
#pragma unroll
        for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) state.sum[j][c] = sum[j][c];
      }
      if (!queue.exists(segment, step + 1)) break;
      multiply_tile_keys<S>(S::key_tile(shared, key_slot), query, p.is_e5m2, operands, scores);
      wgmma_commit();
      multiply_tile_values<S>(S::value_tiles(shared, value_slot), probabilities + parity, p.is_e5m2, operands,
                              state.accumulator);
      wgmma_commit();
      if constexpr (S::kProbabilities == 2) queue.advance(p, segment, step, shared);
      key_slot = key_slot + 1 == S::kKeyStages ? 0 : key_slot + 1;
      value_slot = value_slot + 1 == S::kValueStages ? 0 : value_slot + 1;
      if constexpr (S::kProbabilities == 2) parity = S::kStageTiles * S::kProbabilityBytes - parity;
      wgmma_wait<1>();  // the next tile's scores are there
      operands.hold_keys();
    }
    multiply_tile_values<S>(S::value_tiles(shared, value_slot), probabilities + parity, p.is_e5m2, operands,
                            state.accumulator);
    wgmma_commit();
    wgmma_wait<0>();
    operands.hold_values();
  }
  copy_async_wait<0>();
  if (S::kInTurns && p.even_barriers) barrier.even_out();
  __syncthreads();  // the statistics may take the probabilities' place
}

// Passes the result on: to the output or the workspace through shared memory, so that rows are written whole; where
// a cluster adds up, it stays in shared memory.
template <class S>
__device__ __forceinline__ void pass_result(const VerifyParams& p, const Segment& segment, int slot,
                                            const float (&accumulator)[S::kBlocks][S::kRowTiles][4],
                                            const MergeSpace<S>& space) {
  const int lane = recomputed_thread() % 32;
  const int row = S::first_row() + lane % 4 * 2, column = S::warp() * 16;
  const auto put = [&](float* to, int stride, int begin, int slices) {
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      const int block = S::of_pair() * S::kBlocks + b - begin / 4;
      if (block < 0 || block >= slices / 4) continue;
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          put_pair<S>(to + (row + 8 * j + e) * stride + column + block * 64, lane / 4, accumulator[b][j][e],
                      accumulator[b][j][2 + e]);
    }
  };
  if (!S::kInTurns && space.cluster() > 1) {
    put(space.sum(), S::kSumStride, 0, S::kHeadSize / 16);
    return;
  }
  float* merge = reinterpret_cast<float*>(space.shared + S::kMergeOffset);
#pragma unroll
  for (int begin = 0; begin < S::kHeadSize / 16; begin += S::kMergeSlices) {
    if (begin > 0) __syncthreads();
    put(merge + S::ring() * (S::kMergeBytes / 4), S::kMergeStride, begin, S::kMergeSlices);
    __syncthreads();
    emit_slices<S>(p, segment, slot, begin, merge, S::kMergeBytes / 4, space);
  }
}

// What begins a segment after the first: functions of their own, with the queue by value, so that the end of a launch
// follows its loop in memory. In a model other kernels drive a launch's instructions out of the caches, and for each place
// where they do not follow one another it waits for memory. A launch of many units has it inline where it is in a hurry.
template <class S>
__device__ __noinline__ TileQueue<S> begin_next(const VerifyParams& p, const Segment& segment, char* shared) {
  TileQueue<S> queue;
  queue.begin(p, segment, shared);
  return queue;
}

template <class S>
__device__ __noinline__ void load_rest(const VerifyParams& p, const Segment& segment, TileQueue<S> queue, char* shared) {
  const MergeSpace<S> space{shared};
  queue.load_last(p, segment, shared);
  load_window<S>(p, segment, S::fill_thread(), space);
}

// `kMany`: for launches of more units than thread blocks.
template <class S, int kBlocksPerSm, bool kMany>
__global__ void __launch_bounds__(S::kThreads, kBlocksPerSm)
    verify_warpgroup_kernel(const __grid_constant__ VerifyParams p) {
#if NWOR_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const Requests<S::kRows, S::kTile> requests{p, reinterpret_cast<int2*>(shared + S::kTableOffset)};
  Control& control = *reinterpret_cast<Control*>(shared + S::kControlOffset);
  probe(p, Station::kBegin);
  begin_walk(p, requests, control, *reinterpret_cast<Ranking*>(shared));
  if (!control.more) return;
  probe(p, Station::kPlanned);

  TileQueue<S> queue;
  const MergeSpace<S> space{shared};
  const WindowAhead<S> window(p, control.segments[0], space);
  const WalkAhead<S::kRows, S::kTile> ahead(p, requests, control);
  queue.begin(p, control.segments[0], shared);
  queue.load_last(p, control.segments[0], shared);
  window.keep(p, control.segments[0], space);
  ahead.keep();
  if (threadIdx.x == 0) control.shared.worker_count = 0;
  Segment* turn = control.segments;
#pragma unroll 1
  for (;; turn = control.segments + (turn == control.segments ? 1 : 0)) {
    const Segment& segment = *turn;
    Segment& next = control.segments[turn == control.segments ? 1 : 0];
    __syncthreads();  // everybody has read what the first thread now overwrites
    if (threadIdx.x == 0) continue_walk<kMany>(p, requests, segment, next, control);
    WarpgroupState<S> state;
    if constexpr (S::kOneStage) {
      attend_one_stage<S>(p, segment, queue, state, shared);
    } else {
      attend_segment<S>(p, segment, queue, state, shared);
    }
    probe(p, Station::kLastTile);
    share_stats<S>(4 * S::group() + S::warp(), S::first_row(), state.minus_maximum, state.sum, space);
    __syncthreads();  // the statistics are there
    const bool more = control.more;
    const bool overlap = S::kOverlap && space.cluster() == 1;
    if (overlap && more) {
      if constexpr (kMany) {  // faster where it runs, in the way where it does not
        queue.begin(p, next, shared);
      } else {
        queue = begin_next<S>(p, next, shared);
      }
    }
    const int slot = slot_of(segment, control.walk.worker);
    merge_stats<S>(p, segment, slot, space);
    pass_result<S>(p, segment, slot, state.accumulator, space);
    if (space.cluster() > 1) add_cluster<S>(p, segment, slot, space);
    probe(p, Station::kPassedOn);
    if (!more) {
      if (control.shared.worker_count + segment.worker_count > 1)
        join_units<S>(p, control.shared, segment, control.walk.worker, space);
      probe(p, Station::kEnd);
      return;
    }
    __syncthreads();  // what the next segment's tiles overwrite has been read
    if (!overlap) queue = begin_next<S>(p, next, shared);
    load_rest<S>(p, next, queue, shared);
  }
#endif
}

}  // namespace nwor
