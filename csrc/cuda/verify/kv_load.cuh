// Where keys and values of a context lie, and the copies of them that both kernels have in common.
#pragma once

#include "common/ptx.cuh"
#include "verify/query_load.cuh"
#include "verify/shared_memory.cuh"

namespace nwor {

// Rows so many strides further. Factors of 32 bits: one instruction.
__device__ __forceinline__ const char* further(const char* rows, int count, uint32_t stride) {
  return rows + static_cast<uint64_t>(static_cast<uint32_t>(count)) * stride;
}

// Which tiles of a stage are to be filled: keys, values or both; where no address is given, none.
struct TileAddresses {
  uint32_t key, value;
  static constexpr uint32_t kNone = ~0u;
};

// Begins the copy of a tile whose rows lie in blocks that do not hold whole tiles.
template <class T>
__device__ __noinline__ void copy_scattered_tile(const VerifyParams& p, int request, int head, int token, int valid,
                                                 TileAddresses to) {
  constexpr int kChunks = T::kRowBytes / 16;
  constexpr int kElement = T::kFp8 ? 1 : 2;
  const char* key = static_cast<const char*>(p.key_cache) + head * p.key_cache_head * kElement;
  const char* value = static_cast<const char*>(p.value_cache) + head * p.value_cache_head * kElement;
#pragma unroll 1
  for (int index = T::copy_warp() * 32 + threadIdx.x % 32; index < kTileTokens * kChunks; index += T::kCopyWarps * 32) {
    const int row = index / kChunks, chunk = index % kChunks;
    const int at = token + min(row, valid - 1);
    const int page = divide(at, p.block);
    const int64_t number = __ldg(p.block_table + request * p.block_table_row + page);
    const int64_t in_page = at - page * p.block_size;
    const int offset = T::tile_offset(row, chunk);
    if (to.key != TileAddresses::kNone)
      copy_async16(to.key + offset,
                   key + (number * p.key_cache_block + in_page * p.key_cache_token) * kElement + chunk * 16,
                   row < valid);
    if (to.value != TileAddresses::kNone)
      copy_async16(to.value + offset,
                   value + (number * p.value_cache_block + in_page * p.value_cache_token) * kElement + chunk * 16,
                   row < valid);
  }
}

// What a warp keeps of the split that its thread block works on.
template <class T>
struct TileStream {
  uint32_t ring;      // the group's
  int first, stride;  // the group's tiles: first + stride * step
  const char *key_cache, *value_cache;  // of the split's head
  int looked_up;  // lane i holds the block, and the offset in it, of the tile of step `looked_up` + i
  int block, offset, next_block, next_offset;

  static __device__ __forceinline__ int group() { return T::group(); }
  static __device__ __forceinline__ int row_warp() { return threadIdx.x / 32 % T::kRowWarps; }
  static __device__ __forceinline__ int row() { return row_warp() * 8 * T::kRowTiles; }
};

template <class T>
__device__ __forceinline__ void look_up(const VerifyParams& p, const Split& split, const TileStream<T>& stream,
                                        int step, int& block, int& offset) {
  const int tile = stream.first + stream.stride * (step + static_cast<int>(threadIdx.x % 32));
  if (tile < split.tile || tile >= split.end) return;
  const int token = (split.first_context_tile + tile) * T::kTile + T::copy_token();
  if (token >= split.work.context) return;
  const int page = divide(token, p.block);
  offset = token - page * p.block_size;
  block = __ldg(p.block_table + split.request * p.block_table_row + page);
}

// The cache block, and the offset in it, where this warp's rows of a context tile begin. Called for one step after
// the other.
template <class T>
__device__ __forceinline__ int2 find_tile(const VerifyParams& p, const Split& split, TileStream<T>& stream, int step) {
  if (step - stream.looked_up >= 32) {
    stream.looked_up += 32;
    stream.block = stream.next_block;
    stream.offset = stream.next_offset;
  }
  if (step == stream.looked_up) look_up<T>(p, split, stream, step + 32, stream.next_block, stream.next_offset);
  return make_int2(__shfl_sync(0xffffffffu, stream.block, step - stream.looked_up),
                   __shfl_sync(0xffffffffu, stream.offset, step - stream.looked_up));
}

// A split's first tile, and its query rows on their way.
template <class T>
__device__ __forceinline__ void begin_stream(const VerifyParams& p, const Split& split, TileStream<T>& stream,
                                             char* shared) {
  constexpr int kElement = T::kFp8 ? 1 : 2;
  stream.key_cache = static_cast<const char*>(p.key_cache) + split.head * p.key_cache_head * kElement;
  stream.value_cache = static_cast<const char*>(p.value_cache) + split.head * p.value_cache_head * kElement;
  const SharedMemory<T> smem{shared};
  if constexpr (T::kWindowFirst) {
    stream.stride = -smem.cluster() * T::kGroups;
    stream.first = split.end - 1 - smem.rank() * T::kGroups - stream.group();
  } else {
    stream.stride = smem.cluster() * T::kGroups;
    stream.first = split.tile + smem.rank() * T::kGroups + stream.group();
  }
  stream.looked_up = 0;
  stream.block = stream.offset = 0;
  look_up<T>(p, split, stream, 0, stream.block, stream.offset);
  stream.next_block = stream.block;
  stream.next_offset = stream.offset;
  load_query<T>(p, split, shared);
}

}  // namespace nwor
