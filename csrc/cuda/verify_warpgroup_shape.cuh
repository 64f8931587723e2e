// Shapes of the warpgroup kernel's shared memory, and the tiles on their way into it. Keys and values have rings of
// their own: a tile's keys are multiplied a step before its values, and make room earlier. With one stage more for
// values both are loaded at the same time; they lie side by side in the cache.
#pragma once

#include "verify_kernel.cuh"
#include "wgmma.cuh"

namespace nwor {

// A thread block has kRowGroups warpgroups, each with 8 * kRowTiles query rows of its own; all read the same tiles. Or
// its two warpgroups take tiles in pairs: each computes the scores of all rows with a tile of its own, and half of the
// head's values of both. Two row groups read and convert every tile twice, a pair's warpgroups only once. A stage is then
// a pair, as is the room for probabilities. Or its warpgroups take tiles in turns: each has rings, probabilities and a result
// of its own, and none waits for another before the results are added up. With one stage of each a loop of its own loads
// keys and values as soon as there is room.
template <int kD, int kRowTiles_, int kRowGroups_, int kKeyStages_, int kValueStages_, Kind kKind_,
          int kProbabilities_, int kGroups_ = 1, bool kInTurns_ = false>
struct WarpgroupShape {
  static constexpr int kHeadSize = kD;
  static constexpr int kTile = 64;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kRowWarps = 4 * kRowGroups;
  static constexpr int kGroups = kGroups_;  // tiles at a time
  static constexpr bool kInTurns = kInTurns_;
  static constexpr bool kInPairs = kGroups == 2 && !kInTurns;
  static constexpr int kStageTiles = kInPairs ? 2 : 1;  // tiles of keys, or of values, in a stage
  static constexpr int kRings = kInTurns ? kGroups : 1;
  static constexpr int kBlocks = kD / 64 / kStageTiles;  // of 64 head positions, in a warpgroup's part of the result
  static constexpr int kKeyStages = kKeyStages_;
  static constexpr int kValueStages = kValueStages_;
  static constexpr int kProbabilities = kProbabilities_;  // tiles whose probabilities have room
  static constexpr Kind kKind = kKind_;
  static constexpr bool kFp8Query = kKind == Kind::kFp8Query;
  static constexpr bool kExpandsQuery = false;
  static constexpr bool kFp8 = kKind == Kind::kFp8 || kFp8Query;
  static constexpr bool kOneStage = kKeyStages == 1 && kValueStages == 1;
  // A segment's tiles are taken from the last one on, so that the window's comes first: then no tile is left to multiply
  // when a launch's last context arrives. With an fp8 cache its window's rows are converted by all threads, who wait for
  // what they convert, while the other first tiles are on their way.
  static constexpr bool kFillsWindow = kFp8;
  static constexpr bool kWindowFirst = !kOneStage;
  static_assert(kD % 64 == 0);
  static_assert(kGroups == 1 || (kRowGroups == 1 && (kInTurns || (kInPairs && kD % 128 == 0))));
  static_assert(kOneStage ? kProbabilities == 1 && kInPairs && !kFp8
                          : kValueStages >= 2 && kKeyStages >= 2 && kKeyStages + 1 >= kValueStages);
  static_assert(kProbabilities == 1 || kProbabilities == 2);

