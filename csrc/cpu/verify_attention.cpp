// Binding of verify_attention for CPU tensors: checks, plan, threads.
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <limits>

#include "checks.h"
#include "overlap.h"
#include "plan.h"

namespace nwor {
namespace {

int64_t workspace_floats(int64_t workers, int64_t head_size) {
  return workers * scratch_floats(head_size) + most_partials(workers) * partial_floats(head_size);
}

constexpr int64_t kAlignment = 64;

int64_t workspace_bytes(int64_t workers, int64_t head_size) {
  return workspace_floats(workers, head_size) * static_cast<int64_t>(sizeof(float)) + kAlignment;
}

Rows rows_of(const Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1)}; }

Paged paged_of(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

// The format of the query: that of the keys, or e4m3 where the caches are fp8.
Format query_format(const Tensor& query, const Tensor& key, Format cache) {
  const ScalarType dtype = query.scalar_type(), source = key.scalar_type();
  if (dtype != ScalarType::Float8_e4m3fn) {
    const Format format = source_format(dtype, "query");
    check_dtype(key, "key", dtype);
    return format;
  }
  STD_TORCH_CHECK(is_fp8(cache), "query: dtype is ", torch::headeronly::toString(dtype), ", wanted ",
                  torch::headeronly::toString(source), " beside a cache that is not fp8");
  return Format::kFp8E4M3;
}

// Lengths and block numbers of a CPU tensor can be looked at for free, so a wrong one is an error and not a crash.
void check_lengths(const VerifyParams& p, int64_t batch, int64_t tokens, int64_t max_query_len, int64_t max_blocks,
                   int64_t num_blocks) {
  STD_TORCH_CHECK(p.query_start_loc[0] >= 0, "query_start_loc: begins with ", p.query_start_loc[0]);
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t window = int64_t{p.query_start_loc[i + 1]} - p.query_start_loc[i];
    STD_TORCH_CHECK(window >= 0 && window <= max_query_len, "query_start_loc: window ", i, " has length ", window,
                    ", wanted 0 to max_query_len = ", max_query_len);
    STD_TORCH_CHECK(p.query_start_loc[i + 1] <= tokens, "query_start_loc: window ", i, " ends at row ",
                    p.query_start_loc[i + 1], ", but query has ", tokens, " rows");
    if (window == 0) continue;
    const int64_t context = p.seq_lens[i] - window;
    STD_TORCH_CHECK(context >= 0, "seq_lens: is ", p.seq_lens[i], " for request ", i, ", whose window alone has ",
                    window, " tokens");
    const int64_t blocks = (context + p.block_size - 1) / p.block_size;
    STD_TORCH_CHECK(blocks <= max_blocks, "block_table: has ", max_blocks, " columns, but request ", i,
                    " has a context of ", blocks, " blocks");
    const int64_t first = first_visible(p, context) / p.block_size;
    for (int64_t b = first; b < blocks; ++b) {
      const int32_t block = p.block_table[i * p.block_table_row + b];
      STD_TORCH_CHECK(block >= 0 && block < num_blocks, "block_table: entry [", i, ", ", b, "] is ", block,
                      ", wanted 0 to ", num_blocks - 1);
    }
  }
}

