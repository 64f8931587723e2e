// Numbers from one format to another.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "common/kinds.h"

namespace nwor {

__device__ __forceinline__ float to_float(uint16_t bits, bool is_bf16) {
  return is_bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

// Two floats to two 16-bit numbers, the first in the low half.
template <Kind kKind>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  uint32_t result;
  if constexpr (kKind == Kind::kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

// Four fp8 numbers as two pairs of fp16 numbers (exact): those of the low bytes, and those of the high bytes.
template <bool kE5m2>
__device__ __forceinline__ void fp8x4_to_half2(uint32_t bytes, uint32_t& low, uint32_t& high) {
  if constexpr (kE5m2) {  // fp16 cut off after its first byte
    low = __byte_perm(bytes, 0, 0x1404);
    high = __byte_perm(bytes, 0, 0x3424);
  } else {
#if __CUDA_ARCH__ >= 890
    // The halves are named, not shifted: the conversion then takes its operand from either half of a register.
    asm("{.reg .b16 first, second; mov.b32 {first, second}, %2;"
        " cvt.rn.f16x2.e4m3x2 %0, first; cvt.rn.f16x2.e4m3x2 %1, second;}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
#else
    const auto convert = [](uint32_t pair) {
      const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
      return static_cast<uint32_t>(raw.x) | (static_cast<uint32_t>(raw.y) << 16);
    };
    low = convert(bytes & 0xffff);
    high = convert(bytes >> 16);
#endif
  }
}

}  // namespace nwor
