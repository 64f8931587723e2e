// Binding of stage_window for CPU tensors.
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <vector>

#include "checks.h"

namespace nwor {
namespace {

struct Copy {
  const char* from;
  char* to;
  int64_t from_token, from_head, to_token, to_head;  // bytes
};

void stage_window(std::vector<Tensor> keys, std::vector<Tensor> values, std::vector<Tensor> staged_keys,
                  std::vector<Tensor> staged_values, Tensor num_tokens) {
  STD_TORCH_CHECK(!keys.empty(), "keys: is empty, wanted one tensor a layer");
  STD_TORCH_CHECK(values.size() == keys.size() && staged_keys.size() == keys.size() &&
                      staged_values.size() == keys.size(),
                  "values, staged_keys, staged_values: have ", values.size(), ", ", staged_keys.size(), " and ",
                  staged_values.size(), " tensors, wanted ", keys.size(), " each, as many as keys");
  const Tensor& first = keys[0];
  check_dim(first, "keys", 3);
  const int64_t heads = first.size(1), head_size = first.size(2);
  const int64_t bytes = static_cast<int64_t>(first.element_size());
  check_vector(num_tokens, "num_tokens", ScalarType::Int, 1, first, true);
  const int64_t tokens = num_tokens.const_data_ptr<int32_t>()[0];

  std::vector<Copy> copies;
  const auto add = [&](const Tensor& from, const char* from_name, const Tensor& to, const char* to_name) {
    const struct {
      const Tensor& tensor;
      const char* name;
    } both[] = {{from, from_name}, {to, to_name}};
    for (const auto& [tensor, name] : both) {
      check_dim(tensor, name, 3);
      check_dtype(tensor, name, first.scalar_type());
      check_device(tensor, name, first);
      check_size(tensor, name, 1, heads);
      check_size(tensor, name, 2, head_size);
      check_last_contiguous(tensor, name);
      STD_TORCH_CHECK(tokens >= 0 && tokens <= tensor.size(0), "num_tokens: is ", tokens, ", but ", name, " has ",
                      tensor.size(0), " rows");
    }
    copies.push_back({static_cast<const char*>(from.const_data_ptr()), static_cast<char*>(to.mutable_data_ptr()),
                      from.stride(0) * bytes, from.stride(1) * bytes, to.stride(0) * bytes, to.stride(1) * bytes});
  };
  for (size_t i = 0; i < keys.size(); ++i) {
    add(keys[i], "keys", staged_keys[i], "staged_keys");
    add(values[i], "values", staged_values[i], "staged_values");
  }

  const auto run = static_cast<size_t>(head_size * bytes);
  torch::stable::parallel_for(0, static_cast<int64_t>(copies.size()) * tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Copy& copy = copies[static_cast<size_t>(i / tokens)];
      const int64_t token = i % tokens;
      for (int64_t head = 0; head < heads; ++head)
        std::memcpy(copy.to + token * copy.to_token + head * copy.to_head,
                    copy.from + token * copy.from_token + head * copy.from_head, run);
    }
  });
}

}  // namespace
}  // namespace nwor

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) { m.impl("stage_window", TORCH_BOX(&nwor::stage_window)); }
