// The end of a segment: what the groups of a thread block found becomes one result.
#pragma once

#include "verify_tile.cuh"

namespace nwor {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNoScore = -1e30f;  // the running maximum of a row that has seen nothing

template <class S>
struct MergeSpace {
  char* shared;
  // Thread blocks of the worker, and this one's number among them. Kept in shared memory, not in registers.
  __device__ __forceinline__ int cluster() const {
    return reinterpret_cast<const Control*>(shared + S::kControlOffset)->walk.plan.cluster;
  }
  __device__ __forceinline__ int rank() const {
    return static_cast<int>(blockIdx.x) & (cluster() - 1);  // a power of two: clusters are of 1, 2, 4 or 8
  }
  __device__ __forceinline__ float* ring() const { return reinterpret_cast<float*>(shared + S::kQueryBytes); }
  __device__ __forceinline__ float* sum() const { return reinterpret_cast<float*>(shared + S::kSumOffset); }
  __device__ __forceinline__ float2* stats() const { return reinterpret_cast<float2*>(shared + S::kStatsOffset); }
  __device__ __forceinline__ float2* rows() const { return reinterpret_cast<float2*>(shared + S::kRowsOffset); }
  __device__ __forceinline__ int64_t* outputs() const { return reinterpret_cast<int64_t*>(shared + S::kOutputOffset); }
  __device__ __forceinline__ int* flags() const { return reinterpret_cast<int*>(shared + S::kFlagOffset); }
};

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
__device__ __forceinline__ float finish_row(const VerifyParams& p, const Segment& segment, int row, float maximum,
                                            float sum, bool write_lse) {
  float factor = 1.f;
  if (p.sinks != nullptr || p.lse != nullptr || p.ancestor_mask != nullptr)
    factor = finish_special_row(p, segment.work.start, segment.head, segment.first_row + row, maximum, sum, write_lse);
  if (kFp8 && p.v_scale != nullptr) factor *= p.v_scale[p.v_scale_count == 1 ? 0 : segment.head];
  return sum == 0.f ? 0.f : __fdividef(factor, sum);  // a row that sees nothing is zero
}

// Where a packed row begins in the output, in elements.
__device__ __forceinline__ int64_t output_row(const VerifyParams& p, const Segment& segment, int row) {
  const PackedRow packed(p, segment.first_row + row);
  return (segment.work.start + packed.token) * p.output_token +
         (static_cast<int64_t>(segment.head) * p.group.value + packed.head) * p.output_head;
}

// Two numbers of a result as the output has them.
template <class S>
__device__ __forceinline__ uint32_t pack_output(const VerifyParams& p, float low, float high) {
  if constexpr (!S::kFp8) return pack2<S::kKind>(low, high);
  return p.is_bf16 ? pack2<Kind::kBf16>(low, high) : pack2<Kind::kFp16>(low, high);
}

// Four numbers of an output row, eight bytes: threads side by side fill whole sectors of memory at once.
template <class S>
__device__ __forceinline__ void store_four(const VerifyParams& p, bool aligned, int64_t row_begin, int position,
                                           float4 value, float factor) {
  const uint2 words = make_uint2(pack_output<S>(p, value.x * factor, value.y * factor),
                                 pack_output<S>(p, value.z * factor, value.w * factor));
  uint16_t* output = static_cast<uint16_t*>(p.output) + row_begin + position;
  if (aligned) {
    *reinterpret_cast<uint2*>(output) = words;
  } else {
    output[0] = words.x & 0xffff;
    output[1] = words.x >> 16;
    output[2] = words.y & 0xffff;
    output[3] = words.y >> 16;
  }
}

template <class S>
__device__ __forceinline__ void store_quad(const VerifyParams& p, const Segment& segment, int row, int position,
                                           const Quad& quad) {
  if (row >= segment.row_count) return;
  const float factor = finish_row<S::kFp8>(p, segment, row, quad.maximum, quad.sum, position == 0);
  store_four<S>(p, p.aligned, output_row(p, segment, row), position, quad.values, factor);
}

// The two numbers of a row that a thread's fragment of sixteen head positions has, put where the row has them: rows of a
// fragment eight apart are positions as far apart, those of an fp8 tile neighbours.
template <class S>
__device__ __forceinline__ void put_pair(float* sixteen, int fragment_row, float first, float second) {
  if constexpr (S::kFp8) {
    *reinterpret_cast<float2*>(sixteen + 2 * fragment_row) = make_float2(first, second);
  } else {
    sixteen[fragment_row] = first;
    sixteen[fragment_row + 8] = second;
  }
}

// Leaves the group's maxima and sums in shared memory.
template <class S>
__device__ __forceinline__ void share_stats(int group_index, int warp_row,
                                            const float (&minus_maximum)[S::kRowTiles][2],
                                            const float (&sum)[S::kRowTiles][2], const MergeSpace<S>& space) {
  const int lane = recomputed_thread() % 32;
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float l = sum[j][e];
      l += __shfl_xor_sync(0xffffffffu, l, 4);
      l += __shfl_xor_sync(0xffffffffu, l, 8);
      l += __shfl_xor_sync(0xffffffffu, l, 16);
      if (lane < 4)
        space.stats()[group_index * S::kRows + warp_row + 8 * j + 2 * lane + e] = make_float2(-minus_maximum[j][e], l);
    }
}

