# LibTorch from a Python wheel, without its CMake package: that one insists on a CUDA toolkit when the wheel was built
# for CUDA. Defines longstraw::torch, and longstraw_torch_pch whose precompiled header the torch targets reuse.
#
# LONGSTRAW_TORCH (cache or environment) names the environment (a venv) that has torch; default: .venv of this checkout.

if(NOT LONGSTRAW_TORCH)
  if(DEFINED ENV{LONGSTRAW_TORCH})
    set(LONGSTRAW_TORCH $ENV{LONGSTRAW_TORCH})
  else()
    set(LONGSTRAW_TORCH ${CMAKE_SOURCE_DIR}/.venv)
  endif()
endif()
set(LONGSTRAW_TORCH ${LONGSTRAW_TORCH} CACHE PATH "Python environment that has torch")

execute_process(
  COMMAND ${LONGSTRAW_TORCH}/bin/python -c
          "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
  OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
if(failed OR NOT EXISTS ${torch_dir}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "No torch in ${LONGSTRAW_TORCH}; run ./run setup, or set LONGSTRAW_TORCH to an environment with torch 2.11")
endif()

set(use_cuda ${LONGSTRAW_CUDA})
if(LONGSTRAW_CUDA STREQUAL "AUTO")
  set(use_cuda OFF)
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND AND EXISTS ${torch_dir}/lib/libtorch_cuda.so)
    set(use_cuda ON)
  endif()
endif()

add_library(longstraw_torch INTERFACE)
add_library(longstraw::torch ALIAS longstraw_torch)
# The wheel carries headers of another version of fmt, which would be found before the system's and ask for functions that
# the system's library does not have.
get_target_property(fmt_include fmt::fmt INTERFACE_INCLUDE_DIRECTORIES)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/system_fmt)
file(CREATE_LINK ${fmt_include}/fmt ${CMAKE_BINARY_DIR}/system_fmt/fmt SYMBOLIC)
target_include_directories(longstraw_torch SYSTEM INTERFACE ${CMAKE_BINARY_DIR}/system_fmt)
target_include_directories(longstraw_torch SYSTEM INTERFACE ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include)
target_link_directories(longstraw_torch INTERFACE ${torch_dir}/lib)
target_link_libraries(longstraw_torch INTERFACE torch_cpu c10 Threads::Threads)
target_link_options(longstraw_torch INTERFACE -Wl,-rpath,${torch_dir}/lib)
if(use_cuda)
  find_package(CUDAToolkit REQUIRED)
  # Nothing of ours names a symbol of these: registering the CUDA backend is what they are linked for.
  target_link_libraries(longstraw_torch INTERFACE -Wl,--no-as-needed torch_cuda c10_cuda -Wl,--as-needed)
  target_compile_definitions(longstraw_torch INTERFACE LONGSTRAW_WITH_CUDA=1)
endif()
message(STATUS "torch: ${torch_dir} (CUDA: ${use_cuda})")

file(WRITE ${CMAKE_BINARY_DIR}/torch_pch.cpp "")
add_library(longstraw_torch_pch OBJECT ${CMAKE_BINARY_DIR}/torch_pch.cpp)
target_link_libraries(longstraw_torch_pch PUBLIC longstraw_options longstraw::torch)
target_precompile_headers(longstraw_torch_pch PRIVATE <torch/torch.h>)