  static constexpr int kThreads = 128 * kRowGroups * kGroups;
  static constexpr int kRows = 8 * kRowTiles * kRowGroups;
  // Tiles and query rows lie in panels of at most 128 bytes of all their rows, as the matrix unit wants them.
  static constexpr int kRowBytes = kD * (kFp8 ? 1 : 2);
  static constexpr int kPitch = kRowBytes < 128 ? kRowBytes : 128;
  static constexpr int kPanelBytes = kTile * kPitch;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kStageBytes = kStageTiles * kTileBytes;
  static constexpr int kQueryRowBytes = kD * (kFp8Query ? 1 : 2);
  static constexpr int kQueryPitch = kQueryRowBytes < 128 ? kQueryRowBytes : 128;
  static constexpr int kQueryPanelBytes = kRows * kQueryPitch;
  static constexpr int kQueryBytes = (kRows * kQueryRowBytes + 1023) / 1024 * 1024;  // where a swizzle's period begins
  static constexpr int kOwnRingBytes = (kKeyStages + kValueStages) * kStageBytes;
  static constexpr int kRingBytes = kRings * kOwnRingBytes;
  static constexpr int kProbabilityBytes = kRows * 128;  // of one tile
  // A step's copies are two groups, of which what is wanted first comes first.
  static constexpr bool kValuesFirst = kKeyStages > kValueStages;
  // Groups that may be under way when a tile's values, loaded kValueStages - 1 steps before, and the next one's keys,
  // loaded kKeyStages - 1 steps before, are to be there. With room for two tiles' probabilities a step waits before it
  // loads, else after.
  static constexpr int kPending = (kValuesFirst                ? 2 * kValueStages - 1
                                   : kKeyStages < kValueStages ? 2 * kKeyStages - 1
                                                               : 2 * kKeyStages - 2) -
                                  2 * (kProbabilities - 1);
  // The same when the query rows and the first keys are to be there.
  static constexpr int kPendingAtFirst = 2 * kKeyStages - (kValuesFirst ? 2 : 1);
  // The same with one stage, when a tile's keys or its values are to be there.
  static constexpr int kPendingOneStage = 1;
  // Half tiles that take as long as adding up the parts of a cluster, or those of workers; as measured.
  static constexpr int kClusterJoin = 3, kWorkerJoin = kFp8 || kD < 256 ? 8 : 6, kPartJoin = kFp8 ? 2 : 6;

  // A result takes the place of the last keys and the last values, which lie side by side, while the other tiles of
  // the next segment are on their way already. Where that is too little, or a cluster adds up, it has the whole ring.
  // With one stage it has the values' place, and as much room more as it needs. Warpgroups that took turns leave their
  // results in the ring, behind the place of their sum.
  static constexpr int kSumStride = kD + 4;
  static constexpr int kSumBytes = kRows * kSumStride * 4;
  static constexpr int kSpareBytes =
      kOneStage && kSumBytes > kStageBytes ? (kSumBytes - kStageBytes + 1023) / 1024 * 1024 : 0;
  static constexpr int merge_slices(int bytes) {
    for (int slices = kD / 16; slices > 4; slices -= 4)
      if (kD / 16 % slices == 0 && kRows * (slices * 16 + 4) * 4 <= bytes) return slices;
    return 4;
  }
  static constexpr bool kOverlap = !kInTurns && (kOneStage || kRows * (4 * 16 + 4) * 4 <= 2 * kStageBytes);
  static constexpr int kMergeSlices =
      kOneStage || kInTurns ? kD / 16 : merge_slices(kOverlap ? 2 * kStageBytes : kRingBytes);
  static constexpr int kMergeStride = kMergeSlices * 16 + 4;
  static constexpr int kMergeBytes = kRows * kMergeStride * 4;
  static constexpr int kMergeGroups = kRings;
  static constexpr int kSumOffset = kQueryBytes + (kOneStage ? kStageBytes : 0);
  static constexpr int kMergeOffset =
      kOneStage ? kSumOffset
                : kQueryBytes + (kOverlap ? (kKeyStages - 1) * kStageBytes : kInTurns ? kSumBytes : 0);
  static_assert(kOneStage || kMergeOffset + kMergeGroups * kMergeBytes <=
                                 kQueryBytes + (kOverlap ? (kKeyStages + 1) * kStageBytes : kRingBytes));
  static_assert(kSumOffset + kSumBytes <= kQueryBytes + kRingBytes + kSpareBytes);

