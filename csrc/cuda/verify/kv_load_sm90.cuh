// Tiles on their way into the rings of the wgmma kernel. Keys and values have rings of their own: a tile's keys are
// multiplied a step before its values, and make room earlier. With one stage more for values both are loaded at the same
// time; they lie side by side in the cache.
#pragma once

#include "verify/kv_load.cuh"
#include "verify/swizzle.cuh"
#include "verify/window_load.cuh"

namespace nwor {

// Where the tiles of a stage lie in shared memory: this warpgroup's keys, and the values of all of a pair.
template <class T>
__device__ __forceinline__ uint32_t key_tile(const char* shared, int slot) {
  return smem_address(shared) + T::key_offset(slot);
}

template <class T>
__device__ __forceinline__ uint32_t value_tiles(const char* shared, int slot) {
  return smem_address(shared) + T::value_stage(slot);
}

// Rows evenly spaced, and where they go.
struct EvenRows {
  const char* from;
  uint32_t stride;  // bytes
  uint32_t tile;
};

// Copies sixteen rows of each tile; of several tiles in turns.
template <class T, class... Tiles>
__device__ __forceinline__ void copy_rows(int valid, const Tiles&... tiles) {
  constexpr int kChunks = T::kRowBytes / 16;
  constexpr int kPassRows = 32 / kChunks, kPasses = 16 / kPassRows;
  const int lane = threadIdx.x % 32, chunk = lane % kChunks;
  const uint32_t offset = T::tile_offset(lane / kChunks, chunk);
  int row = lane / kChunks + T::copy_warp() * kPassRows;
  const char* from[] = {further(tiles.from, row, tiles.stride) + chunk * 16 ...};
  const uint32_t to[] = {tiles.tile + offset...}, strides[] = {tiles.stride...};
#pragma unroll
  for (int i = 0; i < kPasses / T::kRowGroups; ++i) {
    const int pass_row = (i * T::kRowGroups + T::copy_warp()) * kPassRows;
    // Adding rows to the first pass's changes the swizzle by an exclusive or.
    const int swizzle = row_swizzle<T::kPitch / 16>(pass_row);
#pragma unroll
    for (int t = 0; t < static_cast<int>(sizeof...(Tiles)); ++t) {
      copy_async16((to[t] ^ (swizzle << 4)) + pass_row * T::kPitch, from[t], row < valid);
      from[t] += static_cast<uint64_t>(strides[t]) * (kPassRows * T::kRowGroups);
    }
    row += kPassRows * T::kRowGroups;
  }
}

// The tiles of a split on their way into the rings. A step makes room for the keys of tile step + kKeyStages and the
// values of tile step + kValueLead; their copies are two groups, also where nothing is left to load, so that a count of
// groups tells what has arrived. Steps before the first fill the rings. One of a pair's warpgroups may lack a split's
// last tile; then zeros are in its place. One that takes turns goes without.
template <class T>
struct TileQueue {
  static constexpr int kValueLead = T::kOneStage ? T::kValueStages : T::kValueStages - 1;
  static constexpr int kLag = T::kKeyStages - kValueLead;  // tiles from the keys back to the values
  static constexpr bool kSideBySide = !T::kOneStage && kLag == 0;
  TileStream<T> stream;
  int2 places[kLag + 1];  // of the last keys; the newest first

  // Whether the thread block, or a warpgroup that takes turns, has a tile for a step; the answer is the whole warp's,
  // which tells the compiler that it does not diverge around what depends on it.
  __device__ __forceinline__ bool exists(const Split& split, int step) const {
    return __any_sync(0xffffffffu, is_inside(split, tile_of_first(step)));
  }

  // Whether, where one of a pair's warpgroups has a tile for a step, this one has one as well.
  __device__ __forceinline__ bool is_whole(const Split& split, int step) const {
    return !T::kInPairs || is_inside(split, tile_of(step));
  }

