#!/bin/bash
# Makes every instance ready: the shared disk under /shared, and rl-jax with the locked packages from
# the source tree that lies there in SOURCE; each installs from a copy of its own.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=/dev/null
. ./launch.env
: "${SHARE:?the NFS export that is mounted at /shared, as 10.0.0.2:/rl}"
: "${SOURCE:=/shared/rl_jax}"

mapfile -t hosts < <(./hosts.sh)
[ "${#hosts[@]}" -gt 0 ] || { echo "not all instances run yet: call create.sh and wait" >&2; exit 1; }
command="sudo mkdir -p /shared && (mountpoint -q /shared || sudo mount -t nfs $(printf %q "$SHARE") /shared)"
# shellcheck disable=SC2016 # the other side's home
command+=" && mkdir -p "'"$HOME/rl_jax"'" && tar -C $(printf %q "$SOURCE") --exclude=./.venv -cf - . | tar -C "'"$HOME/rl_jax" -xf -'
# shellcheck disable=SC2016
command+=' && cd "$HOME/rl_jax" && make setup-tpu && sudo ln -sf "$HOME/rl_jax/.venv/bin/rl-jax" /usr/local/bin/'
steps=()
for host in "${hosts[@]}"; do
    ./ssh.sh "$host" "$command" &
    steps+=("$!")
done
for step in "${steps[@]}"; do wait "$step"; done
