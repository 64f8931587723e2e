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
  int64_t key_stride, value_stride;
  int valid;  // rows that exist
};

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

  static constexpr int kStatGroups = kGroups;  // that leave statistics of their own
  static constexpr int kStatsOffset = kQueryBytes + kRingBytes;
  static constexpr int kRowsOffset = kStatsOffset + kGroups * kRows * 8;
  static constexpr int kOutputOffset = kRowsOffset + kRows * 8;
  static constexpr int kFlagOffset = kOutputOffset + kRows * 8;
  static constexpr int kControlOffset = kFlagOffset + 16;
  static constexpr int kTableOffset = kControlOffset + kControlBytes;
  static constexpr int kSharedBytes = kTableOffset + kTabledRequests * 8;

  // Byte offset of a 16-byte chunk of a query row, and of a row of a tile.
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
  // The threads that fill a tile where copying cannot.
  static constexpr int kFillThreads = 32 * kRowWarps;
  static __device__ __forceinline__ int fill_thread() { return threadIdx.x % kFillThreads; }

  static constexpr int kSumStride = kD;  // floats from row to row of the sum
  static constexpr int kMinTiles = 6;    // fewest tiles of a group that are worth another worker
};

// The address `distance` chunks further along a row. `at` is that of a chunk below `distance`, swizzle included; for
// rows of a power of two bytes the swizzle's exclusive or commutes with the step's.
template <int kChunks>
__device__ __forceinline__ uint32_t chunk_further(uint32_t row, uint32_t swizzled, int distance) {
  if constexpr ((kChunks & (kChunks - 1)) == 0) return (row + swizzled) ^ (distance << 4);
  return row + (swizzled ^ (distance << 4));
}

// Eight 16-bit numbers from global memory, whatever their alignment.
__device__ __forceinline__ uint4 load_eight(const uint16_t* source, bool aligned) {
  if (aligned) return __ldg(reinterpret_cast<const uint4*>(source));
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = source[2 * i] | (static_cast<uint32_t>(source[2 * i + 1]) << 16);
  return make_uint4(words[0], words[1], words[2], words[3]);
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

// Brings the query rows into shared memory, zeros where the window has none. fp8: as fp16, and within each 16
// numbers in the order in which an fp8 tile's bytes fall into matrix fragments.
template <class S>
__device__ __forceinline__ void load_query(const VerifyParams& p, const Segment& segment, char* shared) {
  constexpr int kChunks = S::kHeadSize / 8;
  const auto* query = static_cast<const uint16_t*>(p.query) + segment.work.start * p.query_token +
                      static_cast<int64_t>(segment.head) * p.group.value * p.query_head;
#pragma unroll 1
  for (int i = threadIdx.x; i < S::kRows * kChunks; i += S::kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool inside = row < segment.row_count;
    const PackedRow packed(p, segment.first_row + (inside ? row : 0));
    const uint16_t* from = query + packed.token * p.query_token + packed.head * p.query_head + chunk * 8;
    if (!S::kFp8 && p.aligned) {
      copy_async16(smem_address(shared) + S::query_offset(row, chunk), from, inside);
      continue;
    }
    const uint4 data = inside ? load_eight(from, p.aligned) : make_uint4(0, 0, 0, 0);
    if constexpr (!S::kFp8) {
      *reinterpret_cast<uint4*>(shared + S::query_offset(row, chunk)) = data;
    } else {
      const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t pair = words[w];
        if (p.is_bf16) {
          const float low = to_float(pair & 0xffff, true), high = to_float(pair >> 16, true);
          pair = pack2<Kind::kFp16>(fminf(fmaxf(low, -65504.f), 65504.f), fminf(fmaxf(high, -65504.f), 65504.f));
        }
        const int from_pair = (chunk & 1) * 4 + w;  // pair of the 16 numbers: 0..7
        const int to = (from_pair & 1) * 4 + from_pair / 2;
        *reinterpret_cast<uint32_t*>(shared + S::query_offset(row, (chunk & ~1) + to / 4) + to % 4 * 4) = pair;
      }
    }
  }
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
    const char* key = rows.key + row * rows.key_stride + lane % kChunks * 16;
    const char* value = rows.value + row * rows.value_stride + lane % kChunks * 16;
    const int64_t key_step = rows.key_stride * (kPassRows * S::kRowWarps);
    const int64_t value_step = rows.value_stride * (kPassRows * S::kRowWarps);
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
      copy_async16(stage + to, rows.key + row * rows.key_stride + chunk * 16, inside);
      copy_async16(stage + S::kTileBytes + to, rows.value + row * rows.value_stride + chunk * 16, inside);
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

// Eight numbers of a window's key or value on their way into a tile, zeros where there is no such row. With an fp8
// cache they are rounded to its format, since the stock path would read them back from there.
template <class S>
__device__ __forceinline__ void store_window_piece(const VerifyParams& p, uint4 data, bool valid, int row, int eight,
                                                   const Quotient& by, char* tile) {
  if constexpr (!S::kFp8) {
    *reinterpret_cast<uint4*>(tile + S::tile_offset(row, eight)) = data;
  } else {
    const uint32_t words[4] = {data.x, data.y, data.z, data.w};
    uint32_t pairs[4] = {0, 0, 0, 0};
    if (valid) {  // most rows of a tile do not exist, and rounding is what takes time
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = quantize_pair(
            make_float2(to_float(words[i] & 0xffff, p.is_bf16), to_float(words[i] >> 16, p.is_bf16)), by, p.is_e5m2);
    }
    *reinterpret_cast<uint2*>(tile + S::tile_offset(row, eight / 2) + eight % 2 * 8) =
        make_uint2(__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410));
  }
}

