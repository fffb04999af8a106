/*
A run's configuration: the table of all flags, checks over several flags, and the settings that a resumed run
keeps. Host only.

    settings_parse(argc, argv);                             // the command line fills `settings`
    if (checkpoint) { settings_resume(checkpoint->facts, config, build); } else { settings_keep(); }
    settings_settle(&config, is_descriptor, build);         // and all that the flags and files leave open
    if (run.B > 4 && run_task() == Task::Train) { ... }     // nothing changes any more
    if (run_given("prompt")) { ... }                        // by the user, not by default
*/
#pragma once

#include "../checked_files.h"       // gives: die, format, file_text
#include "../checksum.h"            // gives: checksum, checksum_text
#include "../facts.h"               // gives: Facts, facts_find, fact_number
#include "../numbers.h"             // gives: parse_int, kLargestCount
#include "../comm/comm.h"           // gives: comm, warn, CommOptions
#include "../data/mixture.h"        // gives: mixture_split
#include "../model/lanes.h"         // gives: lanes_default, lanes_error
#include "../model/model_config.h"  // gives: Config
#include "../ops/op_types.h"        // gives: Kernels, NormKind
#include "flags.h"                  // gives: Flag, flags_text
#include "other_names.h"            // gives: kOtherNames
#include "schedulers.h"             // gives: kLrKinds

// Options of this program's build.
struct Build { const char* precision; bool is_cuda; };

// Options of ENUM flags, in the order of the table's texts.
enum class MatmulDtype { Bf16, Fp8, Fp8Head };

// What the model itself goes by: its Options (train_gpt2.cu) begin with these.
struct ModelSettings {
    int B = 0, T = 0;               // rows and tokens a row of a micro-step, at most
    uint64_t seed = 0;
    int muon = 0;                   // for the layers' matrices; AdamW for the others
    int grads_bf16 = 0;             // gradients of tensors with two dimensions in bf16, rounded with dither
    int state_bf16 = 0;             // m and v in bf16, rounded stochastically
    double dropout = 0.0;           // probability, in training: of the embedding's and the branches' outputs
    double weight_decay = 0.0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8;   // AdamW's; decay: of matrices
    double embedding_rate = 1.0, head_rate = 1.0;   // AdamW's learning rate of these, in learning rates
    double muon_momentum = 0.95, muon_decay = 0.0;
    int64_t muon_warmup = 0;        // steps in which the momentum rises
    double grad_clip = 1.0;         // largest norm of the gradient; 0: no clipping
    double skip_loss = 0.0, skip_norm = 0.0;    // UpdatePolicy's max_loss_score, max_norm_score; 0: none
    int recompute = 0;              // 0: save all activations; in backward recompute 1: GELU; 2: norms, too;
                                    // 3: whole layers
    int head_chunks = 1;            // parts of the logits, one after another in the same memory
    int master = 0;                 // fp32 master copies of 16-bit parameters
    int tf32 = 0;                   // FP32 builds: tensor cores for GEMMs and attention
    Kernels kernels = Kernels::Auto;
};

struct Settings : ModelSettings {
    // data, model and sizes
    const char *train_data, *val_data, *eval_data, *model, *like, *output_dir, *prompt;
    int64_t total_batch;            // tokens per optimizer step
    const char* max_steps;          // the user's text; run_max_steps() is the number
    Block block;
    NormKind norm;

    // training
    double lr, final_fraction, cooldown, muon_lr;
    int64_t warmup;
    int schedule, overfit, shuffle; // schedule: LrKind
    int document_mask;

    // computation
    MatmulDtype matmul_dtype;
    CommOptions comm;
    const char* plan;
    double price;
    int zero, lanes;

    // output
    int checkpoint_every, keep, major_every, resume;
    int val_every, val_batches, log_every, log_gpu, evaluate, eval_every, verbose;
    int sample_every, sample_tokens, num_samples, top_k;
    double temperature, top_p;

    // not flags
    bool chat;                      // chat RUN
    bool serves;                    // serve RUN
    bool all_questions;             // eval RUN --all
    bool resumed;                   // continues from a checkpoint
    bool again;                     // -y 1 without a checkpoint: begins again with the settings of run.json
    bool own_launch;                // -y 1: --gpus was taken from run.json
    bool tunes;                     // begins with a file's weights
    bool tells_speed;               // tokens/s of texts, on stderr
    int folder_B;                   // -e FOLDER: -b of the folder's run; 0: not known
};
// The command line fills the settings, then files do (run_folder.h), then settings_settle, and last, once the
// data are known, data_open. All else reads `run`, which is the same, but const.
static Settings settings;
static const Settings& run = settings;

