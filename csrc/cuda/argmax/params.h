// Arguments of argmax_rows. Knows nothing of Torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nwor {

enum class LogitType : int { kFloat, kHalf, kBfloat16 };

// What the thread blocks of one row share. All zero before a launch and after it.
struct ArgmaxRow {
  unsigned long long best;     // the largest key so far; every element's key is more than 0
  unsigned long long arrived;  // thread blocks that are done
};

struct ArgmaxParams {
  const void* logits;    // [rows, vocab], last stride 1
  int64_t row_stride;    // in elements
  int64_t* output;       // [rows]
  ArgmaxRow* workspace;  // [rows]
  int rows, vocab;
  LogitType type;
};

cudaError_t launch_argmax_rows(const ArgmaxParams& params, int multiprocessors, cudaStream_t stream);

}  // namespace nwor
