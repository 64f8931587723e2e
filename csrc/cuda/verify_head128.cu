// Head size 128. Columns: row tiles, row warps, groups, stages; then blocks per multiprocessor.
// The last choice is for devices with 99 KiB of shared memory per block, and takes more rows in chunks.
#include "verify_launch.cuh"

namespace nwor {
namespace {

// Columns: row tiles, warpgroups that divide the rows, stages of keys, of values and of probabilities, and warpgroups that take
// tiles in turns; then blocks per multiprocessor.
template <Kind kKind>
cudaError_t launch_wgmma(LaunchRequest request) {
  request.rows = std::min(request.rows, 72);
  if (in_turns(request))
    return launch_first_fitting<Choice<WarpgroupShape<128, 1, 1, 3, 3, kKind, 2, 2, true>, 1>,
                                Choice<WarpgroupShape<128, 2, 1, 3, 3, kKind, 2, 2, true>, 1>,
                                Choice<WarpgroupShape<128, 3, 1, 3, 3, kKind, 2, 2, true>, 1>,
                                Choice<WarpgroupShape<128, 5, 1, 3, 2, kKind, 1, 2, true>, 1>,
                                Choice<WarpgroupShape<128, 9, 1, 2, 3, kKind, 1, 2, true>, 1>>(request);
  return launch_first_fitting<Choice<WarpgroupShape<128, 3, 1, 3, 3, kKind, 2>, 2>,
                              Choice<WarpgroupShape<128, 5, 1, 2, 2, kKind, 1>, 2>,
                              Choice<WarpgroupShape<128, 9, 1, 2, 2, kKind, 1>, 2>>(request);
}

template <>
cudaError_t launch_wgmma<Kind::kFp8>(LaunchRequest request) {
  constexpr Kind kKind = Kind::kFp8;
  request.rows = std::min(request.rows, 72);
  return launch_first_fitting<Choice<WarpgroupShape<128, 3, 1, 3, 4, kKind, 1>, 3>,
                              Choice<WarpgroupShape<128, 5, 1, 4, 5, kKind, 1>, 2>,
                              Choice<WarpgroupShape<128, 9, 1, 3, 4, kKind, 1>, 2>>(request);
}

template <>
cudaError_t launch_wgmma<Kind::kFp8Query>(LaunchRequest request) {
  constexpr Kind kKind = Kind::kFp8Query;
  request.rows = std::min(request.rows, 72);
  if (in_turns(request))
    return launch_first_fitting<Choice<WarpgroupShape<128, 1, 1, 3, 4, kKind, 2, 3, true>, 1>,
                                Choice<WarpgroupShape<128, 2, 1, 3, 4, kKind, 2, 3, true>, 1>,
                                Choice<WarpgroupShape<128, 3, 1, 3, 4, kKind, 2, 3, true>, 1>,
                                Choice<WarpgroupShape<128, 5, 1, 4, 5, kKind, 2, 2, true>, 1>,
                                Choice<WarpgroupShape<128, 9, 1, 4, 5, kKind, 1, 2, true>, 1>>(request);
  return launch_first_fitting<Choice<WarpgroupShape<128, 1, 1, 2, 3, kKind, 2>, 4>,
                              Choice<WarpgroupShape<128, 2, 1, 2, 3, kKind, 2>, 4>,
                              Choice<WarpgroupShape<128, 3, 1, 3, 4, kKind, 1>, 3>,
                              Choice<WarpgroupShape<128, 5, 1, 4, 5, kKind, 1>, 2>,
                              Choice<WarpgroupShape<128, 9, 1, 4, 5, kKind, 1>, 2>>(request);
}

template <Kind kKind>
cudaError_t launch_16bit(LaunchRequest request) {
  request.rows = std::min(request.rows, 72);
  return launch_first_fitting<Choice<Shape<128, 1, 1, 4, 3, kKind>, 2>, Choice<Shape<128, 2, 1, 4, 3, kKind>, 2>,
                              Choice<Shape<128, 3, 1, 4, 3, kKind>, 2>, Choice<Shape<128, 3, 2, 2, 5, kKind>, 2>,
                              Choice<Shape<128, 3, 3, 2, 5, kKind>, 2>, Choice<Shape<128, 3, 2, 2, 4, kKind>, 1>>(
      request);
}

cudaError_t launch_fp8(LaunchRequest request) {
  constexpr Kind kKind = Kind::kFp8;
  request.rows = std::min(request.rows, 72);
  return launch_first_fitting<Choice<Shape<128, 1, 1, 4, 4, kKind>, 3>, Choice<Shape<128, 2, 1, 4, 4, kKind>, 2>,
                              Choice<Shape<128, 3, 1, 4, 4, kKind>, 2>, Choice<Shape<128, 3, 2, 2, 6, kKind>, 3>,
                              Choice<Shape<128, 3, 3, 2, 8, kKind>, 2>>(request);
}

// As measured: with up to 24 rows mma.sync keeps up with memory as long as every multiprocessor has work enough; with few
// units the warpgroup kernel's shorter chain wins. With an fp8 query that kernel need not convert the keys, and wins always.
bool wgmma_for_fp8(const LaunchRequest& request) {
  return request.has_wgmma && (request.params.fp8_query || request.rows > 24 ||
                               (request.rows > 16 && 2 * units_of(request) < request.num_sms));
}

}  // namespace

cudaError_t launch_head128(const LaunchRequest& request) {
  if (request.params.is_fp8) {
    if (!wgmma_for_fp8(request)) return launch_fp8(request);
    return request.params.fp8_query ? launch_wgmma<Kind::kFp8Query>(request) : launch_wgmma<Kind::kFp8>(request);
  }
  // As measured: up to 16 rows a launch takes tiles in turns where units are about as many as multiprocessors; where they are
  // fewer or more, mma.sync keeps more warps in flight.
  if (request.has_wgmma && (request.rows > 16 || (in_turns(request) && 2 * units_of(request) > request.num_sms)))
    return request.params.is_bf16 ? launch_wgmma<Kind::kBf16>(request) : launch_wgmma<Kind::kFp16>(request);
  return request.params.is_bf16 ? launch_16bit<Kind::kBf16>(request) : launch_16bit<Kind::kFp16>(request);
}

}  // namespace nwor
