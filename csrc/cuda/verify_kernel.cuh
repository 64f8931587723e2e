// The verify attention kernel: queries of short windows over a paged context and the windows' own keys and values.
//
// Scores are computed transposed, S^T = K Q^T and O^T = V^T P^T, so that the few query rows lie along the side of
// the tensor core's tile that comes in eights: a window of 5 tokens with 4 query heads per KV head fills 20 of 24.
// Every group of warps streams its own tiles through its own ring of asynchronous copies. Where groups are single warps,
// nothing synchronizes the whole thread block until its share of a unit is done.
#pragma once

#include "probes.cuh"
#include "verify_join.cuh"
#include "verify_stream.cuh"

namespace nwor {

constexpr float kRescaleAbove = 8.f;  // powers of two by which a score may exceed the running maximum unrescaled

template <class S>
struct WarpState {
  float accumulator[S::kHeadSize / 16][S::kRowTiles][4];  // O^T
  // Per column, base 2; the same in all lanes of a column. Negative, since that is what is added to a score.
  float minus_maximum[S::kRowTiles][2];
  float sum[S::kRowTiles][2];  // per column, this lane's part
};

// S^T of one tile: scores[j][e] is of key row lane/4 + e/2*8 and query row 8j + lane%4*2 + e%2.
template <class S, bool kE5m2>
__device__ __forceinline__ void multiply_keys(uint32_t key_tile, uint32_t query, float (&scores)[S::kRowTiles][4]) {
  constexpr int kKeyChunks = S::kRowBytes / 16;
  constexpr int kQueryChunks = S::kQueryRowBytes / 16;
  const int lane = threadIdx.x % 32;
  const int key_row = lane & 15;
  const uint32_t key_base = key_tile + key_row * S::kRowBytes;
  const int key_swizzle = ((lane >> 4) ^ row_swizzle<kKeyChunks>(key_row)) << 4;
  const uint32_t query_base = query + (lane & 7) * S::kQueryRowBytes;
  const int query_swizzle = ((lane >> 3) ^ row_swizzle<kQueryChunks>(lane & 7)) << 4;
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[j][e] = 0.f;
#pragma unroll
  for (int k = 0; k < S::kHeadSize / 16; k += 2) {
    uint32_t a[2][4];
    if constexpr (!S::kFp8) {
      load_matrix(a[0], chunk_further<kKeyChunks>(key_base, key_swizzle, 2 * k));
      load_matrix(a[1], chunk_further<kKeyChunks>(key_base, key_swizzle, 2 * k + 2));
    } else {
      uint32_t bytes[4];
      load_matrix(bytes, chunk_further<kKeyChunks>(key_base, key_swizzle, k));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        fp8x4_to_half2<kE5m2>(bytes[2 * i], a[i][0], a[i][2]);
        fp8x4_to_half2<kE5m2>(bytes[2 * i + 1], a[i][1], a[i][3]);
      }
    }
#pragma unroll
    for (int j = 0; j < S::kRowTiles; ++j) {
      uint32_t b[4];
      load_matrix(b, chunk_further<kQueryChunks>(query_base, query_swizzle, 2 * k) + j * 8 * S::kQueryRowBytes);
      mma16816<S::kKind>(scores[j], a[0], b[0], b[1]);
      mma16816<S::kKind>(scores[j], a[1], b[2], b[3]);
    }
  }
}

