#!/usr/bin/env bash
# One node, all its GPUs (or as many processes as you say): change NPROC, the recipe and what follows it.
#
#     launch/local.sh recipe=llama3_8b 'data.path=shards/*.bin'
set -euo pipefail
NPROC=${NPROC:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
[ "$NPROC" -gt 0 ] || NPROC=2 # no GPU: two processes on the CPU

# Threads follow from the cores and the local ranks; what torchrun sets by default would be one.
exec torchrun --standalone --nproc-per-node "$NPROC" -m trainer.run "$@"
