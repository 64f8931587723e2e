// Arguments of the CPU verify attention kernels, and the table of kernels that each instruction set provides.
#pragma once

#include <cstdint>

#include "formats.h"

namespace nwor {

constexpr int64_t kMaxWindow = 64;    // bits in an ancestor mask
constexpr int64_t kTileTokens = 64;   // keys that are multiplied at a time
constexpr int64_t kChunkRows = 32;    // query rows that a work item handles
constexpr int64_t kTransposed = 16;   // keys that are transposed at a time

constexpr int64_t padded_head(int64_t head_size) { return (head_size + 15) / 16 * 16; }

// Floats of scratch that one worker needs.
constexpr int64_t scratch_floats(int64_t head_size) {
  const int64_t padded = padded_head(head_size);
  return 2 * kChunkRows * padded + kChunkRows * kTileTokens + 2 * kTileTokens * padded + kTransposed * padded +
         4 * kChunkRows;
}

// Floats of a partial result: per row the accumulated values, their maximum and their sum.
constexpr int64_t partial_floats(int64_t head_size) { return kChunkRows * (padded_head(head_size) + 16); }

// [tokens in pages, heads, head size] with any strides, in elements.
struct Paged {
  const void* base;
  int64_t block, token, head, element;
};

// [tokens, heads, head size] with the last dimension contiguous.
struct Rows {
  const void* base;
  int64_t token, head;
};

struct VerifyParams {
  Rows query, key, value;           // [T, Hq, D], [T, Hk, D], [T, Hk, D]
  Paged key_cache, value_cache;     // [num_blocks, block_size, Hk, D]
  const int32_t* block_table;       // [>= B, max_blocks]
  int64_t block_table_row;
  const int32_t* query_start_loc;   // [B + 1]
  const int32_t* seq_lens;          // [B]
  void* output;                     // [T, Hq, D]
  int64_t output_token, output_head;
  float* lse;                       // [Hq, T] or null
  int64_t lse_head, lse_token;
  const float* k_scale;             // null, or 1 or Hk numbers
  const float* v_scale;
  const float* q_scale;             // of a query in e4m3
  bool k_scale_per_head, v_scale_per_head, q_scale_per_head;
  const void* sinks;                // [Hq] or null
  Format sinks_format;
  const int64_t* ancestor_mask;     // [T] or null
  int64_t num_heads, num_kv_heads, head_size, block_size;
  Format format;                    // of key, value and output
  Format query_format;              // the same, or e4m3 beside fp8 caches
  Format cache_format;
  float scale, softcap;
  int64_t sliding_window;           // -1: none
};

// A share of one request's attention for one KV head: some query rows against a range of the context and, for the
// last share of a range, the window. Query row r is window token r / group and query head r % group of the group.
struct WorkItem {
  int32_t request, kv_head;
  int32_t first_row, rows;
  int64_t begin, end;  // tokens of the context
  bool with_window;
  float* partial;      // null: the result is complete and goes to the output
};

struct VerifyKernels {
  const char* name;
  void (*attend)(const VerifyParams&, const WorkItem&, float* scratch);
  // Merges `count` partial results of the same rows and writes the output.
  void (*combine)(const VerifyParams&, const WorkItem* items, int64_t count);
};

const VerifyKernels& verify_kernels_baseline();
#ifdef NWOR_X86_KERNELS
const VerifyKernels& verify_kernels_avx2();
const VerifyKernels& verify_kernels_avx512();
#endif

// The best that the running machine supports.
const VerifyKernels& verify_kernels();

}  // namespace nwor
