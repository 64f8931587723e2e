// What follows from a row of kConfigs, for one kind of numbers.
#pragma once

#include <type_traits>

#include "verify/traits_sm80.cuh"
#include "verify/traits_sm90.cuh"

namespace nwor {

template <Config kConfig, Kind kKind>
using Traits =
    std::conditional_t<uses_wgmma(kConfig.mainloop), Sm90Traits<kConfig, kKind>, Sm80Traits<kConfig, kKind>>;

}  // namespace nwor
