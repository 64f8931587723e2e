// Defines the ops' schemas; part of libnwor_cpu.so, so that they exist exactly once in a process.
#include "schemas.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(nwor, m) {
  for (const char* schema : nwor::kAllSchemas) m.def(schema);
}
