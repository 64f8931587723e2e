// Host side of verify_attention: workspace, the choice of a kernel, its launch.
#include <iterator>
#include <limits>
#include <mutex>
#include <utility>

#include "verify/launch.h"
#include "verify/select.h"
#include "verify/work.h"

namespace nwor {
namespace {

constexpr size_t kAlignment = 256;

// Libraries for racecheck have it: RowBarrier::even_out() says why.
#if NWOR_EVEN_BARRIERS
constexpr bool kEvenBarriers = true;
#else
constexpr bool kEvenBarriers = false;
#endif

#if NWOR_PROBES
unsigned long long* probes_of_launches = nullptr;
#endif

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

__global__ void hopper_probe() {}

// What of this library runs on a device: machine code made for it, or for an older one, or what its driver makes of PTX.
struct Compiled {
  cudaError_t status = cudaErrorUnknown;
  bool clusters = false;  // instructions that only compute capability 9.0 and later have
  bool hopper = false;    // Hopper's own
};

// For the current device, whose number this is.
const Compiled& compiled_for(int device) {
  static std::once_flag once[kDevices];
  static Compiled known[kDevices];
  std::call_once(once[device], [&] {
    cudaFuncAttributes attributes{};
    Compiled& found = known[device];
    found.status = cudaFuncGetAttributes(&attributes, hopper_probe);
    found.clusters = attributes.ptxVersion >= 90;
    // Code for sm_90 without the a, which lacks them, looks the same; the build refuses to make it.
    found.hopper = attributes.binaryVersion == 90 && attributes.ptxVersion == 90;
  });
  return known[device];
}

size_t semaphore_bytes(int num_sms) {
  return round_up(static_cast<size_t>(num_sms) * kMaxBlocksPerSm * sizeof(int), kAlignment);
}

}  // namespace

#if NWOR_PROBES
void set_probes(unsigned long long* probes) { probes_of_launches = probes; }
#endif

// Semaphores, then for two partial results per thread block: maximum, sum and weighted values of each row.
size_t verify_workspace_bytes(int num_sms, int num_heads, int num_kv_heads, int head_size, int max_query_len) {
  const size_t rows = workspace_rows(num_heads / num_kv_heads * max_query_len);
  return semaphore_bytes(num_sms) + size_t{2} * num_sms * kMaxBlocksPerSm * rows * (head_size + 2) * sizeof(float);
}

namespace {

// Finds what the choice of a kernel depends on, and launches it, or the kernel that plans for it.
cudaError_t launch(LaunchRequest request, int head_size, int max_query_len) {
  int major = 0, shared_bytes = 0;
  VerifyParams& params = request.params;
  if (const cudaError_t status = cudaGetDevice(&request.device); status != cudaSuccess) return status;
  if (const cudaError_t status = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                                        request.device);
      status != cudaSuccess)
    return status;
  if (const cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, request.device);
      status != cudaSuccess)
    return status;
  if (request.device >= kDevices) return cudaErrorInvalidDevice;
  const Compiled& compiled = compiled_for(request.device);
  if (compiled.status != cudaSuccess) return compiled.status;
  params.group = Divisor(params.num_heads / params.num_kv_heads);
  request.has_clusters = major >= 9 && compiled.clusters;
  const Operands operands = params.fp8_query ? Operands::kFp8Query
                            : params.is_fp8  ? Operands::kFp8Cache
                                             : Operands::k16Bit;
  const Selection selection =
      select({.head_size = head_size,
              .operands = operands,
              .rows = params.num_heads / params.num_kv_heads * max_query_len,
              .work_tiles = int64_t{params.batch} * params.num_kv_heads,
              .num_sms = request.num_sms,
              .shared_bytes = shared_bytes,
              .has_wgmma = major == 9 && compiled.hopper});
  if (selection.config < 0) return cudaErrorInvalidValue;
  request.config = selection.config;
  request.rows = selection.rows;
  cudaError_t status = cudaErrorInvalidValue;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    ((kHeadSizes[kIndex] == head_size && (status = launch_head_size<kHeadSizes[kIndex]>(request), true)) || ...);
  }(std::make_index_sequence<std::size(kHeadSizes)>());
  return status;
}

}  // namespace

cudaError_t launch_verify_attention(VerifyParams params, int head_size, int max_query_len, void* workspace,
                                    size_t workspace_bytes, int num_sms, cudaStream_t stream) {
  if (workspace_bytes <
      verify_workspace_bytes(num_sms, params.num_heads, params.num_kv_heads, head_size, max_query_len))
    return cudaErrorInvalidValue;
  params.block = Divisor(params.block_size);
  // Copies of whole tiles take strides of 32 bits; what has others goes the slower way.
  const int element = params.is_fp8 ? 1 : 2;
  const auto narrow = [](int64_t bytes) { return bytes <= std::numeric_limits<uint32_t>::max(); };
  params.whole_tiles = params.block_size % kTileTokens == 0 && narrow(params.key_cache_block * element) &&
                       narrow(params.key_cache_token * element) && narrow(params.value_cache_block * element) &&
                       narrow(params.value_cache_token * element);
  params.even_barriers = kEvenBarriers;
  params.aligned = params.aligned && narrow(params.key_token * 2) && narrow(params.value_token * 2);
  params.key_block_bytes = static_cast<uint32_t>(params.key_cache_block * element);
  params.key_token_bytes = static_cast<uint32_t>(params.key_cache_token * element);
  params.value_block_bytes = static_cast<uint32_t>(params.value_cache_block * element);
  params.value_token_bytes = static_cast<uint32_t>(params.value_cache_token * element);
  params.semaphores = static_cast<int*>(workspace);
  params.partial_stats = reinterpret_cast<float2*>(static_cast<char*>(workspace) + semaphore_bytes(num_sms));
#if NWOR_PROBES
  params.probes = probes_of_launches;
#endif
  LaunchRequest request{};
  request.params = params;
  request.num_sms = num_sms;
  request.stream = stream;
  return launch(request, head_size, max_query_len);
}

size_t verify_plan_bytes(int num_sms) {
  return static_cast<size_t>(num_sms) * kMaxBlocksPerSm * sizeof(PlanEntry);
}

cudaError_t launch_verify_plan(VerifyParams params, int head_size, int max_query_len, void* plan, int num_sms,
                               cudaStream_t stream) {
  LaunchRequest request{};
  request.params = params;
  request.num_sms = num_sms;
  request.plan = static_cast<PlanEntry*>(plan);
  request.stream = stream;
  return launch(request, head_size, max_query_len);
}

}  // namespace nwor
