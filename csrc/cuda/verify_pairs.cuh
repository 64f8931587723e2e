// The warpgroup kernel's loop where shared memory holds but one pair of tiles: many rows of a large head and a 16-bit
// cache. Nothing is multiplied while another tile becomes probabilities; in return keys make room as soon as they are
// multiplied, and values likewise, so that memory always has something to bring.
#pragma once

#include "verify_warpgroup_softmax.cuh"

namespace nwor {

// The tiles of a segment whose first ones are on their way.
template <class S>
__device__ __forceinline__ void attend_one_stage(const VerifyParams& p, const Segment& segment, TileQueue<S>& queue,
                                                 WarpgroupState<S>& state, char* shared) {
  const uint32_t query = smem_address(shared);
  const uint32_t probabilities = smem_address(shared) + S::kProbabilityOffset;
  const uint32_t store_to = probability_place<S>(probabilities + S::group() * S::kProbabilityBytes);
  const float exponent_scale = p.scale * kLog2e;
  const int masked_before = p.sliding_window > 0 ? segment.work.context + segment.work.window - p.sliding_window : 0;
  const WarpgroupBarrier barrier{1 + S::group()};
  RowBarrier<S> all;
  state.clear();

#pragma unroll 1
  for (int step = 0; queue.exists(segment, step); ++step) {
    copy_async_wait<S::kPendingOneStage>();
    fence_async_proxy();
    if (step == 0) {
      __syncthreads();  // the query rows are there, and the first keys
      probe(p, Station::kFirstTiles);
    } else {
      barrier.sync();  // only the warpgroup's own keys are read
    }
    TileOperands<S> operands;
    float scores[S::kRowTiles][4];
    multiply_tile_keys<S>(S::key_tile(shared, 0), query, p.is_e5m2, operands, scores);
    wgmma_commit();
    wgmma_wait<0>();
    scale_and_mask<S>(p, segment, queue, step, p.scale, exponent_scale, masked_before, scores);
    const bool exceeds = highest_excess(exponent_scale, scores, state.minus_maximum) > kRescaleAbove;
    const bool raise = __syncthreads_or(exceeds) != 0 || step == 0;
    queue.next_keys(p, segment, step, shared);
    if (raise) raise_maxima<S>(exponent_scale, step == 0, scores, state, shared + S::kProbabilityOffset, all);
    store_probabilities<S>(store_to, exponent_scale, scores, state, state.sum);
    copy_async_wait<S::kPendingOneStage>();
    fence_async_proxy();
    __syncthreads();  // both tiles' probabilities and values are there
    multiply_tile_values<S>(S::value_tiles(shared, 0), probabilities, p.is_e5m2, operands, state.accumulator);
    wgmma_commit();
    wgmma_wait<0>();
    __syncthreads();  // and have been read
    queue.next_values(p, segment, step, shared);
  }
  copy_async_wait<0>();
  __syncthreads();  // the statistics may take the probabilities' place
}

}  // namespace nwor
