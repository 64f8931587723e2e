// Head size 64. Columns: row tiles, row warps, groups, stages; then blocks per multiprocessor.
#include "verify_launch.cuh"

namespace nwor {
namespace {

// Columns: row tiles, warpgroups that divide the rows, stages of keys, of values and of probabilities, and warpgroups that take
// tiles in turns; then blocks per multiprocessor.
template <Kind kKind>
cudaError_t launch_wgmma(LaunchRequest request) {
  request.rows = std::min(request.rows, 72);
  if (in_turns(request))
    return launch_first_fitting<Choice<WarpgroupShape<64, 1, 1, 3, 4, kKind, 2, 3, true>, 1>,
                                Choice<WarpgroupShape<64, 2, 1, 3, 4, kKind, 2, 3, true>, 1>,
                                Choice<WarpgroupShape<64, 3, 1, 3, 4, kKind, 2, 3, true>, 1>,
                                Choice<WarpgroupShape<64, 5, 1, 3, 4, kKind, 2, 3, true>, 1>,
                                Choice<WarpgroupShape<64, 9, 1, 3, 3, kKind, 2, 3, true>, 1>>(request);
  return launch_first_fitting<Choice<WarpgroupShape<64, 1, 1, 3, 3, kKind, 2>, 3>,
                              Choice<WarpgroupShape<64, 2, 1, 3, 3, kKind, 2>, 3>,
                              Choice<WarpgroupShape<64, 3, 1, 2, 3, kKind, 1>, 4>,
                              Choice<WarpgroupShape<64, 5, 1, 2, 3, kKind, 1>, 4>,
                              Choice<WarpgroupShape<64, 9, 1, 3, 3, kKind, 2>, 2>>(request);
}

template <>
cudaError_t launch_wgmma<Kind::kFp8>(LaunchRequest request) {
  constexpr Kind kKind = Kind::kFp8;
  request.rows = std::min(request.rows, 72);
  return launch_first_fitting<Choice<WarpgroupShape<64, 3, 1, 4, 5, kKind, 1>, 4>,
                              Choice<WarpgroupShape<64, 5, 1, 4, 5, kKind, 1>, 3>,
                              Choice<WarpgroupShape<64, 9, 1, 4, 5, kKind, 1>, 2>>(request);
}

template <>
cudaError_t launch_wgmma<Kind::kFp8Query>(LaunchRequest request) {
  constexpr Kind kKind = Kind::kFp8Query;
  request.rows = std::min(request.rows, 72);
  if (in_turns(request))
    return launch_first_fitting<Choice<WarpgroupShape<64, 1, 1, 4, 5, kKind, 2, 3, true>, 1>,
                                Choice<WarpgroupShape<64, 2, 1, 4, 5, kKind, 2, 3, true>, 1>,
                                Choice<WarpgroupShape<64, 3, 1, 4, 5, kKind, 2, 3, true>, 1>,
                                Choice<WarpgroupShape<64, 5, 1, 4, 5, kKind, 2, 3, true>, 1>,
                                Choice<WarpgroupShape<64, 9, 1, 4, 5, kKind, 2, 3, true>, 1>>(request);
  return launch_first_fitting<Choice<WarpgroupShape<64, 1, 1, 4, 5, kKind, 1>, 4>,
                              Choice<WarpgroupShape<64, 2, 1, 4, 5, kKind, 1>, 4>,
                              Choice<WarpgroupShape<64, 3, 1, 4, 5, kKind, 1>, 4>,
                              Choice<WarpgroupShape<64, 5, 1, 4, 5, kKind, 1>, 3>,
                              Choice<WarpgroupShape<64, 9, 1, 4, 5, kKind, 1>, 2>>(request);
}

template <Kind kKind>
cudaError_t launch_16bit(LaunchRequest request) {
  request.rows = std::min(request.rows, 80);
  return launch_first_fitting<Choice<Shape<64, 1, 1, 4, 3, kKind>, 4>, Choice<Shape<64, 2, 1, 4, 3, kKind>, 4>,
                              Choice<Shape<64, 3, 1, 4, 3, kKind>, 4>, Choice<Shape<64, 5, 1, 4, 3, kKind>, 3>,
                              Choice<Shape<64, 5, 2, 2, 6, kKind>, 3>>(request);
}

cudaError_t launch_fp8(LaunchRequest request) {
  request.rows = std::min(request.rows, 80);
  constexpr Kind kKind = Kind::kFp8;
  return launch_first_fitting<Choice<Shape<64, 1, 1, 4, 6, kKind>, 4>, Choice<Shape<64, 2, 1, 4, 6, kKind>, 4>,
                              Choice<Shape<64, 3, 1, 4, 6, kKind>, 3>, Choice<Shape<64, 5, 1, 4, 6, kKind>, 3>,
                              Choice<Shape<64, 5, 2, 2, 10, kKind>, 3>>(request);
}

// Few units leave each multiprocessor few thread blocks; then the warpgroup kernel's shorter chain wins.
bool few_units(const LaunchRequest& request) {
  return units_of(request) < 2 * request.num_sms;
}

// As measured: with up to 24 rows and few units mma.sync converts an fp8 cache as fast, and keeps more warps in flight.
// With an fp8 query the warpgroup kernel need not convert the keys, and wins always.
bool wgmma_for_fp8(const LaunchRequest& request) {
  return request.has_wgmma &&
         (request.params.fp8_query || request.rows > 24 || (request.rows > 16 && !few_units(request)));
}

}  // namespace

cudaError_t launch_head64(const LaunchRequest& request) {
  if (request.params.is_fp8) {
    if (!wgmma_for_fp8(request)) return launch_fp8(request);
    return request.params.fp8_query ? launch_wgmma<Kind::kFp8Query>(request) : launch_wgmma<Kind::kFp8>(request);
  }
  if (request.has_wgmma && (request.rows > 16 || few_units(request)))
    return request.params.is_bf16 ? launch_wgmma<Kind::kBf16>(request) : launch_wgmma<Kind::kFp16>(request);
  return request.params.is_bf16 ? launch_16bit<Kind::kBf16>(request) : launch_16bit<Kind::kFp16>(request);
}

}  // namespace nwor
