// Whether a tensor that an op writes lies where another of its arguments does.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace nwor {

// Bytes from a tensor's first element to behind its last.
inline int64_t bytes_spanned(const torch::stable::Tensor& t) {
  int64_t elements = 1;
  for (int64_t d = 0; d < t.dim(); ++d) elements += (t.size(d) - 1) * t.stride(d);
  return elements * static_cast<int64_t>(t.element_size());
}

// True only where two tensors share memory for sure: they begin at one place, or what they span overlaps and has no
// gaps. Slices of one larger tensor lie between each other's rows, so where there are gaps nothing is said.
inline bool share_memory(const torch::stable::Tensor& one, const torch::stable::Tensor& other) {
  if (one.numel() == 0 || other.numel() == 0) return false;
  const auto begin = reinterpret_cast<uintptr_t>(one.const_data_ptr());
  const auto other_begin = reinterpret_cast<uintptr_t>(other.const_data_ptr());
  if (begin == other_begin) return true;
  const int64_t bytes = bytes_spanned(one), other_bytes = bytes_spanned(other);
  if (begin + bytes <= other_begin || other_begin + other_bytes <= begin) return false;
  return bytes == one.numel() * static_cast<int64_t>(one.element_size()) &&
         other_bytes == other.numel() * static_cast<int64_t>(other.element_size());
}

}  // namespace nwor
