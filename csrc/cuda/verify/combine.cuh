// The combine: how the results of several thread blocks become a work tile's. Those of a cluster add up through
// distributed shared memory, those of workers that share a work tile by way of the workspace. docs/kernels/design.md says
// why nobody waits for long. A part is what a split leaves of its rows; a work tile goes by the split that is at hand.
#pragma once

#include "verify/epilogue.cuh"
#include "verify/lengths.cuh"

namespace nwor {

// Row quads [x, y): four positions of a row each, rows one after the other. What one of `count` takes of them: as even
// as whole lines of memory allow.
__device__ __forceinline__ int2 share_quads(int2 quads, int index, int count) {
  const int each = (divide_up(quads.y - quads.x, count) + 7) / 8 * 8;
  const int begin = min(quads.x + index * each, quads.y);
  return make_int2(begin, min(begin + each, quads.y));
}

// Those of a work tile that a thread block of the cluster adds up for all of them.
template <class T>
__device__ __forceinline__ int2 quads_of_rank(const Split& split, const SharedMemory<T>& smem) {
  return share_quads(make_int2(0, min(T::kRows, split.row_count) * (T::kHeadSize / 4)), smem.rank(), smem.cluster());
}

// Where in the workspace a worker leaves its part of a work tile, counted in parts: a worker has at most two that others
// wait for, the work tile's beginning in one place, what continues another worker's in the other.
__device__ __forceinline__ int slot_of(const Split& split, int worker) {
  return 2 * worker + (worker == split.first_worker ? 1 : 0);
}

template <class T>
__device__ __forceinline__ float2* part_stats(const VerifyParams& p, int slot, const SharedMemory<T>& smem) {
  return p.partial_stats + (static_cast<int64_t>(slot) * smem.cluster() + smem.rank()) * T::kRows;
}

template <class T>
__device__ __forceinline__ float4* part_quads(const VerifyParams& p, int slot) {
  return reinterpret_cast<float4*>(p.partial_output) + static_cast<int64_t>(slot) * (T::kRows * T::kHeadSize / 4);
}

// Adds up the same four positions of several parts. Loads are batched before the first use, because they come late,
// from another thread block's shared memory.
template <class Load>
__device__ __forceinline__ Quad add_parts(int count, Load load) {
  constexpr int kBatch = 4;
  Quad quad;
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) {
    float2 stats[kBatch];
    float4 parts[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      load(min(first + k, count - 1), stats[k], parts[k]);
      if (first + k >= count) stats[k] = make_float2(kNoScore, 0.f);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) quad.add(stats[k], parts[k]);
  }
  return quad;
}

// Adds up what the cluster's thread blocks have in shared memory: into the output where no other worker has a part of the
// work tile, else into the workspace.
template <class T>
__device__ __forceinline__ void combine_cluster(const VerifyParams& p, const Split& split, int slot,
                                                const SharedMemory<T>& smem) {
  constexpr int kRowQuads = T::kHeadSize / 4;
  const int thread = recomputed_thread();
  const int2 mine = quads_of_rank(split, smem);
  cluster_sync();
  const uint32_t rows_address = smem_address(smem.rows()), sum_address = smem_address(smem.sum());
  const auto sum_offset = [](int i) { return (i / kRowQuads * (T::kSumStride / 4) + i % kRowQuads) * 16; };
  const auto pass_on = [&](int i, const Quad& quad) {
    const int row = i / kRowQuads;
    if (split.worker_count == 1) {
      store_quad<T>(p, split, row, i % kRowQuads * 4, quad);
    } else {
      __stcg(part_quads<T>(p, slot) + i, quad.values);
      __stcg(part_stats(p, slot, smem) + row, make_float2(quad.maximum, quad.sum));
    }
  };
  if (smem.cluster() == 2) {  // each has half of all rows: three quads of a thread under way at a time
    constexpr int kBatch = 3;
    const int other = smem.rank() ^ 1;
#pragma unroll 1
    for (int begin = mine.x + thread; begin < mine.y; begin += kBatch * T::kThreads) {
      float2 stats[kBatch];
      float4 parts[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = min(begin + k * T::kThreads, mine.y - 1);
        stats[k] = cluster_load2(cluster_address(rows_address + i / kRowQuads * 8, other));
        parts[k] = cluster_load4(cluster_address(sum_address + sum_offset(i), other));
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = begin + k * T::kThreads;
        if (i >= mine.y) break;
        const float2 own = smem.rows()[i / kRowQuads];
        const char* values = reinterpret_cast<const char*>(smem.sum()) + sum_offset(i);
        Quad quad{*reinterpret_cast<const float4*>(values), own.x, own.y};
        quad.add(stats[k], parts[k]);
        pass_on(i, quad);
      }
    }
  } else {
#pragma unroll 1
    for (int i = mine.x + thread; i < mine.y; i += T::kThreads)
      pass_on(i, add_parts(smem.cluster(), [&](int other, float2& stats, float4& part) {
        stats = cluster_load2(cluster_address(rows_address + i / kRowQuads * 8, other));
        part = cluster_load4(cluster_address(sum_address + sum_offset(i), other));
      }));
  }
  // The others have read this block's shared memory: what they passed on came of it, and was stored before they came.
  cluster_meet();
}

