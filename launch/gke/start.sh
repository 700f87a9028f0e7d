#!/bin/bash
# Starts the launch whose manifests lie beside this file. The token that roles know each other by is
# made here, into a secret of the cluster, and is in no file.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=/dev/null
. ./launch.env

files=(--from-file=plan.json --from-file=config.toml)
for file in *.py; do # of the user's own: what the configuration names
    if [ -e "$file" ]; then files+=(--from-file="$file"); fi
done
if [ -e entry.sh ]; then
    files+=(--from-file=launch.env --from-file=entry.sh)
elif ! kubectl get secret "$NAME-token" >/dev/null 2>&1; then
    od -An -N16 -tx1 /dev/urandom | tr -d ' \n' |
        kubectl create secret generic "$NAME-token" --from-file=token=/dev/stdin
fi
kubectl create configmap "$NAME-plan" "${files[@]}" --dry-run=client --output=yaml | kubectl apply -f -
kubectl apply -f shared.yaml -f kueue.yaml
for manifest in *.yaml; do
    case $manifest in shared.yaml | kueue.yaml) continue ;; esac
    # Where samplers stand on the trainer's hosts, its pods play them.
    if [ -s "$manifest" ]; then kubectl apply -f "$manifest"; fi
done
