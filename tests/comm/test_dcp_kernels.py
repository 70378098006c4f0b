"""The kernels of 2 to 16 ranks against the host: on one GPU, and thread by thread on a CPU."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "simt"))

from translate import translate, translate_tree  # noqa: E402

CUDA = (
    "tests/comm/dcp_kernels.cu",
    "cuda/kernels/dcp_combine.cu",
    "cuda/kernels/dcp_gather.cu",
)
HOST = ("ffi/host/all_reduce.cc", "ffi/host/dcp.cc")
FLAGS = ("-std=c++17", "-O1")


def run(program, *arguments):
    ran = subprocess.run(
        [str(program), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.endswith("all agree\n")


@pytest.mark.gpu
def test_kernels_of_2_to_16_ranks_agree_with_the_host_on_one_gpu(tmp_path):
    """No mesh of JAX has several ranks on a device."""
    found = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "find_nvcc.py"), "auto"],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        pytest.skip(f"there is no CUDA compiler: {found.stderr}")
    program = tmp_path / "dcp_kernels"
    nvcc = json.loads(found.stdout)["nvcc"]
    options = ("-arch=native", "-cudart=static", "--expt-relaxed-constexpr", f"-I{ROOT}")
    sources = [str(ROOT / source) for source in (*CUDA, *HOST)]
    subprocess.run(
        [nvcc, *FLAGS, *options, "-Xcompiler=-ffp-contract=off", "-o", program, *sources],
        check=True,
    )
    run(program)


def test_kernels_of_2_to_16_ranks_agree_with_the_host_thread_by_thread(tmp_path):
    """Blocks, warps, slots and epochs as on a GPU; what is left out is a GPU's memory model."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    sources = translate_tree(ROOT, list(CUDA), tmp_path)
    program = tmp_path / "dcp_kernels"
    subprocess.run(
        [compiler, *FLAGS, "-ffp-contract=off", "-Wno-attributes", "-o", program]
        + [f"-I{folder}" for folder in (ROOT / "tests/simt/include", tmp_path, ROOT)]
        + [*sources, *(ROOT / source for source in (*HOST, "tests/simt/simt.cc"))],
        check=True,
    )
    run(program, "small")


@pytest.mark.parametrize("text", ["K<<<1, 2, 3, s>>>(p);", "__shared__ int x;", 'asm("trap;");'])
def test_what_the_emulation_does_not_know_is_refused(text):
    with pytest.raises(ValueError, match="is not known to the emulation"):
        translate(text)
