#!/bin/bash
# Keeps a launch going: asks again for slices that were taken away, and starts again what can be. TERM
# or INT ends it with a checkpoint: the hosts are told, and waited for. The second one kills them, and
# so does USR2, since two TERM that come together are one.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=/dev/null
. ./launch.env
for name in PROJECT ZONE SHARE; do # the scripts called below would fail again and again
    [ -n "${!name:-}" ] || { echo "$name must be set in the environment" >&2; exit 2; }
done

# What start.sh is and ends with is heard from here: of two signals that come together `wait` loses one.
folder=$(mktemp -d)
mkfifo "$folder/told"
exec 3<>"$folder/told"
rm -r "$folder"

attempt=0 failures=0 met='' child='' stops=0 notice=''
hear() { # SIGNAL
    stops=$((stops + 1)) notice=$1
    [ "$stops" -eq 1 ] || notice=USR2
    [ -z "$child" ] || kill "-$notice" "$child" 2>/dev/null || true
}
trap 'hear TERM' TERM INT
trap 'hear USR2' USR2

# Who `rl-jax stop` is to tell: this process, by number, host and when it began.
born=0
if read -r fields 2>/dev/null <"/proc/$$/stat"; then
    read -ra fields <<<"${fields##*) }"
    born=${fields[19]}
fi
printf '{"target": "tpu-vm", "pid": %s, "host": "%s", "born": %s}\n' "$$" "$(uname -n)" "$born" >"started.$$"
mv "started.$$" started.json

# ended_early: where it was told to stop between two attempts. What a signal interrupts ends first.
ended_early() {
    [ "$stops" -gt 0 ] || return 0
    echo "attempt $attempt ended with 42"
    exit 42
}
# crashed STATUS: counts it, and ends with it where there may be no more. That a slice was taken away is
# no fault of the run's.
crashed() {
    if [ -n "$met" ] && ! ./hosts.sh >/dev/null; then return 0; fi
    failures=$((failures + 1))
    [ "$failures" -gt "$MAX_RESTARTS" ] || return 0
    echo "no more restarts (MAX_RESTARTS=$MAX_RESTARTS)"
    exit "$1"
}
look_later() {
    ended_early
    sleep "${LOOK_S:-30}"
    ended_early
}
while true; do
    status=0
    ./create.sh || status=$?
    if [ "$status" -ne 0 ]; then
        echo "attempt $attempt: create.sh failed with $status"
        ended_early
        crashed 1
        look_later
        continue
    fi
    until ./hosts.sh >/dev/null; do
        echo "waiting for instances"
        look_later
    done
    ended_early
    met=1
    ./setup.sh || status=$?
    ended_early
    if [ "$status" -ne 0 ]; then
        echo "attempt $attempt: setup.sh failed with $status"
        crashed 1
        look_later
        continue
    fi
    {
        trap : TERM INT USR2 # of its group; start.sh hears them itself
        status=0
        (echo "began $BASHPID" >&3 && ATTEMPT=$attempt exec ./start.sh 3>&-) || status=$?
        echo "ended $status" >&3
    } &
    what=''
    until [ "$what" = ended ]; do
        read -r -t 5 what number <&3 || continue # a signal, or nothing yet
        [ "$what" = began ] || continue
        child=$number
        [ "$stops" -eq 0 ] || kill "-$notice" "$child" 2>/dev/null || true # one between those lines
    done
    child='' status=$number
    echo "attempt $attempt ended with $status"
    [ "$stops" -eq 0 ] || exit "$status"
    case $status in
        0 | 2) exit "$status" ;;
        42) ;;
        *) crashed "$status" ;;
    esac
    attempt=$((attempt + 1))
done
