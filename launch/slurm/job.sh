
# Runs in the allocation's first node: one step for the trainer's hosts, one for every host of
# samplers. What the end means is read off every host's status: 0 done, 2 a mistake of the user's, 42
# stopped with a checkpoint, anything else a crash. Crashes alone count against MAX_RESTARTS.
set -euo pipefail

say() { printf '%s rl-jax job %s attempt %s: %s\n' \
    "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$SLURM_JOB_ID" "$attempt" "$*"; }

attempt=${SLURM_RESTART_COUNT:-0}
rendered=$PWD
[ -f "$rendered/plan.json" ] || { say "no plan.json in $rendered: submit from where it was rendered"; exit 2; }
# shellcheck source=/dev/null
. "$rendered/job.env"

# The token of this run: known to who may read its directory, written nowhere else.
token=$rendered/token
if [ ! -s "$token" ]; then
    (umask 077 && od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >"$token.$$" && mv "$token.$$" "$token")
fi

# The nodes in the plan's order: the trainer's hosts first, also where they are a component.
nodes_of() { scontrol show hostnames "$1"; }
if [ "$HET_GROUP" = 1 ]; then
    mapfile -t nodes < <(nodes_of "$SLURM_JOB_NODELIST_HET_GROUP_0"; nodes_of "$SLURM_JOB_NODELIST_HET_GROUP_1")
else
    mapfile -t nodes < <(nodes_of "$SLURM_JOB_NODELIST")
fi
count=$((TRAINER_HOSTS + SAMPLER_HOSTS))
[ "${#nodes[@]}" -eq "$count" ] || { say "${#nodes[@]} nodes, the plan has $count hosts"; exit 2; }
RL_JAX_HOSTS=$(IFS=,; printf '%s' "${nodes[*]}")
export RL_JAX_HOSTS RL_JAX_TOKEN_FILE=$token RL_JAX_ATTEMPT=$attempt
logs=$rendered/logs/attempt_$attempt
export RL_JAX_RENDERED=$rendered RL_JAX_LOGS=$logs
mkdir -p "$logs"
crashes=$rendered/crashes # one line for each of this job
rm -f "$logs"/status-* # of a job that was submitted from here before, as are crashes
[ "$attempt" -gt 0 ] || : >"$crashes"
ln -sfn "attempt_$attempt" "$rendered/logs/latest"

steps=() # pids of srun
declare -A hosts_of=() # pid -> the hosts of the step
declare -A ended=() # host -> what it ended with
stopping=0 noticed=0
# TERM to srun would make it kill its tasks; USR1 it passes on, and node.sh makes TERM of it.
stop() {
    stopping=1
    say "telling ${#steps[@]} steps"
    [ "${#steps[@]}" -eq 0 ] || kill -USR1 "${steps[@]}" 2>/dev/null || true
}
trap 'noticed=1; say "a notice"; [ "$stopping" = 1 ] || stop' USR1 TERM

# step NAME FIRST_HOST HOSTS COMPONENT [preflight]: node.sh on those hosts, in the background. A host
# that fails in preflight ends it for the others; in the run they are told, and write what they can.
step() {
    [ "$stopping" = 0 ] || return 0
    local list=("${nodes[@]:$2:$3}") where=(--nodes="$3" --ntasks="$3" --ntasks-per-node=1) kill=0
    [ -z "${5:-}" ] || kill=1
    [ "$HET_GROUP" = 0 ] || where+=(--het-group="$4")
    where+=(--nodelist="$(IFS=,; printf '%s' "${list[*]}")")
    RL_JAX_FIRST_HOST=$2 srun "${where[@]}" --kill-on-bad-exit=$kill --wait=0 --export=ALL \
        --output="$logs/$1-%n.$attempt.log" "$rendered/node.sh" ${5:+"$5"} &
    steps+=("$!")
    hosts_of[$!]=$(seq "$2" $(($2 + $3 - 1)))
    say "step $1: hosts $2 to $(($2 + $3 - 1)), pid $!"
    [ "$stopping" = 0 ] || kill -USR1 "$!" # a notice between the lines above
}

# What hosts ended with, as they wrote it: srun tells only the highest status of a step.
read_ended() {
    local file
    for file in "$logs"/status-*; do [ ! -s "$file" ] || ended[${file##*-}]=$(<"$file"); done
}

# close STEP CODE: for hosts that wrote nothing, what srun says. After a notice they were taken away.
close() {
    local host code=$2
    if [ "$code" -ne 0 ] && [ "$noticed" = 1 ]; then code=42; fi
    read_ended
    for host in ${hosts_of[$1]}; do ended[$host]=${ended[$host]:-$code}; done
}

# Sets `status` to what the hosts' statuses mean together: a mistake of the user's would come again;
# a crash counts, also where others, told of it, stopped with 42. `worst` is the host it is of.
judge() {
    local host code
    status=0
    for host in "${!ended[@]}"; do
        code=${ended[$host]}
        case $status/$code in 2/* | */0) ;; */2 | 0/* | 42/*) status=$code worst=$host ;; esac
    done
}

# Waits for all steps. Where one host ends badly, all are told.
await() {
    local pid code left
    ended=()
    while [ "${#steps[@]}" -gt 0 ]; do
        sleep "${LOOK_S:-1}" &
        wait "$!" || true # a notice is heard at once
        left=()
        for pid in "${steps[@]}"; do
            if kill -0 "$pid" 2>/dev/null; then left+=("$pid"); continue; fi
            code=0
            wait "$pid" || code=$?
            close "$pid" "$code"
        done
        steps=("${left[@]}")
        read_ended
        judge
        [ "$status" -eq 0 ] || [ "$stopping" = 1 ] || { say "host $worst ended with $status"; stop; }
    done
}

rm -rf "$rendered/preflight"
step preflight 0 "$TRAINER_HOSTS" 0 preflight
[ "$SAMPLER_HOSTS" -eq 0 ] || step preflight-samplers "$TRAINER_HOSTS" "$SAMPLER_HOSTS" 1 preflight
await
if [ "$status" -ne 0 ] && [ "$noticed" = 0 ]; then
    say "preflight ended with $status:"
    cat "$logs"/preflight*.log
    exit 2
fi

status=42 # of a notice in preflight
if [ "$noticed" = 0 ]; then
    step trainer 0 "$TRAINER_HOSTS" 0
    # A step of its own for every host of samplers: the loss of one is not the trainer's.
    for ((i = 0; i < SAMPLER_HOSTS; i++)); do
        step "samplers-$i" $((TRAINER_HOSTS + i)) 1 1
    done
    await
fi

# Nothing failed, but the run is not at its end: the notice came before there was a checkpoint.
if [ "$status" -eq 0 ] && [ ! -f "$RUN/summary.json" ]; then status=42; fi
say "ended with $status"
[ ! -e "$rendered/stop-$SLURM_JOB_ID" ] || exit "$status" # `rl-jax stop` wants no other attempt
case $status in
    0 | 2) exit "$status" ;;
    42) ;; # a notice is no crash
    *) echo "attempt $attempt: $status" >>"$crashes" ;;
esac
if [ "$status" = 42 ] || [ "$(wc -l <"$crashes")" -le "$MAX_RESTARTS" ]; then
    say "again: scontrol requeue"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
say "no more restarts (MAX_RESTARTS=$MAX_RESTARTS); the logs are in $logs"
exit "$status"
