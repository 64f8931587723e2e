// Binds verify_attention to its CUDA kernels.
#include <algorithm>
#include <iterator>
#include <string>

#include "common/torch_utils.h"
#include "verify/configs.h"
#include "verify/params.h"

namespace nwor {
namespace {

constexpr const char* kOp = "verify_attention";

bool rows_aligned(const Tensor& tensor, int64_t element_bytes) {
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim)
    aligned &= tensor.size(dim) <= 1 || tensor.stride(dim) * element_bytes % 16 == 0;
  return aligned;
}

void check_rows(const char* name, const Tensor& tensor, const Tensor& query, ScalarType dtype, int64_t heads) {
  check_device(kOp, name, tensor, query);
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, kOp, ": ", name,
                  " must have key's dtype, bfloat16 or float16; and so must query, unless it is float8_e4m3fn");
  STD_TORCH_CHECK(tensor.dim() == 3 && tensor.size(0) >= query.size(0) && tensor.size(1) == heads &&
                      tensor.size(2) == query.size(2),
                  kOp, ": ", name, " must be [", query.size(0), ", ", heads, ", ", query.size(2), "]");
  STD_TORCH_CHECK(tensor.stride(2) == 1, kOp, ": the last dimension of ", name, " must be contiguous");
}

void check_cache(const char* name, const Tensor& cache, const Tensor& query, ScalarType dtype, int64_t heads,
                 const CacheFormat& format) {
  check_device(kOp, name, cache, query);
  STD_TORCH_CHECK(cache.dim() == 4 && cache.size(2) == heads && cache.size(3) == query.size(2), kOp, ": ", name,
                  " must be [num_blocks, block_size, ", heads, ", ", query.size(2), "]");
  const int64_t bytes = static_cast<int64_t>(cache.element_size());
  STD_TORCH_CHECK(format.is_fp8 ? bytes == 1 : cache.scalar_type() == dtype, kOp, ": ", name,
                  " has a dtype that is not kv_cache_dtype's (uint8 or float8 for fp8, key's dtype for 'auto')");
  STD_TORCH_CHECK(cache.stride(3) == 1 && rows_aligned(cache, bytes), kOp, ": rows of ", name,
                  " must be contiguous and begin at multiples of 16 bytes");
}

int scale_count(const char* name, const MaybeTensor& scale, const Tensor& query, int64_t heads) {
  if (!scale) return 0;
  check_device(kOp, name, *scale, query);
  const int64_t count = scale->numel();
  STD_TORCH_CHECK(scale->scalar_type() == ScalarType::Float && (count == 1 || count == heads), kOp, ": ", name,
                  " must be float32 with 1 or ", heads, " elements");
  STD_TORCH_CHECK(scale->is_contiguous(), kOp, ": ", name, " must be contiguous");
  return static_cast<int>(count);
}

void* check_plan(const char* op, const Tensor& plan, const Tensor& beside, int num_sms) {
  check_device(op, "plan", plan, beside);
  const size_t wanted = verify_plan_bytes(num_sms), given = static_cast<size_t>(plan.numel()) * plan.element_size();
  STD_TORCH_CHECK(plan.dim() == 1 && plan.scalar_type() == ScalarType::Byte && given >= wanted &&
                      reinterpret_cast<uintptr_t>(plan.const_data_ptr()) % 16 == 0,
                  op, ": plan has ", given, " bytes; it must be a 1-D uint8 tensor of at least ", wanted,
                  " bytes, aligned to 16");
  return plan.mutable_data_ptr();
}

// A sliding window as kernels take it: one that is longer than any context leaves nothing out either way.
int narrow_window(int64_t tokens) { return static_cast<int>(std::min<int64_t>(tokens, INT32_MAX)); }

// "64, 96, 128 or 256"
std::string head_sizes() {
  std::string all;
  const size_t count = std::size(kHeadSizes);
  for (size_t i = 0; i < count; ++i)
    all += (i == 0 ? "" : i + 1 == count ? " or " : ", ") + std::to_string(kHeadSizes[i]);
  return all;
}

