// The kernels of verify_attention, a row of kConfigs each. select() chooses among them (select.h), traits have what
// follows from a row (traits_*.cuh), and the build makes a source file for each head size (instantiation.cu.in).
#pragma once

#include "common/kinds.h"

namespace nwor {

// CMakeLists.txt reads this line.
constexpr int kHeadSizes[] = {64, 96, 128, 256};

enum class Operands {
  k16Bit,     // query, keys and values of 16 bits, bf16 or fp16: two kernels
  kFp8Cache,  // an fp8 cache, which is multiplied as fp16
  kFp8Query,  // the same and an e4m3 query, which is multiplied with the keys as it is
};

enum class Mainloop {
  kSm80,       // mma.sync: groups of warps, each with tiles of 16 tokens and a ring of its own
  kSm90,       // wgmma: the warpgroups share tiles of 64 tokens
  kSm90Turns,  // wgmma: the warpgroups take tiles in turns
  kSm90Pairs,  // wgmma: two warpgroups take tiles in pairs
};

struct Config {
  int head_size;
  Operands operands;
  Mainloop mainloop;
  int row_tiles;      // query rows of a warp or, with wgmma, of a warpgroup, in eights
  int row_groups;     // warps or warpgroups that share tiles and divide the rows
  int tile_groups;    // groups of warps, or warpgroups, with tiles of their own
  int key_stages;     // of a ring
  int value_stages;   // mma.sync has both in one stage: as many
  int probabilities;  // tiles whose probabilities have room in shared memory; mma.sync keeps them in registers: 0
  int ctas_per_sm;    // what registers are allotted for

