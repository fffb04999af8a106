#!/usr/bin/env bash
# What scripts/run_*.sh have in common: sees that program, data and GPUs are there, and begins the run or goes
# on with it.
#
#   scripts/pretrain.sh RUN 'DATA' RECIPE... -- FLAGS...
#
#   RUN       the run's folder is runs/RUN
#   DATA      what dev/data/get.py is to be asked for, its first word the folder in dev/data
#   RECIPE    flags of the trainer by their long names, each followed by its value
#   FLAGS     the user's, likewise; they replace those of the recipe that have the same long name
#
# gpus=N: so many of this machine's GPUs (all); data=FOLDER: shards that are elsewhere; val=SHARDS: those to
# validate on; launch=COMMAND: starts the ranks on several hosts, see scripts/multi_node.
set -euo pipefail
cd "$(dirname "$0")/.."
run=$1 wanted=$2
shift 2
recipe=()
while [ "$1" != -- ]; do recipe+=("$1"); shift; done
shift

stop() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }

data=${data:-dev/data/${wanted%% *}}
ls "$data"/*_train_*.bin "$data"/*_val_*.bin >/dev/null 2>&1 ||
    stop "there are no shards *_train_*.bin and *_val_*.bin in $data" \
        "python3 dev/data/get.py $wanted (goes on where it broke off), or data=FOLDER"
[ -x train_gpt2cu ] || stop "there is no ./train_gpt2cu" "make train_gpt2cu"
if [ -z "${launch:-}" ]; then
    caps=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true)
    gpus=${gpus:-$(awk '$1 + 0 >= 8' <<<"$caps" | wc -l)}           # those that the program can use
    [[ $gpus =~ ^[1-9][0-9]*$ ]] || stop "gpus=$gpus: a number of GPUs, 1 or more" \
        "nvidia-smi -L lists those of this machine"
    if [ "$gpus" -gt 1 ]; then recipe+=(--gpus "$gpus" --zero-stage 1); fi
else
    recipe+=(--zero-stage 1)
fi

recipe+=(--train-data "$data/*_train_*.bin" --val-data "${val:-$data/*_val_*.bin}")
recipe+=(--output-dir "runs/$run" --resume 1)
if [[ " ${recipe[*]} " == *" --evaluate "* ]]; then
    :                                                               # the recipe says when
elif [ -e dev/data/hellaswag/hellaswag_val.bin ]; then
    recipe+=(--evaluate 1 --eval-every 1000)
else
    echo "note: no HellaSwag: python3 dev/data/get.py hellaswag would fetch it" >&2
fi

flags=()
for ((i = 0; i < ${#recipe[@]}; i += 2)); do
    replaced=no
    for word in "$@"; do
        if [ "${word%%=*}" = "${recipe[i]}" ]; then replaced=yes; fi
    done
    if [ $replaced = no ]; then flags+=("${recipe[i]}" "${recipe[i + 1]}"); fi
done
set -x
exec ${launch:-} ./train_gpt2cu "${flags[@]}" "$@"
