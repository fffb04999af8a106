#!/usr/bin/env bash
# The one command for a machine with a GPU: build, test, sanitize, prove determinism, compare with PyTorch,
# time.
#
#   dev/gpu.sh                       everything
#   dev/gpu.sh build test bench      only these steps: build test ptx sanitize determinism multi compare bench
#   dev/gpu.sh missing               of the step test, the suites that have not passed on these sources yet
#
# Prints a short table last and keeps all output in build/gpu/*.log. The step test is `make test-gpu`, which
# writes dev/test/gpu-results.txt; the other steps' rows are added below, if they ran the same sources.
# DATA: prefix of tinyshakespeare's shards (default dev/data/tinyshakespeare/tiny_shakespeare).
set -u
cd "$(dirname "$0")/.."
steps=${*:-build test ptx sanitize determinism multi compare bench}
DATA=${DATA:-dev/data/tinyshakespeare/tiny_shakespeare}
logs=build/gpu results=dev/test/gpu-results.txt
python=python3
if .venv/bin/python -c 'import xdist' 2>/dev/null; then python=.venv/bin/python; fi
pytest="$python -m pytest -q -n auto"
mkdir -p $logs
declare -a table
failures=0 passed=0 failed=0 skipped=0

# row NAME RESULT: one line of the table; a result that does not begin with "ok" is a failure
row() {
    table+=("$(printf '%-26s %s' "$1" "$2")")
    printf '%-26s %s\n' "$1" "$2"
    case "$2" in ok*) ;; *) failures=$((failures + 1)) ;; esac
}
# suite NAME COMMAND...: its closing line is the result
suite() {
    local name=$1 log=$logs/$1.log start=$SECONDS code=0 last
    shift
    "$@" >"$log" 2>&1 || code=$?
    last=$(tail -n 1 "$log")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
        skipped=$((skipped + BASH_REMATCH[3]))
    else
        failed=$((failed + 1))
    fi
    if [ $code = 0 ]; then row "$name" "ok: $last ($((SECONDS - start)) s)"; else
        grep -E '^FAIL|error:' "$log" | head -8
        row "$name" "FAILED (exit $code): $last"
    fi
}
# check NAME COMMAND...: exit code only
check() {
    local name=$1 log=$logs/$1.log start=$SECONDS
    shift
    if "$@" >"$log" 2>&1; then row "$name" "ok ($((SECONDS - start)) s)"; else
        tail -n 5 "$log"
        row "$name" "FAILED"
    fi
}

gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)
echo "$gpu, driver $driver"

for step in $steps; do
    case $step in
    build)
        check build make -s -j"$(nproc)" built-gpu
        check "build PTX" make -s build/ptx/test_gpt2.BF16
        ;;
    test)   # the suites of `make test-gpu`
        suite test $pytest dev/test -m gpu
        ;;
    missing)
        suite missing $pytest dev/test -m gpu --missing
        ;;
    ptx)    # the portable code, as a GPU without machine code of its own would run it
        suite "sm_80 PTX, BF16" build/ptx/test_gpt2.BF16
        ;;
    sanitize)   # racecheck (2025.3.1) ends with an error of its own in product_sm90_kernel, whose blocks are
                # clusters; test_gpt2 runs the kernel's epilogues alone, too
        for precision in BF16 FP32 FP16; do
            for tool in memcheck racecheck initcheck synccheck; do
                name="$tool $precision"
                except=
                if [ $tool = racecheck ]; then except="--kernel-name-exclude kns=product_sm90"; fi
                suite "$name" compute-sanitizer --tool $tool $except --error-exitcode 1 \
                    --log-file "$logs/$name.txt" build/check/test_gpt2.$precision kernels --small
                check "$name: 0 errors" grep -E "SUMMARY: 0 (errors|hazards)" "$logs/$name.txt"
            done
        done
        ;;
    determinism)
        for run in 1 2; do
            rm -rf build/gpu/run$run
            build/check/train_gpt2.BF16 -i "${DATA}_train.bin" -j "${DATA}_val.bin" \
                -b 8 -t 256 -z 4096 -x 100 -v 50 -s 0 -o build/gpu/run$run >$logs/determinism$run.log 2>&1
        done
        check "determinism: main.log" cmp build/gpu/run1/main.log build/gpu/run2/main.log
        check "determinism: weights" cmp build/gpu/run1/model_00000100.bin build/gpu/run2/model_00000100.bin
        ;;
    multi)  # 1, 2, ... all GPUs: a run's bits do not depend on how many, nor on the ZeRO stage
        gpus=$(nvidia-smi -L | grep -c '^GPU ')
        if [ "$gpus" -lt 2 ]; then row multi "ok: skipped, one GPU"; continue; fi
        for precision in BF16 FP32; do
            train=build/check/train_gpt2.$precision
            alone=
            for n in 1 2 4 8; do
                for zs in 0 1; do
                    if [ $n -gt "$gpus" ] || [ $n$zs = 11 ]; then continue; fi
                    out=build/gpu/multi.$precision.$n.$zs
                    rm -rf $out
                    check "$precision, $n GPUs, -zs $zs: run" $train --gpus $n -zs $zs --lanes 8 \
                        -i "${DATA}_train.bin" -j "${DATA}_val.bin" -b 8 -t 256 -z 16384 -x 50 -v 25 -s 0 \
                        -o $out
                    if [ -z "$alone" ]; then alone=$out; continue; fi       # the judge of the others
                    check "$precision, $n GPUs, -zs $zs: log" cmp $alone/main.log $out/main.log
                    check "$precision, $n GPUs, -zs $zs: model" cmp {$alone,$out}/model_00000050.bin
                done
            done
        done
        ;;
    compare)
        suite "beside PyTorch" python3 dev/reference/compare.py
        ;;
    bench)
        check bench make -s bench
        ;;
    *) echo "error: '$step' is not a step of dev/gpu.sh" >&2; exit 1 ;;
    esac
done

echo
printf '%s\n' "${table[@]}"
# beside what the tests wrote about the same sources
others=$(printf '%s\n' "${table[@]}" | grep -v -E '^(build|test|missing) ')
if [ -n "$others" ] && grep -q "^sha256: $(python3 dev/test/gpus.py)$" $results; then
    printf '\ndev/gpu.sh, %s\n%s\n' "$(date -u +%Y-%m-%d)" "$others" >>$results
fi
python3 dev/test/status.py --write
echo "$passed passed, $failed failed, $skipped skipped"
[ $failures = 0 ]
