#!/usr/bin/env bash
# Installs what building, testing and plotting need and this machine lacks; quickstart.sh and .ci/run call it.
#
#   scripts/setup.sh            what building and training use (quickstart: the same, and no last line)
#   scripts/setup.sh quick      and what `make test-quick` uses: pytest
#   scripts/setup.sh tests      and what only tests use: pytest, MPI (12 MB), clang's libFuzzer (55 MB)
#   scripts/setup.sh data       and what dev/data/get.py fetches and reads parquet and zstd with (60 MB)
#   scripts/setup.sh tensorboard    TensorBoard alone, for dev/data/tensorboard_log.py (60 MB)
#
# On Debian or Ubuntu as root it installs packages; elsewhere it prints the command and ends with 1. Python
# packages go into .venv, and only if python3 cannot import them already. Without them there is no loss.png
# and no test, so failing to get them is only a warning.
set -u
cd "$(dirname "$0")/.."

log=$(mktemp)
trap 'rm -f "$log" "$log.out"' EXIT

what=${1:-}
needed=() useful=()
command -v python3 >/dev/null || needed+=(python3)
if [ "$what" != tensorboard ]; then
    command -v g++ >/dev/null || needed+=(g++)
    command -v make >/dev/null || needed+=(make)
    command -v git >/dev/null || useful+=(git)
    # OpenBLAS makes the CPU build several times faster; without it the plain loops do.
    printf '#include <cblas.h>\nint main() { openblas_get_config(); }\n' |
        g++ -x c++ - -lopenblas -o "$log.out" 2>/dev/null || useful+=(libopenblas-dev)
fi
# The Makefile knows whether it finds MPI. Who starts runs with it has it; the tests want to try it anywhere.
if [ "$what" = tests ] && { [[ $(make -n train_gpt2cpu 2>/dev/null) != *-DUSE_MPI* ]] ||
                          ! command -v mpirun >/dev/null; }; then
    useful+=(libopenmpi-dev openmpi-bin)
fi
# Only clang has libFuzzer. Installed apart from the rest: in old releases its packages have other names.
fuzzing=()
if [ "$what" = tests ] &&
   ! printf 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n' |
       clang++ -fsanitize=fuzzer,address,undefined -x c++ - -o "$log.out" 2>/dev/null; then
    fuzzing+=(clang libclang-rt-dev)
fi

# can_import MODULES: in one of the Pythons that are used
can_import() { python3 -c "import $1" 2>/dev/null || .venv/bin/python -c "import $1" 2>/dev/null; }
imports='matplotlib, numpy, tiktoken, xxhash'
case $what in quick | tests) imports+=', gguf, jinja2, tokenizers, pyflakes, pytest_timeout, xdist' ;; esac
need_venv=0 had_venv=0
[ "$what" = tensorboard ] || can_import "$imports" || need_venv=1
if [ -x .venv/bin/python ]; then had_venv=1; fi
# A package that only one script wants: what it is imported as, and what is not possible without it.
extra='' need_extra=0
case $what in
    data) extra='pyarrow==25.0.1 huggingface_hub==2.4.0 tokenizers==0.23.3'
        module='pyarrow.parquet, huggingface_hub, tokenizers'
        lost="dev/data/get.py can neither fetch from the hub nor read parquet, zstd and tokenizer.json" ;;
    tensorboard) extra=tensorboard==2.21.0 module=tensorboard.summary.writer.event_file_writer
        lost="dev/data/tensorboard_log.py writes no event files" ;;
esac
if [ -n "$extra" ]; then can_import "$module" || need_extra=1; fi
if [ $((need_venv + need_extra)) != 0 ] && ! python3 -c 'import ensurepip' 2>/dev/null; then
    useful+=(python3-venv)
fi

all="${needed[*]} ${useful[*]} ${fuzzing[*]}"
install="apt-get update && apt-get install -y --no-install-recommends"
# installing WHAT COMMAND...: what the command says goes to the log. The dots show that it is still at work.
installing() {
    printf 'installing (a dot every five seconds): %s ' "$1"
    while sleep 5 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do printf .; done &
    local dots=$! code=0
    "${@:2}" >"$log" 2>&1 || code=$?
    kill $dots 2>/dev/null
    wait $dots 2>/dev/null
    echo
    return $code
}
# install_all PACKAGE...: installs them all; if not, shows why and the command
install_all() {
    [ $# = 0 ] && return
    local command="$install $*"
    install=${install#*&& }                 # one update, which without a network takes long
    installing "$*" bash -c "$command" && return
    tail -5 "$log" >&2
    echo "this failed: $command" >&2
    return 1
}
if [ -n "${all// }" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    install_all "${needed[@]}" || { echo "error: without it nothing can be built" >&2; exit 1; }
    install_all "${useful[@]}" || echo "warning: going on without them" >&2
    install_all "${fuzzing[@]}" || echo "warning: going on without them" >&2
elif [ ${#needed[@]} -gt 0 ]; then
    echo "error: not installed here: $all" >&2
    echo "hint: on Debian or Ubuntu: sudo sh -c '$install $all'" >&2
    exit 1
elif [ $((${#useful[@]} + ${#fuzzing[@]})) -gt 0 ]; then
    echo "note: useful, but not installed here: $all" >&2
fi
# NCCL is in NVIDIA's package list, not in the system's, and it has to fit the CUDA toolkit: only a word.
if [[ $(nvidia-smi -L 2>/dev/null) == *"GPU 1:"* ]] &&
   compiles=$(make -n train_gpt2cu 2>/dev/null) && [[ $compiles != *-DUSE_NCCL* ]]; then
    echo "note: without NCCL the CUDA programs take one GPU only; NVIDIA's package is libnccl-dev" >&2
fi

if [ $need_venv = 1 ]; then
    if ! installing "what dev/requirements.txt lists, into .venv" \
            bash -c 'python3 -m venv .venv && .venv/bin/pip install -r dev/requirements.txt'; then
        tail -3 "$log" >&2
        echo "warning: not all Python packages, so perhaps no loss.png and no tests" >&2
        echo "hint: python3 -m venv .venv && .venv/bin/pip install -r dev/requirements.txt" >&2
        if [ $had_venv = 0 ]; then rm -rf .venv; fi
    fi
fi
if [ $need_extra = 1 ]; then
    if ! installing "$extra, into .venv" \
            bash -c "{ [ -x .venv/bin/pip ] || python3 -m venv .venv; } && .venv/bin/pip install $extra"; then
        tail -3 "$log" >&2
        echo "error: no $extra, so $lost" >&2
        echo "hint: python3 -m venv .venv && .venv/bin/pip install $extra" >&2
        exit 1
    fi
fi
case $what in
    "") echo "next: make quickstart, which trains a small model in minutes" ;;
    data) echo "next: python3 dev/data/get.py, which lists the data sets" ;;
    tensorboard) echo "next: python3 dev/data/tensorboard_log.py runs/NAME" ;;
esac
