#!/bin/bash
# Runs small cases of every launch path under compute-sanitizer: memcheck through XLA, each group of
# cases in a process of its own; racecheck without XLA, on a build that it can follow. All at once.
# Usage: tests/gpu/sanitize.sh [python]
set -u
cd "$(dirname "$0")"
python=${1:-python3}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform
declare -A jobs=()

sanitize() {  # tool, command ...
  # Looking up functions that a driver does not have is no error of a kernel.
  compute-sanitizer --tool "$1" --error-exitcode 9 --report-api-errors no \
    --kernel-name kernel_substring=sm90 "${@:2}"
}
racecheck() {
  local kernels=../../cuda/kernels
  nvcc -O3 -std=c++17 -lineinfo -I../.. --expt-relaxed-constexpr -cudart=static -DB12X_RACECHECK \
    -gencode=arch=compute_90a,code=sm_90a -o "$logs/decode_chain" moe_decode_chain.cu \
    $kernels/sm90_moe_decode_{fused,one_token,split}.cu ../../cuda/launch/moe_decode.cc || return
  sanitize racecheck "$logs/decode_chain" check
}

for group in $("$python" sanitize_cases.py); do
  sanitize memcheck "$python" sanitize_cases.py "$group" >"$logs/memcheck $group" 2>&1 &
  jobs["memcheck $group"]=$!
done
racecheck >"$logs/racecheck" 2>&1 &
jobs[racecheck]=$!

failed=0
for name in "${!jobs[@]}"; do
  wait "${jobs[$name]}"
  status=$?
  echo "== $name: exit status $status, $(grep -c ' ran$' "$logs/$name") cases," \
    "$(grep -E '(ERROR|RACECHECK) SUMMARY' "$logs/$name" || echo 'no summary')"
  if [ $status -ne 0 ]; then
    grep -A 40 'COMPUTE-SANITIZER' "$logs/$name" | head -n 40
    failed=1
  fi
done
exit $failed
