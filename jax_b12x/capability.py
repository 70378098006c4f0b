"""What the devices can do, as values that a plan can be made from and printed with.

Facts come from JAX and, on NVIDIA GPUs, from the CUDA driver through cuda-python. Asking the driver
creates no context and takes no memory on a device.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
import platform as platform_module
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import jax

Platform = Literal["cpu", "cuda"]

# Most dynamic shared memory of one block in bytes, by compute capability; CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability". Read where cuda-python is missing.
_SHARED_MEMORY_BYTES = {
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    103: 227 << 10,
    110: 227 << 10,
    120: 99 << 10,
    121: 99 << 10,
}


class CudaError(RuntimeError):
    """A call to the CUDA driver failed."""


@dataclasses.dataclass(frozen=True)
class DeviceCapability:
    """The facts about a device that a launch plan depends on; hashable.

    Attributes:
      platform: ``"cpu"`` or ``"cuda"``.
      sm: compute capability times ten (90 for Hopper); 0 on CPU.
      sm_count: streaming multiprocessors; 0 on CPU.
      cooperative_launch: whether a grid can be launched that is resident as a whole, or not at all.
      shared_memory_bytes: the most shared memory that one block may ask for; 0 on CPU.
      l2_bytes: size of the L2 cache; 0 on CPU, and where cuda-python is not installed.
      name: the device's name, for people.
    """

    platform: Platform
    sm: int = 0
    sm_count: int = 0
    cooperative_launch: bool = False
    shared_memory_bytes: int = 0
    l2_bytes: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if self.platform not in ("cpu", "cuda"):
            raise ValueError(f"platform is {self.platform!r}; it must be 'cpu' or 'cuda'")

    def __str__(self) -> str:
        """Returns the facts in one line."""
        if self.platform == "cpu":
            return self.name or "CPU"
        cooperative = "cooperative launch" if self.cooperative_launch else "no cooperative launch"
        return f"{self.name or 'GPU'} (sm_{self.sm}, {self.sm_count} SMs, {cooperative})"


CPU = DeviceCapability("cpu")

# Devices that a plan can be asked for where they are not, by the name that the command line takes.
# SM counts and sizes are those that the CUDA driver reports.
KNOWN: dict[str, DeviceCapability] = {
    "cpu": CPU,
    "h100": DeviceCapability("cuda", 90, 132, True, 227 << 10, 50 << 20, "NVIDIA H100 SXM"),
    "h200": DeviceCapability("cuda", 90, 132, True, 227 << 10, 60 << 20, "NVIDIA H200"),
}


def devices() -> list[jax.Device]:
    """Returns ``jax.devices()``; starts JAX's backend.

    Raises:
      RuntimeError: the backend does not start.
    """
    try:
        return jax.devices()
    except AssertionError:
        # All that JAX says where it is told to use CUDA alone and has no plugin for it.
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined, unused-ignore]
        raise RuntimeError(
            f"JAX has none of the platforms it is told to use (JAX_PLATFORMS is {platforms!r}); "
            "`pip install 'jax[cuda13]'` brings CUDA, "
            "JAX_PLATFORMS=cpu does without"
        ) from None


def current() -> DeviceCapability:
    """Returns what the process's default device can do: the first of ``jax.devices()``.

    Raises:
      RuntimeError: JAX's backend does not start.
      ValueError: it is neither a CPU nor an NVIDIA GPU.
    """
    return detect(devices()[0])


@functools.cache
def detect(device: jax.Device) -> DeviceCapability:
    """Returns what a device of this process can do.

    Raises:
      ValueError: it is neither a CPU nor an NVIDIA GPU.
    """
    kind = platform_of(device)
    if kind == "cpu":
        return dataclasses.replace(CPU, name=processor_name())
    driver = cuda_driver()
    return _from_jax(device) if driver is None else _from_driver(device, driver)


def platform_of(device: jax.Device) -> Platform:
    """Returns the platform of a device in this package's words.

    Raises:
      ValueError: it is neither a CPU nor an NVIDIA GPU.
    """
    if device.platform == "cpu":
        return "cpu"
    if device.platform in ("gpu", "cuda") and "rocm" not in device.client.platform_version.lower():
        return "cuda"
    raise ValueError(
        f"device {device} has the platform {device.platform!r} "
        f"({device.client.platform_version}); it must be a CPU or an NVIDIA GPU"
    )


def processor_name() -> str:
    """Returns the name of this machine's processor, or of its architecture if it says no name."""
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform_module.machine() or "CPU"


