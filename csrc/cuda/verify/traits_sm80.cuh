// What follows from a configuration of the mma.sync kernel: sizes, places in shared memory, who copies what.
#pragma once

#include "verify/configs.h"
#include "verify/params.h"
#include "verify/swizzle.cuh"
#include "verify/work.h"

namespace nwor {

// A thread block has kGroups groups of kRowWarps warps. A group takes every
// kGroups-th tile of the share through a ring of kStages stages of its own; its warps share the tile and divide
// the query rows, 8 * kRowTiles each.
template <Config kConfig_, Kind kKind_>
struct Sm80Traits {
  static constexpr Config kConfig = kConfig_;
  static constexpr Kind kKind = kKind_;
  static constexpr int kHeadSize = kConfig.head_size;
  static constexpr int kTile = kTileTokens;
  static constexpr int kRowTiles = kConfig.row_tiles;
  static constexpr int kRowWarps = kConfig.row_groups;
  static constexpr int kGroups = kConfig.tile_groups;
  static constexpr int kStages = kConfig.key_stages;
  static_assert(kConfig.mainloop == Mainloop::kSm80 && kConfig.value_stages == kStages && kConfig.probabilities == 0);
  static constexpr bool kFp8 = kKind == Kind::kFp8;
  static constexpr bool kFp8Query = false;       // the query is multiplied as fp8
  static constexpr bool kExpandsQuery = kFp8;    // an fp8 query becomes fp16
  static constexpr bool kInTurns = false;        // warpgroups with tiles of their own
  static constexpr bool kWindowFirst = false;    // tiles are taken from the split's first one on
  static constexpr bool kFillsWindow = false;    // the window's tile is loaded as any other

  static constexpr int kThreads = 32 * kRowWarps * kGroups;
  static constexpr int kRows = kConfig.rows();
  static constexpr int kRowBytes = kHeadSize * (kFp8 ? 1 : 2);
  static constexpr int kTileBytes = kTileTokens * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kQueryRowBytes = kHeadSize * 2;
  static constexpr int kQueryBytes = kRows * kQueryRowBytes;
  static constexpr int kRingBytes = kGroups * kStages * kStageBytes;

  // The groups' results are added up in a stage of each ring, as many 16-wide slices of the head at a time as fit,
  // while the other stages already fill for the next split. Where that would take too many rounds, or a cluster
  // adds up, the whole drained ring serves instead; the sum that a cluster's other thread blocks want lies behind.
  static constexpr int kSumBytes = kRows * kHeadSize * 4;
  static constexpr int merge_slices(int bytes, int parts) {
    for (int slices = kHeadSize / 16; slices > 1; --slices)
      if (kHeadSize / 16 % slices == 0 && parts * kRows * (slices * 16 + 4) * 4 <= bytes) return slices;
    return 1;
  }
  static constexpr int kStageSlices = merge_slices(kStageBytes, 1);
  static constexpr bool kOverlap =
      kHeadSize / 16 / kStageSlices <= 4 && kRows * (kStageSlices * 16 + 4) * 4 <= kStageBytes;
  static constexpr int kRingSlices = merge_slices(kRingBytes - kSumBytes, kGroups);
  static constexpr int kMergeSlices = kOverlap && kStageSlices < kRingSlices ? kStageSlices : kRingSlices;
  static constexpr int kMergeStride = kMergeSlices * 16 + 4;  // floats; the 4 keep banks apart
  static constexpr int kMergeBytes = kRows * kMergeStride * 4;
  static constexpr int kSumOffset = kQueryBytes + kRingBytes - kSumBytes;
  static_assert(kGroups * kMergeBytes + kSumBytes <= kRingBytes);
  static_assert(!kOverlap || kMergeBytes <= kStageBytes);

  static constexpr int kMergeGroups = kGroups;  // that leave results of their own
  static constexpr int kStatGroups = kGroups;   // and statistics
  static constexpr int kStatsOffset = kQueryBytes + kRingBytes;
  static constexpr int kRowsOffset = kStatsOffset + kGroups * kRows * 8;
  static constexpr int kOutputOffset = kRowsOffset + kRows * 8;
  static constexpr int kFlagOffset = kOutputOffset + kRows * 8;
  static constexpr int kControlOffset = kFlagOffset + 16;
  static constexpr int kTableOffset = kControlOffset + kControlBytes;
  static constexpr int kSharedBytes = kTableOffset + kTabledRequests * 8;

  // Byte offset of a 16-byte chunk of a query row, and of a row of a tile.
  static constexpr int kQueryPitch = kQueryRowBytes;
  static __device__ __forceinline__ int query_offset(int row, int chunk) {
    return chunk_offset<kQueryRowBytes / 16>(row, chunk);
  }
  static __device__ __forceinline__ int tile_offset(int row, int chunk) {
    return chunk_offset<kRowBytes / 16>(row, chunk);
  }
  // The part of a tile that this warp helps to fill: its first token, and who helps.
  static constexpr int kCopyWarps = kRowWarps;
  static __device__ __forceinline__ int copy_warp() { return threadIdx.x / 32 % kRowWarps; }
  static __device__ __forceinline__ int copy_token() { return 0; }
  // The threads that convert a window's rows for a tile of an fp8 cache.
  static constexpr int kFillThreads = 32 * kRowWarps;
  static __device__ __forceinline__ int fill_thread() { return threadIdx.x % kFillThreads; }
  static __device__ __forceinline__ int group() { return threadIdx.x / 32 / kRowWarps; }

  static constexpr int kSumStride = kHeadSize;  // floats from row to row of the sum
  // Half tiles of a group that take as long as adding up the parts of a cluster, or those of workers; as measured.
  static constexpr int kClusterCombine = 2;
  static constexpr int kWorkerCombine = 11;
  static constexpr int kSplitCombine = 2;  // and, for each split, a sixteenth of so many more
};

}  // namespace nwor
