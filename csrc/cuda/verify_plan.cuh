// Which part of the batch's attention each worker computes: found on the device from the lengths, so a captured
// graph balances whatever batch it is replayed with. A worker is a cluster of thread blocks, or one thread block.
//
// A unit is one request's window for one KV head (and one chunk of query rows, where a window has more rows
// than a thread block keeps). A unit's work is a row of tiles: the context's, then the window's, which begins in the
// context's last tile where that has room for all of it (window_begin()). Where there are no more units than thread
// blocks, units stay whole, or each is cut into pieces of one length (the last may be shorter), at most one piece per
// worker: what takes the longest one least time, joining included. Otherwise whole units are dealt out, long ones
// together with short ones, where that leaves no worker much more than its share; or the units' tiles in a row are cut
// into equal shares, and a unit may straddle workers. Each KV head has a row and workers of its own where that leaves
// few idle: the heads of a cache block, which lie side by side, are then read at about the same time.
#pragma once

#include "verify_params.h"

namespace nwor {

constexpr int kMaxContext = (1 << 24) - 1;
constexpr int kTabledRequests = 128;  // requests whose lengths a thread block keeps in shared memory

constexpr int kMostDealt = 8;         // units of a worker, where whole ones are dealt out

struct RequestWork {
  int start;    // first row of the window in query, key, value
  int window;   // tokens in the window
  int context;  // tokens in the cache
  int tiles;    // of the context from first_tile() on, and of the window where it has some of its own
};

// n / by and the remainder, for quotients below 2^20.
__device__ __forceinline__ int divide_small(int n, int by, int& remainder) {
  if (n < by || by == 1) {  // the common cases, and much faster
    remainder = by == 1 ? 0 : n;
    return by == 1 ? n : 0;
  }
  int quotient = static_cast<int>(__fdividef(static_cast<float>(n), static_cast<float>(by)));
  remainder = n - quotient * by;
  if (remainder < 0) {
    --quotient;
    remainder += by;
  } else if (remainder >= by) {
    ++quotient;
    remainder -= by;
  }
  return quotient;
}

__device__ __forceinline__ int divide_up(int n, int by) {
  int remainder;
  const int quotient = divide_small(n, by, remainder);
  return quotient + (remainder > 0 ? 1 : 0);
}

__device__ __forceinline__ int divide_down(int n, int by) {
  int remainder;
  return divide_small(n, by, remainder);
}

// Context tiles before this one lie outside the sliding window.
template <int kTile>
__device__ __forceinline__ int first_tile(const VerifyParams& p, int context) {
  return p.sliding_window > 0 ? max(context - p.sliding_window + 1, 0) / kTile : 0;
}

// Where the window begins in a unit's tiles, counted in tokens from its first tile on: at the next kTileTokens tokens behind
// the context, if the window then lies in one tile, so that it costs no step of its own; else with a tile. So each
// kTileTokens tokens of a tile are of the context or of the window.
template <int kTile>
__device__ __forceinline__ int window_begin(const VerifyParams& p, const RequestWork& work) {
  const int context = work.context - first_tile<kTile>(p, work.context) * kTile;
  const int begin = (context + kTileTokens - 1) / kTileTokens * kTileTokens;
  return begin % kTile + work.window <= kTile ? begin : (context + kTile - 1) / kTile * kTile;
}

template <int kTile>
__device__ __forceinline__ int count_tiles(const VerifyParams& p, const RequestWork& work) {
  return work.window == 0 ? 0 : (window_begin<kTile>(p, work) + work.window + kTile - 1) / kTile;
}

// What the lengths of a request are computed from, as it lies in memory.
struct Lengths {
  int start = 0, end = 0, length = 0;

  Lengths() = default;
  __device__ __forceinline__ Lengths(const VerifyParams& p, int request)
      : start(__ldg(p.query_start_loc + request)),
        end(__ldg(p.query_start_loc + request + 1)),
        length(__ldg(p.seq_lens + request)) {}