void verify_attention(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache,
                      Tensor block_table, Tensor query_start_loc, Tensor seq_lens, Tensor output, Tensor workspace,
                      std::optional<Tensor> lse, double scale, int64_t max_query_len, std::string kv_cache_dtype,
                      std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, int64_t sliding_window,
                      double softcap, std::optional<Tensor> sinks, std::optional<Tensor> ancestor_mask,
                      std::optional<Tensor> /*plan*/, std::optional<Tensor> q_scale) {
  check_dim(query, "query", 3);
  const int64_t tokens = query.size(0), heads = query.size(1), head_size = query.size(2);
  VerifyParams p{};
  p.format = source_format(key.scalar_type(), "key");
  p.cache_format = cache_format(kv_cache_dtype, p.format);
  p.query_format = query_format(query, key, p.cache_format);
  check_last_contiguous(query, "query");
  check_dim(key, "key", 3);
  const int64_t kv_heads = key.size(1);
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, "query: has ", heads, " heads, wanted a multiple of key's ",
                  kv_heads);
  const struct {
    const Tensor& tensor;
    const char* name;
    int64_t heads;
  } rows[] = {{key, "key", kv_heads}, {value, "value", kv_heads}, {output, "output", heads}};
  for (const auto& [tensor, name, count] : rows) {
    check_dim(tensor, name, 3);
    check_dtype(tensor, name, key.scalar_type());
    check_device(tensor, name, query);
    check_size(tensor, name, 0, tokens);
    check_size(tensor, name, 1, count);
    check_size(tensor, name, 2, head_size);
    check_last_contiguous(tensor, name);
  }
  check_dim(key_cache, "key_cache", 4);
  check_dim(value_cache, "value_cache", 4);
  const int64_t num_blocks = key_cache.size(0), block_size = key_cache.size(1);
  const struct {
    const Tensor& tensor;
    const char* name;
  } caches[] = {{key_cache, "key_cache"}, {value_cache, "value_cache"}};
  for (const auto& [tensor, name] : caches) {
    check_device(tensor, name, query);
    check_cache_dtype(tensor, name, p.cache_format);
    check_size(tensor, name, 0, num_blocks);
    check_size(tensor, name, 1, block_size);
    check_size(tensor, name, 2, kv_heads);
    check_size(tensor, name, 3, head_size);
  }
  STD_TORCH_CHECK(block_size > 0, "key_cache: block size is 0");
  const struct {
    const Tensor& tensor;
    const char* name;
  } read[] = {{query, "query"}, {key, "key"}, {value, "value"}, {key_cache, "key_cache"}, {value_cache, "value_cache"}};
  for (const auto& [tensor, name] : read)
    STD_TORCH_CHECK(!share_memory(output, tensor), "output: lies in the memory of ", name,
                    ", wanted memory of its own");
  check_vector(query_start_loc, "query_start_loc", ScalarType::Int, 1, query);
  const int64_t batch = query_start_loc.size(0) - 1;
  check_vector(seq_lens, "seq_lens", ScalarType::Int, batch, query);
  check_dim(block_table, "block_table", 2);
  check_dtype(block_table, "block_table", ScalarType::Int);
  check_device(block_table, "block_table", query);
  check_last_contiguous(block_table, "block_table");
  STD_TORCH_CHECK(block_table.size(0) >= batch, "block_table: shape is ", shape_of(block_table), ", wanted at least ",
                  batch, " rows");
  check_vector(workspace, "workspace", ScalarType::Byte, 0, query);
  STD_TORCH_CHECK(max_query_len >= 1 && max_query_len <= kMaxWindow, "max_query_len: is ", max_query_len,
                  ", wanted 1 to ", kMaxWindow);
  STD_TORCH_CHECK(sliding_window == -1 || sliding_window > 0, "sliding_window: is ", sliding_window,
                  ", wanted -1 or at least 1");
  STD_TORCH_CHECK(softcap >= 0, "softcap: is ", softcap, ", wanted 0 or more");

  p.query = rows_of(query);
  p.key = rows_of(key);
  p.value = rows_of(value);
  p.key_cache = paged_of(key_cache);
  p.value_cache = paged_of(value_cache);
  p.block_table = block_table.const_data_ptr<int32_t>();
  p.block_table_row = block_table.stride(0);
  p.query_start_loc = query_start_loc.const_data_ptr<int32_t>();
  p.seq_lens = seq_lens.const_data_ptr<int32_t>();
  p.output = output.mutable_data_ptr();
  p.output_token = output.stride(0);
  p.output_head = output.stride(1);
  if (lse) {
    check_dim(*lse, "lse", 2);
    check_dtype(*lse, "lse", ScalarType::Float);
    check_device(*lse, "lse", query);
    check_size(*lse, "lse", 0, heads);
    check_size(*lse, "lse", 1, tokens);
    p.lse = lse->mutable_data_ptr<float>();
    p.lse_head = lse->stride(0);
    p.lse_token = lse->stride(1);
  }
  if (is_fp8(p.cache_format) && k_scale) {
    p.k_scale_per_head = check_scale(*k_scale, "k_scale", kv_heads, query);
    p.k_scale = k_scale->const_data_ptr<float>();
  }
  if (is_fp8(p.cache_format) && v_scale) {
    p.v_scale_per_head = check_scale(*v_scale, "v_scale", kv_heads, query);
    p.v_scale = v_scale->const_data_ptr<float>();
  }
  if (q_scale) {
    STD_TORCH_CHECK(is_fp8(p.query_format), "q_scale: is given, wanted none: only a query in float8_e4m3fn has scales, "
                    "and this one's dtype is ", torch::headeronly::toString(query.scalar_type()));
    p.q_scale_per_head = check_scale(*q_scale, "q_scale", kv_heads, query);
    p.q_scale = q_scale->const_data_ptr<float>();
  }
  if (sinks) {
    p.sinks_format = source_format(sinks->scalar_type(), "sinks");
    check_vector(*sinks, "sinks", sinks->scalar_type(), heads, query, true);
    p.sinks = sinks->const_data_ptr();
  }
  if (ancestor_mask) {
    check_vector(*ancestor_mask, "ancestor_mask", ScalarType::Long, tokens, query, true);
    p.ancestor_mask = ancestor_mask->const_data_ptr<int64_t>();
  }
  p.num_heads = heads;
  p.num_kv_heads = kv_heads;
  p.head_size = head_size;
  p.block_size = block_size;
  p.scale = static_cast<float>(scale);
  p.softcap = static_cast<float>(softcap);
  p.sliding_window = sliding_window;
  check_lengths(p, batch, tokens, max_query_len, block_table.size(1), num_blocks);

  int64_t workers = torch::stable::get_num_threads();
  while (workers > 1 && workspace_bytes(workers, head_size) > workspace.size(0)) --workers;
  STD_TORCH_CHECK(workspace_bytes(workers, head_size) <= workspace.size(0), "workspace: has ", workspace.size(0),
                  " bytes, wanted at least ", workspace_bytes(workers, head_size),
                  " (nwor.ops.verify_attention_workspace_size)");
  const auto address = reinterpret_cast<uintptr_t>(workspace.mutable_data_ptr());
  float* scratch = reinterpret_cast<float*>((address + kAlignment - 1) / kAlignment * kAlignment);
  float* partials = scratch + workers * scratch_floats(head_size);

  const VerifyKernels& kernels = verify_kernels();
  const Plan plan = make_plan(p, batch, workers, partials);
  const int64_t count = static_cast<int64_t>(plan.items.size());
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(workers, count), 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      float* own = scratch + worker * scratch_floats(head_size);
      for (int64_t i = next++; i < count; i = next++) kernels.attend(p, plan.items[static_cast<size_t>(i)], own);
    }
  });
  torch::stable::parallel_for(0, static_cast<int64_t>(plan.merges.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Merge& merge = plan.merges[static_cast<size_t>(i)];
      kernels.combine(p, &plan.items[static_cast<size_t>(merge.first)], merge.count);
    }
  });
}

// The CPU plans in each call: it reads the lengths for its checks anyway, and planning is no part of its time.
void plan_verify_attention(Tensor query_start_loc, Tensor seq_lens, Tensor /*plan*/, int64_t /*num_heads*/,
                           int64_t /*num_kv_heads*/, int64_t /*head_size*/, int64_t /*max_query_len*/,
                           ScalarType /*source_dtype*/, std::string /*kv_cache_dtype*/, int64_t /*sliding_window*/,
                           bool /*quantized_query*/) {
  check_vector(query_start_loc, "query_start_loc", ScalarType::Int, 1, query_start_loc);
  check_vector(seq_lens, "seq_lens", ScalarType::Int, query_start_loc.size(0) - 1, query_start_loc);
}

}  // namespace
}  // namespace nwor

extern "C" __attribute__((visibility("default"))) int64_t nwor_cpu_verify_workspace_size(int64_t workers,
                                                                                         int64_t head_size) {
  return nwor::workspace_bytes(workers, head_size);
}

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
  m.impl("verify_attention", TORCH_BOX(&nwor::verify_attention));
  m.impl("plan_verify_attention", TORCH_BOX(&nwor::plan_verify_attention));
}
