// Columns of the layer table: int64 [L, kColumns], contiguous, one row of 128 bytes per layer, on the op's device.
// Made by nwor.ops.make_layer_table. Strides are in elements of the tensor that they belong to.
// Sources are [T, Hk, D] with element stride 1; caches are [num_blocks, block_size, Hk, D] with any strides.
#pragma once

#include <cstdint>

namespace nwor {

enum LayerColumn : int {
  kKeyPtr = 0,  // address of window K (0 where the caller has no source, as log_slots and restore_slots allow)
  kValuePtr,
  kKeyTokenStride,
  kKeyHeadStride,
  kValueTokenStride,
  kValueHeadStride,
  kKeyCachePtr,
  kValueCachePtr,
  kKeyCacheBlockStride,
  kKeyCacheTokenStride,
  kKeyCacheHeadStride,
  kKeyCacheElementStride,
  kValueCacheBlockStride,
  kValueCacheTokenStride,
  kValueCacheHeadStride,
  kValueCacheElementStride,
  kColumns,
};
static_assert(kColumns == 16, "nwor/ops/layer_table.py and both implementations rely on 16 columns");

// The same row as a struct, for reading it in one piece.
struct LayerRow {
  int64_t key, value;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int64_t key_cache, value_cache;
  int64_t key_cache_stride[4];    // block, token, head, element
  int64_t value_cache_stride[4];  // block, token, head, element
};
static_assert(sizeof(LayerRow) == kColumns * sizeof(int64_t), "LayerRow mirrors the columns");

}  // namespace nwor
