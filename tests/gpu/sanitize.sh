#!/bin/bash
# Runs small cases of every launch path under compute-sanitizer, tool by tool. Each group of cases has
# a process of its own; all run at once.
# Usage: tests/gpu/sanitize.sh [python]
set -u
cd "$(dirname "$0")"
python=${1:-python3}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform
failed=0
for tool in memcheck synccheck racecheck; do
  declare -A jobs=()
  # One lane arrives at a barrier for its warp, after __syncwarp: racecheck has to be told to follow.
  options=()
  if [ $tool = racecheck ]; then options=(--racecheck-indirect-barrier-dependency yes); fi
  # Looking up functions that a driver does not have is no error of a kernel.
  for group in $("$python" sanitize_cases.py); do
    compute-sanitizer --tool "$tool" "${options[@]}" --error-exitcode 9 --report-api-errors no \
      --kernel-name kernel_substring=sm90 "$python" sanitize_cases.py "$group" \
      >"$logs/$group" 2>&1 &
    jobs[$group]=$!
  done
  for group in "${!jobs[@]}"; do
    wait "${jobs[$group]}"
    status=$?
    echo "== $tool $group: exit status $status, $(grep -c ' ran$' "$logs/$group") calls," \
      "$(grep -E '(ERROR|RACECHECK) SUMMARY' "$logs/$group" || echo 'no summary')"
    if [ $status -ne 0 ]; then
      tail -n 40 "$logs/$group"
      failed=1
    fi
  done
  unset jobs
done
exit $failed