// O^T += V^T P^T, the probabilities as multiply_keys() laid the scores out.
template <class S, bool kE5m2>
__device__ __forceinline__ void multiply_values(uint32_t value_tile, const float (&probabilities)[S::kRowTiles][4],
                                                float (&accumulator)[S::kHeadSize / 16][S::kRowTiles][4]) {
  constexpr int kChunks = S::kRowBytes / 16;
  const int lane = threadIdx.x % 32;
  uint32_t b[S::kRowTiles][2];
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j) {
    b[j][0] = transpose8x8(pack2<S::kKind>(probabilities[j][0], probabilities[j][1]));
    b[j][1] = transpose8x8(pack2<S::kKind>(probabilities[j][2], probabilities[j][3]));
  }
  if constexpr (!S::kFp8) {
    const int row = (lane & 7) + ((lane >> 4) << 3);
    const uint32_t base = value_tile + row * S::kRowBytes;
    const int swizzle = (((lane >> 3) & 1) ^ row_swizzle<kChunks>(row)) << 4;
#pragma unroll
    for (int d = 0; d < S::kHeadSize / 16; ++d) {
      uint32_t a[4];
      load_matrix_transposed(a, chunk_further<kChunks>(base, swizzle, 2 * d));
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j) mma16816<S::kKind>(accumulator[d][j], a, b[j][0], b[j][1]);
    }
  } else {
    // A transposed 16-bit load moves pairs of neighbouring head positions: row g of a fragment is position 2g of
    // the slice, row g + 8 is 2g + 1. put_pair() undoes it.
    const int row = (lane & 7) + (((lane >> 3) & 1) << 3);
    const uint32_t base = value_tile + row * S::kRowBytes;
    const int swizzle = ((lane >> 4) ^ row_swizzle<kChunks>(row)) << 4;
#pragma unroll
    for (int d = 0; d < S::kHeadSize / 16; d += 2) {
      uint32_t bytes[4];
      load_matrix_transposed(bytes, chunk_further<kChunks>(base, swizzle, d));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t even_odd = __byte_perm(bytes[2 * i + half], 0, 0x3120);
          fp8x4_to_half2<kE5m2>(even_odd, a[2 * half], a[2 * half + 1]);
        }
#pragma unroll
        for (int j = 0; j < S::kRowTiles; ++j) mma16816<S::kKind>(accumulator[d + i][j], a, b[j][0], b[j][1]);
      }
    }
  }
}

// Takes the keys that a query row must not see out of its scores.
template <class S>
__device__ __forceinline__ void mask_scores(const VerifyParams& p, const Segment& segment, int warp_row, bool window,
                                            int token, int valid, float (&scores)[S::kRowTiles][4]) {
  const int lane = recomputed(static_cast<int>(threadIdx.x % 32));
  const bool tree = p.ancestor_mask != nullptr;
  if (!tree && p.sliding_window <= 0) {
#pragma unroll
    for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int packed = segment.first_row + warp_row + 8 * j + lane % 4 * 2 + column;
        const int last = window ? min(valid - 1, divide(packed, p.group) - token) : valid - 1;
        if (lane / 4 > last) scores[j][column] = -INFINITY;
        if (lane / 4 + 8 > last) scores[j][2 + column] = -INFINITY;
      }
    return;
  }
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int packed = segment.first_row + warp_row + 8 * j + lane % 4 * 2 + column;
      const int row = min(divide(packed, p.group), segment.work.window - 1);
      const int64_t sees = tree ? __ldg(p.ancestor_mask + segment.work.start + row) : 0;
      const int depth = tree ? __popcll(sees) - 1 : row;
      const int oldest = p.sliding_window > 0 ? segment.work.context + depth - p.sliding_window + 1 : -1;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key_row = lane / 4 + half * 8;
        bool visible = key_row < valid;
        int position = token + key_row;
        if (window && visible) {
          const int index = position;
          visible = tree ? ((sees >> index) & 1) != 0 : index <= row;
          const int key_depth =
              tree && oldest >= 0 ? __popcll(__ldg(p.ancestor_mask + segment.work.start + index)) - 1 : index;
          position = segment.work.context + key_depth;
        }
        if (!visible || position < oldest) scores[j][2 * half + column] = -INFINITY;
      }
    }
}

// Scores soft-capped: softcap * tanh(logit / softcap), divided by logit_scale again, so that what follows scales them
// like any others. exponent_scale is logit_scale for powers of two.
template <int kRowTiles>
__device__ __forceinline__ void soft_cap(float softcap, float logit_scale, float exponent_scale,
                                         float (&scores)[kRowTiles][4]) {
  const float inner = __fdividef(2.f * exponent_scale, softcap), outer = __fdividef(softcap, logit_scale);
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[j][e] = outer * (1.f - __fdividef(2.f, exp2_fast(scores[j][e] * inner) + 1.f));
}

