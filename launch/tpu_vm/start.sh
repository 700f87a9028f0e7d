#!/bin/bash
# Runs the launch on its instances until it ends. The exit status is the first failure's: 2 a mistake
# of the user's, as a host said, 42 where all stopped with a checkpoint, anything else a crash; 0 is
# done. TERM or INT ends it with a checkpoint; the second one, or USR2, kills.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=/dev/null
. ./launch.env
: "${RENDERED:=/shared/rendered/$NAME}"
shared=$(printf %q "$RENDERED") # as the shell of the other side reads it

# A connection that ends would end nothing on the other side: the process itself is told. A host whose
# connection is still being made finds `stop`.
asked=0 hosts=() living=()
stop() { # SIGNAL
    local index telling=()
    [ "${#hosts[@]}" -gt 0 ] || return 0
    ./ssh.sh "${hosts[0]}" "touch $shared/stop" || true
    for index in "${!living[@]}"; do
        ./ssh.sh "${hosts[$index]}" "bash $shared/host.sh tell $1 $index" 3>&- &
        telling+=("$!")
    done
    # One that came later would meet the next attempt.
    [ "${#telling[@]}" -eq 0 ] || wait "${telling[@]}" || true
}
trap 'asked=$((asked + 1)); if [ "$asked" -eq 1 ]; then stop TERM; else stop KILL; fi' TERM INT
trap 'asked=$((asked + 2)); stop KILL' USR2

# first COMMAND: on the first host, for all. Where it fails that is a crash, whatever the status says.
first() {
    local code=0
    ./ssh.sh "${hosts[0]}" "$1" || code=$?
    [ "$code" -eq 0 ] || { echo "${hosts[0]}: a command ended with $code" >&2; return 1; }
}

mapfile -t hosts < <(./hosts.sh)
[ "${#hosts[@]}" -eq "$((TRAINER_HOSTS + SAMPLER_HOSTS))" ] ||
    { echo "not all instances run" >&2; exit 1; }
names=$(IFS=,; printf '%s' "${hosts[*]}")
# The plan, files of the user's own that the configuration names, and a token that only its file
# knows, on the disk that all see.
prepare="mkdir -p $shared && rm -rf $shared/preflight && cd $shared && umask 077"
prepare+=" && { [ -s token ] || od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >token; }"
prepare+=" && { ls host-*.pid 2>/dev/null || true; }"
earlier=$(first "$prepare")
for file in plan.json config.toml host.sh *.py; do
    [ -e "$file" ] || continue
    first "cat >$shared/$file" <"$file"
done

# What ends tells its host and status here, and is heard in that order.
folder=$(mktemp -d)
mkfifo "$folder/ends"
exec 3<>"$folder/ends"
rm -r "$folder"

# everywhere COMMAND: on every instance at once, with its own INDEX. The first failure ends all, and its
# status is what comes back, before the 42 of a host that stopped with a checkpoint.
everywhere() {
    local index code before left=${#hosts[@]} status=0
    living=()
    for index in "${!hosts[@]}"; do
        living[index]=1
        {
            code=0
            ./ssh.sh "${hosts[$index]}" "${1//INDEX/$index}" 3>&- || code=$?
            echo "$index $code" >&3
        } &
    done
    while [ "$left" -gt 0 ]; do
        read -r -t 5 index code <&3 || continue # a signal, or nothing yet
        left=$((left - 1))
        # With 255 a connection is lost, and what it began may live on.
        [ "$code" -eq 255 ] || unset "living[index]"
        before=$status
        if [ "$status" -eq 0 ] || { [ "$status" -eq 42 ] && [ "$code" -ne 0 ]; }; then status=$code; fi
        [ "$before" -ne 0 ] || [ "$status" -eq 0 ] || stop TERM
    done
    return "$status"
}

# played WHAT: by every host.
played() {
    living=()
    first "cd $shared && rm -f host-*.pid host-*.told stop" || return 1
    [ "$asked" -eq 0 ] || return 42 # nobody would see what was said before
    local own="RL_JAX_HOSTS=$names RL_JAX_TOKEN_FILE=$shared/token RL_JAX_ATTEMPT=${ATTEMPT:-0}"
    everywhere "cd $shared && $own exec bash host.sh begin INDEX rl-jax $1 --host INDEX"
}

status=0
[ -z "$earlier" ] || everywhere "bash $shared/host.sh clear ${END_S:-300}" || status=1
[ "$asked" -eq 0 ] || exit 42
[ "$status" -eq 0 ] || exit "$status"
played "preflight config.toml --plan plan.json" || status=$?
[ "$asked" -eq 0 ] || exit 42 # nothing has begun
[ "$status" -eq 0 ] || exit "$status"
played "role --plan plan.json"