#define DATA_DIR "dev/data/tinyshakespeare/"
static const FlagTable kFlags = {
    // letters, name           type         where                     default   min, max, options
    //     help
    {"i",   "train-data",      FLAG_STRING, &settings.train_data,
        DATA_DIR "tiny_shakespeare_train.bin", 1, 0, nullptr,
        "training shards (glob), or a mixture of sources, 'web_*.bin:0.7,code_*.bin:0.3'"},
    {"j",   "val-data",        FLAG_STRING, &settings.val_data,
        DATA_DIR "tiny_shakespeare_val.bin", 1, 0, nullptr,
        "validation shards (glob), or a mixture, whose sources have a loss each"},
    {"e",   "model",           FLAG_STRING, &settings.model,          "d12",     1, 0, nullptr,
        "model_*.bin; the folder of a run or by dev/hf.py import; or d12 d24 d36 d48, m12 and other even "
        "depths, v12, gpt3:c768, qwen3:0.6B, L4,NH4,C128,T128,V256, "
        "llama:L4,NH4,NKV2,HS32,C128,F256,T128,V256; behind these ,window=256,pattern=SSSL",
        FLAG_FIXED},
    {"",    "like",            FLAG_STRING, &settings.like,           "",        0, 0, nullptr,
        "the settings of the run in this folder, or of this model_*.bin, where no flag says otherwise",
        FLAG_NOW},
    {"o",   "output-dir",      FLAG_STRING, &settings.output_dir,     "",        0, 0, nullptr,
        "folder for main.log, metrics.jsonl, run.json, model_*.bin (none: nothing is written)", FLAG_NOW},
    {"n",   "checkpoint-every", FLAG_INT,   &settings.checkpoint_every, "1000",  0, INT_MAX, nullptr,
        "checkpoint every N steps, and at the end; 0: at the end only"},
    {"nk",  "keep",            FLAG_INT,    &settings.keep,           "2",       0, INT_MAX, nullptr,
        "number of newest checkpoints to keep; 0: all"},
    {"nm",  "major-every",     FLAG_INT,    &settings.major_every,    "0",       0, INT_MAX, nullptr,
        "checkpoints at multiples of N steps stay for ever; 0: none"},
    {"y",   "resume",          FLAG_BOOL,   &settings.resume,         "0",       0, 1, nullptr,
        "go on with the run in -o, from its last checkpoint; where there is none, begin", FLAG_NOW},
    {"b,-micro-batch-size", "micro-batch", FLAG_INT, &settings.B,              "4",       1, 65536, nullptr,
        "rows per GPU per micro-step (B)", FLAG_FIXED},
    {"t,-seq-len", "sequence-length", FLAG_INT, &settings.T,             "0",       0, 1 << 24, nullptr,
        "tokens per row (T); 0: the model's longest", FLAG_FIXED},
    {"z,d,-total-batch-size", "total-batch", FLAG_INT64, &settings.total_batch, "0",      0, 1e15, nullptr,
        "tokens per optimizer step, a multiple of B*T*ranks; 0: B*T*ranks, one micro-step each", FLAG_FIXED},
    {"x",   "max-steps",       FLAG_STRING, &settings.max_steps, "epoch",   1, 0, nullptr,
        "optimizer steps, or `epoch`: once through the data; 0: validate, or what -h 1 or --prompt ask for; "
        "a run's folder (-e) with that run's data, -b, -t and number of validation batches, unless given"},
    {"l,-lr", "learning-rate",  FLAG_FLOAT,  &settings.lr,             "3e-4",    0, 100, nullptr,
        "peak learning rate; with Muon that of the other tensors, by default 3.6e-3", FLAG_FIXED, true},
    {"k",   "lr-schedule",     FLAG_ENUM,   &settings.schedule,       "cosine",  0, 0, kLrKinds,
        "learning rate schedule", FLAG_FIXED},
    {"u,-warmup-steps", "warmup", FLAG_INT64, &settings.warmup,        "0",       0, 1e15, nullptr,
        "steps of linear warm-up", FLAG_FIXED, true},
    {"q",   "final-fraction",  FLAG_FLOAT,  &settings.final_fraction, "0",       0, 1, nullptr,
        "learning rate at the last step, as a fraction of the peak", FLAG_FIXED},
    {"",    "cooldown",        FLAG_FLOAT,  &settings.cooldown,       "0.2",     0, 1, nullptr,
        "-k wsd: the part of the run, at its end, in which the learning rate falls", FLAG_FIXED},
    {"c",   "weight-decay",    FLAG_FLOAT,  &settings.weight_decay,   "0",       0, 10, nullptr,
        "AdamW's decay of matrices, embeddings and head, but not of value embeddings", FLAG_FIXED, true},
    {"",    "beta1",           FLAG_FLOAT,  &settings.beta1,          "0.9",     0, 0.9999999, nullptr,
        "AdamW", FLAG_FIXED},
    {"",    "beta2",           FLAG_FLOAT,  &settings.beta2,          "0.95",    0, 0.9999999, nullptr,
        "AdamW", FLAG_FIXED},
    {"",    "eps",             FLAG_FLOAT,  &settings.eps,            "1e-08",   1e-30, 1, nullptr,
        "AdamW", FLAG_FIXED},
    {"",    "embedding-rate",  FLAG_FLOAT,  &settings.embedding_rate, "1",       0, 1e4, nullptr,
        "the learning rate of wte, wpe and value embeddings, as a multiple of the others'; with Muon by "
        "default 27.78 of m12, v12 and other depths, and, beside no letter, of what has an untied head",
        FLAG_FIXED},
    {"",    "head-rate",       FLAG_FLOAT,  &settings.head_rate,      "1",       0, 1e4, nullptr,
        "an untied LM head's learning rate, as a multiple of the others'; where --embedding-rate is 27.78 "
        "by default, 1.111",
        FLAG_FIXED},
    {"",    "optimizer",       FLAG_ENUM,   &settings.muon,           "adamw",   0, 0, "adamw|muon",
        "AdamW for all tensors, or Muon for the layers' matrices and AdamW for the others", FLAG_FIXED},
    {"",    "muon-lr",         FLAG_FLOAT,  &settings.muon_lr,        "0.02",    0, 100, nullptr,
        "Muon: peak learning rate; -k, -u and -q are those of -l", FLAG_FIXED},
    {"",    "muon-momentum",   FLAG_FLOAT,  &settings.muon_momentum,  "0.95",    0, 0.9999999, nullptr,
        "Muon: Nesterov's", FLAG_FIXED},
    {"",    "muon-warmup",     FLAG_INT64,  &settings.muon_warmup,    "300",     0, 1e15, nullptr,
        "Muon: steps in which its momentum rises from 0.85", FLAG_FIXED},
    {"",    "muon-decay",      FLAG_FLOAT,  &settings.muon_decay,     "0.01",    0, 10, nullptr,
        "Muon: weight decay of its matrices, for which -c then does not count", FLAG_FIXED},
    {"",    "grad-clip",       FLAG_FLOAT,  &settings.grad_clip,      "1",       0, 1e30, nullptr,
        "largest gradient norm; 0: no clipping", FLAG_FIXED},
    {"sl",  "skip-loss",       FLAG_FLOAT,  &settings.skip_loss,      "0",       0, 1e30, nullptr,
        "skip updates whose loss is X standard deviations above the mean of the last 128; 0: none"},
    {"sg",  "skip-norm",       FLAG_FLOAT,  &settings.skip_norm,      "0",       0, 1e30, nullptr,
        "skip updates whose gradient norm, before clipping, is X standard deviations above; 0: none"},
    {"",    "seed",            FLAG_INT64,  &settings.seed,           "1337",    0, 9e15, nullptr,
        "initial weights, data order, samples, stochastic rounding", FLAG_FIXED},
    {"",    "shuffle",         FLAG_BOOL,   &settings.shuffle,        "1",       0, 1, nullptr,
        "training rows in an order drawn from the seed, another each epoch; 0: in the shards' order",
        FLAG_FIXED},
    {"",    "document-mask",   FLAG_BOOL,   &settings.document_mask,  "0",       0, 1, nullptr,
        "a token sees its own document alone, which begins at an end-of-text token; by default 1 where the "
        "training data are conversations", FLAG_FIXED},
    {"v",   "val-every",       FLAG_INT,    &settings.val_every,      "20",      0, INT_MAX, nullptr,
        "validate every N steps, and at the end; 0: never", FLAG_KEPT, true},
    {"m",   "val-batches",     FLAG_INT,    &settings.val_batches,    "20",      1, INT_MAX, nullptr,
        "batches per validation, of each source of a mixture, at most the whole set; with -x 0 a batch is "
        "the run's -b rows, or 64 where -e is no run's folder"},
    {"",    "log-every",       FLAG_INT,    &settings.log_every,      "0",       0, INT_MAX, nullptr,
        "a line every N steps, with their means; 0: each step, or on a terminal some 20 in all; main.log and "
        "metrics.jsonl have each step"},
    {"lg",  "log-gpu",         FLAG_INT,    &settings.log_gpu,        "0",       0, INT_MAX, nullptr,
        "every N steps, on the terminal and in metrics.jsonl: the GPU's clock, power, temperature, memory, "
        "and what limits its clock, from the driver; rank 0's GPU only; 0: never"},
    {"h",   "evaluate",        FLAG_BOOL,   &settings.evaluate,       "0",       0, 1, nullptr,
        "1: answer questions (HellaSwag, MMLU, LAMBADA, ...) in training, or with -x 0; not --help"},
    {"",    "eval-data",       FLAG_STRING, &settings.eval_data,
        "dev/data/hellaswag/hellaswag_val.bin", 1, 0, nullptr, "the questions of -h 1"},
    {"",    "eval-every",      FLAG_INT,    &settings.eval_every,     "0",       0, INT_MAX, nullptr,
        "-h 1: answer them every N steps, and at the end; 0: as often as -v"},
    {"s",   "sample-every",    FLAG_INT,    &settings.sample_every,   "20",      0, INT_MAX, nullptr,
        "generate text every N steps, and at the end; 0: never"},
    {"g",   "sample-tokens",   FLAG_INT,    &settings.sample_tokens,  "64",      1, 1 << 24, nullptr,
        "tokens per sample"},
    {"",    "prompt",          FLAG_STRING, &settings.prompt,         "",        0, 0, nullptr,
        "text that samples go on from; empty: a new document"},
    {"",    "num-samples",     FLAG_INT,    &settings.num_samples,    "1",       1, 1000000, nullptr,
        "samples each time"},
    {"",    "temperature",     FLAG_FLOAT,  &settings.temperature,    "1",       0, 100, nullptr,
        "of sampling; 0: always the likeliest token"},
    {"",    "top-k",           FLAG_INT,    &settings.top_k,          "0",       0, kMaxV, nullptr,
        "sample among the k likeliest tokens; 0: among all"},
    {"",    "top-p",           FLAG_FLOAT,  &settings.top_p,          "1",       0, 1, nullptr,
        "and of those among the likeliest that have this part of the probability"},
    {"a",   "overfit",         FLAG_BOOL,   &settings.overfit,        "0",       0, 1, nullptr,
        "train on the first batch over and over", FLAG_FIXED},
    {"f",   "tf32",            FLAG_BOOL,   &settings.tf32,           "1",       0, 1, nullptr,
        "TF32 tensor cores for the GEMMs and attention of an FP32 build", FLAG_FIXED},
    {"w",   "master-weights",  FLAG_BOOL,   &settings.master,         "1",       0, 1, nullptr,
        "fp32 master copies of 16-bit weights; 0: weights are rounded stochastically", FLAG_FIXED},
    {"r",   "recompute",       FLAG_INT,    &settings.recompute,      "0",       0, 3, nullptr,
        "in backward (less memory, more time): 0 nothing, 1 GELU, 2 GELU and norms, 3 whole layers"},
    {"",    "head-chunks",     FLAG_INT,    &settings.head_chunks,    "1",       1, 1024, nullptr,
        "the LM head takes a micro-step's rows in N parts, whose logits take turns in memory", FLAG_FIXED},
    {"",    "block",           FLAG_ENUM,   &settings.block,          "sequential", 0, 0, BLOCK_NAMES,
        "attention, then the MLP; or both beside each other, with a norm for each, or (tied) one for both",
        FLAG_FIXED},
    {"",    "norm",            FLAG_ENUM,   &settings.norm,           "layernorm", 0, 0, NORM_NAMES,
        "rmsnorm: takes no mean away and has no bias", FLAG_FIXED},
    {"",    "dropout",         FLAG_FLOAT,  &settings.dropout,        "0",       0, 0.95, nullptr,
        "in training, of the embedding's, attention's and the MLP's output; the norm adds the residual",
        FLAG_FIXED},
    {"",    "kernels",         FLAG_ENUM,   &settings.kernels,        "auto",    0, 0, "auto|portable|sm90",
        "kernels of ops that have several: the best for this GPU, sm_80's, or Hopper's (or an error)",
        FLAG_FIXED},
    {"",    "grad-dtype",      FLAG_ENUM,   &settings.grads_bf16,     "fp32",    0, 0, "fp32|bf16",
        "gradient accumulation; bf16: 2-D gradients in bf16, rounded without bias, others in fp32",
        FLAG_FIXED},
    {"",    "state-dtype",     FLAG_ENUM,   &settings.state_bf16,     "fp32",    0, 0, "fp32|bf16",
        "AdamW's m and v and Muon's momentum; bf16: rounded stochastically", FLAG_FIXED},
    {"",    "matmul-dtype",    FLAG_ENUM,   &settings.matmul_dtype,   "bf16",    0, 0, "bf16|fp8|fp8-head",
        "what matrix products multiply in training: the weights' type; FP8 in the layers; or also in the "
        "LM head", FLAG_FIXED},
    {"",    "gpus",            FLAG_INT,    &settings.comm.gpus,      "0",       0, kCommMaxLocal, nullptr,
        "start N ranks on this machine, one per GPU; 0: as started (mpirun, srun, torchrun, or alone)",
        FLAG_NOW},
    {"zs",  "zero-stage",      FLAG_INT,    &settings.zero,           "0",       0, 1, nullptr,
        "what the ranks share out: 0 nothing, 1 the optimizer's state"},
    {"",    "lanes",           FLAG_INT,    &settings.lanes,          "0",       0, 1 << 24, nullptr,
        "parts of a step whose gradients are summed by a tree, the same for any number of ranks; 0: chosen",
        FLAG_FIXED},
    {"pi",  "process-init",    FLAG_ENUM,   &settings.comm.init,      "auto",    0, 0, "auto|mpi|tcp|fs",
        "how ranks find each other: what started them says, MPI, a server (-ps), or a folder (-pf)",
        FLAG_NOW},
    {"ps",  "process-server",  FLAG_STRING, &settings.comm.server,    "",        0, 0, nullptr,
        "-pi tcp: HOST[:PORT] of rank 0", FLAG_NOW},
    {"pf",  "process-folder",  FLAG_STRING, &settings.comm.folder,    "",        0, 0, nullptr,
        "-pi fs: a folder that all ranks see", FLAG_NOW},
    {"pn",  "processes",       FLAG_INT,    &settings.comm.processes, "0",       0, kCommMaxWorld, nullptr,
        "-pi tcp|fs: number of ranks", FLAG_NOW},
    {"pr",  "process-rank",    FLAG_INT,    &settings.comm.process,   "-1",      -1, kCommMaxWorld - 1,
        nullptr, "-pi tcp|fs: which rank this is, from 0", FLAG_NOW},
    {"pg",  "gpus-per-node",   FLAG_INT,    &settings.comm.per_node,  "0",       0, 1024, nullptr,
        "-pi tcp|fs: ranks on each machine; 0: found out", FLAG_NOW},
    {"",    "verbose",         FLAG_INT,    &settings.verbose,        "0",       -1, 1, nullptr,
        "1: at the start also the settings by default and what takes the memory; -1: on stdout steps, "
        "validation losses, samples and saved checkpoints alone", FLAG_NOW},
    {"",    "plan",            FLAG_STRING, &settings.plan,           "",        0, 0, nullptr,
        "train nothing: print the memory and the time that the run would take on this kind of GPU (4090, L4, "
        "A100, H200, ...; auto: the one here), the largest -b, and the flags with which a larger one fits",
        FLAG_NOW},
    {"",    "price",           FLAG_FLOAT,  &settings.price,          "0",       0, 1e6, nullptr,
        "--plan: dollars for an hour of one GPU", FLAG_NOW},
};