// By how many powers of two this lane's highest score exceeds its row's running maximum: minus_maximum[j][c] lowered it.
template <int kRowTiles>
__device__ __forceinline__ float highest_excess(float scale, const float (&scores)[kRowTiles][4],
                                                const float (&minus_maximum)[kRowTiles][2]) {
  float excess = -INFINITY;
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c)
      excess = fmaxf(excess, fmaf(fmaxf(scores[j][c], scores[j][2 + c]), scale, minus_maximum[j][c]));
  return excess;
}

// Scores to probabilities relative to the running maximum. The maximum is moved, and what has been added up
// rescaled, only where a score exceeds it by more than kRescaleAbove.
template <class S>
__device__ __forceinline__ void softmax_step(float scale, bool first, float (&scores)[S::kRowTiles][4],
                                             WarpState<S>& state) {
  if (__any_sync(0xffffffffu, highest_excess(scale, scores, state.minus_maximum) > kRescaleAbove)) {
    float shrink[S::kRowTiles][2];
#pragma unroll
    for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float highest = fmaxf(scores[j][c], scores[j][2 + c]) * scale;
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 4));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 8));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 16));
        highest = fmaxf(highest, -state.minus_maximum[j][c]);
        shrink[j][c] = exp2_fast(-state.minus_maximum[j][c] - highest);
        state.minus_maximum[j][c] = -highest;
      }
    if (!first) {
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          state.sum[j][c] *= shrink[j][c];
#pragma unroll
          for (int d = 0; d < S::kHeadSize / 16; ++d) {
            state.accumulator[d][j][c] *= shrink[j][c];
            state.accumulator[d][j][2 + c] *= shrink[j][c];
          }
        }
    }
  }
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[j][e] = exp2_fast(fmaf(scores[j][e], scale, state.minus_maximum[j][e % 2]));
      state.sum[j][e % 2] += scores[j][e];
    }
}

