#!/bin/bash
# Runs the launch on its instances until it ends. The exit status is the first failure's: 2 a mistake
# of the user's, 42 where all stopped with a checkpoint, anything else a crash; 0 is done. TERM or INT
# ends it with a checkpoint; the second one kills.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=/dev/null
. ./launch.env
: "${RENDERED:=/shared/rendered/$NAME}"

mapfile -t hosts < <(./hosts.sh)
[ "${#hosts[@]}" -eq "$((TRAINER_HOSTS + SAMPLER_HOSTS))" ] ||
    { echo "not all instances run" >&2; exit 1; }
shared=$(printf %q "$RENDERED") # as the shell of the other side reads it
names=$(IFS=,; printf '%s' "${hosts[*]}")
# The plan, and a token that only its file knows, on the disk that all see.
prepare="mkdir -p $shared && rm -rf $shared/preflight && cd $shared && umask 077"
prepare+=" && { [ -s token ] || od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >token; }"
./ssh.sh "${hosts[0]}" "$prepare"
for file in plan.json config.toml; do
    ./ssh.sh "${hosts[0]}" "cat >$shared/$file" <"$file"
done

# A connection that ends would end nothing on the other side: the process itself is told. A host whose
# connection is still being made finds `stop`; of one that has ended the number may be another's.
stop() { # SIGNAL
    local index
    ./ssh.sh "${hosts[0]}" "touch $shared/stop" || true
    for index in "${!living[@]}"; do
        # shellcheck disable=SC2016 # the other side reads its file
        ./ssh.sh "${hosts[$index]}" "cd $shared && kill -$1 "'$(cat host-'"$index.pid)" 2>/dev/null || true
    done
}
asked=0 living=()
trap 'asked=$((asked + 1)); if [ "$asked" -eq 1 ]; then stop TERM; else stop KILL; fi' TERM INT
# What ends tells its host and status here, and is heard in that order.
folder=$(mktemp -d)
mkfifo "$folder/ends"
exec 3<>"$folder/ends"
rm -r "$folder"

# played WHAT: on every instance at once. The first failure ends all, and its status is what comes
# back, before the 42 of a host that stopped with a checkpoint.
played() {
    local index code before left=${#hosts[@]} status=0
    living=()
    ./ssh.sh "${hosts[0]}" "cd $shared && rm -f host-*.pid stop"
    [ "$asked" -eq 0 ] || return 42 # nobody would see what was said before
    local own="cd $shared && { ulimit -n 65536 2>/dev/null || true; } && trap 'exit 42' TERM"
    # The number first: who stops it either finds that, or has left `stop` before it is looked for.
    own+=" && echo "'$$'" >host-INDEX.pid && { [ ! -e stop ] || exit 42; }"
    own+=" && RL_JAX_HOSTS=$names RL_JAX_TOKEN_FILE=$shared/token RL_JAX_ATTEMPT=${ATTEMPT:-0}"
    own+=" exec rl-jax $1 --host INDEX"
    for index in "${!hosts[@]}"; do
        living[index]=1
        {
            code=0
            ./ssh.sh "${hosts[$index]}" "${own//INDEX/$index}" 3>&- || code=$?
            echo "$index $code" >&3
        } &
    done
    while [ "$left" -gt 0 ]; do
        read -r index code <&3 || continue
        left=$((left - 1))
        # With 255 a connection is lost, and what it began may live on.
        [ "$code" -eq 255 ] || unset "living[index]"
        before=$status
        if [ "$status" -eq 0 ] || { [ "$status" -eq 42 ] && [ "$code" -ne 0 ]; }; then status=$code; fi
        [ "$before" -ne 0 ] || [ "$status" -eq 0 ] || stop TERM
    done
    return "$status"
}

played "preflight config.toml --plan plan.json" || [ "$asked" -gt 0 ] || exit 2
[ "$asked" -eq 0 ] || exit 42 # nothing has begun
played "role --plan plan.json"