static inline bool run_given(const char* name) { return flags_given(kFlags, name); }

// What --help shows; with `all`, also each group's further flags.
static const std::vector<FlagGroup> kFlagGroups = {
    {"RUN is a run's folder or a model. Flags may follow:\n"
     "  eval RUN                    the validation loss, as -e RUN -x 0\n"
     "  eval RUN --all              answers all questions that are in dev/data\n"
     "  sample RUN                  writes, as -e RUN -x 0 --prompt ''\n"
     "  chat RUN                    reads lines and goes on from each, to the end of\n"
     "                              a sentence (with -g by so many tokens); Ctrl-C\n"
     "                              ends a text, Ctrl-D the program; a model that was\n"
     "                              trained on answers answers each\n"
     "  serve RUN                   reads requests of token ids, for dev/serve.py\n"
     "  --version                   release, commit, compiler, CUDA and libraries", "", ""},
    {"data and model", "train-data val-data model output-dir resume like",
     "block norm dropout shuffle seed document-mask"},
    {"batch and schedule",
     "micro-batch sequence-length total-batch max-steps learning-rate warmup lr-schedule weight-decay "
     "optimizer",
     "final-fraction cooldown beta1 beta2 eps embedding-rate head-rate muon-lr muon-momentum muon-warmup "
     "muon-decay grad-clip skip-loss skip-norm"},
    {"validation, text and checkpoints", "val-every sample-every prompt checkpoint-every verbose",
     "val-batches evaluate eval-data eval-every sample-tokens num-samples temperature top-k top-p keep "
     "major-every log-every"},
    {"memory and several GPUs", "recompute gpus zero-stage plan price",
     "head-chunks master-weights grad-dtype state-dtype matmul-dtype process-init process-server "
     "process-folder processes process-rank gpus-per-node"},
    {"for measuring and debugging", "",
     "overfit log-gpu tf32 kernels lanes"}};

