# GPT-2 training in one CUDA file. Linux with GNU make; `make help` lists the targets.
#
#   make quickstart                         train and sample a small GPT-2 here, with or without a GPU
#   make train_gpt2cu PRECISION=FP32        the CUDA program
#   make train_gpt2cpu                      the same program without CUDA

# ---- settings: give them on the command line; a change rebuilds what it touches ----
PRECISION ?= BF16#  what the CUDA programs compute in: BF16, FP32 or FP16
ARCH ?= auto#       GPU to compile for: auto (those in this machine, else 90a), or 80, 86, 89, 90a, sm_90a ...
DEBUG ?= 0#         1: no optimisation on the host, -DDEBUG
NCCL ?= auto#       the CUDA programs on several GPUs: auto (if NCCL is here), 0, 1 (it must be here)
MPI ?= auto#        all programs under mpirun: likewise
LOOK ?= 0#          1: CUDA programs that nothing here can run, only for what the compiler says: build/look
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))

choose = $(if $(filter $(2),$($(1))),,$(error $(1)=$($(1)): choose one of $(2)))
$(call choose,PRECISION,BF16 FP32 FP16)
$(call choose,DEBUG,0 1)
$(call choose,LOOK,0 1)
$(call choose,NCCL,auto 0 1)
$(call choose,MPI,auto 0 1)

# ---- what this machine has ----
HASH := \#
# $(call works,FLAGS,PROGRAM): FLAGS if PROGRAM compiles and links with them, else nothing
# (to /dev/null: several makes may be at work at once)
TRY := $(CXX) -x c++ - -o /dev/null
works = $(shell printf '$(2)\n' | $(TRY) $(1) 2>/dev/null && echo '$(1)')
# Looked for once, when something is made that would use it.
BLAS_CALL := $(HASH)include <cblas.h>\nint main() { openblas_get_config(); }
OPENMP = $(eval OPENMP := $(call works,-fopenmp,int main() {}))$(OPENMP)
OPENBLAS = $(eval OPENBLAS := $(call works,-DUSE_OPENBLAS -lopenblas,$(BLAS_CALL)))$(OPENBLAS)

# $(call wanted,SETTING,FLAGS): FLAGS, as SETTING is auto, 0 or 1
wanted = $(if $(filter 0,$($(1))),,$(or $(2),$(if $(filter 1,$($(1))),$(no_$(1)))))
no_MPI = $(error MPI=1, but a program with MPI does not compile and link here: install libopenmpi-dev)
no_NCCL = $(error NCCL=1, but a program with NCCL 2.19 does not compile and link here: install libnccl-dev)
# mpicc, of every kind of MPI, shows what it would call; the C++ classes of old kinds would need a library
# more. NCCL may lie in the toolkit's own folders, which nvcc knows and g++ does not: nvcc is asked for them.
MPI_CALL := $(HASH)include <mpi.h>\nint main(int n, char** words) { return MPI_Init(&n, &words); }
MPI_ANY = -DUSE_MPI -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX \
          $(filter -I% -L% -l% -Wl%,$(shell mpicc -show 2>/dev/null))
MPI_FLAGS = $(eval MPI_FLAGS := $(call wanted,MPI,$(call works,$(MPI_ANY),$(MPI_CALL))))$(MPI_FLAGS)
NCCL_CALL := $(HASH)include <nccl.h>\nint main(int n, char** p) { return ncclMemAlloc((void**)p, n); }
NVCC_SAYS = $(shell $(NVCC) -dryrun -x cu /dev/null 2>&1 | sed -n '/INCLUDES=\|LIBRARIES=/s/"//gp')
NVCC_DIRS = $(need_nvcc)$(filter -I% -L%,$(subst =, ,$(NVCC_SAYS)))
NCCL_ANY = $(if $(call works,-DUSE_NCCL $(NVCC_DIRS) -lnccl,$(NCCL_CALL)),-DUSE_NCCL -lnccl)
NCCL_FLAGS = $(eval NCCL_FLAGS := $(call wanted,NCCL,$(NCCL_ANY)))$(NCCL_FLAGS)

