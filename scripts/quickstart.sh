#!/usr/bin/env bash
# A small GPT-2 from nothing to samples, with what this machine has. Offline, but for missing packages.
#
#   make quickstart           # or scripts/quickstart.sh
#
#              CPU (2 cores)                       GPU
#   model      3.5M: 6 layers, C=64, T=128         51M: 8 layers, C=512, T=512
#   text       8 MB of generated stories           60 MB
#   time       about four minutes of training      under a minute
#
# Both in GPT-2's tokens. On a CPU nearly all of the time goes into the 50257 logits, which a narrow model
# keeps cheap; its layers cost little, and so does Muon for them: it ends at 0.429 nats a token, AdamW alone
# at 0.479.
# Both validate on stories of another seed, which no training story is from. A bigram model on the same shards
# is the loss to beat. Leaves runs/quickstart: main.log, metrics.jsonl, run.json, model_*.bin, loss.png; a run
# that was there is kept as runs/quickstart.1, .2, ... The stories are the same every time: dev/data/stories.
set -euo pipefail
cd "$(dirname "$0")/.."
# OpenMP threads that spin while they wait slow each other down tenfold when other programs want the cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
run=runs/quickstart

scripts/setup.sh quickstart
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
caps=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true)
if [ -n "$nvcc" ] && [ -n "$(awk '$1 + 0 >= 8' <<<"$caps")" ]; then
    trainer=train_gpt2cu text=60000000 steps=600
    flags=(--model L8,NH8,C512,T512,V50257 --micro-batch 64 --learning-rate 1e-3 --warmup 50)
    flags+=(--final-fraction 0.1 --val-every 100 --val-batches 10)
else
    if [[ $caps =~ ^[3567][.][0-9] ]]; then
        echo "note: this GPU has compute capability ${caps//$'\n'/ }, and 8.0 is needed, so the CPU trains"
    fi
    trainer=train_gpt2cpu text=8000000 steps=1350
    flags=(--model L6,NH4,C64,T128,V50257 --micro-batch 4 --learning-rate 5e-3 --warmup 50)
    flags+=(--lr-schedule linear --beta2 0.99 --optimizer muon --val-every 450 --val-batches 50)
fi
data=dev/data/stories/gpt2

# stop CODE SENTENCE: the run folder keeps what there is
stop() {
    echo "error: $2" >&2
    if compgen -G "$run/state_*" >/dev/null; then
        echo "hint: ./$trainer --resume 1 --output-dir $run goes on;" \
            "make quickstart starts anew, and keeps it" >&2
    else
        echo "hint: what it printed is above; make quickstart starts anew, and keeps this run" >&2
    fi
    exit "$1"
}

echo "== building: under a minute for a CPU, some minutes for a GPU"
build() { echo "make $1  # $2"; make -s "$1"; }
build "$trainer" "trains, evaluates and samples"
build stories "writes the stories to train on"
build tokenize "makes tokens of them"
build bigram "the model to beat"

echo "== making and tokenising stories: $data"
mkdir -p "$data"
build/stories --seed 1 --bytes "$text" -o "$data/train.txt"
build/stories --seed 2 --bytes 1000000 -o "$data/held_out.txt"
for part in train held_out; do
    # its file under its new name
    build/tokenize "$data/$part.txt" -o "$data/$part" --val-tokens 0 | sed "s/${part}_train/$part/"
    mv "$data/${part}_train.bin" "$data/$part.bin"
done

if [ -e "$run" ]; then
    n=1
    while [ -e "$run.$n" ]; do n=$((n + 1)); done
    mv "$run" "$run.$n"
    echo "== the run that was in $run is now $run.$n"
fi
mkdir -p "$run"

echo "== training: the flags are explained by ./$trainer --help"
# Not through a pipe: on a terminal it shows between its lines how far it is.
./"$trainer" --train-data "$data/train.bin" --val-data "$data/held_out.bin" --output-dir "$run" \
    --max-steps "$steps" --weight-decay 0.1 --sample-every 0 --log-every 50 "${flags[@]}" ||
    stop $? "./$trainer has failed"
model=$run/model_$(printf %08d "$steps").bin
[ -f "$model" ] || stop 1 "./$trainer ended before step $steps: there is no $model"

prompt="Once there was a little"
echo "== what it writes after: $prompt"
# stdout has the model's own text alone, a line of --- between two
./"$trainer" --model "$run" --max-steps 0 --prompt "$prompt" --num-samples 3 --sample-tokens 100 \
    --temperature 0.5 | awk -v prompt="$prompt" 'NR == 1 || begins { printf "%s", prompt }
        { print; begins = $0 == "---" }' | tee "$run/samples.txt"

echo "== a bigram model on the same shards"
build/bigram -i "$data/train.bin" -j "$data/held_out.bin" | tee "$run/bigram.txt"
bigram=$(sed -n 's/^bigram val loss \([0-9.]*\).*/\1/p' "$run/bigram.txt")
python3 dev/data/plot_log.py "$run" --line "$bigram" "bigram model" || echo "note: so there is no loss.png"
val=$(sed -n 's/^s:[0-9]* tel://p' "$run/main.log" | tail -1)
first=$(sed -n 's/^s:[0-9]* tel://p' "$run/main.log" | head -1)
ls "$run"
awk -v first="$first" -v val="$val" -v bigram="$bigram" 'BEGIN {
    printf "val loss %.3f at the start, %.3f at the end; a bigram model has %.3f\n", first, val, bigram
    learned = val + 0 > 0 && val + 0 < bigram + 0 && val + 0 < first - 1
    if (!learned) { print "error: it should be below that, and at least 1 below the start" > "/dev/stderr" }
    exit !learned
}'
