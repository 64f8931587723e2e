// Sixteen bytes from global memory, wherever they begin.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nwor {

// Sixteen bytes from global memory where they are not aligned.
static __device__ __noinline__ uint4 load_bytes_apart(const uint8_t* source) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i / 4] |= static_cast<uint32_t>(source[i]) << (i % 4 * 8);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Eight 16-bit numbers from global memory where they are not aligned.
static __device__ __noinline__ uint4 load_eight_apart(const uint16_t* source) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = source[2 * i] | (static_cast<uint32_t>(source[2 * i + 1]) << 16);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint4 load_eight(const uint16_t* source, bool aligned) {
  return aligned ? __ldg(reinterpret_cast<const uint4*>(source)) : load_eight_apart(source);
}

}  // namespace nwor
