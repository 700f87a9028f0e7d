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
[ "${#hosts[@]}" -eq "$((TRAINER_HOSTS + SAMPLER_HOSTS))" ] || { echo "not all instances run yet: call create.sh and wait" >&2; exit 1; }
command="sudo mkdir -p /shared && (mountpoint -q /shared || sudo mount -t nfs $(printf %q "$SHARE") /shared)"
# What lives on of a lost connection ends first.
# shellcheck disable=SC2016 # the other side's home
command+=' && exec 9>"$HOME/.rl-jax-setup" && flock --timeout 900 9'
# shellcheck disable=SC2016
command+=" && mkdir -p "'"$HOME/rl_jax"'" && tar -C $(printf %q "$SOURCE") --exclude=./.venv -cf - . | tar -C "'"$HOME/rl_jax" -xf -'
# shellcheck disable=SC2016
command+=' && cd "$HOME/rl_jax" && make setup-tpu && sudo ln -sf "$HOME/rl_jax/.venv/bin/rl-jax" /usr/local/bin/'
steps=()
for host in "${hosts[@]}"; do
    ./ssh.sh "$host" "$command" &
    steps+=("$!")
done
status=0 # when all have ended: what is called again must not meet what it did before
for step in "${steps[@]}"; do wait "$step" || status=1; done
exit "$status"
