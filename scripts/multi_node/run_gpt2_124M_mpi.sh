#!/usr/bin/env bash
# scripts/run_gpt2_124M.sh on several hosts, started by OpenMPI.
#
#   hosts=node1:8,node2:8 scripts/multi_node/run_gpt2_124M_mpi.sh     # again, after a stop: it goes on
#
#   tokens per step    B * T * ranks * k = 32 * 1024 * 16 * 1 = 524,288, for k micro-steps
#   other numbers of ranks: keep the tokens per step; 8 ranks then take k = 2, 4 ranks k = 4
#
# Needs: the repository, with train_gpt2cu built with MPI=1, and the shards in a folder that all hosts see.
# A host is named with its GPUs, one rank for each.
set -euo pipefail
hosts=${hosts:?give hosts=node1:8,node2:8}
export launch="mpirun --host $hosts --bind-to none"
exec "$(dirname "$0")/../run_gpt2_124M.sh" --micro-batch 32 --process-init mpi "$@"
