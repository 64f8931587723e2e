// The lengths of a batch, and what follows from them: where windows begin, tiles and work tiles of a request.
#pragma once

#include "common/fastdiv.h"
#include "verify/params.h"
#include "verify/work.h"

namespace nwor {

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

// Where the window begins in a work tile, counted in tokens from its first tile on: at the next kTileTokens tokens behind
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

// The requests before the last ones, which are empty: a captured graph has as many as it may be replayed with. Called by
// the whole thread block.
__device__ __forceinline__ int count_requests(const VerifyParams& p) {
  if (p.batch <= kTabledRequests) return p.batch;
  const int end = __ldg(p.query_start_loc + p.batch);
  int count = 0;
#pragma unroll 1
  for (int base = 0; base < p.batch; base += blockDim.x) {
    const int request = base + static_cast<int>(threadIdx.x);
    count += __syncthreads_count(request < p.batch && __ldg(p.query_start_loc + request) < end);
  }
  return count;
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

  __device__ __forceinline__ int work_tiles(const RequestWork& work) const { return chunks(work) * p.num_kv_heads; }

  // Those that lie in one of so many rows.
  __device__ __forceinline__ int work_tiles_of_row(const RequestWork& work, int rows) const {
    return rows > 1 ? chunks(work) : work_tiles(work);
  }
};

}  // namespace nwor
