// Vectors of floats in GCC's vector extensions, sized for the instruction set that the translation unit is compiled
// for, and what attention needs of them: a small matrix product and an exponential.
#pragma once

#include <cstdint>

namespace nwor {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats in a vector
constexpr int kPanel = 4;   // vectors in a row of the product's register tile
#elif defined(__AVX__)
constexpr int kWidth = 8;
constexpr int kPanel = 2;
#else
constexpr int kWidth = 4;
constexpr int kPanel = 2;
#endif
constexpr int kRowTile = 4;  // rows of the register tile
constexpr int64_t kPad = 16;  // every row of scratch is a multiple of this many floats, on every instruction set

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef float UnalignedVec __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }
inline Vec broadcast(float x) { return Vec{} + x; }

// e^x for x <= 0 with about one unit in the last place of error; 0 below -87.3, where e^x leaves the normal floats.
inline Vec exp_nonpositive(Vec x) {
  const Vec floor_at = broadcast(-87.3f);
  const IntVec underflow = x < floor_at;
  x = underflow ? floor_at : x;
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low mantissa bits.
  const Vec magic = broadcast(12582912.0f);
  const Vec shifted = x * 1.44269504088896341f + magic;
  const Vec n = shifted - magic;
  // ln 2 in two parts, the first with trailing zeros, so that n * part is exact (Cody and Waite's reduction).
  Vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  // Taylor's series to the seventh power: its remainder on |r| <= ln(2)/2 is below 2^-27.
  Vec p = r * (1.0f / 5040.0f) + (1.0f / 720.0f);
  p = p * r + (1.0f / 120.0f);
  p = p * r + (1.0f / 24.0f);
  p = p * r + (1.0f / 6.0f);
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const IntVec exponent = (reinterpret_cast<IntVec>(shifted) - 0x4b400000) << 23;
  const Vec result = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(p) + exponent);
  return underflow ? Vec{} : result;
}

template <int kRows, int kVectors>
inline void product_tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                         int64_t depth, bool accumulate) {
  Vec sum[kRows][kVectors];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j) sum[i][j] = accumulate ? load(c + i * ldc + j * kWidth) : Vec{};
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[kVectors];
    for (int j = 0; j < kVectors; ++j) row[j] = load(b + k * ldb + j * kWidth);
    for (int i = 0; i < kRows; ++i) {
      const Vec factor = broadcast(a[i * lda + k]);
      for (int j = 0; j < kVectors; ++j) sum[i][j] += factor * row[j];
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j) store(c + i * ldc + j * kWidth, sum[i][j]);
}

template <int kRows>
inline void product_rows(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                         int64_t columns, int64_t depth, bool accumulate) {
  int64_t j = 0;
  for (; j + kPanel * kWidth <= columns; j += kPanel * kWidth)
    product_tile<kRows, kPanel>(a, lda, b + j, ldb, c + j, ldc, depth, accumulate);
  for (; j + 2 * kWidth <= columns; j += 2 * kWidth)
    product_tile<kRows, 2>(a, lda, b + j, ldb, c + j, ldc, depth, accumulate);
  for (; j < columns; j += kWidth) product_tile<kRows, 1>(a, lda, b + j, ldb, c + j, ldc, depth, accumulate);
}

// c[rows, columns] (+)= a[rows, depth] * b[depth, columns]; columns is a multiple of kWidth.
inline void product(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                    int64_t columns, int64_t depth, bool accumulate) {
  int64_t i = 0;
  for (; i + kRowTile <= rows; i += kRowTile)
    product_rows<kRowTile>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, columns, depth, accumulate);
  switch (rows - i) {
    case 3:
      return product_rows<3>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, columns, depth, accumulate);
    case 2:
      return product_rows<2>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, columns, depth, accumulate);
    case 1:
      return product_rows<1>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, columns, depth, accumulate);
    default:
      return;
  }
}

}  // namespace
}  // namespace nwor
