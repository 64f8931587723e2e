// The tiles of a split on their way into a group's ring.
#pragma once

#include "verify/kv_load.cuh"
#include "verify/swizzle.cuh"
#include "verify/window_load.cuh"

namespace nwor {

// Where a tile's rows lie, if they are evenly spaced. Strides in bytes.
struct TileRows {
  const char *key, *value;
  uint32_t key_stride, value_stride;
  int valid;  // rows that exist
};

// Begins the copy of a tile into a stage; rows past `valid` become zeros.
template <class T>
__device__ __forceinline__ void copy_tile(const TileRows& rows, int row_warp, uint32_t stage) {
  constexpr int kChunks = T::kRowBytes / 16;
  constexpr int kPasses = kChunks / 2;  // each copies 32 chunks
  const int lane = threadIdx.x % 32;
  if constexpr (32 % kChunks == 0) {
    // A pass is whole rows, so its addresses follow from the first pass's: no products to keep in registers.
    constexpr int kPassRows = 32 / kChunks;
    int row = lane / kChunks + row_warp * kPassRows;
    const uint32_t first = stage + chunk_offset<kChunks>(lane / kChunks, lane % kChunks);
    const char* key = further(rows.key, row, rows.key_stride) + lane % kChunks * 16;
    const char* value = further(rows.value, row, rows.value_stride) + lane % kChunks * 16;
    const uint64_t key_step = static_cast<uint64_t>(rows.key_stride) * (kPassRows * T::kRowWarps);
    const uint64_t value_step = static_cast<uint64_t>(rows.value_stride) * (kPassRows * T::kRowWarps);
#pragma unroll
    for (int i = 0; i < (kPasses + T::kRowWarps - 1) / T::kRowWarps; ++i) {
      const int pass = i * T::kRowWarps + (T::kRowWarps > 1 ? row_warp : 0);
      if (kPasses % T::kRowWarps != 0 && pass >= kPasses) break;
      // Adding rows to the first pass's changes the swizzle by an exclusive or.
      const uint32_t to = (first ^ (row_swizzle<kChunks>(pass * kPassRows) << 4)) + pass * (kPassRows * T::kRowBytes);
      const bool inside = row < rows.valid;
      copy_async16(to, key, inside);
      copy_async16(to + T::kTileBytes, value, inside);
      row += kPassRows * T::kRowWarps;
      key += key_step;
      value += value_step;
    }
  } else {
#pragma unroll
    for (int i = 0; i < (kPasses + T::kRowWarps - 1) / T::kRowWarps; ++i) {
      const int index = (i * T::kRowWarps + row_warp) * 32 + lane;
      if (kPasses % T::kRowWarps != 0 && index >= kPasses * 32) break;
      const int row = index / kChunks, chunk = index % kChunks;
      const bool inside = row < rows.valid;
      const int to = chunk_offset<kChunks>(row, chunk);
      copy_async16(stage + to, further(rows.key, row, rows.key_stride) + chunk * 16, inside);
      copy_async16(stage + T::kTileBytes + to, further(rows.value, row, rows.value_stride) + chunk * 16, inside);
    }
  }
}

// Begins the copy of the tile of a step into stage `slot` of the group's ring; past the last step does nothing.
template <class T>
__device__ __forceinline__ void load_tile(const VerifyParams& p, const Split& split, TileStream<T>& stream, int step,
                                          int slot, char* shared) {
  const int tile = stream.first + stream.stride * step;
  if (tile >= split.end) return;
  const uint32_t stage = stream.ring + slot * T::kStageBytes;
  TileRows rows;
  if (tile * T::kTile < split.window_begin) {
    const int2 place = find_tile<T>(p, split, stream, step);
    const int token = (split.first_context_tile + tile) * T::kTile;
    rows.valid = split.work.context - token;
    rows.key_stride = p.key_token_bytes;
    rows.value_stride = p.value_token_bytes;
    rows.key = further(further(stream.key_cache, place.x, p.key_block_bytes), place.y, p.key_token_bytes);
    rows.value = further(further(stream.value_cache, place.x, p.value_block_bytes), place.y, p.value_token_bytes);
    if (!p.whole_tiles) {
      copy_scattered_tile<T>(p, split.request, split.head, token, min(rows.valid, kTileTokens),
                             TileAddresses{stage, stage + T::kTileBytes});
      return;
    }
  } else {
    const int token = tile * T::kTile - split.window_begin;
    rows.valid = split.work.window - token;
    const uint32_t at = stage - smem_address(shared);
    if constexpr (T::kFp8) {
      convert_window_tile<T>(p, split.work.start + token, split.head, rows.valid, T::kTile, shared,
                             TileAddresses{at, at + T::kTileBytes}, T::fill_thread());
      return;
    } else if (!p.aligned) {
      fill_window_rows<T>(p, split.work.start + token, split.head, rows.valid, false, shared + at);
      fill_window_rows<T>(p, split.work.start + token, split.head, rows.valid, true, shared + at + T::kTileBytes);
      return;
    }
    rows.key_stride = static_cast<uint32_t>(p.key_token * 2);
    rows.value_stride = static_cast<uint32_t>(p.value_token * 2);
    rows.key =
        static_cast<const char*>(p.key) + (split.head * p.key_head + (split.work.start + token) * p.key_token) * 2;
    rows.value = static_cast<const char*>(p.value) +
                 (split.head * p.value_head + (split.work.start + token) * p.value_token) * 2;
  }
  copy_tile<T>(rows, T::copy_warp(), stage);
}

// Begins a split: the query rows and the first tiles are on their way when this returns.
template <class T>
__device__ __forceinline__ void begin_split(const VerifyParams& p, const Split& split, TileStream<T>& stream,
                                            char* shared) {
  begin_stream<T>(p, split, stream, shared);
#pragma unroll 1
  for (int step = 0; step < T::kStages - 1; ++step) {
    load_tile<T>(p, split, stream, step, step, shared);
    copy_async_commit();
  }
}

// What begins a split after the first: a function of its own, as in kv_load_sm90.cuh.
template <class T>
__device__ __noinline__ TileStream<T> begin_next(const VerifyParams& p, const Split& split, TileStream<T> stream,
                                                 char* shared) {
  begin_split<T>(p, split, stream, shared);
  return stream;
}

}  // namespace nwor
