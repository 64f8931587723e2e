// Keys that a query row must not see: behind the context's end, after the row, outside its sliding window, or in a tree
// of drafts none of its ancestors.
#pragma once

#include "common/fastdiv.h"
#include "common/ptx.cuh"
#include "verify/params.h"
#include "verify/work.h"

namespace nwor {

// Takes the keys that a query row must not see out of its scores.
template <class T>
__device__ __forceinline__ void mask_scores(const VerifyParams& p, const Split& split, int warp_row, bool window,
                                            int token, int valid, float (&scores)[T::kRowTiles][4]) {
  const int lane = recomputed(static_cast<int>(threadIdx.x % 32));
  const bool tree = p.ancestor_mask != nullptr;
  if (!(tree && window) && p.sliding_window <= 0) {  // a tree's rows see all of the context
#pragma unroll
    for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int packed = split.first_row + warp_row + 8 * j + lane % 4 * 2 + column;
        const int last = window ? min(valid - 1, divide(packed, p.group) - token) : valid - 1;
        if (lane / 4 > last) scores[j][column] = -INFINITY;
        if (lane / 4 + 8 > last) scores[j][2 + column] = -INFINITY;
      }
    return;
  }
  if (p.sliding_window <= 0) {
    // Sixteen tokens at a time: their bits are one of the four parts of a mask, and one register.
    const uint16_t* masks = reinterpret_cast<const uint16_t*>(p.ancestor_mask + split.work.start) + token / 16;
    const bool first = lane / 4 < valid, second = lane / 4 + 8 < valid;
#pragma unroll
    for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int packed = split.first_row + warp_row + 8 * j + lane % 4 * 2 + column;
        const int row = min(divide(packed, p.group), split.work.window - 1);
        const uint32_t sees = static_cast<uint32_t>(__ldg(masks + 4 * row)) >> (lane / 4);
        if (!first || (sees & 1) == 0) scores[j][column] = -INFINITY;
        if (!second || (sees & 256) == 0) scores[j][2 + column] = -INFINITY;
      }
    return;
  }
#pragma unroll
  for (int j = 0; j < T::kRowTiles; ++j)
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int packed = split.first_row + warp_row + 8 * j + lane % 4 * 2 + column;
      const int row = min(divide(packed, p.group), split.work.window - 1);
      const int64_t sees = tree ? __ldg(p.ancestor_mask + split.work.start + row) : 0;
      const int depth = tree ? __popcll(sees) - 1 : row;
      const int oldest = p.sliding_window > 0 ? split.work.context + depth - p.sliding_window + 1 : -1;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key_row = lane / 4 + half * 8;
        bool visible = key_row < valid;
        int position = token + key_row;
        if (window && visible) {
          const int index = position;
          visible = tree ? ((sees >> index) & 1) != 0 : index <= row;
          const int key_depth =
              tree && oldest >= 0 ? __popcll(__ldg(p.ancestor_mask + split.work.start + index)) - 1 : index;
          position = split.work.context + key_depth;
        }
        if (!visible || position < oldest) scores[j][2 * half + column] = -INFINITY;
      }
    }
}

}  // namespace nwor
