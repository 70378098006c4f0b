# The CUDA half: kernels from cuda/ and their FFI handlers, in an extension of its own so that the
# package imports where there is no CUDA at all.

# Compute capabilities that the kernels are compiled for: this is the one list.
set(B12X_CUDA_ARCHITECTURES 90a)

if(NOT B12X_CUDA_MODULE_SOURCES)
  message(STATUS "jax_b12x: no CUDA sources, so no CUDA half")
  return()
endif()

# CMake would add flags for its own default architecture; ours are explicit.
set(CMAKE_CUDA_ARCHITECTURES OFF)
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "jax_b12x: no CUDA compiler (nvcc), so the CUDA half is left out; "
                 "put nvcc on PATH or set CUDACXX to build it")
  return()
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
find_package(CUDAToolkit 12.8 REQUIRED)

set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)

set(B12X_CUDA_FLAGS --expt-relaxed-constexpr -Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror)
foreach(arch IN LISTS B12X_CUDA_ARCHITECTURES)
  list(APPEND B12X_CUDA_FLAGS "-gencode=arch=compute_${arch},code=sm_${arch}")
endforeach()

# Without kernels the library would have no sources; handlers alone still make a module.
set(b12x_cuda_libraries CUDA::cudart_static)
if(B12X_CUDA_SOURCES)
  add_library(b12x_cuda_kernels STATIC ${B12X_CUDA_SOURCES})
  target_include_directories(b12x_cuda_kernels PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_options(b12x_cuda_kernels PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${B12X_CUDA_FLAGS}>")
  target_link_libraries(b12x_cuda_kernels PUBLIC CUDA::cudart_static)
  list(PREPEND b12x_cuda_libraries b12x_cuda_kernels)
endif()

# The handlers are C++: they see launchers and cuda_runtime_api.h, no device code.
nanobind_add_module(_b12x_cuda STABLE_ABI NB_STATIC ${B12X_CUDA_MODULE_SOURCES})
target_include_directories(_b12x_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(_b12x_cuda PRIVATE ${b12x_cuda_libraries} b12x_xla b12x_warnings)
install(TARGETS _b12x_cuda LIBRARY DESTINATION jax_b12x)
message(STATUS "jax_b12x: the CUDA half is built for sm_${B12X_CUDA_ARCHITECTURES} with ${CMAKE_CUDA_COMPILER}")
