// Which part of the batch's attention each worker computes: found on the device from the lengths, so a captured
// graph balances whatever batch it is replayed with.
//
// A work tile's keys are a row of tiles: the context's, then the window's, which begins in the context's last tile where
// that has room for all of it (window_begin()). Where there are no more work tiles than thread blocks, work tiles stay
// whole, or each is cut into splits of one length (the last may be shorter), at most one split per worker: what takes the
// longest one least time, the combine included. Otherwise whole work tiles are scheduled, the longest first, where that
// leaves no worker much more than its share; or the work tiles' tiles in a row are cut into equal shares, and a work tile
// may straddle workers. Each KV head has a row and workers of its own where that leaves few idle: the heads of a cache
// block, which lie side by side, are then read at about the same time.
#pragma once

#include "verify/lengths.cuh"

namespace nwor {

// The lengths of a batch that a thread block keeps, as an LPT schedule wants them: tiles and, below, kTabledRequests - 1
// less the request. Nothing else lies there while a plan is made.
struct SortedRequests {
  int count;                           // of the requests, without the empty ones at the end
  int keys[kTabledRequests];           // by request
  int longest_first[kTabledRequests];  // keys
  static __device__ __forceinline__ int tiles(int key) { return key / kTabledRequests; }
  static __device__ __forceinline__ int request(int key) { return kTabledRequests - 1 - key % kTabledRequests; }
};

// Splits may be a sixth longer than an even share; beyond that, straddling is cheaper.
__device__ __forceinline__ int longest_split(int even) { return even + even / 6 + 1; }
__device__ __forceinline__ int next_share(int share) { return share + max(share / 24, 1); }

// The shortest length, from an even share on, of which splits are no more than workers; 0 where even the longest are.
template <int kRows, int kTile>
__device__ __forceinline__ int split_length(int count, const Requests<kRows, kTile>& requests, int even, int workers) {
  const int limit = longest_split(even);
#pragma unroll 1
  for (int share = even; share <= limit; share = next_share(share)) {
    int splits = 0;
#pragma unroll 1
    for (int base = 0; base < count; base += 32) {
      const RequestWork work = requests.get(base + static_cast<int>(threadIdx.x % 32));
      splits += requests.work_tiles(work) * divide_up(work.tiles, share);
    }
    if (__reduce_add_sync(0xffffffffu, splits) <= workers) return share;
  }
  return 0;
}

// Where work tiles may outnumber the thread blocks of a launch, of so many requests.
__device__ __forceinline__ bool may_use_lpt(const VerifyParams& p, int requests) {
  return requests <= kTabledRequests && requests * p.num_kv_heads > p.clusters * p.cluster;
}

// Sorts the requests. Called by the whole thread block when their lengths are there; a barrier has to follow.
template <int kRows, int kTile>
__device__ __forceinline__ void sort_requests(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                              SortedRequests& sorted) {
  const int count = count_requests(p);
  if (threadIdx.x == 0) sorted.count = count;
  if (!may_use_lpt(p, count)) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < kTabledRequests; i += blockDim.x)
    sorted.keys[i] = i < count ? requests.get(i).tiles * kTabledRequests + kTabledRequests - 1 - i : -1;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int own = sorted.keys[i];
    int place = 0;
#pragma unroll 8
    for (int other = 0; other < count; ++other) place += sorted.keys[other] > own;
    sorted.longest_first[place] = own;
  }
}

// Work tiles of one KV head, the longest first, for the workers of a row: long ones together with short ones. Work tiles
// longer than `limit` tiles are cut into splits for the first workers, one each. The others get as many whole work tiles
// each, in rounds, and what is left either whole as well, which leaves some without, or cut into as many splits as there
// are workers for.
struct LptSchedule {
  int work_tiles, limit;
  int cut_work_tiles, cut_workers;
  int others, rounds;  // workers of whole work tiles, and how many each of them gets
  int left, splits;    // work tiles after that, and the splits of each

