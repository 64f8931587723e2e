// Host side of the kernels: how many thread blocks a device runs of one at a time, and its launch.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <mutex>
#include <utility>

#include "verify/kernel_sm80.cuh"
#include "verify/kernel_sm90.cuh"
#include "verify/launch.h"
#include "verify/traits.cuh"

namespace nwor {

// Tells plans apart that were made for other launches.
inline uint32_t plan_key(std::initializer_list<int> of) {
  uint32_t key = 2166136261u;
  for (const int number : of) key = (key ^ static_cast<uint32_t>(number)) * 16777619u;
  return key | 1;  // never that of memory that holds zeros
}

// What a device makes of one instantiation: how many clusters of each size it runs at a time.
struct Residency {
  cudaError_t status = cudaErrorUnknown;
  int blocks = 0;                       // per multiprocessor
  int clusters[kMaxCluster + 1] = {};   // by size: 1, 2, 4, 8
};

inline cudaLaunchConfig_t grid_of(int blocks, int threads, int shared_bytes, int cluster,
                                  cudaLaunchAttribute* attribute, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  if (cluster > 1) {
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = cluster;
    attribute->val.clusterDim.y = 1;
    attribute->val.clusterDim.z = 1;
    config.attrs = attribute;
    config.numAttrs = 1;
  }
  return config;
}

using Kernel = void (*)(VerifyParams);

// `many`: for a launch of more work tiles than thread blocks.
template <class T>
constexpr Kernel kernel_of(bool many) {
  if constexpr (uses_wgmma(T::kConfig.mainloop)) {
    return many ? verify_sm90_kernel<T, true> : verify_sm90_kernel<T, false>;
  } else {
    return many ? verify_sm80_kernel<T, true> : verify_sm80_kernel<T, false>;
  }
}

template <class T>
Residency find_residency(const LaunchRequest& request) {
  const Kernel kernels[] = {kernel_of<T>(false), kernel_of<T>(true)};
  Residency found;
  found.blocks = kMaxBlocksPerSm;
  // A plan is for either kernel, so as many thread blocks are counted as are resident of both.
  for (const Kernel kernel : kernels) {
    int blocks = 0;
    found.status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes);
    if (found.status != cudaSuccess) return found;
    found.status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, T::kThreads, T::kSharedBytes);
    if (found.status != cudaSuccess) return found;
    found.blocks = std::min(found.blocks, blocks);
  }
  found.clusters[1] = std::min(found.blocks * request.num_sms, kMaxWorkers);
  for (int cluster = 2; request.has_clusters && cluster <= kMaxCluster; cluster *= 2) {
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config =
        grid_of(found.clusters[1] / cluster * cluster, T::kThreads, T::kSharedBytes, cluster, &attribute, nullptr);
    // Launches with clusters have no more work tiles than clusters (choose_cluster): they are never of the other kernel.
    int active = 0;
    if (cudaOccupancyMaxActiveClusters(&active, kernels[0], &config) != cudaSuccess) active = 0;
    found.clusters[cluster] = std::min(active, found.clusters[1] / cluster);  // workspace and plan have room for no more
  }
  cudaGetLastError();  // a cluster size that does not fit is not an error
  return found;
}

// How many thread blocks of a launch can add up through distributed shared memory; whether they do, the plan decides.
// Large clusters leave multiprocessors out, since those of a processing cluster are not always a multiple; so clusters
// are only as large as a work tile has clusters. Where work tiles are about as many as thread blocks, pairs serve those
// in between.
// `any`: as large as there is one for each work tile, where a multiprocessor has but one thread block.
inline int choose_cluster(const Residency& residency, int64_t work_tiles, bool any) {
  int best = 1;
  for (int cluster = 2; cluster <= kMaxCluster; cluster *= 2) {
    const bool square = int64_t{cluster} * cluster * work_tiles <= residency.clusters[1];
    const bool pair = cluster == 2 && residency.clusters[1] < 3 * work_tiles;
    if ((any || square || pair) && residency.clusters[cluster] >= work_tiles) best = cluster;
  }
  return best;
}

template <class T>
cudaError_t launch_config(const LaunchRequest& request) {
  static std::once_flag once[kDevices];
  static Residency known[kDevices];
  if (request.device < 0 || request.device >= kDevices) return cudaErrorInvalidDevice;
  std::call_once(once[request.device], [&] { known[request.device] = find_residency<T>(request); });
  const Residency& residency = known[request.device];
  if (residency.status != cudaSuccess) return residency.status;
  if (residency.blocks < 1) return cudaErrorInvalidConfiguration;

  VerifyParams p = request.params;
  const int64_t chunks = (request.rows + T::kRows - 1) / T::kRows;
  const int64_t work_tiles = chunks * p.batch * p.num_kv_heads;
  p.cluster = choose_cluster(residency, work_tiles, T::kInTurns);
  p.clusters = residency.clusters[p.cluster];
  const int blocks = p.clusters * p.cluster;
  p.by_blocks = Divisor(blocks);
  p.cluster_combine = T::kClusterCombine * T::kGroups;
  p.worker_combine = T::kWorkerCombine * T::kGroups;
  p.split_combine = T::kSplitCombine;
  p.plan_key = plan_key({p.clusters, p.cluster, p.cluster_combine, p.worker_combine, p.split_combine, T::kRows, T::kTile,
                         p.batch, p.num_kv_heads, static_cast<int>(p.group.value), p.sliding_window});
  if (request.plan != nullptr) {
    static_assert(kMaxBlocksPerSm == 4, "the grid covers num_sms * kMaxBlocksPerSm entries, four a thread block");
    plan_kernel<T::kRows, T::kTile><<<request.num_sms, 128, 0, request.stream>>>(p, request.plan);
    return cudaGetLastError();
  }
  if (int64_t{blocks} * T::kRows > int64_t{request.num_sms} * kMaxBlocksPerSm * workspace_rows(request.rows))
    return cudaErrorInvalidConfiguration;
  p.partial_output = reinterpret_cast<float*>(p.partial_stats + 2 * static_cast<int64_t>(blocks) * T::kRows);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config =
      grid_of(blocks, T::kThreads, T::kSharedBytes, p.cluster, &attribute, request.stream);
  return cudaLaunchKernelEx(&config, kernel_of<T>(work_tiles > blocks), p);
}

// Launches the request's configuration if it is kConfigs[kIndex]; false if it is not.
template <int kHeadSize, int kIndex>
bool launch_if_chosen(const LaunchRequest& request, cudaError_t& status) {
  constexpr Config kConfig = kConfigs[kIndex];
  if constexpr (kConfig.head_size == kHeadSize) {
    if (request.config != kIndex) return false;
    constexpr Kind kKind = kind_of(kConfig.operands, true), kOther = kind_of(kConfig.operands, false);
    status = request.params.is_bf16 ? launch_config<Traits<kConfig, kKind>>(request)
                                    : launch_config<Traits<kConfig, kOther>>(request);
    return true;
  }
  return false;
}

template <int kHeadSize>
cudaError_t launch_kernels(const LaunchRequest& request) {
  cudaError_t status = cudaErrorInvalidValue;
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (launch_if_chosen<kHeadSize, kIndex>(request, status) || ...);
  }(std::make_integer_sequence<int, kConfigCount>());
  return status;
}

}  // namespace nwor
