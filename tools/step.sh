#!/bin/sh
# One step of the Makefile, quietly: LOG_DIR=... step.sh NAME MESSAGE COMMAND [ARGUMENT...]
#
# Prints the message and how long the command took. What the command prints goes to a log, of which
# the part around the first error is shown when the command fails. VERBOSE=1 shows it all instead.
set -u
name=$1
message=$2
shift 2

if [ "${VERBOSE:-0}" = 1 ]; then
  echo "==> $message"
  exec "$@"
fi

mkdir -p "$LOG_DIR" || exit
log=$LOG_DIR/$name.log
start=$(date +%s)
elapsed() { echo "$(($(date +%s) - start)) s"; }

ticker=
if [ -t 1 ]; then
  # A line that counts the seconds, so that a long download does not look like a hang.
  (while :; do printf '\r==> %s ... %s ' "$message" "$(elapsed)"; sleep 1; done) &
  ticker=$!
else
  printf '==> %s ... ' "$message"
fi
stop_ticker() {
  [ -z "$ticker" ] || { kill "$ticker" 2>/dev/null; wait "$ticker" 2>/dev/null; }
  ticker=
}
trap 'stop_ticker; echo; echo "Interrupted; the same command goes on from here."; exit 130' INT TERM

"$@" >"$log" 2>&1
status=$?
stop_ticker
[ ! -t 1 ] || printf '\r==> %s ... ' "$message"
if [ "$status" = 0 ]; then
  echo "done, $(elapsed)  "
  exit 0
fi
echo "FAILED, $(elapsed)  "
echo
# The first error is the one to mend; without one, the end of the log.
first=$(grep -n -m 1 -E '(error|ERROR):|CMake Error' "$log" | cut -d : -f 1)
if [ -n "$first" ]; then
  sed -n "$((first > 3 ? first - 3 : 1)),$((first + 30))p" "$log" | sed 's/^/    /'
else
  tail -n 40 "$log" | sed 's/^/    /'
fi
echo
echo "The whole output is in $log"
exit "$status"