# FOUND_GPUS: the compute capabilities of this machine's GPUs, asked for once, and only if something needs
# them. GPU_CAPS: those on which the CUDA programs run, 8.0 and later, without the dot.
no_CXX = $(error no $(CXX): scripts/setup.sh installs g++)
need_nvcc = $(if $(NVCC),,$(error no nvcc: install the CUDA toolkit, give NVCC=path, or make train_gpt2cpu))
TOO_OLD := 3 5 6 7
NVCC_CODES = $(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code 2>/dev/null)) 90a
KNOWN_ARCHS = $(need_nvcc)$(filter-out $(TOO_OLD:=%),$(NVCC_CODES))
ASK_GPUS = nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x '[0-9]*[.][0-9]'
FOUND_GPUS = $(eval FOUND_GPUS := $(sort $(shell $(ASK_GPUS))))$(FOUND_GPUS)
GPU_CAPS = $(subst .,,$(filter-out $(TOO_OLD:=.%),$(FOUND_GPUS)))
no_GPU = $(error this GPU has compute capability $(FOUND_GPUS), and 8.0 is needed: make train_gpt2cpu)
GPU_ARCHS = $(or $(filter $(KNOWN_ARCHS),$(GPU_CAPS)),$(if $(GPU_CAPS),,$(if $(FOUND_GPUS),$(no_GPU))),90a)
ARCHS = $(if $(filter auto,$(ARCH)),$(GPU_ARCHS),$(ARCH:sm_%=%))
check_arch = $(if $(filter-out $(KNOWN_ARCHS),$(ARCHS)),$(error ARCH=$(ARCH): choose auto or $(KNOWN_ARCHS)))
# What runs is not known where auto finds no GPU, or one that nvcc does not know: then compute_80 PTX comes
# along, which the driver of any later GPU compiles. Else it would only cost a quarter of the time to build.
is_known = $(and $(GPU_CAPS),$(if $(filter-out $(KNOWN_ARCHS),$(GPU_CAPS)),,yes))
PTX = $(if $(filter auto,$(ARCH)),$(if $(is_known),,-gencode arch=compute_80,code=compute_80))
codes = $(foreach a,$(patsubst 90,90a,$(1)),-gencode arch=compute_$(a),code=sm_$(a))
GENCODE = $(check_arch)$(call codes,$(ARCHS)) $(PTX)

# ---- flags ----
comma := ,
# A kind without its case does not compile.
WARNINGS = -Wall -Wextra -Werror=switch
# test_gpt2's main() calls less than the trainer's. private: build/cpu.flags must not see it.
test_gpt2cpu build/asan/test_gpt2cpu: private WARNINGS += -Wno-unused-function
CPU_OPT := $(if $(filter 1,$(DEBUG)),-O0 -g -DDEBUG,-O3 -march=native -fno-math-errno)
CPU_FLAGS = -std=c++17 -I. $(WARNINGS) $(CPU_OPT) -pthread $(OPENMP)
# -ldl: dlopen, before glibc 2.34
CPU_LIBS = -ldl $(filter -l%,$(OPENBLAS)) $(filter-out -D% -I%,$(MPI_FLAGS))
MODEL_FLAGS = -DGPT2_CPU $(filter -D%,$(OPENBLAS)) $(filter -D% -I%,$(MPI_FLAGS))
# -Og -g1: to compile takes half the time of -O1. No OpenMP: one thread.
ASAN_OPT = -Og
# The model's products run for long. Unrolled whole, their loops check no index that is then a constant.
UNROLL = $(call works,-ftree-vrp -fpeel-loops --param max-completely-peeled-insns=2000,int main() {})
build/asan/train_gpt2cpu build/asan/test_gpt2cpu: private ASAN_OPT = -O1 $(UNROLL)
ASAN_FLAGS = -std=c++17 -I. $(WARNINGS) -Wno-unknown-pragmas $(ASAN_OPT) -g1 -pthread \
             -fsanitize=address,undefined -fno-sanitize-recover=all
TSAN_FLAGS = -std=c++17 -I. $(WARNINGS) -O1 -g1 -pthread -fsanitize=thread
FUZZ_FLAGS = -std=c++17 -I. $(WARNINGS) -Wno-unknown-pragmas -Wno-unused-function -O1 -gline-tables-only \
             -pthread -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
