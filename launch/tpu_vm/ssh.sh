#!/bin/bash
# ssh.sh HOST COMMAND: runs a command on one instance.
set -euo pipefail
: "${PROJECT:?name of the project}" "${ZONE:?zone of the machines}"
host=$1
shift
exec gcloud compute ssh "$host" --project="$PROJECT" --zone="$ZONE" --command="$*"
