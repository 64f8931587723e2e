// Head size 96. Columns: row tiles, row warps, groups, stages; then blocks per multiprocessor.
#include "verify_launch.cuh"

namespace nwor {
namespace {

template <Kind kKind>
cudaError_t launch_16bit(LaunchRequest request) {
  request.rows = std::min(request.rows, 80);
  return launch_first_fitting<Choice<Shape<96, 1, 1, 4, 4, kKind>, 2>, Choice<Shape<96, 3, 1, 4, 4, kKind>, 2>,
                              Choice<Shape<96, 3, 2, 2, 6, kKind>, 2>, Choice<Shape<96, 5, 2, 2, 6, kKind>, 2>>(request);
}

cudaError_t launch_fp8(LaunchRequest request) {
  request.rows = std::min(request.rows, 80);
  constexpr Kind kKind = Kind::kFp8;
  return launch_first_fitting<Choice<Shape<96, 1, 1, 4, 5, kKind>, 3>, Choice<Shape<96, 3, 1, 4, 5, kKind>, 3>,
                              Choice<Shape<96, 3, 2, 2, 8, kKind>, 3>, Choice<Shape<96, 5, 2, 2, 10, kKind>, 2>>(
      request);
}

}  // namespace

cudaError_t launch_head96(const LaunchRequest& request) {
  if (request.params.is_fp8) return launch_fp8(request);
  return request.params.is_bf16 ? launch_16bit<Kind::kBf16>(request) : launch_16bit<Kind::kFp16>(request);
}

}  // namespace nwor