# Every kernel for every kind of GPU, but hardly optimized: a tenth of the time (from CUDA 12.9 on)
LOOK_FLAGS = -O0 $(if $(shell $(NVCC) --help | grep -e --Ofast-compile),--Ofast-compile=max)
CUDA_OPT = $(if $(filter 1,$(LOOK)),$(LOOK_FLAGS),$(if $(filter 1,$(DEBUG)),-O1 -g -DDEBUG,-O3))
CHECKED := $(if $(filter 1,$(LOOK)),build/look,build)
# ptxas writes the same code with several threads (nvcc's own option for all phases would not). What is hardly
# optimized gains nothing from it.
SPLIT_ANY = $(need_nvcc)$(if $(shell $(NVCC) --help | grep -e --split-compile),-Xptxas --split-compile=4)
SPLIT = $(if $(filter 0,$(LOOK)),$(SPLIT_ANY))
# --threads: two kinds of code are compiled side by side
CUDA_FLAGS = -std=c++17 -lineinfo --threads 2 \
              -Xcompiler -Wall,-Werror=switch,-Wno-unknown-pragmas,-Wno-unused-function \
              -Xcompiler -pthread$(if $(OPENMP),$(comma)$(OPENMP)) \
              $(CUDA_OPT) $(SPLIT) $(filter -D% -I%,$(NCCL_FLAGS) $(MPI_FLAGS))
CUDA_LIBS = -lcublasLt $(patsubst -Wl$(comma)%,-Xlinker %,$(filter-out -D% -I%,$(NCCL_FLAGS) $(MPI_FLAGS)))
DEPS = -MMD -MP -MT $@ -MF build/$(subst /,-,$@).d

TOOLS := build/tokenize build/stories build/bigram build/checkpoint
TESTS := $(patsubst dev/test/%.cpp,build/%,$(wildcard dev/test/test_*.cpp))

