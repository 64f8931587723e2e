// stage_window, log_slots and restore_slots: raw bytes of all layers from one place to another, one launch each.
#include <algorithm>

#include "window_params.h"

namespace nwor {
namespace {

constexpr int kThreads = 256;

template <class Word>
__device__ __forceinline__ void copy_word(char* to, const char* from) {
  *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(from);
}

__device__ __forceinline__ void copy_bytes(char* to, const char* from, int bytes) {
  switch (bytes) {
    case 16:
      return copy_word<uint4>(to, from);
    case 4:
      return copy_word<uint32_t>(to, from);
    case 2:
      return copy_word<uint16_t>(to, from);
    default:
      return copy_word<uint8_t>(to, from);
  }
}

// One block: K or V (z) of one layer (y) of one request's draft tokens (x), those from commit_counts on when
// restoring.
template <bool kRestore>
__global__ void __launch_bounds__(kThreads) slot_log_kernel(const SlotLogParams p) {
  const int layer = blockIdx.y;
  const bool value = blockIdx.z == 1;
  int first = __ldg(p.query_start_loc + blockIdx.x);
  const int end = min(__ldg(p.query_start_loc + blockIdx.x + 1), p.shape.tokens);
  int kept = 1;
  if (kRestore) {
    const int given = __ldg(p.commit_counts + blockIdx.x);
    kept = max(p.rejected ? __ldg(p.query_start_loc + blockIdx.x + 1) - first - given : given, 1);
  }
  if (kept >= end - first) return;  // before they are added up: a count that is none may be any number
  first += kept;

  const int64_t* row = reinterpret_cast<const int64_t*>(p.table + layer);
  char* cache = reinterpret_cast<char*>(__ldg(row + (value ? kValueCachePtr : kKeyCachePtr)));
  const int64_t block_stride = __ldg(row + (value ? kValueCacheBlockStride : kKeyCacheBlockStride)) * p.element_bytes;
  const int64_t token_stride = __ldg(row + (value ? kValueCacheTokenStride : kKeyCacheTokenStride)) * p.element_bytes;
  const int64_t head_stride = __ldg(row + (value ? kValueCacheHeadStride : kKeyCacheHeadStride)) * p.element_bytes;
  const int64_t element_stride =
      __ldg(row + (value ? kValueCacheElementStride : kKeyCacheElementStride)) * p.element_bytes;
  const int head_bytes = p.shape.head_size * p.element_bytes;
  const int token_bytes = p.shape.num_kv_heads * head_bytes;
  char* log = p.log + (static_cast<int64_t>(layer) * 2 + value) * p.log_rows * token_bytes;

  const uint64_t alignment = reinterpret_cast<uint64_t>(cache) | reinterpret_cast<uint64_t>(p.log) | head_bytes |
                             static_cast<uint64_t>(block_stride | token_stride | head_stride);
  const int width = element_stride == p.element_bytes && alignment % 16 == 0 ? 16 : p.element_bytes;
  const int64_t step = width == 16 ? 16 : element_stride;
  const int per_head = head_bytes / width;
  const int per_token = token_bytes / width;
  const int pieces = (end - first) * per_token;
#pragma unroll 4
  for (int piece = threadIdx.x; piece < pieces; piece += kThreads) {
    const int token = piece / per_token;
    const int rest = piece - token * per_token;
    const int64_t slot = __ldg(p.slots + first + token);
    if (slot < 0 || slot >= p.shape.num_slots) continue;
    const int head = rest / per_head;
    const int64_t block = slot / p.shape.block_size;
    char* in_cache = cache + block * block_stride + (slot - block * p.shape.block_size) * token_stride +
                     head * head_stride + (rest - head * per_head) * step;
    char* in_log = log + static_cast<int64_t>(first + token) * token_bytes + static_cast<int64_t>(rest) * width;
    if constexpr (kRestore) {
      copy_bytes(in_cache, in_log, width);
    } else {
      copy_bytes(in_log, in_cache, width);
    }
  }
}

template <bool kRestore>
cudaError_t launch_slot_log(const SlotLogParams& p, cudaStream_t stream) {
  if (p.shape.batch == 0 || p.shape.layers == 0) return cudaSuccess;
  slot_log_kernel<kRestore><<<dim3(p.shape.batch, p.shape.layers, 2), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

// One block: a few tokens (x) of K or V (z) of one layer (y).
constexpr int kStageTokens = 4;

__global__ void __launch_bounds__(kThreads) stage_kernel(const __grid_constant__ StageParams p) {
  const int first = blockIdx.x * kStageTokens;
  const int count = min(min(__ldg(p.num_tokens), p.tokens) - first, kStageTokens);
  if (count <= 0) return;
  const StageLayer& layer = p.layers[blockIdx.y];
  const bool value = blockIdx.z == 1;
  const char* from = static_cast<const char*>(value ? layer.value : layer.key);
  char* to = static_cast<char*>(value ? layer.staged_value : layer.staged_key);
  const int64_t from_token = (value ? layer.value_token : layer.key_token) * p.element_bytes;
  const int64_t from_head = (value ? layer.value_head : layer.key_head) * p.element_bytes;
  const int64_t to_token = (value ? layer.staged_value_token : layer.staged_key_token) * p.element_bytes;
  const int64_t to_head = (value ? layer.staged_value_head : layer.staged_key_head) * p.element_bytes;
  const int head_bytes = p.head_size * p.element_bytes;
  const uint64_t alignment = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) | head_bytes |
                             static_cast<uint64_t>(from_token | from_head | to_token | to_head);
  const int width = alignment % 16 == 0 ? 16 : p.element_bytes;
  const int per_head = head_bytes / width;
  const int per_token = p.num_kv_heads * per_head;
#pragma unroll 4
  for (int piece = threadIdx.x; piece < count * per_token; piece += kThreads) {
    const int token = piece / per_token;
    const int rest = piece - token * per_token;
    const int head = rest / per_head;
    const int64_t column = static_cast<int64_t>(rest - head * per_head) * width;
    copy_bytes(to + (first + token) * to_token + head * to_head + column,
               from + (first + token) * from_token + head * from_head + column, width);
  }
}

}  // namespace

cudaError_t launch_log_slots(const SlotLogParams& params, cudaStream_t stream) {
  return launch_slot_log<false>(params, stream);
}

cudaError_t launch_restore_slots(const SlotLogParams& params, cudaStream_t stream) {
  return launch_slot_log<true>(params, stream);
}

cudaError_t launch_stage_window(const StageParams& params, cudaStream_t stream) {
  if (params.layer_count == 0 || params.tokens == 0) return cudaSuccess;
  const dim3 grid((params.tokens + kStageTokens - 1) / kStageTokens, params.layer_count, 2);
  stage_kernel<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace nwor
