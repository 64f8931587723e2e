// How the threads of a block share the rows of tokens that go to the cache, or come from there.
//
// A thread has one place of a row, some elements of one head, and walks the tokens: what depends on the place is found
// once.
#pragma once

#include <cstdint>

#include "common/fastdiv.h"
#include "kv_cache/params.h"

namespace nwor {

constexpr int kRowThreads = 128;  // of a block

// What a launch knows of a row.
struct RowCut {
  Divisor places, places_per_head;  // where rows are aligned
  Divisor elements, head_size;      // where they are not and an element is a place
  Divisor block_size;

  // `width`: elements of a place.
  RowCut(const SlotShape& shape, int width) {
    const int per_head = shape.head_size >= width ? shape.head_size / width : 1;
    places = Divisor(shape.num_kv_heads * per_head), places_per_head = Divisor(per_head);
    elements = Divisor(shape.num_kv_heads * shape.head_size), head_size = Divisor(shape.head_size);
    block_size = Divisor(shape.block_size);
  }

  // Thread blocks for a row where it is aligned.
  int blocks() const { return (static_cast<int>(places.value) + kRowThreads - 1) / kRowThreads; }
};

// A thread's place of a row, the token it begins with, and how many tokens further its next one is. Where a row has
// fewer places than there are threads, several tokens are served at once.
struct Lane {
  int place, token, step;

  // The `chunk`th part of a row with as many places as there are threads.
  __device__ __forceinline__ Lane(const Divisor& places, int chunk) {
    const int all = static_cast<int>(places.value);
    token = divide(threadIdx.x, places);  // 0 where a row has as many places or more
    step = all < kRowThreads ? divide(kRowThreads, places) : 1;
    place = all < kRowThreads ? threadIdx.x - token * all : chunk * kRowThreads + threadIdx.x;
    if (token >= step) place = all;  // threads left over
  }
};

// From the cache's beginning to a slot of it, in the strides' unit.
__device__ __forceinline__ int64_t slot_offset(int slot, const Divisor& block_size, int64_t block_stride,
                                               int64_t token_stride) {
  const int block = divide(slot, block_size);
  return block * block_stride + (slot - block * static_cast<int>(block_size.value)) * token_stride;
}

// The same for caches of 2^31 slots and more, with a division of 64 bits.
__device__ __forceinline__ int64_t far_slot_offset(int64_t slot, const Divisor& block_size, int64_t block_stride,
                                                   int64_t token_stride) {
  const int64_t size = block_size.value;
  return slot / size * block_stride + slot % size * token_stride;
}

}  // namespace nwor
