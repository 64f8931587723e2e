// Arguments of the verify attention kernels. Knows nothing of Torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/fastdiv.h"

namespace nwor {

constexpr int kTileTokens = 16;     // cache tokens that a warp multiplies at a time
constexpr int kMaxWindow = 64;      // bits in an ancestor mask
constexpr int kMaxRows = 80;        // most query rows that one thread block of any instantiation keeps
constexpr int kMaxBlocksPerSm = 4;  // most resident thread blocks of any instantiation
constexpr int kMaxCluster = 8;      // thread blocks that add their results up through distributed shared memory

struct PlanEntry;  // work.h

struct VerifyParams {
  const void* query;             // [T, Hq, D]; 16 bits, or e4m3 where the caches are fp8
  const void* key;               // [T, Hk, D]
  const void* value;             // [T, Hk, D]
  const void* key_cache;         // [num_blocks, block_size, Hk, D]
  const void* value_cache;       // [num_blocks, block_size, Hk, D]
  const int* block_table;        // [>=B, max_blocks]
  const int* query_start_loc;    // [B+1]
  const int* seq_lens;           // [B]
  void* output;                  // [T, Hq, D]
  float* lse;                    // [Hq, T] or null
  const float* k_scale;          // 1 or Hk numbers, or null
  const float* v_scale;
  const float* q_scale;          // of an e4m3 query
  const void* sinks;             // [Hq] or null
  const int64_t* ancestor_mask;  // [T] or null

  // Strides in elements.
  int64_t query_token, query_head, key_token, key_head, value_token, value_head, output_token, output_head;
  int64_t key_cache_block, key_cache_token, key_cache_head;
  int64_t value_cache_block, value_cache_token, value_cache_head;
  int64_t block_table_row, lse_head;

  int batch, num_heads, num_kv_heads, block_size;
  float scale, softcap;
  int sliding_window;  // -1: none
  int k_scale_count, v_scale_count, q_scale_count;
  bool is_bf16;          // key, value, output and a query of 16 bits: bf16, else fp16
  bool is_fp8, is_e5m2;  // the caches
  bool fp8_query;        // e4m3
  bool sinks_float;      // sinks are float32, else key's dtype
  bool aligned;          // rows of query, key, value and output begin at multiples of 16 bytes

  // Set by launch_verify_attention().
  bool whole_tiles;    // cache blocks hold whole tiles, and their strides take 32 bits
  bool even_barriers;  // warpgroups in turns pass as many barriers (RowBarrier::even_out())
  // The caches' strides in bytes, as loads of whole tiles want them: in 32 bits.
  uint32_t key_block_bytes, key_token_bytes, value_block_bytes, value_token_bytes;
  Divisor group;          // query heads per KV head
  Divisor block;          // block_size
  Divisor by_blocks;      // thread blocks
  int* semaphores;        // one per thread block, zero between launches
  float2* partial_stats;  // [2 * thread blocks, rows] maximum and sum
  float* partial_output;  // [2 * thread blocks, rows, D]
  int cluster;            // thread blocks per cluster
  int clusters;
  int cluster_combine;    // half tiles that take a thread block as long as adding up a cluster's parts does
  int worker_combine;     // and as adding up those of workers,
  int split_combine;      // for each part a sixteenth of so many more
  const PlanEntry* plan;  // one per thread block, or null: then each thread block plans for itself
  uint32_t plan_key;      // what a plan's entries carry if they were made for such a launch
#if NWOR_PROBES
  unsigned long long* probes;  // see probes.cuh
#endif
};

#if NWOR_PROBES
// Where launches from now on note their times; null for nowhere.
void set_probes(unsigned long long* probes);
#endif

// Bytes of a plan for any launch on a device.
size_t verify_plan_bytes(int num_sms);

// Queues the kernel that writes the plan of launches with the same lengths, heads, dtypes, sliding window and
// max_query_len. Only these of the parameters are read.
cudaError_t launch_verify_plan(VerifyParams params, int head_size, int max_query_len, void* plan, int num_sms,
                               cudaStream_t stream);

// Bytes of workspace that any call with these limits needs.
size_t verify_workspace_bytes(int num_sms, int num_heads, int num_kv_heads, int head_size, int max_query_len);

// Queues one kernel. Returns cudaErrorInvalidValue where no kernel serves the shape.
cudaError_t launch_verify_attention(VerifyParams params, int head_size, int max_query_len, void* workspace,
                                    size_t workspace_bytes, int num_sms, cudaStream_t stream);

}  // namespace nwor
