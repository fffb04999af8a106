#!/usr/bin/env bash
# At most nine minutes of training on one H200, then scores, three texts and a model for transformers.
#
#   scripts/setup.sh data                           # once
#   python3 dev/data/get.py english                 # the corpus: Wikipedia, novels, news
#   python3 dev/data/get.py hellaswag               # if wanted; also arc-easy, lambada, piqa, winogrande
#   scripts/run_m12_9min.sh                         # again, after a stop: it goes on
#   model=v12 scripts/run_m12_9min.sh               # with value embeddings
#   model=d12 scripts/run_m12_9min.sh               # the same minutes with GPT-2's shape and AdamW
#
#   parameters   162,151,680: 12 layers, 6 heads, C=768, F=2048, T=1024, V=50,257, the head not tied
#   tokens       4,070 steps x 65,536 = 266.73e6; 6 x N x tokens = 2.6e17 flop
#   why not more No text is read more than twice, and English ends there, at 1.996 times. Only documentation
#                could fill nine minutes, and it is not the English of the questions
#   warm-up      30 steps, 1.97e6 tokens; Muon's learning rates are the defaults, 0.02 and 3.6e-3
#   one H200     4,070 x 109.0 ms (measured) = 7.4 minutes; with validation and checkpoints 7:49
#   d12          3,920 steps x 104 ms (estimated) = 6.8 minutes, 256.90e6 tokens. 1.2e-3 is AdamW's best rate
#                for this batch in 3,000 steps (docs/models.md#muon)
#   loss         m12 3.341, 1.084 bits per byte; 2026-11-29, commit 4c73fca (docs/train.md#nine-minutes)
#   v12          393,736,368 parameters, 231.6M more that are only looked up; 7:56, 3.277, 1.063 bits per byte
#
# gpus=N: 2, 4, 8 ... divide a step's 64 rows, and have other bits than one, whose step is a single lane.
# data=FOLDER: the shards' place; other texts want val=SHARDS, too.
# questions=FOLDER: where hellaswag/ and so on are. Flags by their long names replace the script's, except
# --output-dir.
set -euo pipefail
here=$(dirname "$0")
export gpus=${gpus:-1} data=${data:-dev/data/english}
model=${model:-m12} questions=${questions:-dev/data}
if [[ ! $gpus =~ ^(1|2|4|8|16|32|64)$ ]]; then
    printf "error: gpus=%s: 1, 2, 4, 8, 16, 32 or 64\nhint: they divide a step's 64 rows\n" "$gpus" >&2
    exit 1
fi
recipe=(--micro-batch $((64 / gpus)) --sequence-length 1024 --total-batch 65536 --weight-decay 0.1)
recipe+=(--val-every 250 --val-batches $((10 * gpus)) --sample-every 0 --checkpoint-every 1000)
case $model in
m12 | v12) recipe+=(--max-steps 4070 --optimizer muon --warmup 30 --final-fraction 0.1) ;;
d12) recipe+=(--max-steps 3920 --learning-rate 1.2e-3 --warmup 100 --final-fraction 0) ;;
*) printf "error: model=%s: m12, v12 or d12\nhint: another model takes flags of its own: docs/train.md\n" \
    "$model" >&2
    exit 1 ;;
esac
# All that was held out, a loss for each source; the shares are those of the tokens to train on.
shares=$(printf ",$data/english_%s_val_*.bin:%s" wikipedia 65 simple 16 novels 13 wikinews 5)
export val=${val:-${shares#,}}
run=runs/${model}_9min
"$here/pretrain.sh" "${model}_9min" english --model "$model" "${recipe[@]}" --evaluate 0 -- "$@"

cd "$here/.."
score() {       # MODEL: its loss and bits per byte of each source, and its answers with their standard errors
    ./train_gpt2cu eval "$1" --micro-batch 64 --val-data "$val" --evaluate 0 | sed -n '/^val loss/,$p'
    for set in hellaswag/hellaswag_val arc-easy/arc_easy_test lambada/lambada_test piqa/piqa_val \
        winogrande/winogrande_val; do
        if [ ! -e "$questions/$set.bin" ]; then
            echo "note: there is no $questions/$set.bin: python3 dev/data/get.py ${set%/*} makes it" >&2
            continue
        fi
        ./train_gpt2cu eval "$1" --micro-batch 64 --val-data "$val" --evaluate 1 \
            --eval-data "$questions/$set.bin" | sed -n "s/^eval /${set%/*}: /p"
    done
}
echo "== scores"
score "$run" | tee "$run/scores.txt"
echo "== the floor: scores of an untrained $model"
score "$model" | tee "$run/untrained.txt"

echo "== sha256: the same on any GPU of this kind, by the same program and CUDA libraries"
(cd "$run" && sha256sum main.log "$(ls model_*.bin | tail -n 1)") | tee "$run/sha256.txt"

echo "== three texts"
for prompt in "The capital of France is" "Once upon a time" "The water in the river"; do
    printf -- '---\n%s' "$prompt"
    ./train_gpt2cu sample "$run" --prompt "$prompt" --seed 1 --sample-tokens 120 --temperature 0.8
done | tee "$run/samples.txt"

rm -rf "$run/hf"
if [ "$model" = v12 ]; then
    echo "note: no class of transformers computes value embeddings, so there is no $run/hf"
else
    python3 dev/hf.py export "$run" "$run/hf"
fi
python3 dev/data/plot_log.py "$run" || echo "note: so there is no loss.png"
