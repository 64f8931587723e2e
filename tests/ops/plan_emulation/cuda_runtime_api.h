// Stands in for CUDA's header where the plan's device code runs on a CPU: the types and intrinsics that it uses. Threads
// of a block are fibers that run in turns; what a warp or a block does together is a point that all of them have to reach.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#define __device__
#define __global__
#define __shared__ static  // blocks run one after the other
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

using std::max;
using std::min;
using cudaStream_t = void*;
using cudaError_t = int;

struct int2 {
  int x, y;
};
struct float2 {
  float x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, blockDim;

namespace emulation {

// A point that `count` fibers have to reach; what each brings is known to all of them afterwards.
struct Meeting {
  int count, arrived = 0;
  unsigned generation = 0;
  uint32_t brought[32] = {}, known[2][32] = {};
};

constexpr size_t kStackBytes = 64 << 10;

struct Fiber {
  ucontext_t context;
  bool done = false;
};

struct Block {
  ucontext_t scheduler;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Meeting> warps;
  Meeting all;
  std::function<void()> body;
};
inline Block* block;

inline void enter() {
  block->body();
  block->fibers[threadIdx.x]->done = true;
  swapcontext(&block->fibers[threadIdx.x]->context, &block->scheduler);
}

// Runs a block of `threads` threads.
inline void run(unsigned index, unsigned threads, std::function<void()> body) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() < threads) stacks.emplace_back(new char[kStackBytes]);
  Block own;
  own.body = std::move(body);
  own.all.count = static_cast<int>(threads);
  own.warps.resize(threads / 32);
  for (Meeting& warp : own.warps) warp.count = 32;
  block = &own;
  blockIdx.x = index;
  blockDim.x = threads;
  for (unsigned i = 0; i < threads; ++i) {
    own.fibers.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *own.fibers.back();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks[i].get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (unsigned i = 0; i < threads; ++i) {
      if (own.fibers[i]->done) continue;
      left = true;
      threadIdx.x = i;
      swapcontext(&own.scheduler, &own.fibers[i]->context);
    }
  }
}

// What all fibers of the meeting bring; returns when the last has come.
inline const uint32_t* meet(Meeting& meeting, int place, uint32_t value) {
  const unsigned generation = meeting.generation;
  meeting.brought[place] = value;
  if (++meeting.arrived == meeting.count) {
    std::memcpy(meeting.known[generation % 2], meeting.brought, sizeof(meeting.brought));
    meeting.arrived = 0;
    ++meeting.generation;
  }
  const unsigned self = threadIdx.x;
  while (meeting.generation == generation) swapcontext(&block->fibers[self]->context, &block->scheduler);
  return meeting.known[generation % 2];
}

inline const uint32_t* meet_warp(uint32_t value) {
  return meet(block->warps[threadIdx.x / 32], static_cast<int>(threadIdx.x % 32), value);
}

}  // namespace emulation

inline void __syncthreads() { emulation::meet(emulation::block->all, 0, 0); }
inline int __syncthreads_count(int predicate) {
  static int counts[2];  // in turns: all have read one when the first begins with it anew
  emulation::Meeting& all = emulation::block->all;
  int& count = counts[all.generation % 2];
  if (all.arrived == 0) count = 0;
  count += predicate != 0;
  emulation::meet(all, 0, 0);
  return count;
}

template <class T>
inline T __ldg(const T* from) {
  return *from;
}
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t{a} * b) >> 32); }
inline int __ffs(int value) { return __builtin_ffs(value); }

inline unsigned __ballot_sync(unsigned, bool value) {
  const uint32_t* known = emulation::meet_warp(value);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= known[i] << i;
  return bits;
}
inline int __shfl_sync(unsigned, int value, int lane) {
  return static_cast<int>(emulation::meet_warp(static_cast<uint32_t>(value))[lane % 32]);
}
inline int __shfl_up_sync(unsigned, int value, int distance) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return static_cast<int>(emulation::meet_warp(static_cast<uint32_t>(value))[lane < distance ? lane : lane - distance]);
}
inline int __reduce_add_sync(unsigned, int value) {
  const uint32_t* known = emulation::meet_warp(static_cast<uint32_t>(value));
  int sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<int>(known[i]);
  return sum;
}
inline int __reduce_max_sync(unsigned, int value) {
  const uint32_t* known = emulation::meet_warp(static_cast<uint32_t>(value));
  int highest = static_cast<int>(known[0]);
  for (int i = 1; i < 32; ++i) highest = max(highest, static_cast<int>(known[i]));
  return highest;
}
inline int __reduce_min_sync(unsigned, int value) {
  const uint32_t* known = emulation::meet_warp(static_cast<uint32_t>(value));
  int lowest = static_cast<int>(known[0]);
  for (int i = 1; i < 32; ++i) lowest = min(lowest, static_cast<int>(known[i]));
  return lowest;
}
