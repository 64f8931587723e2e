// Attention of a window over its context and itself: one work item. Online softmax over tiles of keys; all sums in
// float. Compiled once per instruction set (see convert.h for why everything is internal).
#pragma once

#include "convert.h"
#include "vector.h"
#include "verify_params.h"

namespace nwor {
namespace {

constexpr float kInfinity = __builtin_inff();

struct Scratch {
  float* query;        // [kChunkRows, padded]
  float* accumulator;  // [kChunkRows, padded]
  float* scores;       // [kChunkRows, kTileTokens]
  float* keys;         // [head_size, kTileTokens]
  float* values;       // [kTileTokens, padded]
  float* rows;         // [kTransposed, padded]
  float* maximum;      // [kChunkRows]
  float* sum;          // [kChunkRows]

  Scratch(float* base, int64_t padded) {
    query = base;
    accumulator = query + kChunkRows * padded;
    scores = accumulator + kChunkRows * padded;
    keys = scores + kChunkRows * kTileTokens;
    values = keys + kTileTokens * padded;
    rows = values + kTileTokens * padded;
    maximum = rows + kTransposed * padded;
    sum = maximum + kChunkRows;
  }
};

inline const void* advance(const void* base, int64_t elements, Format format) {
  return static_cast<const char*>(base) + elements * format_bytes(format);
}

inline float exp_nonpositive(float x) { return exp_nonpositive(broadcast(x))[0]; }

// keys[:, at .. at + count) = the keys of `count` consecutive tokens, transposed
template <Format format>
inline void load_keys(const Scratch& scratch, int64_t at, const void* source, int64_t token_stride,
                      int64_t element_stride, int64_t count, int64_t head_size, float scale) {
  float* __restrict keys = scratch.keys + at;
  if (token_stride == 1) {
    for (int64_t e = 0; e < head_size; ++e)
      load_run<format>(keys + e * kTileTokens, advance(source, e * element_stride, format), count, 1, scale);
    return;
  }
  const int64_t padded = padded_head(head_size);
  for (int64_t first = 0; first < count; first += kTransposed) {
    const int64_t group = count - first < kTransposed ? count - first : kTransposed;
    for (int64_t i = 0; i < group; ++i)
      load_run<format>(scratch.rows + i * padded, advance(source, (first + i) * token_stride, format), head_size,
                       element_stride, scale);
    for (int64_t e = 0; e < head_size; ++e)
      for (int64_t i = 0; i < group; ++i) keys[e * kTileTokens + first + i] = scratch.rows[i * padded + e];
  }
}

template <Format format>
inline void load_values(const Scratch& scratch, int64_t at, const void* source, int64_t token_stride,
                        int64_t element_stride, int64_t count, int64_t head_size, float scale) {
  const int64_t padded = padded_head(head_size);
  for (int64_t i = 0; i < count; ++i)
    load_run<format>(scratch.values + (at + i) * padded, advance(source, i * token_stride, format), head_size,
                     element_stride, scale);
}

// Keys [head size, count] or values [count, head size], rows `stride` apart.
struct Tile {
  const float* data;
  int64_t stride, count;
};

// The work of one item; a class only so that its parts share what they all need.
class Attention {
 public:
  Attention(const VerifyParams& p, const WorkItem& item, float* base)
      : p_(p),
        item_(item),
        padded_(padded_head(p.head_size)),
        group_(p.num_heads / p.num_kv_heads),
        start_(p.query_start_loc[item.request]),
        window_(p.query_start_loc[item.request + 1] - start_),
        context_(p.seq_lens[item.request] - window_),
        k_scale_(p.k_scale ? p.k_scale[p.k_scale_per_head ? item.kv_head : 0] : 1.0f),
        v_scale_(p.v_scale ? p.v_scale[p.v_scale_per_head ? item.kv_head : 0] : 1.0f),
        scratch_(base, padded_) {
    const float scale = p.q_scale ? p.scale * p.q_scale[p.q_scale_per_head ? item.kv_head : 0] : p.scale;
    for (int64_t r = 0; r < item.rows; ++r) {
      scratch_.maximum[r] = -kInfinity;
      scratch_.sum[r] = 0.0f;
      float* row = scratch_.accumulator + r * padded_;
      for (int64_t d = 0; d < padded_; ++d) row[d] = 0.0f;
      const void* query = advance(p.query.base, token(r) * p.query.token + head(r) * p.query.head, p.query_format);
      with_format(p.query_format, [&]<Format format>() {
        load_run<format>(scratch_.query + r * padded_, query, p.head_size, 1, scale);
      });
      find_visible(r);
    }
  }

