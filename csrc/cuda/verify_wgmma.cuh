// The verify attention kernel for Hopper's warpgroup matrix unit. The same transposed products as in
// verify_kernel.cuh, 64 tokens at a time: S^T = K Q^T leaves 16 tokens to each of the four warps, O^T += V^T P^T a
// quarter of each 64 head positions. No tile passes through registers, and a thread block has one ring and one
// result, so windows with many query rows stay bound by memory.
#pragma once

#include "verify_kernel.cuh"
#include "wgmma.cuh"

namespace nwor {

template <int kD, int kRowTiles_, int kStages_, Kind kKind_>
struct WarpgroupShape {
  static constexpr int kHeadSize = kD;
  static constexpr int kTile = 64;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kRowWarps = 4;
  static constexpr int kGroups = 1;
  static constexpr int kStages = kStages_;
  static constexpr Kind kKind = kKind_;
  static constexpr bool kFp8 = false;
  static_assert(kKind != Kind::kFp8 && kD % 64 == 0 && kStages >= 2);

  static constexpr int kThreads = 128;
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kPanelBytes = kTile * 128;  // 64 head positions of all tokens
  static constexpr int kRowBytes = kD * 2;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kQueryBytes = kRows * kD * 2;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kProbabilityBytes = kRows * 128;

  static constexpr int kSumBytes = kRows * kD * 4;
  static constexpr int merge_slices(int bytes) {
    for (int slices = kD / 16; slices > 4; slices -= 4)
      if (kD / 16 % slices == 0 && kRows * (slices * 16 + 4) * 4 <= bytes) return slices;
    return 4;
  }
  static constexpr int kStageSlices = merge_slices(kStageBytes);
  static constexpr int kRingSlices = merge_slices(kRingBytes - kSumBytes);
  static constexpr bool kOverlap = kRows * (kStageSlices * 16 + 4) * 4 <= kStageBytes;
  static constexpr int kMergeSlices = kOverlap && kStageSlices < kRingSlices ? kStageSlices : kRingSlices;
  static constexpr int kMergeStride = kMergeSlices * 16 + 4;
  static constexpr int kMergeBytes = kRows * kMergeStride * 4;
  static constexpr int kSumOffset = kQueryBytes + kRingBytes - kSumBytes;
  static_assert(kMergeBytes + kSumBytes <= kRingBytes);

  static constexpr int kProbabilityOffset = kQueryBytes + kRingBytes;
  // Statistics take the probabilities' place when a segment's products are done.
  static constexpr int kStatGroups = 4;
  static constexpr int kStatsOffset = kProbabilityOffset;
  static constexpr int kRowsOffset = kStatsOffset + kStatGroups * kRows * 8;
  static constexpr int kOutputOffset = kRowsOffset + kRows * 8;
  static_assert(kOutputOffset + kRows * 8 <= kProbabilityOffset + kProbabilityBytes);
  static constexpr int kFlagOffset = kProbabilityOffset + kProbabilityBytes;
  static constexpr int kControlOffset = kFlagOffset + 16;
  static constexpr int kTableOffset = kControlOffset + kControlBytes;
  static constexpr int kSharedBytes = kTableOffset + kTabledRequests * 8;

  static __device__ __forceinline__ int query_offset(int row, int chunk) {
    return chunk / 8 * (kRows * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
  }
  static __device__ __forceinline__ int tile_offset(int row, int chunk) {
    return chunk / 8 * kPanelBytes + row * 128 + ((chunk ^ row) & 7) * 16;
  }
  static constexpr int kCopyWarps = 1;  // each warp copies 16 tokens of a tile
  static __device__ __forceinline__ int copy_warp() { return 0; }
  static __device__ __forceinline__ int copy_token() { return threadIdx.x / 32 * 16; }
  static __device__ __forceinline__ int copy_offset() { return threadIdx.x / 32 * 16 * 128; }
  static __device__ __forceinline__ void copy(const TileRows& rows, uint32_t stage) {
    constexpr int kChunks = kRowBytes / 16;
    constexpr int kPassRows = 32 / kChunks;
    const int lane = threadIdx.x % 32;
    int row = lane / kChunks;
    const int chunk = lane % kChunks;
    const uint32_t first = stage + tile_offset(row, chunk);
    const char* key = rows.key + row * rows.key_stride + chunk * 16;
    const char* value = rows.value + row * rows.value_stride + chunk * 16;
#pragma unroll
    for (int pass = 0; pass < 16 / kPassRows; ++pass) {
      const uint32_t to = (first ^ ((pass * kPassRows & 7) << 4)) + pass * kPassRows * 128;
      const bool inside = row < rows.valid;
      copy_async16(to, key, inside);
      copy_async16(to + kTileBytes, value, inside);
      row += kPassRows;
      key += rows.key_stride * kPassRows;
      value += rows.value_stride * kPassRows;
    }
  }
};

template <class S>
struct WarpgroupState {
  float accumulator[S::kHeadSize / 64][S::kRowTiles][4];  // O^T; block b, this warp: slice 4b + warp
  float maximum[S::kRowTiles][2];
  float sum[S::kRowTiles][2];  // this lane's part
};

// The running maxima of all rows after a tile that exceeds them, and what was added up shrunk to fit. Called by the
// whole thread block, while nothing reads the probabilities.
template <class S>
__device__ __forceinline__ void raise_maxima(float scale, bool first, const float (&scores)[S::kRowTiles][4],
                                             WarpgroupState<S>& state, char* shared) {
  const int lane = threadIdx.x % 32;
  float* exchange = reinterpret_cast<float*>(shared + S::kProbabilityOffset);  // [4][rows]
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float highest = fmaxf(scores[j][c], scores[j][2 + c]) * scale;
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 4));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 8));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 16));
      if (lane < 4) exchange[threadIdx.x / 32 * S::kRows + 8 * j + 2 * lane + c] = highest;
    }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float highest = state.maximum[j][c];
