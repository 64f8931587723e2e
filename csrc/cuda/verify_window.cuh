// Window keys and values on their way to where copying cannot bring them.
#pragma once

#include "verify_merge.cuh"

namespace nwor {

// Eight numbers of a window's key or value into a tile of an fp8 cache's: rounded to its format, since the stock path
// would read them back from there.
template <class S>
__device__ __forceinline__ void store_window_piece(const VerifyParams& p, uint4 data, int row, int eight,
                                                   const Quotient& by, char* tile) {
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
  float numbers[8];
  if (p.is_bf16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      numbers[2 * i] = __uint_as_float(words[i] << 16);
      numbers[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      numbers[2 * i] = to_float(words[i] & 0xffff, false);
      numbers[2 * i + 1] = to_float(words[i] >> 16, false);
    }
  }
  *reinterpret_cast<uint2*>(tile + S::tile_offset(row, eight / 2) + eight % 2 * 8) =
      quantize_eight(numbers, by, p.is_e5m2);
}

// A tile of window keys and one of its values on their way to the format of an fp8 cache. All threads that fill a tile
// share the rows that exist, in pieces of eight numbers; the other rows become zero.
template <class S>
struct WindowTile {
  static_assert(S::kFp8, "rows of 16 bits are copied, or filled where they are not aligned");
  static constexpr int kEights = S::kHeadSize / 8;
  static constexpr int kBatch = 3;  // loads of a thread, of keys and of values each, under way at a time
  uint4 data[kBatch][2];
  float scale[2];

  // Loads a batch of this thread's pieces, from its piece `begin` on.
  __device__ __forceinline__ void load(const VerifyParams& p, int first, int head, int pieces, int begin) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const bool of_keys = side == 0;
      const uint16_t* from = static_cast<const uint16_t*>(of_keys ? p.key : p.value);
      const int64_t stride = of_keys ? p.key_token : p.value_token;
      from += first * stride + head * (of_keys ? p.key_head : p.value_head);
      scale[side] =
          of_keys ? head_scale(p.k_scale, p.k_scale_count, head) : head_scale(p.v_scale, p.v_scale_count, head);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = begin + k * S::kFillThreads;
        data[k][side] = make_uint4(0, 0, 0, 0);
        if (i < pieces) data[k][side] = load_eight(from + i / kEights * stride + i % kEights * 8, p.aligned);
      }
    }
  }

  // Puts them where they belong. Offsets are from the beginning of shared memory.
  __device__ __forceinline__ void store(const VerifyParams& p, int pieces, int begin, char* shared,
                                        TileAddresses to) const {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      char* tile = shared + (side == 0 ? to.key : to.value);
      const Quotient by(scale[side]);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = begin + k * S::kFillThreads;
        if (i < pieces) store_window_piece<S>(p, data[k][side], i / kEights, i % kEights, by, tile);
      }
    }
  }
};

// Brings such tiles, or the last `room` rows of them, to where they belong: `valid` rows from token `first` on, as many as
// there is room for, and zeros; from each thread's piece `begin` on.
template <class S>
__device__ __noinline__ void convert_window_tile(const VerifyParams& p, int first, int head, int valid, int room,
                                                 char* shared, TileAddresses to, int begin) {
  constexpr int kChunks = S::kRowBytes / 16;
  const int rows = min(valid, room), pieces = rows * WindowTile<S>::kEights;
#pragma unroll 1
  for (; begin < pieces; begin += WindowTile<S>::kBatch * S::kFillThreads) {
    WindowTile<S> window;
    window.load(p, first, head, pieces, begin);
    window.store(p, pieces, begin, shared, to);
  }
#pragma unroll 1
  for (int i = rows * kChunks + S::fill_thread(); i < room * kChunks; i += S::kFillThreads)
#pragma unroll
    for (int side = 0; side < 2; ++side)
      *reinterpret_cast<uint4*>(shared + (side == 0 ? to.key : to.value) +
                                S::tile_offset(i / kChunks, i % kChunks)) = make_uint4(0, 0, 0, 0);
}

