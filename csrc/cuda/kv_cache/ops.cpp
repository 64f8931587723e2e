// Binds commit_window, stage_window, log_slots and restore_slots to their CUDA kernels.
#include "capacity.h"
#include "commit_call.h"
#include "common/torch_utils.h"
#include "kv_cache/params.h"

namespace nwor {
namespace {

SlotShape check_slots(const char* op, const Tensor& layer_table, const std::vector<Tensor>& caches, const Tensor& slots,
                      const Tensor& query_start_loc, int64_t num_kv_heads, int64_t head_size, int64_t block_size,
                      int64_t num_blocks) {
  STD_TORCH_CHECK(layer_table.is_cuda() && layer_table.scalar_type() == ScalarType::Long && layer_table.dim() == 2 &&
                      layer_table.size(1) == kColumns && layer_table.stride(1) == 1 &&
                      (layer_table.size(0) < 2 || layer_table.stride(0) == kColumns),
                  op, ": layer_table must be a contiguous int64 CUDA tensor [layers, ", static_cast<int>(kColumns), "]");
  STD_TORCH_CHECK(num_kv_heads > 0 && head_size > 0 && block_size > 0 && num_blocks >= 0, op,
                  ": num_kv_heads, head_size and block_size must be positive, and num_blocks must not be negative");
  const int64_t count = static_cast<int64_t>(caches.size());
  STD_TORCH_CHECK(count == layer_table.size(0) || count == 2 * layer_table.size(0), op, ": caches has ", count,
                  " tensors; it must have one for each of ", layer_table.size(0), " layers, or keys, then values");
  for (const Tensor& cache : caches) {
    check_device(op, "caches", cache, layer_table);
    STD_TORCH_CHECK(cache.scalar_type() == caches[0].scalar_type(), op, ": caches must have one dtype");
    const int64_t sides = count == layer_table.size(0) ? 2 : 1;
    STD_TORCH_CHECK(cache_holds(cache.numel(), sides, num_kv_heads, head_size, block_size, num_blocks), op,
                    ": caches have ", cache.numel(), " elements, too few for num_kv_heads ", num_kv_heads,
                    " x head_size ", head_size, " x block_size ", block_size, " x num_blocks ", num_blocks);
  }
  check_vector(op, "slots", slots, ScalarType::Long, 0, layer_table);
  check_vector(op, "query_start_loc", query_start_loc, ScalarType::Int, 1, layer_table);
  STD_TORCH_CHECK(layer_table.size(0) <= 65535, op, ": layer_table has more than 65535 layers");
  SlotShape shape{};
  shape.layers = static_cast<int>(layer_table.size(0));
  shape.tokens = static_cast<int>(slots.size(0));
  shape.batch = static_cast<int>(query_start_loc.size(0)) - 1;
  shape.num_kv_heads = static_cast<int>(num_kv_heads);
  shape.head_size = static_cast<int>(head_size);
  shape.block_size = static_cast<int>(block_size);
  shape.num_slots = block_size * num_blocks;
  return shape;
}

// True where there is a scale per head.
bool check_scales(const char* name, const MaybeTensor& scales, const Tensor& like, const SlotShape& shape) {
  if (!scales) return false;
  check_device("commit_window", name, *scales, like);
  const bool per_head = scales->dim() == 2 && scales->size(1) != 1;
  STD_TORCH_CHECK(scales->scalar_type() == ScalarType::Float && (scales->dim() == 1 || scales->dim() == 2) &&
                      scales->size(0) == shape.layers && (!per_head || scales->size(1) == shape.num_kv_heads) &&
                      scales->stride(scales->dim() - 1) == 1 && (!per_head || scales->stride(0) == scales->size(1)),
                  "commit_window: ", name, " must be contiguous float32 [", shape.layers, "] or [", shape.layers, ", ",
                  shape.num_kv_heads, "]");
  return per_head;
}

void commit_window(Tensor layer_table, std::vector<Tensor> caches, Tensor slots, Tensor query_start_loc,
                   MaybeTensor commit_counts, MaybeTensor source_index, int64_t num_kv_heads, int64_t head_size,
                   int64_t block_size, int64_t num_blocks, ScalarType source_dtype, std::string kv_cache_dtype,
                   MaybeTensor k_scales, MaybeTensor v_scales, bool rejected) {
  constexpr const char* kOp = "commit_window";
  CommitParams p{};
  p.shape = check_slots(kOp, layer_table, caches, slots, query_start_loc, num_kv_heads, head_size, block_size,
                        num_blocks);
  const CacheFormat format = parse_cache_format(kOp, kv_cache_dtype);
  if (source_dtype == ScalarType::Float) {
    p.source = SourceType::kFloat;
  } else if (source_dtype == ScalarType::Half) {
    p.source = SourceType::kHalf;
  } else {
    STD_TORCH_CHECK(source_dtype == ScalarType::BFloat16, kOp,
                    ": source_dtype must be float32, float16 or bfloat16");
    p.source = SourceType::kBfloat16;
  }
  for (const Tensor& cache : caches)
    STD_TORCH_CHECK(format.is_fp8 ? cache.element_size() == 1 : cache.scalar_type() == source_dtype, kOp,
                    ": caches have a dtype that is not kv_cache_dtype's");
  STD_TORCH_CHECK(commit_counts.has_value() != source_index.has_value(), kOp,
                  ": exactly one of commit_counts and source_index must be given");
  if (commit_counts) {
    check_vector(kOp, "commit_counts", *commit_counts, ScalarType::Int, p.shape.batch, layer_table);
    p.commit_counts = static_cast<const int*>(commit_counts->const_data_ptr());
    p.rejected = rejected;
  } else {
    check_vector(kOp, "source_index", *source_index, ScalarType::Int, p.shape.tokens, layer_table);
    p.source_index = static_cast<const int*>(source_index->const_data_ptr());
  }
  p.k_scale_per_head = check_scales("k_scales", k_scales, layer_table, p.shape);
  p.v_scale_per_head = check_scales("v_scales", v_scales, layer_table, p.shape);
  if (k_scales) p.k_scales = static_cast<const float*>(k_scales->const_data_ptr());
  if (v_scales) p.v_scales = static_cast<const float*>(v_scales->const_data_ptr());
  p.table = static_cast<const LayerRow*>(layer_table.const_data_ptr());
  p.slots = static_cast<const int64_t*>(slots.const_data_ptr());
  p.query_start_loc = static_cast<const int*>(query_start_loc.const_data_ptr());
  p.is_fp8 = format.is_fp8;
  p.is_e5m2 = format.is_e5m2;
  if (p.shape.tokens == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(layer_table.get_device_index());
  check_launch(launch_commit_window(p, current_stream(layer_table)), kOp);
}

SlotLogParams slot_log_params(const char* op, const Tensor& layer_table, const std::vector<Tensor>& caches,
                              const Tensor& log, const Tensor& slots, const Tensor& query_start_loc,
                              int64_t num_kv_heads, int64_t head_size, int64_t block_size, int64_t num_blocks) {
  SlotLogParams p{};
  p.shape = check_slots(op, layer_table, caches, slots, query_start_loc, num_kv_heads, head_size, block_size,
                        num_blocks);
  if (p.shape.layers == 0) return p;
  p.element_bytes = static_cast<int>(caches[0].element_size());
  STD_TORCH_CHECK(p.element_bytes <= 4, op, ": caches have elements of ", p.element_bytes,
                  " bytes; they must have 1, 2 or 4");
  const int64_t token_bytes = num_kv_heads * head_size * p.element_bytes;
  check_device(op, "log", log, layer_table);
  STD_TORCH_CHECK(log.scalar_type() == ScalarType::Byte && log.dim() == 4 && log.size(0) == p.shape.layers &&
                      log.size(1) == 2 && log.size(2) >= p.shape.tokens && log.size(3) == token_bytes &&
                      log.stride(3) == 1 && log.stride(2) == token_bytes &&
                      log.stride(1) == log.size(2) * token_bytes && log.stride(0) == 2 * log.stride(1),
                  op, ": log must be a contiguous uint8 tensor [", p.shape.layers, ", 2, at least ", p.shape.tokens,
                  ", ", token_bytes, "]");
  p.log = const_cast<char*>(static_cast<const char*>(log.const_data_ptr()));
  p.log_rows = log.size(2);
  p.table = static_cast<const LayerRow*>(layer_table.const_data_ptr());
  p.slots = static_cast<const int64_t*>(slots.const_data_ptr());
  p.query_start_loc = static_cast<const int*>(query_start_loc.const_data_ptr());
  return p;
}

void log_slots(Tensor layer_table, std::vector<Tensor> caches, Tensor log, Tensor slots, Tensor query_start_loc,
               int64_t num_kv_heads, int64_t head_size, int64_t block_size, int64_t num_blocks) {
  SlotLogParams p = slot_log_params("log_slots", layer_table, caches, log, slots, query_start_loc, num_kv_heads,
                                    head_size, block_size, num_blocks);
  if (p.shape.layers == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(layer_table.get_device_index());
  check_launch(launch_log_slots(p, current_stream(layer_table)), "log_slots");
}

void restore_slots(Tensor layer_table, std::vector<Tensor> caches, Tensor log, Tensor slots, Tensor query_start_loc,
                   Tensor commit_counts, int64_t num_kv_heads, int64_t head_size, int64_t block_size,
                   int64_t num_blocks, bool rejected) {
  SlotLogParams p = slot_log_params("restore_slots", layer_table, caches, log, slots, query_start_loc, num_kv_heads,
                                    head_size, block_size, num_blocks);
  check_vector("restore_slots", "commit_counts", commit_counts, ScalarType::Int, p.shape.batch, layer_table);
  p.commit_counts = static_cast<const int*>(commit_counts.const_data_ptr());
  p.rejected = rejected;
  if (p.shape.layers == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(layer_table.get_device_index());
  check_launch(launch_restore_slots(p, current_stream(layer_table)), "restore_slots");
}

void check_stage(const char* name, const Tensor& tensor, const Tensor& first) {
  check_device("stage_window", name, tensor, first);
  STD_TORCH_CHECK(tensor.scalar_type() == first.scalar_type() && tensor.dim() == 3 && tensor.size(1) == first.size(1) &&
                      tensor.size(2) == first.size(2) && (tensor.size(2) < 2 || tensor.stride(2) == 1),
                  "stage_window: ", name, " must be [tokens, ", first.size(1), ", ", first.size(2),
                  "] with a contiguous last dimension and one dtype for all layers");
}

void stage_window(std::vector<Tensor> keys, std::vector<Tensor> values, std::vector<Tensor> staged_keys,
                  std::vector<Tensor> staged_values, Tensor num_tokens) {
  constexpr const char* kOp = "stage_window";
  const size_t layers = keys.size();
  STD_TORCH_CHECK(layers > 0 && values.size() == layers && staged_keys.size() == layers &&
                      staged_values.size() == layers,
                  kOp, ": keys, values, staged_keys and staged_values must have one tensor per layer each");
  STD_TORCH_CHECK(layers <= kMaxStageLayers, kOp, ": more than ", kMaxStageLayers, " layers");
  const Tensor& first = keys[0];
  STD_TORCH_CHECK(first.is_cuda() && first.dim() == 3, kOp, ": keys must be CUDA tensors [tokens, heads, head_size]");
  check_vector(kOp, "num_tokens", num_tokens, ScalarType::Int, 1, first);
  StageParams p;
  int64_t tokens = first.size(0);
  for (size_t i = 0; i < layers; ++i) {
    check_stage("keys", keys[i], first);
    check_stage("values", values[i], first);
    check_stage("staged_keys", staged_keys[i], first);
    check_stage("staged_values", staged_values[i], first);
    for (const Tensor* tensor : {&keys[i], &values[i], &staged_keys[i], &staged_values[i]})
      tokens = std::min(tokens, tensor->size(0));
    StageLayer& layer = p.layers[i];
    layer.key = keys[i].const_data_ptr();
    layer.value = values[i].const_data_ptr();
    layer.staged_key = staged_keys[i].mutable_data_ptr();
    layer.staged_value = staged_values[i].mutable_data_ptr();
    layer.key_token = keys[i].stride(0);
    layer.key_head = keys[i].stride(1);
    layer.value_token = values[i].stride(0);
    layer.value_head = values[i].stride(1);
    layer.staged_key_token = staged_keys[i].stride(0);
    layer.staged_key_head = staged_keys[i].stride(1);
    layer.staged_value_token = staged_values[i].stride(0);
    layer.staged_value_head = staged_values[i].stride(1);
  }
  p.num_tokens = static_cast<const int*>(num_tokens.const_data_ptr());
  p.layer_count = static_cast<int>(layers);
  p.tokens = static_cast<int>(tokens);
  p.num_kv_heads = static_cast<int>(first.size(1));
  p.head_size = static_cast<int>(first.size(2));
  p.element_bytes = static_cast<int>(first.element_size());
  const torch::stable::accelerator::DeviceGuard guard(first.get_device_index());
  check_launch(launch_stage_window(p, current_stream(first)), kOp);
}

}  // namespace
}  // namespace nwor

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
  m.impl("commit_window", TORCH_BOX(&nwor::commit_window));
  m.impl("stage_window", TORCH_BOX(&nwor::stage_window));
  m.impl("log_slots", TORCH_BOX(&nwor::log_slots));
  m.impl("restore_slots", TORCH_BOX(&nwor::restore_slots));
}

// No Torch on this path: it runs in every step, and its caller knows that nothing has changed but the counts. The
// current device must be the stream's.
extern "C" __attribute__((visibility("default"))) const char* nwor_cuda_commit(const nwor::CommitCall* call,
                                                                               const int32_t* rejected, void* stream) {
  using namespace nwor;
  if (call->source < 0 || call->source > 2 || call->cache < 0 || call->cache > 2) return "commit: is not filled in";
  if (call->tokens == 0) return nullptr;
  constexpr SourceType kSources[] = {SourceType::kFloat, SourceType::kHalf, SourceType::kBfloat16};
  CommitParams p{};
  p.shape.layers = static_cast<int>(call->layers);
  p.shape.tokens = static_cast<int>(call->tokens);
  p.shape.batch = static_cast<int>(call->batch);
  p.shape.num_kv_heads = static_cast<int>(call->num_kv_heads);
  p.shape.head_size = static_cast<int>(call->head_size);
  p.shape.block_size = static_cast<int>(call->block_size);
  p.shape.num_slots = call->block_size * call->num_blocks;
  p.table = call->table;
  p.slots = call->slots;
  p.query_start_loc = call->query_start_loc;
  p.source_index = call->source_index;
  if (call->source_index == nullptr) p.commit_counts = rejected;
  p.rejected = true;
  p.k_scales = call->k_scales;
  p.v_scales = call->v_scales;
  p.k_scale_per_head = call->k_scales_per_layer > 1;
  p.v_scale_per_head = call->v_scales_per_layer > 1;
  p.source = kSources[call->source];
  p.is_fp8 = call->cache != 0;
  p.is_e5m2 = call->cache == 2;
  const cudaError_t status = launch_commit_window(p, static_cast<cudaStream_t>(stream));
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
