// Shared-memory tiles of the verify attention kernel: shapes, swizzle and the loads that fill them.
#pragma once

#include "fp8.cuh"
#include "mma.cuh"
#include "verify_walk.cuh"

namespace nwor {

// Byte offset of a 16-byte chunk in a tile of rows of kChunks chunks. Eight rows' chunks of one column always
// lie in eight different bank groups, so that ldmatrix has no conflicts.
template <int kChunks>
__device__ __forceinline__ int row_swizzle(int row) {
  if constexpr (kChunks % 8 == 0) return row & 7;
  if constexpr (kChunks % 8 == 4) return (row >> 1) & 3;
  return (row >> 2) & 1;
}

template <int kChunks>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  static_assert(kChunks % 2 == 0);
  return row * kChunks * 16 + ((chunk ^ row_swizzle<kChunks>(row)) << 4);
}

// Where a tile's rows lie, if they are evenly spaced. Strides in bytes.
struct TileRows {
  const char *key, *value;
  uint32_t key_stride, value_stride;
  int valid;  // rows that exist
};

// Rows so many strides further. Factors of 32 bits: one instruction.
__device__ __forceinline__ const char* further(const char* rows, int count, uint32_t stride) {
  return rows + static_cast<uint64_t>(static_cast<uint32_t>(count)) * stride;
}

// How one instantiation cuts its work. A thread block has kGroups groups of kRowWarps warps. A group takes every
// kGroups-th tile of the share through a ring of kStages stages of its own; its warps share the tile and divide
// the query rows, 8 * kRowTiles each.
template <int kD, int kRowTiles_, int kRowWarps_, int kGroups_, int kStages_, Kind kKind_>
struct Shape {
  static constexpr int kHeadSize = kD;
  static constexpr int kTile = kTileTokens;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kStages = kStages_;
  static constexpr Kind kKind = kKind_;
  static constexpr bool kFp8 = kKind == Kind::kFp8;
  static constexpr bool kFp8Query = false;       // the query is multiplied as fp8
  static constexpr bool kExpandsQuery = kFp8;    // an fp8 query becomes fp16
  static constexpr bool kInTurns = false;        // warpgroups with tiles of their own
  static constexpr bool kWindowFirst = false;    // tiles are taken from the segment's first one on
  static constexpr bool kFillsWindow = false;    // the window's tile is loaded as any other

  static constexpr int kThreads = 32 * kRowWarps * kGroups;
  static constexpr int kRows = 8 * kRowTiles * kRowWarps;
  static constexpr int kRowBytes = kD * (kFp8 ? 1 : 2);
  static constexpr int kTileBytes = kTileTokens * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kQueryRowBytes = kD * 2;
  static constexpr int kQueryBytes = kRows * kQueryRowBytes;
  static constexpr int kRingBytes = kGroups * kStages * kStageBytes;

  // The groups' results are added up in a stage of each ring, as many 16-wide slices of the head at a time as fit,
  // while the other stages already fill for the next segment. Where that would take too many rounds, or a cluster
  // adds up, the whole drained ring serves instead; the sum that a cluster's other thread blocks want lies behind.
  static constexpr int kSumBytes = kRows * kD * 4;
  static constexpr int merge_slices(int bytes, int parts) {
    for (int slices = kD / 16; slices > 1; --slices)
      if (kD / 16 % slices == 0 && parts * kRows * (slices * 16 + 4) * 4 <= bytes) return slices;
    return 1;
  }
  static constexpr int kStageSlices = merge_slices(kStageBytes, 1);
  static constexpr bool kOverlap =
      kD / 16 / kStageSlices <= 4 && kRows * (kStageSlices * 16 + 4) * 4 <= kStageBytes;
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

  static constexpr int kSumStride = kD;  // floats from row to row of the sum
  // Half tiles of a group that take as long as adding up the parts of a cluster, or those of workers; as measured.
  static constexpr int kClusterJoin = 2, kWorkerJoin = 11, kPartJoin = 2;
};

// The address `distance` chunks further along a row. `at` is that of a chunk below `distance`, swizzle included; for
// rows of a power of two bytes the swizzle's exclusive or commutes with the step's.
template <int kChunks>
__device__ __forceinline__ uint32_t chunk_further(uint32_t row, uint32_t swizzled, int distance) {
  if constexpr ((kChunks & (kChunks - 1)) == 0) return (row + swizzled) ^ (distance << 4);
  return row + (swizzled ^ (distance << 4));
}

// Sixteen bytes from global memory where they are not aligned.
static __device__ __noinline__ uint4 load_bytes_apart(const uint8_t* source) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i / 4] |= static_cast<uint32_t>(source[i]) << (i % 4 * 8);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Eight 16-bit numbers from global memory where they are not aligned.
static __device__ __noinline__ uint4 load_eight_apart(const uint16_t* source) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = source[2 * i] | (static_cast<uint32_t>(source[2 * i + 1]) << 16);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint4 load_eight(const uint16_t* source, bool aligned) {
  return aligned ? __ldg(reinterpret_cast<const uint4*>(source)) : load_eight_apart(source);
}

