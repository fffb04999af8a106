#!/usr/bin/env bash
# Nine minutes of training on one H100, then scores, three texts and a model for transformers.
#
#   scripts/setup.sh data                           # once
#   python3 dev/data/get.py debian-docs             # the corpus, of Debian's documentation
#   python3 dev/data/get.py hellaswag               # the questions, if wanted; also lambada, arc-easy
#   scripts/run_m12_9min.sh                         # again, after a stop: it goes on
#   model=d12 scripts/run_m12_9min.sh               # the same minutes with GPT-2's shape and AdamW
#
#   parameters   162,151,680: 12 layers, 6 heads, C=768, F=2048, T=1024, V=50,257, the head not tied
#   tokens       5,000 steps x 65,536 = 327.68e6; 6 x N x tokens = 3.2e17 flop
#   warm-up      30 steps, 1.97e6 tokens; Muon's learning rates are the defaults, 0.02 and 3.6e-3
#   one H100     5,000 x 107.9 ms (measured) = 9.0 minutes, without validation
#   d12          5,190 steps x 104 ms (measured) = 9.0 minutes, 340.13e6 tokens. 1.2e-3 is AdamW's best rate
#                for this batch in 3,000 steps (docs/models.md#muon)
#   loss         m12 1.597 after 8:59, d12 1.720 after 8:46, one H200, 2026-11-28, commit 9e98df3; with
#                everything below 568 s and 556 s (docs/train.md#nine-minutes)
#
# gpus=N: more of them divide the time. data=FOLDER: other shards. questions=FOLDER: where hellaswag/,
# lambada/ and arc-easy/ are. Flags by their long names replace the script's, except --output-dir.
set -euo pipefail
here=$(dirname "$0")
export gpus=${gpus:-1}
model=${model:-m12} questions=${questions:-dev/data}
recipe=(--micro-batch 64 --sequence-length 1024 --total-batch 65536 --weight-decay 0.1)
recipe+=(--val-every 250 --val-batches 8 --sample-every 0 --checkpoint-every 1000)
case $model in
m12) recipe+=(--max-steps 5000 --optimizer muon --warmup 30 --final-fraction 0.1) ;;
d12) recipe+=(--max-steps 5190 --learning-rate 1.2e-3 --warmup 100 --final-fraction 0) ;;
*) printf "error: model=%s: m12 or d12\nhint: another model takes flags of its own, see docs/train.md\n" \
    "$model" >&2
    exit 1 ;;
esac
run=runs/${model}_9min
"$here/pretrain.sh" "${model}_9min" debian-docs --model "$model" "${recipe[@]}" --evaluate 0 -- "$@"

cd "$here/.."
: >"$run/scores.txt"
ask() {         # SET FILE: its scores with their standard errors
    if [ ! -e "$questions/$1/$2" ]; then
        echo "note: there is no $questions/$1/$2: python3 dev/data/get.py $1 makes it" >&2
        return
    fi
    ./train_gpt2cu eval "$run" --micro-batch 64 --evaluate 1 --eval-data "$questions/$1/$2" |
        sed -n "s/^eval /$1: /p" | tee -a "$run/scores.txt"
}
echo "== questions"
ask hellaswag hellaswag_val.bin
ask arc-easy arc_easy_test.bin
ask lambada lambada_test.bin

prompt="To install the package,"
echo "== what it writes after: $prompt"
./train_gpt2cu sample "$run" --prompt "$prompt" --num-samples 3 --sample-tokens 120 --temperature 0.8 |
    awk -v prompt="$prompt" 'NR == 1 || begins { printf "%s", prompt }
        { print; begins = $0 == "---" }' | tee "$run/samples.txt"

rm -rf "$run/hf"
python3 dev/hf.py export "$run" "$run/hf"
python3 dev/data/plot_log.py "$run" || echo "note: so there is no loss.png"