  __device__ __forceinline__ RequestWork work() const {  // but for the tiles
    RequestWork work{};
    work.start = start;
    work.window = min(max(end - start, 0), kMaxWindow);
    if (work.window > 0) work.context = min(max(length - work.window, 0), kMaxContext);
    return work;
  }
};

template <int kTile>
__device__ __noinline__ RequestWork read_far_request(const VerifyParams& p, int request) {
  RequestWork work = Lengths(p, request).work();
  work.tiles = count_tiles<kTile>(p, work);
  return work;
}

// The requests' lengths, the first of them in shared memory.
template <int kRows, int kTile>
struct Requests {
  const VerifyParams& p;
  int2* table;  // start; context and, in the top byte, window

  __device__ __forceinline__ int tabled() const { return min(p.batch, kTabledRequests); }

  __device__ __forceinline__ void keep(int request, const Lengths& lengths) const {
    const RequestWork work = lengths.work();
    table[request] = make_int2(work.start, work.context | work.window << 24);
  }

  // Called by the whole thread block; a barrier has to follow.
  __device__ __forceinline__ void fill(int first) const {
#pragma unroll 1
    for (int request = first; request < tabled(); request += blockDim.x) keep(request, Lengths(p, request));
  }

  __device__ __forceinline__ RequestWork get(int request) const {
    if (request >= p.batch) return RequestWork{};
    if (request >= kTabledRequests) return read_far_request<kTile>(p, request);
    const int2 entry = table[request];
    RequestWork work{entry.x, entry.y >> 24, entry.y & 0xffffff};
    work.tiles = count_tiles<kTile>(p, work);
    return work;
  }

  __device__ __forceinline__ int chunks(const RequestWork& work) const {
    return (work.window * static_cast<int>(p.group.value) + kRows - 1) / kRows;
  }

  __device__ __forceinline__ int units(const RequestWork& work) const { return chunks(work) * p.num_kv_heads; }

  // Those that lie in one of so many rows.
  __device__ __forceinline__ int units_of_row(const RequestWork& work, int rows) const {
    return rows > 1 ? chunks(work) : units(work);
  }
};

// The lengths of a batch that a thread block keeps, as dealing them out wants them: tiles and, below, kTabledRequests - 1
// less the request. Nothing else lies there while a plan is made.
struct Ranking {
  int keys[kTabledRequests];    // by request
  int sorted[kTabledRequests];  // the longest first
  static __device__ __forceinline__ int tiles(int key) { return key / kTabledRequests; }
  static __device__ __forceinline__ int request(int key) { return kTabledRequests - 1 - key % kTabledRequests; }
};

struct Plan {
  int share;    // tiles per worker, or per piece; of a dealt row: pieces of the units in the last turn
  bool pieces;  // units are cut into pieces, or are whole
  bool dealt;   // units of one KV head are dealt out to the row's workers, as Deal says
  int total;    // tiles of a row; of a dealt row: turns before the last
  int rows;     // of units: one for each KV head, or one for all
  int workers;  // of a row
  int cluster;  // thread blocks of a worker: one, or those of a cluster
};

// Pieces may be a sixth longer than an even share; beyond that, straddling is cheaper.
__device__ __forceinline__ int longest_piece(int even) { return even + even / 6 + 1; }
__device__ __forceinline__ int next_share(int share) { return share + max(share / 24, 1); }

// The shortest pieces of one length, from an even share on, that are no more than workers; 0 where even the longest are.
template <int kRows, int kTile>
__device__ __forceinline__ int piece_length(const VerifyParams& p, const Requests<kRows, kTile>& requests, int even,
                                            int workers) {
  const int limit = longest_piece(even);
#pragma unroll 1
  for (int share = even; share <= limit; share = next_share(share)) {
    int pieces = 0;
#pragma unroll 1
    for (int base = 0; base < p.batch; base += 32) {
      const RequestWork work = requests.get(base + static_cast<int>(threadIdx.x % 32));
      pieces += requests.units(work) * divide_up(work.tiles, share);
    }
    if (__reduce_add_sync(0xffffffffu, pieces) <= workers) return share;
  }
  return 0;
}

// Where units outnumber the thread blocks of a launch; known before the lengths are.
__device__ __forceinline__ bool may_deal(const VerifyParams& p) {
  return p.batch <= kTabledRequests && p.batch * p.num_kv_heads > p.clusters * p.cluster;
}

// Sorts the requests. Called by the whole thread block when their lengths are there; a barrier has to follow.
template <int kRows, int kTile>
__device__ __forceinline__ void rank_requests(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                              Ranking& ranking) {
  if (!may_deal(p)) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < kTabledRequests; i += blockDim.x)
    ranking.keys[i] = i < p.batch ? requests.get(i).tiles * kTabledRequests + kTabledRequests - 1 - i : -1;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < p.batch; i += blockDim.x) {
    const int own = ranking.keys[i];
    int rank = 0;
#pragma unroll 8
    for (int other = 0; other < p.batch; ++other) rank += ranking.keys[other] > own;
    ranking.sorted[rank] = own;
  }
}

