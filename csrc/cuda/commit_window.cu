// commit_window: the accepted tokens of all layers into the paged cache, one launch.
//
// A thread block serves K or V of one layer and either one request (a prefix of its window) or a few slots (each
// with the row that goes there). Its threads walk the tokens in 16-byte pieces, several loads in flight each.
#include <algorithm>

#include "mma.cuh"
#include "window_params.h"

namespace nwor {
namespace {

constexpr int kThreads = 128;
constexpr int kSlotsPerBlock = 4;  // with source_index
constexpr int kInFlight = 4;

struct FloatType { using Element = float; static __device__ float widen(float x) { return x; } };
struct HalfType {
  using Element = uint16_t;
  static __device__ float widen(uint16_t x) { return __half2float(__ushort_as_half(x)); }
};
struct BfloatType {
  using Element = uint16_t;
  static __device__ float widen(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
};

// One tensor, K or V, of one layer.
template <class Element, class CacheElement>
struct Side {
  const Element* source;
  CacheElement* cache;
  int64_t source_token, source_head;
  int64_t block, token, head, element;
  float scale;
  const float* head_scales;  // null: `scale` serves all heads
};

template <class Element, class CacheElement>
__device__ __forceinline__ Side<Element, CacheElement> make_side(const LayerRow* table, bool value, const float* scales,
                                                                 bool per_head, int layer, int heads) {
  const int64_t* row = reinterpret_cast<const int64_t*>(table + layer);
  const auto column = [&](LayerColumn key_column, LayerColumn value_column) {
    return __ldg(row + (value ? value_column : key_column));
  };
  Side<Element, CacheElement> side;
  side.source = reinterpret_cast<const Element*>(column(kKeyPtr, kValuePtr));
  side.cache = reinterpret_cast<CacheElement*>(column(kKeyCachePtr, kValueCachePtr));
  side.source_token = column(kKeyTokenStride, kValueTokenStride);
  side.source_head = column(kKeyHeadStride, kValueHeadStride);
  side.block = column(kKeyCacheBlockStride, kValueCacheBlockStride);
  side.token = column(kKeyCacheTokenStride, kValueCacheTokenStride);
  side.head = column(kKeyCacheHeadStride, kValueCacheHeadStride);
  side.element = column(kKeyCacheElementStride, kValueCacheElementStride);
  side.scale = 1.f;
  side.head_scales = nullptr;
  if (scales != nullptr) {
    if (per_head) {
      side.head_scales = scales + static_cast<int64_t>(layer) * heads;
    } else {
      side.scale = __ldg(scales + layer);
    }
  }
  return side;
}

template <class Element, class CacheElement>
__device__ __forceinline__ bool can_vectorize(const Side<Element, CacheElement>& side, int head_size) {
  constexpr int kWidth = 16 / sizeof(Element);
  const uintptr_t bytes = reinterpret_cast<uintptr_t>(side.source) | static_cast<uintptr_t>(side.source_token * sizeof(Element)) |
                          static_cast<uintptr_t>(side.source_head * sizeof(Element));
  const uintptr_t cache = reinterpret_cast<uintptr_t>(side.cache) |
                          static_cast<uintptr_t>((side.block | side.token | side.head) * sizeof(CacheElement));
  return head_size % kWidth == 0 && side.element == 1 && bytes % 16 == 0 && cache % (kWidth * sizeof(CacheElement)) == 0;
}

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint32_t bits_of(uint16_t x) { return x; }

template <class Type, class CacheElement>
__device__ __forceinline__ CacheElement convert(typename Type::Element x, float scale, bool e5m2) {
  if constexpr (sizeof(CacheElement) == 1) {
    return quantize_fp8(Type::widen(x), scale, e5m2);
  } else {
    return x;
  }
}

template <class Type, class CacheElement>
__global__ void __launch_bounds__(kThreads, 10) commit_kernel(const CommitParams p) {
  using Element = typename Type::Element;
  constexpr int kWidth = 16 / sizeof(Element);  // elements per 16-byte load
  const int layer = blockIdx.y;
  const int heads = p.shape.num_kv_heads, head_size = p.shape.head_size;

  int first, count;
  if (p.commit_counts != nullptr) {
    first = __ldg(p.query_start_loc + blockIdx.x);
    count = min(__ldg(p.query_start_loc + blockIdx.x + 1) - first, __ldg(p.commit_counts + blockIdx.x));
  } else {
    first = __ldg(p.query_start_loc) + blockIdx.x * kSlotsPerBlock;
    count = min(__ldg(p.query_start_loc + p.shape.batch) - first, kSlotsPerBlock);
  }
  count = min(count, p.shape.tokens - first);
  if (count <= 0) return;

  const bool is_value = blockIdx.z == 1;
  const auto side =
      make_side<Element, CacheElement>(p.table, is_value, is_value ? p.v_scales : p.k_scales,
                                       is_value ? p.v_scale_per_head : p.k_scale_per_head, layer, heads);
  const bool vectorized = can_vectorize(side, head_size);
  const int width = vectorized ? kWidth : 1;
  const int per_head = head_size / width;
  const int per_token = heads * per_head;
  const int pieces = count * per_token;

  for (int base = threadIdx.x; base < pieces; base += kThreads * kInFlight) {
    uint4 data[kInFlight];
    CacheElement* to[kInFlight];
    float scale[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int piece = base + i * kThreads;
      to[i] = nullptr;
      if (piece >= pieces) continue;
      const int token = piece / per_token;
      const int rest = piece - token * per_token;
      const int64_t slot = __ldg(p.slots + first + token);
      int source_row = first + token;
      if (p.source_index != nullptr) source_row = __ldg(p.source_index + first + token);
      if (slot < 0 || slot >= p.shape.num_slots || source_row < 0 || source_row >= p.shape.tokens) continue;
      const int head = rest / per_head;
      const int column = (rest - head * per_head) * width;
      const Element* from = side.source + source_row * side.source_token + head * side.source_head + column;
      if (vectorized) {
        data[i] = __ldcs(reinterpret_cast<const uint4*>(from));
      } else {
        data[i].x = bits_of(*from);
      }
      const int64_t block = static_cast<uint32_t>(slot) == slot
                                ? static_cast<uint32_t>(slot) / static_cast<uint32_t>(p.shape.block_size)
                                : slot / p.shape.block_size;
      to[i] = side.cache + block * side.block + (slot - block * p.shape.block_size) * side.token + head * side.head +
              column * side.element;
      scale[i] = side.head_scales != nullptr ? __ldg(side.head_scales + head) : side.scale;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (to[i] == nullptr) continue;
      const Element* elements = reinterpret_cast<const Element*>(&data[i]);
      if (!vectorized) {
        *to[i] = convert<Type, CacheElement>(elements[0], scale[i], p.is_e5m2);
      } else if constexpr (sizeof(CacheElement) == sizeof(Element)) {
        *reinterpret_cast<uint4*>(to[i]) = data[i];
      } else {
        alignas(8) CacheElement converted[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; ++e)
          converted[e] = convert<Type, CacheElement>(elements[e], scale[i], p.is_e5m2);
        if constexpr (kWidth == 8) {
          *reinterpret_cast<uint2*>(to[i]) = *reinterpret_cast<const uint2*>(converted);
        } else {
          *reinterpret_cast<uint32_t*>(to[i]) = *reinterpret_cast<const uint32_t*>(converted);
        }
      }
    }
  }
}

template <class Type>
cudaError_t launch(const CommitParams& p, cudaStream_t stream) {
  const int blocks =
      p.commit_counts != nullptr ? p.shape.batch : (p.shape.tokens + kSlotsPerBlock - 1) / kSlotsPerBlock;
  if (blocks == 0 || p.shape.layers == 0 || p.shape.num_kv_heads == 0 || p.shape.head_size == 0) return cudaSuccess;
  const dim3 grid(blocks, p.shape.layers, 2);
  if (p.is_fp8) {
    commit_kernel<Type, uint8_t><<<grid, kThreads, 0, stream>>>(p);
  } else {
    commit_kernel<Type, typename Type::Element><<<grid, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_commit_window(const CommitParams& params, cudaStream_t stream) {
  switch (params.source) {
    case SourceType::kFloat:
      return launch<FloatType>(params, stream);
    case SourceType::kHalf:
      return launch<HalfType>(params, stream);
    case SourceType::kBfloat16:
      return launch<BfloatType>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace nwor
