// Conversions between the formats of K and V and float. Plain loops that the compiler vectorizes for the instruction
// set of the translation unit; everything here has internal linkage, since one unit is compiled per instruction set
// and the linker must never merge them.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats.h"

namespace nwor {
namespace {

inline uint32_t float_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float bits_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

inline float bfloat16_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

// Exponent bias 15 moved to 127 by a multiplication, which normalizes subnormals on the way.
inline float float16_to_float(uint16_t h) {
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
  uint32_t bits = float_bits(bits_float(magnitude) * 0x1p112f);
  bits |= (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return bits_float(bits | static_cast<uint32_t>(h & 0x8000) << 16);
}

inline float fp8_e4m3_to_float(uint8_t b) {
  const float magnitude = bits_float(static_cast<uint32_t>(b & 0x7f) << 20) * 0x1p120f;
  const uint32_t bits = (b & 0x7f) == 0x7f ? 0x7fc00000u : float_bits(magnitude);
  return bits_float(bits | static_cast<uint32_t>(b & 0x80) << 24);
}

// The upper byte of a float16.
inline float fp8_e5m2_to_float(uint8_t b) { return float16_to_float(static_cast<uint16_t>(b << 8)); }

// Round to nearest even, NaN kept.
inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

// Round to nearest even; beyond 65504 infinity, NaN kept.
inline uint16_t float_to_float16(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Subnormal results: adding 0.5 leaves the value, rounded to a multiple of 2^-24, in the low mantissa bits.
  const uint32_t small = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? small : normal;
  return static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite));
}

// vLLM's CPU writer multiplies by the reciprocal scale, clamps (a NaN to the maximum), drops the sign of zero and
// truncates towards zero, where the CUDA writer divides and rounds to nearest even. Bit-identity to each device's own
// writer is the contract, so the CPU op follows the former.
inline float fp8_clamp(float x, float limit) {
  const float below = x < limit ? x : limit;
  return below > -limit ? below : -limit;
}

inline uint8_t float_to_fp8_e4m3(float x, float inverse_scale) {
  const float clamped = fp8_clamp(x * inverse_scale, 448.0f);
  const uint32_t bits = float_bits(clamped * 0x1p-120f);
  const uint8_t byte = static_cast<uint8_t>((bits >> 24 & 0x80u) | (bits >> 20 & 0x7fu));
  return clamped == 0.0f ? 0 : byte;
}

inline uint8_t float_to_fp8_e5m2(float x, float inverse_scale) {
  const float clamped = fp8_clamp(x * inverse_scale, 57344.0f);
  const uint32_t bits = float_bits(clamped);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14 the result counts multiples of 2^-16; the conversion to an integer truncates.
  const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(
      bits_float(magnitude < 0x38800000u ? magnitude : 0u) * 0x1p16f));
  const uint32_t normal = (magnitude - 0x38000000u) >> 21;
  const uint32_t sign = bits >> 24 & 0x80u;
  const uint8_t byte = static_cast<uint8_t>(sign | (magnitude < 0x38800000u ? subnormal : normal));
  return clamped == 0.0f ? 0 : byte;
}

template <Format format>
struct Element;
template <>
struct Element<Format::kFloat32> {
  using type = float;
  static float load(float x) { return x; }
};
template <>
struct Element<Format::kFloat16> {
  using type = uint16_t;
  static float load(uint16_t x) { return float16_to_float(x); }
};
template <>
struct Element<Format::kBFloat16> {
  using type = uint16_t;
  static float load(uint16_t x) { return bfloat16_to_float(x); }
};
template <>
struct Element<Format::kFp8E4M3> {
  using type = uint8_t;
  static float load(uint8_t x) { return fp8_e4m3_to_float(x); }
};
template <>
struct Element<Format::kFp8E5M2> {
  using type = uint8_t;
  static float load(uint8_t x) { return fp8_e5m2_to_float(x); }
};

// Calls f with a compile-time Format.
template <typename F>
inline void with_format(Format format, F&& f) {
  switch (format) {
    case Format::kFloat32:
      return f.template operator()<Format::kFloat32>();
    case Format::kFloat16:
      return f.template operator()<Format::kFloat16>();
    case Format::kBFloat16:
      return f.template operator()<Format::kBFloat16>();
    case Format::kFp8E4M3:
      return f.template operator()<Format::kFp8E4M3>();
    case Format::kFp8E5M2:
      return f.template operator()<Format::kFp8E5M2>();
  }
}

// destination[i] = source[i * stride] * scale
template <Format format>
inline void load_run(float* __restrict destination, const void* source, int64_t count, int64_t stride, float scale) {
  using T = typename Element<format>::type;
  const T* __restrict from = static_cast<const T*>(source);
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) destination[i] = Element<format>::load(from[i]) * scale;
  } else {
    for (int64_t i = 0; i < count; ++i) destination[i] = Element<format>::load(from[i * stride]) * scale;
  }
}

inline void store_row(void* destination, const float* __restrict source, int64_t count, Format format) {
  if (format == Format::kFloat32) {
    __builtin_memcpy(destination, source, static_cast<size_t>(count) * sizeof(float));
  } else {
    uint16_t* __restrict to = static_cast<uint16_t*>(destination);
    if (format == Format::kBFloat16) {
      for (int64_t i = 0; i < count; ++i) to[i] = float_to_bfloat16(source[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = float_to_float16(source[i]);
    }
  }
}

// What the cache would give back for values written to it: quantize, dequantize.
inline void round_trip(float* values, int64_t count, Format format, float scale) {
  const float inverse = 1.0f / scale;
  if (format == Format::kFp8E4M3) {
    for (int64_t i = 0; i < count; ++i)
      values[i] = fp8_e4m3_to_float(float_to_fp8_e4m3(values[i], inverse)) * scale;
  } else if (format == Format::kFp8E5M2) {
    for (int64_t i = 0; i < count; ++i)
      values[i] = fp8_e5m2_to_float(float_to_fp8_e5m2(values[i], inverse)) * scale;
  }
}

}  // namespace
}  // namespace nwor
