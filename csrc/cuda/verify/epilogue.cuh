// The end of a split: what the groups of a thread block found becomes one result.
#pragma once

#include "common/convert.cuh"
#include "verify/shared_memory.cuh"
#include "verify/state.cuh"

namespace nwor {

// Where a packed row begins in the output, in elements.
__device__ __forceinline__ int64_t output_row(const VerifyParams& p, const Split& split, int row) {
  const PackedRow packed(p, split.first_row + row);
  return (split.work.start + packed.token) * p.output_token +
         (static_cast<int64_t>(split.head) * p.group.value + packed.head) * p.output_head;
}

// Two numbers of a result as the output has them.
template <class T>
__device__ __forceinline__ uint32_t pack_output(const VerifyParams& p, float low, float high) {
  if constexpr (!T::kFp8) return pack2<T::kKind>(low, high);
  return p.is_bf16 ? pack2<Kind::kBf16>(low, high) : pack2<Kind::kFp16>(low, high);
}

// Four numbers of an output row, eight bytes: threads side by side fill whole sectors of memory at once.
template <class T>
__device__ __forceinline__ void store_four(const VerifyParams& p, bool aligned, int64_t row_begin, int position,
                                           float4 value, float factor) {
  const uint2 words = make_uint2(pack_output<T>(p, value.x * factor, value.y * factor),
                                 pack_output<T>(p, value.z * factor, value.w * factor));
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

template <class T>
__device__ __forceinline__ void store_quad(const VerifyParams& p, const Split& split, int row, int position,
                                           const Quad& quad) {
  if (row >= split.row_count) return;
  const float factor = finish_row<T::kFp8>(p, split, row, quad.maximum, quad.sum, position == 0);
  store_four<T>(p, p.aligned, output_row(p, split, row), position, quad.values, factor);
}

// The two numbers of a row that a thread's fragment of sixteen head positions has, put where the row has them: rows of a
// fragment eight apart are positions as far apart, those of an fp8 tile neighbours.
template <class T>
__device__ __forceinline__ void put_pair(float* sixteen, int fragment_row, float first, float second) {
  if constexpr (T::kFp8) {
    *reinterpret_cast<float2*>(sixteen + 2 * fragment_row) = make_float2(first, second);
  } else {
    sixteen[fragment_row] = first;
    sixteen[fragment_row + 8] = second;
  }
}

// Leaves the group's maxima and sums in shared memory.
template <class T>
__device__ __forceinline__ void share_stats(int group_index, int warp_row,
                                            const float (&minus_maximum)[T::kRowTiles][2],
                                            const float (&sum)[T::kRowTiles][2], const SharedMemory<T>& smem) {
  const int lane = recomputed_thread() % 32;
#pragma unroll
  for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float l = sum[j][e];
      l += __shfl_xor_sync(0xffffffffu, l, 4);
      l += __shfl_xor_sync(0xffffffffu, l, 8);
      l += __shfl_xor_sync(0xffffffffu, l, 16);
      if (lane < 4)
        smem.stats()[group_index * T::kRows + warp_row + 8 * j + 2 * lane + e] = make_float2(-minus_maximum[j][e], l);
    }
}

// Row by row: the groups' weights, the common maximum, and the sum or, where the result is whole, the factor to the
// output. The last threads find meanwhile where rows lie in the output.
template <class T>
__device__ __forceinline__ void merge_stats(const VerifyParams& p, const Split& split, int slot,
                                            const SharedMemory<T>& smem) {
  static_assert(T::kRows <= T::kThreads);
  const int thread = recomputed_thread();
  const bool whole = split.worker_count == 1 && smem.cluster() == 1;
  if (thread < T::kRows) {
    const int row = thread;
    float2* stats = smem.stats() + row;
    float highest = kNoScore, total = 0.f;
#pragma unroll
    for (int g = 0; g < T::kStatGroups; ++g) highest = fmaxf(highest, stats[g * T::kRows].x);
#pragma unroll
    for (int g = 0; g < T::kStatGroups; ++g) {
      const float weight = exp2_fast(stats[g * T::kRows].x - highest);
      total += stats[g * T::kRows].y * weight;
      if constexpr (T::kMergeGroups > 1) stats[g * T::kRows].x = weight;
    }
    if (whole && row < split.row_count) total = finish_row<T::kFp8>(p, split, row, highest, total, true);
    if (!whole && smem.cluster() == 1)
      __stcg(p.partial_stats + static_cast<int64_t>(slot) * T::kRows + row, make_float2(highest, total));
    smem.rows()[row] = make_float2(highest, total);
  }
  const int row = T::kThreads - 1 - thread;
  if (whole && row < min(T::kRows, split.row_count)) smem.outputs()[row] = output_row(p, split, row);
}

// Calls `emit` with the row and the first position of each quad of kMergeSlices slices that is this thread's.
template <class T, class Emit>
__device__ __forceinline__ void for_quads(int rows, Emit emit) {
  constexpr int kQuads = T::kMergeSlices * 4;
  const int thread = recomputed_thread();
  if constexpr (T::kThreads % kQuads == 0) {  // a thread's are one above the other
    const int position = thread % kQuads * 4;
#pragma unroll 2
    for (int row = thread / kQuads; row < rows; row += T::kThreads / kQuads) emit(row, position);
  } else {
#pragma unroll 2
    for (int i = thread; i < rows * kQuads; i += T::kThreads) emit(i / kQuads, i % kQuads * 4);
  }
}

// Adds up what kMergeGroups groups left in shared memory, for kMergeSlices slices of the head from `begin` on: into the
// output where nobody else has a part of the work tile, else into shared memory (for the cluster) or the workspace.
template <class T>
__device__ __forceinline__ void emit_slices(const VerifyParams& p, const Split& split, int slot, int begin,
                                            const float* merge, int group_stride, const SharedMemory<T>& smem) {
  const int rows = min(T::kRows, split.row_count);
  const auto add_up = [&](int row, int position) {
    const auto part = [&](int g) {
      return *reinterpret_cast<const float4*>(merge + g * group_stride + row * T::kMergeStride + position);
    };
    if constexpr (T::kMergeGroups == 1) return part(0);
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int g = 0; g < T::kMergeGroups; ++g) {
      const float4 own = part(g);
      const float weight = smem.stats()[g * (T::kStatGroups / T::kMergeGroups) * T::kRows + row].x;
      total.x += own.x * weight;
      total.y += own.y * weight;
      total.z += own.z * weight;
      total.w += own.w * weight;
    }
    return total;
  };
  const auto put_out = [&](bool aligned) {
    for_quads<T>(rows, [&](int row, int position) {
      store_four<T>(p, aligned, smem.outputs()[row], begin * 16 + position, add_up(row, position), smem.rows()[row].y);
    });
  };
  const bool in_cluster = smem.cluster() > 1;
  if (split.worker_count > 1 || in_cluster) {
    float* target = in_cluster ? smem.sum() : p.partial_output + static_cast<int64_t>(slot) * T::kRows * T::kHeadSize;
    const int target_stride = in_cluster ? T::kSumStride : T::kHeadSize;
    for_quads<T>(rows, [&](int row, int position) {
      *reinterpret_cast<float4*>(target + row * target_stride + begin * 16 + position) = add_up(row, position);
    });
  } else if (p.aligned) {
    put_out(true);
  } else {
    put_out(false);
  }
}

}  // namespace nwor
