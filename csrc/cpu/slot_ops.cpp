// Bindings of commit_window, log_slots and restore_slots for CPU tensors.
#include <torch/csrc/stable/ops.h>

#include "commit_call.h"
#include "slot_checks.h"
#include "slots.h"

namespace nwor {
namespace {

// Rows of a window are few and small, so threads only pay from some rows of all layers on.
constexpr int64_t kGrain = 8;

void check_windows(const int32_t* query_start_loc, const SlotArguments& a) {
  STD_TORCH_CHECK(query_start_loc[0] >= 0, "query_start_loc: begins with ", query_start_loc[0]);
  for (int64_t i = 0; i < a.batch; ++i) {
    STD_TORCH_CHECK(query_start_loc[i] <= query_start_loc[i + 1], "query_start_loc: decreases at ", i);
    STD_TORCH_CHECK(query_start_loc[i + 1] <= a.tokens, "query_start_loc: window ", i, " ends at row ",
                    query_start_loc[i + 1], ", but slots has ", a.tokens, " elements");
  }
}

void check_slot(int64_t slot, int64_t row, int64_t block_size, int64_t num_blocks) {
  STD_TORCH_CHECK(slot < block_size * num_blocks, "slots: element ", row, " is ", slot, ", wanted below ",
                  block_size * num_blocks, " (", num_blocks, " blocks of ", block_size, ")");
}

struct Move {
  int64_t row, slot;
};

// Whether as much memory as `cache` has, from where `address` lies in it, holds rows of these strides. An address
// elsewhere is no error: torch hands copies of the caches to an op that it checks or functionalizes.
bool fits(int64_t address, const int64_t (&stride)[4], const int64_t (&size)[4], const Tensor& cache) {
  const int64_t bytes = static_cast<int64_t>(cache.element_size());
  int64_t last = 0;  // element of the cache
  for (int64_t d = 0; d < cache.dim(); ++d) last += (cache.size(d) - 1) * cache.stride(d);
  const int64_t offset = address - static_cast<int64_t>(reinterpret_cast<intptr_t>(cache.const_data_ptr()));
  // By subtraction and division: what stands in a table that is none may not fit into 64 bits together.
  int64_t room = offset < 0 || offset / bytes > last ? last : last - offset / bytes;
  for (int d = 0; d < 4; ++d) {
    if (size[d] == 1) continue;
    if (stride[d] < 0 || stride[d] > room / (size[d] - 1)) return false;
    room -= stride[d] * (size[d] - 1);
  }
  return true;
}

// A CPU's table can be looked at for free: one that was made for another shape is an error, and no write elsewhere.
const LayerRow* check_table(const Tensor& layer_table, const std::vector<Tensor>& caches, const SlotArguments& a,
                            const SlotShape& shape, int64_t num_blocks) {
  const auto* table = static_cast<const LayerRow*>(layer_table.const_data_ptr());
  if (num_blocks == 0) return table;
  const int64_t size[4] = {num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size};
  const size_t layers = static_cast<size_t>(a.layers), values = caches.size() - layers;
  for (size_t i = 0; i < layers; ++i)
    STD_TORCH_CHECK(fits(table[i].key_cache, table[i].key_cache_stride, size, caches[i]) &&
                        fits(table[i].value_cache, table[i].value_cache_stride, size, caches[values + i]),
                    "layer_table: layer ", i, " has places outside caches, for num_blocks ", num_blocks,
                    " x block_size ", shape.block_size, " x num_kv_heads ", shape.num_kv_heads, " x head_size ",
                    shape.head_size, "; wanted a table of such caches");
  return table;
}

// Calls f(layer, row, slot) for every layer and move, in parallel.
template <typename F>
void for_each_move(const std::vector<Move>& moves, int64_t layers, const F& f) {
  const int64_t count = static_cast<int64_t>(moves.size());
  torch::stable::parallel_for(0, count * layers, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Move& move = moves[static_cast<size_t>(i % count)];
      f(i / count, move.row, move.slot);
    }
  });
}

// How many of a window's rows are kept, by its count: of rows to keep, or (`rejected`) to leave out.
int64_t kept_rows(const int32_t* starts, const int32_t* counts, int64_t i, bool rejected) {
  const int64_t length = int64_t{starts[i + 1]} - starts[i];
  STD_TORCH_CHECK(counts[i] >= 0 && counts[i] <= length, rejected ? "rejected_counts" : "commit_counts", ": element ",
                  i, " is ", counts[i], ", but the window has ", length, " tokens");
  return rejected ? length - counts[i] : counts[i];
}

