// The tile scheduler: a worker's way through its part of the plan, split by split.
#pragma once

#include "verify/plan.cuh"

namespace nwor {

// A work tile of the schedule's KV head.
template <int kRows, int kTile>
__device__ __forceinline__ void whole_work_tile(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                                const Scheduler& scheduler, int request, Split& split) {
  split.request = request;
  split.work = requests.get(request);
  split.head = scheduler.row;
  split.first_row = 0;
  split.row_count = split.work.window * static_cast<int>(p.group.value);
  split.window_begin = window_begin<kTile>(p, split.work);
  split.first_context_tile = first_tile<kTile>(p, split.work.context);
  split.first_worker = scheduler.worker;
  split.worker_count = 1;
  split.tile = 0;
  split.end = split.work.tiles;
}

// Makes a whole work tile one of its splits, which as many workers have, this one among them.
__device__ __forceinline__ void take_split(Split& split, int length, int index) {
  split.first_worker -= index;
  split.worker_count = divide_up(split.work.tiles, length);
  split.tile = index * length;
  split.end = min(split.tile + length, split.work.tiles);
}

// Finds the next split; `split` holds the request and its work of the one before. False where nothing is left.
template <int kRows, int kTile>
__device__ __forceinline__ bool next_split(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                           Scheduler& scheduler, Split& split) {
  if (scheduler.plan.lpt) {
    if (scheduler.position >= scheduler.end) return false;
    whole_work_tile(p, requests, scheduler, scheduler.lpt_request(scheduler.position), split);
    if (scheduler.position++ == scheduler.plan.total && scheduler.plan.share > 1)
      take_split(split, LptSchedule::split_length(split.work.tiles, scheduler.plan.share),
                 scheduler.worker - scheduler.begin);
    return true;
  }
#pragma unroll 1
  while (scheduler.position < scheduler.end) {
    const int tiles = split.work.tiles;
    const int chunks = requests.chunks(split.work);
    const int work_tiles = requests.work_tiles_of_row(split.work, scheduler.plan.rows);
    int inside;
    const int work_tile = divide_small(scheduler.position - scheduler.begin, scheduler.length, inside);
    if (work_tile >= work_tiles) {  // on to the next request that has a window
      scheduler.begin += work_tiles * scheduler.length;
      do {
        if (++split.request >= p.batch) return false;
        split.work = requests.get(split.request);
      } while (split.work.tiles == 0);
      scheduler.length = split.work.tiles;  // a worker of splits of one length has only one
      continue;
    }
    int chunk;
    split.head = scheduler.row + divide_small(work_tile, chunks, chunk);
    split.first_row = chunk * kRows;
    split.row_count = split.work.window * static_cast<int>(p.group.value) - split.first_row;
    split.window_begin = window_begin<kTile>(p, split.work);
    split.first_context_tile = first_tile<kTile>(p, split.work.context);
    split.first_worker = scheduler.worker;
    split.worker_count = 1;
    if (scheduler.plan.uniform) {
      split.tile = inside * scheduler.plan.share;
      split.end = min(split.tile + scheduler.plan.share, tiles);
      split.first_worker = scheduler.worker - inside;
      split.worker_count = scheduler.length;
      ++scheduler.position;
    } else {
      split.tile = inside;
      split.end = min(tiles, inside + scheduler.end - scheduler.position);
      if (split.end - split.tile < tiles) {
        const int work_tile_begin = scheduler.position - inside;
        int unused;
        const int first = divide_small(work_tile_begin, scheduler.plan.share, unused);
        split.first_worker = scheduler.first_worker + first;
        split.worker_count = divide_small(work_tile_begin + tiles - 1, scheduler.plan.share, unused) - first + 1;
      }
      scheduler.position += split.end - split.tile;
    }
    return true;
  }
  return false;
}

// The first split of an LPT schedule's worker.
template <int kRows, int kTile>
__device__ __forceinline__ bool first_lpt_split(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                                const SortedRequests& sorted, const LptSchedule& lpt, int worker,
                                                Scheduler& scheduler, Split& split) {
  scheduler.position = scheduler.end = 0;
  if (worker < lpt.cut_workers) {  // one split, and nothing else
    int work_tile = 0, begin = 0, length, count;
#pragma unroll 1
    for (;; ++work_tile, begin += count) {
      const int tiles = SortedRequests::tiles(sorted.longest_first[work_tile]);
      length = lpt.cut_length(tiles);
      count = divide_up(tiles, length);
      if (worker < begin + count) break;
    }
    whole_work_tile(p, requests, scheduler, SortedRequests::request(sorted.longest_first[work_tile]), split);
    take_split(split, length, worker - begin);
    return true;
  }
  const int own = worker - lpt.cut_workers;
#pragma unroll
  for (int round = 0; round < kMaxLptTiles; ++round) {
    int first;
    const int place = lpt.place(own, round, first);
    if (place < 0) continue;
    const int key = sorted.longest_first[place], tiles = SortedRequests::tiles(key);
    // Splits may come to less than was counted with.
    if (round == lpt.rounds && (own - first) * LptSchedule::split_length(tiles, lpt.splits) >= tiles) continue;
    scheduler.lpt_requests[round / 4] |= static_cast<uint32_t>(SortedRequests::request(key)) << round % 4 * 8;
    scheduler.end = round + 1;
    scheduler.begin = scheduler.first_worker + lpt.cut_workers + first;
  }
  return next_split(p, requests, scheduler, split);
}

// The first split of a thread block's worker; false where it has none. Called by a whole warp.
template <int kRows, int kTile>
__device__ __forceinline__ bool first_split(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                            const SortedRequests& sorted, int block, Scheduler& scheduler,
                                            Split& split) {
  LptSchedule lpt;
  scheduler.plan = make_plan(p, requests, sorted, lpt);
  const int worker = divide_small(block / scheduler.plan.cluster, scheduler.plan.rows, scheduler.row);  // of the row
  if (worker >= scheduler.plan.workers) return false;
  scheduler.first_worker = scheduler.row * scheduler.plan.workers;
  scheduler.worker = scheduler.first_worker + worker;
  if (scheduler.plan.lpt) return first_lpt_split(p, requests, sorted, lpt, worker, scheduler, split);
  scheduler.position = scheduler.plan.uniform ? worker : worker * scheduler.plan.share;
  scheduler.end =
      scheduler.plan.uniform ? worker + 1 : min(scheduler.position + scheduler.plan.share, scheduler.plan.total);
  if (scheduler.position >= scheduler.end) return false;
  split.request = find_request(p, requests, scheduler.plan, scheduler.position, scheduler.begin, scheduler.length);
  if (split.request < 0) return false;
  split.work = requests.get(split.request);
  return next_split(p, requests, scheduler, split);
}

// Finds where a thread block begins, without a plan. A function of its own: what is seldom called must not lie between
// instructions that every launch fetches. Called by the whole thread block.
template <int kRows, int kTile>
__device__ __noinline__ void find_work(const VerifyParams& p, int2* table, Control& control,
                                           SortedRequests& sorted) {
  const Requests<kRows, kTile> requests{p, table};
  requests.fill(static_cast<int>(threadIdx.x));
  __syncthreads();
  sort_requests(p, requests, sorted);
  __syncthreads();
  if (threadIdx.x < 32) {
    Scheduler scheduler{};
    Split split{};
    const bool more = first_split(p, requests, sorted, blockIdx.x, scheduler, split);
    if (threadIdx.x == 0) {
      control.splits[0] = split;
      control.scheduler = scheduler;
      control.more = more;
    }
  }
  __syncthreads();
}

// Begins a thread block's schedule: read from the plan, if there is one for such a launch, or found by the first warp.
// Called by the whole thread block.
template <int kRows, int kTile>
__device__ __forceinline__ void begin_schedule(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                               Control& control, SortedRequests& sorted) {
  if (p.plan != nullptr) {
    const int word = threadIdx.x;
    if (word < kPlanWords)
      reinterpret_cast<int*>(&control)[word < kSplitWords ? word : word + kSplitWords] =
          __ldg(reinterpret_cast<const int*>(p.plan + blockIdx.x) + word);
    __syncthreads();
    if (control.key == p.plan_key) return;
  }
  find_work<kRows, kTile>(p, requests.table, control, sorted);
}

// What advance_schedule() needs of a schedule that was read from a plan. It is fetched before the first tiles are, behind
// which it would wait, and kept when they are on their way. A barrier has to follow. Called by the whole thread block.
template <int kRows, int kTile>
struct ScheduleAhead {
  const Requests<kRows, kTile>& requests;
  bool wanted;
  Lengths lengths;

