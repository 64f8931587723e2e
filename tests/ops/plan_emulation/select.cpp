// The table of CUDA kernels and the choice among them, for a test to hold against what the documentation says.
#include "verify/select.h"

namespace {

constexpr int kNumbers = 11;

void write(const nwor::Config& c, int shared_bytes, int* out) {
  const int row[] = {c.head_size,  static_cast<int>(c.operands), static_cast<int>(c.mainloop), c.row_tiles,
                     c.row_groups, c.tile_groups,                c.key_stages,                 c.value_stages,
                     c.probabilities, c.ctas_per_sm,             shared_bytes};
  static_assert(sizeof(row) == kNumbers * sizeof(int));
  std::memcpy(out, row, sizeof(row));
}

}  // namespace

extern "C" int config_count() { return nwor::kConfigCount; }

extern "C" void read_config(int index, int* out) { write(nwor::kConfigs[index], nwor::kSharedBytes[index], out); }

// Returns the index of the configuration, or -1; `rows`: those of the launch, then those that CTAs take at a time.
extern "C" int select_config(int head_size, int operands, int* rows, int work_tiles, int num_sms, int shared_bytes,
                             int has_wgmma) {
  const nwor::Selection found = nwor::select({.head_size = head_size,
                                              .operands = static_cast<nwor::Operands>(operands),
                                              .rows = *rows,
                                              .work_tiles = work_tiles,
                                              .num_sms = num_sms,
                                              .shared_bytes = shared_bytes,
                                              .has_wgmma = has_wgmma != 0});
  *rows = found.rows;
  return found.config;
}
