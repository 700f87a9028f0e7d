#!/bin/bash
# Asks for the slices of a launch: one for the trainer, one for every host of samplers. A slice that
# is there already is left as it is, so this can be called again, as babysit.sh does.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=/dev/null
. ./launch.env
: "${PROJECT:?name of the project}" "${ZONE:?zone of the machines}"

# create SLICE MACHINE TOPOLOGY HOSTS: a group of instances that is one slice.
create() {
    local slice=$1 machine=$2 topology=$3 hosts=$4
    if gcloud compute instance-groups managed describe "$slice" \
        --project="$PROJECT" --zone="$ZONE" >/dev/null 2>&1; then
        echo "$slice is there"
        return
    fi
    local template=(--project="$PROJECT" --machine-type="$machine" --maintenance-policy=TERMINATE
        --image-family="${IMAGE_FAMILY:-$DEFAULT_IMAGE_FAMILY}" --image-project=ubuntu-os-accelerator-images
        --provisioning-model="${PROVISIONING:-STANDARD}" --scopes=cloud-platform)
    if ! gcloud compute instance-templates describe "$slice" --project="$PROJECT" >/dev/null 2>&1; then
        gcloud compute instance-templates create "$slice" "${template[@]}"
    fi
    local policy=()
    if [ "$hosts" -gt 1 ]; then
        gcloud compute resource-policies describe "$slice" --project="$PROJECT" \
            --region="${ZONE%-*}" >/dev/null 2>&1 ||
            gcloud compute resource-policies create workload-policy "$slice" --project="$PROJECT" \
                --region="${ZONE%-*}" --type=HIGH_THROUGHPUT --accelerator-topology="$topology"
        policy=(--workload-policy="$slice")
    fi
    gcloud compute instance-groups managed create "$slice" --project="$PROJECT" --zone="$ZONE" \
        --size="$hosts" --template="$slice" ${policy[@]+"${policy[@]}"}
}

create "$NAME-trainer" "$TRAINER_MACHINE" "$TRAINER_TOPOLOGY" "$TRAINER_HOSTS"
for ((i = 0; i < SAMPLER_HOSTS; i++)); do
    create "$NAME-sampler-$i" "$SAMPLER_MACHINE" "$SAMPLER_TOPOLOGY" 1
done
