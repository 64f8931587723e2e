// The algebra of attention in parts: what some of the keys leave of a row, how two of these become one, and one the
// output.
#pragma once

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "verify/packed_row.cuh"
#include "verify/work.h"

namespace nwor {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNoScore = -1e30f;  // the running maximum of a row that has seen nothing

// Weighted values of four positions of a row with the row's maximum and sum; adds up in any fixed order.
struct Quad {
  float4 values = make_float4(0.f, 0.f, 0.f, 0.f);
  float maximum = kNoScore, sum = 0.f;

  __device__ __forceinline__ void add(float2 stats, float4 part) {
    const float higher = fmaxf(maximum, stats.x);
    const float own = exp2_fast(maximum - higher), other = exp2_fast(stats.x - higher);
    values.x = values.x * own + part.x * other;
    values.y = values.y * own + part.y * other;
    values.z = values.z * own + part.z * other;
    values.w = values.w * own + part.w * other;
    sum = sum * own + stats.y * other;
    maximum = higher;
  }
};

// Adds a row's sink to its maximum and sum, and writes its log-sum-exp. Returns the factor by which the weighted
// values shrink.
static __device__ __noinline__ float finish_special_row(const VerifyParams& p, int start, int kv_head, int packed,
                                                        float maximum, float& sum, bool write_lse) {
  const PackedRow row(p, packed);
  const int head = kv_head * static_cast<int>(p.group.value) + row.head;
  float factor = 1.f;
  if (p.ancestor_mask != nullptr && __ldg(p.ancestor_mask + start + row.token) == 0) {  // it sees nothing at all
    maximum = kNoScore;
    sum = 0.f;
  }
  if (p.sinks != nullptr) {
    const float sink = (p.sinks_float ? static_cast<const float*>(p.sinks)[head]
                                      : to_float(static_cast<const uint16_t*>(p.sinks)[head], p.is_bf16)) *
                       kLog2e;
    const float higher = fmaxf(maximum, sink);
    factor = exp2f(maximum - higher);
    sum = sum * factor + exp2f(sink - higher);
    maximum = higher;
  }
  if (write_lse && p.lse != nullptr)
    p.lse[head * p.lse_head + start + row.token] = (maximum + log2f(sum)) * 0.6931471805599453f;
  return factor;
}

// What a row's weighted values are multiplied with to give the output; one caller of each row writes the
// log-sum-exp.
template <bool kFp8>
__device__ __forceinline__ float finish_row(const VerifyParams& p, const Split& split, int row, float maximum,
                                            float sum, bool write_lse) {
  float factor = 1.f;
  if (p.sinks != nullptr || p.lse != nullptr) {
    factor = finish_special_row(p, split.work.start, split.head, split.first_row + row, maximum, sum, write_lse);
  } else if (p.ancestor_mask != nullptr) {
    const PackedRow packed(p, split.first_row + row);
    if (__ldg(p.ancestor_mask + split.work.start + packed.token) == 0) return 0.f;  // it sees nothing at all
  }
  if (kFp8 && p.v_scale != nullptr) factor *= p.v_scale[p.v_scale_count == 1 ? 0 : split.head];
  return sum == 0.f ? 0.f : __fdividef(factor, sum);  // a row that sees nothing is zero
}

}  // namespace nwor