  void run() {
    for (int64_t t = item_.begin; t < item_.end; t += kTileTokens)
      context_tile(t, item_.end - t < kTileTokens ? item_.end - t : kTileTokens);
    if (item_.with_window) window_tile();
    if (item_.partial == nullptr) {
      for (int64_t r = 0; r < item_.rows; ++r)
        finish(r, scratch_.accumulator + r * padded_, scratch_.maximum[r], scratch_.sum[r]);
      return;
    }
    for (int64_t r = 0; r < item_.rows; ++r) {
      float* to = item_.partial + r * (padded_ + 16);
      __builtin_memcpy(to, scratch_.accumulator + r * padded_, static_cast<size_t>(padded_) * sizeof(float));
      to[padded_] = scratch_.maximum[r];
      to[padded_ + 1] = scratch_.sum[r];
    }
  }

  static void combine(const VerifyParams& p, const WorkItem* items, int64_t count) {
    const int64_t padded = padded_head(p.head_size);
    const int64_t stride = padded + 16;
    for (int64_t r = 0; r < items[0].rows; ++r) {
      float maximum = -kInfinity;
      for (int64_t i = 0; i < count; ++i) {
        const float other = items[i].partial[r * stride + padded];
        maximum = other > maximum ? other : maximum;
      }
      float* total = items[0].partial + r * stride;
      float sum = 0.0f;
      for (int64_t i = 0; i < count; ++i) {
        const float* part = items[i].partial + r * stride;
        const float factor = part[padded] == -kInfinity ? 0.0f : exp_nonpositive(part[padded] - maximum);
        sum += part[padded + 1] * factor;
        for (int64_t d = 0; d < padded; ++d) total[d] = (i == 0 ? 0.0f : total[d]) + part[d] * factor;
      }
      finish(p, items[0], r, total, maximum, sum);
    }
  }

 private:
  int64_t token(int64_t r) const { return start_ + (item_.first_row + r) / group_; }
  int64_t head(int64_t r) const { return item_.kv_head * group_ + (item_.first_row + r) % group_; }

  // Position of a window token: its index in a chain, its depth in a tree.
  int64_t position(int64_t index) const {
    if (p_.ancestor_mask == nullptr) return context_ + index;
    return context_ + __builtin_popcountll(static_cast<uint64_t>(p_.ancestor_mask[start_ + index])) - 1;
  }

  void find_visible(int64_t r) {
    const int64_t index = token(r) - start_;
    first_[r] = p_.sliding_window < 0 ? 0 : position(index) - p_.sliding_window + 1;
    uint64_t mask = p_.ancestor_mask ? static_cast<uint64_t>(p_.ancestor_mask[start_ + index])
                                     : ~uint64_t{0} >> (63 - index);
    if (window_ < 64) mask &= (uint64_t{1} << window_) - 1;
    visible_[r] = 0;
    for (int64_t j = 0; j < window_; ++j)
      if ((mask >> j & 1) != 0 && position(j) >= first_[r]) visible_[r] |= uint64_t{1} << j;
    sees_nothing_[r] = mask == 0;
  }

