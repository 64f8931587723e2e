// Whether caches hold as many tokens as a call says, on CPU and CUDA. Knows nothing of Torch.
#pragma once

#include <cstdint>

namespace nwor {

// Whether `sides` times (keys, values) so many blocks fit into `elements`. All numbers are positive, or num_blocks is 0.
inline bool cache_holds(int64_t elements, int64_t sides, int64_t num_kv_heads, int64_t head_size, int64_t block_size,
                        int64_t num_blocks) {
  // By division: the product of what a caller makes up may exceed 64 bits.
  return num_blocks == 0 || elements / sides / num_kv_heads / head_size / block_size / num_blocks > 0;
}

}  // namespace nwor
