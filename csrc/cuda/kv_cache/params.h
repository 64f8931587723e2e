// Arguments of the kernels that move windows: commit, stage, log and restore. Knows nothing of Torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layer_table.h"

namespace nwor {

enum class SourceType : int { kFloat, kHalf, kBfloat16 };

struct SlotShape {
  int layers, tokens, batch;
  int num_kv_heads, head_size, block_size;
  int64_t num_slots;  // blocks * block_size; slots outside are skipped, as negative ones are
};

struct CommitParams {
  SlotShape shape;
  const LayerRow* table;         // [layers]
  const int64_t* slots;          // [tokens]
  const int* query_start_loc;    // [batch + 1]
  const int* commit_counts;      // [batch], or null
  bool rejected;                 // they count the window's last tokens, to leave out, instead of its first
  const int* source_index;       // [tokens], or null
  const float* k_scales;         // [layers] or [layers, heads], or null
  const float* v_scales;
  bool k_scale_per_head, v_scale_per_head;
  SourceType source;
  bool is_fp8, is_e5m2;
};

struct SlotLogParams {
  SlotShape shape;
  int element_bytes;           // of a cache element
  const LayerRow* table;       // [layers]
  char* log;                   // [layers, 2, log_rows, heads * head_size * element_bytes]
  int64_t log_rows;            // at least shape.tokens
  const int64_t* slots;        // [tokens]
  const int* query_start_loc;  // [batch + 1]
  const int* commit_counts;    // [batch]; null when logging
  bool rejected;               // as in CommitParams
};

// One layer of stage_window. Strides in elements.
struct StageLayer {
  const void *key, *value;
  void *staged_key, *staged_value;
  int64_t key_token, key_head, value_token, value_head;
  int64_t staged_key_token, staged_key_head, staged_value_token, staged_value_head;
};

constexpr int kMaxStageLayers = 256;  // travel as one kernel argument of at most 32764 bytes

struct StageParams {
  StageLayer layers[kMaxStageLayers];
  const int* num_tokens;  // 1 number
  int layer_count, tokens, num_kv_heads, head_size, element_bytes;
};

cudaError_t launch_commit_window(const CommitParams& params, cudaStream_t stream);
cudaError_t launch_log_slots(const SlotLogParams& params, cudaStream_t stream);
cudaError_t launch_restore_slots(const SlotLogParams& params, cudaStream_t stream);
cudaError_t launch_stage_window(const StageParams& params, cudaStream_t stream);

}  // namespace nwor
