// A commit of one group of layers, prepared once and launched in each step: what nwor/ops/commit_call.py fills in.
// The caller vouches for every address and size, as commit_window vouches for its tensors. Knows nothing of Torch.
#pragma once

#include <cstdint>

#include "layer_table.h"

namespace nwor {

struct CommitCall {
  const LayerRow* table;           // [layers], on the device
  const int64_t* slots;            // [tokens]
  const int32_t* query_start_loc;  // [batch + 1]
  const int32_t* source_index;     // [tokens]: the row that each slot gets, negative for none; or null
  const float* k_scales;           // [layers, k_scales_per_layer], or null
  const float* v_scales;
  int64_t layers, tokens, batch;
  int64_t num_kv_heads, head_size, block_size, num_blocks;
  int64_t k_scales_per_layer, v_scales_per_layer;  // 1 or num_kv_heads
  int64_t source;                                  // 0 float32, 1 float16, 2 bfloat16
  int64_t cache;                                   // 0 as the source, 1 fp8_e4m3, 2 fp8_e5m2
};

// Both libraries export `const char* nwor_{cpu,cuda}_commit(const CommitCall*, const int32_t* rejected, void* stream)`:
// writes each window but its last `rejected[i]` tokens, for i < batch, or by `source_index` alone where that is given,
// and returns null, or what went wrong. The text is valid until the thread's next call. `stream` is a cudaStream_t whose device is the current one; unused on a CPU.

}  // namespace nwor