// The command line with `eval|sample|chat|serve RUN` in front written out as flags. Sets what has no flag.
static inline std::vector<const char*> words_in_full(int argc, char** argv) {
    std::vector<const char*> words(argv, argv + argc);
    const std::string form = argc > 1 ? argv[1] : "";
    settings.chat = form == "chat";
    settings.serves = form == "serve";
    if (form != "eval" && form != "sample" && !run.chat && !run.serves) { return words; }
    if (argc > 2 && strcmp(argv[2], "--help") == 0) { words.erase(words.begin() + 1); return words; }
    if (argc < 3 || argv[2][0] == '-') {
        const std::string folder = argc < 3 ? "" : format("; a folder of that name is ./%s", argv[2]);
        die("%s wants a run's folder or a model\nhint: %s %s RUN, and flags after it%s", form.c_str(),
            argv[0], form.c_str(), folder.c_str());
    }
    bool prompts = false, answers = false;
    for (int i = 3; i < argc; i++) {
        const std::string word = argv[i];
        if (form == "eval" && word == "--all") { settings.all_questions = true, words[i] = "--evaluate=1"; }
        const Flag* flag = flags_find(kFlags, word.substr(0, word.find('=')));
        const std::string name = flag ? flag->name : "";
        prompts = prompts || name == "prompt", answers = answers || name == "evaluate";
        if (name == "max-steps" || name == "model") {
            die("%s takes no %s: it trains nothing, and its model is '%s'\n"
                "hint: leave it out; %s", form.c_str(), flags_title(flag).c_str(), argv[2],
                form == "eval" ? "-m N is how many batches it reads" : "-g N is how many tokens it writes");
        }
    }
    if (run.all_questions && answers) {
        die("eval %s --all answers questions, and takes no -h (--evaluate)\nhint: leave it out", argv[2]);
    }
    words[1] = "-e";
    words.insert(words.begin() + 3, {"-x", "0"});
    if (form == "sample" && !prompts) { words.push_back("--prompt="); }
    return words;
}

