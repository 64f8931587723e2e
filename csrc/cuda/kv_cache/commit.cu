// commit_window: the accepted tokens of all layers into the paged cache, one launch.
//
// A thread block serves K or V of one layer and either one request (a prefix of its window) or a few slots (each
// with the row that goes there). A thread has one place of a token's row, one or two 16-byte pieces, and walks the
// tokens, several of them in flight: what depends on the place, its head's scale too, is found once. K and V of the
// same tokens are neighbours in the grid: they lie side by side in the cache, those of a small head in one line of
// memory, and so are written at about the same time.
#include "common/fp8.cuh"
#include "kv_cache/rows.cuh"
#include "kv_cache/params.h"

namespace nwor {
namespace {

constexpr int kSlotsPerBlock = 4;  // with source_index
constexpr int kMaxInFlight = 5;    // tokens of a thread
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

// Whether rows can be read 16 bytes at a time and written as many elements at a time.
template <class Element, class CacheElement>
__device__ __forceinline__ bool can_vectorize(const Side<Element, CacheElement>& side, int head_size, int elements) {
  const uintptr_t source = reinterpret_cast<uintptr_t>(side.source) |
                           static_cast<uintptr_t>((side.source_token | side.source_head) * sizeof(Element));
  const uintptr_t cache = reinterpret_cast<uintptr_t>(side.cache) |
                          static_cast<uintptr_t>((side.block | side.token | side.head) * sizeof(CacheElement));
  return head_size % elements == 0 && side.element == 1 && source % 16 == 0 &&
         cache % (elements * sizeof(CacheElement)) == 0;
}

// A thread's place of a token's row: where it begins in the window and in the cache, and its head's scale.
template <class Element, class CacheElement>
struct Place {
  const Element* source;
  CacheElement* cache;
  float scale;
};

template <class Element, class CacheElement>
__device__ __forceinline__ Place<Element, CacheElement> place_at(const Side<Element, CacheElement>& side, int place,
                                                                 const Divisor& places_per_head, int width) {
  const int head = divide(place, places_per_head);
  const int column = (place - head * static_cast<int>(places_per_head.value)) * width;
  float scale = side.scale;
  if constexpr (sizeof(CacheElement) != sizeof(Element)) {
    if (side.head_scales != nullptr) scale = __ldg(side.head_scales + head);
  }
  return {side.source + head * side.source_head + column, side.cache + head * side.head + column * side.element,
          scale};
}

// The window's row that goes to the cache for its token `token`, or -1 if none does.
__device__ __forceinline__ int source_row(const CommitParams& p, int token) {
  if (p.source_index == nullptr) return token;
  const int row = __ldg(p.source_index + token);
  return row < p.shape.tokens ? row : -1;
}

// A place's elements as they go to the cache, in one store. Only for scales that a reciprocal serves.
template <class Type, class CacheElement, int kPieces>
__device__ __forceinline__ void write(CacheElement* to, const uint4 (&data)[kPieces], const Quotient& by, bool e5m2) {
  using Element = typename Type::Element;
  constexpr int kWidth = 16 / sizeof(Element) * kPieces;
  if constexpr (sizeof(CacheElement) == sizeof(Element)) {
    static_assert(kPieces == 1);
    *reinterpret_cast<uint4*>(to) = data[0];
  } else {
    const Element* elements = reinterpret_cast<const Element*>(data);
    uint32_t words[kWidth / 4];
#pragma unroll
    for (int e = 0; e < kWidth; e += 4) {
      float x[4] = {Type::widen(elements[e]), Type::widen(elements[e + 1]), Type::widen(elements[e + 2]),
                    Type::widen(elements[e + 3])};
      by.divide_exact(x);
      words[e / 4] = round_pair(x[0], x[1], e5m2) | round_pair(x[2], x[3], e5m2) << 16;
    }
    if constexpr (kWidth == 16) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (kWidth == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = words[0];
    }
  }
}

// The same, an element at a time and for all that is seldom: rows that are not aligned, scales that no reciprocal serves,
// caches of 2^31 slots and more.
template <class Type, class CacheElement>
__device__ __forceinline__ void write_singly(const CommitParams& p, const RowCut& cut,
                                             const Side<typename Type::Element, CacheElement>& side,
                                             const Place<typename Type::Element, CacheElement>& place, int width,
                                             int first, int count, const Lane& lane) {
#pragma unroll 1
  for (int token = first + lane.token; token < first + count; token += lane.step) {
    const int from = source_row(p, token);
    const int64_t slot = __ldg(p.slots + token);
    if (from < 0 || slot < 0 || slot >= p.shape.num_slots) continue;
    const auto* source = place.source + from * side.source_token;
    CacheElement* to = place.cache + far_slot_offset(slot, cut.block_size, side.block, side.token);
#pragma unroll 1
    for (int e = 0; e < width; ++e) {
      if constexpr (sizeof(CacheElement) == sizeof(*source)) {
        to[e] = source[e];
      } else {
        to[e] = round_pair(Type::widen(source[e]) / place.scale, 0.f, p.is_e5m2) & 0xff;
      }
    }
  }
}

template <class Type, class CacheElement, int kPieces>
__global__ void __launch_bounds__(kRowThreads, kBlocksPerSm)
    commit_kernel(const __grid_constant__ CommitParams p, const __grid_constant__ RowCut cut) {
  using Element = typename Type::Element;
  constexpr int kWidth = 16 / sizeof(Element) * kPieces;  // elements of a place
  constexpr int kInFlight = kPieces == 1 ? kMaxInFlight : (kMaxInFlight + 1) / 2;
  const int layer = blockIdx.y, part = blockIdx.x / 2;
  const bool is_value = blockIdx.x % 2 == 1;

  // Before it is known whether there is anything to do: neither load waits for the other.
  const auto side = make_side<Element, CacheElement>(p.table, is_value, is_value ? p.v_scales : p.k_scales,
                                                     is_value ? p.v_scale_per_head : p.k_scale_per_head, layer,
                                                     p.shape.num_kv_heads);
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

  if (p.shape.num_slots > INT32_MAX || !can_vectorize(side, p.shape.head_size, kWidth)) {
    const int elements = static_cast<int>(cut.elements.value);
    for (int chunk = blockIdx.z; chunk * kRowThreads < elements; chunk += gridDim.z) {
      const Lane lane(cut.elements, chunk);
      if (lane.place >= elements) continue;
      const auto place = place_at(side, lane.place, cut.head_size, 1);
      write_singly<Type>(p, cut, side, place, 1, first, count, lane);
    }
    return;
  }

  const Lane lane(cut.places, blockIdx.z);
  if (lane.place >= static_cast<int>(cut.places.value)) return;
  const auto place = place_at(side, lane.place, cut.places_per_head, kWidth);
  if constexpr (sizeof(CacheElement) != sizeof(Element)) {
    if (!Quotient::is_exact(place.scale)) {  // one by one: seldom, and code that is not there need not be fetched
      write_singly<Type>(p, cut, side, place, kWidth, first, count, lane);
      return;
    }
  }
  for (int base = lane.token; base < count; base += lane.step * kInFlight) {
    // First all loads: neither a row's numbers nor its slot waits for the other.
    uint4 data[kInFlight][kPieces];
    int64_t slots[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      slots[i] = -1;
      const int token = base + i * lane.step;
      if (token >= count) continue;
      const int from = source_row(p, first + token);
      if (from < 0) continue;
      slots[i] = __ldg(p.slots + first + token);
      const uint4* pieces = reinterpret_cast<const uint4*>(place.source + from * side.source_token);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) data[i][piece] = __ldcs(pieces + piece);
    }
    const Quotient by(place.scale);  // while they are under way
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (slots[i] < 0 || slots[i] >= p.shape.num_slots) continue;
      CacheElement* to = place.cache + slot_offset(static_cast<int>(slots[i]), cut.block_size, side.block, side.token);
      write<Type, CacheElement, kPieces>(to, data[i], by, p.is_e5m2);
    }
  }
}

