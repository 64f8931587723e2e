// Moving single tokens between window tensors, paged caches and logs: commit, log, restore. Knows nothing of Torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "convert.h"
#include "layer_table.h"

namespace nwor {
namespace {

inline float source_value(const void* source, int64_t index, Format format) {
  switch (format) {
    case Format::kFloat32:
      return static_cast<const float*>(source)[index];
    case Format::kFloat16:
      return float16_to_float(static_cast<const uint16_t*>(source)[index]);
    default:
      return bfloat16_to_float(static_cast<const uint16_t*>(source)[index]);
  }
}

template <typename T>
inline void copy_strided(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t count) {
  if (to_stride == 1 && from_stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
  } else {
    for (int64_t i = 0; i < count; ++i) to[i * to_stride] = from[i * from_stride];
  }
}

// Copies `count` elements of `bytes` bytes each between addresses and strides in elements.
inline void copy_elements(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t count,
                          int64_t bytes) {
  switch (bytes) {
    case 1:
      return copy_strided(static_cast<uint8_t*>(to), to_stride, static_cast<const uint8_t*>(from), from_stride, count);
    case 2:
      return copy_strided(static_cast<uint16_t*>(to), to_stride, static_cast<const uint16_t*>(from), from_stride,
                          count);
    default:
      return copy_strided(static_cast<uint32_t*>(to), to_stride, static_cast<const uint32_t*>(from), from_stride,
                          count);
  }
}

struct SlotShape {
  int64_t num_kv_heads, head_size, block_size;
};

inline char* cache_row(int64_t cache, const int64_t (&stride)[4], int64_t slot, int64_t head, int64_t block_size,
                       int64_t bytes) {
  const int64_t element = slot / block_size * stride[0] + slot % block_size * stride[1] + head * stride[2];
  return reinterpret_cast<char*>(cache) + element * bytes;
}

// Writes one head of one token to a cache, as vLLM's CPU writer does.
inline void commit_row(void* to, int64_t to_stride, const void* from, int64_t head_size, Format source, Format cache,
                       float scale) {
  if (!is_fp8(cache)) {
    copy_elements(to, to_stride, from, 1, head_size, format_bytes(cache));
    return;
  }
  const float inverse = 1.0f / scale;
  uint8_t* bytes = static_cast<uint8_t*>(to);
  for (int64_t i = 0; i < head_size; ++i) {
    const float x = source_value(from, i, source);
    bytes[i * to_stride] = cache == Format::kFp8E4M3 ? float_to_fp8_e4m3(x, inverse) : float_to_fp8_e5m2(x, inverse);
  }
}

// A layer's scales: none (1.0), one for all heads, or one per head.
struct Scales {
  const float* values;
  bool per_head;

  float of(int64_t head) const { return values == nullptr ? 1.0f : values[per_head ? head : 0]; }
};

// All heads of one token of one layer: row `row` of its keys and values to `slot`.
inline void commit_token(const LayerRow& layer, const SlotShape& shape, int64_t row, int64_t slot, Format source,
                         Format cache, const Scales& k_scales, const Scales& v_scales) {
  const int64_t from_bytes = format_bytes(source), to_bytes = format_bytes(cache);
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    commit_row(cache_row(layer.key_cache, layer.key_cache_stride, slot, head, shape.block_size, to_bytes),
               layer.key_cache_stride[3],
               reinterpret_cast<const char*>(layer.key) +
                   (row * layer.key_token_stride + head * layer.key_head_stride) * from_bytes,
               shape.head_size, source, cache, k_scales.of(head));
    commit_row(cache_row(layer.value_cache, layer.value_cache_stride, slot, head, shape.block_size, to_bytes),
               layer.value_cache_stride[3],
               reinterpret_cast<const char*>(layer.value) +
                   (row * layer.value_token_stride + head * layer.value_head_stride) * from_bytes,
               shape.head_size, source, cache, v_scales.of(head));
  }
}

// Raw bytes of all heads of one token between a cache and a row of the log.
inline void move_token(int64_t cache, const int64_t (&stride)[4], const SlotShape& shape, int64_t slot, char* log,
                       int64_t bytes, bool to_log) {
  for (int64_t head = 0; head < shape.num_kv_heads; ++head, log += shape.head_size * bytes) {
    char* row = cache_row(cache, stride, slot, head, shape.block_size, bytes);
    if (to_log) {
      copy_elements(log, 1, row, stride[3], shape.head_size, bytes);
    } else {
      copy_elements(row, stride[3], log, 1, shape.head_size, bytes);
    }
  }
}

}  // namespace
}  // namespace nwor