static inline void settings_parse(int argc, char** argv) {
    const std::vector<const char*> words = words_in_full(argc, argv);
    flags_parse(kFlags, (int)words.size(), words.data(), kFlagGroups, kOtherNames);
}

// Prints text that is no result; --verbose -1 suppresses it.
__attribute__((format(printf, 1, 2))) static inline void say(const char* fmt, ...) {
    if (run.verbose < 0) { return; }
    va_list args;
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
}

// Evaluate: validation loss, answers to questions, or both. Write: texts after --prompt, chat, or serve; it
// may answer questions first.
enum class Task { Train, Evaluate, Write };
static inline Task run_task() {
    // as a text: settings_settle has not yet refused what is no number
    if (strcmp(run.max_steps, "0") != 0) { return Task::Train; }
    return run.chat || run.serves || run_given("prompt") ? Task::Write : Task::Evaluate;
}

// Micro-steps of this rank in a step.
static inline int rank_micro_steps() {
    return (int)(run.total_batch / ((int64_t)run.B * run.T * comm.world));
}

// Does the run generate text, during training or instead of it?
static inline bool run_writes_text() {
    return run_task() == Task::Train ? run.sample_every > 0 : run_task() == Task::Write;
}

// Does the run validate? With -x 0 -h 1 only if the user names validation data.
static inline bool run_validates() {
    if (run_task() == Task::Train) { return run.val_every > 0; }
    return run_task() == Task::Evaluate && (!run.evaluate || run_given("val-data"));
}

// The rows that a validation reads, if the set has so many: -m batches of the run's -b. An evaluation thus
// reads what the run has read, whatever its own -b. For a model without a run a batch is 64 rows.
static inline int64_t val_rows() {
    const bool own = run_task() == Task::Train || run.resumed;
    return (int64_t)run.val_batches * (own ? run.B : run.folder_B > 0 ? run.folder_B : 64);
}

// ---- what all ranks must agree on ----

static inline Facts flag_facts() {
    Facts facts = {{"chat", run.chat ? "1" : "0"}, {"serve", run.serves ? "1" : "0"}};
    for (const Flag& flag : kFlags) {
        const std::string name = flag.name;
        if (name == "process-rank" || name == "process-server") { continue; }
        facts.push_back({"--" + name, flags_text(&flag)});
    }
    return facts;
}

// Hash of this program's file: flags, data and program determine a run's result.
static inline std::string executable_hash() {
    const std::string program = file_text("/proc/self/exe");
    return checksum_text(checksum(program.data(), program.size()));
}

// ---- settings that a run keeps ----

// With bf16 sums each rank has one lane.
static inline bool one_lane_each() { return run.grads_bf16; }

// The settings to be saved: before settings_settle settles what they leave open.
static std::vector<std::string> run_texts;
static inline void settings_keep() {
    run_texts.clear();
    for (const Flag& flag : kFlags) { run_texts.push_back(flags_text(&flag)); }
}

// ---- what a new run's command leaves open ----

// A flag that the user has not given gets this value, which the run keeps.
static inline void auto_set(const char* name, double value, const std::string& from) {
    const Flag* flag = flags_find(kFlags, std::string("--") + name);
    if (flag->given || run.resumed || run.again || *run.like) { return; }
    flags_set(flag, format("%.15g", value).c_str());
    flag->from = from;
    run_texts[(size_t)(flag - kFlags.data())] = flags_text(flag);
}

// AdamW's peak learning rates and shortest warm-ups, by ladders and recipes. docs/train.md has this table and
// says where each row is from. The first row counts that has no fewer channels than the model, no more tokens
// a step than the run, and no more steps.
struct AutoRate { int channels, batch, steps; double rate; int warmup; };
constexpr AutoRate kAutoRates[] = {
    {128, 0, 0, 3e-3, 20},      {512, 0, 0, 1e-3, 20},      {768, 524288, 0, 6e-4, 20},
    {768, 32768, 2000, 1.2e-3, 100},                        {768, 32768, 0, 9e-4, 100},
    {768, 0, 0, 6e-4, 20},      {1024, 0, 0, 3e-4, 20},     {1536, 0, 0, 2.5e-4, 20},
    {2048, 0, 0, 2e-4, 20},     {2560, 0, 0, 1.6e-4, 20},   {kMaxC, 0, 0, 1.2e-4, 20}};

