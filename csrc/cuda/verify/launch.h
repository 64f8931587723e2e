// What launch.cu, which chooses a kernel, asks of the files that have the kernels.
#pragma once

#include "verify/configs.h"
#include "verify/params.h"

namespace nwor {

constexpr int kDevices = 64;  // most that are told apart

struct LaunchRequest {
  VerifyParams params;
  int config;  // of kConfigs
  int rows;    // query rows of the longest window for one KV head, as many of them as a thread block takes at a time
  int device, num_sms;
  bool has_clusters;
  PlanEntry* plan;  // to be written instead of a launch of the kernel itself; null for that
  cudaStream_t stream;
};

// Rows of a partial result that the workspace has room for, where kMaxBlocksPerSm thread blocks share a multiprocessor;
// fewer may keep more each.
constexpr int workspace_rows(int window_rows) {
  const int rows = (window_rows + 7) / 8 * 8 + 32;
  return rows < kMaxRows ? rows : kMaxRows;
}

// Launches a configuration of one head size. The files made of instantiation.cu.in have one each.
template <int kHeadSize>
cudaError_t launch_head_size(const LaunchRequest& request);

}  // namespace nwor
