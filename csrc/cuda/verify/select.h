// Which kernel a launch of verify_attention takes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

#include "verify/traits.cuh"

namespace nwor {

// What the choice depends on.
struct Launch {
  int head_size;
  Operands operands;
  int rows;            // query rows of the longest window for one KV head
  int64_t work_tiles;  // requests x KV heads
  int num_sms;
  int shared_bytes;  // that a CTA may have
  bool has_wgmma;
};

struct Selection {
  int config;  // of kConfigs; -1: none serves the launch
  int rows;    // of the launch's, those that CTAs take at a time at most
};

// Bytes of shared memory that a CTA of kConfigs[kIndex] takes.
template <size_t kIndex>
constexpr int kSharedBytesOf = Traits<kConfigs[kIndex], kind_of(kConfigs[kIndex].operands, true)>::kSharedBytes;

template <size_t... kIndex>
constexpr std::array<int, kConfigCount> shared_bytes_of_configs(std::index_sequence<kIndex...>) {
  return {kSharedBytesOf<kIndex>...};
}
constexpr std::array kSharedBytes = shared_bytes_of_configs(std::make_index_sequence<kConfigCount>());

constexpr int kMostSharedBytes = 227 << 10;  // of any device
static_assert(std::ranges::all_of(kSharedBytes, [](int bytes) { return bytes <= kMostSharedBytes; }));
static_assert(std::ranges::all_of(kConfigs, [](const Config& config) {
  return std::ranges::find(kHeadSizes, config.head_size) != std::end(kHeadSizes) && config.rows() <= kMaxRows &&
         config.ctas_per_sm <= kMaxBlocksPerSm;
}));

// As measured. Few work tiles leave each SM few CTAs; then the shorter chain of wgmma wins. With enough of them and few
// rows mma.sync keeps more warps in flight, and converts an fp8 cache as fast as memory gives it. An e4m3 query saves
// wgmma the conversion of the keys: it wins always.
constexpr bool takes_wgmma(const Launch& launch) {
  const int64_t tiles = launch.work_tiles, sms = launch.num_sms;
  if (!launch.has_wgmma || launch.head_size == 96) return false;
  if (launch.operands == Operands::kFp8Query) return true;
  const bool fp8 = launch.operands == Operands::kFp8Cache;
  switch (launch.head_size) {
    case 64:
      return launch.rows > (fp8 ? 24 : 16) || (fp8 ? launch.rows > 16 && tiles >= 2 * sms : tiles < 2 * sms);
    case 128:
      return launch.rows > (fp8 ? 24 : 16) ||
             (fp8 ? launch.rows > 16 && 2 * tiles < sms : tiles <= sms && 2 * tiles > sms);
    default:
      return !fp8 || launch.rows > 16;
  }
}

// The one place that decides.
constexpr Selection select(const Launch& launch) {
  const bool wgmma = takes_wgmma(launch);
  // mma.sync makes an e4m3 query fp16 as it comes.
  const Operands operands =
      !wgmma && launch.operands == Operands::kFp8Query ? Operands::kFp8Cache : launch.operands;
  const auto serves = [&](const Config& config) {
    return config.head_size == launch.head_size && config.operands == operands && uses_wgmma(config.mainloop) == wgmma;
  };
  int rows = 0;
  for (const Config& config : kConfigs)
    if (serves(config)) rows = std::max(rows, config.rows());
  rows = std::min(rows, launch.rows);

  // Tiles in turns where each SM has one CTA anyway: fewer CTAs then have parts of a work tile, and their combine costs
  // more than what adds a CTA's warpgroups up.
  for (const bool turns : {true, false}) {
    if (turns && launch.work_tiles > launch.num_sms) continue;
    for (int i = 0; i < kConfigCount; ++i)
      if (serves(kConfigs[i]) && (kConfigs[i].mainloop == Mainloop::kSm90Turns) == turns && kConfigs[i].rows() >= rows &&
          kSharedBytes[i] <= launch.shared_bytes)
        return {i, rows};
  }
  // None keeps all rows and finds room: they go in chunks.
  int most = -1;
  for (int i = 0; i < kConfigCount; ++i)
    if (serves(kConfigs[i]) && kConfigs[i].mainloop != Mainloop::kSm90Turns && kSharedBytes[i] <= launch.shared_bytes &&
        (most < 0 || kConfigs[i].rows() >= kConfigs[most].rows()))
      most = i;
  return {most, rows};
}

}  // namespace nwor
