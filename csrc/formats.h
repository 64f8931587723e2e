// Number formats of K and V, and the arguments of the CPU kernels that depend on them. Knows nothing of Torch.
#pragma once

#include <cstdint>

namespace nwor {

enum class Format : int { kFloat32, kFloat16, kBFloat16, kFp8E4M3, kFp8E5M2 };

constexpr int64_t format_bytes(Format format) {
  return format == Format::kFloat32 ? 4 : format == Format::kFloat16 || format == Format::kBFloat16 ? 2 : 1;
}

constexpr bool is_fp8(Format format) { return format == Format::kFp8E4M3 || format == Format::kFp8E5M2; }

}  // namespace nwor
