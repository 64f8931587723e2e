// The wgmma kernel of verify_attention, for Hopper's warpgroup matrix unit. The same transposed products as in
// kernel_sm80.cuh, 64 tokens at a time: S^T = K Q^T leaves 16 tokens to each of a warpgroup's four warps,
// O^T += V^T P^T a quarter of each 64 head positions. A thread block has one ring and one result, so windows with
// many query rows stay bound by memory. A 16-bit cache's tiles never pass through registers; an fp8 cache's become
// fp16 there, each byte once per warpgroup, and are the product's operand from there. With an fp8 query only values do.
#pragma once

#include "verify/combine.cuh"
#include "verify/epilogue_sm90.cuh"
#include "verify/mainloop_sm90.cuh"
#include "verify/mainloop_sm90_pairs.cuh"
#include "verify/scheduler.cuh"
#include "verify/traits_sm90.cuh"

namespace nwor {

// `kMany`: for launches of more work tiles than thread blocks.
template <class T, bool kMany>
__global__ void __launch_bounds__(T::kThreads, T::kConfig.ctas_per_sm)
    verify_sm90_kernel(const __grid_constant__ VerifyParams p) {
#if NWOR_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const Requests<T::kRows, T::kTile> requests{p, reinterpret_cast<int2*>(shared + T::kTableOffset)};
  Control& control = *reinterpret_cast<Control*>(shared + T::kControlOffset);
  probe(p, Station::kBegin);
  begin_schedule(p, requests, control, *reinterpret_cast<SortedRequests*>(shared));
  if (!control.more) return;
  probe(p, Station::kPlanned);

  TileQueue<T> queue;
  const SharedMemory<T> smem{shared};
  const WindowAhead<T> window(p, control.splits[0], smem);
  const ScheduleAhead<T::kRows, T::kTile> ahead(p, requests, control);
  queue.begin(p, control.splits[0], shared);
  queue.load_last(p, control.splits[0], shared);
  window.keep(p, control.splits[0], smem);
  ahead.keep();
  if (threadIdx.x == 0) control.shared.worker_count = 0;
  Split* turn = control.splits;
#pragma unroll 1
  for (;; turn = control.splits + (turn == control.splits ? 1 : 0)) {
    const Split& split = *turn;
    Split& next = control.splits[turn == control.splits ? 1 : 0];
    __syncthreads();  // everybody has read what the first thread now overwrites
    if (threadIdx.x == 0) advance_schedule<kMany>(p, requests, split, next, control);
    WarpgroupState<T> state;
    if constexpr (T::kOneStage) {
      attend_one_pair<T>(p, split, queue, state, shared);
    } else {
      attend_split<T>(p, split, queue, state, shared);
    }
    probe(p, Station::kLastTile);
    share_stats<T>(4 * T::group() + T::warp(), T::first_row(), state.minus_maximum, state.sum, smem);
    __syncthreads();  // the statistics are there
    const bool more = control.more;
    const bool overlap = T::kOverlap && smem.cluster() == 1;
    if (overlap && more) {
      if constexpr (kMany) {  // faster where it runs, in the way where it does not
        queue.begin(p, next, shared);
      } else {
        queue = begin_next<T>(p, next, shared);
      }
    }
    const int slot = slot_of(split, control.scheduler.worker);
    merge_stats<T>(p, split, slot, smem);
    write_result<T>(p, split, slot, state.accumulator, smem);
    if (smem.cluster() > 1) combine_cluster<T>(p, split, slot, smem);
    probe(p, Station::kPassedOn);
    if (!more) {
      if (control.shared.worker_count + split.worker_count > 1)
        combine_splits<T>(p, control.shared, split, control.scheduler.worker, smem);
      probe(p, Station::kEnd);
      return;
    }
    __syncthreads();  // what the next split's tiles overwrite has been read
    if (!overlap) queue = begin_next<T>(p, next, shared);
    load_rest<T>(p, next, queue, shared);
  }
#endif
}

}  // namespace nwor