// What does not depend on the data. The tensors left to AdamW beside Muon want a higher rate
// (dev/bench/NOTES.md). An embedding of Llama's family that is not the head wants 0.1, and the head 0.004.
static inline void auto_of_model(const Config& c, bool is_descriptor) {
    const bool by_name = !flags_lettered(kFlags), untied = c.is_llama() && !c.shape().tied;
    settings.tunes = !is_descriptor;
    if (by_name) { auto_set("weight-decay", 0.1, "auto"); }
    if (!run.muon) { return; }
    auto_set("learning-rate", by_name && !untied && c.C <= 128 ? 9e-3 : 3.6e-3, "Muon");
    if (!is_descriptor || !untied || !(by_name || dial_depth(run.model) > 0)) { return; }
    auto_set("embedding-rate", 27.78, "Muon");
    auto_set("head-rate", 1.111, "Muon");
}

// The rest, for a run of so many steps. Weights from a file want a tenth of the rate. At most ten validations
// divide a short run.
static inline void auto_of_data(const Config& c, int64_t steps) {
    if (flags_lettered(kFlags)) { return; }
    const AutoRate* row = kAutoRates;
    while (row->channels < c.C || row->batch > run.total_batch || row->steps > steps) { row++; }
    if (!run.muon) {
        auto_set("learning-rate", row->rate / (run.tunes ? 10 : 1),
                 format("auto: %sC=%d, steps of %lld tokens", run.tunes ? "a tenth, " : "", c.C,
                        (long long)run.total_batch));
    }
    const std::string of_steps = format("auto: of %lld steps", (long long)steps);
    const int64_t shortest = std::min<int64_t>(steps / 6, run.muon ? 20 : row->warmup);
    auto_set("warmup", (double)std::max(shortest, std::min<int64_t>(steps / 20, 700)), of_steps);
    const bool has_val = run_given("val-data") || !run_given("train-data");
    auto_set("val-every", has_val ? (double)std::min<int64_t>(round_interval(steps, 10), 500) : 0.0,
             has_val ? of_steps : "auto: there is no --val-data");
}

// The flags that settings_settle has settled. A run that begins again leaves them open again.
static inline std::string settings_left_open() {
    std::string names;
    for (size_t i = 0; i < kFlags.size(); i++) {
        const Flag& flag = kFlags[i];
        const bool was_open = run_texts[i] == flag.def && flags_text(&flag) != flag.def;
        if (was_open) { names += (names.empty() ? "" : " ") + std::string(flag.name); }
    }
    return names;
}

// A run's data paths are relative to the folder where it was started, as long as that folder exists. One that
// cannot be looked at may exist: opening the data says why, unless other data are given.
constexpr const char* kDataFlags[] = {"train-data", "val-data", "eval-data"};
static inline std::string from_start(const std::string& pattern, const std::string* start,
                                     bool in_mixture = false) {
    char here[PATH_MAX];
    struct stat st;
    const bool relative = pattern[0] != '/' && pattern[0] != '~';
    if (!relative || !start) { return pattern; }
    const bool gone = stat(start->c_str(), &st) != 0 ? is_absent() : !S_ISDIR(st.st_mode);
    if (gone || (getcwd(here, sizeof(here)) && *start == here)) { return pattern; }
    std::string path;
    const bool is_pattern = in_mixture || stat((*start + "/" + pattern).c_str(), &st) != 0;
    const char* special = in_mixture ? "*?[\\:," : "*?[\\";
    for (char c : *start) { path += (is_pattern && strchr(special, c) ? "\\" : "") + std::string(1, c); }
    return path + "/" + pattern;
}

// The same for a flag's text, which may be a mixture of such paths.
static inline std::string data_from_start(const std::string& text, const std::string* start) {
    std::string paths;
    for (const MixturePart& part : mixture_split(text)) {
        if (!part.has_weight) { return from_start(text, start); }
        paths += (paths.empty() ? "" : ",") + from_start(part.pattern, start, true) + ":" + part.weight;
    }
    return paths;
}

// Dies if the run was started with a flag that this program lacks, unless its value is what this program does
// anyway: release 0.1's --on-bad-loss stop, and commit d5971c2's NorMuon, which is off (0, in run.json also
// false). -zs 1 has the bits of release 0.1's -zs 2 with as many lanes.
static inline void settings_known(Facts* facts, const std::string& prefix, const char* folder) {
    const std::set<std::string> same = {"on-bad-loss stop", "muon-beta2 0", "muon-cautious 0",
                                        "muon-cautious false"};
    for (auto& fact : *facts) {
        if (fact.first.compare(0, prefix.size(), prefix) != 0) { continue; }
        const std::string name = fact.first.substr(prefix.size());
        if (name == "zero-stage" && fact.second == "2") { fact.second = "1"; }
        if (flags_find(kFlags, "--" + name) || same.count(name + " " + fact.second)) { continue; }
        die("the run in %s began with --%s %s, which this program does not have\n"
            "hint: go on with the program that began it", folder, name.c_str(), fact.second.c_str());
    }
}

// The fact of a state that says what --dropout drops.
constexpr const char* kDropoutFact = "dropout of";