  static __device__ __forceinline__ int split_length(int tiles, int splits) { return divide_up(tiles, splits); }
  __device__ __forceinline__ int cut_length(int tiles) const { return split_length(tiles, divide_up(tiles, limit)); }

  // Which of the work tiles, the longest first, is the `round`-th of one of the others: there and back, so that sums
  // differ little; -1: none. `first`: of the workers that share it.
  __device__ __forceinline__ int place(int worker, int round, int& first) const {
    const int column = round % 2 == 0 ? worker : others - 1 - worker;
    first = worker;
    if (round < rounds) return cut_work_tiles + round * others + column;
    const int own = divide_down(column, splits);
    if (round > rounds || own >= left) return -1;
    first = round % 2 == 0 ? own * splits : others - (own + 1) * splits;
    return cut_work_tiles + rounds * others + own;
  }

  // Tiles of one of the others.
  __device__ __forceinline__ int tiles_of(const SortedRequests& sorted, int worker) const {
    int sum = 0, first;
#pragma unroll 1
    for (int round = 0; round <= rounds; ++round) {
      const int own = place(worker, round, first);
      if (own < 0) break;
      const int tiles = SortedRequests::tiles(sorted.longest_first[own]);
      sum += round < rounds ? tiles : split_length(tiles, splits);
    }
    return sum;
  }

  __device__ __forceinline__ bool fits(const SortedRequests& sorted) const {
    int heaviest = 0;
#pragma unroll 1
    for (int worker = static_cast<int>(threadIdx.x % 32); worker < others; worker += 32)
      heaviest = max(heaviest, tiles_of(sorted, worker));
    return __reduce_max_sync(0xffffffffu, heaviest) <= limit;
  }

  // Whether no worker of the row gets more than kMaxLptTiles work tiles or `limit` tiles. Called by whole warps.
  __device__ __forceinline__ bool is_even(const SortedRequests& sorted, int workers) {
    cut_work_tiles = cut_workers = rounds = left = 0;
    splits = 1;
#pragma unroll 1
    for (; cut_work_tiles < work_tiles; ++cut_work_tiles) {
      const int tiles = SortedRequests::tiles(sorted.longest_first[cut_work_tiles]);
      if (tiles <= limit) break;
      cut_workers += divide_up(tiles, cut_length(tiles));
    }
    others = workers - cut_workers;
    if (work_tiles - cut_work_tiles > (kMaxLptTiles - 1) * max(others, 0)) return false;
    if (others == 0) return true;
    rounds = divide_small(work_tiles - cut_work_tiles, others, left);
    if (fits(sorted)) return true;
    if (left == 0 || rounds == 0) return false;
    splits = divide_down(others, left);
    return splits > 1 && fits(sorted);
  }
};

