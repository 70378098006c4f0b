#!/bin/sh
# Makes the virtual environment, or mends one that an interruption left half made.
#   make_venv.sh PYTHON VENV
set -eu
python=$1
venv=$2

whole() { "$venv/bin/python" -c 'import pip' 2>/dev/null; }

if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
  echo "$venv exists and is no virtual environment: move it away, or say VENV=another-name"
  exit 1
fi
if ! whole; then
  "$python" -m venv --clear "$venv"
fi
if ! whole; then
  echo "$python -m venv made an environment without pip in $venv"
  exit 1
fi
mkdir -p "$venv/.b12x"
