"""What a device can do."""

from types import SimpleNamespace

import jax
import pytest

from jax_b12x import capability


def test_a_cpu_device_is_named_after_its_processor():
    device = jax.devices("cpu")[0]
    found = capability.detect(device)
    assert found.platform == "cpu"
    assert found.name == capability.processor_name() != ""
    assert str(found) == found.name
    assert (found.sm, found.sm_count, found.cooperative_launch) == (0, 0, False)


def test_the_current_device_is_the_first():
    assert capability.current() == capability.detect(jax.devices()[0])


def test_a_device_that_is_neither_cpu_nor_nvidia_is_refused_by_name():
    tpu = SimpleNamespace(platform="tpu", client=SimpleNamespace(platform_version="libtpu 1"))
    with pytest.raises(ValueError, match=r"platform 'tpu' \(libtpu 1\).*CPU or an NVIDIA GPU"):
        capability.platform_of(tpu)
    amd = SimpleNamespace(platform="gpu", client=SimpleNamespace(platform_version="rocm 60000"))
    with pytest.raises(ValueError, match="rocm 60000"):
        capability.platform_of(amd)


def test_a_driver_error_names_the_function_and_the_code():
    def cuInit(flags):  # noqa: N802, it stands for the driver's function
        class Status(int):
            name = "CUDA_ERROR_NO_DEVICE"

        return (Status(100),)

    with pytest.raises(
        capability.CudaError, match=r"cuInit failed with CUDA_ERROR_NO_DEVICE \(100\)"
    ):
        capability._call(cuInit, 0)


@pytest.mark.gpu
def test_the_driver_and_jax_agree_about_a_gpu():
    device = jax.devices("cuda")[0]
    from_driver = capability.detect(device)
    from_jax = capability._from_jax(device)
    assert from_driver.l2_bytes > 0
    for field in ("sm", "sm_count", "cooperative_launch", "shared_memory_bytes", "name"):
        assert getattr(from_driver, field) == getattr(from_jax, field)


@pytest.mark.gpu
def test_a_gpu_reaches_itself():
    devices = jax.devices("cuda")
    matrix = capability.peer_access(devices)
    assert matrix is not None
    assert all(matrix[i][i] for i in range(len(devices)))
