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
declare -A jobs=() statuses=()

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

declare -A commands=([racecheck]=racecheck)
groups=$("$python" sanitize_cases.py) && [ -n "$groups" ] || exit 1
for group in $groups; do
  commands["memcheck $group"]="sanitize memcheck $python sanitize_cases.py $group"
done
for name in "${!commands[@]}"; do
  ${commands[$name]} >"$logs/$name" 2>&1 &
  jobs[$name]=$!
done

failed=0
for name in "${!jobs[@]}"; do
  wait "${jobs[$name]}"
  statuses[$name]=$?
done
for name in "${!jobs[@]}"; do
  # compute-sanitizer itself may crash as it starts, where others start beside it: once more, alone.
  if [ "${statuses[$name]}" -gt 128 ] && ! grep -q ' ran$' "$logs/$name"; then
    echo "== $name: compute-sanitizer crashed before its first case; again"
    ${commands[$name]} >"$logs/$name" 2>&1
    statuses[$name]=$?
  fi
  echo "== $name: exit status ${statuses[$name]}, $(grep -c ' ran$' "$logs/$name") cases," \
    "$(grep -E '(ERROR|RACECHECK) SUMMARY' "$logs/$name" || echo 'no summary')"
  if [ "${statuses[$name]}" -ne 0 ]; then
    grep -A 40 'COMPUTE-SANITIZER' "$logs/$name" | head -n 40
    failed=1
  fi
done
exit $failed
