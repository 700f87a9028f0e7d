#!/bin/bash
# build.sh gpu|tpu[,cluster] IMAGE: builds the image of the checked-out revision, with Ray where it is
# for a cluster; nothing uncommitted goes in.
set -euo pipefail
kind=${1:?gpu or tpu} image=${2:?name of the image}
here=$(cd "$(dirname "$0")" && pwd)
root=$(git -C "$here" rev-parse --show-toplevel)
case ${kind%,cluster} in gpu | tpu) ;; *) echo "no image $kind: there is gpu and tpu" >&2; exit 2 ;; esac
revision=$(git -C "$root" rev-parse HEAD)
# The context is the revision itself: no secret, run or environment of the tree can get in.
git -C "$root" archive "$revision" |
    docker build --file launch/container/Dockerfile --build-arg "KIND=$kind" --build-arg "REVISION=$revision" \
        --tag "$image" -