// Brings this warp's rows of a window's tile where they are not aligned: `valid` from token `first` on, and zeros.
template <class S>
__device__ __noinline__ void fill_window_rows(const VerifyParams& p, int first, int head, int valid, bool of_values,
                                              char* tile) {
  constexpr int kEights = S::kHeadSize / 8;
  const auto* from = static_cast<const uint16_t*>(of_values ? p.value : p.key);
  const int64_t stride = of_values ? p.value_token : p.key_token;
  from += first * stride + head * (of_values ? p.value_head : p.key_head);
#pragma unroll 1
  for (int i = S::copy_warp() * 32 + threadIdx.x % 32; i < kTileTokens * kEights; i += S::kCopyWarps * 32) {
    const int row = i / kEights, eight = i % kEights;
    *reinterpret_cast<uint4*>(tile + S::tile_offset(S::copy_token() + row, eight)) =
        row < valid ? load_eight_apart(from + row * stride + eight * 8) : make_uint4(0, 0, 0, 0);
  }
}

// Where the window begins in its tile, of which there is one where tiles are as long as windows at most.
template <class S>
__device__ __forceinline__ int window_row(const Segment& segment) {
  static_assert(S::kTile >= kMaxWindow);
  return segment.window_begin & (S::kTile - 1);
}

// The same in the first stages, as offsets from the beginning of shared memory. Rows of a multiple of eight are swizzled as
// the first ones.
template <class S>
__device__ __forceinline__ TileAddresses window_place(const Segment& segment) {
  const int offset = window_row<S>(segment) * S::kPitch;
  return {static_cast<uint32_t>(S::key_offset(0) + offset), static_cast<uint32_t>(S::value_offset(0) + offset)};
}

// Whether the window's tile comes first, and its window's rows are for this thread's warpgroup to bring.
template <class S>
__device__ __forceinline__ bool begins_with_window(const Segment& segment, const MergeSpace<S>& space) {
  if constexpr (!S::kFillsWindow) return false;
  const int end = segment.end - space.rank() * S::kGroups;  // of this thread block's first tile
  return max(segment.tile * S::kTile, segment.window_begin) < end * S::kTile && threadIdx.x < S::kFillThreads;
}

// Brings the window's rows to their place in its tile, where that comes first; from each thread's piece `begin` on.
template <class S>
__device__ __forceinline__ void load_window(const VerifyParams& p, const Segment& segment, int begin,
                                            const MergeSpace<S>& space) {
  if constexpr (S::kFillsWindow) {
    if (!begins_with_window<S>(segment, space)) return;
    convert_window_tile<S>(p, segment.work.start, segment.head, segment.work.window, S::kTile - window_row<S>(segment),
                           space.shared, window_place<S>(segment), begin);
  }
}

// The same for the first segment in two steps: loads before the first tiles are, behind which they would wait.
template <class S, bool kFills = S::kFillsWindow>
struct WindowAhead {
  WindowTile<S> window;

  __device__ __forceinline__ WindowAhead(const VerifyParams& p, const Segment& segment, const MergeSpace<S>& space) {
    if (begins_with_window<S>(segment, space))
      window.load(p, segment.work.start, segment.head, pieces(segment), S::fill_thread());
  }

  __device__ __forceinline__ void keep(const VerifyParams& p, const Segment& segment,
                                       const MergeSpace<S>& space) const {
    if (!begins_with_window<S>(segment, space)) return;
    window.store(p, pieces(segment), S::fill_thread(), space.shared, window_place<S>(segment));
    load_window<S>(p, segment, S::fill_thread() + WindowTile<S>::kBatch * S::kFillThreads, space);
  }

 private:
  static __device__ __forceinline__ int pieces(const Segment& segment) {
    return segment.work.window * WindowTile<S>::kEights;
  }
};

// A window that is copied like any tile.
template <class S>
struct WindowAhead<S, false> {
  __device__ __forceinline__ WindowAhead(const VerifyParams&, const Segment&, const MergeSpace<S>&) {}
  __device__ __forceinline__ void keep(const VerifyParams&, const Segment&, const MergeSpace<S>&) const {}
};

}  // namespace nwor
