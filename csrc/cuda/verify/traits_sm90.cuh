// What follows from a configuration of the wgmma kernel: sizes, places in shared memory, who copies what.
#pragma once

#include "verify/configs.h"
#include "verify/params.h"
#include "verify/swizzle.cuh"
#include "verify/work.h"

namespace nwor {

// A thread block has kRowGroups warpgroups, each with 8 * kRowTiles query rows of its own; all read the same tiles. Or
// its two warpgroups take tiles in pairs: each computes the scores of all rows with a tile of its own, and half of the
// head's values of both. Two row groups read and convert every tile twice, a pair's warpgroups only once. A stage is then
// a pair, as is the room for probabilities. Or its warpgroups take tiles in turns: each has rings, probabilities and a
// result of its own, and none waits for another before the results are added up. With one stage of each a loop of its own
// loads keys and values as soon as there is room.
template <Config kConfig_, Kind kKind_>
struct Sm90Traits {
  static constexpr Config kConfig = kConfig_;
  static constexpr Kind kKind = kKind_;
  static constexpr int kHeadSize = kConfig.head_size;
  static constexpr int kTile = 64;
  static constexpr int kRowTiles = kConfig.row_tiles;
  static constexpr int kRowGroups = kConfig.row_groups;
  static constexpr int kRowWarps = 4 * kRowGroups;
  static constexpr int kGroups = kConfig.tile_groups;  // tiles at a time
  static constexpr bool kInTurns = kConfig.mainloop == Mainloop::kSm90Turns;
  static constexpr bool kInPairs = kConfig.mainloop == Mainloop::kSm90Pairs;
  static constexpr int kStageTiles = kInPairs ? 2 : 1;  // tiles of keys, or of values, in a stage
  static constexpr int kRings = kInTurns ? kGroups : 1;
  // Of 64 head positions, in a warpgroup's part of the result.
  static constexpr int kBlocks = kHeadSize / 64 / kStageTiles;
  static constexpr int kKeyStages = kConfig.key_stages;
  static constexpr int kValueStages = kConfig.value_stages;
  static constexpr int kProbabilities = kConfig.probabilities;
  static constexpr bool kFp8Query = kKind == Kind::kFp8Query;
  static constexpr bool kExpandsQuery = false;
  static constexpr bool kFp8 = kKind == Kind::kFp8 || kFp8Query;
  static constexpr bool kOneStage = kKeyStages == 1 && kValueStages == 1;
  // A split's tiles are taken from the last one on, so that the window's comes first: then no tile is left to multiply
  // when a launch's last context arrives. With an fp8 cache its window's rows are converted by all threads, who wait for
  // what they convert, while the other first tiles are on their way.
  static constexpr bool kFillsWindow = kFp8;
  static constexpr bool kWindowFirst = !kOneStage;
  static_assert(kHeadSize % 64 == 0);
  static_assert(kGroups == 1 || (kRowGroups == 1 && (kInTurns || (kInPairs && kHeadSize % 128 == 0))));
  static_assert(kOneStage ? kProbabilities == 1 && kInPairs && !kFp8
                          : kValueStages >= 2 && kKeyStages >= 2 && kKeyStages + 1 >= kValueStages);
  static_assert(kProbabilities == 1 || kProbabilities == 2);

  static constexpr int kThreads = 128 * kRowGroups * kGroups;
  static constexpr int kRows = kConfig.rows();
  // Tiles and query rows lie in panels of at most 128 bytes of all their rows, as the matrix unit wants them.
  static constexpr int kRowBytes = kHeadSize * (kFp8 ? 1 : 2);
  static constexpr int kPitch = kRowBytes < 128 ? kRowBytes : 128;
  static constexpr int kPanelBytes = kTile * kPitch;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kStageBytes = kStageTiles * kTileBytes;
  static constexpr int kQueryRowBytes = kHeadSize * (kFp8Query ? 1 : 2);
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
  static constexpr int kClusterCombine = 3;
  static constexpr int kWorkerCombine = kFp8 || kHeadSize < 256 ? 8 : 6;
  static constexpr int kSplitCombine = kFp8 ? 2 : 6;  // and, for each split, a sixteenth of so many more

  // A result takes the place of the last keys and the last values, which lie side by side, while the other tiles of
  // the next split are on their way already. Where that is too little, or a cluster adds up, it has the whole ring.
  // With one stage it has the values' place, and as much room more as it needs. Warpgroups that took turns leave their
  // results in the ring, behind the place of their sum.
  static constexpr int kSumStride = kHeadSize + 4;
  static constexpr int kSumBytes = kRows * kSumStride * 4;
  static constexpr int kSpareBytes =
      kOneStage && kSumBytes > kStageBytes ? (kSumBytes - kStageBytes + 1023) / 1024 * 1024 : 0;
  static constexpr int merge_slices(int bytes) {
    for (int slices = kHeadSize / 16; slices > 4; slices -= 4)
      if (kHeadSize / 16 % slices == 0 && kRows * (slices * 16 + 4) * 4 <= bytes) return slices;
    return 4;
  }
  static constexpr bool kOverlap = !kInTurns && (kOneStage || kRows * (4 * 16 + 4) * 4 <= 2 * kStageBytes);
  static constexpr int kMergeSlices =
      kOneStage || kInTurns ? kHeadSize / 16 : merge_slices(kOverlap ? 2 * kStageBytes : kRingBytes);
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
  // Statistics take the probabilities' place when a split's products are done.
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
};

}  // namespace nwor
