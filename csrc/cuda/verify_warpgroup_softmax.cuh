// What the warpgroup kernels keep of a segment, and how scores become probabilities.
#pragma once

#include "verify_warpgroup_products.cuh"

namespace nwor {

// Numbers of a lane's rows in shared memory, read as if they were an array [row tiles][2] of its own.
struct SharedRows {
  struct Pair {
    float2 both;
    __device__ __forceinline__ float operator[](int c) const { return c == 0 ? both.x : both.y; }
  };
  float* first;
  __device__ __forceinline__ Pair operator[](int j) const { return Pair{*reinterpret_cast<const float2*>(first + 8 * j)}; }
};

// The running maxima of a warpgroup's rows, base 2; negative, since that is what is added to a score. In registers.
template <class S, bool kShared = S::kInTurns>
struct RunningMaxima {
  float minus_maximum[S::kRowTiles][2];

  __device__ __forceinline__ void clear(char*) {
#pragma unroll
    for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) minus_maximum[j][c] = -kNoScore;
  }
  // Where higher ones are left, [rows]: in the room for probabilities, behind what is exchanged.
  __device__ __forceinline__ float* next(float* exchange) const { return exchange + 4 * 8 * S::kRowTiles; }
  __device__ __forceinline__ void set(int j, int c, float value) { minus_maximum[j][c] = value; }
  __device__ __forceinline__ void take() {}
};

// The same in shared memory, in two arrays that are used in turns: where tiles are taken in turns, registers are wanted
// for the result.
template <class S>
struct RunningMaxima<S, true> {
  SharedRows minus_maximum;
  int other;  // floats from this lane's first row in one array to the other

  // A barrier has to follow.
  __device__ __forceinline__ void clear(char* shared) {
    float* maxima = reinterpret_cast<float*>(shared + S::maxima_offset());
    const int thread = threadIdx.x % 128;
    if (thread < S::kRows) maxima[thread] = -kNoScore;
    minus_maximum.first = maxima + thread % 4 * 2;
    other = S::kRows;
  }
  __device__ __forceinline__ float* next(float*) const {
    return minus_maximum.first + other - static_cast<int>(threadIdx.x % 4) * 2;
  }
  __device__ __forceinline__ void set(int, int, float) {}
  __device__ __forceinline__ void take() {
    minus_maximum.first += other;
    other = -other;
  }
};

template <class S>
struct WarpgroupState : RunningMaxima<S> {
  float accumulator[S::kHeadSize / 64][S::kRowTiles][4];  // O^T; block b, this warp: slice 4b + warp
  float sum[S::kRowTiles][2];                             // this lane's part
};

template <class S>
__device__ __forceinline__ void clear(WarpgroupState<S>& state, char* shared) {
  state.RunningMaxima<S>::clear(shared);
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j) {
#pragma unroll
    for (int b = 0; b < S::kHeadSize / 64; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e) state.accumulator[b][j][e] = 0.f;
    state.sum[j][0] = state.sum[j][1] = 0.f;
  }
}

// The barrier of all threads of the thread block.
struct BlockBarrier {
  __device__ __forceinline__ void sync() const { __syncthreads(); }
};

// Where this lane's row of a probability fragment goes: row lane % 8 of eight, tokens 16 * warp and eight further.
template <class S>
__device__ __forceinline__ uint32_t probability_place(uint32_t probabilities) {
  const int lane = threadIdx.x % 32;
  return probabilities + lane % 8 * 128 + (((2 * S::warp() + lane / 8 % 2) ^ (lane % 8)) << 4);
}

// The running maxima of all rows after a tile that exceeds them, and what was added up shrunk to fit. Each row's four
// warps leave what they found at `room`, one thread for each row joins it. Called by all threads of the barrier; the
// room may be that of probabilities which nothing reads.
template <class S, class Barrier>
__device__ __forceinline__ void raise_maxima(float scale, bool first, const float (&scores)[S::kRowTiles][4],
                                             WarpgroupState<S>& state, char* room, const Barrier& barrier) {
  const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
  float* exchange = reinterpret_cast<float*>(room);  // [rows, 4]
  float* next = state.next(exchange);
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float highest = fmaxf(fmaxf(scores[j][c], scores[j][2 + c]) * scale, -state.minus_maximum[j][c]);
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 4));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 8));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 16));
      if (lane < 4) exchange[4 * (8 * j + 2 * lane + c) + S::warp()] = highest;
    }
  barrier.sync();
  if (thread < 8 * S::kRowTiles) {
    const float4 found = *reinterpret_cast<const float4*>(exchange + 4 * thread);
    next[thread] = -fmaxf(fmaxf(found.x, found.y), fmaxf(found.z, found.w));
  }
  barrier.sync();
  const SharedRows raised{next + lane % 4 * 2};
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j) {
    const SharedRows::Pair pair = raised[j];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float shrink = exp2_fast(pair[c] - state.minus_maximum[j][c]);
      state.set(j, c, pair[c]);
      if (first) continue;
      state.sum[j][c] *= shrink;
#pragma unroll
      for (int b = 0; b < S::kHeadSize / 64; ++b) {
        state.accumulator[b][j][c] *= shrink;
        state.accumulator[b][j][2 + c] *= shrink;
      }
    }
  }
  state.take();
  if constexpr (!S::kInTurns) barrier.sync();  // the probabilities may overwrite the maxima
}

// Scores to probabilities relative to the running maxima, and those to shared memory. `sum`: this lane's part with them;
// may be the state's own.
template <class S>
__device__ __forceinline__ void store_probabilities(uint32_t to, float scale, const float (&scores)[S::kRowTiles][4],
                                                    const WarpgroupState<S>& state, float (&sum)[S::kRowTiles][2]) {
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j) {
    float weights[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) weights[e] = exp2_fast(fmaf(scores[j][e], scale, state.minus_maximum[j][e % 2]));
#pragma unroll
    for (int c = 0; c < 2; ++c) sum[j][c] = state.sum[j][c] + weights[c] + weights[2 + c];
    store_matrix2_transposed(to + j * 1024, pack2<S::kKind>(weights[0], weights[1]),
                             pack2<S::kKind>(weights[2], weights[3]));
  }
}

}  // namespace nwor
