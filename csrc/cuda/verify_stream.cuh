// The tiles of a segment on their way into a group's ring.
#pragma once

#include "verify_window.cuh"

namespace nwor {

// What a warp keeps of the segment that its thread block works on.
template <class S>
struct Stream {
  uint32_t ring;      // the group's
  int first, stride;  // the group's tiles: first + stride * step
  const char *key_cache, *value_cache;  // of the segment's head
  int looked_up;      // lane i holds the block, and the offset in it, of the tile of step `looked_up` + i
  int block, offset, next_block, next_offset;

  static __device__ __forceinline__ int group() { return S::group(); }
  static __device__ __forceinline__ int row_warp() { return threadIdx.x / 32 % S::kRowWarps; }
  static __device__ __forceinline__ int row() { return row_warp() * 8 * S::kRowTiles; }
};

template <class S>
__device__ __forceinline__ void look_up(const VerifyParams& p, const Segment& segment, const Stream<S>& stream, int step,
                                        int& block, int& offset) {
  const int tile = stream.first + stream.stride * (step + static_cast<int>(threadIdx.x % 32));
  if (tile < segment.tile || tile >= segment.end) return;
  const int token = (segment.first_context_tile + tile) * S::kTile + S::copy_token();
  if (token >= segment.work.context) return;
  const int page = divide(token, p.block);
  offset = token - page * p.block_size;
  block = __ldg(p.block_table + segment.request * p.block_table_row + page);
}

// The cache block, and the offset in it, where this warp's rows of a context tile begin. Called for one step after
// the other.
template <class S>
__device__ __forceinline__ int2 find_tile(const VerifyParams& p, const Segment& segment, Stream<S>& stream, int step) {
  if (step - stream.looked_up >= 32) {
    stream.looked_up += 32;
    stream.block = stream.next_block;
    stream.offset = stream.next_offset;
  }
  if (step == stream.looked_up) look_up<S>(p, segment, stream, step + 32, stream.next_block, stream.next_offset);
  return make_int2(__shfl_sync(0xffffffffu, stream.block, step - stream.looked_up),
                   __shfl_sync(0xffffffffu, stream.offset, step - stream.looked_up));
}

// Begins the copy of the tile of a step into stage `slot` of the group's ring; past the last step does nothing.
template <class S>
__device__ __forceinline__ void load_tile(const VerifyParams& p, const Segment& segment, Stream<S>& stream, int step,
                                          int slot, char* shared) {
  const int tile = stream.first + stream.stride * step;
  if (tile >= segment.end) return;
  const uint32_t stage = stream.ring + slot * S::kStageBytes;
  TileRows rows;
  if (tile * S::kTile < segment.window_begin) {
    const int2 place = find_tile<S>(p, segment, stream, step);
    const int token = (segment.first_context_tile + tile) * S::kTile;
    rows.valid = segment.work.context - token;
    rows.key_stride = p.key_token_bytes;
    rows.value_stride = p.value_token_bytes;
    rows.key = further(further(stream.key_cache, place.x, p.key_block_bytes), place.y, p.key_token_bytes);
    rows.value = further(further(stream.value_cache, place.x, p.value_block_bytes), place.y, p.value_token_bytes);
    if (!p.whole_tiles) {
      copy_scattered_tile<S>(p, segment.request, segment.head, token, min(rows.valid, kTileTokens),
                             TileAddresses{stage, stage + S::kTileBytes});
      return;
    }
  } else {
    const int token = tile * S::kTile - segment.window_begin;
    rows.valid = segment.work.window - token;
    const uint32_t at = stage - smem_address(shared);
    if constexpr (S::kFp8) {
      convert_window_tile<S>(p, segment.work.start + token, segment.head, rows.valid, S::kTile, shared,
                             TileAddresses{at, at + S::kTileBytes}, S::fill_thread());
      return;
    } else if (!p.aligned) {
      fill_window_rows<S>(p, segment.work.start + token, segment.head, rows.valid, false, shared + at);
      fill_window_rows<S>(p, segment.work.start + token, segment.head, rows.valid, true, shared + at + S::kTileBytes);
      return;
    }
    rows.key_stride = static_cast<uint32_t>(p.key_token * 2);
    rows.value_stride = static_cast<uint32_t>(p.value_token * 2);
    rows.key = static_cast<const char*>(p.key) +
               (segment.head * p.key_head + (segment.work.start + token) * p.key_token) * 2;
    rows.value = static_cast<const char*>(p.value) +
                 (segment.head * p.value_head + (segment.work.start + token) * p.value_token) * 2;
  }
  copy_tile<S>(rows, S::copy_warp(), stage);
}

// A segment's first tile, and its query rows on their way.
template <class S>
__device__ __forceinline__ void begin_stream(const VerifyParams& p, const Segment& segment, Stream<S>& stream,
                                             char* shared) {
  constexpr int kElement = S::kFp8 ? 1 : 2;
  stream.key_cache = static_cast<const char*>(p.key_cache) + segment.head * p.key_cache_head * kElement;
  stream.value_cache = static_cast<const char*>(p.value_cache) + segment.head * p.value_cache_head * kElement;
  const MergeSpace<S> space{shared};
  if constexpr (S::kWindowFirst) {
    stream.stride = -space.cluster() * S::kGroups;
    stream.first = segment.end - 1 - space.rank() * S::kGroups - stream.group();
  } else {
    stream.stride = space.cluster() * S::kGroups;
    stream.first = segment.tile + space.rank() * S::kGroups + stream.group();
  }
  stream.looked_up = 0;
  stream.block = stream.offset = 0;
  look_up<S>(p, segment, stream, 0, stream.block, stream.offset);
  stream.next_block = stream.block;
  stream.next_offset = stream.offset;
  load_query<S>(p, segment, shared);
}

// Begins a segment: the query rows and the first tiles are on their way when this returns.
template <class S>
__device__ __forceinline__ void begin_segment(const VerifyParams& p, const Segment& segment, Stream<S>& stream,
                                              char* shared) {
  begin_stream<S>(p, segment, stream, shared);
#pragma unroll 1
  for (int step = 0; step < S::kStages - 1; ++step) {
    load_tile<S>(p, segment, stream, step, step, shared);
    copy_async_commit();
  }
}

}  // namespace nwor
