#!/bin/bash
# What is to be run on a Hopper GPU after a change of the MoE kernels: their tests, compute-sanitizer,
# the kernels without XLA and with it. Results go to the folder named by the first argument.
# Usage: tests/gpu/moe.sh folder [python]
set -u
out=$(realpath "$1")
python=${2:-python3}
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD XLA_PYTHON_CLIENT_PREALLOCATE=false

nvcc -O3 -std=c++17 -I. --expt-relaxed-constexpr -cudart=static \
  -gencode=arch=compute_90a,code=sm_90a -o "$out/moe_decode_chain" tests/gpu/moe_decode_chain.cu \
  cuda/kernels/sm90_moe_decode_{fused,one_token,split}.cu cuda/launch/moe_decode.cc &&
  timeout 60 "$out/moe_decode_chain" 2>&1 | tee "$out/moe-chain.txt"
timeout 90 "$python" -m pytest -q -m gpu -p no:cacheprovider tests/test_moe_cuda.py 2>&1 |
  tee "$out/moe-tests.txt"
timeout 200 tests/gpu/sanitize.sh "$python" 2>&1 | tee "$out/moe-sanitize.txt"
bench() {
  timeout 90 "$python" -m jax_b12x bench moe --top-k 8 --seconds 0.5 "$@"
}
bench --experts 128 --shapes 2048x768,4096x1408 --tokens 1,8,64 --json "$out/moe-128.json" \
  --plot "$out/moe-128.png"
bench --experts 256 --shapes 6144x256 --tokens 1 --json "$out/moe-256.json" \
  --plot "$out/moe-256.png"
