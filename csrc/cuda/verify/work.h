// What a worker works on, and what it keeps of the tile scheduler between two splits. All of it lies in shared memory.
//
// A worker is a thread block, or a cluster of them. A work tile is one request's window for one KV head (and one chunk of
// query rows, where a window has more rows than a thread block keeps).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nwor {

constexpr int kMaxContext = (1 << 24) - 1;
constexpr int kTabledRequests = 128;  // requests whose lengths a thread block keeps in shared memory
constexpr int kMaxLptTiles = 8;       // work tiles of a worker, where whole ones are scheduled, the longest first

struct RequestWork {
  int start;    // first row of the window in query, key, value
  int window;   // tokens in the window
  int context;  // tokens in the cache
  int tiles;    // of the context from first_tile() on, and of the window where it has some of its own
};

// Tiles of one work tile, some or all: what a worker works on at a time. Its fields are wanted seldom, and registers are
// not to spare.
struct Split {
  RequestWork work;
  int request;
  int head;                // KV head
  int first_row;           // of the window's packed rows (packed_row.cuh)
  int row_count;           // packed rows of the window from first_row on
  int tile, end;           // first tile of the work tile, one past the last
  int window_begin;        // where the window begins, in tokens from the work tile's first tile on
  int first_context_tile;  // of the request, where the work tile's begin
  int first_worker;        // of the workers that share the work tile
  int worker_count;
};

struct Plan {
  int share;     // tiles of a worker, or of a split; of an LPT schedule: splits of each work tile of the last round
  bool uniform;  // work tiles are whole, or cut into splits of one length
  bool lpt;      // work tiles of one KV head go to the row's workers, the longest first, as LptSchedule says
  int total;     // tiles of a row; of an LPT schedule: rounds before the last
  int rows;      // of work tiles: one for each KV head, or one for all
  int workers;   // of a row
  int cluster;   // thread blocks of a worker: one, or those of a cluster
};

// How far a worker has come in its part of the plan.
struct Scheduler {
  Plan plan;
  int row, first_worker;      // of the plan's rows; its workers begin there
  int worker, position, end;  // of the row's splits or tiles, or of the worker's rounds
  int begin, length;          // of the request's first work tile, of each of them; LPT: the last one's first worker
  uint32_t lpt_requests[kMaxLptTiles / 4];  // a byte each

  __device__ __forceinline__ int lpt_request(int round) const { return lpt_requests[round / 4] >> round % 4 * 8 & 0xff; }
};
static_assert(kTabledRequests <= 256);

// In shared memory, kept by the first warp.
struct Control {
  Split splits[2];  // in turns
  Scheduler scheduler;
  int more;      // the split after the current one exists
  uint32_t key;  // of the plan that this was read from
  Split shared;  // an earlier split whose work tile has splits of other workers; worker_count is 0 where there is none
};
constexpr int kControlBytes = (sizeof(Control) + 15) / 16 * 16;

// What a worker finds first, where a kernel of its own planned for all layers of a step.
struct PlanEntry {
  Split split;
  Scheduler scheduler;
  int more;
  uint32_t key;
};
constexpr int kPlanWords = sizeof(PlanEntry) / 4, kSplitWords = sizeof(Split) / 4;
static_assert(kPlanWords <= 32 && sizeof(Control) == sizeof(PlanEntry) + 2 * sizeof(Split));

}  // namespace nwor
