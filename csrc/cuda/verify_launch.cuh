// Host side of one head size: picks the instantiation that wastes least and launches it.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <mutex>

#include "verify_wgmma.cuh"

namespace nwor {

constexpr int kDevices = 64;  // most that are told apart

struct LaunchRequest {
  VerifyParams params;
  int rows;  // query rows of the longest window for one KV head, as many of them as a thread block takes at a time
  int device, num_sms, max_shared_bytes;
  bool has_clusters;
  bool has_wgmma;
  PlanEntry* plan;  // to be written instead of a launch of the kernel itself; null for that
  cudaStream_t stream;
};

// Units of a launch whose windows' rows a thread block keeps all of.
inline int64_t units_of(const LaunchRequest& request) {
  return int64_t{request.params.batch} * request.params.num_kv_heads;
}

// Whether a launch takes kernels whose warpgroups take tiles in turns, with one thread block a multiprocessor: where units
// are no more than multiprocessors. Fewer thread blocks then have parts of a unit, and what joins them costs more than what
// adds a thread block's warpgroups up.
inline bool in_turns(const LaunchRequest& request) { return units_of(request) <= request.num_sms; }

// Rows of a partial result that the workspace has room for, where kMaxBlocksPerSm thread blocks share a multiprocessor;
// fewer may keep more each.
inline int workspace_rows(int window_rows) { return std::min((window_rows + 7) / 8 * 8 + 32, kMaxRows); }

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

inline cudaLaunchConfig_t launch_config(int blocks, int threads, int shared_bytes, int cluster,
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

// `many`: for a launch of more units than thread blocks.
template <class S, int kBlocksPerSm>
constexpr Kernel kernel_of(bool many) {
  if constexpr (S::kTile == kTileTokens) {
    return many ? verify_attention_kernel<S, kBlocksPerSm, true> : verify_attention_kernel<S, kBlocksPerSm, false>;
  } else {
    return many ? verify_warpgroup_kernel<S, kBlocksPerSm, true> : verify_warpgroup_kernel<S, kBlocksPerSm, false>;
  }
}

template <class S, int kBlocksPerSm>
Residency find_residency(const LaunchRequest& request) {
  const Kernel kernels[] = {kernel_of<S, kBlocksPerSm>(false), kernel_of<S, kBlocksPerSm>(true)};
  Residency found;
  found.blocks = kMaxBlocksPerSm;
  // A plan is for either kernel, so as many thread blocks are counted as are resident of both.
  for (const Kernel kernel : kernels) {
    int blocks = 0;
    found.status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
    if (found.status != cudaSuccess) return found;
    found.status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, S::kThreads, S::kSharedBytes);
    if (found.status != cudaSuccess) return found;
    found.blocks = std::min(found.blocks, blocks);
  }
  found.clusters[1] = std::min(found.blocks * request.num_sms, kMaxWorkers);
  for (int cluster = 2; request.has_clusters && cluster <= kMaxCluster; cluster *= 2) {
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config =
        launch_config(found.clusters[1] / cluster * cluster, S::kThreads, S::kSharedBytes, cluster, &attribute, nullptr);
    // Launches with clusters have no more units than clusters (choose_cluster), so they are never of the other kernel.
    int active = 0;
    if (cudaOccupancyMaxActiveClusters(&active, kernels[0], &config) != cudaSuccess) active = 0;
    found.clusters[cluster] = std::min(active, found.clusters[1] / cluster);  // workspace and plan have room for no more
  }
  cudaGetLastError();  // a cluster size that does not fit is not an error
  return found;
}

// How many thread blocks of a launch can add up through distributed shared memory; whether they do, the plan decides.
// Large clusters leave multiprocessors out, since those of a processing cluster are not always a multiple; so clusters are
// only as large as a unit has clusters. Where units are about as many as thread blocks, pairs serve those in between.
// `any`: as large as there is one for each unit, where a multiprocessor has but one thread block.
inline int choose_cluster(const Residency& residency, int64_t units, bool any) {
  int best = 1;
  for (int cluster = 2; cluster <= kMaxCluster; cluster *= 2) {
    const bool square = int64_t{cluster} * cluster * units <= residency.clusters[1];
    const bool pair = cluster == 2 && residency.clusters[1] < 3 * units;
    if ((any || square || pair) && residency.clusters[cluster] >= units) best = cluster;
  }
  return best;
}

template <class S, int kBlocksPerSm>
cudaError_t launch(const LaunchRequest& request) {
  static std::once_flag once[kDevices];
  static Residency known[kDevices];
  if (request.device < 0 || request.device >= kDevices) return cudaErrorInvalidDevice;
  std::call_once(once[request.device], [&] { known[request.device] = find_residency<S, kBlocksPerSm>(request); });
  const Residency& residency = known[request.device];
  if (residency.status != cudaSuccess) return residency.status;
  if (residency.blocks < 1) return cudaErrorInvalidConfiguration;

  VerifyParams p = request.params;
  const int64_t chunks = (request.rows + S::kRows - 1) / S::kRows;
  const int64_t units = chunks * p.batch * p.num_kv_heads;
  p.cluster = choose_cluster(residency, units, S::kInTurns);
  p.clusters = residency.clusters[p.cluster];
  const int blocks = p.clusters * p.cluster;
  p.by_blocks = Divisor(blocks);
  p.cluster_join = S::kClusterJoin * S::kGroups;
  p.worker_join = S::kWorkerJoin * S::kGroups;
  p.part_join = S::kPartJoin;
  p.plan_key = plan_key({p.clusters, p.cluster, p.cluster_join, p.worker_join, p.part_join, S::kRows, S::kTile, p.batch,
                         p.num_kv_heads, static_cast<int>(p.group.value), p.sliding_window});
  if (request.plan != nullptr) {
    static_assert(kMaxBlocksPerSm == 4, "the grid covers num_sms * kMaxBlocksPerSm entries, four a thread block");
    plan_kernel<S::kRows, S::kTile><<<request.num_sms, 128, 0, request.stream>>>(p, request.plan);
    return cudaGetLastError();
  }
  if (int64_t{blocks} * S::kRows > int64_t{request.num_sms} * kMaxBlocksPerSm * workspace_rows(request.rows))
    return cudaErrorInvalidConfiguration;
  p.partial_output = reinterpret_cast<float*>(p.partial_stats + 2 * static_cast<int64_t>(blocks) * S::kRows);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config =
      launch_config(blocks, S::kThreads, S::kSharedBytes, p.cluster, &attribute, request.stream);
  return cudaLaunchKernelEx(&config, kernel_of<S, kBlocksPerSm>(units > blocks), p);
}

// A Shape and how many blocks of it share a multiprocessor.
template <class S, int kBlocksPerSm>
struct Choice {
  static bool fits(const LaunchRequest& request) {
    return request.rows <= S::kRows && S::kSharedBytes <= request.max_shared_bytes;
  }
  static cudaError_t run(const LaunchRequest& request) { return launch<S, kBlocksPerSm>(request); }
};

// The first choice that keeps all rows and fits; otherwise the last (it takes the rows in chunks).
template <class First, class... Rest>
cudaError_t launch_first_fitting(const LaunchRequest& request) {
  if constexpr (sizeof...(Rest) == 0) {
    return First::run(request);
  } else {
    return First::fits(request) ? First::run(request) : launch_first_fitting<Rest...>(request);
  }
}

cudaError_t launch_head64(const LaunchRequest& request);
cudaError_t launch_head96(const LaunchRequest& request);
cudaError_t launch_head128(const LaunchRequest& request);
cudaError_t launch_head256(const LaunchRequest& request);

}  // namespace nwor
