# The CUDA half: kernels from cuda/ and their FFI handlers, in an extension of its own so that the
# package imports where there is no CUDA at all.

if(NOT B12X_CUDA_MODULE_SOURCES)
  message(STATUS "jax_b12x: no CUDA sources, so no CUDA half")
  return()
endif()

# tools/find_nvcc.py knows where a compiler may be; a source that was named never falls back.
string(TOLOWER "${B12X_CUDA}" b12x_cuda_source)
if(b12x_cuda_source MATCHES "^(on|true|yes|1)$")
  set(b12x_cuda_source auto)
endif()
if(NOT b12x_cuda_source MATCHES "^(auto|system|pypi)$")
  message(FATAL_ERROR "B12X_CUDA is '${B12X_CUDA}'; it must be auto, system, pypi or off")
endif()
execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/find_nvcc.py ${b12x_cuda_source}
  RESULT_VARIABLE b12x_nvcc_missing OUTPUT_VARIABLE b12x_toolkit ERROR_VARIABLE b12x_nvcc_tried
  ERROR_STRIP_TRAILING_WHITESPACE)
if(b12x_nvcc_missing)
  if(NOT b12x_cuda_source STREQUAL "auto")
    message(FATAL_ERROR "B12X_CUDA is ${b12x_cuda_source}, and there is no such compiler: ${b12x_nvcc_tried}")
  endif()
  message(STATUS "jax_b12x: no CUDA compiler (nvcc), so the CUDA half is left out; looked for it: "
                 "${b12x_nvcc_tried}")
  return()
endif()
foreach(field source nvcc version include cudart_static)
  string(JSON b12x_toolkit_${field} GET "${b12x_toolkit}" ${field})
endforeach()

# CMake would add flags for its own default architecture; ours are explicit.
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_COMPILER ${b12x_toolkit_nvcc})
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
# nvcc looks for its libraries in lib64; the packages from PyPI have lib. CMake tries the compiler by
# linking a program with it; we link with the C++ compiler. FindCUDAToolkit does not know the packages.
get_filename_component(b12x_cudart_folder ${b12x_toolkit_cudart_static} DIRECTORY)
set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -L${b12x_cudart_folder}")
enable_language(CUDA)

find_package(Threads REQUIRED)
add_library(b12x_cudart INTERFACE)
target_include_directories(b12x_cudart SYSTEM INTERFACE ${b12x_toolkit_include})
target_link_libraries(b12x_cudart INTERFACE ${b12x_toolkit_cudart_static} Threads::Threads
                                            ${CMAKE_DL_LIBS} rt)

set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)

foreach(arch IN LISTS B12X_CUDA_ARCHITECTURES)
  list(APPEND B12X_CUDA_FLAGS "-gencode=arch=compute_${arch},code=sm_${arch}")
endforeach()

# Without kernels the library would have no sources; handlers alone still make a module.
set(b12x_cuda_libraries b12x_cudart)
if(B12X_CUDA_SOURCES)
  add_library(b12x_cuda_kernels STATIC ${B12X_CUDA_SOURCES})
  target_include_directories(b12x_cuda_kernels PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_options(b12x_cuda_kernels PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${B12X_CUDA_FLAGS}>")
  target_link_libraries(b12x_cuda_kernels PUBLIC b12x_cudart)
  list(PREPEND b12x_cuda_libraries b12x_cuda_kernels)
endif()

# The handlers are C++: they see launchers and cuda_runtime_api.h, no device code.
# Both modules have a class of pools: a domain of its own keeps nanobind from mixing them up.
nanobind_add_module(_b12x_cuda STABLE_ABI NB_STATIC NB_DOMAIN b12x_cuda
                    ${B12X_CUDA_MODULE_SOURCES} ${B12X_CHANNEL_SOURCES})
target_include_directories(_b12x_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(_b12x_cuda PRIVATE ${b12x_cuda_libraries} b12x_runtime b12x_xla b12x_warnings)
install(TARGETS _b12x_cuda LIBRARY DESTINATION jax_b12x)
message(STATUS "jax_b12x: the CUDA half is built for sm_${B12X_CUDA_ARCHITECTURES} with ${b12x_toolkit_nvcc} "
               "(${b12x_toolkit_version}, ${b12x_toolkit_source})")
