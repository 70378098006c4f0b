#!/bin/sh
# Runs a command as a fresh login would: empty_env.sh HOME COMMAND [ARGUMENT...]
#
# No variable survives but those that a package index is reached through.
set -eu
home=$1
shift
kept='PIP_(CERT|CONFIG_FILE|INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS)|SSL_CERT_(FILE|DIR)|[A-Za-z]+_(proxy|PROXY)'
for name in $(env | sed -n -E "s/^($kept)=.*/\1/p"); do
  eval "value=\$$name"
  set -- "$name=$value" "$@"
done
exec env -i HOME="$home" PATH=/usr/bin:/bin LANG=C.UTF-8 "$@"
