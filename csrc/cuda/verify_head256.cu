// Head size 256. Columns: row tiles, row warps, groups, stages; then blocks per multiprocessor.
// The last two choices are for devices with 163 and 99 KiB of shared memory per block; they take more rows in chunks.
#include "verify_launch.cuh"

namespace nwor {
namespace {

// Columns: row tiles, warpgroups that divide the rows, stages of keys, of values and of probabilities, and tiles at a time
// (two for a pair of warpgroups, or for two that take turns); then blocks per multiprocessor.
template <Kind kKind>
cudaError_t launch_wgmma(LaunchRequest request) {
  request.rows = std::min(request.rows, 80);
  return launch_first_fitting<Choice<WarpgroupShape<256, 1, 1, 2, 2, kKind, 1>, 1>,
                              Choice<WarpgroupShape<256, 2, 1, 2, 2, kKind, 1>, 1>,
                              Choice<WarpgroupShape<256, 3, 1, 2, 2, kKind, 1>, 1>,
                              Choice<WarpgroupShape<256, 5, 1, 2, 2, kKind, 1>, 1>,
                              Choice<WarpgroupShape<256, 9, 1, 1, 1, kKind, 1, 2>, 1>,
                              Choice<WarpgroupShape<256, 5, 2, 3, 2, kKind, 1>, 1>>(request);
}

template <>
cudaError_t launch_wgmma<Kind::kFp8>(LaunchRequest request) {
  constexpr Kind kKind = Kind::kFp8;
  request.rows = std::min(request.rows, 80);
  return launch_first_fitting<Choice<WarpgroupShape<256, 3, 1, 3, 3, kKind, 1>, 2>,
                              Choice<WarpgroupShape<256, 5, 1, 2, 3, kKind, 1, 2>, 1>,
                              Choice<WarpgroupShape<256, 9, 1, 2, 3, kKind, 1, 2>, 1>,
                              Choice<WarpgroupShape<256, 5, 2, 4, 5, kKind, 1>, 1>>(request);
}

template <>
cudaError_t launch_wgmma<Kind::kFp8Query>(LaunchRequest request) {
  constexpr Kind kKind = Kind::kFp8Query;
  request.rows = std::min(request.rows, 80);
  if (in_turns(request) && request.rows <= 24)
    return launch_first_fitting<Choice<WarpgroupShape<256, 1, 1, 3, 3, kKind, 2, 2, true>, 1>,
                                Choice<WarpgroupShape<256, 2, 1, 3, 3, kKind, 2, 2, true>, 1>,
                                Choice<WarpgroupShape<256, 3, 1, 3, 3, kKind, 2, 2, true>, 1>>(request);
  return launch_first_fitting<Choice<WarpgroupShape<256, 1, 1, 3, 3, kKind, 2>, 2>,
                              Choice<WarpgroupShape<256, 2, 1, 3, 3, kKind, 2>, 2>,
                              Choice<WarpgroupShape<256, 3, 1, 3, 3, kKind, 1>, 2>,
                              Choice<WarpgroupShape<256, 5, 1, 2, 3, kKind, 1, 2>, 1>,
                              Choice<WarpgroupShape<256, 9, 1, 2, 3, kKind, 1, 2>, 1>,
                              Choice<WarpgroupShape<256, 5, 2, 4, 5, kKind, 2>, 1>>(request);
}

template <Kind kKind>
cudaError_t launch_16bit(LaunchRequest request) {
  request.rows = std::min(request.rows, 72);
  if (request.max_shared_bytes < Shape<256, 3, 3, 2, 5, kKind>::kSharedBytes)
    return request.max_shared_bytes < Shape<256, 2, 3, 2, 3, kKind>::kSharedBytes
               ? launch<Shape<256, 2, 1, 2, 2, kKind>, 1>(request)
               : launch<Shape<256, 2, 3, 2, 3, kKind>, 1>(request);
  return launch_first_fitting<Choice<Shape<256, 1, 1, 4, 3, kKind>, 1>, Choice<Shape<256, 2, 1, 4, 3, kKind>, 1>,
                              Choice<Shape<256, 2, 3, 2, 6, kKind>, 1>, Choice<Shape<256, 3, 3, 2, 5, kKind>, 1>>(
      request);
}

cudaError_t launch_fp8(LaunchRequest request) {
  constexpr Kind kKind = Kind::kFp8;
  request.rows = std::min(request.rows, 72);
  if (request.max_shared_bytes < Shape<256, 3, 3, 2, 6, kKind>::kSharedBytes)
    return launch<Shape<256, 2, 1, 2, 2, kKind>, 1>(request);
  return launch_first_fitting<Choice<Shape<256, 1, 1, 4, 3, kKind>, 2>, Choice<Shape<256, 2, 1, 4, 3, kKind>, 2>,
                              Choice<Shape<256, 2, 3, 2, 6, kKind>, 1>, Choice<Shape<256, 3, 3, 2, 6, kKind>, 1>>(
      request);
}

}  // namespace

cudaError_t launch_head256(const LaunchRequest& request) {
  if (request.params.is_fp8) {
    if (request.has_wgmma && request.params.fp8_query) return launch_wgmma<Kind::kFp8Query>(request);
    return request.has_wgmma && request.rows > 16 ? launch_wgmma<Kind::kFp8>(request) : launch_fp8(request);
  }
  if (request.has_wgmma)
    return request.params.is_bf16 ? launch_wgmma<Kind::kBf16>(request) : launch_wgmma<Kind::kFp16>(request);
  return request.params.is_bf16 ? launch_16bit<Kind::kBf16>(request) : launch_16bit<Kind::kFp16>(request);
}

}  // namespace nwor