  // Begins a split: on their way when this returns are the query rows and the first tiles but the last keys or, with
  // one stage, values.
  __device__ __forceinline__ void begin(const VerifyParams& p, const Split& split, char* shared) {
    begin_stream<T>(p, split, stream, shared);
    // Keys before values, since they are waited for alone; but not where the two share lines of memory.
#pragma unroll 1
    for (int step = -T::kKeyStages; step < -1; ++step) advance<(T::kRowBytes < 128)>(p, split, step, shared);
    if constexpr (T::kOneStage) {
      next_keys(p, split, -1, shared);
    } else {
      find_keys(p, split, -1);
      load_values(p, split, -1, shared);
      if (T::kValuesFirst) copy_async_commit();
    }
  }

  __device__ __forceinline__ void load_last(const VerifyParams& p, const Split& split, char* shared) {
    if constexpr (T::kOneStage) {
      next_values(p, split, -1, shared);
    } else {
      load_keys(p, split, -1, shared);
      copy_async_commit();
      if (!T::kValuesFirst) copy_async_commit();  // the values went with the keys
    }
  }

  // `kTogether`: keys and values of a tile side by side, where they are loaded in the same step.
  template <bool kTogether = true>
  __device__ __forceinline__ void advance(const VerifyParams& p, const Split& split, int step, char* shared) {
    if constexpr (T::kValuesFirst) {
      find_keys(p, split, step);
      load_values(p, split, step, shared);
      copy_async_commit();
      load_keys(p, split, step, shared);
      copy_async_commit();
    } else {
      if constexpr (kSideBySide && kTogether) {
        if (load_side_by_side(p, split, step, shared)) return;
      }
      next_keys(p, split, step, shared);
      next_values(p, split, step, shared);
    }
  }

  __device__ __forceinline__ void next_keys(const VerifyParams& p, const Split& split, int step, char* shared) {
    find_keys(p, split, step);
    load_keys(p, split, step, shared);
    copy_async_commit();
  }

  __device__ __forceinline__ void next_values(const VerifyParams& p, const Split& split, int step, char* shared) {
    load_values(p, split, step, shared);
    copy_async_commit();
  }

 private:
  __device__ __forceinline__ int tile_of(int step) const { return stream.first + stream.stride * step; }
  __device__ __forceinline__ int tile_of_first(int step) const {  // of a pair, the one that is there
    return tile_of(step) + (T::kWindowFirst ? T::of_pair() : -T::of_pair());
  }

  // Whether a tile that a step would take is the split's.
  static __device__ __forceinline__ bool is_inside(const Split& split, int tile) {
    return T::kWindowFirst ? tile >= split.tile : tile < split.end;
  }

  // Tiles that do not exist are not looked up, and nothing is loaded of them.
  __device__ __forceinline__ void find_keys(const VerifyParams& p, const Split& split, int step) {
    const int index = step + T::kKeyStages;
#pragma unroll
    for (int i = kLag; i > 0; --i) places[i] = places[i - 1];
    const int tile = tile_of(index);
    if (T::kWindowFirst ? tile >= split.tile : tile < split.end && tile * T::kTile < split.window_begin)
      places[0] = find_tile<T>(p, split, stream, index);
  }

  __device__ __forceinline__ void load_keys(const VerifyParams& p, const Split& split, int step, char* shared) {
    const int index = step + T::kKeyStages;
    if (is_inside(split, tile_of_first(index)))
      load<false>(p, split, tile_of(index), places[0], T::key_offset(index % T::kKeyStages), shared);
  }

  __device__ __forceinline__ void load_values(const VerifyParams& p, const Split& split, int step, char* shared) {
    const int index = step + kValueLead;
    if (index >= 0 && is_inside(split, tile_of_first(index)))
      load<true>(p, split, tile_of(index), places[kLag], T::value_offset(index % T::kValueStages), shared);
  }

