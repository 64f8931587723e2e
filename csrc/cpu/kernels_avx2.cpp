// The kernels for x86-64 with AVX2 and FMA.
#include "attend.h"

namespace nwor {

const VerifyKernels& verify_kernels_avx2() {
  static constexpr VerifyKernels kernels{"avx2", attend, Attention::combine};
  return kernels;
}

}  // namespace nwor
