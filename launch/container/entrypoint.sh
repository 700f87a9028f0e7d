#!/bin/bash
# What a container starts: the command, with room for sockets, in place of this shell.
set -euo pipefail
# Rollouts, samplers and peers hold sockets; a container's default of 1,024 is soon used up.
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
# A core of a process with a model fills the disk.
ulimit -c 0
exec "$@"
