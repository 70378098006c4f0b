#!/bin/sh
# Regenerates kjv.txt.xz from Debian's packages bible-kjv and bible-kjv-text (apt-get install bible-kjv).
# Run it in this directory. With -f the program writes one verse a line, each after its reference.
set -eu
bible -f gen1:1-rev22:21 </dev/null >kjv.txt
xz -9e --force kjv.txt
