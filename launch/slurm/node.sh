#!/bin/bash
# One node of a step: finds its place in the plan, plays it, and leaves its exit status in
# RL_JAX_LOGS/status-HOST. `node.sh preflight` checks instead.
set -euo pipefail

host=$((RL_JAX_FIRST_HOST + SLURM_PROCID))
cd "$RL_JAX_RENDERED"

# Sockets of samplers and of rollouts; the default of 1,024 is soon used up.
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"

# jax and libraries would find a cluster in these, and choose devices by themselves.
while IFS='=' read -r name _; do
    case $name in
        SLURM_* | PMI_* | PMIX_* | PMI2_* | OMPI_* | MEGASCALE_*) unset "$name" ;;
    esac
done < <(env)

if [ "${1:-}" = preflight ]; then
    exec rl-jax preflight config.toml --host "$host" --plan plan.json
fi

# srun passes USR1 on, while TERM to it kills its tasks: a notice comes as USR1. The first one is told
# to the role as TERM, once, since a second TERM ends it at once.
child='' told=''
# shellcheck disable=SC2329 # the trap calls it
stop() {
    trap '' USR1 TERM
    told=1
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true
}
trap stop USR1 TERM
# Some set-ups signal all processes of a task: the role must not die of USR1.
(trap '' USR1 && exec rl-jax role --plan plan.json --host "$host") &
child=$!
[ -z "$told" ] || kill -TERM "$child" 2>/dev/null || true
while true; do
    before=$told code=0
    wait "$child" || code=$?
    [ "$before" != "$told" ] || break # else a signal ended the waiting, not the role
done
# TERM before it listened: nothing has begun, and it can be started again.
if [ -n "$told" ] && [ "$code" -eq 143 ]; then code=42; fi
echo "$code" >"$RL_JAX_LOGS/.status-$host"
mv "$RL_JAX_LOGS/.status-$host" "$RL_JAX_LOGS/status-$host"
exit "$code"
