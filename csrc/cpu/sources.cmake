# The CPU library: the ops' schemas, the CPU bindings, and the attention kernels once per instruction set, so that one
# build runs on any machine of its architecture.
add_library(nwor_cpu SHARED
  schemas.cpp
  cpu/verify_attention.cpp
  cpu/slot_ops.cpp
  cpu/stage_window.cpp
  cpu/argmax_rows.cpp
  cpu/dispatch.cpp
  cpu/kernels_baseline.cpp)
target_include_directories(nwor_cpu PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/cpu")
target_compile_options(nwor_cpu PRIVATE -Wall -Wextra -Wno-psabi)

set(kernel_flags -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math)
set_source_files_properties(cpu/kernels_baseline.cpp PROPERTIES COMPILE_OPTIONS "${kernel_flags}")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  target_sources(nwor_cpu PRIVATE cpu/kernels_avx2.cpp cpu/kernels_avx512.cpp)
  target_compile_definitions(nwor_cpu PRIVATE NWOR_X86_KERNELS)
  set_source_files_properties(cpu/kernels_avx2.cpp PROPERTIES COMPILE_OPTIONS "${kernel_flags};-mavx2;-mfma;-mf16c")
  set_source_files_properties(cpu/kernels_avx512.cpp PROPERTIES COMPILE_OPTIONS
    "${kernel_flags};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma;-mf16c;-mprefer-vector-width=512")
endif()
nwor_library(nwor_cpu cpu "")
