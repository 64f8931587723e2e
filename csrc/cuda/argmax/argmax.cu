// argmax_rows: the index of the largest element of each row, one launch.
//
// A row is cut into parts, one thread block each. A block reduces its part to a key, an ordered 64-bit number with the
// value in its high half and the inverted index in its low half, so that the largest key is the largest value at its
// lowest index. The keys of a row's parts meet in an atomicMax; the block that arrives last writes the index and
// leaves zeros behind for the next launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "argmax/params.h"

namespace nwor {
namespace {

using Key = unsigned long long;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kInFlight = 4;     // 16-byte pieces that a thread asks for at once
constexpr int kBlocksPerSm = 4;  // of all rows together, where rows are long enough for as many

struct FloatLogits {
  using Element = float;
  static __device__ __forceinline__ float widen(float x) { return x; }
  // Whether an element of the piece is more than `best`, or is a NaN.
  static __device__ __forceinline__ bool beats(const uint4& piece, float best) {
    return !(__uint_as_float(piece.x) <= best) || !(__uint_as_float(piece.y) <= best) ||
           !(__uint_as_float(piece.z) <= best) || !(__uint_as_float(piece.w) <= best);
  }
};

// Two 16-bit numbers at a time; a NaN among them stays one.
template <class Pair>
__device__ __forceinline__ Pair pair_max(const uint4& piece) {
  const Pair* pairs = reinterpret_cast<const Pair*>(&piece);
  return __hmax2_nan(__hmax2_nan(pairs[0], pairs[1]), __hmax2_nan(pairs[2], pairs[3]));
}

struct HalfLogits {
  using Element = uint16_t;
  static __device__ __forceinline__ float widen(uint16_t x) { return __half2float(__ushort_as_half(x)); }
  static __device__ __forceinline__ bool beats(const uint4& piece, float best) {
    const float2 two = __half22float2(pair_max<__half2>(piece));
    return !(two.x <= best) || !(two.y <= best);
  }
};

struct BfloatLogits {
  using Element = uint16_t;
  static __device__ __forceinline__ float widen(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
  static __device__ __forceinline__ bool beats(const uint4& piece, float best) {
    const float2 two = __bfloat1622float2(pair_max<__nv_bfloat162>(piece));
    return !(two.x <= best) || !(two.y <= best);
  }
};

// Bits that order as the numbers do: -0 as +0, every NaN above all else.
__device__ __forceinline__ uint32_t ordered(float x) {
  if (x != x) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(x + 0.f);  // -0 + 0 is +0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ Key make_key(float value, int index) {
  return static_cast<Key>(ordered(value)) << 32 | ~static_cast<uint32_t>(index);
}

__device__ __forceinline__ int64_t index_of(Key key) { return static_cast<uint32_t>(~key); }

__device__ __forceinline__ Key warp_max(Key key) {
  const uint32_t value = static_cast<uint32_t>(key >> 32);
  const uint32_t most = __reduce_max_sync(0xffffffffu, value);
  const uint32_t low = __reduce_max_sync(0xffffffffu, value == most ? static_cast<uint32_t>(key) : 0u);
  return static_cast<Key>(most) << 32 | low;
}

// The largest key of a thread block; only thread 0 has it.
__device__ __forceinline__ Key block_max(Key key) {
  __shared__ Key of_warps[kWarps];
  key = warp_max(key);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x >= 32) return 0;
  return warp_max(threadIdx.x < kWarps ? of_warps[threadIdx.x] : 0);
}

// Block (x, y): part y of row x, pieces y * per_part and following.
template <class Type>
__global__ void __launch_bounds__(kThreads) argmax_kernel(const __grid_constant__ ArgmaxParams p, int per_part) {
  using Element = typename Type::Element;
  constexpr int kWidth = 16 / sizeof(Element);
  const int64_t row = blockIdx.x;
  const Element* logits = static_cast<const Element*>(p.logits) + row * p.row_stride;

  // A row begins anywhere: what stands before its first 16-byte boundary, and what is left at its end, goes apart.
  const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(logits) % 16 / sizeof(Element));
  const int head = min((kWidth - offset) % kWidth, p.vocab);
  const int pieces = (p.vocab - head) / kWidth;
  const int tail = p.vocab - head - pieces * kWidth;
  const uint4* aligned = reinterpret_cast<const uint4*>(logits + head);

  // Where nothing is more than -inf, each thread names index 0, as is right for a row of nothing else.
  float best = -INFINITY;
  int best_index = 0;
  const int first = blockIdx.y * per_part;
  const int end = min(pieces, first + per_part);
  for (int base = first + static_cast<int>(threadIdx.x); base < end; base += kThreads * kInFlight) {
    uint4 data[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (base + i * kThreads < end) data[i] = __ldg(aligned + base + i * kThreads);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      // Pieces come in ascending order, so only what is more than the best before takes its place.
      if (base + i * kThreads >= end || !Type::beats(data[i], best)) continue;
      const Element* elements = reinterpret_cast<const Element*>(&data[i]);
      const int index = head + (base + i * kThreads) * kWidth;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float value = Type::widen(elements[e]);
        if (!(value <= best) && best == best) {
          best = value;
          best_index = index + e;
        }
      }
    }
  }
  Key key = make_key(best, best_index);
  if (blockIdx.y == 0 && static_cast<int>(threadIdx.x) < head + tail) {
    const int at = static_cast<int>(threadIdx.x);
    const int index = at < head ? at : p.vocab - tail + (at - head);
    key = max(key, make_key(Type::widen(logits[index]), index));
  }

  key = block_max(key);
  if (threadIdx.x != 0) return;
  if (gridDim.y == 1) {
    p.output[row] = index_of(key);
    return;
  }
  ArgmaxRow& shared = p.workspace[row];
  atomicMax(&shared.best, key);
  __threadfence();
  if (atomicAdd(&shared.arrived, 1ull) != gridDim.y - 1) return;
  __threadfence();
  p.output[row] = index_of(__ldcg(&shared.best));
  shared.best = 0;
  shared.arrived = 0;
}

template <class Type>
cudaError_t launch(const ArgmaxParams& p, int multiprocessors, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  constexpr int kWidth = 16 / sizeof(typename Type::Element);
  // Parts are whole rounds of a block's threads: 4 KiB or more, so that a block's own cost does not outweigh them.
  const int rounds = std::max((p.vocab / kWidth + kThreads - 1) / kThreads, 1);
  const int wanted = (kBlocksPerSm * multiprocessors + p.rows - 1) / p.rows;
  const int rounds_each = (rounds + wanted - 1) / wanted;
  const int parts = (rounds + rounds_each - 1) / rounds_each;
  argmax_kernel<Type><<<dim3(p.rows, parts), kThreads, 0, stream>>>(p, rounds_each * kThreads);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_argmax_rows(const ArgmaxParams& params, int multiprocessors, cudaStream_t stream) {
  switch (params.type) {
    case LogitType::kFloat:
      return launch<FloatLogits>(params, multiprocessors, stream);
    case LogitType::kHalf:
      return launch<HalfLogits>(params, multiprocessors, stream);
    case LogitType::kBfloat16:
      return launch<BfloatLogits>(params, multiprocessors, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace nwor