.DEFAULT_GOAL := help
.PHONY: help quickstart tinyshakespeare tokenize stories bigram checkpoint plot check-docs fuzz lint
.PHONY: test test-quick test-gpu test-all test-mutants built-cpu built-gpu built-all built-test look look-all
.PHONY: sanitize bench bench-ops profile verify clean FORCE
.PHONY: train_gpt2 train_gpt2fp32cu test_gpt2 test_gpt2fp32cu profile_gpt2
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z][^:]*\):[^#]*## \(.*\)/\1#\2/p' Makefile | \
	    awk -F'#' '{printf(length($$1) > 15 ? "%s\n%16s%s\n" : "%-15s %s%s\n", $$1, "", $$2)}'
	@echo "settings: PRECISION=BF16|FP32|FP16 ARCH=auto|80|86|89|90a|... DEBUG=0|1"
	@echo "          NCCL=auto|0|1 MPI=auto|0|1 CXX= NVCC="

# The compilers of recipes. SAY=1, as `make test` has it, names what is being built.
building = $(if $(SAY),$(info building $@))
cxx = $(building)$(if $(shell command -v $(firstword $(CXX))),,$(no_CXX))$(CXX)
nvcc = $(building)$(NVCC)

quickstart: ## makes a corpus, trains a small GPT-2, samples: runs/quickstart
	scripts/quickstart.sh

# ---- programs ----
# Rewritten only when the flags change: what depends on it is then rebuilt.
build/cpu.flags: NOW = $(CXX) $(CPU_FLAGS) $(MODEL_FLAGS) $(CPU_LIBS)
build/cuda.flags: NOW = $(NVCC) $(CUDA_FLAGS) $(GENCODE) $(PRECISION) $(CUDA_LIBS)
build/%.flags: FORCE
	@mkdir -p build; echo '$(NOW)' | cmp -s - $@ || echo '$(NOW)' > $@

# What --version prints. No flag: a commit alone rebuilds nothing.
GIT_SAYS = $(if $(wildcard .git),$(shell git describe --always --dirty --exclude '*' 2>/dev/null))
COMMIT = $(addprefix -DGIT_COMMIT=,$(GIT_SAYS))

train_gpt2cpu test_gpt2cpu: %cpu: %.cu build/cpu.flags ## the trainer and its tests, without CUDA
	$(cxx) $(CPU_FLAGS) $(COMMIT) $(MODEL_FLAGS) $(DEPS) -x c++ $< -o $@ $(CPU_LIBS)

# For dev/test/test_lazy.py: streams do their work late, and what should have waited for it gets wrong bits.
# cpu_device.h comes first, because it wraps the host's collectives, which other headers call, too.
build/train_gpt2lazy: train_gpt2.cu build/cpu.flags
	$(cxx) $(CPU_FLAGS) $(MODEL_FLAGS) -DLAZY_STREAMS -include llmc/ops/cpu_device.h $(DEPS) -x c++ $< -o $@ \
	    $(CPU_LIBS)

HEADERS := $(wildcard llmc/*.h llmc/*/*.h dev/test/*.h)
train_gpt2cu test_gpt2cu profile_gpt2cu: %cu: %.cu train_gpt2.cu $(HEADERS) build/cuda.flags ## CUDA programs
	$(nvcc) $(CUDA_FLAGS) $(COMMIT) $(GENCODE) -DENABLE_$(PRECISION) $< -o $@ $(CUDA_LIBS)

# llm.c's names of its programs
train_gpt2 train_gpt2fp32cu test_gpt2 test_gpt2fp32cu profile_gpt2:
	$(error no target $@: make train_gpt2cu (PRECISION=FP32 for fp32), or without a GPU make train_gpt2cpu)

# For `make test`: build/check/PROGRAM.PRECISION has its kernels for this machine's GPUs, which takes two
# thirds of the time; for two kinds of GPU where there is none, and where nvcc only looks at it.
.SECONDEXPANSION:
$(CHECKED)/check/%: $$(basename $$*).cu train_gpt2.cu $(HEADERS)
	@mkdir -p $(@D)
	$(nvcc) $(CUDA_FLAGS) -DENABLE_$(subst .,,$(suffix $*)) $(CHECK_GPUS) $< -o $@ $(CUDA_LIBS)
TWO_KINDS = $(call codes,90a) -gencode arch=compute_80,code=\"sm_80,compute_80\"
CHECK_GPUS = $(if $(and $(filter 0,$(LOOK)),$(is_known)),$(call codes,$(GPU_CAPS)),$(TWO_KINDS))
# compiled only, and its kernels are the trainer's
$(CHECKED)/check/profile_gpt2.BF16: private CHECK_GPUS = $(call codes,90a)

# Only compute_80 PTX, which the driver compiles for the GPU it meets: the portable kernels on a new GPU.
build/ptx/%: $$(basename $$*).cu train_gpt2.cu $(HEADERS)
	@mkdir -p build/ptx
	$(nvcc) $(CUDA_FLAGS) -DENABLE_$(subst .,,$(suffix $*)) \
	    -gencode arch=compute_80,code=compute_80 $< -o $@ $(CUDA_LIBS)

# The trainer of a machine that has nothing of what is looked for: `make test` sees that it can be made. Its
# bits do not depend on the machine: dev/test/test_golden.py knows them.
build/plain/train_gpt2cpu: train_gpt2.cu $(HEADERS)
	@mkdir -p build/plain
	$(cxx) -std=c++17 -O2 -ffp-contract=off $(WARNINGS) -Wno-unknown-pragmas -pthread -DGPT2_CPU -x c++ $< \
	    -o $@ -ldl
$(CHECKED)/plain/%: private NCCL_FLAGS :=
$(CHECKED)/plain/%: private MPI_FLAGS :=
$(CHECKED)/plain/%: $$(basename $$*).cu train_gpt2.cu $(HEADERS)
	@mkdir -p $(@D)
	$(nvcc) $(CUDA_FLAGS) -DENABLE_$(subst .,,$(suffix $*)) \
	    -gencode arch=compute_80,code=compute_80 $< -o $@ $(CUDA_LIBS)

# A ladder of dev/cuda: the steps of one op, checked and timed against each other.
$(CHECKED)/cuda/%: dev/cuda/%.cu train_gpt2.cu $(HEADERS)
	@mkdir -p $(@D)
	$(nvcc) $(CUDA_FLAGS) -I. -DENABLE_BF16 -gencode arch=compute_90a,code=sm_90a $< -o $@ \
	    $(CUDA_LIBS)

build/asan/%cpu: %.cu
	@mkdir -p build/asan
	$(cxx) $(ASAN_FLAGS) -DGPT2_CPU $(DEPS) -x c++ $< -o $@
build/asan/%: dev/test/%.cpp
	@mkdir -p build/asan
	$(cxx) $(ASAN_FLAGS) $(DEPS) $< -o $@
build/%: dev/data/%.cpp build/cpu.flags
	$(cxx) $(CPU_FLAGS) $(DEPS) $< -o $@
build/%: dev/tools/%.cpp build/cpu.flags
	$(cxx) $(CPU_FLAGS) $(DEPS) $< -o $@
build/%: dev/test/%.cpp build/cpu.flags
	$(cxx) $(CPU_FLAGS) $(DEPS) $< -o $@
build/tsan/%: dev/test/%.cpp
	@mkdir -p build/tsan
	$(cxx) $(TSAN_FLAGS) $(DEPS) $< -o $@
# libFuzzer comes with clang alone. All targets in one program: most of it is train_gpt2.cu.
build/fuzz: dev/fuzz/fuzz.cpp
	@mkdir -p build
	$(building)clang++ $(FUZZ_FLAGS) -DGPT2_CPU $(DEPS) $< -o $@
-include $(wildcard build/*.d)

tokenize stories bigram checkpoint: %: build/% ## tools: shards, a story corpus, a baseline, what is in a run

# ---- data, plots, tests ----
tinyshakespeare: build/tokenize ## its shards (TEXT=file: from that text, without a download)
	@python3 dev/data/get.py tinyshakespeare $(if $(value TEXT),--from "$$TEXT")

plot: ## draw runs: RUN=dir, or RUNS="a b" [PNG=both.png]
	$(if $(value RUN)$(value RUNS),,$(error make plot wants a run: RUN=dir, or RUNS="a b"))
	@python3 dev/data/plot_log.py $(if $(value RUN),"$$RUN") $(RUNS) $(if $(value PNG),-o "$$PNG")

# docs/testing.md. What is missing is installed first, the compiler too; a make of its own then builds. A make
# that a test starts must not see the MAKEFLAGS of `make -j test`: it would warn that it shares no jobs.
PYTEST = $$(.venv/bin/python -c 'import xdist' 2>/dev/null && echo .venv/bin/python || echo python3) -m pytest
# the cores, or fewer: a container may have a quota, "200000 100000" for two
CORES = $$(cat /sys/fs/cgroup/cpu.max 2>/dev/null | \
    awk -v n=$$(nproc) '$$1 + 0 && n * $$2 > $$1 {n = int(($$1 + $$2 - 1) / $$2)} END {print n}')
define build_and_test
@scripts/setup.sh tests
@echo "building what has changed; the first time this takes minutes"
@$(MAKE) -s -j$(CORES) SAY=1 $(1) || { echo "0 passed, 1 failed, 0 skipped"; exit 1; }
@echo "testing: a dot is a test that passes, an s one that is skipped; the end says why"
@MAKEFLAGS= $(PYTEST) -q --no-header -n auto $(2)
endef
test: ## what a push has to pass: five minutes on two cores
	$(call build_and_test,built-test,dev/test)
test-quick: ## beside the editor: the CPU model, golden losses, unit tests of what changed
	@$(PYTEST) --version >/dev/null 2>&1 || scripts/setup.sh quick
	@$(MAKE) -s -j$(CORES) SAY=1 test_gpt2cpu build/plain/train_gpt2cpu train_gpt2cpu \
	    $(CHANGED_TESTS:%=build/asan/test_%)
	@$(PYTEST) -q --no-header -n 2 --slow -m "not gpu" dev/test/test_golden.py \
	    $(QUICK_TESTS:%='dev/test/test_programs.py::test_program[%]')
test-gpu: ## only what needs a GPU
	$(call build_and_test,built-gpu,dev/test -m gpu)
test-all: ## all builds, long fuzzing, TSan, mutants: an hour and more
	$(call build_and_test,built-all,dev/test --slow)

# Unit tests that are made of a file that git sees changed, as the preprocessor says
CHANGED := $(if $(filter test-quick,$(MAKECMDGOALS)),$(shell git diff --name-only HEAD))
MADE_OF = $(CXX) -std=c++17 -I. -MM dev/test/test_$$t.cpp
CHANGED_TESTS := $(if $(CHANGED),$(shell for t in $(TESTS:build/test_%=%); do \
    $(MADE_OF) | grep -qwF $(CHANGED:%=-e %) && echo $$t; done))
QUICK_TESTS = test_gpt2-invariance test_gpt2-model $(CHANGED_TESTS:%=asan-%)
# First what takes long to compile
ASAN_TESTS := $(TESTS:build/%=build/asan/%)
FUZZER := int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }
has_fuzzer = $(shell printf 'extern "C" $(FUZZER)\n' | \
    clang++ -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null 2>/dev/null && echo yes)
built-cpu: build/asan/test_gpt2cpu build/plain/train_gpt2cpu $(if $(has_fuzzer),build/fuzz) \
           build/train_gpt2lazy train_gpt2cpu \
           $(ASAN_TESTS) build/tsan/test_comm build/tsan/test_dataloader $(TOOLS)
built-gpu: $(foreach kind,BF16 FP16 FP32,build/check/test_gpt2.$(kind) build/check/train_gpt2.$(kind)) \
           $(TOOLS)
built-test: $(if $(GPU_CAPS),built-gpu) $(if $(NVCC),look) built-cpu
built-all: built-test $(if $(NVCC),look-all) build/asan/train_gpt2cpu test_gpt2cpu \
           build/tsan/test_host build/tsan/test_checkpoints $(TESTS)
# Compiled for what the compiler says: in all precisions only by test-all
OTHERS := $(foreach kind,BF16 FP16 FP32,check/test_gpt2.$(kind)) check/train_gpt2.FP16 check/train_gpt2.FP32 \
          check/profile_gpt2.BF16 plain/train_gpt2.BF16 $(patsubst dev/%.cu,%,$(wildcard dev/cuda/*.cu))
look:
	@$(MAKE) LOOK=1 build/look/check/train_gpt2.BF16
look-all:
	@$(MAKE) LOOK=1 $(OTHERS:%=build/look/%)
fuzz: build/fuzz ## hostile files, texts, flags: ten minutes each (needs clang)
	@for t in $$(python3 dev/fuzz/run.py --list); do python3 dev/fuzz/run.py $$t --seconds 600 || exit 1; done

test-mutants: ## 20 small mistakes in lines since BASE=commit: all noticed?
	python3 dev/test/mutants.py --base $(or $(BASE),HEAD)

sanitize: $(addprefix build/check/test_gpt2.,BF16 FP32 FP16) ## on a GPU: kernels under compute-sanitizer
	dev/gpu.sh sanitize

check-docs: train_gpt2cpu ## runs the commands of README and docs, made small, in a copy
	@$(PYTEST) -q --no-header -rA --slow dev/test/test_docs.py

VERIFIED = $(if $(and $(NVCC),$(GPU_CAPS)),train_gpt2cu,build/plain/train_gpt2cpu)
verify: build/stories build/tokenize ## trains 50 steps: which published bits do they have?
	@$(MAKE) -s $(VERIFIED)
	@python3 dev/verify.py ./$(VERIFIED)

# On one GPU, the first that CUDA_VISIBLE_DEVICES names. FLAGS: for the trainer. More in dev/bench/bench.py.
bench: train_gpt2cu profile_gpt2cu ## tokens/s beside PyTorch and llm.c: SIZES, WHO, LLMC, DATA, FLAGS
	python3 dev/bench/bench.py step --sizes '$(SIZES)' --who '$(WHO)' --llmc '$(LLMC)' --data '$(DATA)' \
	    --flags '$(FLAGS)'
bench-ops: profile_gpt2cu ## every op of a step beside what the GPU, and PyTorch, can do
	./profile_gpt2cu $(or $(FLAGS),-b 64)
	@-python3 dev/bench/pytorch.py $(or $(FLAGS),-b 64)
profile: profile_gpt2cu ## ncu's counters of every op of a step
	@python3 dev/bench/bench.py profile --flags '$(or $(FLAGS),-b 64)'

lint: ## long lines, links, launches without a stream, Python's names
	python3 dev/test/lint.py

clean: ## remove everything that make built
	rm -rf build train_gpt2cu test_gpt2cu profile_gpt2cu train_gpt2cpu test_gpt2cpu
