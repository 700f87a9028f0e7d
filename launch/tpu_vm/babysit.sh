#!/bin/bash
# Keeps a launch going: asks again for slices that were taken away, and starts again what can be. TERM
# or INT ends it with a checkpoint: the hosts are told, and waited for. The second one kills them.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=/dev/null
. ./launch.env

# Who `rl-jax stop` is to tell: this process, by number, host and when it began.
born=0
if read -r fields 2>/dev/null <"/proc/$$/stat"; then
    read -ra fields <<<"${fields##*) }"
    born=${fields[19]}
fi
printf '{"target": "tpu-vm", "pid": %s, "host": "%s", "born": %s}\n' "$$" "$(uname -n)" "$born" >"started.$$"
mv "started.$$" started.json

attempt=0 failures=0 child='' stops=0
stop() {
    stops=$((stops + 1))
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true
}
trap stop TERM INT

# ended_early: where it was told to stop between two attempts. What a signal interrupts ends first.
ended_early() {
    [ "$stops" -gt 0 ] || return 0
    echo "attempt $attempt ended with 42"
    exit 42
}
while true; do
    ./create.sh
    until ./hosts.sh >/dev/null; do
        echo "waiting for instances"
        ended_early
        sleep "${LOOK_S:-30}"
    done
    ended_early
    ./setup.sh
    ended_early
    ATTEMPT=$attempt ./start.sh &
    child=$!
    [ "$stops" -eq 0 ] || kill -TERM "$child" # a signal between the lines above
    while true; do
        before=$stops status=0
        wait "$child" || status=$?
        # A signal to this script ends the waiting, not what is waited for.
        [ "$before" != "$stops" ] || break
    done
    child=''
    echo "attempt $attempt ended with $status"
    [ "$stops" -eq 0 ] || exit "$status"
    case $status in
        0 | 2) exit "$status" ;;
        42) ;;
        # A slice that is gone is no fault of the run's.
        *) if ./hosts.sh >/dev/null; then failures=$((failures + 1)); fi ;;
    esac
    if [ "$failures" -gt "$MAX_RESTARTS" ]; then
        echo "no more restarts (MAX_RESTARTS=$MAX_RESTARTS)"
        exit "$status"
    fi
    attempt=$((attempt + 1))
done
