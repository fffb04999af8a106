#!/usr/bin/env bash
# GPT-2 124M on 10B tokens of FineWeb, on several hosts, started by OpenMPI.
#
#   hosts=node1:8,node2:8 scripts/multi_node/run_gpt2_124M_mpi.sh
#
#   tokens per step    B * T * ranks * k = 32 * 1024 * 16 * 1 = 524,288
#   steps              10e9 / 524,288 = 19,073
#   other numbers of ranks: keep the tokens per step; 8 ranks then take k = 2, 4 ranks k = 4
#
# Needs: a train_gpt2cu built with MPI on every host, in the same folder, and the shards at the same path.
# A host is named with its GPUs, one rank for each. The loss does not depend on how many there are.
set -euo pipefail
cd "$(dirname "$0")/../.."
hosts=${hosts:?give hosts=node1:8,node2:8}
data=${data:-dev/data/fineweb10B}
ranks=0
for host in ${hosts//,/ }; do
    case $host in
        *:*) ranks=$((ranks + ${host##*:})) ;;
        *) ranks=$((ranks + 1)) ;;
    esac
done
B=32 T=1024 tokens=524288
if [ $((tokens % (B * T * ranks))) -ne 0 ]; then
    echo "error: $tokens tokens per step are no multiple of B * T * ranks = $B * $T * $ranks" >&2
    exit 1
fi

mpirun --host "$hosts" -np "$ranks" --bind-to none \
    ./train_gpt2cu -pi mpi \
    --train-data "$data/*_train_*.bin" --val-data "$data/*_val_*.bin" \
    --model d12 --micro-batch $B --sequence-length $T --total-batch $tokens -zs 1 \
    --learning-rate 6e-4 --warmup 700 --weight-decay 0.1 \
    --val-every 250 --sample-every 0 --output-dir runs/gpt2_124M_mpi