  static constexpr int kProbabilityOffset = kQueryBytes + kRingBytes + kSpareBytes;
  // Statistics take the probabilities' place when a segment's products are done.
  static constexpr int kStatGroups = 4 * kGroups;
  static constexpr int kStatsOffset = kProbabilityOffset;
  static constexpr int kRowsOffset = kStatsOffset + kStatGroups * kRows * 8;
  static constexpr int kOutputOffset = kRowsOffset + kRows * 8;
  static_assert(kOutputOffset + kRows * 8 <= kProbabilityOffset + kGroups * kProbabilityBytes);
  static constexpr int kFlagOffset = kProbabilityOffset + kGroups * kProbabilities * kProbabilityBytes;
  static constexpr int kControlOffset = kFlagOffset + 16;
  static constexpr int kTableOffset = kControlOffset + kControlBytes;
  static constexpr int kSharedBytes = kTableOffset + kTabledRequests * 8;

  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }  // of the warpgroup
  static __device__ __forceinline__ int first_row() {  // the warpgroup's first query row
    return kRowGroups == 1 ? 0 : static_cast<int>(threadIdx.x / 128) * 8 * kRowTiles;
  }
  // The warpgroup's number where it has tiles of its own, else a constant, which spares registers.
  static __device__ __forceinline__ int group() { return kGroups > 1 ? static_cast<int>(threadIdx.x / 128) : 0; }
  static __device__ __forceinline__ int of_pair() { return kInPairs ? group() : 0; }
  static __device__ __forceinline__ int ring() { return kInTurns ? group() : 0; }
  // Where stages begin, and in them the tiles that this warp helps to fill.
  static __device__ __forceinline__ int key_stage(int slot) {
    return kQueryBytes + ring() * kOwnRingBytes + slot * kStageBytes;
  }
  static __device__ __forceinline__ int value_stage(int slot) {
    return key_stage(kKeyStages + kValueStages - 1 - slot);
  }
  static __device__ __forceinline__ int key_offset(int slot) { return key_stage(slot) + of_pair() * kTileBytes; }
  static __device__ __forceinline__ int value_offset(int slot) { return value_stage(slot) + of_pair() * kTileBytes; }
  static __device__ __forceinline__ uint32_t key_tile(const char* shared, int slot) {
    return smem_address(shared) + key_offset(slot);
  }
  static __device__ __forceinline__ uint32_t value_tiles(const char* shared, int slot) {
    return smem_address(shared) + value_stage(slot);
  }

  // Where the warpgroup's probabilities begin.
  static __device__ __forceinline__ int probability_offset() {
    return kProbabilityOffset + ring() * kProbabilities * kProbabilityBytes + first_row() * 128;
  }

  static __device__ __forceinline__ int query_offset(int row, int chunk) {
    constexpr int kChunks = kQueryPitch / 16;
    return chunk / kChunks * kQueryPanelBytes + chunk_offset<kChunks>(row, chunk % kChunks);
  }
  static __device__ __forceinline__ int tile_offset(int row, int chunk) {
    constexpr int kChunks = kPitch / 16;
    return chunk / kChunks * kPanelBytes + chunk_offset<kChunks>(row, chunk % kChunks);
  }

  // The part of a tile that this warp helps to fill: kTileTokens, of the context or of the window, with a warp of each
  // warpgroup.
  static constexpr int kCopyWarps = kRowGroups;
  static __device__ __forceinline__ int copy_warp() { return kRowGroups == 1 ? 0 : static_cast<int>(threadIdx.x / 128); }
  static __device__ __forceinline__ int copy_token() { return warp() * kTileTokens; }
  // The threads that convert a window's rows for a tile.
  static constexpr int kFillThreads = kThreads / kGroups;
  static __device__ __forceinline__ int fill_thread() {
    return kGroups > 1 ? static_cast<int>(threadIdx.x % kFillThreads) : static_cast<int>(threadIdx.x);
  }
  static __device__ __forceinline__ int copy_offset() { return copy_token() * kPitch; }

  // Rows evenly spaced, and where they go.
  struct Rows {
    const char* from;
    uint32_t stride;  // bytes
    uint32_t tile;
  };

  // Copies sixteen rows of each tile; of several tiles in turns.
  template <class... Tiles>
  static __device__ __forceinline__ void copy(int valid, const Tiles&... tiles) {
    constexpr int kChunks = kRowBytes / 16;
    constexpr int kPassRows = 32 / kChunks, kPasses = 16 / kPassRows;
    const int lane = threadIdx.x % 32, chunk = lane % kChunks;
    const uint32_t offset = tile_offset(lane / kChunks, chunk);
    int row = lane / kChunks + copy_warp() * kPassRows;
    const char* from[] = {further(tiles.from, row, tiles.stride) + chunk * 16 ...};
    const uint32_t to[] = {tiles.tile + offset...}, strides[] = {tiles.stride...};
#pragma unroll
    for (int i = 0; i < kPasses / kRowGroups; ++i) {
      const int pass_row = (i * kRowGroups + copy_warp()) * kPassRows;
      // Adding rows to the first pass's changes the swizzle by an exclusive or.
      const int swizzle = row_swizzle<kPitch / 16>(pass_row);
#pragma unroll
      for (int t = 0; t < static_cast<int>(sizeof...(Tiles)); ++t) {
        copy_async16((to[t] ^ (swizzle << 4)) + pass_row * kPitch, from[t], row < valid);
        from[t] += static_cast<uint64_t>(strides[t]) * (kPassRows * kRowGroups);
      }
      row += kPassRows * kRowGroups;
    }
  }
};