__device__ __forceinline__ float to_float(uint16_t bits, bool is_bf16) {
  return is_bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

// Row of query or output that a packed row stands for.
struct PackedRow {
  int token, head;  // of the window; of the group

  __device__ __forceinline__ PackedRow(const VerifyParams& p, int packed)
      : token(divide(packed, p.group)), head(packed - token * static_cast<int>(p.group.value)) {}
};

// Sixteen numbers of a query row as the product with an fp8 cache wants them: fp16, in the order in which an fp8
// tile's bytes fall into matrix fragments. Two numbers a word; `low` and `high` are both what comes and what becomes.
__device__ __forceinline__ void arrange_query(bool is_bf16, uint4& low, uint4& high) {
  uint32_t pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (is_bf16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float first = __uint_as_float(pairs[i] << 16), second = __uint_as_float(pairs[i] & 0xffff0000u);
      pairs[i] = pack2<Kind::kFp16>(fminf(fmaxf(first, -65504.f), 65504.f), fminf(fmaxf(second, -65504.f), 65504.f));
    }
  }
  low = make_uint4(pairs[0], pairs[2], pairs[4], pairs[6]);
  high = make_uint4(pairs[1], pairs[3], pairs[5], pairs[7]);
}

// The same of an e4m3 query, whose sixteen bytes came where `low` is kept.
__device__ __forceinline__ void expand_query(uint4& low, uint4& high) {
  const uint4 bytes = low;
  fp8x4_to_half2<false>(bytes.x, low.x, high.x);
  fp8x4_to_half2<false>(bytes.y, low.y, high.y);
  fp8x4_to_half2<false>(bytes.z, low.z, high.z);
  fp8x4_to_half2<false>(bytes.w, low.w, high.w);
}

// Calls `each` with the row and the piece of sixteen numbers of every piece of the query rows that is this thread's, and
// with where in shared memory the piece's one or two chunks begin.
template <class S, class Each>
__device__ __forceinline__ void for_query_pieces(Each each) {
  constexpr int kPieces = S::kHeadSize / 16, kStep = S::kThreads / kPieces;
  constexpr int kChunks = S::kFp8Query ? 1 : 2;
  const int thread = recomputed_thread();
  if constexpr (S::kThreads % kPieces == 0 && kStep % 8 == 0) {  // eight rows further the swizzle is the same
    const int piece = thread % kPieces, first = thread / kPieces;
    const int low = S::query_offset(first, kChunks * piece);
    const int high = S::query_offset(first, kChunks * piece + kChunks - 1);
#pragma unroll 1
    for (int row = first, further = 0; row < S::kRows; row += kStep, further += kStep * S::kQueryPitch)
      each(row, piece, low + further, high + further);
  } else {
#pragma unroll 1
    for (int i = thread; i < S::kRows * kPieces; i += S::kThreads) {
      const int row = i / kPieces, piece = i % kPieces;
      each(row, piece, S::query_offset(row, kChunks * piece), S::query_offset(row, kChunks * piece + kChunks - 1));
    }
  }
}

// The query rows on their way into shared memory, zeros where the window has none. Which thread copies what is for
// finish_query() to know.
template <class S>
__device__ __forceinline__ void load_query(const VerifyParams& p, const Segment& segment, char* shared) {
  const bool bytes = S::kFp8Query || (S::kExpandsQuery && p.fp8_query);
  const int64_t first = segment.work.start * p.query_token +
                        static_cast<int64_t>(segment.head) * p.group.value * p.query_head;
  for_query_pieces<S>([&](int row, int piece, int low, int high) {
    const bool inside = row < segment.row_count;
    const PackedRow packed(p, segment.first_row + (inside ? row : 0));
    const int64_t begin = first + packed.token * p.query_token + packed.head * p.query_head + piece * 16;
    if (bytes) {
      const auto* from = static_cast<const uint8_t*>(p.query) + begin;
      if (p.aligned) {
        copy_async16(smem_address(shared + low), from, inside);
      } else {
        *reinterpret_cast<uint4*>(shared + low) = inside ? load_bytes_apart(from) : make_uint4(0, 0, 0, 0);
      }
      return;
    }
    const auto* from = static_cast<const uint16_t*>(p.query) + begin;
    if (p.aligned) {
      copy_async16(smem_address(shared + low), from, inside);
      copy_async16(smem_address(shared + high), from + 8, inside);
      return;
    }
    *reinterpret_cast<uint4*>(shared + low) = inside ? load_eight_apart(from) : make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(shared + high) = inside ? load_eight_apart(from + 8) : make_uint4(0, 0, 0, 0);
  });
}

