"""What may be on a GPU beside a JAX program: products on another stream, multiprocessors held."""

import contextlib
import ctypes
import pathlib
import sys
import threading

import jax
import numpy as np

try:
    from cuda.bindings import driver, nvrtc
except ModuleNotFoundError:  # pytest imports this file where nobody has a GPU, too
    driver = nvrtc = None

_HOLD = r"""
extern "C" __global__ void hold(unsigned long long nanoseconds) {
  extern __shared__ char taken[];
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
"""
_HOLD_SHARED_BYTES = 220 << 10  # of the 227 KB that a block may have: nothing fits beside it


def checked(result):
    status, *values = result
    assert int(status) == 0, status
    return values[0] if len(values) == 1 else tuple(values)


def use_context():
    """Makes the context current that JAX uses too."""
    jax.devices()
    checked(driver.cuInit(0))
    device = checked(driver.cuDeviceGet(0))
    checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))


class Holder:
    """Keeps other kernels off some multiprocessors for a while."""

    def __init__(self):
        use_context()
        program = checked(nvrtc.nvrtcCreateProgram(_HOLD.encode(), b"hold.cu", 0, [], []))
        checked(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90"]))
        image = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, image))
        self._module = checked(driver.cuModuleLoadData(image))
        self._kernel = checked(driver.cuModuleGetFunction(self._module, b"hold"))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(self._kernel, attribute, _HOLD_SHARED_BYTES))
        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = checked(driver.cuStreamCreate(flag))

    def hold(self, multiprocessors, seconds):
        """Takes multiprocessors; returns at once."""
        use_context()
        nanoseconds = np.array([int(seconds * 1e9)], np.uint64)
        arguments = np.array([nanoseconds.ctypes.data], np.uint64)
        checked(
            driver.cuLaunchKernel(
                self._kernel,
                *(multiprocessors, 1, 1),
                *(32, 1, 1),
                _HOLD_SHARED_BYTES,
                self._stream,
                arguments.ctypes.data,
                0,
            )
        )

    def is_held(self):
        return int(driver.cuStreamQuery(self._stream)[0]) != 0

    def wait(self):
        checked(driver.cuStreamSynchronize(self._stream))


def _find_cublas():
    places = [pathlib.Path(p) / "nvidia" for p in sys.path]
    places.append(pathlib.Path("/usr/local/cuda/lib64"))
    for place in places:
        for path in sorted(place.rglob("libcublas.so.*")) if place.is_dir() else ():
            return path
    raise FileNotFoundError("there is no libcublas")


@contextlib.contextmanager
def products(size=2048):
    """Runs bfloat16 products of two size x size matrices on a stream of their own, without end.

    Yields a function that returns how many have been submitted.
    """
    use_context()
    library = ctypes.CDLL(str(_find_cublas()))
    stream = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    matrices = [checked(driver.cuMemAlloc(2 * size * size)) for _ in range(3)]
    for matrix in matrices:
        checked(driver.cuMemsetD16(matrix, 0x3F80, size * size))  # ones
    handle = ctypes.c_void_p()
    assert library.cublasCreate_v2(ctypes.byref(handle)) == 0
    assert library.cublasSetStream_v2(handle, ctypes.c_void_p(int(stream))) == 0
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    bf16, compute_32f = 14, 68
    a, b, c = (ctypes.c_void_p(int(matrix)) for matrix in matrices)
    count = [0]
    stop = threading.Event()
    failures = []

    def multiply():
        status = library.cublasGemmEx(
            handle, 0, 0, size, size, size,
            ctypes.byref(one), a, bf16, size, b, bf16, size,
            ctypes.byref(zero), c, bf16, size, compute_32f, -1,
        )  # fmt: skip
        if status != 0:
            failures.append(status)
            stop.set()

    def run():
        use_context()
        while not stop.is_set():
            for _ in range(16):
                multiply()
            count[0] += 16
            checked(driver.cuStreamSynchronize(stream))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: count[0]
    finally:
        stop.set()
        thread.join()
        library.cublasDestroy_v2(handle)
        for matrix in matrices:
            driver.cuMemFree(matrix)
        assert not failures, f"cublasGemmEx failed with {failures[0]}"