// Takes over the settings of a run whose model is `c`. Settings that the run left open stay as it settled
// them: on another number of ranks it keeps its batch and its lanes.
static inline void settings_resume(const Facts& from, const Config& c, const Build& build) {
    static Facts facts = from;                  // static: the flags keep pointing to these texts
    settings_known(&facts, "flag.", run.output_dir);
    for (auto& fact : facts) {
        for (const char* name : kDataFlags) {
            if (fact.first != std::string("flag.") + name) { continue; }
            fact.second = data_from_start(fact.second, facts_find(from, "started in"));
        }
    }
    static Facts kinds;
    if (!c.is_llama()) {                        // Llama's family does not take these flags
        kinds = {{"block", flags_split(BLOCK_NAMES, '|')[(int)c.block]},
                 {"norm", flags_split(NORM_NAMES, '|')[(int)c.norm]}};
    }
    auto saved = [&](const std::string& name) {
        if (const std::string* kind = facts_find(kinds, name)) { return kind->c_str(); }
        const std::string* text = facts_find(facts, "flag." + name);
        const Flag* flag = flags_find(kFlags, "--" + name);
        // a flag that the run's program lacked: what that program did, today's default but for one
        if (!text && flag->resume == FLAG_FIXED) { return name == "muon-warmup" ? "0" : flag->def; }
        const char* settled = name == "sequence-length" ? "T" : name == "total-batch" ? "total_batch"
                            : name == "lanes" ? "lanes" : "";
        const std::string* number = facts_find(facts, settled);
        if (number && *number == flags_text(flag)) { text = number; }   // the user gives the settled value
        return text ? text->c_str() : nullptr;
    };
    flags_resume(kFlags, saved);
    settings_keep();
    settings.resumed = true;
    settings.T = (int)fact_number(facts, "T", 1, INT_MAX);
    settings.total_batch = fact_number(facts, "total_batch", 1, kLargestCount);
    const int lanes = (int)fact_number(facts, "lanes", 1, INT_MAX);
    if (!one_lane_each()) { settings.lanes = lanes; }
    else if (lanes != comm.world) {
        warn("the run had %d lanes and goes on with one on each of %d ranks (--grad-dtype bf16): its sums, "
             "and so its bits, will differ", lanes, comm.world);
    }
    if (run.dropout > 0.0 && !facts_find(facts, kDropoutFact)) {
        die("the run in -o %s does not say what its --dropout %g drops\n"
            "hint: go on with the program that began it", run.output_dir, run.dropout);
    }
    const std::string* precision = facts_find(facts, "precision");
    if (!precision || *precision != build.precision) {
        const std::string then = precision ? *precision : "no known type";
        die("the run in -o %s is in %s, and this program computes in %s\n"
            "hint: make train_gpt2cu PRECISION=%s", run.output_dir, then.c_str(), build.precision,
            then.c_str());
    }
}

// ---- checks over more than one flag ----

// Settles and checks the number of lanes.
static inline void lanes_check(int64_t micro_steps) {
    const bool given = run.lanes != 0, one_each = one_lane_each();
    if (one_each && given && run.lanes != comm.world) {
        die("--lanes %d: with --grad-dtype bf16 each of the %d ranks has one lane\nhint: leave --lanes out",
            run.lanes, comm.world);
    }
    const int64_t good = lanes_default(micro_steps, comm.world);
    if (!given) { settings.lanes = (int)(one_each ? comm.world : good); }
    const std::string error = lanes_error(run.lanes, micro_steps, comm.world);
    if (error.empty()) { return; }
    std::string hint = format("--lanes %lld fits", (long long)good);
    if (run.resumed) { hint = "a resumed run keeps its lanes: choose another number of ranks"; }
    die("--lanes %d: %s\nhint: %s", run.lanes, error.c_str(), hint.c_str());
}

// Settles block and norm. A descriptor takes them from the flags; a file has its own.
static inline void variant_check(Config* c, bool is_descriptor) {
    const struct { const char* flag; int wanted, has; const char* names; } kinds[] = {
        {"block", (int)run.block, (int)c->block, BLOCK_NAMES},
        {"norm", (int)run.norm, (int)c->norm, NORM_NAMES}};
    for (const auto& k : kinds) {
        const bool free = is_descriptor && !c->is_llama();
        if (free || k.wanted == k.has || !run_given(k.flag)) { continue; }
        const std::vector<std::string> names = flags_split(k.names, '|');
        die("--%s %s: the model of -e %s has %s\nhint: leave --%s out, or start a new model with -e d12",
            k.flag, names[k.wanted].c_str(), run.model, names[k.has].c_str(), k.flag);
    }
    if (is_descriptor && !c->is_llama()) { c->block = run.block, c->norm = run.norm; }
    settings.block = c->block, settings.norm = c->norm; // for the start-up table and run.json
}

// Settles and checks -t, -z and the lanes.
static inline void batch_check(const Config& c) {
    if (run.T == 0) { settings.T = c.maxT; }
    if (run.T > c.maxT) {
        die("-t %d is longer than the model's longest sequence, %d\n"
            "hint: use -t %d or less, or a model with more positions", run.T, c.maxT, c.maxT);
    }
    const int64_t tokens = (int64_t)run.B * run.T;
    if (tokens > INT_MAX) {
        die("-b %d x -t %d = %lld tokens in a micro-step: at most %d", run.B, run.T, (long long)tokens,
            INT_MAX);
    }
    const int64_t all = tokens * comm.world;            // one micro-step of every rank
    if (run_given("total-batch") && run.total_batch <= 3 &&
        (run.total_batch == 0 || run.total_batch % all != 0)) {
        die("-z %lld: -z is the total batch in tokens per step, not a ZeRO stage\n"
            "hint: the ZeRO stage is -zs; give -z a multiple of B*T*ranks or leave it out",
            (long long)run.total_batch);
    }
    if (run.total_batch == 0) { settings.total_batch = all; }
    if (run.total_batch % all != 0) {
        const int64_t below = std::max(all, run.total_batch / all * all);
        const std::string ranks = comm.world > 1 ? format(" * %d ranks", comm.world) : "";
        const std::string hint = run.resumed ? "a resumed run keeps its batch: choose another number of ranks"
                                             : format("use -z %lld", (long long)below);
        die("-z %lld is not a multiple of B*T = %d*%d%s = %lld\nhint: %s", (long long)run.total_batch, run.B,
            run.T, ranks.c_str(), (long long)all, hint.c_str());
    }
    const int64_t micro_steps = run.total_batch / tokens;
    if (micro_steps > INT_MAX) {
        die("-z %lld is %lld micro-steps of B*T = %lld tokens: at most %d", (long long)run.total_batch,
            (long long)micro_steps, (long long)tokens, INT_MAX);
    }
    lanes_check(micro_steps);
}

