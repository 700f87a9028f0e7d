#!/bin/bash
# Prints the names of the launch's instances, one a line, in the plan's order; status 1 where not all
# of them run.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=/dev/null
. ./launch.env
: "${PROJECT:?name of the project}" "${ZONE:?zone of the machines}"

# running GROUP COUNT
running() {
    local names
    mapfile -t names < <(gcloud compute instance-groups managed list-instances "$1" \
        --project="$PROJECT" --zone="$ZONE" --filter=instanceStatus=RUNNING \
        --format='value(name)' --sort-by=name)
    [ "${#names[@]}" -eq "$2" ] || return 1
    printf '%s\n' "${names[@]}"
}

running "$NAME-trainer" "$TRAINER_HOSTS"
for ((i = 0; i < SAMPLER_HOSTS; i++)); do
    running "$NAME-sampler-$i" 1
done