void check_limits(const char* op, int64_t num_heads, int64_t num_kv_heads, int64_t head_size, int64_t max_query_len,
                  int64_t sliding_window) {
  STD_TORCH_CHECK(std::ranges::find(kHeadSizes, head_size) != std::end(kHeadSizes), op, ": head size ", head_size,
                  " is not served on CUDA; it must be ", head_sizes());
  STD_TORCH_CHECK(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0, op, ": ", num_heads,
                  " query heads are no multiple of ", num_kv_heads, " KV heads");
  STD_TORCH_CHECK(max_query_len >= 1 && max_query_len <= kMaxWindow, op, ": max_query_len is ", max_query_len,
                  "; it must be 1 to ", kMaxWindow);
  STD_TORCH_CHECK(sliding_window == -1 || sliding_window > 0, op, ": sliding_window must be positive, or -1");
}

void plan_verify_attention(Tensor query_start_loc, Tensor seq_lens, Tensor plan, int64_t num_heads,
                           int64_t num_kv_heads, int64_t head_size, int64_t max_query_len, ScalarType source_dtype,
                           std::string kv_cache_dtype, int64_t sliding_window, bool quantized_query) {
  constexpr const char* kPlanOp = "plan_verify_attention";
  const CacheFormat format = parse_cache_format(kPlanOp, kv_cache_dtype);
  STD_TORCH_CHECK(query_start_loc.is_cuda(), kPlanOp, ": query_start_loc must be a CUDA tensor");
  check_limits(kPlanOp, num_heads, num_kv_heads, head_size, max_query_len, sliding_window);
  STD_TORCH_CHECK(source_dtype == ScalarType::BFloat16 || source_dtype == ScalarType::Half, kPlanOp,
                  ": source_dtype must be bfloat16 or float16 on CUDA");
  STD_TORCH_CHECK(format.is_fp8 || !quantized_query, kPlanOp, ": quantized_query wants an fp8 kv_cache_dtype");
  check_vector(kPlanOp, "query_start_loc", query_start_loc, ScalarType::Int, 1, query_start_loc);
  const int64_t batch = query_start_loc.size(0) - 1;
  check_vector(kPlanOp, "seq_lens", seq_lens, ScalarType::Int, batch, query_start_loc);
  const int num_sms = multiprocessors(query_start_loc.get_device_index());
  void* entries = check_plan(kPlanOp, plan, query_start_loc, num_sms);
  if (batch == 0) return;
  VerifyParams p{};
  p.query_start_loc = static_cast<const int*>(query_start_loc.const_data_ptr());
  p.seq_lens = static_cast<const int*>(seq_lens.const_data_ptr());
  p.batch = static_cast<int>(batch);
  p.num_heads = static_cast<int>(num_heads);
  p.num_kv_heads = static_cast<int>(num_kv_heads);
  p.sliding_window = narrow_window(sliding_window);
  p.is_bf16 = source_dtype == ScalarType::BFloat16;
  p.is_fp8 = format.is_fp8;
  p.fp8_query = quantized_query;
  const torch::stable::accelerator::DeviceGuard guard(query_start_loc.get_device_index());
  check_launch(launch_verify_plan(p, static_cast<int>(head_size), static_cast<int>(max_query_len), entries, num_sms,
                                  current_stream(query_start_loc)),
               kPlanOp);
}

