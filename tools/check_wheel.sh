#!/bin/sh
# Installs a wheel as a user would and asks it what it can do: check_wheel.sh WHEEL [PYTHON]
#
# The virtual environment is empty, so are the environment's variables but for those that reach a
# package index, and the working directory is not the source tree.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
wheel=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
python=$(command -v "${2:-python3}")
budget_mb=30

case $(basename "$wheel") in
  jax_b12x-*-manylinux_*.whl) ;;
  *)
    echo "$wheel has no manylinux tag: repair it with auditwheel" >&2
    exit 1
    ;;
esac
bytes=$(wc -c <"$wheel")
if [ "$bytes" -gt $((budget_mb * 1000 * 1000)) ]; then
  echo "$wheel has $bytes bytes, more than $budget_mb MB" >&2
  exit 1
fi

scratch=$(mktemp -d "${TMPDIR:-/tmp}/b12x-wheel.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/home" "$scratch/elsewhere"
cd "$scratch/elsewhere"

empty() { sh "$here/empty_env.sh" "$scratch/home" "$@"; }
empty "$python" -m venv "$scratch/venv"
empty "$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"
empty "$scratch/venv/bin/python" -m pip check

cuda=no
if "$python" -m zipfile -l "$wheel" | grep -q '/_b12x_cuda\.'; then cuda=yes; fi
empty "$scratch/venv/bin/python" - "$cuda" <<'PYTHON'
import pathlib
import sys

import jax_b12x
from jax_b12x import _native

where = pathlib.Path(jax_b12x.__file__).parent
assert sys.prefix in str(where), f"{where} is not the installed package"
assert (where / "py.typed").exists()
jax_b12x.register()
assert "b12x_moe" in _native.host().ffi_registry()[0]
# The CUDA half must be importable where there is neither a GPU nor CUDA.
assert (_native.cuda() is not None) == (sys.argv[1] == "yes")
PYTHON
empty "$scratch/venv/bin/python" -m jax_b12x doctor
echo "$(basename "$wheel"): $((bytes / 1000)) kB, CUDA half: $cuda, installs and runs in an empty environment"