// Adds up row quads of all parts that a work tile's workers left in the workspace, in the workers' order. What they left
// is copied to shared memory first, as much at a time as there is room for: hundreds of loads are then under way at once.
template <class T>
__device__ __forceinline__ void combine_workers(const VerifyParams& p, const Split& split, int2 quads,
                                                const SharedMemory<T>& smem) {
  constexpr int kRowQuads = T::kHeadSize / 4;
  const int thread = recomputed_thread();
  const int count = split.worker_count;
  const int lanes = count > 32 ? 8 : count > 16 ? 4 : 1;  // by the count alone: the order of a sum
  // Of each part: the statistics of the rows in question, two rows to 16 bytes, then the quads.
  const int room = T::kRingBytes / 16 / count, most = max(room - 2 - room / 32, 1);
#pragma unroll 1
  for (int first = quads.x; first < quads.y; first += most) {
    const int size = min(most, quads.y - first);
    const int pair = first / kRowQuads / 2, pairs = (first + size - 1) / kRowQuads / 2 - pair + 1;
    const int pitch = pairs + size;
    const uint32_t to = smem_address(smem.ring());
    // So many threads bring in a part, a power of two: fewer than a warp where parts are small, more where they are few.
    int shift = 5;
    while (shift > 3 && 1 << shift >= 2 * pitch) --shift;
    while (2 * count << shift <= T::kThreads) ++shift;
#pragma unroll 1
    for (int part = thread >> shift; part < count; part += T::kThreads >> shift) {
      const int slot = slot_of(split, split.first_worker + part);
      const float4* stats = reinterpret_cast<const float4*>(part_stats(p, slot, smem)) + pair;
      const float4* values = part_quads<T>(p, slot) + first;
#pragma unroll 4
      for (int i = thread & ((1 << shift) - 1); i < pitch; i += 1 << shift)
        copy_async16(to + (part * pitch + i) * 16, i < pairs ? stats + i : values + (i - pairs), true);
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();  // all parts are there
    // A quad's parts are shared out among as many lanes of a warp.
#pragma unroll 1
    for (int i = thread; i < (size * lanes + 31) / 32 * 32; i += T::kThreads) {
      const int quad_index = min(i / lanes, size - 1), row = (first + quad_index) / kRowQuads;
      const float2* stats = reinterpret_cast<const float2*>(smem.ring()) + (row - 2 * pair);
      const float4* values = reinterpret_cast<const float4*>(smem.ring()) + pairs + quad_index;
      Quad quad;
#pragma unroll 4
      for (int part = i % lanes; part < count; part += lanes)
        quad.maximum = fmaxf(quad.maximum, stats[part * pitch * 2].x);
#pragma unroll 1
      for (int distance = 1; distance < lanes; distance *= 2)
        quad.maximum = fmaxf(quad.maximum, __shfl_xor_sync(0xffffffffu, quad.maximum, distance));
#pragma unroll 4
      for (int part = i % lanes; part < count; part += lanes) {
        const float2 own = stats[part * pitch * 2];
        const float4 value = values[part * pitch];
        const float weight = exp2_fast(own.x - quad.maximum);
        quad.values.x += value.x * weight;
        quad.values.y += value.y * weight;
        quad.values.z += value.z * weight;
        quad.values.w += value.w * weight;
        quad.sum += own.y * weight;
      }
#pragma unroll 1
      for (int distance = 1; distance < lanes; distance *= 2) {
        quad.values.x += __shfl_xor_sync(0xffffffffu, quad.values.x, distance);
        quad.values.y += __shfl_xor_sync(0xffffffffu, quad.values.y, distance);
        quad.values.z += __shfl_xor_sync(0xffffffffu, quad.values.z, distance);
        quad.values.w += __shfl_xor_sync(0xffffffffu, quad.values.w, distance);
        quad.sum += __shfl_xor_sync(0xffffffffu, quad.sum, distance);
      }
      if (i % lanes == 0 && i < size * lanes) store_quad<T>(p, split, row, (first + quad_index) % kRowQuads * 4, quad);
    }
    __syncthreads();  // the parts have been read
  }
}

// A work tile's semaphore: workers that have left their parts, those that are done with the work tile, and those of them
// that did not wait until all parts were there. Zero between launches.
constexpr int kSemaphoreDone = 1 << 10, kSemaphoreGone = 1 << 20, kSemaphoreField = kSemaphoreDone - 1;
constexpr int kMaxWorkers = kSemaphoreField;
constexpr unsigned kPatience = 200000;  // nanoseconds

// Whose row quads a worker adds up.
enum class Combine : int { kNone, kOwn, kAll };

// Waits until all of a work tile's workers have left their parts. They run at the same time and finish at about the same
// time, as a rule. Nothing says that they do: other kernels may keep multiprocessors from a launch. So nobody waits for
// long, and where somebody did not, the last to arrive adds up everything. `value`: the semaphore's since this worker
// counted itself.
static __device__ __forceinline__ Combine wait_for_splits(int* semaphore, int count, int value) {
  if ((value & kSemaphoreField) == count) return value / kSemaphoreGone > 0 ? Combine::kAll : Combine::kOwn;
  const unsigned begin = timer_low();
  while (true) {
    value = load_acquire(semaphore);
    if ((value & kSemaphoreField) == count) return Combine::kOwn;
    if (timer_low() - begin > kPatience &&
        atomicCAS(semaphore, value, value + kSemaphoreDone + kSemaphoreGone) == value)
      return Combine::kNone;
  }
}

// Combines the work tiles that a worker shares with others, once it has left all its parts: the last of its splits and,
// where work tiles straddle workers, the first. Each of a work tile's workers adds up a share of its rows.
template <class T>
__device__ __forceinline__ void combine_splits(const VerifyParams& p, const Split& first, const Split& last, int worker,
                                               const SharedMemory<T>& smem) {
  const auto semaphore_of = [&](const Split& split) {
    return p.semaphores + split.first_worker * smem.cluster() + smem.rank();
  };
  int first_value = 0, last_value = 0;  // of the semaphores; known to the first thread
  __syncthreads();
  if (threadIdx.x == 0) {  // for both work tiles before it waits for either
    __threadfence();  // all threads' parts, which the barrier puts before it
    if (first.worker_count > 1) first_value = atomicAdd(semaphore_of(first), 1) + 1;
    if (last.worker_count > 1) last_value = atomicAdd(semaphore_of(last), 1) + 1;
  }
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Split& split = i == 0 ? first : last;
    const int count = split.worker_count;
    if (count <= 1) continue;
    int* semaphore = semaphore_of(split);
    if (threadIdx.x == 0) {
      smem.flags()[i] = static_cast<int>(wait_for_splits(semaphore, count, i == 0 ? first_value : last_value));
      __threadfence();  // the others' parts, for all threads, who are behind the barrier
    }
    __syncthreads();
    const Combine own = static_cast<Combine>(smem.flags()[i]);
    if (own == Combine::kNone) continue;
    int value = 0;
    if (threadIdx.x == 0) value = atomicAdd(semaphore, kSemaphoreDone);
    const int2 quads = quads_of_rank(split, smem);
    combine_workers<T>(p, split, own == Combine::kAll ? quads : share_quads(quads, worker - split.first_worker, count),
                       smem);
    if (threadIdx.x == 0 && (value / kSemaphoreDone & kSemaphoreField) == count - 1) *semaphore = 0;
  }
}

}  // namespace nwor
