// A thread block's shared memory as the end of a split uses it.
#pragma once

#include "verify/work.h"

namespace nwor {

template <class T>
struct SharedMemory {
  char* base;
  // Thread blocks of the worker, and this one's number among them. Kept in shared memory, not in registers.
  __device__ __forceinline__ int cluster() const {
    return reinterpret_cast<const Control*>(base + T::kControlOffset)->scheduler.plan.cluster;
  }
  __device__ __forceinline__ int rank() const {
    return static_cast<int>(blockIdx.x) & (cluster() - 1);  // a power of two: clusters are of 1, 2, 4 or 8
  }
  __device__ __forceinline__ float* ring() const { return reinterpret_cast<float*>(base + T::kQueryBytes); }
  __device__ __forceinline__ float* sum() const { return reinterpret_cast<float*>(base + T::kSumOffset); }
  __device__ __forceinline__ float2* stats() const { return reinterpret_cast<float2*>(base + T::kStatsOffset); }
  __device__ __forceinline__ float2* rows() const { return reinterpret_cast<float2*>(base + T::kRowsOffset); }
  __device__ __forceinline__ int64_t* outputs() const { return reinterpret_cast<int64_t*>(base + T::kOutputOffset); }
  __device__ __forceinline__ int* flags() const { return reinterpret_cast<int*>(base + T::kFlagOffset); }
};

}  // namespace nwor
