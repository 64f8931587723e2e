// A worker's way through its part of the plan.
#pragma once

#include "verify_plan.cuh"

namespace nwor {

// The part of the batch that a worker works on at a time: tiles of one unit. Lies in shared memory: its fields are
// wanted seldom, and registers are not to spare.
struct Segment {
  RequestWork work;
  int request;
  int head;                // KV head
  int first_row;           // of the window's packed rows (token-major, then query head of the group)
  int row_count;           // packed rows of the window from first_row on
  int tile, end;           // first tile of the unit, one past the last
  int window_begin;        // where the window begins, in tokens from the unit's first tile on
  int first_context_tile;  // of the request, where the unit's begin
  int first_worker;        // of the workers that share the unit
  int worker_count;
};

// Walks a worker's part of the plan, segment by segment.
struct Walk {
  Plan plan;
  int row, first_worker;      // of the plan's rows; its workers begin there
  int worker, position, end;  // of the row's pieces or tiles, or of the worker's dealt units
  int begin, length;          // of the request's first unit, of each of its units; or the last dealt unit's first worker
  uint32_t dealt[kMostDealt / 4];  // requests, a byte each

  __device__ __forceinline__ int dealt_request(int turn) const { return dealt[turn / 4] >> turn % 4 * 8 & 0xff; }
};
static_assert(kTabledRequests <= 256);

// In shared memory, kept by the first warp.
struct Control {
  Segment segments[2];  // in turns
  Walk walk;
  int more;             // the segment after the current one exists
  uint32_t key;         // of the plan that this was read from
  Segment shared;       // an earlier segment whose unit other workers have parts of; worker_count is 0 where there is none
};
constexpr int kControlBytes = (sizeof(Control) + 15) / 16 * 16;

// What a worker finds first, where a kernel of its own planned for all layers of a step.
struct PlanEntry {
  Segment segment;
  Walk walk;
  int more;
  uint32_t key;
};
constexpr int kPlanWords = sizeof(PlanEntry) / 4, kSegmentWords = sizeof(Segment) / 4;
static_assert(kPlanWords <= 32 && sizeof(Control) == sizeof(PlanEntry) + 2 * sizeof(Segment));

// A unit of the walk's KV head.
template <int kRows, int kTile>
__device__ __forceinline__ void whole_unit(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                           const Walk& walk, int request, Segment& segment) {
  segment.request = request;
  segment.work = requests.get(request);
  segment.head = walk.row;
  segment.first_row = 0;
  segment.row_count = segment.work.window * static_cast<int>(p.group.value);
  segment.window_begin = window_begin<kTile>(p, segment.work);
  segment.first_context_tile = first_tile<kTile>(p, segment.work.context);
  segment.first_worker = walk.worker;
  segment.worker_count = 1;
  segment.tile = 0;
  segment.end = segment.work.tiles;
}

// Makes a whole unit's segment one of its pieces, which as many workers have, the walk's among them.
__device__ __forceinline__ void take_piece(Segment& segment, int length, int piece) {
  segment.first_worker -= piece;
  segment.worker_count = divide_up(segment.work.tiles, length);
  segment.tile = piece * length;
  segment.end = min(segment.tile + length, segment.work.tiles);
}

// Finds the next segment; `segment` holds the request and its work of the one before. False where nothing is left.
template <int kRows, int kTile>
__device__ __forceinline__ bool next_segment(const VerifyParams& p, const Requests<kRows, kTile>& requests, Walk& walk,
                                             Segment& segment) {
  if (walk.plan.dealt) {
    if (walk.position >= walk.end) return false;
    whole_unit(p, requests, walk, walk.dealt_request(walk.position), segment);
    if (walk.position++ == walk.plan.total && walk.plan.share > 1)
      take_piece(segment, Deal::piece_length(segment.work.tiles, walk.plan.share), walk.worker - walk.begin);
    return true;
  }
#pragma unroll 1
  while (walk.position < walk.end) {
    const int tiles = segment.work.tiles;
    const int chunks = requests.chunks(segment.work);
    const int units = requests.units_of_row(segment.work, walk.plan.rows);
    int inside;
    const int unit = divide_small(walk.position - walk.begin, walk.length, inside);
    if (unit >= units) {  // on to the next request that has a window
      walk.begin += units * walk.length;
      do {
        if (++segment.request >= p.batch) return false;
        segment.work = requests.get(segment.request);
      } while (segment.work.tiles == 0);
      walk.length = segment.work.tiles;  // a worker of pieces has only one
      continue;
    }
    int chunk;
    segment.head = walk.row + divide_small(unit, chunks, chunk);
    segment.first_row = chunk * kRows;
    segment.row_count = segment.work.window * static_cast<int>(p.group.value) - segment.first_row;
    segment.window_begin = window_begin<kTile>(p, segment.work);
    segment.first_context_tile = first_tile<kTile>(p, segment.work.context);
    segment.first_worker = walk.worker;
    segment.worker_count = 1;
    if (walk.plan.pieces) {
      segment.tile = inside * walk.plan.share;
      segment.end = min(segment.tile + walk.plan.share, tiles);
      segment.first_worker = walk.worker - inside;
      segment.worker_count = walk.length;
      ++walk.position;
    } else {
      segment.tile = inside;
      segment.end = min(tiles, inside + walk.end - walk.position);
      if (segment.end - segment.tile < tiles) {
        const int unit_begin = walk.position - inside;
        int unused;
        const int first = divide_small(unit_begin, walk.plan.share, unused);
        segment.first_worker = walk.first_worker + first;
        segment.worker_count = divide_small(unit_begin + tiles - 1, walk.plan.share, unused) - first + 1;
      }
      walk.position += segment.end - segment.tile;
    }
    return true;
  }
  return false;
}

// The same where units are dealt out.
template <int kRows, int kTile>
__device__ __forceinline__ bool first_dealt(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                            const Ranking& ranking, const Deal& deal, int worker, Walk& walk,
                                            Segment& segment) {
  walk.position = walk.end = 0;
  if (worker < deal.cut_workers) {  // a piece, and nothing else
    int unit = 0, begin = 0, length, count;
#pragma unroll 1
    for (;; ++unit, begin += count) {
      const int tiles = Ranking::tiles(ranking.sorted[unit]);
      length = deal.cut_length(tiles);
      count = divide_up(tiles, length);
      if (worker < begin + count) break;
    }
    whole_unit(p, requests, walk, Ranking::request(ranking.sorted[unit]), segment);
    take_piece(segment, length, worker - begin);
    return true;
  }
  const int own = worker - deal.cut_workers;
#pragma unroll
  for (int turn = 0; turn < kMostDealt; ++turn) {
    int first;
    const int rank = deal.rank(own, turn, first);
    if (rank < 0) continue;
    const int key = ranking.sorted[rank], tiles = Ranking::tiles(key);
    // Pieces may come to less than was counted with.
    if (turn == deal.turns && (own - first) * Deal::piece_length(tiles, deal.pieces) >= tiles) continue;
    walk.dealt[turn / 4] |= static_cast<uint32_t>(Ranking::request(key)) << turn % 4 * 8;
    walk.end = turn + 1;
    walk.begin = walk.first_worker + deal.cut_workers + first;
  }
  return next_segment(p, requests, walk, segment);
}

// The first segment of a thread block's worker; false where it has none. Called by a whole warp.
template <int kRows, int kTile>
__device__ __forceinline__ bool first_segment(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                              const Ranking& ranking, int block, Walk& walk, Segment& segment) {
  Deal deal;
  walk.plan = make_plan(p, requests, ranking, deal);
  const int worker = divide_small(block / walk.plan.cluster, walk.plan.rows, walk.row);  // of the row
  if (worker >= walk.plan.workers) return false;
  walk.first_worker = walk.row * walk.plan.workers;
  walk.worker = walk.first_worker + worker;
  if (walk.plan.dealt) return first_dealt(p, requests, ranking, deal, worker, walk, segment);
  walk.position = walk.plan.pieces ? worker : worker * walk.plan.share;
  walk.end = walk.plan.pieces ? worker + 1 : min(walk.position + walk.plan.share, walk.plan.total);
  if (walk.position >= walk.end) return false;
  segment.request = find_request(p, requests, walk.plan, walk.position, walk.begin, walk.length);
  if (segment.request < 0) return false;
  segment.work = requests.get(segment.request);
  return next_segment(p, requests, walk, segment);
}

// Finds where a thread block begins, without a plan. A function of its own: what is seldom called must not lie between
// instructions that every launch fetches. Called by the whole thread block.
template <int kRows, int kTile>
__device__ __noinline__ void find_walk(const VerifyParams& p, int2* table, Control& control, Ranking& ranking) {
  const Requests<kRows, kTile> requests{p, table};
  requests.fill(static_cast<int>(threadIdx.x));
  __syncthreads();
  rank_requests(p, requests, ranking);
  __syncthreads();
  if (threadIdx.x < 32) {
    Walk walk{};
    Segment segment{};
    const bool more = first_segment(p, requests, ranking, blockIdx.x, walk, segment);
    if (threadIdx.x == 0) {
      control.segments[0] = segment;
      control.walk = walk;
      control.more = more;
    }
  }
  __syncthreads();
}

// Begins a thread block's way: read from the plan, if there is one for such a launch, or found by the first warp. Called by
// the whole thread block.
template <int kRows, int kTile>
__device__ __forceinline__ void begin_walk(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                           Control& control, Ranking& ranking) {
  if (p.plan != nullptr) {
    const int word = threadIdx.x;
    if (word < kPlanWords)
      reinterpret_cast<int*>(&control)[word < kSegmentWords ? word : word + kSegmentWords] =
          __ldg(reinterpret_cast<const int*>(p.plan + blockIdx.x) + word);
    __syncthreads();
    if (control.key == p.plan_key) return;
  }
  find_walk<kRows, kTile>(p, requests.table, control, ranking);
}

// What continue_walk() needs of a walk that was read from a plan. It is fetched before the first tiles are, behind which
// it would wait, and kept when they are on their way. A barrier has to follow. Called by the whole thread block.
template <int kRows, int kTile>
struct WalkAhead {
  const Requests<kRows, kTile>& requests;
  bool wanted;
  Lengths lengths;

