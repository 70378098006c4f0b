# The one list of what is compiled, and for what; every build system reads it from here.

# CPU kernels and the host runtime: no XLA types.
set(B12X_HOST_SOURCES
    ffi/host/add.cc
    ffi/host/all_reduce.cc
    ffi/host/dcp.cc
    ffi/host/dense_dot.cc
    ffi/host/dense_mlp.cc
    ffi/host/isa.cc
    ffi/host/kernels_baseline.cc
    ffi/host/moe.cc
    ffi/host/parallel.cc
    ffi/host/router.cc
    ffi/host/rows.cc
    ffi/host/scratch.cc
    ffi/host/tables.cc)
# A product and a sum stay two roundings unless the code says otherwise: every instruction set has to
# give the same bits.
set(B12X_HOST_FLAGS -ffp-contract=off)
# The same kernels for wider x86-64 processors; each is compiled with its own flags.
set(B12X_HOST_AVX2_SOURCES
    ffi/host/kernels_avx2.cc)
set(B12X_HOST_AVX2_FLAGS -mavx2 -mfma)
set(B12X_HOST_AVX512_SOURCES
    ffi/host/kernels_avx512.cc)
# GCC 12's own AVX-512 headers are what its -Wmaybe-uninitialized complains of; clang has no such.
set(B12X_HOST_AVX512_FLAGS
    -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mprefer-vector-width=512
    -Wno-unknown-warning-option -Wno-maybe-uninitialized)
# Pools, channels, workspaces and leases, which both modules have: no XLA types, no CUDA.
set(B12X_RUNTIME_SOURCES
    ffi/runtime/alarm.cc
    ffi/runtime/crew.cc
    ffi/runtime/meeting.cc
    ffi/runtime/pool.cc
    ffi/runtime/workspace.cc)
# What both modules have of pools and calls: each is compiled into both.
set(B12X_CHANNEL_SOURCES
    ffi/bindings/launch_log.cc
    ffi/bindings/pool.cc
    ffi/bindings/workspace.cc
    ffi/handlers/block_call.cc
    ffi/handlers/block_program.cc
    ffi/handlers/channel_call.cc
    ffi/handlers/dcp_operands.cc
    ffi/handlers/workspace_call.cc)
# The module `_b12x`: FFI handlers of the `cpu` platform.
set(B12X_MODULE_SOURCES
    ffi/module.cc
    ffi/handlers/channel_call_cpu.cc
    ffi/handlers/comm_cpu.cc
    ffi/handlers/dcp_cpu.cc
    ffi/handlers/dense_mlp_cpu.cc
    ffi/handlers/moe_block_cpu.cc
    ffi/handlers/moe_call_cpu.cc
    ffi/handlers/moe_cpu.cc
    ffi/handlers/router_cpu.cc)
# CUDA kernels and launchers, compiled by nvcc: no XLA types.
set(B12X_CUDA_SOURCES
    cuda/kernels/add.cu
    cuda/kernels/dcp_combine.cu
    cuda/kernels/dcp_gather.cu
    cuda/kernels/oneshot_all_reduce.cu
    cuda/kernels/oneshot_all_reduce_rms_norm.cu
    cuda/kernels/read_bandwidth.cu
    cuda/kernels/sm90_dense_mlp.cu
    cuda/kernels/sm90_moe_decode_fused.cu
    cuda/kernels/sm90_moe_decode_one_token.cu
    cuda/kernels/sm90_moe_decode_split.cu
    cuda/kernels/sm90_router.cu
    cuda/launch/dense_mlp.cc
    cuda/launch/moe_decode.cc
    cuda/launch/router.cc)
# The module `_b12x_cuda`: FFI handlers of the `CUDA` platform, compiled by the C++ compiler.
set(B12X_CUDA_MODULE_SOURCES
    ffi/module_cuda.cc
    ffi/handlers/channel_call_cuda.cc
    ffi/handlers/comm_cuda.cc
    ffi/handlers/dcp_cuda.cc
    ffi/handlers/dense_mlp_cuda.cc
    ffi/handlers/moe_block_cuda.cc
    ffi/handlers/moe_call_cuda.cc
    ffi/handlers/moe_cuda.cc
    ffi/handlers/read_bandwidth_cuda.cc
    ffi/handlers/router_cuda.cc
    ffi/runtime/captured_graph.cc
    ffi/runtime/peer_memory.cc
    ffi/runtime/workspace_cuda.cc)
# Options of nvcc, beside the architectures, the C++ standard and optimisation.
set(B12X_CUDA_FLAGS --expt-relaxed-constexpr -Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror)
# Compute capabilities that the CUDA sources are compiled for.
set(B12X_CUDA_ARCHITECTURES 90a)