void verify_attention(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor block_table,
                      Tensor query_start_loc, Tensor seq_lens, Tensor output, Tensor workspace, MaybeTensor lse,
                      double scale, int64_t max_query_len, std::string kv_cache_dtype, MaybeTensor k_scale,
                      MaybeTensor v_scale, int64_t sliding_window, double softcap, MaybeTensor sinks,
                      MaybeTensor ancestor_mask, MaybeTensor plan, MaybeTensor q_scale) {
  const CacheFormat format = parse_cache_format(kOp, kv_cache_dtype);
  STD_TORCH_CHECK(query.is_cuda() && query.dim() == 3 && query.stride(2) == 1, kOp,
                  ": query must be a CUDA tensor [tokens, heads, head_size] with a contiguous last dimension");
  const bool quantized = query.scalar_type() == ScalarType::Float8_e4m3fn;
  const ScalarType dtype = quantized ? key.scalar_type() : query.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, kOp,
                  ": query must be bfloat16, float16 or, beside key and value of these, float8_e4m3fn on CUDA");
  STD_TORCH_CHECK(format.is_fp8 || !quantized, kOp, ": a float8_e4m3fn query wants an fp8 kv_cache_dtype");
  STD_TORCH_CHECK(quantized || !q_scale, kOp, ": q_scale is for a float8_e4m3fn query");
  const int64_t head_size = query.size(2), num_heads = query.size(1);
  STD_TORCH_CHECK(key.dim() == 3, kOp, ": key must be [tokens, KV heads, head_size]");
  const int64_t num_kv_heads = key.size(1);
  check_limits(kOp, num_heads, num_kv_heads, head_size, max_query_len, sliding_window);
  check_rows("key", key, query, dtype, num_kv_heads);
  check_rows("value", value, query, dtype, num_kv_heads);
  check_rows("output", output, query, dtype, num_heads);
  check_cache("key_cache", key_cache, query, dtype, num_kv_heads, format);
  check_cache("value_cache", value_cache, query, dtype, num_kv_heads, format);
  STD_TORCH_CHECK(key_cache.size(1) == value_cache.size(1), kOp, ": key_cache and value_cache differ in block size");
  STD_TORCH_CHECK(key_cache.size(1) > 0, kOp, ": key_cache has blocks of no tokens");
  check_vector(kOp, "query_start_loc", query_start_loc, ScalarType::Int, 1, query);
  const int64_t batch = query_start_loc.size(0) - 1;
  check_vector(kOp, "seq_lens", seq_lens, ScalarType::Int, batch, query);
  check_device(kOp, "block_table", block_table, query);
  STD_TORCH_CHECK(block_table.scalar_type() == ScalarType::Int && block_table.dim() == 2 &&
                      block_table.size(0) >= batch && (block_table.size(1) < 2 || block_table.stride(1) == 1),
                  kOp, ": block_table must be int32 [at least ", batch, ", blocks] with contiguous rows");
  STD_TORCH_CHECK(scale > 0, kOp, ": scale must be positive");
  STD_TORCH_CHECK(softcap >= 0, kOp, ": softcap must not be negative");

  VerifyParams p{};
  p.query = query.const_data_ptr();
  p.key = key.const_data_ptr();
  p.value = value.const_data_ptr();
  p.key_cache = key_cache.const_data_ptr();
  p.value_cache = value_cache.const_data_ptr();
  p.block_table = static_cast<const int*>(block_table.const_data_ptr());
  p.query_start_loc = static_cast<const int*>(query_start_loc.const_data_ptr());
  p.seq_lens = static_cast<const int*>(seq_lens.const_data_ptr());
  p.output = output.mutable_data_ptr();
  if (lse) {
    check_device(kOp, "lse", *lse, query);
    STD_TORCH_CHECK(lse->scalar_type() == ScalarType::Float && lse->dim() == 2 && lse->size(0) == num_heads &&
                        lse->size(1) >= query.size(0) && (lse->size(1) < 2 || lse->stride(1) == 1),
                    kOp, ": lse must be float32 [heads, tokens] with contiguous rows");
    p.lse = static_cast<float*>(lse->mutable_data_ptr());
    p.lse_head = lse->stride(0);
  }
  p.k_scale_count = scale_count("k_scale", k_scale, query, num_kv_heads);
  p.v_scale_count = scale_count("v_scale", v_scale, query, num_kv_heads);
  p.q_scale_count = scale_count("q_scale", q_scale, query, num_kv_heads);
  if (q_scale) p.q_scale = static_cast<const float*>(q_scale->const_data_ptr());
  if (k_scale) p.k_scale = static_cast<const float*>(k_scale->const_data_ptr());
  if (v_scale) p.v_scale = static_cast<const float*>(v_scale->const_data_ptr());
  if (sinks) {
    check_device(kOp, "sinks", *sinks, query);
    STD_TORCH_CHECK(sinks->numel() == num_heads && (sinks->scalar_type() == ScalarType::Float ||
                                                    sinks->scalar_type() == dtype),
                    kOp, ": sinks must be [heads] in float32 or key's dtype");
    STD_TORCH_CHECK(sinks->is_contiguous(), kOp, ": sinks must be contiguous");
    p.sinks = sinks->const_data_ptr();
    p.sinks_float = sinks->scalar_type() == ScalarType::Float;
  }
  if (ancestor_mask) {
    check_vector(kOp, "ancestor_mask", *ancestor_mask, ScalarType::Long, query.size(0), query);
    p.ancestor_mask = static_cast<const int64_t*>(ancestor_mask->const_data_ptr());
  }
  p.query_token = query.stride(0);
  p.query_head = query.stride(1);
  p.key_token = key.stride(0);
  p.key_head = key.stride(1);
  p.value_token = value.stride(0);
  p.value_head = value.stride(1);
  p.output_token = output.stride(0);
  p.output_head = output.stride(1);
  p.key_cache_block = key_cache.stride(0);
  p.key_cache_token = key_cache.stride(1);
  p.key_cache_head = key_cache.stride(2);
  p.value_cache_block = value_cache.stride(0);
  p.value_cache_token = value_cache.stride(1);
  p.value_cache_head = value_cache.stride(2);
  p.block_table_row = block_table.stride(0);
  p.batch = static_cast<int>(batch);
  p.num_heads = static_cast<int>(num_heads);
  p.num_kv_heads = static_cast<int>(num_kv_heads);
  p.block_size = static_cast<int>(key_cache.size(1));
  p.scale = static_cast<float>(scale);
  p.softcap = static_cast<float>(softcap);
  p.sliding_window = narrow_window(sliding_window);
  p.is_bf16 = dtype == ScalarType::BFloat16;
  p.is_fp8 = format.is_fp8;
  p.is_e5m2 = format.is_e5m2;
  p.fp8_query = quantized;
  p.aligned = rows_aligned(query, quantized ? 1 : 2) && rows_aligned(key, 2) && rows_aligned(value, 2) &&
              rows_aligned(output, 2);

  check_device(kOp, "workspace", workspace, query);
  const int num_sms = multiprocessors(query.get_device_index());
  const size_t wanted =
      verify_workspace_bytes(num_sms, p.num_heads, p.num_kv_heads, static_cast<int>(head_size),
                             static_cast<int>(max_query_len));
  const size_t given = static_cast<size_t>(workspace.numel()) * workspace.element_size();
  STD_TORCH_CHECK(workspace.dim() == 1 && workspace.scalar_type() == ScalarType::Byte && given >= wanted &&
                      reinterpret_cast<uintptr_t>(workspace.const_data_ptr()) % 16 == 0,
                  kOp, ": workspace has ", given, " bytes; it must be a 1-D uint8 tensor of at least ", wanted,
                  " bytes, aligned to 16");
  if (plan) p.plan = static_cast<const PlanEntry*>(check_plan(kOp, *plan, query, num_sms));
  if (batch == 0 || query.size(0) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  check_launch(launch_verify_attention(p, static_cast<int>(head_size), static_cast<int>(max_query_len),
                                       workspace.mutable_data_ptr(), given, num_sms, current_stream(query)),
               kOp);
}

}  // namespace
}  // namespace nwor

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
  m.impl("verify_attention", TORCH_BOX(&nwor::verify_attention));
  m.impl("plan_verify_attention", TORCH_BOX(&nwor::plan_verify_attention));
}

#if NWOR_PROBES
extern "C" __attribute__((visibility("default"))) void nwor_cuda_set_probes(void* probes) {
  nwor::set_probes(static_cast<unsigned long long*>(probes));
}
#endif

extern "C" __attribute__((visibility("default"))) int64_t nwor_cuda_verify_plan_size(int64_t num_sms) {
  return static_cast<int64_t>(nwor::verify_plan_bytes(static_cast<int>(num_sms)));
}

// The size depends on the device's multiprocessors and the shape, not on the batch: each thread block has a fixed
// part of the workspace, however many requests its share touches.
extern "C" __attribute__((visibility("default"))) int64_t nwor_cuda_verify_workspace_bytes(
    int64_t num_sms, int64_t num_heads, int64_t num_kv_heads, int64_t head_size, int64_t max_query_len) {
  return static_cast<int64_t>(nwor::verify_workspace_bytes(static_cast<int>(num_sms), static_cast<int>(num_heads),
                                                           static_cast<int>(num_kv_heads), static_cast<int>(head_size),
                                                           static_cast<int>(max_query_len)));
}