  // Where this warp's rows of a context tile lie, in blocks that hold whole tiles.
  template <bool kValue>
  __device__ __forceinline__ EvenRows context_rows(const VerifyParams& p, int2 place, uint32_t to) const {
    const uint32_t stride = kValue ? p.value_token_bytes : p.key_token_bytes;
    const char* rows = further(kValue ? stream.value_cache : stream.key_cache, place.x,
                               kValue ? p.value_block_bytes : p.key_block_bytes);
    return {further(rows, place.y, stride), stride, to};
  }

  __device__ __forceinline__ int first_token(const Split& split, int tile) const {
    return (split.first_context_tile + tile) * T::kTile + T::copy_token();
  }

  // Keys and values of a context tile, a few rows of either in turns, since they lie side by side in the cache. Memory
  // gives them faster so. False where that is not how they lie; nothing has happened then.
  __device__ __forceinline__ bool load_side_by_side(const VerifyParams& p, const Split& split, int step, char* shared) {
    const int index = step + T::kKeyStages, tile = tile_of(index);
    if (!p.whole_tiles || !is_inside(split, tile) || (tile + 1) * T::kTile > split.window_begin) return false;
    find_keys(p, split, step);
    const uint32_t to = smem_address(shared) + T::copy_offset();
    copy_rows<T>(split.work.context - first_token(split, tile),
                 context_rows<false>(p, places[0], to + T::key_offset(index % T::kKeyStages)),
                 context_rows<true>(p, places[0], to + T::value_offset(index % T::kValueStages)));
    copy_async_commit();
    copy_async_commit();  // groups are counted as if there were one of each
    return true;
  }

  template <bool kValue>
  __device__ __forceinline__ void load(const VerifyParams& p, const Split& split, int tile, int2 place, int offset,
                                       char* shared) {
    const uint32_t to = smem_address(shared) + offset + T::copy_offset();
    EvenRows rows{stream.key_cache, 0, to};
    int valid = 0;
    const int in_window = tile * T::kTile + T::copy_token() - split.window_begin;  // below 0: in the context
    if (T::kInPairs && !is_inside(split, tile)) {  // zeros
    } else if (__any_sync(0xffffffffu, in_window < 0)) {  // as in exists(): the warp does not diverge
      const int token = first_token(split, tile);
      valid = split.work.context - token;
      if (!p.whole_tiles) {
        copy_scattered_tile<T>(p, split.request, split.head, token, min(valid, kTileTokens),
                               TileAddresses{kValue ? TileAddresses::kNone : to, kValue ? to : TileAddresses::kNone});
        return;
      }
      rows = context_rows<kValue>(p, place, to);
    } else if constexpr (T::kFillsWindow) {
      return;  // load_window() brings it
    } else {
      valid = split.work.window - in_window;
      if (!p.aligned) {
        fill_window_rows<T>(p, split.work.start + in_window, split.head, valid, kValue, shared + offset);
        return;
      }
      rows.stride = static_cast<uint32_t>((kValue ? p.value_token : p.key_token) * 2);
      rows.from =
          static_cast<const char*>(kValue ? p.value : p.key) + split.head * (kValue ? p.value_head : p.key_head) * 2;
      rows.from = further(rows.from, split.work.start + in_window, rows.stride);
    }
    copy_rows<T>(valid, rows);
  }
};

// What begins a split after the first: functions of their own, with the queue by value, so that the end of a launch
// follows its loop in memory. In a model other kernels drive a launch's instructions out of the caches, and for each
// place where they do not follow one another it waits for memory. A launch of many work tiles has it inline where it is
// in a hurry.
template <class T>
__device__ __noinline__ TileQueue<T> begin_next(const VerifyParams& p, const Split& split, char* shared) {
  TileQueue<T> queue;
  queue.begin(p, split, shared);
  return queue;
}

template <class T>
__device__ __noinline__ void load_rest(const VerifyParams& p, const Split& split, TileQueue<T> queue, char* shared) {
  const SharedMemory<T> smem{shared};
  queue.load_last(p, split, shared);
  load_window<T>(p, split, T::fill_thread(), smem);
}

}  // namespace nwor
