// Division by a number known before the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nwor {

// Division of n < 2^31 by a number known before the launch: a multiplication and a shift.
struct Divisor {
  uint32_t value = 1, multiplier = 1u << 31, shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t by) : value(by) {
    while ((uint64_t{1} << shift) < value) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + value - 1) / value);
  }
};

#ifdef __CUDACC__
__device__ __forceinline__ int divide(int n, const Divisor& by) {
  return static_cast<int>(__umulhi(2u * static_cast<uint32_t>(n), by.multiplier) >> by.shift);
}
#endif

}  // namespace nwor