// Called by whole warps; every warp finds the same plan.
template <int kRows, int kTile>
__device__ __forceinline__ Plan make_plan(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                          const SortedRequests& sorted, LptSchedule& lpt) {
  const int lane = threadIdx.x % 32;
  int head_total = 0, head_work_tiles = 0, longest = 0, shortest = 1 << 30;  // the first two of one KV head
  int windows = 0;
#pragma unroll 1
  for (int base = 0; base < sorted.count; base += 32) {
    const RequestWork work = requests.get(base + lane);
    const int own = requests.chunks(work);
    head_work_tiles += own;
    head_total += own * work.tiles;
    longest = max(longest, work.tiles);
    windows += own > 0;
    if (own > 0) shortest = min(shortest, work.tiles);
  }
  head_work_tiles = __reduce_add_sync(0xffffffffu, head_work_tiles);
  head_total = __reduce_add_sync(0xffffffffu, head_total);
  longest = __reduce_max_sync(0xffffffffu, longest);
  shortest = __reduce_min_sync(0xffffffffu, shortest);
  int work_tiles = head_work_tiles * p.num_kv_heads;
  const int total = head_total * p.num_kv_heads, blocks = p.clusters * p.cluster;
  const int even = max(divide(total + blocks - 1, p.by_blocks), 1);
  if (work_tiles <= blocks) {
    // Whole work tiles, or splits for thread blocks, or a cluster for each work tile or split: what takes the longest
    // work tile least time, in half tiles.
    Plan plan{longest, true, false, total, 1, blocks, 1};
    int least = 2 * longest;
    const auto consider = [&](int cost, int share, bool uniform, int cluster) {
      if (cost >= least) return;
      least = cost;
      plan = Plan{share, uniform, false, total, 1, cluster > 1 ? p.clusters : blocks, cluster};
    };
    const auto combine = [&](int share) { return p.worker_combine + divide_up(longest, share) * p.split_combine / 16; };
    const int split = split_length(sorted.count, requests, even, blocks);
    if (split > 0) consider(2 * split + combine(split), split, true, 1);
    if (split == 0) consider(2 * even + 2 * combine(even), even, false, 1);
    if (p.cluster > 1 && work_tiles <= p.clusters) {
      consider(2 * divide_up(longest, p.cluster) + p.cluster_combine, longest, true, p.cluster);
      const int share = split_length(sorted.count, requests, even * p.cluster, p.clusters);
      if (share > 0)
        consider(2 * divide_up(share, p.cluster) + p.cluster_combine + combine(share), share, true, p.cluster);
    }
    return plan;
  }
  Plan plan{even, false, false, total, 1, blocks, 1};
  int idle;
  const int of_head = divide_small(blocks, p.num_kv_heads, idle);
  if (16 * idle <= blocks) {
    plan.rows = p.num_kv_heads;
    plan.workers = of_head;
    plan.total = head_total;
    plan.share = max((head_total + of_head - 1) / of_head, 1);
    work_tiles = head_work_tiles;
  }
  const int whole = divide_up(work_tiles, plan.workers) * longest;
  // As measured: what combining splits costs, or what little it costs to leave some thread blocks without work where
  // memory is the limit.
  const int slack = max(kTile == kTileTokens ? 0 : min(plan.share / 16, 16), p.worker_combine / 2);
  if (longest == shortest && whole <= plan.share + slack) {
    plan.share = whole;
    return plan;
  }
  windows = __reduce_add_sync(0xffffffffu, windows);
  lpt.work_tiles = work_tiles;
  lpt.limit = plan.share + slack;
  plan.lpt = may_use_lpt(p, sorted.count) && plan.rows == p.num_kv_heads && work_tiles == windows &&
             lpt.is_even(sorted, plan.workers);
  if (plan.lpt) {
    plan.share = lpt.splits;
    plan.total = lpt.rounds;
  }
  return plan;
}

// The request that holds `position`, counted in splits or in tiles; where its own begin, and how many a work tile has.
template <int kRows, int kTile>
__device__ __forceinline__ int find_request(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                            const Plan& plan, int position, int& begin, int& work_tile_length) {
  const int lane = threadIdx.x % 32;
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < p.batch; base += 32) {
    const RequestWork work = requests.get(base + lane);
    const int own = plan.uniform ? divide_up(work.tiles, plan.share) : work.tiles;
    const int length = requests.work_tiles_of_row(work, plan.rows) * own;
    int inclusive = length;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    const unsigned reached = __ballot_sync(0xffffffffu, before + inclusive > position);
    if (reached != 0) {
      const int hit = __ffs(static_cast<int>(reached)) - 1;
      begin = before + __shfl_sync(0xffffffffu, inclusive - length, hit);
      work_tile_length = __shfl_sync(0xffffffffu, own, hit);
      return base + hit;
    }
    before += __shfl_sync(0xffffffffu, inclusive, 31);
  }
  return -1;
}

}  // namespace nwor
