# The CUDA half: kernels from cuda/ and their FFI handlers, in an extension of its own so that the
# package imports where there is no CUDA at all.
if(NOT B12X_CUDA_SOURCES)
  message(STATUS "jax_b12x: no CUDA sources")
  return()
endif()