  __device__ __forceinline__ ScheduleAhead(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                           const Control& control)
      : requests(requests), wanted(p.plan != nullptr && control.scheduler.position < control.scheduler.end) {
    if (wanted && own() < requests.tabled()) lengths = Lengths(p, own());
  }

  __device__ __forceinline__ void keep() const {
    if (!wanted) return;
    if (own() < requests.tabled()) requests.keep(own(), lengths);
    requests.fill(own() + static_cast<int>(blockDim.x));
  }

 private:
  static __device__ __forceinline__ int own() { return static_cast<int>(threadIdx.x); }
};

// Writes the plan: each warp a thread block's entry. Entries beyond the launch's thread blocks become nobody's: a larger
// launch, whose plan stood here, must not take what is left of it. The grid covers all entries, four a thread block.
template <int kRows, int kTile>
__global__ void __launch_bounds__(128) plan_kernel(const __grid_constant__ VerifyParams p, PlanEntry* plan) {
  __shared__ int2 table[kTabledRequests];
  __shared__ SortedRequests sorted;
  const Requests<kRows, kTile> requests{p, table};
  requests.fill(static_cast<int>(threadIdx.x));
  __syncthreads();
  sort_requests(p, requests, sorted);
  __syncthreads();
  const int block = blockIdx.x * 4 + threadIdx.x / 32;
  if (block >= p.clusters * p.cluster) {
    if (threadIdx.x % 32 == 0) plan[block].key = 0;
    return;
  }
  PlanEntry entry{};
  entry.more = first_split(p, requests, sorted, block, entry.scheduler, entry.split);
  entry.key = p.plan_key;
  if (threadIdx.x % 32 == 0) plan[block] = entry;
}

template <int kRows, int kTile>
__device__ __forceinline__ void take_next_inline(const VerifyParams& p, int2* table, const Split& split, Split& next,
                                                 Control& control) {
  next.request = split.request;
  next.work = split.work;
  const bool more = next_split(p, Requests<kRows, kTile>{p, table}, control.scheduler, next);
  if (more && split.worker_count > 1) control.shared = split;
  control.more = more;
}

// A function of its own, as find_work() is.
template <int kRows, int kTile>
__device__ __noinline__ void take_next(const VerifyParams& p, int2* table, const Split& split, Split& next,
                                       Control& control) {
  take_next_inline<kRows, kTile>(p, table, split, next, control);
}

// The split after `split`. Called by the first thread. `kMany`: in a launch of many work tiles, inline.
template <bool kMany, int kRows, int kTile>
__device__ __forceinline__ void advance_schedule(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                                 const Split& split, Split& next, Control& control) {
  if (control.scheduler.position < control.scheduler.end) {
    if constexpr (kMany) {
      take_next_inline<kRows, kTile>(p, requests.table, split, next, control);
    } else {
      take_next<kRows, kTile>(p, requests.table, split, next, control);
    }
  } else {
    control.more = false;
  }
}

}  // namespace nwor
