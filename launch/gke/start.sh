#!/bin/bash
# Starts the launch whose manifests lie beside this file. The token is made here, into a secret of
# the cluster, and is in no file.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=/dev/null
. ./launch.env

if ! kubectl get secret "$NAME-token" >/dev/null 2>&1; then
    od -An -N16 -tx1 /dev/urandom | tr -d ' \n' |
        kubectl create secret generic "$NAME-token" --from-file=token=/dev/stdin
fi
kubectl create configmap "$NAME-plan" --from-file=plan.json --from-file=config.toml \
    --dry-run=client --output=yaml | kubectl apply -f -
kubectl apply -f shared.yaml -f kueue.yaml
kubectl apply -f trainer.yaml
# Where samplers stand on the trainer's hosts, its pods play them.
if [ -s samplers.yaml ]; then kubectl apply -f samplers.yaml; fi
