// Chooses the kernels for the running machine.
#include <cstdlib>
#include <cstring>

#include "verify_params.h"

namespace nwor {
namespace {

const VerifyKernels& choose() {
#ifdef NWOR_X86_KERNELS
  // NWOR_CPU_KERNELS lowers the choice, so that tests cover every instruction set on one machine.
  const char* wanted = std::getenv("NWOR_CPU_KERNELS");
  const auto allowed = [wanted](const char* name) { return wanted == nullptr || std::strcmp(wanted, name) == 0; };
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx512 && allowed("avx512")) return verify_kernels_avx512();
  if (avx2 && allowed("avx2")) return verify_kernels_avx2();
#endif
  return verify_kernels_baseline();
}

}  // namespace

const VerifyKernels& verify_kernels() {
  static const VerifyKernels& kernels = choose();
  return kernels;
}

}  // namespace nwor

extern "C" __attribute__((visibility("default"))) const char* nwor_cpu_kernels() {
  return nwor::verify_kernels().name;
}
