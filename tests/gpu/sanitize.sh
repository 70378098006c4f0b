#!/bin/bash
# Runs small cases of every launch path under compute-sanitizer's memcheck, each group of cases in a
# process of its own, all at once.
# Usage: tests/gpu/sanitize.sh [python]
set -u
cd "$(dirname "$0")"
python=${1:-python3}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform
declare -A jobs=()
for group in $("$python" sanitize_cases.py); do
  # Looking up functions that a driver does not have is no error of a kernel.
  compute-sanitizer --tool memcheck --error-exitcode 9 --report-api-errors no \
    --kernel-name kernel_substring=sm90 "$python" sanitize_cases.py "$group" \
    >"$logs/$group" 2>&1 &
  jobs[$group]=$!
done
failed=0
for group in "${!jobs[@]}"; do
  wait "${jobs[$group]}"
  status=$?
  echo "== memcheck $group: exit status $status, $(grep -c ' ran$' "$logs/$group") calls," \
    "$(grep 'ERROR SUMMARY' "$logs/$group" || echo 'no summary')"
  if [ $status -ne 0 ]; then
    grep -A 40 'COMPUTE-SANITIZER' "$logs/$group" | head -n 40
    failed=1
  fi
done
exit $failed
