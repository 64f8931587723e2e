// Checks that commit_window, log_slots and restore_slots share, on CPU and CUDA.
#pragma once

#include <vector>

#include "capacity.h"
#include "checks.h"
#include "layer_table.h"

namespace nwor {

struct SlotArguments {
  int64_t layers, tokens, batch, element_bytes;
};

inline SlotArguments check_slot_arguments(const Tensor& layer_table, const std::vector<Tensor>& caches,
                                          const Tensor& slots, const Tensor& query_start_loc, int64_t num_kv_heads,
                                          int64_t head_size, int64_t block_size, int64_t num_blocks) {
  check_dim(layer_table, "layer_table", 2);
  check_dtype(layer_table, "layer_table", ScalarType::Long);
  check_contiguous(layer_table, "layer_table");
  check_size(layer_table, "layer_table", 1, kColumns);
  const int64_t layers = layer_table.size(0);
  const int64_t count = static_cast<int64_t>(caches.size());
  STD_TORCH_CHECK(count > 0 && (count == layers || count == 2 * layers), "caches: has ", count, " tensors, wanted ",
                  layers, " (one a layer) or ", 2 * layers, " (keys, then values)");
  const int64_t bytes = static_cast<int64_t>(caches[0].element_size());
  for (const Tensor& cache : caches) {
    check_device(cache, "caches", layer_table);
    STD_TORCH_CHECK(static_cast<int64_t>(cache.element_size()) == bytes, "caches: element sizes differ");
  }
  STD_TORCH_CHECK(bytes == 1 || bytes == 2 || bytes == 4, "caches: elements have ", bytes, " bytes, wanted 1, 2 or 4");
  check_vector(query_start_loc, "query_start_loc", ScalarType::Int, 1, layer_table);
  check_vector(slots, "slots", ScalarType::Long, 0, layer_table);
  STD_TORCH_CHECK(num_kv_heads > 0, "num_kv_heads: is ", num_kv_heads, ", wanted at least 1");
  STD_TORCH_CHECK(head_size > 0, "head_size: is ", head_size, ", wanted at least 1");
  STD_TORCH_CHECK(block_size > 0, "block_size: is ", block_size, ", wanted at least 1");
  STD_TORCH_CHECK(num_blocks >= 0, "num_blocks: is ", num_blocks, ", wanted 0 or more");
  for (const Tensor& cache : caches)
    STD_TORCH_CHECK(cache_holds(cache.numel(), count == layers ? 2 : 1, num_kv_heads, head_size, block_size, num_blocks),
                    "caches: have ", cache.numel(), " elements, too few for num_kv_heads ", num_kv_heads,
                    " x head_size ", head_size, " x block_size ", block_size, " x num_blocks ", num_blocks);
  return {layers, slots.size(0), query_start_loc.size(0) - 1, bytes};
}

// The log of log_slots: uint8 [layers, 2, rows, bytes of one token's K or V].
inline void check_log(const Tensor& log, const SlotArguments& a, int64_t token_bytes, const Tensor& like) {
  check_dim(log, "log", 4);
  check_dtype(log, "log", ScalarType::Byte);
  check_device(log, "log", like);
  check_contiguous(log, "log");
  check_size(log, "log", 0, a.layers);
  check_size(log, "log", 1, 2);
  STD_TORCH_CHECK(log.size(2) >= a.tokens, "log: shape is ", shape_of(log), ", wanted at least ", a.tokens,
                  " rows in dimension 2");
  check_size(log, "log", 3, token_bytes);
}

// Per-layer scales: [L] or [L, num_kv_heads]. Returns the numbers per layer.
inline int64_t check_layer_scales(const Tensor& t, const char* name, int64_t layers, int64_t num_kv_heads,
                                  const Tensor& like) {
  check_dtype(t, name, ScalarType::Float);
  check_device(t, name, like);
  check_contiguous(t, name);
  const bool fits = (t.dim() == 1 && t.size(0) == layers) ||
                    (t.dim() == 2 && t.size(0) == layers && (t.size(1) == 1 || t.size(1) == num_kv_heads));
  STD_TORCH_CHECK(fits, name, ": shape is ", shape_of(t), ", wanted [", layers, "] or [", layers, ", ", num_kv_heads,
                  "]");
  return t.dim() == 1 ? 1 : t.size(1);
}

}  // namespace nwor