@functools.cache
def cuda_driver() -> ModuleType | None:
    """Returns cuda-python's driver module, initialised; ``None`` without it or without a driver."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
    try:
        _call(driver.cuInit, 0)
    except Exception:  # cuda-python's own error where there is no driver has no public base class
        return None
    return driver


def driver_version() -> str | None:
    """Returns the newest CUDA version that the driver supports; ``None`` without a driver."""
    driver = cuda_driver()
    if driver is None:
        return None
    version = int(_call(driver.cuDriverGetVersion))
    return f"{version // 1000}.{version % 1000 // 10}"


def peer_access(devices: Sequence[jax.Device]) -> tuple[tuple[bool, ...], ...] | None:
    """Returns which CUDA device can map which other's memory; ``None`` if no driver can be asked.

    Args:
      devices: CUDA devices of this process.

    Returns:
      ``matrix[i][j]``: whether ``devices[i]`` can read and write the memory of ``devices[j]``. A
      device reaches itself.
    """
    driver = cuda_driver()
    if driver is None:
        return None
    handles = [_call(driver.cuDeviceGet, _ordinal(device)) for device in devices]
    return tuple(
        tuple(
            a is b or bool(_call(driver.cuDeviceCanAccessPeer, handles[i], handles[j]))
            for j, b in enumerate(devices)
        )
        for i, a in enumerate(devices)
    )


def _from_driver(device: jax.Device, driver: ModuleType) -> DeviceCapability:
    handle = _call(driver.cuDeviceGet, _ordinal(device))

    def attribute(name: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call(driver.cuDeviceGetAttribute, key, handle))

    return DeviceCapability(
        platform="cuda",
        sm=10 * attribute("COMPUTE_CAPABILITY_MAJOR") + attribute("COMPUTE_CAPABILITY_MINOR"),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        cooperative_launch=bool(attribute("COOPERATIVE_LAUNCH")),
        shared_memory_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        name=device.device_kind,
    )


def _from_jax(device: jax.Device) -> DeviceCapability:
    """Returns what JAX and the programming guide say, for an environment without cuda-python."""
    major, minor = str(device.compute_capability).split(".")
    sm = 10 * int(major) + int(minor)
    if sm not in _SHARED_MEMORY_BYTES:
        warnings.warn(
            f"cuda-python is not installed and sm_{sm} is not known, so 99 KiB of shared memory "
            "are assumed; `pip install cuda-bindings` lets the driver say",
            stacklevel=3,
        )
    return DeviceCapability(
        platform="cuda",
        sm=sm,
        sm_count=int(device.core_count),
        cooperative_launch=sm >= 60,
        shared_memory_bytes=_SHARED_MEMORY_BYTES.get(sm, 99 << 10),
        name=device.device_kind,
    )


def _ordinal(device: jax.Device) -> int:
    """Returns the CUDA ordinal of a device in this process (after ``CUDA_VISIBLE_DEVICES``)."""
    ordinal = device.local_hardware_id
    if ordinal is None:
        raise ValueError(f"device {device} is not a device of this process")
    return int(ordinal)


def _call(function: Any, *args: Any) -> Any:
    """Calls a driver function of cuda-python and returns its value.

    Raises:
      CudaError: it returned an error code; the message names the function and the code.
    """
    status, *values = function(*args)
    if int(status) != 0:
        raise CudaError(f"{function.__name__} failed with {status.name} ({int(status)})")
    return values[0] if values else None
