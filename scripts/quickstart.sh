#!/usr/bin/env bash
# A small GPT-2 from nothing to samples, with what this machine has. Offline, but for missing packages.
#
#   make quickstart           # or scripts/quickstart.sh
#
#              CPU (2 cores)                       GPU
#   model      0.8M: 4 layers, C=128, T=128        124M-shaped, halved: 8 layers, C=512, T=512
#   tokens     bytes, V=256                        GPT-2's, V=50257
#   text       8 MB of generated stories           60 MB
#   time       about 90 s of training              under a minute
#
# Both validate on stories of another seed, which no training story is from. A bigram model on the same shards
# is the loss to beat. Leaves runs/quickstart: main.log, metrics.jsonl, run.json, model_*.bin, loss.png.
set -eu
cd "$(dirname "$0")/.."
# OpenMP threads that spin while they wait slow each other down tenfold when other programs want the cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
run=runs/quickstart
data=$run/data

scripts/setup.sh
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [ -n "$nvcc" ] && nvidia-smi -L >/dev/null 2>&1; then
    trainer=train_gpt2cu bytes=0 text=60000000
    flags=(--model L8,NH8,C512,T512,V50257 --micro-batch 64 --max-steps 600 --learning-rate 1e-3 --warmup 50)
    flags+=(--val-every 100 --val-batches 10 --sample-every 0 --top-k 40)
else
    trainer=train_gpt2cpu bytes=1 text=8000000
    flags=(--model L4,NH4,C128,T128,V256 --micro-batch 4 --max-steps 2400 --learning-rate 4e-3 --warmup 100)
    flags+=(--beta2 0.99 --val-every 400 --val-batches 20 --sample-every 0)
fi

echo "== building $trainer"
make -s "$trainer" tokenize stories bigram

echo "== making and tokenising stories: $data"
rm -rf "$run"
mkdir -p "$data"
build/stories --seed 1 --bytes "$text" -o "$data/train.txt"
build/stories --seed 2 --bytes 1000000 -o "$data/held_out.txt"
for part in train held_out; do
    build/tokenize "$data/$part.txt" -o "$data/$part" --bytes "$bytes"      # writes $part_train.bin
    mv "$data/${part}_train.bin" "$data/$part.bin"
done

echo "== training: the flags are explained by ./$trainer --help"
./"$trainer" --train-data "$data/train.bin" --val-data "$data/held_out.bin" --output-dir "$run" \
    --final-fraction 0.1 --weight-decay 0.1 "${flags[@]}" | tee "$run/stdout.txt"

echo "== samples"
model=$(ls "$run"/model_*.bin | tail -1)
./"$trainer" --model "$model" --max-steps 0 --prompt "One morning" --num-samples 3 --sample-tokens 100 \
    --temperature 0.7 --train-data "$data/train.bin" --val-data "$data/held_out.bin" |
    tee "$run/samples.txt"

echo "== a bigram model on the same shards"
build/bigram -i "$data/train.bin" -j "$data/held_out.bin" | tee "$run/bigram.txt"
bigram=$(sed -n 's/^bigram val loss \([0-9.]*\).*/\1/p' "$run/bigram.txt")
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
"$python" dev/data/plot_log.py "$run" --line "$bigram" "bigram model" || true
val=$(sed -n 's/^s:[0-9]* tel://p' "$run/main.log" | tail -1)
first=$(sed -n 's/^s:[0-9]* tel://p' "$run/main.log" | head -1)
ls "$run"
awk -v first="$first" -v val="$val" -v bigram="$bigram" 'BEGIN {
    printf "val loss %.3f at the start, %.3f at the end; a bigram model has %.3f\n", first, val, bigram
    exit !(val < bigram && val < first - 1)
}'
