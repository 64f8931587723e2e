// Cuts a batch into work items: (request, KV head, rows), and pieces of the context where there are few of those.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "verify_params.h"

namespace nwor {

// A run of items whose partial results belong together.
struct Merge {
  int64_t first, count;
};

struct Plan {
  std::vector<WorkItem> items;
  std::vector<Merge> merges;
};

// Most pieces per worker that make_plan cuts contexts into; sizes the workspace.
constexpr int64_t kPiecesPerWorker = 3;
constexpr int64_t kSmallestPiece = 256;  // tokens

constexpr int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

constexpr int64_t most_partials(int64_t workers) { return 2 * kPiecesPerWorker * workers; }

// The first token of the context that any row of the window sees, at a tile's beginning.
inline int64_t first_visible(const VerifyParams& p, int64_t context) {
  if (p.sliding_window < 0) return 0;
  return std::max<int64_t>(context - p.sliding_window + 1, 0) / kTileTokens * kTileTokens;
}

// partials: room for most_partials(workers) partial results.
inline Plan make_plan(const VerifyParams& p, int64_t batch, int64_t workers, float* partials) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const auto window_of = [&](int64_t i) { return int64_t{p.query_start_loc[i + 1]} - p.query_start_loc[i]; };
  int64_t total = 0;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t window = window_of(i);
    if (window == 0) continue;
    const int64_t context = p.seq_lens[i] - window;
    const int64_t chunks = (window * group + kChunkRows - 1) / kChunkRows;
    total += chunks * p.num_kv_heads * (context - first_visible(p, context) + window);
  }
  int64_t piece = INT64_MAX;
  if (workers > 1)
    piece = round_up(std::max(total / (kPiecesPerWorker * workers) + 1, kSmallestPiece), kTileTokens);

  Plan plan;
  int64_t used = 0;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t window = window_of(i);
    if (window == 0) continue;
    const int64_t context = p.seq_lens[i] - window;
    const int64_t begin = first_visible(p, context);
    const int64_t rows = window * group;
    const int64_t pieces = context - begin <= piece ? 1 : (context - begin + piece - 1) / piece;
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      for (int64_t row = 0; row < rows; row += kChunkRows) {
        const int64_t first = static_cast<int64_t>(plan.items.size());
        for (int64_t n = 0; n < pieces; ++n) {
          const bool last = n == pieces - 1;
          plan.items.push_back({static_cast<int32_t>(i), static_cast<int32_t>(head), static_cast<int32_t>(row),
                                static_cast<int32_t>(std::min(rows - row, kChunkRows)),
                                begin + (pieces == 1 ? 0 : n * piece),
                                last ? context : begin + (n + 1) * piece, last, nullptr});
        }
        if (pieces == 1) continue;
        for (int64_t n = 0; n < pieces; ++n)
          plan.items[static_cast<size_t>(first + n)].partial = partials + (used++) * partial_floats(p.head_size);
        plan.merges.push_back({first, pieces});
      }
    }
  }
  return plan;
}

}  // namespace nwor