// The tiles of a segment on their way into the rings. A step makes room for the keys of tile step + kKeyStages and the
// values of tile step + kValueLead; their copies are two groups, also where nothing is left to load, so that a count of
// groups tells what has arrived. Steps before the first fill the rings. One of a pair's warpgroups may lack a segment's last
// tile; then zeros are in its place. One that takes turns goes without.
template <class S>
struct TileQueue {
  static constexpr int kValueLead = S::kOneStage ? S::kValueStages : S::kValueStages - 1;
  static constexpr int kLag = S::kKeyStages - kValueLead;  // tiles from the keys back to the values
  static constexpr bool kSideBySide = !S::kOneStage && kLag == 0;
  Stream<S> stream;
  int2 places[kLag + 1];  // of the last keys; the newest first

  // Whether the thread block, or a warpgroup that takes turns, has a tile for a step; the answer is the whole warp's, which
  // tells the compiler that it does not diverge around what depends on it.
  __device__ __forceinline__ bool exists(const Segment& segment, int step) const {
    return __any_sync(0xffffffffu, is_inside(segment, tile_of_first(step)));
  }

  // Whether, where one of a pair's warpgroups has a tile for a step, this one has one as well.
  __device__ __forceinline__ bool is_whole(const Segment& segment, int step) const {
    return !S::kInPairs || is_inside(segment, tile_of(step));
  }

  // Begins a segment: on their way when this returns are the query rows and the first tiles but the last keys or, with
  // one stage, values.
  __device__ __forceinline__ void begin(const VerifyParams& p, const Segment& segment, char* shared) {
    begin_stream<S>(p, segment, stream, shared);
    // Keys before values, since they are waited for alone; but not where the two share lines of memory.
#pragma unroll 1
    for (int step = -S::kKeyStages; step < -1; ++step) advance<S::kRowBytes < 128>(p, segment, step, shared);
    if constexpr (S::kOneStage) {
      next_keys(p, segment, -1, shared);
    } else {
      find_keys(p, segment, -1);
      load_values(p, segment, -1, shared);
      if (S::kValuesFirst) copy_async_commit();
    }
  }

  __device__ __forceinline__ void load_last(const VerifyParams& p, const Segment& segment, char* shared) {
    if constexpr (S::kOneStage) {
      next_values(p, segment, -1, shared);
    } else {
      load_keys(p, segment, -1, shared);
      copy_async_commit();
      if (!S::kValuesFirst) copy_async_commit();  // the values went with the keys
    }
  }

  // `kTogether`: keys and values of a tile side by side, where they are loaded in the same step.
  template <bool kTogether = true>
  __device__ __forceinline__ void advance(const VerifyParams& p, const Segment& segment, int step, char* shared) {
    if constexpr (S::kValuesFirst) {
      find_keys(p, segment, step);
      load_values(p, segment, step, shared);
      copy_async_commit();
      load_keys(p, segment, step, shared);
      copy_async_commit();
    } else {
      if constexpr (kSideBySide && kTogether) {
        if (load_side_by_side(p, segment, step, shared)) return;
      }
      next_keys(p, segment, step, shared);
      next_values(p, segment, step, shared);
    }
  }

  __device__ __forceinline__ void next_keys(const VerifyParams& p, const Segment& segment, int step, char* shared) {
    find_keys(p, segment, step);
    load_keys(p, segment, step, shared);
    copy_async_commit();
  }

  __device__ __forceinline__ void next_values(const VerifyParams& p, const Segment& segment, int step, char* shared) {
    load_values(p, segment, step, shared);
    copy_async_commit();
  }

 private:
  __device__ __forceinline__ int tile_of(int step) const { return stream.first + stream.stride * step; }
  __device__ __forceinline__ int tile_of_first(int step) const {  // of a pair, the one that is there
    return tile_of(step) + (S::kWindowFirst ? S::of_pair() : -S::of_pair());
  }

  // Whether a tile that a step would take is the segment's.
  static __device__ __forceinline__ bool is_inside(const Segment& segment, int tile) {
    return S::kWindowFirst ? tile >= segment.tile : tile < segment.end;
  }

