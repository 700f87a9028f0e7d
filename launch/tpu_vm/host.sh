#!/bin/bash
# What start.sh calls on an instance, beside the plan. `begin INDEX COMMAND` plays the host INDEX, `tell
# SIGNAL INDEX` tells it, `clear SECONDS` ends what lives on of an earlier attempt. Which process it is
# stands in host-INDEX.pid: number, boot of its machine, begin; so that no other one is told.
set -euo pipefail
cd "$(dirname "$0")"
boot=$(</proc/sys/kernel/random/boot_id)

# born PID: its begin, in ticks since the boot; nothing of one that has ended.
born() {
    local fields
    read -r fields 2>/dev/null <"/proc/$1/stat" || return 0
    read -ra fields <<<"${fields##*) }"
    case ${fields[0]} in Z | X) ;; *) echo "${fields[19]}" ;; esac
}

# lives FILE: whether the process of that file is here and goes on; its number is then in `pid`.
lives() {
    local where since
    read -r pid where since 2>/dev/null <"$1" || return 1
    [ "$where" = "$boot" ] && [ -n "$since" ] && [ "$(born "$pid")" = "$since" ]
}

# tell SIGNAL FILE: TERM only once, since a role that hears it again ends without a checkpoint.
tell() {
    lives "$2" || return 0
    if [ "$1" = TERM ]; then (set -o noclobber && : >"${2%.pid}.told") 2>/dev/null || return 0; fi
    kill "-$1" "$pid" 2>/dev/null || true
}

# ended SECONDS FILE...: whether all have within that time.
ended() {
    local deadline=$((SECONDS + $1)) file
    shift
    for file; do
        while lives "$file"; do
            [ "$SECONDS" -lt "$deadline" ] || return 1
            sleep 0.2
        done
    done
}

# Indices are dealt anew where an instance was replaced, so the files of all hosts are looked at.
clear_away() { # SECONDS
    local file own=()
    for file in host-*.pid; do
        lives "$file" || continue
        echo "pid $pid of an earlier attempt lives on: it has $1 s to end"
        tell TERM "$file"
        own+=("$file")
    done
    ended "$1" "${own[@]}" && return
    for file in "${own[@]}"; do tell KILL "$file"; done
    ended 30 "${own[@]}" || { echo "pid $pid did not end after KILL" >&2; return 1; }
}

case $1 in
    begin)
        index=$2
        shift 2
        ulimit -n 65536 2>/dev/null || true
        trap 'exit 42' TERM
        # The number first: who stops it either finds that, or has left `stop` before it is looked for.
        echo "$$ $boot $(born $$)" >"host-$index.pid"
        [ ! -e stop ] || exit 42
        exec "$@"
        ;;
    tell) tell "$2" "host-$3.pid" ;;
    clear) clear_away "$2" ;;
esac
