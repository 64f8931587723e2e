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
  int context_tiles;       // tiles of the unit before this one are context
  int first_context_tile;  // of the request, where the unit's begin
  int first_worker;        // of the workers that share the unit
  int worker_count;
};

// Walks a worker's part of the plan, segment by segment.
struct Walk {
  Plan plan;
  int row, first_worker;      // of the plan's rows; its workers begin there
  int worker, position, end;  // of the row's pieces or tiles
  int begin, length;          // of the request's first unit, of each of its units
};

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

// Finds the next segment; `segment` holds the request and its work of the one before. False where nothing is left.
template <int kRows, int kTile>
__device__ __forceinline__ bool next_segment(const VerifyParams& p, const Requests<kRows, kTile>& requests, Walk& walk,
                                             Segment& segment) {
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
    segment.context_tiles = tiles - window_tiles<kTile>(segment.work.window);
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

// The first segment of a thread block's worker; false where it has none. Called by a whole warp.
template <int kRows, int kTile>
__device__ __forceinline__ bool first_segment(const VerifyParams& p, const Requests<kRows, kTile>& requests, int block,
                                              Walk& walk, Segment& segment) {
  walk.plan = make_plan(p, requests);
  const int worker = divide_small(block / walk.plan.cluster, walk.plan.rows, walk.row);  // of the row
  if (worker >= walk.plan.workers) return false;
  walk.first_worker = walk.row * walk.plan.workers;
  walk.worker = walk.first_worker + worker;
  walk.position = walk.plan.pieces ? worker : worker * walk.plan.share;
  walk.end = walk.plan.pieces ? worker + 1 : min(walk.position + walk.plan.share, walk.plan.total);
  if (walk.position >= walk.end) return false;
  segment.request = find_request(p, requests, walk.plan, walk.position, walk.begin, walk.length);
  if (segment.request < 0) return false;
  segment.work = requests.get(segment.request);
  return next_segment(p, requests, walk, segment);
}

// Begins a thread block's way: read from the plan, if there is one for such a launch, or found by the first warp. Called by
// the whole thread block.
template <int kRows, int kTile>
__device__ __forceinline__ void begin_walk(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                           Control& control) {
  if (p.plan != nullptr) {
    const int word = threadIdx.x;
    if (word < kPlanWords)
      reinterpret_cast<int*>(&control)[word < kSegmentWords ? word : word + kSegmentWords] =
          __ldg(reinterpret_cast<const int*>(p.plan + blockIdx.x) + word);
    __syncthreads();
    if (control.key == p.plan_key) return;
  }
  requests.fill(static_cast<int>(threadIdx.x));
  __syncthreads();
  if (threadIdx.x < 32) {
    Walk walk{};
    Segment segment{};
    const bool more = first_segment(p, requests, blockIdx.x, walk, segment);
    if (threadIdx.x == 0) {
      control.segments[0] = segment;
      control.walk = walk;
      control.more = more;
    }
  }
  __syncthreads();
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

// Writes the plan: each warp a thread block's entry.
template <int kRows, int kTile>
__global__ void __launch_bounds__(128) plan_kernel(const __grid_constant__ VerifyParams p, PlanEntry* plan) {
  __shared__ int2 table[kTabledRequests];
  const Requests<kRows, kTile> requests{p, table};
  requests.fill(static_cast<int>(threadIdx.x));
  __syncthreads();
  const int block = blockIdx.x * 4 + threadIdx.x / 32;
  if (block >= p.clusters * p.cluster) return;
  PlanEntry entry{};
  entry.more = first_segment(p, requests, block, entry.walk, entry.segment);
  entry.key = p.plan_key;
  if (threadIdx.x % 32 == 0) plan[block] = entry;
}

// The segment after `segment`. Called by the first thread.
template <int kRows, int kTile>
__device__ __forceinline__ void continue_walk(const VerifyParams& p, const Requests<kRows, kTile>& requests,
                                              const Segment& segment, Segment& next, Control& control) {
  bool more = control.walk.position < control.walk.end;
  if (more) {
    next.request = segment.request;
    next.work = segment.work;
    more = next_segment(p, requests, control.walk, next);
  }
  if (more && segment.worker_count > 1) control.shared = segment;
  control.more = more;
}

}  // namespace nwor
