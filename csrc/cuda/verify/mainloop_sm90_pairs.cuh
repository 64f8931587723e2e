// The wgmma kernel's loop where shared memory holds but one pair of tiles: many rows of a large head and a 16-bit
// cache. Nothing is multiplied while another tile becomes probabilities; in return keys make room as soon as they are
// multiplied, and values likewise, so that memory always has something to bring.
#pragma once

#include "verify/probes.cuh"
#include "verify/products_sm90.cuh"
#include "verify/softmax_sm90.cuh"

namespace nwor {

// The tiles of a split whose first ones are on their way.
template <class T>
__device__ __forceinline__ void attend_one_pair(const VerifyParams& p, const Split& split, TileQueue<T>& queue,
                                                WarpgroupState<T>& state, char* shared) {
  const uint32_t query = smem_address(shared);
  const uint32_t probabilities = smem_address(shared) + T::kProbabilityOffset;
  const uint32_t store_to = probability_place<T>(probabilities + T::group() * T::kProbabilityBytes);
  const float exponent_scale = p.scale * kLog2e;
  const int masked_before = p.sliding_window > 0 ? split.work.context + split.work.window - p.sliding_window : 0;
  const WarpgroupBarrier barrier{1 + T::group()};
  RowBarrier<T> all;
  state.clear();

#pragma unroll 1
  for (int step = 0; queue.exists(split, step); ++step) {
    copy_async_wait<T::kPendingOneStage>();
    fence_async_proxy();
    if (step == 0) {
      __syncthreads();  // the query rows are there, and the first keys
      probe(p, Station::kFirstTiles);
    } else {
      barrier.sync();  // only the warpgroup's own keys are read
    }
    TileOperands<T> operands;
    float scores[T::kRowTiles][4];
    multiply_tile_keys<T>(key_tile<T>(shared, 0), query, p.is_e5m2, operands, scores);
    wgmma_commit();
    wgmma_wait<0>();
    scale_and_mask<T>(p, split, queue, step, p.scale, exponent_scale, masked_before, scores);
    const bool exceeds = highest_excess(exponent_scale, scores, state.minus_maximum) > kRescaleAbove;
    const bool raise = __syncthreads_or(exceeds) != 0 || step == 0;
    queue.next_keys(p, split, step, shared);
    if (raise) raise_maxima<T>(exponent_scale, step == 0, scores, state, shared + T::kProbabilityOffset, all);
    store_probabilities<T>(store_to, exponent_scale, scores, state, state.sum);
    copy_async_wait<T::kPendingOneStage>();
    fence_async_proxy();
    __syncthreads();  // both tiles' probabilities and values are there
    multiply_tile_values<T>(value_tiles<T>(shared, 0), probabilities, p.is_e5m2, operands, state.accumulator);
    wgmma_commit();
    wgmma_wait<0>();
    __syncthreads();  // and have been read
    queue.next_values(p, split, step, shared);
  }
  copy_async_wait<0>();
  __syncthreads();  // the statistics may take the probabilities' place
}

}  // namespace nwor
