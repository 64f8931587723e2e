// stage_window: the bytes of all layers' windows from one place to another, one launch.
#include "kv_cache/params.h"

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

cudaError_t launch_stage_window(const StageParams& params, cudaStream_t stream) {
  if (params.layer_count == 0 || params.tokens == 0) return cudaSuccess;
  const dim3 grid((params.tokens + kStageTokens - 1) / kStageTokens, params.layer_count, 2);
  stage_kernel<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace nwor
