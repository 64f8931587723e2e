// The scales of fp8 caches and queries.
#pragma once

#include "verify/params.h"

namespace nwor {

__device__ __forceinline__ float head_scale(const float* scales, int count, int head) {
  return scales == nullptr ? 1.f : __ldg(scales + (count == 1 ? 0 : head));
}

// What an fp8 cache's keys, and an fp8 query, are multiplied with to be what they stand for.
template <class T>
__device__ __forceinline__ float logit_descale(const VerifyParams& p, int head) {
  if constexpr (!T::kFp8) return 1.f;
  return head_scale(p.k_scale, p.k_scale_count, head) * head_scale(p.q_scale, p.q_scale_count, head);
}

}  // namespace nwor