// The leading rows of each window, those that are kept, whose slots are not negative.
std::vector<Move> window_moves(const int32_t* starts, const int64_t* slots, const int32_t* counts, bool rejected,
                               const SlotArguments& a, int64_t block_size, int64_t num_blocks) {
  std::vector<Move> moves;
  for (int64_t i = 0; i < a.batch; ++i) {
    const int64_t end = starts[i] + kept_rows(starts, counts, i, rejected);
    for (int64_t row = starts[i]; row < end; ++row) {
      check_slot(slots[row], row, block_size, num_blocks);
      if (slots[row] >= 0) moves.push_back({row, slots[row]});
    }
  }
  return moves;
}

// For each row of the windows the row that its slot gets, where neither is negative.
std::vector<Move> indexed_moves(const int32_t* starts, const int64_t* slots, const int32_t* sources,
                                const SlotArguments& a, int64_t block_size, int64_t num_blocks) {
  std::vector<Move> moves;
  for (int64_t row = starts[0]; row < starts[a.batch]; ++row) {
    check_slot(slots[row], row, block_size, num_blocks);
    STD_TORCH_CHECK(sources[row] < a.tokens, "source_index: element ", row, " is ", sources[row], ", but there are ",
                    a.tokens, " rows");
    if (slots[row] >= 0 && sources[row] >= 0) moves.push_back({sources[row], slots[row]});
  }
  return moves;
}

struct LayerScales {
  const float* scales;
  int64_t per_layer;

  Scales of(int64_t layer) const { return {scales ? scales + layer * per_layer : nullptr, per_layer > 1}; }
};

void commit_moves(const LayerRow* table, const std::vector<Move>& moves, int64_t layers, const SlotShape& shape,
                  Format source, Format cache, const LayerScales& k, const LayerScales& v) {
  if (moves.empty()) return;  // as where sources have no rows, and then no address either
  for (int64_t i = 0; i < layers; ++i)
    STD_TORCH_CHECK(table[i].key != 0 && table[i].value != 0, "layer_table: layer ", i,
                    " has no sources, wanted a table of make_layer_table");
  for_each_move(moves, layers, [&](int64_t layer, int64_t row, int64_t to) {
    commit_token(table[layer], shape, row, to, source, cache, k.of(layer), v.of(layer));
  });
}

void commit_window(Tensor layer_table, std::vector<Tensor> caches, Tensor slots, Tensor query_start_loc,
                   std::optional<Tensor> commit_counts, std::optional<Tensor> source_index, int64_t num_kv_heads,
                   int64_t head_size, int64_t block_size, int64_t num_blocks, ScalarType source_dtype,
                   std::string kv_cache_dtype, std::optional<Tensor> k_scales, std::optional<Tensor> v_scales,
                   bool rejected) {
  const SlotArguments a = check_slot_arguments(layer_table, caches, slots, query_start_loc, num_kv_heads, head_size,
                                               block_size, num_blocks);
  const Format source = source_format(source_dtype, "source_dtype");
  const Format cache = cache_format(kv_cache_dtype, source);
  for (const Tensor& tensor : caches) check_cache_dtype(tensor, "caches", cache);
  STD_TORCH_CHECK(commit_counts.has_value() != source_index.has_value(),
                  "commit_counts, source_index: exactly one of them is wanted");
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const SlotShape shape{num_kv_heads, head_size, block_size};
  const LayerRow* table = check_table(layer_table, caches, a, shape, num_blocks);
  check_windows(starts, a);
  int64_t k_per_layer = 0, v_per_layer = 0;
  if (k_scales) k_per_layer = check_layer_scales(*k_scales, "k_scales", a.layers, num_kv_heads, layer_table);
  if (v_scales) v_per_layer = check_layer_scales(*v_scales, "v_scales", a.layers, num_kv_heads, layer_table);

  std::vector<Move> moves;
  if (commit_counts) {
    check_vector(*commit_counts, "commit_counts", ScalarType::Int, a.batch, layer_table);
    moves = window_moves(starts, slot, commit_counts->const_data_ptr<int32_t>(), rejected, a, block_size, num_blocks);
  } else {
    check_vector(*source_index, "source_index", ScalarType::Int, a.tokens, layer_table, true);
    moves = indexed_moves(starts, slot, source_index->const_data_ptr<int32_t>(), a, block_size, num_blocks);
  }

  const LayerScales k{k_scales ? k_scales->const_data_ptr<float>() : nullptr, k_per_layer};
  const LayerScales v{v_scales ? v_scales->const_data_ptr<float>() : nullptr, v_per_layer};
  commit_moves(table, moves, a.layers, shape, source, cache, k, v);
}