  // Tiles that do not exist are not looked up, and nothing is loaded of them.
  __device__ __forceinline__ void find_keys(const VerifyParams& p, const Segment& segment, int step) {
    const int index = step + S::kKeyStages;
#pragma unroll
    for (int i = kLag; i > 0; --i) places[i] = places[i - 1];
    const int tile = tile_of(index);
    if (S::kWindowFirst ? tile >= segment.tile : tile < segment.end && tile * S::kTile < segment.window_begin)
      places[0] = find_tile<S>(p, segment, stream, index);
  }

  __device__ __forceinline__ void load_keys(const VerifyParams& p, const Segment& segment, int step, char* shared) {
    const int index = step + S::kKeyStages;
    if (is_inside(segment, tile_of_first(index)))
      load<false>(p, segment, tile_of(index), places[0], S::key_offset(index % S::kKeyStages), shared);
  }

  __device__ __forceinline__ void load_values(const VerifyParams& p, const Segment& segment, int step, char* shared) {
    const int index = step + kValueLead;
    if (index >= 0 && is_inside(segment, tile_of_first(index)))
      load<true>(p, segment, tile_of(index), places[kLag], S::value_offset(index % S::kValueStages), shared);
  }

  // Where this warp's rows of a context tile lie, in blocks that hold whole tiles.
  template <bool kValue>
  __device__ __forceinline__ typename S::Rows context_rows(const VerifyParams& p, int2 place, uint32_t to) const {
    const uint32_t stride = kValue ? p.value_token_bytes : p.key_token_bytes;
    const char* rows = further(kValue ? stream.value_cache : stream.key_cache, place.x,
                               kValue ? p.value_block_bytes : p.key_block_bytes);
    return {further(rows, place.y, stride), stride, to};
  }

  __device__ __forceinline__ int first_token(const Segment& segment, int tile) const {
    return (segment.first_context_tile + tile) * S::kTile + S::copy_token();
  }

  // Keys and values of a context tile, a few rows of either in turns, since they lie side by side in the cache. Memory
  // gives them faster so. False where that is not how they lie; nothing has happened then.
  __device__ __forceinline__ bool load_side_by_side(const VerifyParams& p, const Segment& segment, int step,
                                                    char* shared) {
    const int index = step + S::kKeyStages, tile = tile_of(index);
    if (!p.whole_tiles || !is_inside(segment, tile) || (tile + 1) * S::kTile > segment.window_begin) return false;
    find_keys(p, segment, step);
    const uint32_t to = smem_address(shared) + S::copy_offset();
    S::copy(segment.work.context - first_token(segment, tile),
            context_rows<false>(p, places[0], to + S::key_offset(index % S::kKeyStages)),
            context_rows<true>(p, places[0], to + S::value_offset(index % S::kValueStages)));
    copy_async_commit();
    copy_async_commit();  // groups are counted as if there were one of each
    return true;
  }

  template <bool kValue>
  __device__ __forceinline__ void load(const VerifyParams& p, const Segment& segment, int tile, int2 place, int offset,
                                       char* shared) {
    const uint32_t to = smem_address(shared) + offset + S::copy_offset();
    typename S::Rows rows{stream.key_cache, 0, to};
    int valid = 0;
    const int in_window = tile * S::kTile + S::copy_token() - segment.window_begin;  // below 0: in the context
    if (S::kInPairs && !is_inside(segment, tile)) {  // zeros
    } else if (__any_sync(0xffffffffu, in_window < 0)) {  // as in exists(): the warp does not diverge
      const int token = first_token(segment, tile);
      valid = segment.work.context - token;
      if (!p.whole_tiles) {
        copy_scattered_tile<S>(p, segment.request, segment.head, token, min(valid, kTileTokens),
                               TileAddresses{kValue ? TileAddresses::kNone : to, kValue ? to : TileAddresses::kNone});
        return;
      }
      rows = context_rows<kValue>(p, place, to);
    } else if constexpr (S::kFillsWindow) {
      return;  // load_window() brings it
    } else {
      valid = segment.work.window - in_window;
      if (!p.aligned) {
        fill_window_rows<S>(p, segment.work.start + in_window, segment.head, valid, kValue, shared + offset);
        return;
      }
      rows.stride = static_cast<uint32_t>((kValue ? p.value_token : p.key_token) * 2);
      rows.from = static_cast<const char*>(kValue ? p.value : p.key) +
                  segment.head * (kValue ? p.value_head : p.key_head) * 2;
      rows.from = further(rows.from, segment.work.start + in_window, rows.stride);
    }
    S::copy(valid, rows);
  }
};

}  // namespace nwor
