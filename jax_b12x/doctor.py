"""The doctor's report: what is installed, what the devices can do, which paths run here."""

from __future__ import annotations

import dataclasses
import pathlib
import platform
import re
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from jax_b12x import __version__, _native, capability, config, moe
from jax_b12x.capability import DeviceCapability

# What the paths are shown for: decode, small batches and prefill of a layer of a common size.
_NUM_TOKENS = (1, 8, 64, 512)


@dataclasses.dataclass(frozen=True)
class Device:
    """One device that JAX uses.

    Attributes:
      name: as JAX prints it.
      capability: what it can do, or ``None`` where this package has nothing for its platform.
    """

    name: str
    capability: DeviceCapability | None


@dataclasses.dataclass(frozen=True)
class Path:
    """How a recipe runs here for one number of tokens.

    Attributes:
      recipe: the recipe's name.
      num_tokens: tokens of the call.
      implementation: the path, or ``"none"``.
      overlap: what may run beside it.
      reasons: the plan's reasons, or the error that stands in the way.
    """

    recipe: str
    num_tokens: int
    implementation: str
    overlap: str
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
      versions: version of each part by name; ``"not installed"`` where it is missing.
      ffi_api_built: the XLA FFI API version that the host extension was compiled with, or ``None``.
      ffi_api_running: that of the installed jaxlib, or ``None`` if its headers do not say.
      processor: the processor's name.
      host_isas: instruction sets that were built and that this processor has, narrowest first.
      host_isa: the value of ``B12X_HOST_ISA``.
      cuda_built: whether the CUDA half is there.
      cuda_architectures: what it was compiled for.
      devices: the devices that JAX uses.
      peer_access: who reaches whose memory among the GPUs, or ``None``.
      paths: how each recipe runs on the first device.
      environment: the variables of this package that are set, by name.
      problems: what keeps something from working, a sentence each with the remedy.
      hints: what could be better, a sentence each.
    """

    versions: dict[str, str]
    ffi_api_built: tuple[int, int] | None
    ffi_api_running: tuple[int, int] | None
    processor: str
    host_isas: tuple[str, ...]
    host_isa: str
    cuda_built: bool
    cuda_architectures: tuple[str, ...]
    devices: tuple[Device, ...]
    peer_access: tuple[tuple[bool, ...], ...] | None
    paths: tuple[Path, ...]
    environment: dict[str, str]
    problems: tuple[str, ...]
    hints: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether the package can run here."""
        return not self.problems


def examine() -> Diagnosis:
    """Looks at this process's environment; starts JAX's backend."""
    problems: list[str] = []
    hints: list[str] = []

    host: Any = None
    try:
        host = _native.host()
    except _native.NativeError as error:
        problems.append(str(error))
    cuda: Any = None
    try:
        cuda = _native.cuda()
    except ImportError as error:
        problems.append(f"the CUDA half is built but cannot be loaded: {error}")

    built = tuple(host.XLA_FFI_API_VERSION) if host else None
    running = ffi_api_of_jaxlib()
    if built and running and (built[0] != running[0] or built[1] > running[1]):
        problems.append(
            f"the extension was built for XLA FFI API {_dotted(built)}, jaxlib "
            f"{metadata.version('jaxlib')} has {_dotted(running)}: rebuild it with "
            "`pip install --no-build-isolation .`"
        )

    for variable in config.ALL:
        try:
            variable.get()
        except config.ConfigError as error:
            problems.append(str(error))

    devices: list[Device] = []
    try:
        capability.devices()
        jax_devices = jax.local_devices()
    except RuntimeError as error:
        jax_devices = []
        problems.append(f"JAX does not start its backend: {error}")
    for device in jax_devices:
        try:
            devices.append(Device(str(device), capability.detect(device)))
        except ValueError:
            devices.append(Device(str(device), None))
    gpus = [
        device
        for device, found in zip(jax_devices, devices, strict=True)
        if found.capability and found.capability.platform == "cuda"
    ]
    if gpus and cuda is None:
        problems.append(
            "JAX uses a GPU and the CUDA half is not built, so every call fails there: install "
            "nvcc (CUDA 12.8 or newer) and build again, or set JAX_PLATFORMS=cpu"
        )
    if gpus and capability.cuda_driver() is None:
        hints.append("cuda-python is not installed; `pip install cuda-bindings` brings it")

    paths: list[Path] = []
    if devices and devices[0].capability is not None:
        missing = None
        if host is None:
            missing = "the host extension is missing here, so that every call fails"
        elif devices[0].capability.platform == "cuda" and cuda is None:
            missing = "the CUDA half is missing here, so that every call fails on a GPU"
        paths = [
            _path(recipe, num_tokens, devices[0].capability, missing)
            for recipe in moe.RECIPES
            for num_tokens in _NUM_TOKENS
        ]

    try:
        host_isa = config.HOST_ISA.get()
    except config.ConfigError:
        host_isa = "invalid"
    return Diagnosis(
        versions=_versions(),
        ffi_api_built=built,
        ffi_api_running=running,
        processor=capability.processor_name(),
        host_isas=tuple(host.host_isas()) if host else (),
        host_isa=host_isa,
        cuda_built=cuda is not None,
        cuda_architectures=tuple(getattr(cuda, "CUDA_ARCHITECTURES", ())),
        devices=tuple(devices),
        peer_access=capability.peer_access(gpus) if len(gpus) > 1 else None,
        paths=tuple(paths),
        environment=config.set_variables(),
        problems=tuple(problems),
        hints=tuple(hints),
    )


def ffi_api_of_jaxlib() -> tuple[int, int] | None:
    """Returns the XLA FFI API version of the installed jaxlib, read from its headers."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    return (int(found["MAJOR"]), int(found["MINOR"])) if len(found) == 2 else None


def _path(recipe: str, num_tokens: int, device: DeviceCapability, missing: str | None) -> Path:
    if missing is not None:
        return Path(recipe, num_tokens, "none", "", (missing,))
    try:
        plan = moe.plan(
            recipe,
            num_tokens=num_tokens,
            hidden=2048,
            intermediate=768,
            num_experts=128,
            top_k=8,
            dtype=jnp.bfloat16,
            device=device,
        )
    except ValueError as error:
        return Path(recipe, num_tokens, "none", "", (str(error),))
    return Path(recipe, num_tokens, plan.implementation, plan.overlap, plan.reasons)


def _versions() -> dict[str, str]:
    # Itself it knows without being installed: a source tree or Bazel's files may be what runs.
    versions = {"python": platform.python_version(), "jax_b12x": __version__}
    for name in ("jax", "jaxlib", "numpy", "ml_dtypes", "flax", "cuda-bindings"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    versions["CUDA driver"] = capability.driver_version() or "none"
    return versions


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
