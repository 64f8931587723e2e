// Binds argmax_rows to its CUDA kernel.
#include "argmax/params.h"
#include "common/torch_utils.h"

namespace nwor {
namespace {

void argmax_rows(Tensor logits, Tensor output, Tensor workspace) {
  constexpr const char* kOp = "argmax_rows";
  STD_TORCH_CHECK(logits.is_cuda() && logits.dim() == 2, kOp, ": logits must be a CUDA tensor [rows, vocab]");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  STD_TORCH_CHECK(vocab >= 1 && vocab <= INT32_MAX, kOp, ": logits has ", vocab, " columns; it must have 1 to ",
                  INT32_MAX);
  STD_TORCH_CHECK(rows <= INT32_MAX, kOp, ": logits has more than ", INT32_MAX, " rows");
  STD_TORCH_CHECK(vocab == 1 || logits.stride(1) == 1, kOp, ": logits must have a contiguous last dimension");
  ArgmaxParams p{};
  if (logits.scalar_type() == ScalarType::Float) {
    p.type = LogitType::kFloat;
  } else if (logits.scalar_type() == ScalarType::Half) {
    p.type = LogitType::kHalf;
  } else {
    STD_TORCH_CHECK(logits.scalar_type() == ScalarType::BFloat16, kOp,
                    ": logits must be float32, float16 or bfloat16");
    p.type = LogitType::kBfloat16;
  }
  check_vector(kOp, "output", output, ScalarType::Long, rows, logits);
  STD_TORCH_CHECK(output.size(0) == rows, kOp, ": output must have ", rows, " elements, as many as logits has rows");
  check_vector(kOp, "workspace", workspace, ScalarType::Long, 2 * rows, logits);
  if (rows == 0) return;
  p.logits = logits.const_data_ptr();
  p.row_stride = logits.stride(0);
  p.output = static_cast<int64_t*>(output.mutable_data_ptr());
  p.workspace = static_cast<ArgmaxRow*>(workspace.mutable_data_ptr());
  p.rows = static_cast<int>(rows);
  p.vocab = static_cast<int>(vocab);
  const int device = logits.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  check_launch(launch_argmax_rows(p, multiprocessors(device), current_stream(logits)), kOp);
}

}  // namespace
}  // namespace nwor

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) { m.impl("argmax_rows", TORCH_BOX(&nwor::argmax_rows)); }
