"""The kernels with up to 16 ranks on one GPU: no mesh of JAX has several ranks on a device."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = (
    "tests/comm/dcp_on_one_gpu.cu",
    "cuda/kernels/dcp_combine.cu",
    "cuda/kernels/dcp_gather.cu",
    "ffi/host/all_reduce.cc",
    "ffi/host/dcp.cc",
)


@pytest.mark.gpu
def test_kernels_of_2_to_16_ranks_agree_with_the_host(tmp_path):
    found = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "find_nvcc.py"), "auto"],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        pytest.skip(f"there is no CUDA compiler: {found.stderr}")
    program = tmp_path / "dcp_on_one_gpu"
    subprocess.run(
        [
            json.loads(found.stdout)["nvcc"],
            *("-O2", "-std=c++17", "-arch=native", "-cudart=static"),
            *("--expt-relaxed-constexpr", "-Xcompiler=-ffp-contract=off", f"-I{ROOT}"),
            *("-o", str(program)),
            *(str(ROOT / source) for source in SOURCES),
        ],
        check=True,
    )
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all agree" in ran.stdout
