#!/bin/sh
# `pip install ".[cuda13]"` on a machine without a CUDA toolkit: check_pip_cuda.sh [PYTHON] [EXTRAS]
#
# From a copy of the committed tree, in an empty virtual environment and an empty environment. The
# compiler must come from PyPI, and the CUDA half must be there and importable. EXTRAS is `[cuda13]`
# by default, which brings gigabytes of CUDA libraries; `''` builds the same wheel without them.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=$(command -v "${1:-python3}")
extras=${2-[cuda13]}

scratch=$(mktemp -d "${TMPDIR:-/tmp}/b12x-pip-cuda.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/home" "$scratch/elsewhere"
git clone --quiet "$here/.." "$scratch/clone"

run() { sh "$here/empty_env.sh" "$scratch/home" "$here/hide_cuda_toolkit.sh" "$@"; }
run "$python" -m venv "$scratch/venv"
cd "$scratch/clone"
echo "pip install \".$extras\""
run "$scratch/venv/bin/python" -m pip install --disable-pip-version-check --no-input ".$extras"
cd "$scratch/elsewhere"
run "$scratch/venv/bin/python" -m pip check
run "$scratch/venv/bin/python" -c '
import jax_b12x
from jax_b12x import _native
assert _native.cuda() is not None, "the CUDA half was not built"
print("CUDA half:", _native.cuda().__file__)'
run "$scratch/venv/bin/python" -m jax_b12x doctor
