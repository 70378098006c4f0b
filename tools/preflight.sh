#!/bin/sh
# Says what this machine lacks before anything is downloaded or compiled: preflight.sh PYTHON
#
# Everything that is missing is reported at once, with the Debian and Ubuntu packages that bring it.
set -u
python=$1
problems=
packages=

lacks() { # PACKAGE MESSAGE
  packages="$packages $1"
  problems="$problems
  - $2"
}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=
case $version in
  "")
    lacks "python3 python3-venv python3-dev" "Python 3.11 or newer: \`$python\` is not there or does not start"
    ;;
  3.[0-9] | 3.10 | [0-2].*)
    other=
    for candidate in python3.13 python3.12 python3.11; do
      if "$candidate" -c '' 2>/dev/null; then other=$candidate && break; fi
    done
    if [ -n "$other" ]; then
      problems="$problems
  - Python 3.11 or newer: \`$python\` is $version, but $other is here: add PYTHON=$other to the command"
    else
      lacks python3.11 "Python 3.11 or newer: \`$python\` is $version; with a newer one, add PYTHON=/its/path to the command"
    fi
    ;;
  *)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      lacks "python$version-venv" "Python's venv module (\`$python -m venv\` needs ensurepip)"
    "$python" -c '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
      lacks "python$version-dev" "Python's C headers (Python.h of $python)"
    ;;
esac

# The compiler that CMake will take: $CXX, else the first of its own list.
compiler=${CXX:-}
if [ -z "$compiler" ]; then
  for candidate in c++ g++ clang++; do
    if command -v "$candidate" >/dev/null 2>&1; then compiler=$candidate && break; fi
  done
fi
if [ -z "$compiler" ]; then
  lacks g++ "a C++ compiler (g++ or clang++)"
else
  # Unquoted on purpose: CXX may be "ccache g++".
  probe=$(mktemp -d "${TMPDIR:-/tmp}/b12x.XXXXXX") || exit 1
  echo '#include <optional>
int main() { if constexpr (sizeof(std::optional<int>) > 0) return 0; }' >"$probe/probe.cc"
  if ! $compiler -std=c++17 -o "$probe/probe" "$probe/probe.cc" >"$probe/log" 2>&1; then
    lacks g++ "a C++17 compiler: \`$compiler\` does not compile a small C++17 program: $(grep -m 1 error "$probe/log" | cut -c 1-200)"
  fi
  rm -rf "$probe"
fi

[ -n "$problems" ] || exit 0
{
  echo "Missing on this machine:$problems"
  if [ -n "$packages" ]; then
    echo
    echo "On Debian or Ubuntu:  sudo apt-get install$packages"
  fi
  echo "Then run the same command again."
} >&2
exit 1