  // Keys and values of float32 caches whose strides allow it are multiplied where they lie, others from scratch.
  void context_tile(int64_t begin, int64_t count) {
    const bool float32 = p_.cache_format == Format::kFloat32;
    // Whole vectors are read: they stay inside a block, and inside a row of scores, where blocks are multiples.
    const bool keys_in_place = float32 && p_.key_cache.token == 1 && p_.block_size % kPad == 0;
    const bool values_in_place = float32 && p_.value_cache.element == 1 && padded_ == p_.head_size;
    const int32_t* blocks = p_.block_table + item_.request * p_.block_table_row;
    Tile values[kTileTokens];
    int64_t pieces = 0;
    for (int64_t done = 0; done < count; ++pieces) {
      const int64_t t = begin + done;
      const int64_t offset = t % p_.block_size;
      const int64_t left = p_.block_size - offset;
      const int64_t run = left < count - done ? left : count - done;
      const int64_t block = blocks[t / p_.block_size];
      const void* key = cache_at(p_.key_cache, block, offset);
      const void* value = cache_at(p_.value_cache, block, offset);
      if (keys_in_place) {
        multiply_keys({static_cast<const float*>(key), p_.key_cache.element, run}, done);
      } else {
        with_format(p_.cache_format, [&]<Format format>() {
          load_keys<format>(scratch_, done, key, p_.key_cache.token, p_.key_cache.element, run, p_.head_size,
                            k_scale_);
        });
      }
      if (values_in_place) {
        values[pieces] = {static_cast<const float*>(value), p_.value_cache.token, run};
      } else {
        with_format(p_.cache_format, [&]<Format format>() {
          load_values<format>(scratch_, done, value, p_.value_cache.token, p_.value_cache.element, run,
                              p_.head_size, v_scale_);
        });
      }
      done += run;
    }
    if (!keys_in_place) multiply_keys({scratch_.keys, kTileTokens, count}, 0);
    if (!values_in_place) {
      values[0] = {scratch_.values, padded_, count};
      pieces = 1;
    }
    finish_scores(count);
    for (int64_t r = 0; r < item_.rows; ++r) {
      const int64_t hidden = sees_nothing_[r] ? count : first_[r] - begin;
      for (int64_t j = 0; j < hidden && j < count; ++j) scratch_.scores[r * kTileTokens + j] = -kInfinity;
    }
    accumulate(values, pieces, count);
  }

  void window_tile() {
    const void* key = advance(p_.key.base, start_ * p_.key.token + item_.kv_head * p_.key.head, p_.format);
    const void* value = advance(p_.value.base, start_ * p_.value.token + item_.kv_head * p_.value.head, p_.format);
    with_format(p_.format, [&]<Format format>() {
      load_keys<format>(scratch_, 0, key, p_.key.token, 1, window_, p_.head_size, 1.0f);
      load_values<format>(scratch_, 0, value, p_.value.token, 1, window_, p_.head_size, 1.0f);
    });
    if (is_fp8(p_.cache_format)) {
      for (int64_t e = 0; e < p_.head_size; ++e)
        round_trip(scratch_.keys + e * kTileTokens, window_, p_.cache_format, k_scale_);
      for (int64_t j = 0; j < window_; ++j)
        round_trip(scratch_.values + j * padded_, p_.head_size, p_.cache_format, v_scale_);
    }
    multiply_keys({scratch_.keys, kTileTokens, window_}, 0);
    finish_scores(window_);
    for (int64_t r = 0; r < item_.rows; ++r)
      for (int64_t j = 0; j < window_; ++j)
        if ((visible_[r] >> j & 1) == 0) scratch_.scores[r * kTileTokens + j] = -kInfinity;
    const Tile values{scratch_.values, padded_, window_};
    accumulate(&values, 1, window_);
  }

  const void* cache_at(const Paged& cache, int64_t block, int64_t offset) const {
    return advance(cache.base, block * cache.block + offset * cache.token + item_.kv_head * cache.head,
                   p_.cache_format);
  }

  static int64_t whole_vectors(int64_t count) { return (count + kWidth - 1) / kWidth * kWidth; }

  // scores[:, at .. at + keys.count) and, out of what happens to lie there, on to the next whole vector.
  void multiply_keys(const Tile& keys, int64_t at) {
    product(scratch_.query, padded_, keys.data, keys.stride, scratch_.scores + at, kTileTokens, item_.rows,
            whole_vectors(keys.count), p_.head_size, false);
  }

  void finish_scores(int64_t count) {
    const int64_t columns = whole_vectors(count);
    for (int64_t r = 0; r < item_.rows; ++r) {
      float* row = scratch_.scores + r * kTileTokens;
      if (p_.softcap > 0.0f)
        for (int64_t j = 0; j < count; ++j) row[j] = p_.softcap * __builtin_tanhf(row[j] / p_.softcap);
      for (int64_t j = count; j < columns; ++j) row[j] = -kInfinity;
    }
  }

