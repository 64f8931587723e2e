// Query rows of one KV head, token-major, then query head of the group.
#pragma once

#include "common/fastdiv.h"
#include "verify/params.h"

namespace nwor {

// Row of query or output that a packed row stands for.
struct PackedRow {
  int token, head;  // of the window; of the group

  __device__ __forceinline__ PackedRow(const VerifyParams& p, int packed)
      : token(divide(packed, p.group)), head(packed - token * static_cast<int>(p.group.value)) {}
};

}  // namespace nwor
