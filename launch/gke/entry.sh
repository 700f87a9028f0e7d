#!/bin/bash
# Starts the run that is beside this file, or goes on with it where it was begun.
set -euo pipefail
# shellcheck source=/dev/null
. /plan/launch.env
# A pod that is made again after the end has nothing to do.
[ ! -e "$RUN/summary.json" ] || exit 0
if [ -e "$RUN/FORMAT" ]; then exec rl-jax resume "$RUN" --target "$TARGET"; fi
exec rl-jax run /plan/config.toml --target "$TARGET" --out "$RUN"