  void accumulate(const Tile* values, int64_t pieces, int64_t count) {
    const int64_t columns = whole_vectors(count);
    for (int64_t r = 0; r < item_.rows; ++r) {
      float* row = scratch_.scores + r * kTileTokens;
      Vec largest = broadcast(scratch_.maximum[r]);
      for (int64_t j = 0; j < columns; j += kWidth) {  // the scores behind `count` are -inf
        const Vec some = load(row + j);
        largest = some > largest ? some : largest;  // a score that is NaN is passed over
      }
      float maximum = largest[0];
      for (int i = 1; i < kWidth; ++i) maximum = largest[i] > maximum ? largest[i] : maximum;
      if (maximum == -kInfinity) {  // nothing visible so far, or NaN alone, which must not be lost
        for (int64_t j = 0; j < count; ++j)
          if (row[j] != row[j]) scratch_.maximum[r] = scratch_.sum[r] = row[j];
        for (int64_t j = 0; j < columns; ++j) row[j] = 0.0f;
        continue;
      }
      Vec partial_sum{};
      for (int64_t j = 0; j < columns; j += kWidth) {
        const Vec weight = exp_nonpositive(load(row + j) - maximum);
        store(row + j, weight);
        partial_sum += weight;
      }
      float sum = 0.0f;
      for (int i = 0; i < kWidth; ++i) sum += partial_sum[i];
      const float before = scratch_.maximum[r];
      if (before == -kInfinity) {
        scratch_.sum[r] = sum;
      } else if (before == maximum) {
        scratch_.sum[r] += sum;
      } else {
        const float factor = exp_nonpositive(before - maximum);
        scratch_.sum[r] = scratch_.sum[r] * factor + sum;
        float* out = scratch_.accumulator + r * padded_;
        for (int64_t d = 0; d < padded_; ++d) out[d] *= factor;
      }
      scratch_.maximum[r] = maximum;
    }
    const float* weights = scratch_.scores;
    for (int64_t i = 0; i < pieces; weights += values[i++].count)
      product(weights, kTileTokens, values[i].data, values[i].stride, scratch_.accumulator, padded_, item_.rows,
              padded_, values[i].count, true);
  }

  void finish(int64_t r, float* row, float maximum, float sum) const { finish(p_, item_, r, row, maximum, sum); }

  static void finish(const VerifyParams& p, const WorkItem& item, int64_t r, float* row, float maximum, float sum) {
    const int64_t group = p.num_heads / p.num_kv_heads;
    const int64_t token = p.query_start_loc[item.request] + (item.first_row + r) / group;
    const int64_t head = item.kv_head * group + (item.first_row + r) % group;
    float factor = 1.0f;
    if (p.sinks != nullptr) {
      float sink = 0.0f;
      with_format(p.sinks_format, [&]<Format format>() {
        load_run<format>(&sink, advance(p.sinks, head, format), 1, 1, 1.0f);
      });
      const float larger = sink > maximum ? sink : maximum;
      factor = maximum == -kInfinity ? 0.0f : exp_nonpositive(maximum - larger);
      // Infinities less themselves are no number: a sink of -inf leaves a row that sees nothing as it is.
      sum = sum * factor + (sink == larger ? 1.0f : exp_nonpositive(sink - larger));
      maximum = larger;
    }
    const float normalizer = sum > 0.0f ? factor / sum : 0.0f;
    if (sum != sum) {
      for (int64_t d = 0; d < p.head_size; ++d) row[d] = sum;  // NaN in, NaN out
    } else {
      for (int64_t d = 0; d < p.head_size; ++d) row[d] *= normalizer;
    }
    void* out = static_cast<char*>(p.output) +
                (token * p.output_token + head * p.output_head) * format_bytes(p.format);
    store_row(out, row, p.head_size, p.format);
    if (p.lse != nullptr)
      p.lse[head * p.lse_head + token * p.lse_token] = sum == 0.0f ? -kInfinity : maximum + __builtin_logf(sum);
  }

  const VerifyParams& p_;
  const WorkItem& item_;
  const int64_t padded_, group_, start_, window_, context_;
  const float k_scale_, v_scale_;
  Scratch scratch_;
  int64_t first_[kChunkRows];     // first position that a row sees
  uint64_t visible_[kChunkRows];  // window tokens that a row sees
  bool sees_nothing_[kChunkRows];
};

void attend(const VerifyParams& p, const WorkItem& item, float* scratch) { Attention(p, item, scratch).run(); }

}  // namespace
}  // namespace nwor