// Gives query rows that have arrived the form that products with an fp8 cache want. Each thread does so for the
// chunks that it copied itself, so that nobody waits for anybody; what follows needs a barrier.
template <class S>
__device__ __forceinline__ void finish_query(const VerifyParams& p, char* shared) {
  if constexpr (!S::kFp8 || S::kFp8Query) return;
  for_query_pieces<S>([&](int, int, int low_at, int high_at) {
    auto* low_chunk = reinterpret_cast<uint4*>(shared + low_at);
    auto* high_chunk = reinterpret_cast<uint4*>(shared + high_at);
    uint4 low = *low_chunk, high = *high_chunk;
    if (S::kExpandsQuery && p.fp8_query) {
      expand_query(low, high);
    } else {
      arrange_query(p.is_bf16, low, high);
    }
    *low_chunk = low;
    *high_chunk = high;
  });
}

// Begins the copy of a tile into a stage; rows past `valid` become zeros.
template <class S>
__device__ __forceinline__ void copy_tile(const TileRows& rows, int row_warp, uint32_t stage) {
  constexpr int kChunks = S::kRowBytes / 16;
  constexpr int kPasses = kChunks / 2;  // each copies 32 chunks
  const int lane = threadIdx.x % 32;
  if constexpr (32 % kChunks == 0) {
    // A pass is whole rows, so its addresses follow from the first pass's: no products to keep in registers.
    constexpr int kPassRows = 32 / kChunks;
    int row = lane / kChunks + row_warp * kPassRows;
    const uint32_t first = stage + chunk_offset<kChunks>(lane / kChunks, lane % kChunks);
    const char* key = further(rows.key, row, rows.key_stride) + lane % kChunks * 16;
    const char* value = further(rows.value, row, rows.value_stride) + lane % kChunks * 16;
    const uint64_t key_step = static_cast<uint64_t>(rows.key_stride) * (kPassRows * S::kRowWarps);
    const uint64_t value_step = static_cast<uint64_t>(rows.value_stride) * (kPassRows * S::kRowWarps);
#pragma unroll
    for (int i = 0; i < (kPasses + S::kRowWarps - 1) / S::kRowWarps; ++i) {
      const int pass = i * S::kRowWarps + (S::kRowWarps > 1 ? row_warp : 0);
      if (kPasses % S::kRowWarps != 0 && pass >= kPasses) break;
      // Adding rows to the first pass's changes the swizzle by an exclusive or.
      const uint32_t to =
          (first ^ (row_swizzle<kChunks>(pass * kPassRows) << 4)) + pass * (kPassRows * S::kRowBytes);
      const bool inside = row < rows.valid;
      copy_async16(to, key, inside);
      copy_async16(to + S::kTileBytes, value, inside);
      row += kPassRows * S::kRowWarps;
      key += key_step;
      value += value_step;
    }
  } else {
#pragma unroll
    for (int i = 0; i < (kPasses + S::kRowWarps - 1) / S::kRowWarps; ++i) {
      const int index = (i * S::kRowWarps + row_warp) * 32 + lane;
      if (kPasses % S::kRowWarps != 0 && index >= kPasses * 32) break;
      const int row = index / kChunks, chunk = index % kChunks;
      const bool inside = row < rows.valid;
      const int to = chunk_offset<kChunks>(row, chunk);
      copy_async16(stage + to, further(rows.key, row, rows.key_stride) + chunk * 16, inside);
      copy_async16(stage + S::kTileBytes + to, further(rows.value, row, rows.value_stride) + chunk * 16, inside);
    }
  }
}

// Which tiles of a stage are to be filled: keys, values or both; where no address is given, none.
struct TileAddresses {
  uint32_t key, value;
  static constexpr uint32_t kNone = ~0u;
};

// The same for a tile whose rows lie in blocks that do not hold whole tiles.
template <class S>
__device__ __noinline__ void copy_scattered_tile(const VerifyParams& p, int request, int head, int token, int valid,
                                                 TileAddresses to) {
  constexpr int kChunks = S::kRowBytes / 16;
  constexpr int kElement = S::kFp8 ? 1 : 2;
  const char* key = static_cast<const char*>(p.key_cache) + head * p.key_cache_head * kElement;
  const char* value = static_cast<const char*>(p.value_cache) + head * p.value_cache_head * kElement;
#pragma unroll 1
  for (int index = S::copy_warp() * 32 + threadIdx.x % 32; index < kTileTokens * kChunks;
       index += S::kCopyWarps * 32) {
    const int row = index / kChunks, chunk = index % kChunks;
    const int at = token + min(row, valid - 1);
    const int page = divide(at, p.block);
    const int64_t number = __ldg(p.block_table + request * p.block_table_row + page);
    const int64_t in_page = at - page * p.block_size;
    const int offset = S::tile_offset(row, chunk);
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

__device__ __forceinline__ float head_scale(const float* scales, int count, int head) {
  return scales == nullptr ? 1.f : __ldg(scales + (count == 1 ? 0 : head));
}

// What an fp8 cache's keys, and an fp8 query, are multiplied with to be what they stand for.
template <class S>
__device__ __forceinline__ float logit_descale(const VerifyParams& p, int head) {
  if constexpr (!S::kFp8) return 1.f;
  return head_scale(p.k_scale, p.k_scale_count, head) * head_scale(p.q_scale, p.q_scale_count, head);
}

}  // namespace nwor