// Units of one KV head dealt out to a row's workers, long ones together with short ones. Units longer than `limit` tiles are
// cut into pieces for the first workers, one each. The others get as many whole units each, in turns, and what is left
// either whole as well, which leaves some without, or cut into as many pieces as there are workers for.
struct Deal {
  int units, limit;
  int cut_units, cut_workers;
  int others, turns;  // workers of whole units, and how many each of them gets
  int left, pieces;   // units after that, and the pieces of each

  static __device__ __forceinline__ int piece_length(int tiles, int pieces) { return divide_up(tiles, pieces); }
  __device__ __forceinline__ int cut_length(int tiles) const { return piece_length(tiles, divide_up(tiles, limit)); }

  // Which of the units, the longest first, is the `turn`-th of one of the others: there and back, so that sums differ little;
  // -1: none. `first`: of the workers that share it.
  __device__ __forceinline__ int rank(int worker, int turn, int& first) const {
    const int place = turn % 2 == 0 ? worker : others - 1 - worker;
    first = worker;
    if (turn < turns) return cut_units + turn * others + place;
    const int own = divide_down(place, pieces);
    if (turn > turns || own >= left) return -1;
    first = turn % 2 == 0 ? own * pieces : others - (own + 1) * pieces;
    return cut_units + turns * others + own;
  }

  // Tiles of one of the others.
  __device__ __forceinline__ int tiles_of(const Ranking& ranking, int worker) const {
    int sum = 0, first;
#pragma unroll 1
    for (int turn = 0; turn <= turns; ++turn) {
      const int own = rank(worker, turn, first);
      if (own < 0) break;
      const int tiles = Ranking::tiles(ranking.sorted[own]);
      sum += turn < turns ? tiles : piece_length(tiles, pieces);
    }
    return sum;
  }

  __device__ __forceinline__ bool fits(const Ranking& ranking) const {
    int heaviest = 0;
#pragma unroll 1
    for (int worker = static_cast<int>(threadIdx.x % 32); worker < others; worker += 32)
      heaviest = max(heaviest, tiles_of(ranking, worker));
    return __reduce_max_sync(0xffffffffu, heaviest) <= limit;
  }

  // Whether no worker of the row gets more than kMostDealt units or `limit` tiles. Called by whole warps.
  __device__ __forceinline__ bool is_even(const Ranking& ranking, int workers) {
    cut_units = cut_workers = turns = left = 0;
    pieces = 1;
#pragma unroll 1
    for (; cut_units < units; ++cut_units) {
      const int tiles = Ranking::tiles(ranking.sorted[cut_units]);
      if (tiles <= limit) break;
      cut_workers += divide_up(tiles, cut_length(tiles));
    }
    others = workers - cut_workers;
    if (units - cut_units > (kMostDealt - 1) * max(others, 0)) return false;
    if (others == 0) return true;
    turns = divide_small(units - cut_units, others, left);
    if (fits(ranking)) return true;
    if (left == 0 || turns == 0) return false;
    pieces = divide_down(others, left);
    return pieces > 1 && fits(ranking);
  }
};

