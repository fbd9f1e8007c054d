#!/usr/bin/env bash
# Run CI several times in a row, in a fresh clone; the last runs compete with busy processes for the cores.
#
#   tests/under_load.sh                                  five runs of .ci/run, two of them beside four busy processes
#   RUNS=1 LOADED=1 BUSY=8 tests/under_load.sh make test       one run of another command, beside eight
set -euo pipefail
RUNS=${RUNS:-5} LOADED=${LOADED:-2} BUSY=${BUSY:-4}
[ $# -gt 0 ] || set -- bash .ci/run

clone=$(mktemp -d)
busy=()
trap 'kill "${busy[@]}" 2> /dev/null; rm -rf "$clone"' EXIT
git clone --quiet "$(dirname "$0")/.." "$clone"
cd "$clone"
make .venv/.installed > /dev/null

for run in $(seq "$RUNS"); do
    if [ "$run" -eq $((RUNS - LOADED + 1)) ]; then
        for _ in $(seq "$BUSY"); do
            while :; do :; done &
            busy+=($!)
        done
    fi
    began=$SECONDS
    "$@" > "run-$run.log" 2>&1 && result=passed || result=FAILED
    echo "run $run of $RUNS, beside ${#busy[@]} busy processes: $result after $((SECONDS - began)) s"
    if [ $result = FAILED ]; then
        log=$(mktemp --suffix .log)
        cp "run-$run.log" "$log"
        echo "Its output is in $log"
        exit 1
    fi
done
