// log_slots and restore_slots: the bytes of all layers' slots into a log and back, one launch each.
#include "kv_cache/params.h"
#include "kv_cache/rows.cuh"

namespace nwor {
namespace {

constexpr int kInFlight = 4;  // tokens of a thread

// K or V of one layer's cache, in bytes.
struct CacheSide {
  char* cache;
  int64_t block, token, head, element;
};

__device__ __forceinline__ CacheSide cache_side(const SlotLogParams& p, int layer, bool value) {
  const int64_t* row = reinterpret_cast<const int64_t*>(p.table + layer);
  const auto bytes = [&](LayerColumn key_column, LayerColumn value_column) {
    return __ldg(row + (value ? value_column : key_column)) * p.element_bytes;
  };
  return {reinterpret_cast<char*>(__ldg(row + (value ? kValueCachePtr : kKeyCachePtr))),
          bytes(kKeyCacheBlockStride, kValueCacheBlockStride), bytes(kKeyCacheTokenStride, kValueCacheTokenStride),
          bytes(kKeyCacheHeadStride, kValueCacheHeadStride), bytes(kKeyCacheElementStride, kValueCacheElementStride)};
}

// Rows of tokens `first` to `end`, a word at a place: from the cache to `log`, or back. `log` is token 0's row.
template <bool kRestore, class Word>
__device__ __forceinline__ void move_rows(const SlotLogParams& p, const Divisor& block_size, const CacheSide& side,
                                          char* log, int first, int end, const Divisor& places,
                                          const Divisor& places_per_head) {
  const int all = static_cast<int>(places.value);
  const int64_t step = sizeof(Word) == 16 ? 16 : side.element;
  const bool far = p.shape.num_slots > INT32_MAX;
  for (int chunk = blockIdx.z; chunk * kRowThreads < all; chunk += gridDim.z) {
    const Lane lane(places, chunk);
    if (lane.place >= all) continue;
    const int head = divide(lane.place, places_per_head);
    char* in_cache =
        side.cache + head * side.head + (lane.place - head * static_cast<int>(places_per_head.value)) * step;
    Word* in_log = reinterpret_cast<Word*>(log) + lane.place;
    for (int base = first + lane.token; base < end; base += lane.step * kInFlight) {
      // All loads before the first store: the compiler can't know that they are of different places.
      Word data[kInFlight];
      Word* slot_word[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int token = base + i * lane.step;
        slot_word[i] = nullptr;
        if (token >= end) continue;
        const int64_t slot = __ldg(p.slots + token);
        if (slot < 0 || slot >= p.shape.num_slots) continue;
        const int64_t offset = far ? far_slot_offset(slot, block_size, side.block, side.token)
                                   : slot_offset(static_cast<int>(slot), block_size, side.block, side.token);
        slot_word[i] = reinterpret_cast<Word*>(in_cache + offset);
        data[i] = kRestore ? in_log[static_cast<int64_t>(token) * all] : *slot_word[i];
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (slot_word[i] == nullptr) continue;
        *(kRestore ? slot_word[i] : in_log + static_cast<int64_t>(base + i * lane.step) * all) = data[i];
      }
    }
  }
}

// One block: K or V (neighbours in x, as in the cache) of one layer (y) of one request's draft tokens, those from
// commit_counts on when restoring, and a part of their rows (z).
template <bool kRestore>
__global__ void __launch_bounds__(kRowThreads)
    slot_log_kernel(const __grid_constant__ SlotLogParams p, const __grid_constant__ RowCut cut) {
  const int layer = blockIdx.y, request = blockIdx.x / 2;
  const bool value = blockIdx.x % 2 == 1;
  const CacheSide side = cache_side(p, layer, value);
  const int begin = __ldg(p.query_start_loc + request), after = __ldg(p.query_start_loc + request + 1);
  const int end = min(after, p.shape.tokens);
  int kept = 1;
  if (kRestore) {
    const int given = __ldg(p.commit_counts + request);
    kept = max(p.rejected ? after - begin - given : given, 1);
  }
  if (kept >= end - begin) return;  // before they are added up: a count that is none may be any number

  const int head_bytes = p.shape.head_size * p.element_bytes;
  const int64_t token_bytes = static_cast<int64_t>(p.shape.num_kv_heads) * head_bytes;
  char* log = p.log + (static_cast<int64_t>(layer) * 2 + value) * p.log_rows * token_bytes;
  const uint64_t alignment = reinterpret_cast<uint64_t>(side.cache) | reinterpret_cast<uint64_t>(p.log) | head_bytes |
                             static_cast<uint64_t>(side.block | side.token | side.head);
  const auto move = [&](auto word, const Divisor& places, const Divisor& per_head) {
    move_rows<kRestore, decltype(word)>(p, cut.block_size, side, log, begin + kept, end, places, per_head);
  };
  if (side.element == p.element_bytes && alignment % 16 == 0) {
    move(uint4{}, cut.places, cut.places_per_head);
  } else if (p.element_bytes == 4) {
    move(uint32_t{}, cut.elements, cut.head_size);
  } else if (p.element_bytes == 2) {
    move(uint16_t{}, cut.elements, cut.head_size);
  } else {
    move(uint8_t{}, cut.elements, cut.head_size);
  }
}

template <bool kRestore>
cudaError_t launch_slot_log(const SlotLogParams& p, cudaStream_t stream) {
  if (p.shape.batch == 0 || p.shape.layers == 0 || p.shape.num_kv_heads == 0 || p.shape.head_size == 0)
    return cudaSuccess;
  const RowCut cut(p.shape, 16 / p.element_bytes);
  slot_log_kernel<kRestore>
      <<<dim3(2 * p.shape.batch, p.shape.layers, cut.blocks()), kRowThreads, 0, stream>>>(p, cut);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_log_slots(const SlotLogParams& params, cudaStream_t stream) {
  return launch_slot_log<false>(params, stream);
}

cudaError_t launch_restore_slots(const SlotLogParams& params, cudaStream_t stream) {
  return launch_slot_log<true>(params, stream);
}

}  // namespace nwor
