// The schema of every op, once. Both libraries implement these; the CPU library, which is always built, defines them.
//
// Conventions: T = window token rows of the step (padding rows included), B = requests (padded ones included),
// L = layers, Hq / Hk = query / KV heads, D = head size. Lengths and counts are read on the device only.
#pragma once

namespace nwor {

// Window K/V come from `key`/`value`, the context from the paged cache; the window's slots are never read. `q_scale` is
// that of a query in e4m3.
inline constexpr const char* kVerifyAttention =
    "verify_attention("
    "Tensor query, Tensor key, Tensor value, "
    "Tensor key_cache, Tensor value_cache, "
    "Tensor block_table, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor(a!) output, Tensor(b!) workspace, Tensor(c!)? lse, "
    "float scale, int max_query_len, str kv_cache_dtype, "
    "Tensor? k_scale, Tensor? v_scale, "
    "int sliding_window, float softcap, Tensor? sinks, Tensor? ancestor_mask, Tensor? plan=None, "
    "Tensor? q_scale=None) -> ()";

// What verify_attention finds out from the lengths, once for all layers that share them.
inline constexpr const char* kPlanVerifyAttention =
    "plan_verify_attention("
    "Tensor query_start_loc, Tensor seq_lens, Tensor(a!) plan, "
    "int num_heads, int num_kv_heads, int head_size, int max_query_len, "
    "ScalarType source_dtype, str kv_cache_dtype, int sliding_window, "
    "bool quantized_query=False) -> ()";

// `layer_table` holds addresses (layer_table.h); `caches` are the tensors those addresses lie in. With `rejected` the
// commit counts say how many of a window's last tokens are left out, instead of how many of its first are kept.
inline constexpr const char* kCommitWindow =
    "commit_window("
    "Tensor layer_table, Tensor(a!)[] caches, Tensor slots, Tensor query_start_loc, "
    "Tensor? commit_counts, Tensor? source_index, "
    "int num_kv_heads, int head_size, int block_size, int num_blocks, "
    "ScalarType source_dtype, str kv_cache_dtype, "
    "Tensor? k_scales, Tensor? v_scales, bool rejected=False) -> ()";

inline constexpr const char* kStageWindow =
    "stage_window("
    "Tensor[] keys, Tensor[] values, "
    "Tensor(a!)[] staged_keys, Tensor(b!)[] staged_values, Tensor num_tokens) -> ()";

inline constexpr const char* kLogSlots =
    "log_slots("
    "Tensor layer_table, Tensor[] caches, Tensor(a!) log, Tensor slots, Tensor query_start_loc, "
    "int num_kv_heads, int head_size, int block_size, int num_blocks) -> ()";

inline constexpr const char* kRestoreSlots =
    "restore_slots("
    "Tensor layer_table, Tensor(a!)[] caches, Tensor log, Tensor slots, Tensor query_start_loc, "
    "Tensor commit_counts, "
    "int num_kv_heads, int head_size, int block_size, int num_blocks, bool rejected=False) -> ()";

// The index of each row's largest element. `workspace` holds zeros before a call and after it.
inline constexpr const char* kArgmaxRows =
    "argmax_rows(Tensor logits, Tensor(a!) output, Tensor(b!) workspace) -> ()";

inline constexpr const char* kAllSchemas[] = {
    kVerifyAttention, kPlanVerifyAttention, kCommitWindow, kStageWindow, kLogSlots, kRestoreSlots, kArgmaxRows};

}  // namespace nwor
