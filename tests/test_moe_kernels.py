"""The MoE decode kernels thread by thread on a CPU, against a plain reference.

Roles, barriers, rings and late copies as on a GPU, on small grids; what is left out is a GPU's
memory model. A kernel that would hang fails here.
"""

import concurrent.futures
import os
import pathlib
import platform
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = ("decode_kernels.cc", "simt.cc")
KERNELS = (
    "sm90_moe_decode_fused.cu",
    "sm90_moe_decode_one_token.cu",
    "sm90_moe_decode_split.cu",
)
# A GPU's headers, and what stands in for them.
CUDA_HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-Wno-attributes")
SHARED = "extern __shared__ __align__(128) char shared[];"


def test_decode_kernels_agree_with_a_plain_reference_thread_by_thread(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("it takes a C++ compiler, and fibers are switched in x86-64 assembly")
    for header in (ROOT / "cuda/ptx").glob("*.cuh"):
        shadow(tmp_path / "cuda/ptx" / header.name, "ptx.h")
    for header in CUDA_HEADERS:
        shadow(tmp_path / header, "cuda.h")
    sources = [ROOT / "tests/moe_simt" / name for name in SOURCES]
    for name in KERNELS:
        text = (ROOT / "cuda/kernels" / name).read_text()
        assert SHARED in text
        assert "asm" not in text
        sources.append(tmp_path / name.replace(".cu", ".cc"))
        sources[-1].write_text(text.replace(SHARED, "char* shared = simt::DynamicShared();"))
    include = [f"-I{tmp_path}", f"-I{ROOT}", "-include", str(ROOT / "tests/moe_simt/ptx.h")]

    def compile_one(source):
        target = tmp_path / f"{source.stem}.o"
        subprocess.run([compiler, *FLAGS, *include, "-c", source, "-o", target], check=True)
        return target

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = tmp_path / "decode_kernels"
    subprocess.run([compiler, "-o", program, *objects], check=True)
    ran = subprocess.run([program, "12"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.endswith("all agree\n")


def shadow(path, header):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#include "tests/moe_simt/{header}"\n')