  constexpr int rows() const { return 8 * row_tiles * row_groups; }  // that a CTA keeps
};

namespace table {

using enum Operands;
using enum Mainloop;

// Of one head size, operands and main loop the first serves that keeps all query rows of a window and finds room. The
// last ones of mma.sync, head sizes 128 and 256, are for devices with 163 or 99 KiB of shared memory a CTA.
constexpr Config kConfigs[] = {
    // head, operands, main loop, row tiles, row groups, tile groups, stages of keys, of values, probabilities, CTAs an SM
    {64, k16Bit, kSm80, 1, 1, 4, 3, 3, 0, 4},
    {64, k16Bit, kSm80, 2, 1, 4, 3, 3, 0, 4},
    {64, k16Bit, kSm80, 3, 1, 4, 3, 3, 0, 4},
    {64, k16Bit, kSm80, 5, 1, 4, 3, 3, 0, 3},
    {64, k16Bit, kSm80, 5, 2, 2, 6, 6, 0, 3},
    {64, k16Bit, kSm90, 1, 1, 1, 3, 3, 2, 3},
    {64, k16Bit, kSm90, 2, 1, 1, 3, 3, 2, 3},
    {64, k16Bit, kSm90, 3, 1, 1, 2, 3, 1, 4},
    {64, k16Bit, kSm90, 5, 1, 1, 2, 3, 1, 4},
    {64, k16Bit, kSm90, 9, 1, 1, 3, 3, 2, 2},
    {64, k16Bit, kSm90Turns, 1, 1, 3, 3, 4, 2, 1},
    {64, k16Bit, kSm90Turns, 2, 1, 3, 3, 4, 2, 1},
    {64, k16Bit, kSm90Turns, 3, 1, 3, 3, 4, 2, 1},
    {64, k16Bit, kSm90Turns, 5, 1, 3, 3, 4, 2, 1},
    {64, k16Bit, kSm90Turns, 9, 1, 3, 3, 3, 2, 1},
    {64, kFp8Cache, kSm80, 1, 1, 4, 6, 6, 0, 4},
    {64, kFp8Cache, kSm80, 2, 1, 4, 6, 6, 0, 4},
    {64, kFp8Cache, kSm80, 3, 1, 4, 6, 6, 0, 3},
    {64, kFp8Cache, kSm80, 5, 1, 4, 6, 6, 0, 3},
    {64, kFp8Cache, kSm80, 5, 2, 2, 10, 10, 0, 3},
    {64, kFp8Cache, kSm90, 3, 1, 1, 4, 5, 1, 4},
    {64, kFp8Cache, kSm90, 5, 1, 1, 4, 5, 1, 3},
    {64, kFp8Cache, kSm90, 9, 1, 1, 4, 5, 1, 2},
    {64, kFp8Query, kSm90, 1, 1, 1, 4, 5, 1, 4},
    {64, kFp8Query, kSm90, 2, 1, 1, 4, 5, 1, 4},
    {64, kFp8Query, kSm90, 3, 1, 1, 4, 5, 1, 4},
    {64, kFp8Query, kSm90, 5, 1, 1, 4, 5, 1, 3},
    {64, kFp8Query, kSm90, 9, 1, 1, 4, 5, 1, 2},
    {64, kFp8Query, kSm90Turns, 1, 1, 3, 4, 5, 2, 1},
    {64, kFp8Query, kSm90Turns, 2, 1, 3, 4, 5, 2, 1},
    {64, kFp8Query, kSm90Turns, 3, 1, 3, 4, 5, 2, 1},
    {64, kFp8Query, kSm90Turns, 5, 1, 3, 4, 5, 2, 1},
    {64, kFp8Query, kSm90Turns, 9, 1, 3, 4, 5, 2, 1},

    {96, k16Bit, kSm80, 1, 1, 4, 4, 4, 0, 2},
    {96, k16Bit, kSm80, 3, 1, 4, 4, 4, 0, 2},
    {96, k16Bit, kSm80, 3, 2, 2, 6, 6, 0, 2},
    {96, k16Bit, kSm80, 5, 2, 2, 6, 6, 0, 2},
    {96, kFp8Cache, kSm80, 1, 1, 4, 5, 5, 0, 3},
    {96, kFp8Cache, kSm80, 3, 1, 4, 5, 5, 0, 3},
    {96, kFp8Cache, kSm80, 3, 2, 2, 8, 8, 0, 3},
    {96, kFp8Cache, kSm80, 5, 2, 2, 10, 10, 0, 2},

    {128, k16Bit, kSm80, 1, 1, 4, 3, 3, 0, 2},
    {128, k16Bit, kSm80, 2, 1, 4, 3, 3, 0, 2},
    {128, k16Bit, kSm80, 3, 1, 4, 3, 3, 0, 2},
    {128, k16Bit, kSm80, 3, 2, 2, 5, 5, 0, 2},
    {128, k16Bit, kSm80, 3, 3, 2, 5, 5, 0, 2},
    {128, k16Bit, kSm80, 3, 2, 2, 4, 4, 0, 1},
    {128, k16Bit, kSm90, 3, 1, 1, 3, 3, 2, 2},
    {128, k16Bit, kSm90, 5, 1, 1, 2, 2, 1, 2},
    {128, k16Bit, kSm90, 9, 1, 1, 2, 2, 1, 2},
    {128, k16Bit, kSm90Turns, 1, 1, 2, 3, 3, 2, 1},
    {128, k16Bit, kSm90Turns, 2, 1, 2, 3, 3, 2, 1},
    {128, k16Bit, kSm90Turns, 3, 1, 2, 3, 3, 2, 1},
    {128, k16Bit, kSm90Turns, 5, 1, 2, 3, 2, 1, 1},
    {128, k16Bit, kSm90Turns, 9, 1, 2, 2, 3, 1, 1},
    {128, kFp8Cache, kSm80, 1, 1, 4, 4, 4, 0, 3},
    {128, kFp8Cache, kSm80, 2, 1, 4, 4, 4, 0, 2},
    {128, kFp8Cache, kSm80, 3, 1, 4, 4, 4, 0, 2},
    {128, kFp8Cache, kSm80, 3, 2, 2, 6, 6, 0, 3},
    {128, kFp8Cache, kSm80, 3, 3, 2, 8, 8, 0, 2},
    {128, kFp8Cache, kSm90, 3, 1, 1, 3, 4, 1, 3},
    {128, kFp8Cache, kSm90, 5, 1, 1, 4, 5, 1, 2},
    {128, kFp8Cache, kSm90, 9, 1, 1, 3, 4, 1, 2},
    {128, kFp8Query, kSm90, 1, 1, 1, 2, 3, 2, 4},
    {128, kFp8Query, kSm90, 2, 1, 1, 2, 3, 2, 4},
    {128, kFp8Query, kSm90, 3, 1, 1, 3, 4, 1, 3},
    {128, kFp8Query, kSm90, 5, 1, 1, 4, 5, 1, 2},
    {128, kFp8Query, kSm90, 9, 1, 1, 4, 5, 1, 2},
    {128, kFp8Query, kSm90Turns, 1, 1, 3, 3, 4, 2, 1},
    {128, kFp8Query, kSm90Turns, 2, 1, 3, 3, 4, 2, 1},
    {128, kFp8Query, kSm90Turns, 3, 1, 3, 3, 4, 2, 1},
    {128, kFp8Query, kSm90Turns, 5, 1, 2, 4, 5, 2, 1},
    {128, kFp8Query, kSm90Turns, 9, 1, 2, 4, 5, 1, 1},

    {256, k16Bit, kSm80, 1, 1, 4, 3, 3, 0, 1},
    {256, k16Bit, kSm80, 2, 1, 4, 3, 3, 0, 1},
    {256, k16Bit, kSm80, 2, 3, 2, 6, 6, 0, 1},
    {256, k16Bit, kSm80, 3, 3, 2, 5, 5, 0, 1},
    {256, k16Bit, kSm80, 2, 3, 2, 3, 3, 0, 1},
    {256, k16Bit, kSm80, 2, 1, 2, 2, 2, 0, 1},
    {256, k16Bit, kSm90, 1, 1, 1, 2, 2, 1, 1},
    {256, k16Bit, kSm90, 2, 1, 1, 2, 2, 1, 1},
    {256, k16Bit, kSm90, 3, 1, 1, 2, 2, 1, 1},
    {256, k16Bit, kSm90, 5, 1, 1, 2, 2, 1, 1},
    {256, k16Bit, kSm90Pairs, 9, 1, 2, 1, 1, 1, 1},
    {256, k16Bit, kSm90, 5, 2, 1, 3, 2, 1, 1},
    {256, kFp8Cache, kSm80, 1, 1, 4, 3, 3, 0, 2},
    {256, kFp8Cache, kSm80, 2, 1, 4, 3, 3, 0, 2},
    {256, kFp8Cache, kSm80, 2, 3, 2, 6, 6, 0, 1},
    {256, kFp8Cache, kSm80, 3, 3, 2, 6, 6, 0, 1},
    {256, kFp8Cache, kSm80, 2, 1, 2, 2, 2, 0, 1},
    {256, kFp8Cache, kSm90, 3, 1, 1, 3, 3, 1, 2},
    {256, kFp8Cache, kSm90Pairs, 5, 1, 2, 2, 3, 1, 1},
    {256, kFp8Cache, kSm90Pairs, 9, 1, 2, 2, 3, 1, 1},
    {256, kFp8Cache, kSm90, 5, 2, 1, 4, 5, 1, 1},
    {256, kFp8Query, kSm90, 1, 1, 1, 3, 3, 2, 2},
    {256, kFp8Query, kSm90, 2, 1, 1, 3, 3, 2, 2},
    {256, kFp8Query, kSm90, 3, 1, 1, 3, 3, 1, 2},
    {256, kFp8Query, kSm90Pairs, 5, 1, 2, 2, 3, 1, 1},
    {256, kFp8Query, kSm90Pairs, 9, 1, 2, 2, 3, 1, 1},
    {256, kFp8Query, kSm90, 5, 2, 1, 4, 5, 2, 1},
    {256, kFp8Query, kSm90Turns, 1, 1, 2, 3, 3, 2, 1},
    {256, kFp8Query, kSm90Turns, 2, 1, 2, 3, 3, 2, 1},
    {256, kFp8Query, kSm90Turns, 3, 1, 2, 3, 3, 2, 1},
};

}  // namespace table

using table::kConfigs;
constexpr int kConfigCount = sizeof(kConfigs) / sizeof(kConfigs[0]);

constexpr bool uses_wgmma(Mainloop mainloop) { return mainloop != Mainloop::kSm80; }

constexpr Kind kind_of(Operands operands, bool is_bf16) {
  if (operands == Operands::kFp8Query) return Kind::kFp8Query;
  if (operands == Operands::kFp8Cache) return Kind::kFp8;
  return is_bf16 ? Kind::kBf16 : Kind::kFp16;
}

}  // namespace nwor
