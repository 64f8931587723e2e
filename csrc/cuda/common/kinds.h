// What the tensor cores multiply.
#pragma once

namespace nwor {

// An fp8 cache is multiplied as fp16: both fp8 formats fit into it exactly. kFp8Query: the query is fp8 as well, and
// scores are products of fp8 numbers.
enum class Kind { kBf16, kFp16, kFp8, kFp8Query };

}  // namespace nwor
