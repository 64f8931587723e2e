// Window keys and values on their way to where copying cannot bring them.
#pragma once

#include "common/convert.cuh"
#include "common/fp8.cuh"
#include "common/loads.cuh"
#include "verify/kv_load.cuh"
#include "verify/scales.cuh"
#include "verify/shared_memory.cuh"

namespace nwor {

// Eight numbers of a window's key or value into a tile of an fp8 cache's: rounded to its format, since the stock path
// would read them back from there.
template <class T>
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
  *reinterpret_cast<uint2*>(tile + T::tile_offset(row, eight / 2) + eight % 2 * 8) =
      quantize_eight(numbers, by, p.is_e5m2);
}

// A tile of window keys and one of its values on their way to the format of an fp8 cache. All threads that fill a tile
// share the rows that exist, in pieces of eight numbers; the other rows become zero.
template <class T>
struct WindowTile {
  static_assert(T::kFp8, "rows of 16 bits are copied, or filled where they are not aligned");
  static constexpr int kEights = T::kHeadSize / 8;
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
        const int i = begin + k * T::kFillThreads;
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
        const int i = begin + k * T::kFillThreads;
        if (i < pieces) store_window_piece<T>(p, data[k][side], i / kEights, i % kEights, by, tile);
      }
    }
  }
};

// Brings such tiles, or the last `room` rows of them, to where they belong: `valid` rows from token `first` on, as many as
// there is room for, and zeros; from each thread's piece `begin` on.
template <class T>
__device__ __noinline__ void convert_window_tile(const VerifyParams& p, int first, int head, int valid, int room,
                                                 char* shared, TileAddresses to, int begin) {
  constexpr int kChunks = T::kRowBytes / 16;
  const int rows = min(valid, room), pieces = rows * WindowTile<T>::kEights;
#pragma unroll 1
  for (; begin < pieces; begin += WindowTile<T>::kBatch * T::kFillThreads) {
    WindowTile<T> window;
    window.load(p, first, head, pieces, begin);
    window.store(p, pieces, begin, shared, to);
  }
#pragma unroll 1
  for (int i = rows * kChunks + T::fill_thread(); i < room * kChunks; i += T::kFillThreads)
#pragma unroll
    for (int side = 0; side < 2; ++side)
      *reinterpret_cast<uint4*>(shared + (side == 0 ? to.key : to.value) + T::tile_offset(i / kChunks, i % kChunks)) =
          make_uint4(0, 0, 0, 0);
}

// Brings this warp's rows of a window's tile where they are not aligned: `valid` from token `first` on, and zeros.
template <class T>
__device__ __noinline__ void fill_window_rows(const VerifyParams& p, int first, int head, int valid, bool of_values,
                                              char* tile) {
  constexpr int kEights = T::kHeadSize / 8;
  const auto* from = static_cast<const uint16_t*>(of_values ? p.value : p.key);
  const int64_t stride = of_values ? p.value_token : p.key_token;
  from += first * stride + head * (of_values ? p.value_head : p.key_head);
#pragma unroll 1
  for (int i = T::copy_warp() * 32 + threadIdx.x % 32; i < kTileTokens * kEights; i += T::kCopyWarps * 32) {
    const int row = i / kEights, eight = i % kEights;
    *reinterpret_cast<uint4*>(tile + T::tile_offset(T::copy_token() + row, eight)) =
        row < valid ? load_eight_apart(from + row * stride + eight * 8) : make_uint4(0, 0, 0, 0);
  }
}

// Where the window begins in its tile, of which there is one where tiles are as long as windows at most.
template <class T>
__device__ __forceinline__ int window_row(const Split& split) {
  static_assert(T::kTile >= kMaxWindow);
  return split.window_begin & (T::kTile - 1);
}

// The same in the first stages, as offsets from the beginning of shared memory. Rows of a multiple of eight are swizzled as
// the first ones.
template <class T>
__device__ __forceinline__ TileAddresses window_place(const Split& split) {
  const int offset = window_row<T>(split) * T::kPitch;
  return {static_cast<uint32_t>(T::key_offset(0) + offset), static_cast<uint32_t>(T::value_offset(0) + offset)};
}

// Whether the window's tile comes first, and its window's rows are for this thread's warpgroup to bring.
template <class T>
__device__ __forceinline__ bool begins_with_window(const Split& split, const SharedMemory<T>& smem) {
  if constexpr (!T::kFillsWindow) return false;
  const int end = split.end - smem.rank() * T::kGroups;  // of this thread block's first tile
  return max(split.tile * T::kTile, split.window_begin) < end * T::kTile && threadIdx.x < T::kFillThreads;
}

// Brings the window's rows to their place in its tile, where that comes first; from each thread's piece `begin` on.
template <class T>
__device__ __forceinline__ void load_window(const VerifyParams& p, const Split& split, int begin,
                                            const SharedMemory<T>& smem) {
  if constexpr (T::kFillsWindow) {
    if (!begins_with_window<T>(split, smem)) return;
    convert_window_tile<T>(p, split.work.start, split.head, split.work.window, T::kTile - window_row<T>(split),
                           smem.base, window_place<T>(split), begin);
  }
}

// The same for the first split in two steps: loads before the first tiles are, behind which they would wait.
template <class T, bool kFills = T::kFillsWindow>
struct WindowAhead {
  WindowTile<T> window;

  __device__ __forceinline__ WindowAhead(const VerifyParams& p, const Split& split, const SharedMemory<T>& smem) {
    if (begins_with_window<T>(split, smem))
      window.load(p, split.work.start, split.head, pieces(split), T::fill_thread());
  }

  __device__ __forceinline__ void keep(const VerifyParams& p, const Split& split, const SharedMemory<T>& smem) const {
    if (!begins_with_window<T>(split, smem)) return;
    window.store(p, pieces(split), T::fill_thread(), smem.base, window_place<T>(split));
    load_window<T>(p, split, T::fill_thread() + WindowTile<T>::kBatch * T::kFillThreads, smem);
  }

 private:
  static __device__ __forceinline__ int pieces(const Split& split) {
    return split.work.window * WindowTile<T>::kEights;
  }
};

// A window that is copied like any tile.
template <class T>
struct WindowAhead<T, false> {
  __device__ __forceinline__ WindowAhead(const VerifyParams&, const Split&, const SharedMemory<T>&) {}
  __device__ __forceinline__ void keep(const VerifyParams&, const Split&, const SharedMemory<T>&) const {}
};

}  // namespace nwor
