// Query rows on their way into shared memory.
#pragma once

#include "common/convert.cuh"
#include "common/loads.cuh"
#include "common/ptx.cuh"
#include "verify/packed_row.cuh"
#include "verify/work.h"

namespace nwor {

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
template <class T, class Each>
__device__ __forceinline__ void for_query_pieces(Each each) {
  constexpr int kPieces = T::kHeadSize / 16, kStep = T::kThreads / kPieces;
  constexpr int kChunks = T::kFp8Query ? 1 : 2;
  const int thread = recomputed_thread();
  if constexpr (T::kThreads % kPieces == 0 && kStep % 8 == 0) {  // eight rows further the swizzle is the same
    const int piece = thread % kPieces, first = thread / kPieces;
    const int low = T::query_offset(first, kChunks * piece);
    const int high = T::query_offset(first, kChunks * piece + kChunks - 1);
#pragma unroll 1
    for (int row = first, further = 0; row < T::kRows; row += kStep, further += kStep * T::kQueryPitch)
      each(row, piece, low + further, high + further);
  } else {
#pragma unroll 1
    for (int i = thread; i < T::kRows * kPieces; i += T::kThreads) {
      const int row = i / kPieces, piece = i % kPieces;
      each(row, piece, T::query_offset(row, kChunks * piece), T::query_offset(row, kChunks * piece + kChunks - 1));
    }
  }
}

// The query rows on their way into shared memory, zeros where the window has none. Which thread copies what is for
// finish_query() to know.
template <class T>
__device__ __forceinline__ void load_query(const VerifyParams& p, const Split& split, char* shared) {
  const bool bytes = T::kFp8Query || (T::kExpandsQuery && p.fp8_query);
  const int64_t first =
      split.work.start * p.query_token + static_cast<int64_t>(split.head) * p.group.value * p.query_head;
  for_query_pieces<T>([&](int row, int piece, int low, int high) {
    const bool inside = row < split.row_count;
    const PackedRow packed(p, split.first_row + (inside ? row : 0));
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
template <class T>
__device__ __forceinline__ void finish_query(const VerifyParams& p, char* shared) {
  if constexpr (!T::kFp8 || T::kFp8Query) return;
  for_query_pieces<T>([&](int, int, int low_at, int high_at) {
    auto* low_chunk = reinterpret_cast<uint4*>(shared + low_at);
    auto* high_chunk = reinterpret_cast<uint4*>(shared + high_at);
    uint4 low = *low_chunk, high = *high_chunk;
    if (T::kExpandsQuery && p.fp8_query) {
      expand_query(low, high);
    } else {
      arrange_query(p.is_bf16, low, high);
    }
    *low_chunk = low;
    *high_chunk = high;
  });
}

}  // namespace nwor
