#!/bin/bash
# Runs the launch on its instances until it ends. The exit status is the trainer's: 0 done, 2 a
# mistake of the user's, 42 stopped with a checkpoint, anything else a crash.
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

# A connection that ends would end nothing on the other side: the process itself is told.
stop() {
    local index
    for index in "${!hosts[@]}"; do
        # shellcheck disable=SC2016 # the other side reads its file
        ./ssh.sh "${hosts[$index]}" "cd $shared && kill -TERM "'$(cat host-'"$index.pid)" 2>/dev/null || true
    done
}
trap stop TERM INT

# played WHAT: on every instance at once; the first status that is not 0, in the plan's order.
played() {
    local steps=() index status=0 code
    for index in "${!hosts[@]}"; do
        ./ssh.sh "${hosts[$index]}" "cd $shared && { ulimit -n 65536 2>/dev/null || true; } && echo "'$$'" >host-$index.pid \
&& RL_JAX_HOSTS=$names RL_JAX_TOKEN_FILE=$shared/token RL_JAX_ATTEMPT=${ATTEMPT:-0} \
exec rl-jax $1 --host $index" &
        steps+=("$!")
    done
    for index in "${!steps[@]}"; do
        code=0
        wait "${steps[$index]}" || code=$?
        # A signal to this script ends the waiting, not what is waited for.
        while kill -0 "${steps[$index]}" 2>/dev/null; do
            code=0
            wait "${steps[$index]}" || code=$?
        done
        if [ "$code" -ne 0 ] && [ "$status" -eq 0 ]; then
            status=$code
            stop
        fi
    done
    return "$status"
}

played "preflight config.toml --plan plan.json" || exit 2
played "role --plan plan.json"
