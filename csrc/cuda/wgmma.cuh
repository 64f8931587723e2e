// Hopper's warpgroup matrix product: 64 rows, 16 deep, both operands in shared memory, the result in registers.
// An operand's rows are 128 bytes with their 16-byte chunks swizzled by the row's low three bits.
#pragma once

#include "mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define NWOR_WGMMA 1
#else
#define NWOR_WGMMA 0
#endif

namespace nwor {

// Shared-memory matrix descriptor: address, 1024 bytes from eight rows to the next, 128-byte swizzle.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) | ((address & 0x3ffff) >> 4);
}

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

__device__ __forceinline__ void wgmma_wait() {
#if NWOR_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
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

// c = a b, or c += a b, for 8 * kTiles columns. `kTransposeA`: a's rows lie along the 128 bytes.
template <int kTiles, Kind kKind, int kTransposeA>
struct Wgmma;

template <int kTransposeA>
struct Wgmma<1, Kind::kBf16, kTransposeA> {
  static __device__ __forceinline__ void run(float (&c)[1][4], uint64_t a, uint64_t b, bool add) {
#if NWOR_WGMMA
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %6, 0;"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3"
        "}, %4, %5, add, 1, 1, %7, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA));
#endif
  }
};

template <int kTransposeA>
struct Wgmma<1, Kind::kFp16, kTransposeA> {
  static __device__ __forceinline__ void run(float (&c)[1][4], uint64_t a, uint64_t b, bool add) {
#if NWOR_WGMMA
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %6, 0;"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
        "%0,%1,%2,%3"
        "}, %4, %5, add, 1, 1, %7, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA));
#endif
  }
};

template <int kTransposeA>
struct Wgmma<2, Kind::kBf16, kTransposeA> {
  static __device__ __forceinline__ void run(float (&c)[2][4], uint64_t a, uint64_t b, bool add) {
#if NWOR_WGMMA
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %10, 0;"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7"
        "}, %8, %9, add, 1, 1, %11, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA));
#endif
  }
};

template <int kTransposeA>
struct Wgmma<2, Kind::kFp16, kTransposeA> {
  static __device__ __forceinline__ void run(float (&c)[2][4], uint64_t a, uint64_t b, bool add) {
#if NWOR_WGMMA
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %10, 0;"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7"
        "}, %8, %9, add, 1, 1, %11, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA));
#endif
  }
};

template <int kTransposeA>
struct Wgmma<3, Kind::kBf16, kTransposeA> {
  static __device__ __forceinline__ void run(float (&c)[3][4], uint64_t a, uint64_t b, bool add) {
#if NWOR_WGMMA
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %14, 0;"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
        "}, %12, %13, add, 1, 1, %15, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA));
#endif
  }
};

template <int kTransposeA>
struct Wgmma<3, Kind::kFp16, kTransposeA> {
  static __device__ __forceinline__ void run(float (&c)[3][4], uint64_t a, uint64_t b, bool add) {
#if NWOR_WGMMA
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %14, 0;"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
        "}, %12, %13, add, 1, 1, %15, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA));
#endif
  }
};

template <int kTransposeA>
struct Wgmma<5, Kind::kBf16, kTransposeA> {
  static __device__ __forceinline__ void run(float (&c)[5][4], uint64_t a, uint64_t b, bool add) {
#if NWOR_WGMMA
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %22, 0;"
        "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19"
        "}, %20, %21, add, 1, 1, %23, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA));
#endif
  }
};

template <int kTransposeA>
struct Wgmma<5, Kind::kFp16, kTransposeA> {
  static __device__ __forceinline__ void run(float (&c)[5][4], uint64_t a, uint64_t b, bool add) {
#if NWOR_WGMMA
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %22, 0;"
        "wgmma.mma_async.sync.aligned.m64n40k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19"
        "}, %20, %21, add, 1, 1, %23, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA));
#endif
  }
};

template <int kTransposeA>
struct Wgmma<9, Kind::kBf16, kTransposeA> {
  static __device__ __forceinline__ void run(float (&c)[9][4], uint64_t a, uint64_t b, bool add) {
#if NWOR_WGMMA
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %38, 0;"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35"
        "}, %36, %37, add, 1, 1, %39, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]), "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA));
#endif
  }
};

template <int kTransposeA>
struct Wgmma<9, Kind::kFp16, kTransposeA> {
  static __device__ __forceinline__ void run(float (&c)[9][4], uint64_t a, uint64_t b, bool add) {
#if NWOR_WGMMA
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %38, 0;"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35"
        "}, %36, %37, add, 1, 1, %39, 0;}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]), "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposeA));
#endif
  }
};

}  // namespace nwor
