// The mma.sync kernel of verify_attention: queries of short windows over a paged context and the windows' own keys and
// values.
//
// Scores are computed transposed, S^T = K Q^T and O^T = V^T P^T, so that the few query rows lie along the side of
// the tensor core's tile that comes in eights: a window of 5 tokens with 4 query heads per KV head fills 20 of 24.
// Every group of warps streams its own tiles through its own ring of asynchronous copies. Where groups are single warps,
// nothing synchronizes the whole thread block until its split is done.
#pragma once

#include "verify/combine.cuh"
#include "verify/epilogue_sm80.cuh"
#include "verify/mainloop_sm80.cuh"
#include "verify/scheduler.cuh"
#include "verify/traits_sm80.cuh"

namespace nwor {

// `kMany`: as in kernel_sm90.cuh.
template <class T, bool kMany>
__global__ void __launch_bounds__(T::kThreads, T::kConfig.ctas_per_sm)
    verify_sm80_kernel(const __grid_constant__ VerifyParams p) {
  extern __shared__ __align__(1024) char shared[];
  const Requests<T::kRows, T::kTile> requests{p, reinterpret_cast<int2*>(shared + T::kTableOffset)};
  Control& control = *reinterpret_cast<Control*>(shared + T::kControlOffset);
  probe(p, Station::kBegin);
  begin_schedule(p, requests, control, *reinterpret_cast<SortedRequests*>(shared));
  if (!control.more) return;
  probe(p, Station::kPlanned);

  TileStream<T> stream;
  stream.ring = smem_address(shared + T::kQueryBytes + stream.group() * T::kStages * T::kStageBytes);
  const SharedMemory<T> smem{shared};
  const bool overlap = T::kOverlap && smem.cluster() == 1;
  const ScheduleAhead<T::kRows, T::kTile> ahead(p, requests, control);
  begin_split<T>(p, control.splits[0], stream, shared);
  ahead.keep();
  if (threadIdx.x == 0) control.shared.worker_count = 0;
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    const Split& split = control.splits[turn];
    Split& next = control.splits[turn ^ 1];
    __syncthreads();  // everybody has read what the first thread now overwrites
    if (threadIdx.x == 0) advance_schedule<kMany>(p, requests, split, next, control);
    WarpState<T> state;
    attend_split<T>(p, split, stream, state, shared);
    probe(p, Station::kLastTile);
    share_stats<T>(stream.group(), stream.row(), state.minus_maximum, state.sum, smem);
    __syncthreads();  // the statistics are there, and no warp reads the query rows or the ring any more
    const bool more = control.more;
    if (overlap && more) {
      if constexpr (kMany) {
        begin_split<T>(p, next, stream, shared);
      } else {
        stream = begin_next<T>(p, next, stream, shared);
      }
    }
    const int slot = slot_of(split, control.scheduler.worker);
    merge_stats<T>(p, split, slot, smem);
    add_groups<T>(p, split, stream.group(), stream.row(), slot, state.accumulator, smem);
    if (smem.cluster() > 1) combine_cluster<T>(p, split, slot, smem);
    probe(p, Station::kPassedOn);
    if (!more) {
      if (control.shared.worker_count + split.worker_count > 1)
        combine_splits<T>(p, control.shared, split, control.scheduler.worker, smem);
      probe(p, Station::kEnd);
      return;
    }
    if (!overlap) {
      __syncthreads();  // what the next split's tiles overwrite has been read
      stream = begin_next<T>(p, next, stream, shared);
    }
  }
}

}  // namespace nwor
