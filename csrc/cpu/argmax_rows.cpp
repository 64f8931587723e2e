// Binding of argmax_rows for CPU tensors. The workspace is the CUDA kernel's; nothing is kept in it here.
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <vector>

#include "checks.h"
#include "convert.h"

namespace nwor {
namespace {

constexpr int64_t kPart = 1 << 14;  // elements of a row that a thread takes at a time

struct Best {
  float value = -std::numeric_limits<float>::infinity();
  int64_t index = 0;

  // Takes a number over that is more, or that is the first NaN. To be called in ascending order of indices.
  void take(float x, int64_t at) {
    if (x <= value || value != value) return;
    value = x;
    index = at;
  }
};

inline float widen(float x, Format) { return x; }
inline float widen(uint16_t x, Format format) {
  return format == Format::kBFloat16 ? bfloat16_to_float(x) : float16_to_float(x);
}

template <class Element>
void argmax(const Tensor& logits, Format format, int64_t* output) {
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  const int64_t parts = (vocab + kPart - 1) / kPart;
  const auto* from = static_cast<const Element*>(logits.const_data_ptr());
  std::vector<Best> best(static_cast<size_t>(rows * parts));
  torch::stable::parallel_for(0, rows * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Element* row = from + i / parts * stride;
      const int64_t first = i % parts * kPart, last = std::min(first + kPart, vocab);
      Best of_part;
      for (int64_t at = first; at < last; ++at) of_part.take(widen(row[at], format), at);
      best[static_cast<size_t>(i)] = of_part;
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    Best of_row;
    for (int64_t part = 0; part < parts; ++part) {
      const Best& one = best[static_cast<size_t>(row * parts + part)];
      of_row.take(one.value, one.index);
    }
    output[row] = of_row.index;
  }
}

void argmax_rows(Tensor logits, Tensor output, Tensor workspace) {
  check_dim(logits, "logits", 2);
  const Format format = source_format(logits.scalar_type(), "logits");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  STD_TORCH_CHECK(vocab >= 1 && vocab <= std::numeric_limits<int32_t>::max(), "logits: shape is ", shape_of(logits),
                  ", wanted 1 to ", std::numeric_limits<int32_t>::max(), " columns");
  check_last_contiguous(logits, "logits");
  check_vector(output, "output", ScalarType::Long, rows, logits, true);
  check_vector(workspace, "workspace", ScalarType::Long, 2 * rows, logits);
  if (rows == 0) return;
  auto* to = static_cast<int64_t*>(output.mutable_data_ptr());
  if (format == Format::kFloat32) {
    argmax<float>(logits, format, to);
  } else {
    argmax<uint16_t>(logits, format, to);
  }
}

}  // namespace
}  // namespace nwor

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) { m.impl("argmax_rows", TORCH_BOX(&nwor::argmax_rows)); }