// Row by row: the groups' weights, the common maximum, and the sum or, where the result is whole, the factor to the
// output. The last threads find meanwhile where rows lie in the output.
template <class S>
__device__ __forceinline__ void merge_stats(const VerifyParams& p, const Segment& segment, int slot,
                                            const MergeSpace<S>& space) {
  static_assert(S::kRows <= S::kThreads);
  const int thread = recomputed_thread();
  const bool whole = segment.worker_count == 1 && space.cluster() == 1;
  if (thread < S::kRows) {
    const int row = thread;
    float2* stats = space.stats() + row;
    float highest = kNoScore, total = 0.f;
#pragma unroll
    for (int g = 0; g < S::kStatGroups; ++g) highest = fmaxf(highest, stats[g * S::kRows].x);
#pragma unroll
    for (int g = 0; g < S::kStatGroups; ++g) {
      const float weight = exp2_fast(stats[g * S::kRows].x - highest);
      total += stats[g * S::kRows].y * weight;
      if constexpr (S::kMergeGroups > 1) stats[g * S::kRows].x = weight;
    }
    if (whole && row < segment.row_count) total = finish_row<S::kFp8>(p, segment, row, highest, total, true);
    if (!whole && space.cluster() == 1)
      __stcg(p.partial_stats + static_cast<int64_t>(slot) * S::kRows + row, make_float2(highest, total));
    space.rows()[row] = make_float2(highest, total);
  }
  const int row = S::kThreads - 1 - thread;
  if (whole && row < min(S::kRows, segment.row_count)) space.outputs()[row] = output_row(p, segment, row);
}

// Calls `emit` with the row and the first position of each quad of kMergeSlices slices that is this thread's.
template <class S, class Emit>
__device__ __forceinline__ void for_quads(int rows, Emit emit) {
  constexpr int kQuads = S::kMergeSlices * 4;
  const int thread = recomputed_thread();
  if constexpr (S::kThreads % kQuads == 0) {  // a thread's are one above the other
    const int position = thread % kQuads * 4;
#pragma unroll 2
    for (int row = thread / kQuads; row < rows; row += S::kThreads / kQuads) emit(row, position);
  } else {
#pragma unroll 2
    for (int i = thread; i < rows * kQuads; i += S::kThreads) emit(i / kQuads, i % kQuads * 4);
  }
}

// Adds up what kMergeGroups groups left in shared memory, for kMergeSlices slices of the head from `begin` on: into the
// output where nobody else has a part of the unit, else into shared memory (for the cluster) or the workspace.
template <class S>
__device__ __forceinline__ void emit_slices(const VerifyParams& p, const Segment& segment, int slot, int begin,
                                            const float* merge, int group_stride, const MergeSpace<S>& space) {
  const int rows = min(S::kRows, segment.row_count);
  const auto add_up = [&](int row, int position) {
    const auto part = [&](int g) {
      return *reinterpret_cast<const float4*>(merge + g * group_stride + row * S::kMergeStride + position);
    };
    if constexpr (S::kMergeGroups == 1) return part(0);
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int g = 0; g < S::kMergeGroups; ++g) {
      const float4 own = part(g);
      const float weight = space.stats()[g * (S::kStatGroups / S::kMergeGroups) * S::kRows + row].x;
      total.x += own.x * weight;
      total.y += own.y * weight;
      total.z += own.z * weight;
      total.w += own.w * weight;
    }
    return total;
  };
  const auto put_out = [&](bool aligned) {
    for_quads<S>(rows, [&](int row, int position) {
      store_four<S>(p, aligned, space.outputs()[row], begin * 16 + position, add_up(row, position),
                    space.rows()[row].y);
    });
  };
  const bool in_cluster = space.cluster() > 1;
  if (segment.worker_count > 1 || in_cluster) {
    float* target = in_cluster ? space.sum() : p.partial_output + static_cast<int64_t>(slot) * S::kRows * S::kHeadSize;
    const int target_stride = in_cluster ? S::kSumStride : S::kHeadSize;
    for_quads<S>(rows, [&](int row, int position) {
      *reinterpret_cast<float4*>(target + row * target_stride + begin * 16 + position) = add_up(row, position);
    });
  } else if (p.aligned) {
    put_out(true);
  } else {
    put_out(false);
  }
}

// Where the groups leave their sums, and how far apart, in floats.
template <class S>
__device__ __forceinline__ float* merge_buffer(const MergeSpace<S>& space, int& group_stride) {
  const bool overlap = S::kOverlap && space.cluster() == 1;
  group_stride = (overlap ? S::kStages * S::kStageBytes : S::kMergeBytes) / 4;
  return space.ring() + (overlap ? (S::kStages - 1) * S::kStageBytes / 4 : 0);
}

// Adds the groups of this thread block up.
template <class S>
__device__ __forceinline__ void add_groups(const VerifyParams& p, const Segment& segment, int group_index, int warp_row,
                                           int slot, const float (&accumulator)[S::kHeadSize / 16][S::kRowTiles][4],
                                           const MergeSpace<S>& space) {
  const int lane = recomputed_thread() % 32;
  int group_stride;
  float* merge = merge_buffer<S>(space, group_stride);
  float* mine = merge + group_index * group_stride + (warp_row + lane % 4 * 2) * S::kMergeStride;
#pragma unroll
  for (int begin = 0; begin < S::kHeadSize / 16; begin += S::kMergeSlices) {
    if (begin > 0) __syncthreads();
#pragma unroll
    for (int s = 0; s < S::kMergeSlices; ++s)
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          put_pair<S>(mine + (8 * j + e) * S::kMergeStride + s * 16, lane / 4, accumulator[begin + s][j][e],
                      accumulator[begin + s][j][2 + e]);
    __syncthreads();
    emit_slices<S>(p, segment, slot, begin, merge, group_stride, space);
  }
}

}  // namespace nwor
