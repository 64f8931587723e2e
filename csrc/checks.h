// Checks of op arguments that the CPU and CUDA bindings share. Each failure names the op's argument, what it is and
// what is wanted. They look at metadata only, never at a tensor's values.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>

#include "formats.h"

namespace nwor {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_of(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

inline void check_dim(const Tensor& t, const char* name, int64_t dim) {
  STD_TORCH_CHECK(t.dim() == dim, name, ": shape is ", shape_of(t), ", wanted ", dim, " dimensions");
}

inline void check_size(const Tensor& t, const char* name, int64_t dim, int64_t size) {
  STD_TORCH_CHECK(t.size(dim) == size, name, ": shape is ", shape_of(t), ", wanted size ", size, " in dimension ", dim);
}

inline void check_dtype(const Tensor& t, const char* name, ScalarType dtype) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, ": dtype is ", torch::headeronly::toString(t.scalar_type()),
                  ", wanted ", torch::headeronly::toString(dtype));
}

inline void check_device(const Tensor& t, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(t.is_cuda() == like.is_cuda() && t.is_cpu() == like.is_cpu() &&
                      t.get_device_index() == like.get_device_index(),
                  name, ": is on another device than the op's other tensors");
}

inline void check_last_contiguous(const Tensor& t, const char* name) {
  const int64_t last = t.dim() - 1;
  STD_TORCH_CHECK(t.size(last) <= 1 || t.stride(last) == 1, name, ": stride of the last dimension is ", t.stride(last),
                  ", wanted 1");
}

inline void check_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous(), name, ": is not contiguous");
}

// A one-dimensional contiguous tensor of at least (or exactly, if `exact`) `size` elements.
inline void check_vector(const Tensor& t, const char* name, ScalarType dtype, int64_t size, const Tensor& like,
                         bool exact = false) {
  check_dim(t, name, 1);
  check_dtype(t, name, dtype);
  check_device(t, name, like);
  check_contiguous(t, name);
  STD_TORCH_CHECK(exact ? t.size(0) == size : t.size(0) >= size, name, ": shape is ", shape_of(t), ", wanted ",
                  exact ? "" : "at least ", size, " elements");
}

inline Format source_format(ScalarType dtype, const char* name) {
  switch (dtype) {
    case ScalarType::Float:
      return Format::kFloat32;
    case ScalarType::Half:
      return Format::kFloat16;
    case ScalarType::BFloat16:
      return Format::kBFloat16;
    default:
      STD_TORCH_CHECK(false, name, ": dtype is ", torch::headeronly::toString(dtype),
                      ", wanted float32, float16 or bfloat16");
  }
}

// The format of a cache by vLLM's name for it; `source` is the format of the keys that are written to it.
inline Format cache_format(const std::string& kv_cache_dtype, Format source) {
  if (kv_cache_dtype == "auto") return source;
  if (kv_cache_dtype == "fp8" || kv_cache_dtype == "fp8_e4m3") return Format::kFp8E4M3;
  if (kv_cache_dtype == "fp8_e5m2") return Format::kFp8E5M2;
  STD_TORCH_CHECK(false, "kv_cache_dtype: is '", kv_cache_dtype, "', wanted auto, fp8, fp8_e4m3 or fp8_e5m2");
}

inline void check_cache_dtype(const Tensor& t, const char* name, Format format) {
  const ScalarType dtype = t.scalar_type();
  const bool fits = format == Format::kFloat32    ? dtype == ScalarType::Float
                    : format == Format::kFloat16  ? dtype == ScalarType::Half
                    : format == Format::kBFloat16 ? dtype == ScalarType::BFloat16
                    : format == Format::kFp8E4M3 ? dtype == ScalarType::Byte || dtype == ScalarType::Float8_e4m3fn
                                                 : dtype == ScalarType::Byte || dtype == ScalarType::Float8_e5m2;
  STD_TORCH_CHECK(fits, name, ": dtype is ", torch::headeronly::toString(dtype), ", which kv_cache_dtype does not allow");
}

// Whether a scale holds one number per head (true) or one for all (false).
inline bool check_scale(const Tensor& t, const char* name, int64_t num_kv_heads, const Tensor& like) {
  check_dtype(t, name, ScalarType::Float);
  check_device(t, name, like);
  check_contiguous(t, name);
  STD_TORCH_CHECK(t.numel() == 1 || t.numel() == num_kv_heads, name, ": has ", t.numel(), " elements, wanted 1 or ",
                  num_kv_heads);
  return t.numel() != 1;
}

}  // namespace nwor