// Brings a tile of window keys, values or both to where copying cannot: rows that are not aligned, or an fp8 cache.
// All threads that fill a tile share the rows that exist; the others become zero. Offsets are from the beginning of
// shared memory.
template <class S>
__device__ __noinline__ void convert_window_tile(const VerifyParams& p, int first, int head, int valid, float k_scale,
                                                 float v_scale, char* shared, TileAddresses to) {
  constexpr int kEights = S::kHeadSize / 8, kBatch = S::kFp8 ? 4 : 1;
  const auto* key = static_cast<const uint16_t*>(p.key) + first * p.key_token + head * p.key_head;
  const auto* value = static_cast<const uint16_t*>(p.value) + first * p.value_token + head * p.value_head;
  const bool both = to.key != TileAddresses::kNone && to.value != TileAddresses::kNone;
  const int pieces = S::kTile * kEights * (both ? 2 : 1);
  const Quotient by_key(k_scale), by_value(v_scale);
#pragma unroll 1
  for (int begin = S::fill_thread(); begin < pieces; begin += kBatch * S::kFillThreads) {
    // Rows in turn for K and V, so that the rows that exist come first and whole warps skip the others' work.
    const auto eight_of = [&](int i) { return i % kEights; };
    const auto row_of = [&](int i) { return i / kEights / (both ? 2 : 1); };
    const auto is_value = [&](int i) { return both ? i / kEights % 2 == 1 : to.key == TileAddresses::kNone; };
    uint4 data[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {  // all on their way before the first is used
      const int i = begin + k * S::kFillThreads;
      data[k] = make_uint4(0, 0, 0, 0);
      if (i < pieces && row_of(i) < valid)
        data[k] = load_eight((is_value(i) ? value : key) + row_of(i) * (is_value(i) ? p.value_token : p.key_token) +
                                 eight_of(i) * 8,
                             p.aligned);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = begin + k * S::kFillThreads;
      if (i < pieces)
        store_window_piece<S>(p, data[k], row_of(i) < valid, row_of(i), eight_of(i), is_value(i) ? by_value : by_key,
                              shared + (is_value(i) ? to.value : to.key));
    }
  }
}

}  // namespace nwor