void commit(const CommitCall& call, const int32_t* rejected) {
  constexpr Format kSources[] = {Format::kFloat32, Format::kFloat16, Format::kBFloat16};
  STD_TORCH_CHECK(call.source >= 0 && call.source < 3 && call.cache >= 0 && call.cache < 3, "commit: is not filled in");
  const Format source = kSources[call.source];
  const Format caches[] = {source, Format::kFp8E4M3, Format::kFp8E5M2};
  const SlotArguments a{call.layers, call.tokens, call.batch, format_bytes(caches[call.cache])};
  check_windows(call.query_start_loc, a);
  const auto moves = call.source_index != nullptr
                         ? indexed_moves(call.query_start_loc, call.slots, call.source_index, a, call.block_size,
                                         call.num_blocks)
                         : window_moves(call.query_start_loc, call.slots, rejected, true, a, call.block_size,
                                        call.num_blocks);
  commit_moves(call.table, moves, call.layers, {call.num_kv_heads, call.head_size, call.block_size}, source,
               caches[call.cache], {call.k_scales, call.k_scales_per_layer}, {call.v_scales, call.v_scales_per_layer});
}

// Draft rows of each window from `first(i)` on whose slots are not negative.
template <typename F>
std::vector<Move> draft_moves(const int32_t* starts, const int64_t* slots, const SlotArguments& a, int64_t block_size,
                              int64_t num_blocks, const F& first) {
  check_windows(starts, a);
  std::vector<Move> moves;
  for (int64_t i = 0; i < a.batch; ++i) {
    for (int64_t row = starts[i] + std::max<int64_t>(first(i), 1); row < starts[i + 1]; ++row) {
      check_slot(slots[row], row, block_size, num_blocks);
      if (slots[row] >= 0) moves.push_back({row, slots[row]});
    }
  }
  return moves;
}

void move_slots(const LayerRow* table, const std::vector<Move>& moves, char* log, int64_t log_rows,
                const SlotArguments& a, const SlotShape& shape, bool to_log) {
  const int64_t token_bytes = shape.num_kv_heads * shape.head_size * a.element_bytes;
  for_each_move(moves, a.layers, [&](int64_t layer, int64_t row, int64_t slot) {
    char* key = log + (layer * 2 * log_rows + row) * token_bytes;
    char* value = key + log_rows * token_bytes;
    move_token(table[layer].key_cache, table[layer].key_cache_stride, shape, slot, key, a.element_bytes, to_log);
    move_token(table[layer].value_cache, table[layer].value_cache_stride, shape, slot, value, a.element_bytes, to_log);
  });
}

void log_slots(Tensor layer_table, std::vector<Tensor> caches, Tensor log, Tensor slots, Tensor query_start_loc,
               int64_t num_kv_heads, int64_t head_size, int64_t block_size, int64_t num_blocks) {
  const SlotArguments a = check_slot_arguments(layer_table, caches, slots, query_start_loc, num_kv_heads, head_size,
                                               block_size, num_blocks);
  check_log(log, a, num_kv_heads * head_size * a.element_bytes, layer_table);
  const SlotShape shape{num_kv_heads, head_size, block_size};
  const LayerRow* table = check_table(layer_table, caches, a, shape, num_blocks);
  const auto moves = draft_moves(query_start_loc.const_data_ptr<int32_t>(), slots.const_data_ptr<int64_t>(), a,
                                 block_size, num_blocks, [](int64_t) { return 1; });
  move_slots(table, moves, static_cast<char*>(log.mutable_data_ptr()), log.size(2), a, shape, true);
}

void restore_slots(Tensor layer_table, std::vector<Tensor> caches, Tensor log, Tensor slots, Tensor query_start_loc,
                   Tensor commit_counts, int64_t num_kv_heads, int64_t head_size, int64_t block_size,
                   int64_t num_blocks, bool rejected) {
  const SlotArguments a = check_slot_arguments(layer_table, caches, slots, query_start_loc, num_kv_heads, head_size,
                                               block_size, num_blocks);
  check_log(log, a, num_kv_heads * head_size * a.element_bytes, layer_table);
  check_vector(commit_counts, "commit_counts", ScalarType::Int, a.batch, layer_table);
  const int32_t* counts = commit_counts.const_data_ptr<int32_t>();
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  const SlotShape shape{num_kv_heads, head_size, block_size};
  const LayerRow* table = check_table(layer_table, caches, a, shape, num_blocks);
  const auto moves = draft_moves(starts, slots.const_data_ptr<int64_t>(), a, block_size, num_blocks, [&](int64_t i) {
    return kept_rows(starts, counts, i, rejected);
  });
  // The log is only read: move_token copies out of it.
  move_slots(table, moves, const_cast<char*>(static_cast<const char*>(log.const_data_ptr())), log.size(2), a, shape,
             false);
}

}  // namespace
}  // namespace nwor

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
  m.impl("commit_window", TORCH_BOX(&nwor::commit_window));
  m.impl("log_slots", TORCH_BOX(&nwor::log_slots));
  m.impl("restore_slots", TORCH_BOX(&nwor::restore_slots));
}

extern "C" __attribute__((visibility("default"))) const char* nwor_cpu_commit(const nwor::CommitCall* call,
                                                                              const int32_t* rejected, void*) {
  thread_local std::string message;
  try {
    nwor::commit(*call, rejected);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
