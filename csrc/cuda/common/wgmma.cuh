// Hopper's warpgroup matrix product: 64 rows, 32 bytes deep, the result in registers. An operand's rows in shared memory
// are 128 bytes with their 16-byte chunks swizzled by the row's low three bits, or 64 bytes, swizzled by the two bits
// above the lowest.
#pragma once

#include <cstdint>

#include "common/kinds.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define NWOR_WGMMA 1
#else
#define NWOR_WGMMA 0
#endif

namespace nwor {

// An operand in shared memory: where it begins, as matrix descriptors say it. The same for the whole warp, and made so
// that the compiler knows it: what is computed from it then takes no registers of the threads.
template <int kRowBytes = 128>
struct WgmmaOperand {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  uint32_t low;

  explicit __device__ __forceinline__ WgmmaOperand(uint32_t address)
      : low(__shfl_sync(0xffffffffu, (1u << 16) | ((address & 0x3ffff) >> 4), 0)) {}

  // The descriptor of what lies `bytes` further: the swizzle, and the bytes from eight rows to the next.
  __device__ __forceinline__ uint64_t at(int bytes) const {
    constexpr uint32_t kSwizzle = kRowBytes == 128 ? 1 : 2;
    return (uint64_t{(kSwizzle << 30) | (8 * kRowBytes >> 4)} << 32) | (low + static_cast<uint32_t>(bytes / 16));
  }
};

__device__ __forceinline__ void wgmma_begin() {
#if NWOR_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_commit() {
#if NWOR_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most the last kPending groups of products are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
#if NWOR_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Makes ordinary stores to shared memory, and finished cp.async copies, visible to the matrix unit.
__device__ __forceinline__ void fence_async_proxy() {
#if NWOR_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void store_matrix2_transposed(uint32_t address, uint32_t r0, uint32_t r1) {
#if NWOR_WGMMA
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(r0), "r"(r1)
               : "memory");
#endif
}

// A product's columns in registers, in pieces of eight: names and constraints of 4 * kTiles operands.
#define NWOR_NAMES_1 "%0,%1,%2,%3"
#define NWOR_NAMES_2 NWOR_NAMES_1 ",%4,%5,%6,%7"
#define NWOR_NAMES_3 NWOR_NAMES_2 ",%8,%9,%10,%11"
#define NWOR_NAMES_5 NWOR_NAMES_3 ",%12,%13,%14,%15,%16,%17,%18,%19"
#define NWOR_NAMES_9 NWOR_NAMES_5 ",%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35"
#define NWOR_PIECE(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define NWOR_PIECES_1 NWOR_PIECE(0)
#define NWOR_PIECES_2 NWOR_PIECES_1, NWOR_PIECE(1)
#define NWOR_PIECES_3 NWOR_PIECES_2, NWOR_PIECE(2)
#define NWOR_PIECES_5 NWOR_PIECES_3, NWOR_PIECE(3), NWOR_PIECE(4)
#define NWOR_PIECES_9 NWOR_PIECES_5, NWOR_PIECE(5), NWOR_PIECE(6), NWOR_PIECE(7), NWOR_PIECE(8)

// c = a b, or c += a b, for 8 * kTiles columns. `kTransposeA`: a's rows lie along the 128 bytes.
template <int kTiles, Kind kKind, int kTransposeA>
struct Wgmma;

// The same with a in registers, as mma.sync lays it out for the 16 rows of each warp; fp16.
template <int kTiles>
struct WgmmaFragments;

// Both in shared memory and fp8, b e4m3. The sums keep about 14 bits.
template <int kTiles, bool kE5m2>
struct WgmmaFp8;

#if NWOR_WGMMA
#define NWOR_BODY(...) asm volatile(__VA_ARGS__)
#else
#define NWOR_BODY(...)
#endif

#define NWOR_DEFINE_SHARED(TILES, COLUMNS, KIND, TYPES, A, B, ADD, TRANSPOSE)                                         \
  template <int kTransposeA>                                                                                          \
  struct Wgmma<TILES, KIND, kTransposeA> {                                                                            \
    static __device__ __forceinline__ void run(float (&c)[TILES][4], uint64_t a, uint64_t b, bool add) {              \
      NWOR_BODY("{.reg .pred add; setp.ne.b32 add, " ADD ", 0;"                                                       \
                "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPES " {" NWOR_NAMES_##TILES "}, " A ", " B   \
                ", add, 1, 1, " TRANSPOSE ", 0;}"                                                                     \
                : NWOR_PIECES_##TILES                                                                                 \
                : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA));                                      \
    }                                                                                                                 \
  };
#define NWOR_DEFINE_FRAGMENTS(TILES, COLUMNS, A0, A1, A2, A3, B, ADD)                                                 \
  template <>                                                                                                         \
  struct WgmmaFragments<TILES> {                                                                                      \
    static __device__ __forceinline__ void run(float (&c)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool add) {  \
      NWOR_BODY("{.reg .pred add; setp.ne.b32 add, " ADD ", 0;"                                                       \
                "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.f16.f16 {" NWOR_NAMES_##TILES "}, {" A0 "," A1   \
                "," A2 "," A3 "}, " B ", add, 1, 1, 0;}"                                                              \
                : NWOR_PIECES_##TILES                                                                                 \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                    \
    }                                                                                                                 \
  };
#define NWOR_DEFINE_FP8(TILES, COLUMNS, E5M2, TYPE, A, B, ADD)                                                        \
  template <>                                                                                                         \
  struct WgmmaFp8<TILES, E5M2> {                                                                                      \
    static __device__ __forceinline__ void run(float (&c)[TILES][4], uint64_t a, uint64_t b, bool add) {              \
      NWOR_BODY("{.reg .pred add; setp.ne.b32 add, " ADD ", 0;"                                                       \
                "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k32.f32." TYPE ".e4m3 {" NWOR_NAMES_##TILES "}, " A ", " \
                B ", add, 1, 1;}"                                                                                     \
                : NWOR_PIECES_##TILES                                                                                 \
                : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                        \
    }                                                                                                                 \
  };
#define NWOR_DEFINE_WGMMA(TILES, COLUMNS, P0, P1, P2, P3, P4, P5)                                \
  NWOR_DEFINE_SHARED(TILES, COLUMNS, Kind::kBf16, "bf16.bf16", P0, P1, P2, P3)                   \
  NWOR_DEFINE_SHARED(TILES, COLUMNS, Kind::kFp16, "f16.f16", P0, P1, P2, P3)                     \
  NWOR_DEFINE_FRAGMENTS(TILES, COLUMNS, P0, P1, P2, P3, P4, P5)                                  \
  NWOR_DEFINE_FP8(TILES, COLUMNS, false, "e4m3", P0, P1, P2)                                     \
  NWOR_DEFINE_FP8(TILES, COLUMNS, true, "e5m2", P0, P1, P2)

// Rows tiles, columns, and the names of the operands behind the result's.
NWOR_DEFINE_WGMMA(1, "8", "%4", "%5", "%6", "%7", "%8", "%9")
NWOR_DEFINE_WGMMA(2, "16", "%8", "%9", "%10", "%11", "%12", "%13")
NWOR_DEFINE_WGMMA(3, "24", "%12", "%13", "%14", "%15", "%16", "%17")
NWOR_DEFINE_WGMMA(5, "40", "%20", "%21", "%22", "%23", "%24", "%25")
NWOR_DEFINE_WGMMA(9, "72", "%36", "%37", "%38", "%39", "%40", "%41")

#undef NWOR_DEFINE_WGMMA
#undef NWOR_DEFINE_FP8
#undef NWOR_DEFINE_FRAGMENTS
#undef NWOR_DEFINE_SHARED
#undef NWOR_BODY

}  // namespace nwor
