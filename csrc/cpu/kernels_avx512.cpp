// The kernels for x86-64 with AVX-512 (F, BW, DQ, VL).
#include "attend.h"

namespace nwor {

const VerifyKernels& verify_kernels_avx512() {
  static constexpr VerifyKernels kernels{"avx512", attend, Attention::combine};
  return kernels;
}

}  // namespace nwor