template <class Type, class CacheElement, int kPieces>
cudaError_t launch_pieces(const CommitParams& p, int parts, cudaStream_t stream) {
  const RowCut cut(p.shape, 16 / sizeof(typename Type::Element) * kPieces);
  const dim3 grid(2 * parts, p.shape.layers, cut.blocks());
  commit_kernel<Type, CacheElement, kPieces><<<grid, kRowThreads, 0, stream>>>(p, cut);
  return cudaGetLastError();
}

template <class Type>
cudaError_t launch(const CommitParams& p, cudaStream_t stream) {
  const int parts =
      p.commit_counts != nullptr ? p.shape.batch : (p.shape.tokens + kSlotsPerBlock - 1) / kSlotsPerBlock;
  if (parts == 0 || p.shape.layers == 0 || p.shape.num_kv_heads == 0 || p.shape.head_size == 0) return cudaSuccess;
  if (!p.is_fp8) return launch_pieces<Type, typename Type::Element, 1>(p, parts, stream);
  // Two pieces at a time where the cache's rows can be as aligned as that, which the table alone knows.
  constexpr int kWidth = 2 * 16 / sizeof(typename Type::Element);
  return p.shape.head_size % kWidth == 0 ? launch_pieces<Type, uint8_t, 2>(p, parts, stream)
                                         : launch_pieces<Type, uint8_t, 1>(p, parts, stream);
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
