// commit_window: the accepted tokens of all layers into the paged cache, one launch.
//
// A thread block serves K or V of one layer and either one request (a prefix of its window) or a few slots (each
// with the row that goes there). Its threads walk the tokens in 16-byte pieces, several loads in flight each. K and V
// of the same tokens are neighbours in the grid: they lie side by side in the cache, those of a small head in one line
// of memory, and so are written at about the same time.
#include <algorithm>

#include "divisor.h"
#include "fp8.cuh"
#include "mma.cuh"
#include "window_params.h"

namespace nwor {
namespace {

constexpr int kThreads = 128;
constexpr int kSlotsPerBlock = 4;  // with source_index
constexpr int kInFlight = 5;       // 16-byte pieces of a thread: all of a window of 5 tokens of 8 heads of 128
constexpr int kBlocksPerSm = 8;

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

// Elements of one 16-byte piece to fp8, two at a time.
template <class Type, int kWidth>
__device__ __forceinline__ void quantize_piece(const typename Type::Element (&elements)[kWidth], const Quotient& by,
                                               bool e5m2, uint16_t (&converted)[kWidth / 2]) {
  float numbers[kWidth];
#pragma unroll
  for (int e = 0; e < kWidth; ++e) numbers[e] = Type::widen(elements[e]);
  by.divide(numbers);
#pragma unroll
  for (int e = 0; e < kWidth; e += 2)
    converted[e / 2] = static_cast<uint16_t>(round_pair(numbers[e], numbers[e + 1], e5m2));
}

// What the launch knows of the pieces that a token's rows are cut into.
struct Pieces {
  Divisor per_token, per_head;            // 16-byte pieces
  Divisor elements_per_token, head_size;  // where rows are not aligned and an element is a piece
  Divisor block_size;
};

template <class Type, class CacheElement>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    commit_kernel(const __grid_constant__ CommitParams p, const __grid_constant__ Pieces cut) {
  using Element = typename Type::Element;
  constexpr int kWidth = 16 / sizeof(Element);  // elements per 16-byte load
  const int layer = blockIdx.y, part = blockIdx.x / 2;
  const bool is_value = blockIdx.x % 2 == 1;

  int first, count;
  if (p.commit_counts != nullptr) {
    first = __ldg(p.query_start_loc + part);
    const int length = __ldg(p.query_start_loc + part + 1) - first;
    const int given = __ldg(p.commit_counts + part);
    count = min(length, p.rejected ? length - given : given);
  } else {
    first = __ldg(p.query_start_loc) + part * kSlotsPerBlock;
    count = min(__ldg(p.query_start_loc + p.shape.batch) - first, kSlotsPerBlock);
  }
  count = min(count, p.shape.tokens - first);
  if (count <= 0) return;

  const auto side = make_side<Element, CacheElement>(p.table, is_value, is_value ? p.v_scales : p.k_scales,
                                                     is_value ? p.v_scale_per_head : p.k_scale_per_head, layer,
                                                     p.shape.num_kv_heads);
  const bool vectorized = can_vectorize(side, p.shape.head_size);
  const int width = vectorized ? kWidth : 1;
  const Divisor& per_token = vectorized ? cut.per_token : cut.elements_per_token;
  const Divisor& per_head = vectorized ? cut.per_head : cut.head_size;
  const int pieces = count * static_cast<int>(per_token.value);
  const Quotient whole_layer(side.scale);

  for (int base = threadIdx.x; base < pieces; base += kThreads * kInFlight) {
    // First all loads: neither a row's numbers nor its slot waits for the other.
    uint4 data[kInFlight];
    int64_t slots[kInFlight];
    int head_column[kInFlight];  // element of the token
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int piece = base + i * kThreads;
      slots[i] = -1;
      if (piece >= pieces) continue;
      const int token = divide(piece, per_token);
      const int rest = piece - token * static_cast<int>(per_token.value);
      const int head = divide(rest, per_head);
      const int column = (rest - head * static_cast<int>(per_head.value)) * width;
      const int source_row = p.source_index != nullptr ? __ldg(p.source_index + first + token) : first + token;
      if (source_row < 0 || source_row >= p.shape.tokens) continue;
      slots[i] = __ldg(p.slots + first + token);
      head_column[i] = head * p.shape.head_size + column;
      const Element* from = side.source + source_row * side.source_token + head * side.source_head + column;
      if (vectorized) {
        data[i] = __ldcs(reinterpret_cast<const uint4*>(from));
      } else {
        data[i].x = bits_of(*from);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t slot = slots[i];
      if (slot < 0 || slot >= p.shape.num_slots) continue;
      const int64_t block = slot <= INT32_MAX ? divide(static_cast<int>(slot), cut.block_size)
                                              : slot / p.shape.block_size;
      const int head = divide(head_column[i], cut.head_size);
      const int column = head_column[i] - head * p.shape.head_size;
      CacheElement* to = side.cache + block * side.block + (slot - block * p.shape.block_size) * side.token +
                         head * side.head + column * side.element;
      const Element* elements = reinterpret_cast<const Element*>(&data[i]);
      if constexpr (sizeof(CacheElement) == sizeof(Element)) {
        if (vectorized) {
          *reinterpret_cast<uint4*>(to) = data[i];
        } else {
          *to = elements[0];
        }
      } else {
        const Quotient by = side.head_scales != nullptr ? Quotient(__ldg(side.head_scales + head)) : whole_layer;
        if (vectorized) {
          alignas(8) uint16_t converted[kWidth / 2];
          quantize_piece<Type, kWidth>(*reinterpret_cast<const Element(*)[kWidth]>(elements), by, p.is_e5m2, converted);
          if constexpr (kWidth == 8) {
            *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(converted);
          } else {
            *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(converted);
          }
        } else {
          float number[1] = {Type::widen(elements[0])};
          by.divide(number);
          *to = round_pair(number[0], 0.f, p.is_e5m2) & 0xff;
        }
      }
    }
  }
}

template <class Type>
cudaError_t launch(const CommitParams& p, cudaStream_t stream) {
  const int parts =
      p.commit_counts != nullptr ? p.shape.batch : (p.shape.tokens + kSlotsPerBlock - 1) / kSlotsPerBlock;
  if (parts == 0 || p.shape.layers == 0 || p.shape.num_kv_heads == 0 || p.shape.head_size == 0) return cudaSuccess;
  const int per_head = std::max<int>(p.shape.head_size * sizeof(typename Type::Element) / 16, 1);
  const Pieces cut{Divisor(p.shape.num_kv_heads * per_head), Divisor(per_head),
                   Divisor(p.shape.num_kv_heads * p.shape.head_size), Divisor(p.shape.head_size),
                   Divisor(p.shape.block_size)};
  const dim3 grid(2 * parts, p.shape.layers);
  if (p.is_fp8) {
    commit_kernel<Type, uint8_t><<<grid, kThreads, 0, stream>>>(p, cut);
  } else {
    commit_kernel<Type, typename Type::Element><<<grid, kThreads, 0, stream>>>(p, cut);
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