  __device__ __forceinline__ WalkAhead(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                       const Control& control)
      : requests(requests), wanted(p.plan != nullptr && control.walk.position < control.walk.end) {
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
  __shared__ Ranking ranking;
  const Requests<kRows, kTile> requests{p, table};
  requests.fill(static_cast<int>(threadIdx.x));
  __syncthreads();
  rank_requests(p, requests, ranking);
  __syncthreads();
  const int block = blockIdx.x * 4 + threadIdx.x / 32;
  if (block >= p.clusters * p.cluster) {
    if (threadIdx.x % 32 == 0) plan[block].key = 0;
    return;
  }
  PlanEntry entry{};
  entry.more = first_segment(p, requests, ranking, block, entry.walk, entry.segment);
  entry.key = p.plan_key;
  if (threadIdx.x % 32 == 0) plan[block] = entry;
}

template <int kRows, int kTile>
__device__ __forceinline__ void take_next_inline(const VerifyParams& p, int2* table, const Segment& segment,
                                                 Segment& next, Control& control) {
  next.request = segment.request;
  next.work = segment.work;
  const bool more = next_segment(p, Requests<kRows, kTile>{p, table}, control.walk, next);
  if (more && segment.worker_count > 1) control.shared = segment;
  control.more = more;
}

// A function of its own, as find_walk() is.
template <int kRows, int kTile>
__device__ __noinline__ void take_next(const VerifyParams& p, int2* table, const Segment& segment, Segment& next,
                                       Control& control) {
  take_next_inline<kRows, kTile>(p, table, segment, next, control);
}

// The segment after `segment`. Called by the first thread. `kMany`: in a launch of many units, inline.
template <bool kMany, int kRows, int kTile>
__device__ __forceinline__ void continue_walk(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                              const Segment& segment, Segment& next, Control& control) {
  if (control.walk.position < control.walk.end) {
    if constexpr (kMany) {
      take_next_inline<kRows, kTile>(p, requests.table, segment, next, control);
    } else {
      take_next<kRows, kTile>(p, requests.table, segment, next, control);
    }
  } else {
    control.more = false;
  }
}

}  // namespace nwor