// Called by whole warps; every warp finds the same plan.
template <int kRows, int kTile>
__device__ __forceinline__ Plan make_plan(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                          const Ranking& ranking, Deal& deal) {
  const int lane = threadIdx.x % 32;
  int head_total = 0, head_units = 0, longest = 0, shortest = 1 << 30;  // the first two of one KV head
  int windows = 0;
#pragma unroll 1
  for (int base = 0; base < p.batch; base += 32) {
    const RequestWork work = requests.get(base + lane);
    const int own = requests.chunks(work);
    head_units += own;
    head_total += own * work.tiles;
    longest = max(longest, work.tiles);
    windows += own > 0;
    if (own > 0) shortest = min(shortest, work.tiles);
  }
  head_units = __reduce_add_sync(0xffffffffu, head_units);
  head_total = __reduce_add_sync(0xffffffffu, head_total);
  longest = __reduce_max_sync(0xffffffffu, longest);
  shortest = __reduce_min_sync(0xffffffffu, shortest);
  int units = head_units * p.num_kv_heads;
  const int total = head_total * p.num_kv_heads, blocks = p.clusters * p.cluster;
  const int even = max(divide(total + blocks - 1, p.by_blocks), 1);
  if (units <= blocks) {
    // Whole units, or pieces for thread blocks, or a cluster for each unit or piece: what takes the longest unit least time,
    // in half tiles.
    Plan plan{longest, true, false, total, 1, blocks, 1};
    int least = 2 * longest;
    const auto consider = [&](int cost, int share, bool pieces, int cluster) {
      if (cost >= least) return;
      least = cost;
      plan = Plan{share, pieces, false, total, 1, cluster > 1 ? p.clusters : blocks, cluster};
    };
    const auto join = [&](int share) { return p.worker_join + divide_up(longest, share) * p.part_join / 16; };
    const int piece = piece_length(p, requests, even, blocks);
    if (piece > 0) consider(2 * piece + join(piece), piece, true, 1);
    if (piece == 0) consider(2 * even + 2 * join(even), even, false, 1);
    if (p.cluster > 1 && units <= p.clusters) {
      consider(2 * divide_up(longest, p.cluster) + p.cluster_join, longest, true, p.cluster);
      const int share = piece_length(p, requests, even * p.cluster, p.clusters);
      if (share > 0) consider(2 * divide_up(share, p.cluster) + p.cluster_join + join(share), share, true, p.cluster);
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
    units = head_units;
  }
  const int whole = divide_up(units, plan.workers) * longest;
  // As measured: what joining parts costs, or what little it costs to leave some thread blocks without work where memory is
  // the limit.
  const int slack = max(kTile == kTileTokens ? 0 : min(plan.share / 16, 16), p.worker_join / 2);
  if (longest == shortest && whole <= plan.share + slack) {
    plan.share = whole;
    return plan;
  }
  windows = __reduce_add_sync(0xffffffffu, windows);
  deal.units = units;
  deal.limit = plan.share + slack;
  plan.dealt = may_deal(p) && plan.rows == p.num_kv_heads && units == windows && deal.is_even(ranking, plan.workers);
  if (plan.dealt) {
    plan.share = deal.pieces;
    plan.total = deal.turns;
  }
  return plan;
}

// The request that holds `position`, counted in pieces or in tiles; where its own begin, and how many a unit has.
template <int kRows, int kTile>
__device__ __forceinline__ int find_request(const VerifyParams& p, const Requests<kRows, kTile>& requests, const Plan& plan,
                                            int position, int& begin, int& unit_length) {
  const int lane = threadIdx.x % 32;
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < p.batch; base += 32) {
    const RequestWork work = requests.get(base + lane);
    const int own = plan.pieces ? divide_up(work.tiles, plan.share) : work.tiles;
    const int length = requests.units_of_row(work, plan.rows) * own;
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
      unit_length = __shfl_sync(0xffffffffu, own, hit);
      return base + hit;
    }
    before += __shfl_sync(0xffffffffu, inclusive, 31);
  }
  return -1;
}

}  // namespace nwor
