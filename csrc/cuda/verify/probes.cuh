// Where the time of a launch goes. In a build with NWOR_PROBES each thread block notes when it comes to its stations, for
// benchmarks/kernels/probes.py; in others nothing of it is compiled.
#pragma once

#include "verify/params.h"

namespace nwor {

// Of a thread block, in this order; of those within a split the last one counts.
enum class Station : int { kBegin, kPlanned, kFirstTiles, kLastTile, kPassedOn, kEnd };

#if NWOR_PROBES

constexpr int kStations = 6;

// [thread blocks, stations, 2]: the device's nanoseconds, and the multiprocessor's clock, which is finer.
__device__ __forceinline__ void probe(const VerifyParams& p, Station station) {
  if (p.probes == nullptr || threadIdx.x != 0) return;
  unsigned long long time, clock;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  asm volatile("mov.u64 %0, %clock64;" : "=l"(clock));
  unsigned long long* entry = p.probes + (blockIdx.x * kStations + static_cast<int>(station)) * 2;
  entry[0] = time;
  entry[1] = clock;
}

#else

__device__ __forceinline__ void probe(const VerifyParams&, Station) {}

#endif

}  // namespace nwor
