# The CPU half: kernels and runtime without XLA types, one library. On x86-64 some files are compiled
# for wider instruction sets; which of them runs is decided when the program runs.
add_library(b12x_host STATIC ${B12X_HOST_SOURCES})
target_include_directories(b12x_host PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(b12x_host PRIVATE b12x_warnings)
target_compile_options(b12x_host PRIVATE ${B12X_HOST_FLAGS})

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_sources(b12x_host PRIVATE ${B12X_HOST_AVX2_SOURCES} ${B12X_HOST_AVX512_SOURCES})
  set_source_files_properties(${B12X_HOST_AVX2_SOURCES} PROPERTIES
    COMPILE_OPTIONS "${B12X_HOST_AVX2_FLAGS}")
  set_source_files_properties(${B12X_HOST_AVX512_SOURCES} PROPERTIES
    COMPILE_OPTIONS "${B12X_HOST_AVX512_FLAGS}")
endif()
