#!/usr/bin/env bash
# One node with all of its GPUs, or with NPROC processes: change NPROC, the recipe and the overrides.
#
#     launch/local.sh recipe=llama3_8b 'data.path=shards/*.bin'
set -euo pipefail
NPROC=${NPROC:-$({ nvidia-smi --list-gpus 2>/dev/null || :; } | wc -l)}
[ "$NPROC" -gt 0 ] || NPROC=2 # no GPU: two processes on the CPU

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600} # seconds; torch < 2.13: always 30
# A signal that torchrun does not handle, by default SIGUSR1 for example, kills it and orphans the ranks.
exec torchrun --standalone --nproc-per-node "$NPROC" \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m trainer.run "$@"
