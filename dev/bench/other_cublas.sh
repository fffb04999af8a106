#!/bin/bash
# Does a run that goes on with another cuBLASLt say so, and do its bits differ? On one GPU, half a minute:
#
#     pip download --no-deps nvidia-cublas==VERSION && unzip -d other nvidia_cublas-*.whl
#     dev/bench/other_cublas.sh other/nvidia/cu13/lib [flags of the trainer]
set -euo pipefail
other=${1:?a folder with another libcublasLt.so}; shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 - "$work/data.bin" <<'EOF'
import random, struct, sys
random.seed(1)
tokens = [random.randrange(50257) for _ in range(200000)]
with open(sys.argv[1], "wb") as f:
    f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack("<200000H", *tokens))
EOF
./train_gpt2cu -i "$work/data.bin" -v 0 -s 0 -b 16 -x 4 -o "$work/same" "$@" > /dev/null
cp -r "$work/same" "$work/other"
for run in same other; do
    echo "== $run library"
    if [ $run = other ]; then export LD_LIBRARY_PATH=$other:${LD_LIBRARY_PATH:-}; fi
    ./train_gpt2cu -y 1 -x 8 -o "$work/$run" | grep '^step'
    grep '"set of libraries' "$work/$run/run.json"
done
cmp "$work/same/main.log" "$work/other/main.log" && echo "both have equal losses"