// The products' sizes are multiples of 16: channels, the MLP's width, wte's padded rows, and B*T.
static inline void fp8_check(const Config& c, const Build& build) {
    if (run.matmul_dtype == MatmulDtype::Bf16) { return; }
    const bool head = run.matmul_dtype == MatmulDtype::Fp8Head;
    if (build.is_cuda && strcmp(build.precision, "BF16") != 0) {
        die("--matmul-dtype fp8 needs a program with PRECISION=BF16; this one computes in %s",
            build.precision);
    }
    if (head && run.head_chunks > 1) {
        die("--head-chunks %d is not for --matmul-dtype fp8-head, which takes all rows at once\n"
            "hint: --matmul-dtype fp8", run.head_chunks);
    }
    const int F = c.shape().F;
    if (run.B * run.T % 16 != 0 || c.C % 16 != 0 || F % 16 != 0 || (head && c.Vp % 16 != 0)) {
        die("--matmul-dtype fp8 needs multiples of 16: -b %d x -t %d = %d tokens, C = %d, F = %d (the MLP's "
            "width), wte of %d rows", run.B, run.T, run.B * run.T, c.C, F, c.Vp);
    }
}

// -x as a number of steps; -1: an epoch.
static inline int64_t run_max_steps() {
    const char* text = run.max_steps;
    if (strcmp(text, "epoch") == 0) { return -1; }
    int64_t steps;
    if (!parse_int(text, &steps) || steps < 0 || steps > kLargestCount) {
        const std::string digits = parse_int_hint(text);
        die("-x (--max-steps) wants a whole number, 0 to %lld, or `epoch`, not '%s'%s%s",
            (long long)kLargestCount, flags_show(text).c_str(), digits.empty() ? "" : "\nhint: ",
            digits.c_str());
    }
    return steps;
}

// Checks over several flags, before anything is allocated. Settles what the flags leave open, and the model's
// block and norm. From then on no setting changes.
static inline void settings_settle(Config* c, bool is_descriptor, const Build& build) {
    variant_check(c, is_descriptor);
    batch_check(*c);
    auto_of_model(*c, is_descriptor);
    fp8_check(*c, build);
    for (const char* name : {"muon-lr", "muon-momentum", "muon-warmup", "muon-decay"}) {
        if (!run.muon && !run.resumed && run_given(name)) {
            die("--%s is for --optimizer muon, and this run has --optimizer adamw\n"
                "hint: give --optimizer muon, or leave --%s out", name, name);
        }
    }
    if (c->shape().tied && !run.resumed && run_given("head-rate")) {
        die("--head-rate is for an untied LM head, and that of -e %s is wte\n"
            "hint: --embedding-rate is the rate of wte", run.model);
    }
    if (run.schedule != LR_WSD && !run.resumed && run_given("cooldown")) {
        die("--cooldown is for -k wsd, and this run has -k %s\nhint: give -k wsd, or leave --cooldown out",
            flags_text(flags_find(kFlags, "--lr-schedule")).c_str());
    }
    if (!build.is_cuda && run.grads_bf16) {
        die("--grad-dtype bf16 needs the CUDA program; the CPU build accumulates in fp32");
    }
    const bool trains = run_max_steps() != 0;
    if (run.output_dir[0] == '\0' && run.resume) { die("-y 1 needs -o, the run's folder"); }
    if (run.plan[0] != '\0' && (!trains || run.resume)) {
        die("--plan is for training that begins: leave %s out", run.resume ? "-y 1" : "-x 0");
    }
    if (run.price > 0 && run.plan[0] == '\0') { die("--price is for --plan, which is not given"); }
    if (*run.like && !trains) { die("--like is for training, and -x 0 trains nothing\nhint: leave it out"); }
    if (!trains && run.output_dir[0] != '\0') {
        die("-x 0 trains nothing, so there is nothing to write to -o %s", run.output_dir);
    }
    if (run_task() == Task::Write) {
        settings.tells_speed = run.verbose >= 0;
        settings.B = 1;                     // a prompt is one row
        settings.verbose = -1;
    }
}

// --gpus: `count` are here.
static inline void gpus_check(int count) {
    if (run.comm.gpus <= count) { return; }
    die("--gpus %d%s: this machine has %d\n"
        "hint: a rank takes a GPU; other machines join by mpirun, srun or -pi", run.comm.gpus,
        run.own_launch ? ", as the run was started (--gpus N says otherwise)" : "", count);
}

// There is memory for `fit` lanes.
static inline void lanes_lowered_print(int fit) {
    if (fit < run.lanes && run.resumed) {
        warn("memory is short: gradients are summed over %d lanes, and were over %d before: the run's bits "
             "will differ", fit, run.lanes);
    } else if (fit < run.lanes) {
        say("memory is short: gradients are summed over %d lanes, not %d; --lanes %d gives the same bits "
            "on another machine\n", fit, run.lanes, fit);
    }
}

// The settings that do what was asked, but hardly what was meant.
static inline void surprises_print(size_t prompt_tokens, int64_t max_steps) {
    const int room = run.T - (int)prompt_tokens;            // the first position stands before the document
    if (run_writes_text() && run.sample_tokens > room && run_given("sample-tokens")) {
        const std::string text = format("after %d of %d tokens all T=%d positions are taken; texts go on "
                                        "from their last %d tokens", room, run.sample_tokens, run.T,
                                        std::max(1, run.T / 2));
        const bool trains = run_task() == Task::Train;
        if (trains && run.verbose >= 0) { flags_wrap("samples: ", text, terminal_columns(100)); }
        if (!trains && !comm.rank) { fprintf(stderr, "note: samples: %s\n", text.c_str()); }
    }
    if (run_task() != Task::Train) { return; }
    if (run.output_dir[0] == '\0') { say("no -o: nothing of this run will be saved\n"); }
    else {
        const int n = run.checkpoint_every;
        const std::string often = n > 0 && n < max_steps ? format("every %d steps and ", n) : "";
        say("output: %s, with a checkpoint %sat the end\n", shown(run.output_dir).c_str(), often.c_str());
    }
    if (run.warmup > 0 && run.warmup >= max_steps) {
        const char* when = run.warmup > max_steps ? "never" : "at the last step only";
        warn("-u %lld in a run of %lld steps: the learning rate reaches its peak %s", (long long)run.warmup,
             (long long)max_steps, when);
    }
}