#pragma unroll
      for (int w = 0; w < 4; ++w) highest = fmaxf(highest, exchange[w * S::kRows + 8 * j + 2 * (lane % 4) + c]);
      const float shrink = exp2_fast(state.maximum[j][c] - highest);
      state.maximum[j][c] = highest;
      if (first) continue;
      state.sum[j][c] *= shrink;
#pragma unroll
      for (int b = 0; b < S::kHeadSize / 64; ++b) {
        state.accumulator[b][j][c] *= shrink;
        state.accumulator[b][j][2 + c] *= shrink;
      }
    }
  __syncthreads();  // the probabilities may overwrite the exchanged maxima
}

template <class S>
__device__ __forceinline__ void attend_segment(const VerifyParams& p, const Segment& segment, Stream<S>& stream,
                                               WarpgroupState<S>& state, char* shared) {
  constexpr int kBlocks = S::kHeadSize / 64;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t query = smem_address(shared);
  const uint32_t probabilities = query + S::kProbabilityOffset;
  // Where this lane's row of a probability fragment goes: row lane % 8 of eight, tokens 16 * warp and eight further.
  const uint32_t store_to = probabilities + lane % 8 * 128 + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4);
  const float exponent_scale = p.scale * kLog2e;
  const int masked_before = p.sliding_window > 0 ? segment.work.context + segment.work.window - p.sliding_window : 0;
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e) state.accumulator[b][j][e] = 0.f;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      state.maximum[j][c] = kNoScore;
      state.sum[j][c] = 0.f;
    }
  }

  int slot = 0, load_slot = S::kStages - 1;
#pragma unroll 1
  for (int step = 0; stream.first + stream.stride * step < segment.end; ++step) {
    copy_async_wait<S::kStages - 2>();
    fence_async_proxy();
    __syncthreads();  // the tile is there, and the query rows
    const uint32_t stage = stream.ring + slot * S::kStageBytes;
    slot = slot + 1 == S::kStages ? 0 : slot + 1;
    float scores[S::kRowTiles][4];
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < S::kHeadSize / 16; ++k)
      Wgmma<S::kRowTiles, S::kKind, 0>::run(scores,
                                            wgmma_operand(stage + k / 4 * S::kPanelBytes + k % 4 * 32),
                                            wgmma_operand(query + k / 4 * (S::kRows * 128) + k % 4 * 32), k > 0);
    wgmma_commit();
    wgmma_wait();  // for the previous tile's values as well

    const int tile = stream.first + stream.stride * step;
    const bool window = tile >= segment.context_tiles;
    const int token = (window ? tile - segment.context_tiles : segment.first_context_tile + tile) * S::kTile + 16 * warp;
    const int valid = (window ? segment.work.window : segment.work.context) - token;
    if (p.softcap != 0.f) {
      const float inner = 2.f * exponent_scale / p.softcap, outer = p.softcap / p.scale;
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          scores[j][e] = outer * (1.f - __fdividef(2.f, exp2_fast(scores[j][e] * inner) + 1.f));
    }
    if (window || valid < 16 || token < masked_before) mask_scores<S>(p, segment, 0, window, token, valid, scores);
    float excess = -INFINITY;
