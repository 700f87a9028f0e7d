#!/bin/bash
# Keeps a launch going: asks again for slices that were taken away, and starts again what can be.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=/dev/null
. ./launch.env

attempt=0 failures=0
while true; do
    ./create.sh
    until ./hosts.sh >/dev/null; do
        echo "waiting for instances"
        sleep "${LOOK_S:-30}"
    done
    ./setup.sh
    status=0
    ATTEMPT=$attempt ./start.sh || status=$?
    echo "attempt $attempt ended with $status"
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
