// Barriers of the wgmma kernel.
#pragma once

namespace nwor {

// The barrier of one warpgroup.
struct WarpgroupBarrier {
  int name;

  __device__ __forceinline__ void sync() const { asm volatile("barrier.sync.aligned %0, 128;" ::"r"(name) : "memory"); }
};

// The barrier of the threads that share rows, who wait for each other at every tile: of the whole thread block, or of one
// of its warpgroups where these take tiles in turns.
template <class T>
struct RowBarrier {
  int passed = 0;  // how often the warpgroup came by

  __device__ __forceinline__ void sync() {
    if constexpr (T::kInTurns) {
      WarpgroupBarrier{1 + T::ring()}.sync();
      ++passed;
    } else {
      __syncthreads();
    }
  }

  // The same, and whether any of the threads says yes.
  __device__ __forceinline__ bool any(bool yes) {
    if constexpr (T::kInTurns) {
      int found;
      asm volatile(
          "{.reg .pred own, any; setp.ne.s32 own, %1, 0; barrier.red.or.pred.aligned any, %2, 128, own;"
          " selp.s32 %0, 1, 0, any;}"
          : "=r"(found)
          : "r"(static_cast<int>(yes)), "r"(1 + T::ring())
          : "memory");
      ++passed;
      return found != 0;
    } else {
      return __syncthreads_or(yes) != 0;
    }
  }

  // Lets a warpgroup that came by less often than another make up for it. Of no use but to racecheck, which orders accesses
  // by how many barriers each warp has passed, whichever they are: behind unequally many it takes a write, __syncthreads()
  // and a read for a race. Called by all threads.
  __device__ __forceinline__ void even_out() {
    if constexpr (T::kInTurns) {
#pragma unroll 1
      for (int level = 0; __syncthreads_or(passed > level); ++level)
        if (passed == level) sync();
    }
  }
};

}  // namespace nwor
