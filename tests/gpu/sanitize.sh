#!/bin/bash
# Runs a small case of every launch path under compute-sanitizer: memcheck, then racecheck.
# Usage: tests/gpu/sanitize.sh [python]
set -eu
cd "$(dirname "$0")"
python=${1:-python3}
for tool in memcheck racecheck; do
  echo "== $tool"
  XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform \
    compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-regex kns=sm90 \
    "$python" sanitize_cases.py
done
