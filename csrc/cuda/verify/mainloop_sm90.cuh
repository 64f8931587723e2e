// The wgmma kernel's loop over the tiles of a split: two products under way at a time.
#pragma once

#include "verify/probes.cuh"
#include "verify/products_sm90.cuh"
#include "verify/scales.cuh"
#include "verify/softmax_sm90.cuh"

namespace nwor {

// The tiles of a split whose first ones are on their way. A tile's values are multiplied while the next one's scores
// are computed. Where two tiles' probabilities have room, also while those become probabilities: one barrier a tile says
// that probabilities and tiles are there, that what was multiplied may be overwritten, and whether a score asks for higher
// maxima. Where one does, which is seldom, the probabilities are computed once more. With room for one tile's, the
// barrier that says the last two comes first, and another when the probabilities are there.
template <class T>
__device__ __forceinline__ void attend_split(const VerifyParams& p, const Split& split, TileQueue<T>& queue,
                                             WarpgroupState<T>& state, char* shared) {
  const uint32_t query = smem_address(shared) + T::first_row() * T::kQueryPitch;
  const uint32_t probabilities = smem_address(shared) + T::probability_offset();
  const uint32_t store_to = probability_place<T>(probabilities + T::of_pair() * T::kProbabilityBytes);
  char* exchange = shared + T::probability_offset();
  const float logit_scale = p.scale * logit_descale<T>(p, split.head);
  const float exponent_scale = logit_scale * kLog2e;
  const int masked_before = p.sliding_window > 0 ? split.work.context + split.work.window - p.sliding_window : 0;
  RowBarrier<T> barrier;
  state.clear();
  copy_async_wait<T::kPendingAtFirst>();
  if constexpr (T::kFp8) finish_query<T>(p, shared);
  fence_async_proxy();
  __syncthreads();  // the query rows are there, and the first keys
  probe(p, Station::kFirstTiles);
  if (queue.exists(split, 0)) {
    TileOperands<T> operands;
    float scores[T::kRowTiles][4];
    multiply_tile_keys<T>(key_tile<T>(shared, 0), query, p.is_e5m2, operands, scores);
    wgmma_commit();
    wgmma_wait<0>();
    operands.hold_keys();
    int key_slot = 1, value_slot = 0, parity = 0;
#pragma unroll 1
    for (int step = 0;; ++step) {
      scale_and_mask<T>(p, split, queue, step, logit_scale, exponent_scale, masked_before, scores);
      bool exceeds = highest_excess(exponent_scale, scores, state.minus_maximum) > kRescaleAbove, raise = step == 0;
      if constexpr (T::kProbabilities == 1) {
        wgmma_wait<0>();  // for the previous tile's values
        operands.hold_values();
        raise |= barrier.any(exceeds);
        queue.advance(p, split, step, shared);
        if (raise) raise_maxima<T>(exponent_scale, step == 0, scores, state, exchange, barrier);
        store_probabilities<T>(store_to, exponent_scale, scores, state, state.sum);
        copy_async_wait<T::kPending>();
        fence_async_proxy();
        barrier.sync();
      } else {
        float sum[T::kRowTiles][2];
#pragma unroll 1
        do {
          if (raise) {
            wgmma_wait<0>();
            raise_maxima<T>(exponent_scale, step == 0, scores, state, exchange + parity, barrier);
            exceeds = false;
          }
          store_probabilities<T>(store_to + parity, exponent_scale, scores, state, sum);
          copy_async_wait<T::kPending>();
          wgmma_wait<0>();  // for the previous tile's values
          fence_async_proxy();
          raise = barrier.any(exceeds);
        } while (raise);
        operands.hold_values();
#pragma unroll
        for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) state.sum[j][c] = sum[j][c];
      }
      if (!queue.exists(split, step + 1)) break;
      multiply_tile_keys<T>(key_tile<T>(shared, key_slot), query, p.is_e5m2, operands, scores);
      wgmma_commit();
      multiply_tile_values<T>(value_tiles<T>(shared, value_slot), probabilities + parity, p.is_e5m2, operands,
                              state.accumulator);
      wgmma_commit();
      if constexpr (T::kProbabilities == 2) queue.advance(p, split, step, shared);
      key_slot = key_slot + 1 == T::kKeyStages ? 0 : key_slot + 1;
      value_slot = value_slot + 1 == T::kValueStages ? 0 : value_slot + 1;
      if constexpr (T::kProbabilities == 2) parity = T::kStageTiles * T::kProbabilityBytes - parity;
      wgmma_wait<1>();  // the next tile's scores are there
      operands.hold_keys();
    }
    multiply_tile_values<T>(value_tiles<T>(shared, value_slot), probabilities + parity, p.is_e5m2, operands,
                            state.accumulator);
    wgmma_commit();
    wgmma_wait<0>();
    operands.hold_values();
  }
  copy_async_wait<0>();
  if (T::kInTurns && p.even_barriers) barrier.even_out();
  __syncthreads();  // the statistics may take the probabilities' place
}

}  // namespace nwor
