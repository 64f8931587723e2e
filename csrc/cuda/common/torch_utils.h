// What the bindings share: checks of tensors that an op was given, and the current stream.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace nwor {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
                  "nwor: no current CUDA stream on device ", tensor.get_device_index());
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(cudaError_t status, const char* op) {
  if (status != cudaSuccess) cudaGetLastError();  // or the next launch of anybody would report it once more
  STD_TORCH_CHECK(status == cudaSuccess, op, ": CUDA reports '", cudaGetErrorString(status), "'");
}

inline int multiprocessors(int device) {
  int count = 0;
  check_launch(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "nwor");
  return count;
}

inline void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == like.get_device_index(), op, ": ", name,
                  " must be on CUDA device ", like.get_device_index());
}

inline void check_vector(const char* op, const char* name, const Tensor& tensor, ScalarType dtype, int64_t at_least,
                         const Tensor& like) {
  check_device(op, name, tensor, like);
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, op, ": ", name, " has the wrong dtype");
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) >= at_least, op, ": ", name, " must be 1-D with at least ",
                  at_least, " elements");
  STD_TORCH_CHECK(tensor.size(0) < 2 || tensor.stride(0) == 1, op, ": ", name, " must be contiguous");
}

struct CacheFormat {
  bool is_fp8 = false, is_e5m2 = false;
};

inline CacheFormat parse_cache_format(const char* op, const std::string& name) {
  if (name == "auto") return {};
  if (name == "fp8" || name == "fp8_e4m3") return {true, false};
  STD_TORCH_CHECK(name == "fp8_e5m2", op, ": kv_cache_dtype is '", name,
                  "'; it must be 'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2'");
  return {true, true};
}

}  // namespace nwor