#pragma unroll
    for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        excess = fmaxf(excess, fmaf(fmaxf(scores[j][c], scores[j][2 + c]), exponent_scale, -state.maximum[j][c]));
    const bool raise = __syncthreads_or(excess > kRescaleAbove) != 0;  // and no warp reads the last tile any more
    load_tile<S>(p, segment, stream, step + S::kStages - 1, load_slot, shared);
    copy_async_commit();
    load_slot = load_slot + 1 == S::kStages ? 0 : load_slot + 1;
    if (raise) raise_maxima<S>(exponent_scale, step == 0, scores, state, shared);

#pragma unroll
    for (int j = 0; j < S::kRowTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[j][e] = exp2_fast(fmaf(scores[j][e], exponent_scale, -state.maximum[j][e % 2]));
        state.sum[j][e % 2] += scores[j][e];
      }
      store_matrix2_transposed(store_to + j * 1024, pack2<S::kKind>(scores[j][0], scores[j][1]),
                               pack2<S::kKind>(scores[j][2], scores[j][3]));
    }
    fence_async_proxy();
    __syncthreads();
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        Wgmma<S::kRowTiles, S::kKind, 1>::run(
            state.accumulator[b], wgmma_operand(stage + S::kTileBytes + b * S::kPanelBytes + k * 16 * 128),
            wgmma_operand(probabilities + k * 32), true);
    wgmma_commit();
  }
  copy_async_wait<0>();
  wgmma_wait();
  __syncthreads();  // the statistics may take the probabilities' place
}

// Puts the warps' slices of the result in shared memory and passes them on.
template <class S>
__device__ __forceinline__ void put_slices(const VerifyParams& p, const Segment& segment, int slot,
                                           const float (&accumulator)[S::kHeadSize / 64][S::kRowTiles][4],
                                           const MergeSpace<S>& space) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int unused;
  float* merge = merge_buffer<S>(p, space, unused);
  float* mine = merge + lane % 4 * 2 * S::kMergeStride + warp * 16 + lane / 4 * 2;
#pragma unroll
  for (int begin = 0; begin < S::kHeadSize / 16; begin += S::kMergeSlices) {
    if (begin > 0) __syncthreads();
#pragma unroll
    for (int b = 0; b < S::kMergeSlices / 4; ++b)
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          *reinterpret_cast<float2*>(mine + (8 * j + e) * S::kMergeStride + b * 64) =
              make_float2(accumulator[begin / 4 + b][j][e], accumulator[begin / 4 + b][j][2 + e]);
    __syncthreads();
    emit_slices<S>(p, segment, slot, begin, merge, 0, space);
  }
}

template <class S, int kBlocksPerSm>
__global__ void __launch_bounds__(S::kThreads, kBlocksPerSm)
    verify_warpgroup_kernel(const __grid_constant__ VerifyParams p) {
#if NWOR_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const Requests<S::kRows, S::kTile> requests{p, reinterpret_cast<int2*>(shared + S::kTableOffset)};
  Control& control = *reinterpret_cast<Control*>(shared + S::kControlOffset);
  const int worker = blockIdx.x / p.cluster, rank = blockIdx.x % p.cluster;
  begin_walk(p, requests, worker, control);
  if (!control.more) return;

  Stream<S> stream;
  stream.ring = smem_address(shared + S::kQueryBytes);
  const MergeSpace<S> space{shared};
  const bool overlap = S::kOverlap && p.cluster == 1;
  begin_segment<S>(p, control.segments[0], rank, stream, shared);
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    const Segment& segment = control.segments[turn];
    Segment& next = control.segments[turn ^ 1];
    __syncthreads();  // everybody has read what the first thread now overwrites
    if (threadIdx.x == 0) continue_walk(p, requests, segment, next, control);
    WarpgroupState<S> state;
    attend_segment<S>(p, segment, stream, state, shared);
    share_stats<S>(threadIdx.x / 32, 0, state.maximum, state.sum, space);
    __syncthreads();  // the statistics are there
    const bool more = control.more;
    if (overlap && more) begin_segment<S>(p, next, rank, stream, shared);
    const int slot = 2 * worker + (worker == segment.first_worker ? 1 : 0);
    merge_stats<S>(p, segment, slot, space);
    put_slices<S>(p, segment, slot, state.accumulator, space);
    if (p.cluster > 1 || segment.worker_count > 1) join_parts<S>(p, segment, worker, rank, space);
    if (!more) return;
    if (!overlap) {
      __syncthreads();  // what the next segment's tiles overwrite has been read
      begin_segment<S>(p, next, rank, stream, shared);
    }
  }
#endif
}

}  // namespace nwor
