// The kernels for any machine of the target architecture.
#include "attend.h"

namespace nwor {

const VerifyKernels& verify_kernels_baseline() {
  static constexpr VerifyKernels kernels{"baseline", attend, Attention::combine};
  return kernels;
}

}  // namespace nwor