// The warps that share a ring wait for each other. Where a group has several of them, so does the whole thread block:
// a barrier for each group saves nothing measurable, and hides the order of accesses from the tools that check it.
template <class S>
__device__ __forceinline__ void sync_group() {
  if constexpr (S::kRowWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// The group's tiles of a segment that begin_segment() began.
template <class S>
__device__ __forceinline__ void attend_segment(const VerifyParams& p, const Segment& segment, Stream<S>& stream,
                                               WarpState<S>& state, char* shared) {
  const RequestWork& work = segment.work;
  const int warp_row = stream.row();
  const uint32_t query = smem_address(shared) + warp_row * S::kQueryRowBytes;
  const float logit_scale = p.scale * logit_descale<S>(p, segment.head);
  const float exponent_scale = logit_scale * kLog2e;
  // Context tokens before this one are outside some row's sliding window.
  const int masked_before = p.sliding_window > 0 ? work.context + work.window - p.sliding_window : 0;
#pragma unroll
  for (int j = 0; j < S::kRowTiles; ++j) {
#pragma unroll
    for (int d = 0; d < S::kHeadSize / 16; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) state.accumulator[d][j][e] = 0.f;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      state.minus_maximum[j][c] = -kNoScore;
      state.sum[j][c] = 0.f;
    }
  }

  copy_async_wait<S::kStages - 2>();
  finish_query<S>(p, shared);
  __syncthreads();  // the query rows are there
  probe(p, Station::kFirstTiles);
  int slot = 0, load_slot = S::kStages - 1;
  // All groups take as many steps where they wait for each other; a group's last one may find no tile.
  const int longest = S::kRowWarps == 1 ? stream.first : stream.first - stream.group();
#pragma unroll 1
  for (int step = 0; longest + stream.stride * step < segment.end; ++step) {
    if (step > 0) {
      copy_async_wait<S::kStages - 2>();
      sync_group<S>();
    }
    load_tile<S>(p, segment, stream, step + S::kStages - 1, load_slot, shared);
    copy_async_commit();
    load_slot = load_slot + 1 == S::kStages ? 0 : load_slot + 1;

    const int tile = stream.first + stream.stride * step;
    if (S::kRowWarps > 1 && tile >= segment.end) continue;
    const int in_window = tile * kTileTokens - segment.window_begin;
    const bool window = in_window >= 0;
    const int token = window ? in_window : (segment.first_context_tile + tile) * kTileTokens;
    const int valid = (window ? work.window : work.context) - token;
    const uint32_t stage = stream.ring + slot * S::kStageBytes;
    slot = slot + 1 == S::kStages ? 0 : slot + 1;
    float scores[S::kRowTiles][4];
    if (S::kFp8 && p.is_e5m2) {
      multiply_keys<S, true>(stage, query, scores);
    } else {
      multiply_keys<S, false>(stage, query, scores);
    }
    if (p.softcap != 0.f) soft_cap(p.softcap, logit_scale, exponent_scale, scores);
    if (window || valid < kTileTokens || token < masked_before)
      mask_scores<S>(p, segment, warp_row, window, token, valid, scores);
    softmax_step<S>(exponent_scale, step == 0, scores, state);
    if (S::kFp8 && p.is_e5m2) {
      multiply_values<S, true>(stage + S::kTileBytes, scores, state.accumulator);
    } else {
      multiply_values<S, false>(stage + S::kTileBytes, scores, state.accumulator);
    }
  }
  copy_async_wait<0>();
}

// What begins a segment after the first: a function of its own, as in verify_wgmma.cuh.
template <class S>
__device__ __noinline__ Stream<S> begin_next(const VerifyParams& p, const Segment& segment, Stream<S> stream,
                                             char* shared) {
  begin_segment<S>(p, segment, stream, shared);
  return stream;
}

// `kMany`: as in verify_wgmma.cuh.
template <class S, int kBlocksPerSm, bool kMany>
__global__ void __launch_bounds__(S::kThreads, kBlocksPerSm)
    verify_attention_kernel(const __grid_constant__ VerifyParams p) {
  extern __shared__ __align__(1024) char shared[];
  const Requests<S::kRows, S::kTile> requests{p, reinterpret_cast<int2*>(shared + S::kTableOffset)};
  Control& control = *reinterpret_cast<Control*>(shared + S::kControlOffset);
  probe(p, Station::kBegin);
  begin_walk(p, requests, control, *reinterpret_cast<Ranking*>(shared));
  if (!control.more) return;
  probe(p, Station::kPlanned);

  Stream<S> stream;
  stream.ring = smem_address(shared + S::kQueryBytes + stream.group() * S::kStages * S::kStageBytes);
  const MergeSpace<S> space{shared};
  const bool overlap = S::kOverlap && space.cluster() == 1;
  const WalkAhead<S::kRows, S::kTile> ahead(p, requests, control);
  begin_segment<S>(p, control.segments[0], stream, shared);
  ahead.keep();
  if (threadIdx.x == 0) control.shared.worker_count = 0;
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    const Segment& segment = control.segments[turn];
    Segment& next = control.segments[turn ^ 1];
    __syncthreads();  // everybody has read what the first thread now overwrites
    if (threadIdx.x == 0) continue_walk<kMany>(p, requests, segment, next, control);
    WarpState<S> state;
    attend_segment<S>(p, segment, stream, state, shared);
    probe(p, Station::kLastTile);
    share_stats<S>(stream.group(), stream.row(), state.minus_maximum, state.sum, space);
    __syncthreads();  // the statistics are there, and no warp reads the query rows or the ring any more
    const bool more = control.more;
    if (overlap && more) {
      if constexpr (kMany) {
        begin_segment<S>(p, next, stream, shared);
      } else {
        stream = begin_next<S>(p, next, stream, shared);
      }
    }
    const int slot = slot_of(segment, control.walk.worker);
    merge_stats<S>(p, segment, slot, space);
    add_groups<S>(p, segment, stream.group(), stream.row(), slot, state.accumulator, space);
    if (space.cluster() > 1) add_cluster<S>(p, segment, slot, space);
    probe(p, Station::kPassedOn);
    if (!more) {
      if (control.shared.worker_count + segment.worker_count > 1)
        join_units<S>(p, control.shared, segment, control.walk.worker, space);
      probe(p, Station::kEnd);
      return;
    }
    if (!overlap) {
      __syncthreads();  // what the next segment's tiles overwrite has been read
      stream = begin_next<S>(p, next, stream, shared);
    }
  }
}

}  // namespace nwor
