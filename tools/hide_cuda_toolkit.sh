#!/bin/sh
# Runs a command where there is no CUDA toolkit: hide_cuda_toolkit.sh COMMAND [ARGUMENT...]
#
# A toolkit that is on PATH or named by a variable is taken from there. One in /usr/local is covered
# by an empty file system that only this command sees, which takes root's rights.
set -eu
here=$(cd "$(dirname "$0")" && pwd)

cleaned=
IFS=:
for folder in $PATH; do
  [ -x "$folder/nvcc" ] || cleaned=$cleaned${cleaned:+:}$folder
done
unset IFS
PATH=$cleaned
export PATH
unset CUDACXX CUDA_HOME CUDA_PATH

if [ -x /usr/local/cuda/bin/nvcc ] && [ -z "${B12X_TOOLKIT_HIDDEN:-}" ]; then
  B12X_TOOLKIT_HIDDEN=1 exec unshare --mount -- "$here/hide_cuda_toolkit.sh" "$@"
fi
if [ -n "${B12X_TOOLKIT_HIDDEN:-}" ]; then
  unset B12X_TOOLKIT_HIDDEN
  mount -t tmpfs -o ro none "$(readlink -f /usr/local/cuda)"
fi
if python3 "$here/find_nvcc.py" system >/dev/null 2>&1; then
  echo "hide_cuda_toolkit.sh: there still is a CUDA toolkit" >&2
  exit 1
fi
exec "$@"
