// Two warpgroups of a thread block with the same query rows that take tiles in turns: what the warpgroup kernel does
// where rows are many and long. Each tile is read from shared memory by one warpgroup alone, and each has the time that
// two tiles take to arrive: so it does one thing after the other, scores, softmax, values, and a tile makes room as soon
// as it is multiplied.
#pragma once

#include "verify_warpgroup_softmax.cuh"

namespace nwor {

// Barriers of one warpgroup, so that two drift apart: one multiplies while the other computes probabilities or waits.
// This one is for tiles and probabilities, which only the matrix unit reads.
struct TileBarrier {
  int name;

  __device__ __forceinline__ void sync() const { asm volatile("barrier.sync.aligned %0, 128;" ::"r"(name) : "memory"); }
  // The same; whether any thread says so.
  __device__ __forceinline__ bool any(bool said) const {
    int result;
    asm volatile(
        "{.reg .pred mine, all; setp.ne.s32 mine, %1, 0; barrier.red.or.pred.aligned all, %2, 128, mine;"
        "selp.s32 %0, 1, 0, all;}"
        : "=r"(result)
        : "r"(static_cast<int>(said)), "r"(name)
        : "memory");
    return result != 0;
  }
};

// And this one, seldom wanted, for what threads exchange in shared memory: tools that look for races know it.
struct ExchangeBarrier {
  uint32_t address;  // 8 bytes of shared memory, initialized by one thread

  __device__ __forceinline__ void initialize() const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(address) : "memory");
  }
  __device__ __forceinline__ void sync() const {
#if NWOR_WGMMA
    asm volatile(
        "{.reg .pred done; .reg .b64 phase; mbarrier.arrive.shared::cta.b64 phase, [%0];"
        "again: mbarrier.try_wait.shared::cta.b64 done, [%0], phase; @!done bra again;}" ::"r"(address)
        : "memory");
#endif
  }
};

template <class S>
__device__ __forceinline__ ExchangeBarrier exchange_barrier(char* shared) {
  return ExchangeBarrier{smem_address(shared) + S::kBarrierOffset + S::tile_group() * 8};
}

// The tiles of a segment whose first ones are on their way.
template <class S>
__device__ __forceinline__ void attend_in_turns(const VerifyParams& p, const Segment& segment, TileQueue<S>& queue,
                                                WarpgroupState<S>& state, char* shared) {
  const uint32_t query = smem_address(shared);
  const uint32_t probabilities = smem_address(shared) + S::probability_offset();
  const uint32_t store_to = probability_place<S>(probabilities);
  const float logit_scale = p.scale * logit_descale<S>(p, segment.head);
  const float exponent_scale = logit_scale * kLog2e;
  const int masked_before = p.sliding_window > 0 ? segment.work.context + segment.work.window - p.sliding_window : 0;
  const TileBarrier barrier{1 + S::tile_group()};
  clear(state, shared);

  copy_async_wait<S::kPendingAtFirst>();
  if constexpr (S::kFp8) finish_query<S>(p, shared);
  int key_slot = 0, value_slot = 0;
#pragma unroll 1
  for (int step = 0; queue.exists(segment, step); ++step) {
    copy_async_wait<S::kPendingKeys>();
    fence_async_proxy();
    if (step == 0) {
      __syncthreads();  // the query rows are there, and the first keys
    } else {
      barrier.sync();
    }
    TileOperands<S> operands;
    float scores[S::kRowTiles][4];
    multiply_tile_keys<S>(S::key_tile(shared, key_slot), query, p.is_e5m2, operands, scores);
    wgmma_commit();
    wgmma_wait<0>();
    operands.hold_keys();
    const int tile = queue.stream.first + queue.stream.stride * step;
    const bool window = tile >= segment.context_tiles;
    const int token =
        (window ? tile - segment.context_tiles : segment.first_context_tile + tile) * S::kTile + 16 * S::warp();
    const int valid = tile >= segment.end ? 0 : (window ? segment.work.window : segment.work.context) - token;
    if (p.softcap != 0.f) soft_cap(p.softcap, logit_scale, exponent_scale, scores);
    if (window || valid < 16 || token < masked_before)
      mask_scores<S>(p, segment, S::first_row(), window, token, valid, scores);
    const bool exceeds = highest_excess(exponent_scale, scores, state.minus_maximum) > kRescaleAbove;
    const bool raise = barrier.any(exceeds) || step == 0;
    if (raise)
      raise_maxima<S>(exponent_scale, step == 0, scores, state, shared + S::exchange_offset(),
                      exchange_barrier<S>(shared));
    store_probabilities<S>(store_to, exponent_scale, scores, state, state.sum);
    queue.next_keys(p, segment, step, shared);  // not before the scores' registers are free
    copy_async_wait<S::kPendingValues>();
    fence_async_proxy();
    barrier.sync();  // probabilities and values are there
    multiply_tile_values<S>(S::value_tile(shared, value_slot), probabilities, p.is_e5m2, operands, state.accumulator);
    wgmma_commit();
    wgmma_wait<0>();
    operands.hold_values();
    barrier.sync();  // and have been read
    queue.next_values(p, segment, step, shared);
    key_slot = key_slot + 1 == S::kKeyStages ? 0 : key_slot + 1;
    value_slot = value_slot + 1 == S::kValueStages ? 0 : value_slot + 1;
  }
  copy_async_wait<0>();
  __syncthreads();  // the statistics may take the probabilities' place
}

// Adds the groups' results up in shared memory and, where no cluster does more with the sum, passes it on. Each group
// leaves its part of one half of the head, then adds its part of the other. Sums for the workspace go there at once.
template <class S>
__device__ __forceinline__ void pass_sum(const VerifyParams& p, const Segment& segment, int slot,
                                         const float (&accumulator)[S::kHeadSize / 64][S::kRowTiles][4],
                                         const MergeSpace<S>& space) {
  static_assert(S::kGroups == 2);
  constexpr int kBlocks = S::kHeadSize / 64;
  const int lane = threadIdx.x % 32, group = S::tile_group();
  const int row = lane % 4 * 2, column = S::warp() * 16 + lane / 4 * 2;
  const bool alone = space.cluster() == 1, for_others = alone && segment.worker_count > 1;
  float* sum = space.sum() + row * S::kSumStride + column;
  float* target = p.partial_output + (static_cast<int64_t>(slot) * S::kRows + row) * S::kHeadSize + column;
  const float2* stats = space.stats() + 4 * group * S::kRows + row;
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if ((b < kBlocks / 2 ? 0 : 1) != (group ^ turn)) continue;
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float weight = stats[8 * j + e].x;
          float2* to = reinterpret_cast<float2*>(sum + (8 * j + e) * S::kSumStride + b * 64);
          float2 part = make_float2(accumulator[b][j][e] * weight, accumulator[b][j][2 + e] * weight);
          if (turn == 1) {
            const float2 other = *to;
            part = make_float2(part.x + other.x, part.y + other.y);
          }
          if (turn == 1 && for_others) {
            __stcg(reinterpret_cast<float2*>(target + (8 * j + e) * S::kHeadSize + b * 64), part);
          } else {
            *to = part;
          }
        }
    }
    __syncthreads();
  }
  if (alone && !for_others) emit_slices<S>(p, segment, slot, 0, space.sum(), 0, space);
}

}  // namespace nwor
