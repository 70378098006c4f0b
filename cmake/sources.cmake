# The one list of C++ and CUDA sources; every build system reads it from here.
set(B12X_HOST_SOURCES
    ffi/host/moe_host.cc)
set(B12X_MODULE_SOURCES
    ffi/module.cc
    ffi/handlers/moe_cpu.cc)
set(B12X_CUDA_SOURCES)
set(B12X_CUDA_MODULE_SOURCES)
