/*
Tests of train_gpt2.cu, in both builds: `make test_gpt2cu && ./test_gpt2cu`, `make test_gpt2cpu &&
./test_gpt2cpu`.

    ./test_gpt2cu [kernels] [model] [invariance]    the named modes, all without a name
        kernels      each CUDA op against its twin in double (llmc/ops/cpu_ops.h); CUDA builds only
        model        against PyTorch: logits, loss, every gradient by name, 10 AdamW steps
        invariance   facts that need no reference: splits, recompute, two runs, skipped updates, files
    --reference PREFIX   model mode on PREFIX_model.bin, PREFIX_tensors.bin, PREFIX.json (from dev/reference)
    --small              kernels mode with its small shapes only: for compute-sanitizer
    --break NAME         scales that op's output by 1.01: the run must then fail. --list prints the names
    dump-grads MODEL.bin TENSORS.bin OUT.bin MICRO_STEPS [-f 0] [--grad-dtype bf16] [--dropout P]
                         what this build computes for that reference's batch, in the reference file's format;
                         MICRO_STEPS 0: up to the loss, and of TENSORS.bin no more is read than the tokens
    dump-sums MODEL.bin QUESTIONS.bin B T [-f 0]    what -h 1 sums: `question choice sum` of each row

Tolerances: logits and gradients of 16-bit builds may have at most twice the error of plain 16-bit PyTorch,
both against fp32; their losses and norms are held to 3 %. Closing line: `N passed, N failed, N skipped`.
*/
#define TESTING
#include "train_gpt2.cu"
#include "llmc/ops/cpu_ops.h"    // gives: the twins, here as the oracle of the CUDA build
#include <functional>           // gives: std::function
#include <tuple>                // gives: std::tie
#include <type_traits>          // gives: std::is_same
#include "dev/test/test.h"      // gives: TEST, CHECK, SKIP, test_summary

// ---- --break: what the ops' outputs pass before the next op reads them ----
static const char* break_name = nullptr;
static int64_t break_hits = 0;

static std::vector<std::string> output_names() {        // OP.OUTPUT of every output of every op
    std::vector<std::string> names;
    auto add = [&](const char* op, const char* output, auto, size_t) {
        names.push_back(format("%s.%s", op, output));
    };
#define X(op, Args, ...) op_outputs(Args<floatX, float>{}, add);
    GPT2_OPS(X)
#undef X
    return names;
}

#ifdef GPT2_CPU
template <class Real> static void break_output(Real* data, size_t count, Stream) {
    for (size_t i = 0; i < count; i++) { data[i] = (Real)((double)data[i] * 1.01); }    // also whole numbers
}
#else
template <class Real>
__global__ void break_kernel(Real* data, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        data[i] = (Real)((float)data[i] * 1.01f);
    }
}
template <class Real> static void break_output(Real* data, size_t count, Stream stream) {
    break_kernel<<<1024, 256, 0, stream>>>(data, count);
    cudaCheck(cudaGetLastError());
}
#endif
static void break_output(const Grad& grad, size_t count, Stream stream) {
#ifndef GPT2_CPU
    if (grad.is_bf16) { break_output((__nv_bfloat16*)grad.data, count, stream); return; }
#endif
    break_output(grad.data, count, stream);
}
template <class Real>
static void break_output(const ResidualOf<Real>& residual, size_t count, Stream stream) {
    if (residual.is_fp32) { break_output((float*)residual.data, count, stream); }
    else { break_output(residual.data, count, stream); }
}
template <class Real> static bool is_wanted(const Real* data) { return data != nullptr; }
static bool is_wanted(const Grad& grad) { return grad.data != nullptr; }
template <class Real> static bool is_wanted(const ResidualOf<Real>& residual) { return residual.data; }

// ---- what a BF16 build makes of a step, in the CPU's: each output that it keeps in 16 bits is rounded ----
static bool rounds_outputs = false;
#ifdef GPT2_CPU
static void round_output(const std::string& output, float* data, size_t count) {
    if (output == "mean" || output == "rstd" || output == "lse" || output == "losses") { return; }
    for (size_t i = 0; i < count; i++) { data[i] = bf16_to_float(bf16_round_nearest(data[i])); }
}
static void round_output(const std::string& output, const ResidualOf<float>& residual, size_t count) {
    if (!residual.is_fp32) { round_output(output, residual.data, count); }
}
template <class Other> static void round_output(const std::string&, const Other&, size_t) {}
#endif

template <class Args> static void break_outputs(const Args& args, Stream stream) {
#ifdef GPT2_CPU
    op_outputs(args, [](const char*, const char* output, auto where, size_t count) {
        if (rounds_outputs && is_wanted(where)) { round_output(output, where, count); }
    });
#endif
    if (!break_name) { return; }
    op_outputs(args, [&](const char* op, const char* output, auto where, size_t count) {
        if (!is_wanted(where) || count == 0 || format("%s.%s", op, output) != break_name) { return; }
        break_hits++;
        break_output(where, count, stream);
    });
}

// ---- measures ----
// |a - b| / |b|, in double. NaN anywhere gives NaN, which fails every bound written as err <= tol.
static double relative_error(const float* a, const float* b, size_t n) {
    double distance = 0.0, size = 0.0;
    for (size_t i = 0; i < n; i++) {
        const double d = (double)a[i] - (double)b[i];
        distance += d * d;
        size += (double)b[i] * (double)b[i];
    }
    return size > 0.0 ? sqrt(distance / size) : distance == 0.0 ? 0.0 : HUGE_VAL;
}

// ---- reference files (dev/reference) ----
struct Reference {
    int B, T;
    std::vector<int> x, y;
    std::vector<float> logits;              // (B,T,V)
    float loss;
    std::vector<float> grads[NUM_PARAMS];   // layers together, tight
};

static std::string read_text(const std::string& path) {
    FILE* f = fopen_check(path.c_str(), "rb");
    std::string text((size_t)file_size(path.c_str()), '\0');
    fread_check(&text[0], 1, text.size(), f, path.c_str());
    fclose(f);
    return text;
}

// Numbers behind "key": in JSON that has one top-level key per line. "key/name" is a number in an object.
static std::vector<double> json_numbers(const std::string& json, const std::string& path) {
    const size_t slash = path.find('/');
    size_t at = json.find("\n\"" + path.substr(0, slash) + "\": ");
    if (at == std::string::npos) { die("the reference's JSON has no key '%s'", path.c_str()); }
    std::string line = json.substr(at + 1, json.find('\n', at + 1) - at - 1);
    at = line.find(": ") + 2;
    if (slash != std::string::npos) {
        at = line.find("\"" + path.substr(slash + 1) + "\": ");
        if (at == std::string::npos) { die("the reference's JSON has no key '%s'", path.c_str()); }
        at = line.find(": ", at) + 2;
        return {strtod(line.c_str() + at, nullptr)};
    }
    std::vector<double> numbers;
    for (const char* s = line.c_str() + at; *s != '\0';) {
        char* end;
        const double x = strtod(s, &end);
        if (end == s) { s++; continue; }
        numbers.push_back(x);
        s = end;
    }
    return numbers;
}

static Reference reference_load(const std::string& path, const Config& c, bool tokens_alone = false) {
    Reference r;
    FILE* f = fopen_check(path.c_str(), "rb");
    int header[256];
    fread_check(header, sizeof(int), 256, f, path.c_str());
    if (header[0] != 20240327 || header[1] != 2) {
        die("'%s' is not a reference file of version 2", path.c_str());
    }
    r.B = header[2];
    r.T = header[3];
    const size_t N = (size_t)r.B * r.T;
    r.x.resize(N);
    r.y.resize(N);
    fread_check(r.x.data(), sizeof(int), N, f, path.c_str());
    fread_check(r.y.data(), sizeof(int), N, f, path.c_str());
    if (tokens_alone) { fclose(f); return r; }
    r.logits.resize(N * c.V);
    fread_check(r.logits.data(), sizeof(float), r.logits.size(), f, path.c_str());
    fread_check(&r.loss, sizeof(float), 1, f, path.c_str());
    ParamSpec specs[NUM_PARAMS];
    param_specs(specs, c);
    for (int i = 0; i < NUM_PARAMS; i++) {
        r.grads[i].resize(specs[i].elems * specs[i].copies);
        fread_check(r.grads[i].data(), sizeof(float), r.grads[i].size(), f, path.c_str());
    }
    fclose(f);
    return r;
}

// ---- a model's tensors on the host ----
// from_master: as gpt2_whole_master, for all ranks at the same time.
static void gpt2_get_param(GPT2* model, int i, int l, float* values /*(elems)*/, bool from_master) {
    const ParamSpec& s = model->param_specs[i];
    const void* device = gpt2_param_data(model, i, l);
    gpt2_await_params(model, param_address(model->param_specs, model->layout, i, l).bucket);
    if (from_master && model->opt.master) {
        device = gpt2_whole_master(model, i, l);
    } else if (s.elem_bytes != sizeof(float)) {
        std::vector<floatX> raw(s.elems);
        copy_to_host(raw.data(), device, s.elems * s.elem_bytes, model->stream);
        stream_sync(model->stream);
        for (size_t k = 0; k < s.elems; k++) { values[k] = (float)raw[k]; }
        return;
    }
    copy_to_host(values, device, s.elems * sizeof(float), model->stream);
    stream_sync(model->stream);
}

// Between a micro-step and the update: layers together, tight, without FP16's loss scale.
static std::vector<float> host_grad(GPT2* model, int i) {
    const ParamSpec& s = model->param_specs[i];
    const float scale = gpt2_read_state(model).update.loss_scale;
    std::vector<float> values(s.elems * s.copies);
    std::vector<uint16_t> raw(s.elems);
    for (int l = 0; l < s.copies; l++) {
        const Grad grad = gpt2_grad(model, (ParamId)i, l, Accumulate::No);
        float* out = values.data() + l * s.elems;
        if (grad.is_bf16) {
            copy_to_host(raw.data(), grad.data, s.elems * 2, model->stream);
            stream_sync(model->stream);
            for (size_t k = 0; k < s.elems; k++) {
                out[k] = bf16_decode_dithered(raw[k], round_bits16(grad.key, grad.first + k));
            }
        } else {
            copy_to_host(out, grad.data, s.elems * sizeof(float), model->stream);
            stream_sync(model->stream);
        }
        for (size_t k = 0; k < s.elems; k++) { out[k] /= scale; }
    }
    return values;
}

static std::vector<std::vector<float>> host_grads(GPT2* model) {
    std::vector<std::vector<float>> grads;
    for (int i = 0; i < NUM_PARAMS; i++) { grads.push_back(host_grad(model, i)); }
    return grads;
}

static std::vector<float> host_params(GPT2* model) {            // every parameter, as the optimizer holds it
    std::vector<float> all;
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = model->param_specs[i];
        for (int l = 0; l < s.copies; l++) {
            all.resize(all.size() + s.elems);
            gpt2_get_param(model, i, l, all.data() + all.size() - s.elems, true);
        }
    }
    return all;
}

static std::vector<float> host_logits(GPT2* model, int rows) {  // (rows, V): live columns
    const Config& c = model->config;
    std::vector<floatX> raw((size_t)rows * c.Vp);
    copy_to_host(raw.data(), gpt2_acts(model, 0).logits, raw.size() * sizeof(floatX), model->stream);
    stream_sync(model->stream);
    std::vector<float> logits((size_t)rows * c.V);
    for (int n = 0; n < rows; n++) {
        for (int v = 0; v < c.V; v++) { logits[(size_t)n * c.V + v] = (float)raw[(size_t)n * c.Vp + v]; }
    }
    return logits;
}

static bool operator==(const Config& a, const Config& b) {         // memcmp would compare the padding, too
    auto fields = [](const Config& c) {
        return std::tie(c.maxT, c.V, c.Vp, c.L, c.NH, c.C, c.block, c.norm, c.residual_fp32);
    };
    return fields(a) == fields(b);
}

static bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

static Options default_options() {
    Options o = {};
    o.master = true;
    o.seed = 1337;
    return o;
}

// Gradients of one batch of B rows, in `micro_steps` parts.
static void accumulate_batch(GPT2* model, const int* x, const int* y, int B, int T, int micro_steps) {
    const int rows = B / micro_steps;
    for (int micro = 0; micro < micro_steps; micro++) {
        const size_t at = (size_t)micro * rows * T;
        gpt2_micro_step(model, x + at, y + at, rows, T, micro, micro_steps);
    }
}

// While there is one, an FP32 build, too, lets a stream in fp32 go its own way.
struct StreamApart {
    StreamApart() { hooks.fp32_builds_follow = true; }
    ~StreamApart() { hooks.fp32_builds_follow = false; }
};

static Config with_fp32_stream(Config c) {
    c.residual_fp32 = true;
    return c;
}

// == model ==
// Bounds on an error: fp32 absolute ones, or twice what PyTorch's own type does to the same tensor.
static double error_bound(const std::string& json, const std::string& what, double fp32_bound) {
    if (!kLowPrecision) { return fp32_bound; }
    return 2.0 * json_numbers(json, (kFp16 ? "float16" : "bfloat16") + what)[0];
}

static void test_model(const std::string& prefix, const Options& options, bool residual_fp32,
                       double logits_bound, double grad_bound) {
    const std::string path = prefix + "_model.bin";
    Config c = checkpoint_config(path.c_str());
    c.residual_fp32 = residual_fp32;
    const StreamApart apart;
    const Reference r = reference_load(prefix + "_tensors.bin", c);
    const std::string json = read_text(prefix + ".json");
    Options o = options;
    o.weight_decay = (float)json_numbers(json, "hyper/weight_decay")[0];
    GPT2 model;
    gpt2_allocate(&model, c, o, r.B, r.T);
    checkpoint_load(&model, path.c_str());
    const int N = r.B * r.T;

    gpt2_feed(&model, r.x.data(), r.y.data(), r.B, r.T, ClassifierMode::LossOnly);
    gpt2_loss(&model, r.B, r.T, ClassifierMode::LossOnly, 1.0f / (float)N, &model.state->loss,
                  Accumulate::No);
    std::vector<float> logits = host_logits(&model, N);
    double worst = 0.0, square = 0.0;
    for (size_t i = 0; i < logits.size(); i++) {
        const double d = fabs((double)logits[i] - (double)r.logits[i]);
        if (!(d <= worst)) { worst = d; }       // keeps a NaN
        square += (double)r.logits[i] * (double)r.logits[i];
    }
    const double logits_error = worst / sqrt(square / (double)logits.size());
    const double logits_allowed = error_bound(json, "_logits_error", logits_bound);
    CHECK(logits_error <= logits_allowed, "logits: max |d| / rms = %g, allowed %g", logits_error,
          logits_allowed);
    const float loss = gpt2_read_state(&model).loss;
    const double loss_allowed = kLowPrecision ? 0.02 : 2e-5;
    CHECK(fabs(loss - r.loss) <= loss_allowed, "loss %.7f, PyTorch %.7f", loss, r.loss);
    printf("   logits max|d|/rms %.3g (allowed %.3g), loss %.6f (PyTorch %.6f)\n", logits_error,
           logits_allowed, loss, r.loss);

    gpt2_micro_step(&model, r.x.data(), r.y.data(), r.B, r.T, 0, 1);
    for (int i = 0; i < NUM_PARAMS; i++) {
        const std::vector<float> grad = host_grad(&model, i);
        const double error = relative_error(grad.data(), r.grads[i].data(), grad.size());
        const double allowed =
            error_bound(json, std::string("_total_error/") + model.param_specs[i].name, grad_bound);
        CHECK(error <= allowed, "gradient of %s: |d|/|g| = %g, allowed %g", model.param_specs[i].name, error,
              allowed);
        printf("   d%-9s |d|/|g| %.3g (allowed %.3g)\n", model.param_specs[i].name, error, allowed);
    }

    // ten AdamW steps on this batch, from the start
    const std::vector<double> losses = json_numbers(json, "losses");
    auto hyper = [&](const char* name) { return json_numbers(json, std::string("hyper/") + name)[0]; };
    const double lr = hyper("learning_rate");
    model.options.beta1 = hyper("beta1"), model.options.beta2 = hyper("beta2");
    model.options.eps = hyper("eps"), model.options.grad_clip = (float)hyper("grad_clip");
    const std::vector<double> norms = json_numbers(json, "norms");
    const double step_allowed = kLowPrecision ? 0.03 : 5e-5, norm_allowed = kLowPrecision ? 0.03 : 2e-4;
    for (size_t step = 0; step < losses.size(); step++) {
        gpt2_micro_step(&model, r.x.data(), r.y.data(), r.B, r.T, 0, 1);
        gpt2_update(&model, lr);
        const DeviceState state = gpt2_read_state(&model);
        CHECK(fabs(state.loss - losses[step]) <= step_allowed, "step %zu: loss %.7f, PyTorch %.7f", step,
              state.loss, losses[step]);
        CHECK(fabs(state.update.norm / norms[step] - 1.0) <= norm_allowed,
              "step %zu: norm %.7f, PyTorch %.7f", step, state.update.norm, norms[step]);
        const double clipped = std::min(1.0, (double)model.options.grad_clip / state.update.norm);
        const double scale = clipped / state.update.loss_scale;
        CHECK(fabs(state.update.grad_scale / scale - 1.0) <= 1e-5,
              "step %zu: gradients scaled by %g, expected %g", step, state.update.grad_scale, scale);
    }
    gpt2_free(&model);
}

static Options dump_options(const std::vector<std::string>& args, size_t first) {
    Options o = default_options();
    o.tf32 = true;
    for (size_t i = first; i + 1 < args.size(); i += 2) {
        if (args[i] == "-f") { o.tf32 = args[i + 1] != "0"; }
        else if (args[i] == "--grad-dtype") { o.grads_bf16 = args[i + 1] == "bf16"; }
        else if (args[i] == "--dropout") { o.dropout = atof(args[i + 1].c_str()); }
        else { die("dump: '%s' is not one of -f, --grad-dtype, --dropout", args[i].c_str()); }
    }
    return o;
}

// What this build computes for a reference's batch, written like a reference (dev/reference/check_gpu.py,
// check_eval_gpu.py and check_blocks.py compare): logits without dropout, loss and gradients with it.
static void dump_grads(const std::vector<std::string>& args) {
    if (args.size() < 4) { die("dump-grads needs MODEL.bin TENSORS.bin OUT.bin MICRO_STEPS"); }
    const bool forward_alone = args[3] == "0";
    const Config c = checkpoint_config(args[0].c_str());
    const Reference r = reference_load(args[1], c, forward_alone);
    const int micro_steps = forward_alone ? r.B : atoi(args[3].c_str());
    if (micro_steps < 1 || r.B % micro_steps != 0) {
        die("dump-grads: %s micro-steps of %d rows", args[3].c_str(), r.B);
    }
    Options o = dump_options(args, 4);
    o.trains = !forward_alone;
    const int rows = r.B / micro_steps;
    GPT2 model;
    gpt2_allocate(&model, c, o, rows, r.T);
    checkpoint_load(&model, args[0].c_str());

    AtomicFile out = atomic_open(args[2]);
    const int header[256] = {20240327, 2, r.B, r.T};
    atomic_write(&out, header, sizeof(header));
    atomic_write(&out, r.x.data(), r.x.size() * sizeof(int));
    atomic_write(&out, r.y.data(), r.y.size() * sizeof(int));
    for (int micro = 0; micro < micro_steps; micro++) {
        const size_t at = (size_t)micro * rows * r.T;
        gpt2_feed(&model, r.x.data() + at, r.y.data() + at, rows, r.T, ClassifierMode::LossOnly);
        gpt2_loss(&model, rows, r.T, ClassifierMode::LossOnly, 1.0f / (float)(r.B * r.T),
                  &model.state->loss, micro == 0 ? Accumulate::No : Accumulate::Yes);
        const std::vector<float> logits = host_logits(&model, rows * r.T);
        atomic_write(&out, logits.data(), logits.size() * sizeof(float));
    }
    float loss = gpt2_read_state(&model).loss;
    if (!forward_alone) {
        accumulate_batch(&model, r.x.data(), r.y.data(), r.B, r.T, micro_steps);
        copy_to_host(&loss, model.exchange.records + model.exchange.losses_at, sizeof(loss), model.stream);
        stream_sync(model.stream);
    }
    atomic_write(&out, &loss, sizeof(loss));
    for (int i = 0; i < NUM_PARAMS && !forward_alone; i++) {
        const std::vector<float> grad = host_grad(&model, i);
        atomic_write(&out, grad.data(), grad.size() * sizeof(float));
    }
    atomic_commit(&out);
    printf("loss %.6f\n", loss);
    gpt2_free(&model);
}

// Row by row, what the evaluation in training adds up; its own output has only the score.
static void dump_sums(const std::vector<std::string>& args) {
    if (args.size() < 4) { die("dump-sums needs MODEL.bin QUESTIONS.bin B T"); }
    const Config c = checkpoint_config(args[0].c_str());
    const int B = atoi(args[2].c_str()), T = atoi(args[3].c_str());
    if (B < 1 || T < 1 || T > c.maxT) { die("dump-sums: B=%d, T=%d; the model has T=%d", B, T, c.maxT); }
    Options o = dump_options(args, 4);
    o.trains = false;
    EvalSet set;
    evalset_init(&set, args[1].c_str(), c.V, B, T);
    GPT2 model;
    gpt2_allocate(&model, c, o, B, T);
    checkpoint_load(&model, args[0].c_str());
    std::vector<double> sums;
    gpt2_evaluate(&sums, &model, &set);
    for (size_t i = 0; i < set.rows.size(); i++) {
        printf("%d %d %.9g\n", set.rows[i].question, set.rows[i].choice, sums[i]);
    }
    gpt2_free(&model);
}

// == invariance ==
static const Config kTiny = {33, 509, 512, 3, 2, 40};       // head size 20: the plain attention
// Head size 64. Smaller in ASan, where all its matrices go through plain loops: rows, columns and keys still
// go beyond the tiles of llmc/ops/cpu_ops.h. More heads than one are in the other.
#ifdef __SANITIZE_ADDRESS__
static const Config kTensorCore = {70, 300, 384, 2, 1, 64};
#else
static const Config kTensorCore = {70, 300, 384, 2, 2, 128};
#endif

struct Batch { std::vector<int> x, y; };
static Batch random_batch(const Config& c, int B, int T, uint32_t id) {
    Batch batch;
    for (int i = 0; i < B * T; i++) {
        // a few common tokens, so that buckets are split into segments
        const uint32_t r = rand_u32(99, RAND_SAMPLE, id, (uint64_t)i);
        batch.x.push_back((int)(r % 3 == 0 ? r / 3 % 4 : r / 3 % (uint32_t)c.V));
        batch.y.push_back((int)(rand_u32(98, RAND_SAMPLE, id, (uint64_t)i) % (uint32_t)c.V));
    }
    return batch;
}

// Weights away from their symmetric start (biases 0, LayerNorm weights 1), so that no term of a gradient
// vanishes.
static void perturb(GPT2* model) {
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = model->param_specs[i];
        std::vector<float> values(s.elems);
        for (int l = 0; l < s.copies; l++) {
            gpt2_get_param(model, i, l, values.data(), true);
            for (size_t k = 0; k < s.live_rows * s.cols; k++) {
                values[k] += 0.05f * rand_normal(7, (uint32_t)(100 + i), l * s.elems + k);
            }
            gpt2_set_param(model, i, l, values.data());
        }
    }
}

static void start_model(GPT2* model, const Config& c, const Options& o, int B, int T) {
    gpt2_allocate(model, c, o, B, T);
    gpt2_init_random(model, o.seed);
    perturb(model);
}

// A few steps of training; returns parameters and the losses.
static std::vector<float> short_run(const Config& c, const Options& o, int B, int T, int steps,
                                    int micro_steps = 1) {
    GPT2 model;
    start_model(&model, c, o, B, T);
    std::vector<float> result;
    for (int step = 0; step < steps; step++) {
        Batch batch = random_batch(c, B, T, (uint32_t)step);
        accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, micro_steps);
        gpt2_update(&model, 1e-3, 1e-2);
        result.push_back(gpt2_read_state(&model).loss);
    }
    const std::vector<float> params = host_params(&model);
    result.insert(result.end(), params.begin(), params.end());
    gpt2_free(&model);
    return result;
}

static void check_layout(const ParamSpec* specs, const Config& c, const Split& split, bool bf16,
                         const Layout& alone) {
    const Layout layout = param_layout(specs, NUM_PARAMS, c.L, split, bf16, false);
    const std::string what = format("L=%d, %d ranks, stage %d, bf16 %d", c.L, split.world, split.zero, bf16);
    std::vector<std::vector<std::pair<size_t, size_t>>> taken(layout.buckets.size());
    bool good = (int)layout.buckets.size() == c.L + 3;
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = specs[i];
        for (int l = 0; l < s.copies; l++) {
            const ParamAddress at = param_address(specs, layout, i, l);
            const ParamAddress there = param_address(specs, alone, i, l);
            const Bucket& b = layout.buckets[at.bucket];
            good = good && b.kind == s.kind && at.offset % 128 == 0 && at.offset == there.offset &&
                   at.offset + s.elems <= b.elems && at.bucket == there.bucket;
            // wte and wpe, then layer by layer; vectors of all layers behind
            const int expected = s.kind == Kind::Matrix ? (i <= PARAM_wpe ? 0 : 1 + l)
                               : s.elem_bytes == 4 && strncmp(s.name, "ln", 2) == 0 ? c.L + 2 : c.L + 1;
            good = good && at.bucket == expected;
            taken[at.bucket].push_back({at.offset, at.offset + s.elems});
        }
    }
    CHECK(good, "%s: a tensor's place", what.c_str());
    size_t params = 0, state = 0, shards = 0, first = 0;
    for (size_t k = 0; k < layout.buckets.size(); k++) {
        const Bucket& b = layout.buckets[k];
        std::sort(taken[k].begin(), taken[k].end());
        for (size_t t = 1; t < taken[k].size(); t++) {
            good = good && taken[k][t - 1].second <= taken[k][t].first;
        }
        good = good && b.padded == b.shard * split.world && b.shard % kChunk == 0 && b.padded >= b.elems &&
               b.padded - b.elems < kChunk * split.world + split.world * (size_t)128;
        good = good && b.params == params && b.state == state && b.shards == shards && b.first == first &&
               b.first == alone.buckets[k].first && b.params % kAlign == 0 && b.grads % kAlign == 0;
        params += b.padded * (b.kind == Kind::Norm ? 4 : sizeof(floatX));
        state += split.zero ? b.shard : b.padded;
        shards += b.shard;
        first += alone.buckets[k].padded;
        // at stage 2 layers of one parity share a place, else none do
        const size_t bytes = b.padded * (bf16 && b.kind == Kind::Matrix ? 2 : 4);
        good = good && b.grads + bytes <= layout.grads_bytes;
        for (size_t j = 0; j < k; j++) {
            const Bucket& other = layout.buckets[j];
            const bool layers = j >= 1 && (int)k <= c.L, same = other.grads == b.grads;
            good = good && same == (split.zero == 2 && layers && (k - j) % 2 == 0);
            const size_t others = other.padded * (bf16 && other.kind == Kind::Matrix ? 2 : 4);
            good = good && (same || other.grads + others <= b.grads || b.grads + bytes <= other.grads);
        }
    }
    CHECK(good && params == layout.params_bytes && state == layout.state_elems &&
              shards == layout.shard_elems, "%s: buckets", what.c_str());
}

// Every tensor's place: whole, aligned, in a bucket of its kind, alone; every bucket cut into equal shards of
// whole chunks; keys of rounding that do not depend on the number of ranks.
static void test_layout() {
    const Config one_layer = {8, 67, 128, 1, 1, 8}, seven_layers = {70, 300, 384, 7, 2, 40};
    for (const Config& c : {kTiny, kTensorCore, one_layer, seven_layers}) {
        ParamSpec specs[NUM_PARAMS];
        param_specs(specs, c);
        const Layout alone = param_layout(specs, NUM_PARAMS, c.L, {0, 1, 0}, false, false);
        for (int world = 1; world <= 64; world++) {
            for (int zero = 0; zero <= (world > 1 ? 2 : 0); zero++) {
                for (bool bf16 : {false, true}) {
                    check_layout(specs, c, {world - 1, world, zero}, bf16, alone);
                }
            }
        }
    }
}

// A number of lanes for every list and every number of ranks; the counter's buffers, against sets of lanes.
static void test_lanes() {
    bool sound = true, shared = true, tree = true;
    for (int world = 1; world <= 64; world++) {
        for (int each = 1; each <= 40; each++) {
            const int64_t micro_steps = (int64_t)world * each;
            const int64_t lanes = lanes_default(micro_steps, world, 0);
            sound = sound && lanes_error(lanes, micro_steps, world, 0).empty() && micro_steps % lanes == 0;
            const bool more = lanes < 8 && micro_steps % (2 * lanes) == 0;
            sound = sound && !more && (lanes == world || lanes / 2 < 8);
            // fewer ranks choose the same where powers of two share the list out
            for (int fewer = world; fewer % 2 == 0 && is_power_of_two(world) && world <= 8; fewer /= 2) {
                shared = shared && lanes_default(micro_steps, fewer / 2, 0) == lanes;
            }
        }
    }
    CHECK(sound, "lanes_default: lanes that do not fit, or too few");
    CHECK(shared, "lanes_default: 1, 2, 4 and 8 ranks choose different numbers of lanes");
    CHECK(lanes_default(24, 1, 2) == 24 && lanes_default(24, 3, 0) == 12 && lanes_default(64, 64, 0) == 64,
          "lanes_default: %d %d %d", (int)lanes_default(24, 1, 2), (int)lanes_default(24, 3, 0),
          (int)lanes_default(64, 64, 0));
    for (int64_t bad : {0, 3, 5, 16, 7}) {
        CHECK(!lanes_error(bad, 8, 1, 0).empty(), "%d lanes of 8", (int)bad);
    }
    CHECK(!lanes_error(6, 24, 1, 0).empty() && lanes_error(6, 24, 3, 0).empty(), "6 lanes");
    CHECK(!lanes_error(4, 8, 1, 2).empty() && lanes_error(8, 8, 1, 2).empty(), "a lane a micro-step");
    CHECK(lanes_error(6, 6, 3, 2).empty() && lanes_error(6, 6, 3, 0).empty(), "three ranks");

    // Follow the counter with texts instead of numbers: "(0+1)" for a sum. It gets `world` lanes at a time.
    auto pairs = [](int from, int count) {      // bottom up
        std::vector<std::string> level;
        for (int i = 0; i < count; i++) { level.push_back(format("%d", from + i)); }
        while (level.size() > 1) {
            std::vector<std::string> next;
            for (size_t i = 0; i + 1 < level.size(); i += 2) {
                next.push_back("(" + level[i] + "+" + level[i + 1] + ")");
            }
            if (level.size() % 2 == 1) { next.push_back(level.back()); }
            level = next;
        }
        return level[0];
    };
    for (int lanes = 1; lanes <= 48; lanes++) {
        for (int world = 1; world <= lanes; world++) {
            if (lanes % world != 0) { continue; }
            const int merged = is_power_of_two(world) ? lanes / world : lanes;
            std::vector<std::string> buffers(lane_buffers(merged));
            for (int lane = 0, part; lane < lanes; lane += part) {
                part = lane_part(lane, world - lane % world);
                const int top = lane_buffer(lane);
                const int merges = lane_merges(lane + part - 1, lanes) - __builtin_ctz(part);
                tree = tree && merges >= 0 && merges <= top && top - merges < (int)buffers.size();
                if (!tree) { break; }
                std::string sum = pairs(lane, part);
                for (int k = top - 1; k >= top - merges; k--) { sum = "(" + buffers[k] + "+" + sum + ")"; }
                buffers[top - merges] = sum;
            }
            CHECK(tree && buffers[0] == pairs(0, lanes), "%d lanes of %d ranks: %s", lanes, world,
                  buffers[0].c_str());
        }
    }
}

// Everything that decides about the next steps, as bytes.
static std::vector<std::vector<float>> host_state(GPT2* model) {
    const size_t n = model->layout.state_elems, v_elems = model->layout.v_elems;
    std::vector<std::vector<float>> all;
    const struct { const float* from; size_t n; } arenas[] = {
        {model->opt.master, n}, {model->opt.m, n}, {model->opt.v, v_elems}};
    for (const auto& it : arenas) {
        if (!it.from) { continue; }
        all.emplace_back(it.n);
        copy_to_host(all.back().data(), it.from, it.n * sizeof(float), model->stream);
    }
    all.emplace_back(model->layout.params_bytes / sizeof(float));
    copy_to_host(all.back().data(), model->params, model->layout.params_bytes, model->stream);
    stream_sync(model->stream);
    return all;
}

static void one_step(GPT2* model, const Config& c, int rows, int seed) {
    Batch batch = random_batch(c, rows, c.maxT, seed);
    accumulate_batch(model, batch.x.data(), batch.y.data(), rows, c.maxT, 1);
    gpt2_update(model, 1e-2, 0.02);
}

// The file for everybody: what the parameters are in its type; and padded rows of wte are zero.
static void check_model_file(GPT2* a, const Config& c, const Options& o, const std::string& path) {
    const Config loaded = checkpoint_config(path.c_str());
    CHECK(loaded == c, "the header's sizes differ");
    GPT2 b;
    gpt2_allocate(&b, loaded, o, 2, c.maxT);
    std::string error;
    die_throw = [](const char* text) { throw std::string(text); };
    b.config.NH++;                          // as if the file had been replaced by another of its size
    try { checkpoint_load(&b, path.c_str()); }
    catch (const std::string& text) { error = text; }
    b.config.NH--;
    die_throw = nullptr;
    CHECK(error.find("is another model than it was at the start") != std::string::npos, "%s", error.c_str());
    checkpoint_load(&b, path.c_str());
    std::vector<float> pa, pb;
    for (int i = 0; i < NUM_PARAMS; i++) {
        for (int l = 0; l < a->param_specs[i].copies; l++) {
            pa.resize(a->param_specs[i].elems);
            pb.resize(a->param_specs[i].elems);
            gpt2_get_param(a, i, l, pa.data(), kFp16);
            gpt2_get_param(&b, i, l, pb.data(), kFp16);
            // a BF16 build's file is bf16 throughout, LayerNorm's fp32 too
            if (kModelIsBf16) { for (float& x : pa) { x = bf16_to_float(bf16_round_nearest(x)); } }
            CHECK(same_bits(pa, pb), "%s of layer %d differs", a->param_specs[i].name, l);
        }
    }
    const ParamSpec& wte = a->param_specs[PARAM_wte];
    std::vector<float> values(wte.elems);
    gpt2_get_param(&b, PARAM_wte, 0, values.data(), true);
    const size_t live = wte.live_rows * wte.cols;
    CHECK(std::count(values.begin() + live, values.end(), 0.0f) == (long)(wte.elems - live),
          "the padded vocabulary has weights");
    const std::vector<float> grad = host_grad(a, PARAM_wte);
    CHECK(std::count(grad.begin() + live, grad.end(), 0.0f) == (long)(wte.elems - live),
          "the padded vocabulary has gradients");
    gpt2_free(&b);
}

static std::string temporary_folder() {
    const char* tmp = getenv("TMPDIR");
    std::string name = std::string(tmp ? tmp : "/tmp") + "/test_gpt2_XXXXXX";
    if (!mkdtemp(&name[0])) { die("cannot make a folder '%s': %s", name.c_str(), strerror(errno)); }
    return name;
}

// The disk stalls while rows are read and lines are written: a job of several ranks bears with it.
static void test_stalled_disk(const Config& c) {
    const std::string folder = temporary_folder(), path = folder + "/rows.bin";
    int header[256] = {kShardMagic, 1, 10 * c.maxT};
    const std::vector<uint16_t> tokens(header[2], 1);
    AtomicFile file = atomic_open(path);
    atomic_write(&file, header, sizeof(header));
    atomic_write(&file, tokens.data(), tokens.size() * sizeof(tokens[0]));
    atomic_commit(&file);
    run.B = 2, run.T = c.maxT, run.val_batches = 1;
    run.max_steps_text = "9";                   // validate asks whether this is a training
    GPT2 model;
    start_model(&model, c, default_options(), run.B, run.T);
    DataLoader loader;
    dataloader_init(&loader, path.c_str(), run.B, run.T, false, 0, c.V);
    static int lines, hasty;                    // written to the logs; of these, in haste
    lines = hasty = 0;
    cookie_io_functions_t writes = {};
    writes.write = [](void*, const char*, size_t bytes) {
        lines++;
        hasty += !(comm_state->allowed > 600);
        return (ssize_t)bytes;
    };
    Logger logger;
    logger.folder = folder;
    logger.main_log = fopencookie(nullptr, "w", writes);
    logger.metrics = fopencookie(nullptr, "w", writes);
    Reports reports = {};
    reports.report = {9, 1};                    // steps, tokens a step; a line after each
    std::vector<DeviceState> slots(Reports::kSlots);
    reports.states = slots.data();
    reports.begun[1] = reports.ended[1] = event_create();
    event_record(reports.ended[1], model.stream);
    comm_state = new CommState();
    for (int step : {0, 1}) { comm_progress(step); }        // with the first, it would be patient anyway

    std::atomic<bool> stalled(false), patient(false);
    std::thread disk([&] {
        std::lock_guard<std::mutex> lock(loader.prefetch->worker->mutex);
        stalled = true;
        for (int i = 0; i < 1000 && comm_state->allowed <= 600; i++) { usleep(10000); }
        patient = comm_state->allowed > 600;
    });
    while (!stalled) { usleep(1000); }
    CHECK(validate(&model, &loader, &logger, 1), "the validation fails");
    disk.join();
    CHECK(patient, "a job would end while rows are read for validation");
    reports.pending = 1;
    report_step(&reports, &logger, {});
    CHECK(lines == 4 && hasty == 0, "%d lines, %d of them while a job would soon end", lines, hasty);
    CHECK(comm_state->allowed < 600, "its patience lasts for %g s", comm_state->allowed.load());
    delete comm_state;
    comm_state = nullptr;
    event_destroy(reports.ended[1]);
    logger_free(&logger);
    dataloader_free(&loader);
    gpt2_free(&model);
    unlink(path.c_str());
    rmdir(folder.c_str());
}

// Saved after the first step while two more go on; another model goes on from there, and both end with the
// same bits. in_parts: no memory can be pinned for all of it.
static void test_checkpoint(const Config& c, const Options& o, bool in_parts) {
    const std::string folder = temporary_folder(), path = checkpoint_model(folder, 1);
    const int rows = 2;
    GPT2 a, b, same;
    start_model(&a, c, o, rows, c.maxT);
    start_model(&same, c, o, rows, c.maxT);
    one_step(&a, c, rows, 0);
    one_step(&same, c, rows, 0);
    DeviceState full = gpt2_read_state(&a);     // its windows hold floats that need nine digits
    for (int i = 0; i < kWindow; i++) {
        full.update.losses.values[i] = 1000.0f + rand_normal(1, 0, i);
        full.update.norms.values[i] = 1000.0f + rand_normal(1, 1, i);
    }
    full.update.losses.count = full.update.norms.count = kWindow;
    gpt2_write_state(&a, full);
    const std::vector<std::vector<float>> then = host_state(&a);
    static Logger logger;
    logger_init(&logger, folder.c_str());
    logger_train(&logger, {0, 1, 1, 1, 1, 1, 1});
    Saver saver = {};
    if (in_parts) { saver_pin = [](size_t) -> void* { return nullptr; }; }
    gpt2_saver_init(&saver, &a, &logger, folder, true, {2, 0, 1, {}});
    saver_pin = pinned_try;
    CHECK((saver.groups.size() > 2) == in_parts, "%zu groups", saver.groups.size() - 1);
    // of a job of several ranks, whose watchdog must bear with a slow disk
    static CommState* job;
    static std::atomic<bool> patient, main_log_synced, metrics_synced, in_order;
    job = new CommState();
    patient = main_log_synced = metrics_synced = in_order = false;
    comm_state = job;
    comm_progress(0);
    file_layer.fsync = [](int fd) {
        for (int i = 0; i < 1000 && job->allowed <= 600; i++) { usleep(10000); }
        if (job->allowed > 600) { patient = true; }
        main_log_synced = main_log_synced || fd == fileno(logger.main_log);
        metrics_synced = metrics_synced || fd == fileno(logger.metrics);
        return fsync(fd);
    };
    file_layer.rename = [](const char* from, const char* to) {
        if (strstr(to, "/DONE_")) { in_order = main_log_synced && metrics_synced; }
        return rename(from, to);
    };
    gpt2_save(&a, &saver, 1, model_facts(&a));
    saver_hold(saver);
    for (int step = 1; step < 3; step++) { one_step(&a, c, rows, step); }
    saver_advance(&saver, a.step, true);
    comm_state = nullptr;
    file_layer.fsync = fsync;
    file_layer.rename = rename;
    delete job;
    CHECK(in_order, "there is a DONE before the logs are on disk");
    CHECK(patient, "a job would end while its model goes to a slow disk");
    saver_free(&saver);

    std::set<int64_t> bad;
    Checkpoint found = checkpoint_find(folder, {1}, &bad);
    CHECK(found.step == 1 && bad.empty(), "found step %lld", (long long)found.step);
    const Config config = facts_config(found.facts);
    CHECK(config == c, "the state's sizes differ");
    gpt2_allocate(&b, config, o, rows, c.maxT);
    const std::string error = gpt2_load_state(&b, &found);
    CHECK(error.empty(), "%s", error.c_str());
    CHECK(host_state(&b) == then, "what was loaded is not what was saved");
    for (int step = 1; step < 3; step++) { one_step(&b, c, rows, step); }
    const DeviceState end_a = gpt2_read_state(&a), end_b = gpt2_read_state(&b);
    CHECK(host_state(&a) == host_state(&b), "a resumed run ends with other bits");
    CHECK(memcmp(&end_a.update, &end_b.update, sizeof(UpdateState)) == 0 && end_a.loss == end_b.loss,
          "a resumed run ends in another state");
    check_model_file(&same, c, o, path);
    checkpoint_remove(folder, 1);
    logger_free(&logger);
    for (const char* file : {"/main.log", "/metrics.jsonl", "/run.json"}) { unlink((folder + file).c_str()); }
    CHECK(rmdir(folder.c_str()) == 0, "something is left in %s: %s", folder.c_str(), strerror(errno));
    gpt2_free(&a);
    gpt2_free(&b);
    gpt2_free(&same);
}

// Newton-Schulz in plain loops; rounded(x) is what x becomes when it is stored.
typedef std::vector<double> Values;
static Values plain_newton_schulz(Values x, int rows, int cols, int steps, double (*rounded)(double)) {
    if (rows > cols) {                                  // of the transposed matrix, times sqrt(rows/cols)
        auto transposed = [](const Values& from, int r, int c) {
            Values to(from.size());
            for (int i = 0; i < r * c; i++) { to[i % c * r + i / c] = from[i]; }
            return to;
        };
        x = plain_newton_schulz(transposed(x, rows, cols), cols, rows, steps, rounded);
        x = transposed(x, cols, rows);
        for (double& value : x) { value *= sqrt((double)rows / cols); }
        return x;
    }
    auto product = [](const Values& a, const Values& b, int m, int n, int k) {      // (m,k) (k,n)
        Values out((size_t)m * n);
        for (int i = 0; i < m; i++) {
            for (int e = 0; e < k; e++) {
                for (int j = 0; j < n; j++) { out[i * n + j] += a[i * k + e] * b[e * n + j]; }
            }
        }
        return out;
    };
    double squares = 0.0;
    for (double value : x) { squares += value * value; }
    for (double& value : x) { value = squares > 0.0 ? rounded(value / sqrt(squares)) : 0.0; }
    for (int step = 0; step < steps; step++) {
        Values across(x.size());
        for (size_t i = 0; i < x.size(); i++) { across[i % cols * rows + i / cols] = x[i]; }
        Values gram = product(x, across, rows, rows, cols);
        for (double& value : gram) { value = rounded(value); }
        Values poly = product(gram, gram, rows, rows, rows);
        for (size_t i = 0; i < gram.size(); i++) { poly[i] = rounded(-4.7750 * gram[i] + 2.0315 * poly[i]); }
        const Values more = product(poly, x, rows, cols, rows);
        for (size_t i = 0; i < x.size(); i++) { x[i] = rounded(3.4445 * x[i] + more[i]); }
    }
    return x;
}
static double exactly(double x) { return x; }
[[maybe_unused]] static double as_fp32(double x) { return (double)(float)x; }
static double as_bf16(double x) { return (double)bf16_to_float(bf16_round_nearest((float)x)); }

// Updates of Muon's matrices from the gradients that the model has, beside the formula in double; then one
// that is skipped. Where the memory is for one layer at a time, the bits are the same.
static void test_muon_updates(const Config& c) {
    const int B = 2, steps = c.C <= 40 ? 5 : 2;
    const double lr = 0.02, decay = 0.5, momentum = 0.9;
    Options o = default_options();
    o.muon = true;
    o.muon_steps = steps;
    o.muon_momentum = momentum;
    o.muon_decay = decay;
    o.weight_decay = 3.0f;                              // is AdamW's
    o.grad_clip = 0.0f;
    GPT2 model;
    start_model(&model, c, o, B, c.maxT);
    auto params_of = [&](int i, int l) {
        std::vector<float> values(model.param_specs[i].elems);
        gpt2_get_param(&model, i, l, values.data(), true);
        return values;
    };
    std::map<std::pair<int, int>, Values> ms;
    for (uint32_t step = 0; step < 2; step++) {
        const Batch batch = random_batch(c, B, c.maxT, step);
        accumulate_batch(&model, batch.x.data(), batch.y.data(), B, c.maxT, 1);
        const std::vector<std::vector<float>> grads = host_grads(&model);
        std::map<std::pair<int, int>, std::vector<float>> before;
        for (int i = 0; i < NUM_PARAMS; i++) {
            for (int l = 0; l < model.param_specs[i].copies; l++) { before[{i, l}] = params_of(i, l); }
        }
        gpt2_update(&model, 1e-3, lr);
        for (const auto& it : before) {
            const int i = it.first.first, l = it.first.second;
            const ParamSpec& s = model.param_specs[i];
            if (s.muon == 0) { continue; }
            const size_t size = s.elems / s.muon;
            const int rows = (int)s.rows / s.muon, cols = (int)s.cols;
            const std::vector<float> after = params_of(i, l);
            Values& m = ms[it.first];
            m.resize(s.elems);
            std::vector<float> held(s.elems);
            copy_to_host(held.data(), gpt2_held_part(&model, i, l).in[1].memory, s.elems * sizeof(float),
                         model.stream);
            stream_sync(model.stream);
            for (int part = 0; part < s.muon; part++) {
                Values ahead(size);
                double off = 0.0, m_off = 0.0, near = 0.0, along = 0.0, length = 0.0, m_length = 0.0;
                for (size_t k = 0; k < size; k++) {
                    const size_t e = part * size + k;
                    const double g = grads[i][l * s.elems + e];
                    m[e] = momentum * m[e] + (1 - momentum) * g;
                    ahead[k] = (1 - momentum) * g + momentum * m[e];
                    m_off += (held[e] - m[e]) * (held[e] - m[e]);
                    m_length += m[e] * m[e];
                }
                const Values want = plain_newton_schulz(ahead, rows, cols, steps, exactly);
                for (double& u : ahead) { u = kLowPrecision ? as_bf16(u) : u; }
                const Values plain = kLowPrecision ? plain_newton_schulz(ahead, rows, cols, steps, as_bf16)
                                                   : want;
                for (size_t k = 0; k < size; k++) {
                    const size_t e = part * size + k;
                    const double got = (it.second[e] * (1 - lr * decay) - after[e]) / lr;
                    off += (got - want[k]) * (got - want[k]);
                    near += (plain[k] - want[k]) * (plain[k] - want[k]);
                    along += got * want[k];
                    length += want[k] * want[k];
                }
                const std::string what = format("%s.%d, part %d, update %u", s.name, l, part, step + 1);
                CHECK(sqrt(m_off) <= 1e-5 * sqrt(m_length), "%s: m is off by %.2e", what.c_str(),
                      sqrt(m_off / m_length));
                // 16 bits: small singular values decide how far each rounding comes through
                CHECK(sqrt(off) <= 2 * sqrt(near) + 2e-3 * sqrt(length), "%s: off by %.2e, allowed %.2e",
                      what.c_str(), sqrt(off / length), 2 * sqrt(near / length) + 2e-3);
                CHECK(fabs(along / length - 1) <= (kLowPrecision ? 2e-2 : 2e-3), "%s: %.5f times as long",
                      what.c_str(), along / length);
            }
        }
    }
    const std::vector<std::vector<float>> before = host_state(&model);
    const float poison = NAN;
    copy_to_device((float*)gpt2_grad(&model, PARAM_fcw, 0, Accumulate::No).data + 3, &poison, sizeof(float),
                   model.stream);
    gpt2_update(&model, 1e-3, lr);
    CHECK(gpt2_read_state(&model).update.skip == SKIP_NOT_FINITE && host_state(&model) == before,
          "a skipped update changes something");
    gpt2_free(&model);

    const std::vector<float> together = short_run(c, o, B, c.maxT, 3);
    const size_t usual = hooks.muon_bytes;
    hooks.muon_bytes = 1;
    CHECK(same_bits(together, short_run(c, o, B, c.maxT, 3)), "one layer at a time has other bits");
    hooks.muon_bytes = usual;
    CHECK(same_bits(together, short_run(c, o, B, c.maxT, 3)), "two equal runs differ");
}

// The LM head over some rows alone: the same losses but for the order of its sums, which may depend on how
// many rows there are. In 16 bits a logit may then be rounded the other way, now and then.
static void test_counted_losses(const Config& c, const Options& o) {
    const int B = 8, T = c.maxT, N = B * T;
    GPT2 model;
    start_model(&model, c, o, B, T);
    const Batch batch = random_batch(c, B, T, 8);
    auto losses_of = [&](int count) {
        std::vector<float> losses(count);
        copy_to_host(losses.data(), gpt2_acts(&model, 0).losses, count * sizeof(float), model.stream);
        stream_sync(model.stream);
        return losses;
    };
    gpt2_feed(&model, batch.x.data(), batch.y.data(), B, T, ClassifierMode::LossOnly);
    gpt2_loss(&model, B, T, ClassifierMode::LossOnly, 1.0f, &model.state->loss, Accumulate::No);
    const std::vector<float> all = losses_of(N), logits = host_logits(&model, N);
    double size = 0.0;
    for (float x : logits) { size += (double)x * x; }
    const double rms = sqrt(size / (double)logits.size());
    for (int stride : {1, 3, N}) {                  // all of them; some, the last too; the last alone
        std::vector<int> places(N, 0), targets(N, 0);
        int count = 0;
        for (int n = (N - 1) % stride; n < N; n += stride) {
            places[count] = n;
            targets[count++] = batch.y[n];
        }
        gpt2_feed(&model, batch.x.data(), targets.data(), B, T, ClassifierMode::LossOnly, places.data());
        gpt2_forward(&model, B, T);
        gpt2_counted_losses(&model, N, count);
        const std::vector<float> got = losses_of(count);
        double far = 0.0;
        for (int i = 0; i < count; i++) { far += fabs(got[i] - all[places[i]]) / count; }
        CHECK(far <= (kLowPrecision ? 1e-3 : 1e-5) * rms, "every %d: losses differ by %.2e on average",
              stride, far);
    }
    gpt2_free(&model);
}

static void test_invariance(const char* name, const Config& c) {
    const int B = 8, T = c.maxT;
    const Options o = default_options();
    TEST(format("invariance: %s", name).c_str()) {
        const std::vector<float> base = short_run(c, o, B, T, 3);
        CHECK(same_bits(base, short_run(c, o, B, T, 3)), "two equal runs differ");
        for (int recompute = 1; recompute <= 2; recompute++) {
            Options r = o;
            r.recompute = recompute;
            CHECK(same_bits(base, short_run(c, r, B, T, 3)), "-r %d differs from -r 0", recompute);
        }
    }
    TEST("one batch in 1, 2, 4 and 8 micro-steps") {
        Batch batch = random_batch(c, B, T, 0);
        std::vector<std::vector<float>> whole;
        float loss = 0.0f;
        for (int micro_steps : {1, 2, 4, 8}) {
            GPT2 model;
            start_model(&model, c, o, B / micro_steps, T);
            accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, micro_steps);
            const std::vector<std::vector<float>> grads = host_grads(&model);
            const float got = gpt2_read_state(&model).loss;
            if (micro_steps == 1) { whole = grads; loss = got; }
            CHECK(fabs(got - loss) <= 1e-5, "%d micro-steps: loss %.7f, in one %.7f", micro_steps, got, loss);
            for (int i = 0; i < NUM_PARAMS; i++) {
                const double error = relative_error(grads[i].data(), whole[i].data(), whole[i].size());
                CHECK(error <= (kLowPrecision ? 1e-2 : 1e-6), "%d micro-steps: gradient of %s differs by %g",
                      micro_steps, model.param_specs[i].name, error);
            }
            gpt2_free(&model);
        }
    }
    TEST("evaluation and sampling between steps change no bit") {
        GPT2 a, b;
        start_model(&a, c, o, B, T);
        start_model(&b, c, o, B, T);
        for (int step = 0; step < 2; step++) {
            Batch batch = random_batch(c, B, T, (uint32_t)step), other = random_batch(c, B, T, 77);
            for (GPT2* model : {&a, &b}) {
                if (model == &b) {
                    gpt2_feed(model, other.x.data(), other.y.data(), B, T, ClassifierMode::LossOnly);
                    gpt2_loss(model, B, T, ClassifierMode::LossOnly, 1.0f, &model->state->loss,
                              Accumulate::No);
                    gpt2_feed(model, other.x.data(), nullptr, 1, T / 2, ClassifierMode::LossOnly);
                    gpt2_forward(model, 1, T / 2);
                    gpt2_logits(model, gpt2_acts(model, 0).lnf + (T / 2 - 1) * c.C, 1);
                }
                accumulate_batch(model, batch.x.data(), batch.y.data(), B, T, 2);
                gpt2_update(model, 1e-3);
                stream_sync(model->stream);     // models share the GEMM workspace: one at a time
            }
        }
        CHECK(same_bits(host_params(&a), host_params(&b)), "parameters differ");
        CHECK(gpt2_read_state(&a).loss == gpt2_read_state(&b).loss, "losses differ");
        gpt2_free(&a);
        gpt2_free(&b);
    }
    TEST("an evaluation's losses: a whole forward's at the places that count") { test_counted_losses(c, o); }
    TEST("a shorter sequence and a smaller batch than allocated") {
        GPT2 big, small;
        start_model(&big, c, o, B, T);
        start_model(&small, c, o, 2, 7);
        Batch other = random_batch(c, B, T, 5), batch = random_batch(c, 2, 7, 6);
        accumulate_batch(&big, other.x.data(), other.y.data(), B, T, 1);
        accumulate_batch(&big, batch.x.data(), batch.y.data(), 2, 7, 1);
        stream_sync(big.stream);
        accumulate_batch(&small, batch.x.data(), batch.y.data(), 2, 7, 1);
        const std::vector<std::vector<float>> a = host_grads(&big), b = host_grads(&small);
        for (int i = 0; i < NUM_PARAMS; i++) {
            CHECK(same_bits(a[i], b[i]), "gradient of %s differs", big.param_specs[i].name);
        }
        gpt2_free(&big);
        gpt2_free(&small);
    }
    TEST("a gradient that is not finite changes nothing") {
        GPT2 model;
        start_model(&model, c, o, B, T);
        Batch batch = random_batch(c, B, T, 0);
        accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, 1);
        gpt2_update(&model, 1e-3);
        const std::vector<float> before = host_params(&model);
        const UpdateState good = gpt2_read_state(&model).update;
        CHECK(good.t == 1 && good.skip == 0 && isfinite(good.norm), "t %lld skip %d norm %f", good.t,
              good.skip, good.norm);
        for (float poison : {NAN, INFINITY}) {
            const Grad grad = gpt2_grad(&model, PARAM_fcw, c.L - 1, Accumulate::No);
            accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, 1);
            copy_to_device((float*)grad.data + 3, &poison, sizeof(float), model.stream);
            gpt2_update(&model, 1e-3);
            const UpdateState state = gpt2_read_state(&model).update;
            CHECK(state.skip == 1 && state.t == 1 && !isfinite(state.norm), "skip %d t %lld norm %f",
                  state.skip, state.t, state.norm);
            CHECK(same_bits(before, host_params(&model)), "parameters changed");
            CHECK(!kFp16 || state.loss_scale < good.loss_scale, "FP16: the loss scale stayed at %f",
                  state.loss_scale);
        }
        CHECK(gpt2_read_state(&model).update.skipped_in_a_row == 2, "skips in a row");
        accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, 1);
        gpt2_update(&model, 1e-3);
        const UpdateState after = gpt2_read_state(&model).update;
        CHECK(after.skip == 0 && after.t == 2 && after.skipped_in_a_row == 0, "skip %d t %lld", after.skip,
              after.t);
        CHECK(!same_bits(before, host_params(&model)), "a good step must change the parameters");
        gpt2_free(&model);
    }
    TEST("an update whose loss or norm is unusual changes nothing") {
        for (Skip why : {SKIP_LOSS, SKIP_NORM}) {
            Options limits = o;
            (why == SKIP_LOSS ? limits.skip_loss : limits.skip_norm) = 3.0f;
            GPT2 model;
            start_model(&model, c, limits, B, T);
            DeviceState state = gpt2_read_state(&model);
            Window* window = why == SKIP_LOSS ? &state.update.losses : &state.update.norms;
            window->count = kWindow;
            for (int i = 0; i < kWindow; i++) { window->values[i] = 1e-3f * (float)(1 + i % 2); }
            gpt2_write_state(&model, state);
            const std::vector<float> before = host_params(&model);
            Batch batch = random_batch(c, B, T, 0);
            accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, 1);
            gpt2_update(&model, 1e-3);
            const DeviceState after = gpt2_read_state(&model);
            const UpdateState& u = after.update;
            CHECK(u.skip == why && u.t == 0 && u.skipped_in_a_row == 1, "skip %d t %lld", u.skip, u.t);
            CHECK(same_bits(before, host_params(&model)), "parameters changed");
            CHECK(u.loss_scale == state.update.loss_scale, "the loss scale is %g", u.loss_scale);
            const float x = why == SKIP_LOSS ? after.loss : u.norm;
            const double score = why == SKIP_LOSS ? u.loss_score : u.norm_score;
            CHECK(fabs(score / ((x - 1.5e-3) / 0.5e-3) - 1) <= 1e-5, "%g has a score of %g", x, score);
            CHECK(u.losses.count == state.update.losses.count && u.norms.count == state.update.norms.count,
                  "a skipped step's loss or norm is in its window");
            gpt2_free(&model);
        }
    }
    if (kDeviceIsAsync || c.C <= 40) {      // a CPU's loops are the same for both
        TEST("Muon: two updates, a skipped one, some layers at a time") { test_muon_updates(c); }
        TEST("a checkpoint, Muon") {
            Options muon = o;
            muon.muon = true;
            test_checkpoint(c, muon, false);
        }
    }
    TEST("a disk that stalls") { test_stalled_disk(c); }
    for (bool in_parts : {false, true}) {
        for (bool master : {true, false}) {
            Options without = o;
            without.master = master;
            TEST(format("a checkpoint, %s, -w %d", in_parts ? "in parts" : "at once", master).c_str()) {
                test_checkpoint(c, without, in_parts);
            }
        }
    }
}

// Four or eight micro-steps in as many lanes, against each one's gradients alone, summed here by the tree.
static void test_lane_gradients(const Config& c) {
    const int B = 8, T = c.maxT;
    Batch batch = random_batch(c, B, T, 1);
    for (int lanes : {4, 8}) {
        Options o = default_options();
        o.lanes = lanes;
        const int rows = B / lanes;
        GPT2 model;
        start_model(&model, c, o, rows, T);
        std::vector<std::vector<std::vector<float>>> alone;     // of a lane, of a tensor
        for (int lane = 0; lane < lanes; lane++) {
            const size_t at = (size_t)lane * rows * T;
            gpt2_micro_step(&model, batch.x.data() + at, batch.y.data() + at, rows, T, 0, lanes);
            alone.push_back(host_grads(&model));
        }
        for (; alone.size() > 1; alone.resize(alone.size() / 2)) {
            for (size_t k = 0; k < alone.size(); k += 2) {
                for (int i = 0; i < NUM_PARAMS; i++) {
                    for (size_t e = 0; e < alone[k][i].size(); e++) {
                        alone[k / 2][i][e] = alone[k][i][e] + alone[k + 1][i][e];
                    }
                }
            }
        }
        accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, lanes);
        const std::vector<std::vector<float>> got = host_grads(&model);
        for (int i = 0; i < NUM_PARAMS; i++) {
            CHECK(same_bits(got[i], alone[0][i]), "%d lanes: gradient of %s differs by %g", lanes,
                  model.param_specs[i].name,
                  relative_error(got[i].data(), alone[0][i].data(), got[i].size()));
        }
        gpt2_free(&model);
    }
}

// Texts that are written with kept keys and values, past T, three at once: logits against those of whole
// forwards, the device's draws against sample_token's; each text alone; and training beside it.
static void test_writing(const char* name, const Config& c) {
    const StreamApart apart;                    // where c has it
    const int T = c.maxT, count = T + 9, kRow = 1;
    const std::vector<int> prompt = {7, c.V - 1, 0, 250, 7};
    Options o = default_options();
    o.text_rows = 3;
    o.sampling = {0.9f, 20, 0.9f};
    TEST(format("writing: %s", name).c_str()) {
        GPT2 model;
        start_model(&model, c, o, 2, T);
        Decoder d;
        decoder_init(&d, &model);
        std::vector<std::vector<int>> texts(o.text_rows, prompt);
        std::vector<std::vector<float>> logits;         // of one of the texts
        int wrong = 0;
        for (int i = 0, position = T; i < count; i++, position++) {
            if (position == T) { position = decoder_begin(&d, texts, 0, 5u << 24); }
            decoder_step(&d, 0);
            std::vector<floatX> raw((size_t)o.text_rows * c.V);
            copy_to_host(raw.data(), d.logits, raw.size() * sizeof(floatX), model.stream);
            stream_sync(model.stream);
            const std::vector<float> all(raw.begin(), raw.end());
            for (int row = 0; row < o.text_rows; row++) {
                const uint64_t n = (5u << 24) + texts[row].size();
                const double coin = rand_unit(o.seed, RAND_SAMPLE, (uint32_t)row, n);
                wrong += d.drawn[row] != sample_token(&all[(size_t)row * c.V], c.V, o.sampling, coin);
                texts[row].push_back(std::min(std::max(d.drawn[row], 0), c.V - 1));
            }
            logits.emplace_back(all.begin() + kRow * c.V, all.begin() + (kRow + 1) * c.V);
        }
        CHECK(wrong == 0, "%d of %d tokens are not what sample_token draws", wrong, count * o.text_rows);
        CHECK(texts[0] != texts[1] && texts[1] != texts[2], "texts of different streams are equal");

        std::vector<int> context = prompt;
        double worst = 0.0;
        int other = 0;
        for (int i = 0; i < count; i++) {
            if ((int)context.size() > T) { context.erase(context.begin(), context.end() - T / 2); }
            const int n = (int)context.size();
            gpt2_feed(&model, context.data(), nullptr, 1, n, ClassifierMode::LossOnly);
            gpt2_forward(&model, 1, n);
            gpt2_logits(&model, gpt2_acts(&model, 0).lnf + (n - 1) * c.C, 1);
            const std::vector<float> whole = host_logits(&model, 1);
            const double error = relative_error(logits[i].data(), whole.data(), whole.size());
            if (!(error <= worst)) { worst = error; }
            other += std::max_element(whole.begin(), whole.end()) - whole.begin() !=
                     std::max_element(logits[i].begin(), logits[i].end()) - logits[i].begin();
            context.push_back(texts[kRow][prompt.size() + i]);
        }
        CHECK(worst <= (kFp16 ? 5e-3 : kLowPrecision ? 3e-2 : 1e-5), "logits are off by %.2e", worst);
        CHECK(kLowPrecision || other == 0, "%d of %d likeliest tokens are others", other, count);
        printf("logits off by %.1e; %d of %d likeliest tokens are others than a whole forward's\n", worst,
               other, count);

        auto written = [&](uint32_t first_id) {
            std::vector<std::vector<int>> all(d.rows, prompt);
            decoder_write(&d, prompt, count, -1, first_id, 5u << 24, [&](int row, int token) {
                all[row].push_back(token);
                return true;
            });
            return all;
        };
        CHECK(written(0) == texts, "written while the host waits now and then: other texts");
        std::vector<char> params(model.layout.params_bytes);
        copy_to_host(params.data(), model.params, params.size(), model.stream);
        stream_sync(model.stream);
        one_step(&model, c, 2, 1);
        written(0);
        one_step(&model, c, 2, 2);
        const std::vector<float> disturbed = host_params(&model);
        decoder_free(&d);
        gpt2_free(&model);
        o.text_rows = 0;
        start_model(&model, c, o, 2, T);
        one_step(&model, c, 2, 1);
        one_step(&model, c, 2, 2);
        CHECK(same_bits(host_params(&model), disturbed), "writing changes what is trained");
        gpt2_free(&model);
        o.text_rows = 1;
        o.trains = false;
        start_model(&model, c, o, 1, T);        // its weights had no master copies to be rounded from
        decoder_init(&d, &model);
        copy_to_device(model.params, params.data(), params.size(), model.stream);
        for (int row = 0; row < (int)texts.size(); row++) {
            CHECK(written((uint32_t)row)[0] == texts[row], "text %d alone is another", row);
        }
        decoder_free(&d);
        gpt2_free(&model);
    }
}

#ifndef GPT2_CPU
// == options that only the CUDA build has ==
static void test_cuda_options(const Config& c) {
    const int B = 8, T = c.maxT, steps = 4;
    const std::vector<float> base = short_run(c, default_options(), B, T, steps);
    auto compare = [&](const char* name, const Options& o, double loss_bound, double bound) {
        const std::vector<float> other = short_run(c, o, B, T, steps, o.grads_bf16 ? 4 : 1);
        for (int i = 0; i < steps; i++) {
            CHECK(fabs(other[i] - base[i]) <= loss_bound, "%s: loss %.6f, default %.6f", name, other[i],
                  base[i]);
        }
        const double error = relative_error(other.data() + steps, base.data() + steps, base.size() - steps);
        CHECK(error <= bound && error > 0.0, "%s: parameters differ by %g", name, error);
        CHECK(same_bits(other, short_run(c, o, B, T, steps, o.grads_bf16 ? 4 : 1)),
              "%s: two equal runs differ", name);
    };
    TEST("GELU fused, no master weights, bf16 gradients") {
        Options o = default_options();
        if (kLowPrecision) {
            for (o.gelu_fusion = 1; o.gelu_fusion <= 2; o.gelu_fusion++) {
                compare("GELU fusion", o, 2e-2, 2e-2);
            }
            o = default_options();
            o.master = false;
            compare("no master weights", o, 2e-2, 2e-2);
        }
        o = default_options();
        o.grads_bf16 = true;
        compare("bf16 gradients", o, 2e-2, 2e-2);
    }
    TEST("bf16 gradients of 4 micro-steps: matrices near fp32's, all others equal to them") {
        Options o = default_options();
        GPT2 a, b;
        start_model(&a, c, o, B / 4, T);
        o.grads_bf16 = true;
        start_model(&b, c, o, B / 4, T);
        Batch batch = random_batch(c, B, T, 0);
        std::vector<std::vector<float>> grads[2];
        float norms[2];
        for (GPT2* model : {&a, &b}) {
            accumulate_batch(model, batch.x.data(), batch.y.data(), B, T, 4);
            grads[model == &b] = host_grads(model);
            gpt2_update(model, 1e-3);
            norms[model == &b] = gpt2_read_state(model).update.norm;
        }
        for (int i = 0; i < NUM_PARAMS; i++) {
            const std::vector<float> &exact = grads[0][i], &got = grads[1][i];
            const double error = relative_error(got.data(), exact.data(), exact.size());
            const bool bf16 = a.param_specs[i].kind == Kind::Matrix;
            const bool good = bf16 ? error > 0.0 && error <= 5e-3 : same_bits(got, exact);
            CHECK(good, "gradient of %s differs by %g", a.param_specs[i].name, error);
        }
        CHECK(fabs(norms[1] / norms[0] - 1.0) <= 2e-4, "norm %.7f, of fp32 gradients %.7f", norms[1],
              norms[0]);
        gpt2_free(&a);
        gpt2_free(&b);
    }
    TEST("weights without master copies move by less than their spacing") {
        // A step is a small part of the gap between bf16 neighbours: rounded to nearest, most weights would
        // never move.
        Options o = default_options();
        o.master = false;
        GPT2 a, b;
        Options exact = default_options();
        start_model(&a, c, o, B, T);
        start_model(&b, c, exact, B, T);
        const std::vector<float> start = host_params(&a), start_master = host_params(&b);
        for (int step = 0; step < 20; step++) {
            Batch batch = random_batch(c, B, T, 0);
            for (GPT2* model : {&a, &b}) {
                accumulate_batch(model, batch.x.data(), batch.y.data(), B, T, 1);
                gpt2_update(model, 1e-5);
                stream_sync(model->stream);
            }
        }
        const std::vector<float> rounded = host_params(&a), master = host_params(&b);
        double along = 0.0, size = 0.0;
        for (size_t i = 0; i < start.size(); i++) {
            const double want = (double)master[i] - start_master[i], got = (double)rounded[i] - start[i];
            along += want * got;
            size += want * want;
        }
        // without master copies fp32 is its own
        const double off = kLowPrecision ? 0.5 : 0.0;
        CHECK(fabs(along / size - 1.0) <= off, "moved %.3f of the way", along / size);
        gpt2_free(&a);
        gpt2_free(&b);
    }
    if (kFp16) {
        TEST("FP16: the loss scale starts where it is told and grows past its start") {
            GPT2 model;
            Options o = default_options();
            for (float start : {kFirstLossScale, 16 * kFirstLossScale}) {
                o.loss_scale = start;
                start_model(&model, c, o, B, T);
                DeviceState state = gpt2_read_state(&model);
                CHECK(state.update.loss_scale == start, "the scale starts at %g", state.update.loss_scale);
                state.update.good_steps = kLossScaleSteps - 1;
                gpt2_write_state(&model, state);
                Batch batch = random_batch(c, B, T, 0);
                accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, 1);
                gpt2_update(&model, 1e-3);
                state = gpt2_read_state(&model);
                CHECK(state.update.skip == 0 && state.update.loss_scale == 2 * start, "skip %d, scale %g",
                      state.update.skip, state.update.loss_scale);
                gpt2_free(&model);
            }
        }
        TEST("FP16: an overflow is skipped, halves the scale, and training recovers") {
            GPT2 model;
            start_model(&model, c, default_options(), B, T);
            DeviceState state = gpt2_read_state(&model);
            state.update.loss_scale = 1073741824.0f;       // 2^30: overflows for certain
            gpt2_write_state(&model, state);
            const std::vector<float> before = host_params(&model);
            Batch batch = random_batch(c, B, T, 0);
            int skips = 0;
            for (; skips < 30; skips++) {
                accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, 1);
                gpt2_update(&model, 1e-3);
                state = gpt2_read_state(&model);
                if (!state.update.skip) { break; }
                CHECK(state.update.loss_scale == ldexpf(1.0f, 29 - skips), "skip %d: loss scale %g", skips,
                      state.update.loss_scale);
                if (skips == 0) {
                    CHECK(same_bits(before, host_params(&model)), "a skipped step changed the parameters");
                }
            }
            CHECK(skips > 0 && skips < 30 && state.update.t == 1 && isfinite(state.update.norm),
                  "%d skips, t %lld, norm %g", skips, state.update.t, state.update.norm);
            CHECK(!same_bits(before, host_params(&model)), "training did not go on");
            gpt2_free(&model);
        }
    }
    TEST("scratch holds what each op asks for") {
        for (int C : {8, 40, 64, 72, 80, 128, 136, 168, 384, 768, 1280, 1600}) {
            for (int N : {1, 4096, 8192, 16384, 65536}) {
                const Config shape = {N, 256, 256, 2, 1, C};
                ParamSpec specs[NUM_PARAMS];
                param_specs(specs, shape);
                const size_t bytes = gpt2_scratch_bytes(shape, default_options(), 1, N, specs);
                Options bf16 = default_options();
                bf16.grads_bf16 = true;
                const size_t behind = specs[PARAM_wte].elems * sizeof(float);   // both parts of dwte
                CHECK(gpt2_scratch_bytes(shape, bf16, 1, N, specs) >= bytes + behind &&
                          gpt2_scratch_bytes(shape, bf16, 1, N, specs) >= behind + (size_t)C * C * 16,
                      "C=%d N=%d: scratch of bf16 gradients", C, N);
                size_t most = std::max(encoder_backward_scratch_bytes(1, N, C),
                                       norm_backward_scratch_bytes(N, C, 3));
                for (int OC : {3 * C, 4 * C}) { most = std::max(most, bias_backward_scratch_bytes(N, OC)); }
                most = std::max(most, attention_backward_scratch_bytes(1, N, 1));
                CHECK(bytes >= most, "C=%d N=%d: %zu bytes, an op takes %zu", C, N, bytes, most);
            }
        }
    }
    TEST("logits beyond 2^31 elements") {
        const Config wide = {1024, 50257, 50304, 1, 1, 64};
        const int rows = 44, N = rows * 1024;               // 45056 * 50304 = 2.27e9
        if (memory_total(gpt2_memory_plan(wide, default_options(), rows, 1024)) > device_init().memory_free) {
            SKIP(1, "not enough GPU memory");
            return;
        }
        GPT2 model;
        gpt2_allocate(&model, wide, default_options(), rows, 1024);
        gpt2_init_random(&model, 1);
        Batch batch = random_batch(wide, rows, 1024, 3);
        auto losses_of = [&](int count) {
            std::vector<float> losses(count);
            copy_to_host(losses.data(), gpt2_acts(&model, 0).losses, count * sizeof(float), model.stream);
            stream_sync(model.stream);
            return losses;
        };
        accumulate_batch(&model, batch.x.data(), batch.y.data(), rows, 1024, 1);
        const std::vector<float> all = losses_of(N);
        const std::vector<std::vector<float>> whole = host_grads(&model);
        accumulate_batch(&model, batch.x.data(), batch.y.data(), rows, 1024, 2);
        const std::vector<float> half = losses_of(N / 2);   // of the second half
        const double loss_error = relative_error(half.data(), all.data() + N / 2, N / 2);
        CHECK(loss_error <= (kLowPrecision ? 1e-3 : 1e-6), "losses of the second half differ by %g",
              loss_error);
        const std::vector<std::vector<float>> split = host_grads(&model);
        for (int i = 0; i < NUM_PARAMS; i++) {
            const double error = relative_error(split[i].data(), whole[i].data(), whole[i].size());
            CHECK(error <= (kLowPrecision ? 2e-2 : 1e-5), "gradient of %s differs by %g",
                  model.param_specs[i].name, error);
        }
        gpt2_free(&model);
    }
}
#endif

// The gradient of each tensor beside differences of the loss along it. An fp32 loss has 6 digits, so a tensor
// goes far enough for the loss to change by a hundredth, or by 0.3.
static void check_slopes(GPT2* model, const std::string& what, const Batch& batch, int B, int T,
                         const std::vector<std::vector<float>>& grads) {
    const float weight = 1.0f / (float)(B * T);
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = model->param_specs[i];
        double square = 0.0;
        for (float g : grads[i]) { square += (double)g * g; }
        if (s.copies == 0 || square == 0.0) { continue; }
        const double step = std::min(0.01 / square, 0.3 / sqrt(square));
        std::vector<std::vector<float>> before(s.copies, std::vector<float>(s.elems));
        for (int l = 0; l < s.copies; l++) { gpt2_get_param(model, i, l, before[l].data(), true); }
        auto loss_at = [&](double t) {
            for (int l = 0; l < s.copies; l++) {
                std::vector<float> moved = before[l];
                for (size_t k = 0; k < s.elems; k++) { moved[k] += (float)(t * grads[i][l * s.elems + k]); }
                gpt2_set_param(model, i, l, moved.data());
            }
            gpt2_feed(model, batch.x.data(), batch.y.data(), B, T, ClassifierMode::LossAndGrad);
            gpt2_loss(model, B, T, ClassifierMode::LossAndGrad, weight, &model->state->loss,
                      Accumulate::No);
            return (double)gpt2_read_state(model).loss;
        };
        const double near = loss_at(step) - loss_at(-step), far = loss_at(2 * step) - loss_at(-2 * step);
        const double slope = (8 * near - far) / 12;
        loss_at(0.0);
        const double want = step * square;
        CHECK(fabs(slope - want) <= 4e-3 * want + 2e-6, "%s: along d%s the loss changes by %g, not by %g",
              what.c_str(), s.name, slope, want);
    }
}

// A stream in fp32 beside the same model's of the branches' type. In an FP32 build they are one. The way that
// a stream in fp32 takes, where the norms add and each branch has a gradient of its own, leads to the same
// numbers; with dropout the norms add in any case.
static void test_residual_fp32(Config c, double dropout) {
    const int B = 4, T = c.maxT;
    const std::string what = format("block %d, norm %d, dropout %g, stream in fp32", (int)c.block,
                                    (int)c.norm, dropout);
    Options o = default_options();
    o.dropout = dropout;
    const std::vector<float> plain = short_run(c, o, B, T, 2, 2);
    c.residual_fp32 = true;
    const bool same = kLowPrecision || same_bits(plain, short_run(c, o, B, T, 2, 2));
    CHECK(same, "%s: other bits", what.c_str());
    const StreamApart apart;
    const std::vector<float> fp32 = short_run(c, o, B, T, 2, 2);
#ifdef GPT2_CPU
    CHECK(dropout == 0.0 || same_bits(plain, fp32), "%s: other bits by the other way", what.c_str());
#else
    CHECK(same_bits(fp32, short_run(c, o, B, T, 2, 2)), "%s: two equal runs differ", what.c_str());
#endif
    const double error = relative_error(fp32.data() + 2, plain.data() + 2, plain.size() - 2);
    CHECK(error <= (kLowPrecision ? 2e-2 : 1e-4), "%s: differs by %g", what.c_str(), error);
    if (kLowPrecision) { CHECK(!same_bits(plain, fp32), "%s: the same bits", what.c_str()); }
    for (int recompute : {1, 2}) {
        Options r = o;
        r.recompute = recompute;
        CHECK(same_bits(fp32, short_run(c, r, B, T, 2, 2)), "%s: -r %d", what.c_str(), recompute);
    }
}

// GPT-2's logits in double, from the weights as the model has them: (rows, V).
static std::vector<float> exact_logits(GPT2* model, const std::vector<int>& tokens) {
    typedef std::vector<double> Doubles;
    const Config& c = model->config;
    const int T = c.maxT, C = c.C, N = (int)tokens.size(), B = N / T;
    auto param = [&](ParamId i, int l) {
        std::vector<float> values(model->param_specs[i].elems);
        gpt2_get_param(model, i, l, values.data(), false);
        return Doubles(values.begin(), values.end());
    };
    auto norm = [&](const Doubles& x, ParamId w, ParamId b, int l) {
        const Doubles weight = param(w, l), bias = param(b, l);
        Doubles y(x.size()), mean(N), rstd(N);
        NormForward<double, double> a = {};
        a.y[0] = {y.data(), weight.data(), bias.data()};
        a.mean = mean.data(), a.rstd = rstd.data(), a.inp = x.data(), a.N = N, a.C = C;
        norm_forward_cpu<double>(a, 0);
        return y;
    };
    auto linear = [&](const Doubles& x, ParamId w, ParamId b, int l, int OC) {
        const Doubles weight = param(w, l), bias = param(b, l);
        Doubles y((size_t)N * OC);
        matmul_forward_cpu<double>({y.data(), x.data(), weight.data(), bias.data(), nullptr, nullptr, N,
                                    (int)(x.size() / N), OC}, 0);
        return y;
    };
    const Doubles wte = param(PARAM_wte, 0), wpe = param(PARAM_wpe, 0);
    Doubles x((size_t)N * C), lse((size_t)N * c.NH), logits((size_t)N * c.V);
    auto add = [&](const Doubles& y) { for (size_t i = 0; i < x.size(); i++) { x[i] += y[i]; } };
    encoder_forward_cpu<double>({x.data(), tokens.data(), wte.data(), wpe.data(), B, T, C}, 0);
    for (int l = 0; l < c.L; l++) {
        const Doubles qkv = linear(norm(x, PARAM_ln1w, PARAM_ln1b, l), PARAM_qkvw, PARAM_qkvb, l, 3 * C);
        Doubles atty((size_t)N * C);
        attention_forward_cpu<double>({atty.data(), lse.data(), qkv.data(), B, T, c.NH, C / c.NH}, 0);
        add(linear(atty, PARAM_attprojw, PARAM_attprojb, l, C));
        Doubles fch = linear(norm(x, PARAM_ln2w, PARAM_ln2b, l), PARAM_fcw, PARAM_fcb, l, 4 * C);
        gelu_forward_cpu<double>({fch.data(), fch.data(), fch.size()}, 0);
        add(linear(fch, PARAM_fcprojw, PARAM_fcprojb, l, C));
    }
    const Doubles lnf = norm(x, PARAM_lnfw, PARAM_lnfb, 0);
    matmul_forward_cpu<double>({logits.data(), lnf.data(), wte.data(), nullptr, nullptr, nullptr, N, C, c.V},
                               0);
    return std::vector<float>(logits.begin(), logits.end());
}

static double logits_error(const Config& c, int B) {
    GPT2 model;
    start_model(&model, c, default_options(), B, c.maxT);
    Batch batch = random_batch(c, B, c.maxT, 0);
    gpt2_feed(&model, batch.x.data(), batch.y.data(), B, c.maxT, ClassifierMode::LossOnly);
    gpt2_loss(&model, B, c.maxT, ClassifierMode::LossOnly, 1.0f, &model.state->loss, Accumulate::No);
    const std::vector<float> logits = host_logits(&model, B * c.maxT), want = exact_logits(&model, batch.x);
    gpt2_free(&model);
    return relative_error(logits.data(), want.data(), want.size());
}

#ifdef GPT2_CPU
static std::vector<float> step_grads(const Config& c, int B) {
    GPT2 model;
    start_model(&model, c, default_options(), B, c.maxT);
    Batch batch = random_batch(c, B, c.maxT, 0);
    gpt2_micro_step(&model, batch.x.data(), batch.y.data(), B, c.maxT, 0, 1);
    std::vector<float> all;
    for (const std::vector<float>& grad : host_grads(&model)) {
        all.insert(all.end(), grad.begin(), grad.end());
    }
    gpt2_free(&model);
    return all;
}
#endif

// Why a stream in fp32: in the branches' type it is rounded after each of 2L additions, and errors grow with
// the depth; in fp32 they are those of branches and operands, at any depth. BF16 on a CPU, where rounding is
// emulated, of logits and gradients: L=2 .0053 .0057 and, in fp32, .0048 .0052; L=24 .0110 .0170 and .0057
// .0080; L=48 .0134 .0167 and .0050 .0075. At 48 layers that is .37 and .45 of what it was.
static void test_stream_rounding() {
    const StreamApart apart;
    const int B = kDeviceIsAsync ? 4 : 1;
    const Config plain = {32, 131, 256, 48, 2, 64}, fp32 = with_fp32_stream(plain);
    auto compare = [](const char* what, double kept, double rounded) {
        CHECK(kept > 0.0 && kept <= 0.6 * rounded, "%s: error %.5f, beside a rounded stream %.5f", what, kept,
              rounded);
        printf("   %s: error %.5f, beside a rounded stream %.5f\n", what, kept, rounded);
    };
#ifdef GPT2_CPU
    const double error = logits_error(fp32, B);
    CHECK(error <= 1e-5, "logits: error %g without rounding", error);
    const std::vector<float> exact = step_grads(plain, B);
    rounds_outputs = true;
    const std::vector<float> rounded = step_grads(plain, B), kept = step_grads(fp32, B);
    compare("gradients", relative_error(kept.data(), exact.data(), exact.size()),
            relative_error(rounded.data(), exact.data(), exact.size()));
#endif
    if (kLowPrecision || rounds_outputs) { compare("logits", logits_error(fp32, B), logits_error(plain, B)); }
    rounds_outputs = false;
}

// Every kind of block and norm, without and with dropout.
static void test_variant(const Config& c, double dropout) {
    const int B = 4, T = c.maxT;
    const std::string what = format("block %d, norm %d, dropout %g", (int)c.block, (int)c.norm, dropout);
    Options o = default_options();
    o.dropout = dropout;
    const std::vector<float> base = short_run(c, o, B, T, 2, 2);
    for (int recompute : {1, 2}) {
        Options r = o;
        r.recompute = recompute;
        CHECK(same_bits(base, short_run(c, r, B, T, 2, 2)), "%s: -r %d", what.c_str(), recompute);
    }
    Batch batch = random_batch(c, B, T, 0);
    std::vector<std::vector<float>> whole;
    for (int micro_steps : {1, 4}) {
        GPT2 model;
        start_model(&model, c, o, B / micro_steps, T);
        accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, micro_steps);
        const std::vector<std::vector<float>> grads = host_grads(&model);
        if (micro_steps == 1) { whole = grads; }
        if (micro_steps == 1 && !kLowPrecision && dropout > 0.0) {
            check_slopes(&model, what, batch, B, T, grads);
        }
        for (int i = 0; i < NUM_PARAMS; i++) {
            const double error = relative_error(grads[i].data(), whole[i].data(), whole[i].size());
            CHECK(error <= (kLowPrecision ? 1e-2 : 1e-6), "%s: in %d micro-steps d%s differs by %g",
                  what.c_str(), micro_steps, model.param_specs[i].name, error);
        }
        gpt2_free(&model);
    }
    if (dropout == 0.0) { return; }
    std::vector<float> losses;                  // what is not trained on knows no dropout
    for (bool drops : {false, true}) {
        Options e = default_options();
        e.dropout = drops ? dropout : 0.0;
        GPT2 model;
        start_model(&model, c, e, B, T);
        gpt2_feed(&model, batch.x.data(), batch.y.data(), B, T, ClassifierMode::LossOnly);
        gpt2_loss(&model, B, T, ClassifierMode::LossOnly, 1.0f / (float)(B * T), &model.state->loss,
                  Accumulate::No);
        losses.push_back(gpt2_read_state(&model).loss);
        gpt2_free(&model);
    }
    CHECK(losses[0] == losses[1], "%s: evaluated to %.7f, without dropout %.7f", what.c_str(), losses[1],
          losses[0]);
    CHECK(fabs(losses[0] - base[0]) > 1e-4, "%s: dropout changed nothing", what.c_str());
}

static void test_variants(Config c) {
    for (Block block : {Block::Sequential, Block::Parallel, Block::ParallelTied}) {
        for (NormKind norm : {NormKind::Layer, NormKind::Rms}) {
            c.block = block, c.norm = norm;
            for (double dropout : {0.0, 0.2}) {
                test_variant(c, dropout);
                test_residual_fp32(c, dropout);
            }
        }
    }
}

#ifndef GPT2_CPU
// == kernels ==
// Every op against its twin in double, from inputs rounded to the kernel's types. Outputs are poisoned with
// NaN first, stand between guards, and are computed twice: the bits must agree.
static bool small_shapes = false;                   // --small: for the sanitizers

constexpr size_t kGuardBytes = 4096;
constexpr unsigned char kGuard = 0xA5, kPoison = 0xFF;      // 0xFF..: NaN in every type

// A device buffer with guards, and what it held before the op.
struct Buffer {
    std::string name;
    size_t bytes;
    std::vector<unsigned char> initial;
    unsigned char* memory;

    void allocate(size_t size) {
        bytes = size;
        initial.assign(bytes + 2 * kGuardBytes, kGuard);
        memory = (unsigned char*)device_malloc(initial.size(), name.c_str());
    }
    void reset() { cudaCheck(cudaMemcpy(memory, initial.data(), initial.size(), cudaMemcpyHostToDevice)); }
    std::vector<unsigned char> read() const {       // checks the guards, returns what is between
        std::vector<unsigned char> all(initial.size());
        cudaCheck(cudaMemcpy(all.data(), memory, all.size(), cudaMemcpyDeviceToHost));
        bool intact = true;
        for (size_t i = 0; i < kGuardBytes; i++) {
            intact = intact && all[i] == kGuard && all[kGuardBytes + bytes + i] == kGuard;
        }
        CHECK(intact, "%s: written outside the tensor", name.c_str());
        return std::vector<unsigned char>(all.begin() + kGuardBytes, all.end() - kGuardBytes);
    }
};

static double round_to(float*, double x) { return (double)(float)x; }
[[maybe_unused]] static double round_to(__nv_bfloat16*, double x) {
    return (double)__bfloat162float(__float2bfloat16_rn((float)x));
}
#ifdef ENABLE_FP16
static double round_to(half*, double x) { return (double)__half2float(__float2half_rn((float)x)); }
#endif

// One case: an op at one shape. Inputs and outputs live until the case ends.
struct Case {
    std::string title;
    std::vector<Buffer*> buffers;
    uint32_t next_id = 0;

    explicit Case(std::string text) : title(std::move(text)) {}
    ~Case() {
        for (Buffer* b : buffers) { cudaCheck(cudaFree(b->memory)); delete b; }
    }
    Case(const Case&) = delete;

    std::vector<double> random(size_t n, double scale = 1.0, double mean = 0.0) {
        std::vector<double> values(n);
        const uint32_t id = next_id++;
        #pragma omp parallel for
        for (size_t i = 0; i < n; i += 4) {
            float z[4];
            rand_normal4(z, 5, id, i / 4);
            for (size_t k = i; k < n && k < i + 4; k++) { values[k] = mean + scale * z[k - i]; }
        }
        return values;
    }
    // A tensor that starts as `values`, which become what the device holds: rounded to T.
    template <class T> T* tensor(const char* name, std::vector<double>& values) {
        Buffer* b = new Buffer;
        b->name = title + " " + name;
        b->allocate(values.size() * sizeof(T));
        T* host = (T*)(b->initial.data() + kGuardBytes);
        for (size_t i = 0; i < values.size(); i++) {
            values[i] = round_to((T*)nullptr, values[i]);
            host[i] = (T)(float)values[i];
        }
        b->reset();
        buffers.push_back(b);
        return (T*)(b->memory + kGuardBytes);
    }
    template <class T> T* poisoned(const char* name, size_t n) {
        Buffer* b = new Buffer;
        b->name = title + " " + name;
        b->allocate(n * sizeof(T));
        buffers.push_back(b);
        memset(b->initial.data() + kGuardBytes, kPoison, n * sizeof(T));
        b->reset();
        return (T*)(b->memory + kGuardBytes);
    }
    template <class T> T* bytes_of(const char* name, const std::vector<T>& values) {
        T* p = poisoned<T>(name, values.size());
        memcpy(buffers.back()->initial.data() + kGuardBytes, values.data(), values.size() * sizeof(T));
        buffers.back()->reset();
        return p;
    }
    // What bf16 gradients hold that a micro-step with this key stored; values become what their readers see.
    uint16_t* dithered(const char* name, std::vector<double>& values, RoundKey key, size_t first) {
        std::vector<uint16_t> stored(values.size());
        for (size_t i = 0; i < stored.size(); i++) {
            const uint32_t draw = round_bits16(key, first + i);
            stored[i] = bf16_encode_dithered((float)values[i], draw);
            values[i] = bf16_decode_dithered(stored[i], draw);
        }
        return bytes_of(name, stored);
    }
    // An fp32 or bf16 gradient that starts as `old` (poisoned where the op is to store, not add).
    Grad grad(const char* name, std::vector<double>& old, Accumulate acc, bool bf16) {
        const RoundKey key = {7, 3, 1, next_id++}, before = {7, 3, 0, key.tensor};
        void* data;
        if (acc == Accumulate::Yes) {
            data = bf16 ? (void*)dithered(name, old, before, 40) : (void*)tensor<float>(name, old);
        } else {
            data =
                bf16 ? (void*)poisoned<uint16_t>(name, old.size()) : (void*)poisoned<float>(name, old.size());
        }
        return Grad{(float*)data, acc, bf16, key, 40};
    }
    std::vector<double> values_of(const Grad& grad) const {
        if (!grad.is_bf16) { return values_of((const float*)grad.data); }
        std::vector<double> values = values_of((const uint16_t*)grad.data);     // the bits as numbers
        for (size_t i = 0; i < values.size(); i++) {
            values[i] = bf16_decode_dithered((uint16_t)values[i], round_bits16(grad.key, grad.first + i));
        }
        return values;
    }
    template <class T> std::vector<double> values_of(const T* p) const {
        for (const Buffer* b : buffers) {
            if ((const unsigned char*)p != b->memory + kGuardBytes) { continue; }
            const std::vector<unsigned char> raw = b->read();
            std::vector<double> values(raw.size() / sizeof(T));
            for (size_t i = 0; i < values.size(); i++) {
                values[i] = (double)(float)((const T*)raw.data())[i];
            }
            return values;
        }
        die("test: no such tensor");
    }

    // Expected values of a tensor, within twice the error (norm and worst element) of a plain version of the
    // op in the kernel's types, both against double, plus `floor` for fp32 arithmetic.
    template <class T> void expect_as_good_as(const char* name, const T* p, const std::vector<double>& want,
                                              const std::vector<double>& plain, double floor) {
        const std::vector<double> got = values_of(p);
        double error = 0.0, plain_error = 0.0, worst = 0.0, plain_worst = 0.0, size = 0.0, largest = 0.0;
        for (size_t i = 0; i < want.size(); i++) {
            const double d = fabs(got[i] - want[i]), r = fabs(plain[i] - want[i]);
            error += d * d;
            plain_error += r * r;
            size += want[i] * want[i];
            if (!(d <= worst)) { worst = d; }       // keeps a NaN
            plain_worst = std::max(plain_worst, r);
            largest = std::max(largest, fabs(want[i]));
        }
        const double allowed = 2.0 * sqrt(plain_error) + floor * sqrt(size),
                     worst_allowed = 2.0 * plain_worst + floor * largest;
        CHECK(sqrt(error) <= allowed && worst <= worst_allowed,
              "%s %s: |d| %.3g, allowed %.3g; worst element %.3g, allowed %.3g", title.c_str(), name,
              sqrt(error), allowed, worst, worst_allowed);
    }
    // Expected values of a tensor. Allowed: `factor` times the error of rounding the exact values to T once,
    // plus `floor` for fp32 arithmetic; per element against its size + rms.
    template <class T>
    void expect(const char* name, const T* p, const std::vector<double>& want, double floor = 2e-6,
                double factor = 2.0) {
        expect_type<T>(name, values_of(p), want, floor, factor);
    }
    template <class T>
    void expect_type(const char* name, const std::vector<double>& got, const std::vector<double>& want,
                     double floor, double factor) {
        const double eps = sizeof(T) == 4                            ? 0.0
                           : kFp16 && std::is_same<T, floatX>::value ? 1.0 / 2048
                                                                     : 1.0 / 256;
        double rounding = 0.0;
        for (double w : want) {
            const double r = round_to((T*)nullptr, w) - w;
            rounding += r * r;
        }
        expect_values(name, got, want, sqrt(rounding), eps, floor, factor);
    }
    // rounding: norm of the error of storing the exact values; eps: the largest of one element, relative.
    void expect_values(const char* name, const std::vector<double>& got, const std::vector<double>& want,
                       double rounding, double eps, double floor, double factor) {
        double distance = 0.0, size = 0.0, worst = 0.0;
        for (double w : want) { size += w * w; }
        const double rms = sqrt(size / (double)want.size());
        for (size_t i = 0; i < want.size(); i++) {
            const double d = got[i] - want[i];
            distance += d * d;
            const double relative = fabs(d) / ((fabs(want[i]) + rms) * (factor * eps + 50 * floor) + 1e-30);
            if (!(relative <= worst)) { worst = relative; }     // keeps a NaN
        }
        const double error = sqrt(distance), allowed = factor * rounding + floor * sqrt(size) + 1e-30;
        CHECK(got.size() == want.size() && error <= allowed && worst <= 1.0,
              "%s %s: |d| %.3g, allowed %.3g (|x| %.3g); worst element at %.2f of its bound", title.c_str(),
              name, error, allowed, sqrt(size), worst);
    }
    void expect(const char* name, const Grad& grad, const std::vector<double>& want, double floor = 1e-5) {
        if (!grad.is_bf16) {
            expect(name, (const float*)grad.data, want, floor);
            return;
        }
        // Dither moves what is a bf16 number already as much as any other: gap/sqrt(12)
        double gaps = 0.0;
        for (double w : want) {
            const double gap = w == 0.0 ? 0.0 : ldexp(1.0, ilogb(w) - 7);
            gaps += gap * gap / 12;
        }
        expect_values(name, values_of(grad), want, sqrt(gaps), 1.0 / 256, floor, 2.0);
    }
    // Runs the op twice from the same start.
    void run(const std::function<void()>& op) {
        for (Buffer* b : buffers) { b->reset(); }
        op();
        cudaCheck(cudaDeviceSynchronize());
        std::vector<std::vector<unsigned char>> first;
        for (Buffer* b : buffers) { first.push_back(b->read()); }
        for (Buffer* b : buffers) { b->reset(); }
        op();
        cudaCheck(cudaDeviceSynchronize());
        for (size_t i = 0; i < buffers.size(); i++) {
            const bool same =
                first[i] == buffers[i]->read() || buffers[i]->name.find("scratch") != std::string::npos;
            CHECK(same, "%s: two runs differ", buffers[i]->name.c_str());
        }
    }
};

static std::vector<int> random_tokens(int n, int V, uint32_t id) {
    std::vector<int> tokens(n);
    for (int i = 0; i < n; i++) {
        const uint32_t r = rand_u32(6, RAND_SAMPLE, id, (uint64_t)i);
        // Half of them common: split buckets
        tokens[i] = (int)(r % 2 == 0 ? r / 2 % 3 : r / 2 % (uint32_t)V);
    }
    return tokens;
}

static const Accumulate kBothAccumulate[] = {Accumulate::No, Accumulate::Yes};

static void test_encoder(int B, int T, int C, int V, int maxT) {
    const std::vector<int> tokens = random_tokens(B * T, V, 1);
    {
        Case k(format("encoder_forward B=%d T=%d C=%d", B, T, C));
        std::vector<double> wte = k.random((size_t)V * C), wpe = k.random((size_t)maxT * C),
                            want((size_t)B * T * C);
        const int* d_tokens = k.bytes_of("tokens", tokens);
        const floatX *d_wte = k.tensor<floatX>("wte", wte), *d_wpe = k.tensor<floatX>("wpe", wpe);
        floatX* out = k.poisoned<floatX>("out", want.size());
        k.run([&] { encoder_forward({out, d_tokens, d_wte, d_wpe, B, T, C}, 0); });
        encoder_forward_cpu<double>({want.data(), tokens.data(), wte.data(), wpe.data(), B, T, C}, 0);
        k.expect("out", out, want);
    }
    for (Accumulate acc : kBothAccumulate) {
        for (bool bf16 : {false, true}) {
            Case k(format("encoder_backward B=%d T=%d C=%d acc=%d bf16=%d", B, T, C, (int)acc, bf16));
            std::vector<double> dwte = k.random((size_t)V * C), dwpe = k.random((size_t)maxT * C),
                                dout = k.random((size_t)B * T * C);
            std::vector<int> order(B * T);
            std::vector<int4> segments(max_bucket_segments(B * T)), splits(max_bucket_splits(B * T) + 1);
            TokenBuckets host = {};
            build_token_buckets(&host, order.data(), segments.data(), splits.data(), tokens.data(), B * T, V);
            const floatX* d_dout = k.tensor<floatX>("dout", dout);
            // the first micro-step left zeros in the rows that have no position
            for (size_t i = (size_t)T * C; i < dwpe.size() && acc == Accumulate::Yes; i++) { dwpe[i] = 0.0; }
            Grad g_wte = k.grad("dwte", dwte, Accumulate::Yes, false),
                 g_wpe = k.grad("dwpe", dwpe, acc, bf16);
            float* scratch = k.poisoned<float>("scratch", encoder_backward_scratch_bytes(B, T, C) / 4 + 1);
            TokenBuckets device = host;
            device.order = k.bytes_of("order", order);
            device.segments = k.bytes_of("segments", segments);
            device.splits = k.bytes_of("splits", splits);
            k.run([&] { encoder_backward({g_wte, g_wpe, scratch, d_dout, device, B, T, maxT, C}, 0); });
            std::vector<double> slots(encoder_backward_scratch_bytes(B, T, C) / 4 + 1);
            encoder_backward_cpu<double>({{dwte.data(), Accumulate::Yes}, {dwpe.data(), acc}, slots.data(),
                                          dout.data(), host, B, T, maxT, C}, 0);
            k.expect("dwte", g_wte, dwte);
            k.expect("dwpe", g_wpe, dwpe);
        }
    }
}

// starts: nothing comes before the branches. fp32: the residual stream.
struct NormCase { NormKind kind; int norms, branches; bool drops, starts, fp32; };

static std::string norm_title(const char* op, const NormCase& is, int N, int C) {
    return format("%s N=%d C=%d %s norms=%d branches=%d drops=%d starts=%d fp32=%d", op, N, C,
                  is.kind == NormKind::Rms ? "rms" : "layer", is.norms, is.branches, is.drops, is.starts,
                  is.fp32);
}
// A tensor of the stream, as ops take it; null: poisoned.
static floatX* norm_stream(Case* k, const NormCase& is, const char* name, size_t n,
                           std::vector<double>* values) {
    if (is.fp32) { return (floatX*)(values ? k->tensor<float>(name, *values) : k->poisoned<float>(name, n)); }
    return values ? k->tensor<floatX>(name, *values) : k->poisoned<floatX>(name, n);
}
// Compares one with its twin's; returns what it holds.
static std::vector<double> norm_expect(Case* k, const NormCase& is, const char* name, const floatX* p,
                                       const std::vector<double>& want) {
    if (is.fp32) { k->expect(name, (const float*)p, want); }
    else { k->expect(name, p, want); }
    return is.fp32 ? k->values_of((const float*)p) : k->values_of(p);
}
static Dropout norm_dropout(const NormCase& is, uint32_t place) {
    return dropout_of(is.drops ? 0.2 : 0.0, {1337, 4, place}, 5000000000ull);
}

static void test_norm_forward(const NormCase& is, int N, int C) {
    const bool layer = is.kind == NormKind::Layer;
    const size_t n = (size_t)N * C;
    Case k(norm_title("norm_forward", is, N, C));
    std::vector<double> x = k.random(n, 1.0, 0.5), b0 = k.random(n), b1 = k.random(n);
    std::vector<double> w0 = k.random(C, 0.3, 1.0), w1 = k.random(C, 0.3, 1.0);
    std::vector<double> v0 = k.random(C), v1 = k.random(C);
    NormForward<floatX, float> a = {};
    NormForward<double, double> twin = {};
    std::vector<double> residual(n), y0(n), y1(n), mean(N), rstd(N);
    floatX *d_y0 = k.poisoned<floatX>("y0", n), *d_y1 = k.poisoned<floatX>("y1", n);
    a.y[0] = {d_y0, k.tensor<float>("weight0", w0), layer ? k.tensor<float>("bias0", v0) : nullptr};
    twin.y[0] = {y0.data(), w0.data(), layer ? v0.data() : nullptr};
    if (is.norms == 2) {
        a.y[1] = {d_y1, k.tensor<float>("weight1", w1), layer ? k.tensor<float>("bias1", v1) : nullptr};
        twin.y[1] = {y1.data(), w1.data(), layer ? v1.data() : nullptr};
    }
    a.mean = layer ? k.poisoned<float>("mean", N) : nullptr, a.rstd = k.poisoned<float>("rstd", N);
    twin.mean = mean.data(), twin.rstd = rstd.data();
    a.inp = is.starts ? nullptr : norm_stream(&k, is, "inp", n, &x);
    twin.inp = is.starts ? nullptr : x.data();
    a.residual_fp32 = is.fp32;
    for (int i = 0; i < is.branches; i++) {
        a.branch[i] = k.tensor<floatX>(i == 0 ? "branch0" : "branch1", i == 0 ? b0 : b1);
        twin.branch[i] = i == 0 ? b0.data() : b1.data();
        a.dropout[i] = twin.dropout[i] = norm_dropout(is, 7 + (uint32_t)i);
    }
    if (is.branches > 0) {
        a.residual = norm_stream(&k, is, "residual", n, nullptr);
        twin.residual = residual.data();
    }
    a.kind = twin.kind = is.kind, a.N = twin.N = N, a.C = twin.C = C;
    k.run([&] { norm_forward(a, 0); });
    norm_forward_cpu<double>(twin, 0);
    if (is.branches > 0) {
        residual = norm_expect(&k, is, "residual", a.residual, residual);   // what is normalised: as rounded
        twin.inp = residual.data(), twin.residual = nullptr;
        norm_forward_cpu<double>(twin, 0);
    }
    k.expect("y0", d_y0, y0, 2e-6);
    if (is.norms == 2) { k.expect("y1", d_y1, y1, 2e-6); }
    if (layer) { k.expect("mean", a.mean, mean); }
    k.expect("rstd", a.rstd, rstd);
}

// bf16: of the vectors' gradients; sums: the branches' biases want theirs.
static void test_norm_backward(const NormCase& is, int N, int C, Accumulate acc, bool bf16, bool sums) {
    const bool layer = is.kind == NormKind::Layer;
    const size_t n = (size_t)N * C;
    Case k(norm_title("norm_backward", is, N, C) + format(" acc=%d bf16=%d sums=%d", (int)acc, bf16, sums));
    std::vector<double> dres = k.random(n), x = k.random(n, 1.0, 0.5), mean(N), rstd(N), y(n);
    std::vector<double> dout[2] = {k.random(n), k.random(n)};
    std::vector<double> w[2] = {k.random(C, 0.3, 1.0), k.random(C, 0.3, 1.0)};
    std::vector<double> dweight[2] = {k.random(C), k.random(C)}, dbias[2] = {k.random(C), k.random(C)};
    std::vector<double> branch[2] = {std::vector<double>(n), std::vector<double>(n)},
                        branch_bias[2] = {k.random(C), k.random(C)};
    NormBackward<floatX, float> a = {};
    NormBackward<double, double> twin = {};
    a.dresidual = norm_stream(&k, is, "dresidual", n, acc == Accumulate::Yes ? &dres : nullptr);
    twin.dresidual = dres.data();
    a.inp = norm_stream(&k, is, "inp", n, &x);
    twin.inp = x.data();
    a.residual_fp32 = is.fp32;
    const bool apart = is.drops || is.fp32;     // the branches' gradients from the stream's
    NormForward<double, double> forward = {};
    forward.y[0] = {y.data(), w[0].data(), layer ? w[1].data() : nullptr};
    forward.mean = mean.data(), forward.rstd = rstd.data(), forward.inp = x.data();
    forward.kind = is.kind, forward.N = N, forward.C = C;
    norm_forward_cpu<double>(forward, 0);
    a.mean = layer ? k.tensor<float>("mean", mean) : nullptr, a.rstd = k.tensor<float>("rstd", rstd);
    twin.mean = mean.data(), twin.rstd = rstd.data();
    static const char* const names[2][5] = {{"dout0", "weight0", "dweight0", "dbias0", "branch_bias0"},
                                            {"dout1", "weight1", "dweight1", "dbias1", "branch_bias1"}};
    for (int i = 0; i < is.norms; i++) {
        a.y[i].dout = k.tensor<floatX>(names[i][0], dout[i]);
        twin.y[i].dout = dout[i].data();
        a.y[i].weight = k.tensor<float>(names[i][1], w[i]);
        a.y[i].dweight = k.grad(names[i][2], dweight[i], acc, bf16);
        twin.y[i].weight = w[i].data(), twin.y[i].dweight = {dweight[i].data(), acc};
        if (!layer) { continue; }
        a.y[i].dbias = k.grad(names[i][3], dbias[i], acc, bf16);
        twin.y[i].dbias = {dbias[i].data(), acc};
    }
    for (int i = 0; i < is.branches; i++) {
        if (apart) {
            a.branch[i].dout = k.poisoned<floatX>(i == 0 ? "branch0" : "branch1", n);
            twin.branch[i].dout = branch[i].data();
        }
        a.branch[i].dropout = twin.branch[i].dropout = norm_dropout(is, 7 + (uint32_t)i);
        if (sums) { a.branch[i].dbias = k.grad(names[i][4], branch_bias[i], acc, bf16); }
    }
    a.dresidual_acc = twin.dresidual_acc = acc;
    a.kind = twin.kind = is.kind, a.N = twin.N = N, a.C = twin.C = C;
    const int rows = 2 * is.norms + (is.branches == 2 ? 2 : 1);
    a.scratch = k.poisoned<float>("scratch", norm_backward_scratch_bytes(N, C, rows) / 4);
    k.run([&] { norm_backward(a, 0); });
    norm_backward_cpu<double>(twin, 0);
    const std::vector<double> stored_dres = norm_expect(&k, is, "dresidual", a.dresidual, dres);
    for (int i = 0; i < is.norms; i++) {
        k.expect(names[i][2], a.y[i].dweight, dweight[i]);
        if (layer) { k.expect(names[i][3], a.y[i].dbias, dbias[i]); }
    }
    for (int i = 0; i < is.branches; i++) {
        if (apart) { k.expect(i == 0 ? "branch0" : "branch1", a.branch[i].dout, branch[i]); }
        if (!sums) { continue; }
        const std::vector<double> stored = apart ? k.values_of(a.branch[i].dout) : stored_dres;
        bias_backward_cpu<double>({{branch_bias[i].data(), acc}, nullptr, stored.data(), N, C}, 0);
        k.expect(names[i][4], a.branch[i].dbias, branch_bias[i]);       // of the values as stored
    }
}

// Every member of the family. Where all is fp32, a stream in fp32 is no other.
static void test_norm(int N, int C) {
    for (NormKind kind : {NormKind::Layer, NormKind::Rms}) {
        for (int norms : {1, 2}) {
            for (int branches : {0, 1, 2}) {
                const int forms = branches == 0 ? 1 : 4;
                for (int i = 0; i < (kLowPrecision ? 2 : 1) * forms; i++) {
                    const NormCase is = {kind, norms, branches, i % 2 == 1 && forms > 1, i / 2 % 2 == 1,
                                         i >= forms};
                    test_norm_forward(is, N, C);
                    if (is.starts || (is.fp32 && branches == 0)) { continue; }
                    const bool gpt2 = kind == NormKind::Layer && norms == 1 && branches == 1 && !is.drops;
                    for (Accumulate acc : kBothAccumulate) {
                        const bool odd = (norms + branches + i + (int)acc) % 2 == 1;
                        test_norm_backward(is, N, C, acc, odd, true);
                        if (gpt2) { test_norm_backward(is, N, C, acc, !odd, false); }
                    }
                }
            }
        }
    }
}

static void test_matmul(int N, int C, int OC) {
    for (int mode = 0; mode < 4; mode++) {              // plain; bias; bias + residual; bias + fused GELU
        Case k(format("matmul_forward N=%d C=%d OC=%d mode=%d", N, C, OC, mode));
        std::vector<double> x = k.random((size_t)N * C), w = k.random((size_t)OC * C, 1.0 / sqrt((double)C)),
                            b = k.random(OC);
        std::vector<double> res = k.random((size_t)N * OC), y((size_t)N * OC), pre((size_t)N * OC);
        const floatX *dx = k.tensor<floatX>("inp", x), *dw = k.tensor<floatX>("weight", w),
                     *db = k.tensor<floatX>("bias", b);
        const floatX* dres = k.tensor<floatX>("residual", res);
        floatX *out = k.poisoned<floatX>("out", y.size()), *d_pre = k.poisoned<floatX>("pre_gelu", y.size());
        if (mode == 3 && !kLowPrecision) { continue; }      // what -ge 1 can be given
        k.run([&] {
            matmul_forward({.out = out, .inp = dx, .weight = dw, .bias = mode >= 1 ? db : nullptr,
                            .residual = mode == 2 ? dres : nullptr, .pre_gelu = mode == 3 ? d_pre : nullptr,
                            .N = N, .C = C, .OC = OC}, 0);
        });
        matmul_forward_cpu<double>({.out = y.data(), .inp = x.data(), .weight = w.data(),
                                    .bias = mode >= 1 ? b.data() : nullptr,
                                    .residual = mode == 2 ? res.data() : nullptr,
                                    .pre_gelu = mode == 3 ? pre.data() : nullptr, .N = N, .C = C, .OC = OC},
                                   0);
        k.expect("out", out, y, mode == 3 ? 1e-3 : 5e-6);       // the fused GELU uses a hardware tanh
        if (mode == 3) { k.expect("pre_gelu", d_pre, pre, 5e-6); }
    }
    for (int mode = 0; mode < 3; mode++) {              // plain; + residual; GELU's derivative
        const bool gelu = mode == 2;
        if (gelu && !kLowPrecision) { continue; }
        Case k(format("matmul_backward_input N=%d C=%d OC=%d mode=%d", N, C, OC, mode));
        std::vector<double> dy = k.random((size_t)N * OC),
                            w = k.random((size_t)OC * C, 1.0 / sqrt((double)OC)),
                            pre = k.random((size_t)N * C), other = k.random((size_t)N * C);
        std::vector<double> dx((size_t)N * C);
        const floatX *d_dy = k.tensor<floatX>("dout", dy), *d_w = k.tensor<floatX>("weight", w),
                     *d_pre = k.tensor<floatX>("pre_gelu", pre),
                     *d_other = k.tensor<floatX>("residual", other);
        floatX* d_dx = k.poisoned<floatX>("dinp", dx.size());
        k.run([&] {
            matmul_backward_input({.dinp = d_dx, .dout = d_dy, .weight = d_w,
                                   .residual = mode == 1 ? d_other : nullptr,
                                   .pre_gelu = gelu ? d_pre : nullptr, .N = N, .C = C, .OC = OC}, 0);
        });
        matmul_backward_input_cpu<double>({.dinp = dx.data(), .dout = dy.data(), .weight = w.data(),
                                           .residual = mode == 1 ? other.data() : nullptr,
                                           .pre_gelu = gelu ? pre.data() : nullptr, .N = N, .C = C, .OC = OC},
                                          0);
        k.expect("dinp", d_dx, dx, gelu ? 1e-3 : 5e-6);
    }
    for (Accumulate acc : kBothAccumulate) {
        for (bool bf16 : {false, true}) {
            Case k(format("matmul_backward_weight N=%d C=%d OC=%d acc=%d bf16=%d", N, C, OC, (int)acc, bf16));
            std::vector<double> dy = k.random((size_t)N * OC), x = k.random((size_t)N * C),
                                dw = k.random((size_t)OC * C, sqrt((double)N));
            const floatX *d_dy = k.tensor<floatX>("dout", dy), *d_x = k.tensor<floatX>("inp", x);
            Grad g = k.grad("dweight", dw, acc, bf16);
            float* scratch = k.poisoned<float>("scratch", (size_t)OC * C);
            k.run([&] { matmul_backward_weight({g, scratch, d_dy, d_x, N, C, OC}, 0); });
            matmul_backward_weight_cpu<double>({{dw.data(), acc}, nullptr, dy.data(), x.data(), N, C, OC}, 0);
            k.expect("dweight", g, dw);
            std::vector<double> db = k.random(OC);
            Case k2(format("bias_backward N=%d OC=%d acc=%d bf16=%d", N, OC, (int)acc, bf16));
            const floatX* d_dy2 = k2.tensor<floatX>("dout", dy);
            Grad gb = k2.grad("dbias", db, acc, bf16);
            float* scratch2 = k2.poisoned<float>("scratch", bias_backward_scratch_bytes(N, OC) / 4 + 1);
            k2.run([&] { bias_backward({gb, scratch2, d_dy2, N, OC}, 0); });
            bias_backward_cpu<double>({{db.data(), acc}, nullptr, dy.data(), N, OC}, 0);
            k2.expect("dbias", gb, db);
        }
    }
}

// n values stored, then 256 times a hundredth of the gap between their bf16 neighbours added. Errors in gaps.
static void test_grad_accumulate(size_t n) {
    for (Accumulate acc : kBothAccumulate) {
        for (bool bf16 : {false, true}) {
            Case k(format("grad_accumulate n=%zu acc=%d bf16=%d", n, (int)acc, bf16));
            std::vector<double> x = k.random(n), old = k.random(n);
            Grad g = k.grad("grad", old, acc, bf16);
            const float* values = k.tensor<float>("values", x);
            k.run([&] { grad_accumulate({g, values, n}, 0); });
            grad_accumulate_cpu<double>({{old.data(), acc}, x.data(), n}, 0);
            k.expect("grad", g, old);
        }
    }
    Case k(format("bf16 gradients n=%zu", n));
    std::vector<double> x = k.random(n), gaps(n), hundredth(n);
    const float* start = k.tensor<float>("start", x);
    for (size_t i = 0; i < n; i++) {
        gaps[i] = ldexp(1.0, ilogb(x[i]) - 7);
        hundredth[i] = gaps[i] / 100;
    }
    const float* increment = k.tensor<float>("increment", hundredth);
    Grad g = k.grad("grad", x, Accumulate::No, true);
    const double rms = 1.0 / sqrt(12.0), root = sqrt((double)n);
    double mean = 0.0, square = 0.0, moved = 0.0;
    grad_accumulate({g, start, n}, 0);
    cudaCheck(cudaDeviceSynchronize());
    const std::vector<double> stored = k.values_of(g);
    for (size_t i = 0; i < n; i++) {
        const double error = (stored[i] - x[i]) / gaps[i];
        mean += error / (double)n;
        square += error * error / (double)n;
    }
    CHECK(fabs(mean) <= 4 * rms / root, "%s: the mean error is %g gaps", k.title.c_str(), mean);
    CHECK(fabs(sqrt(square) / rms - 1.0) <= (n >= 100000 ? 0.03 : 0.3),
          "%s: rms error of %g gaps, expected %g", k.title.c_str(), sqrt(square), rms);
    g.acc = Accumulate::Yes;
    for (int micro = 0; micro < 256; micro++) {
        g.key.micro++;
        grad_accumulate({g, increment, n}, 0);
    }
    cudaCheck(cudaDeviceSynchronize());
    const std::vector<double> sums = k.values_of(g);
    for (size_t i = 0; i < n; i++) { moved += (sums[i] - x[i]) / gaps[i] / (double)n; }
    // 257 errors of gap/sqrt(12) make 4.6 gaps in each value, somewhat more where the gap has doubled
    CHECK(fabs(moved - 2.56) <= 4 * 6.0 / root, "%s: moved by %g gaps, expected 2.56", k.title.c_str(),
          moved);
}

static void test_gelu(int N, int OC) {
    {
        Case k(format("gelu_forward N=%d OC=%d", N, OC));
        std::vector<double> x = k.random((size_t)N * OC, 2.0), y(x.size());
        const floatX* dx = k.tensor<floatX>("inp", x);
        floatX* out = k.poisoned<floatX>("out", x.size());
        k.run([&] { gelu_forward({out, dx, x.size()}, 0); });
        gelu_forward_cpu<double>({y.data(), x.data(), x.size()}, 0);
        k.expect("out", out, y);
    }
    for (Accumulate acc : kBothAccumulate) {
        for (bool bf16 : {false, true}) {
            Case k(format("gelu_backward N=%d OC=%d acc=%d bf16=%d", N, OC, (int)acc, bf16));
            std::vector<double> x = k.random((size_t)N * OC, 2.0), d = k.random(x.size()), db = k.random(OC),
                                before = db;
            const floatX* dx = k.tensor<floatX>("inp", x);
            floatX* dd = k.tensor<floatX>("d_inplace", d);
            Grad g = k.grad("dbias", before, acc, bf16);
            float* scratch = k.poisoned<float>("scratch", bias_backward_scratch_bytes(N, OC) / 4 + 1);
            k.run([&] { gelu_backward_inplace({dd, g, scratch, dx, N, OC}, 0); });
            gelu_backward_inplace_cpu<double>({d.data(), {db.data(), acc}, nullptr, x.data(), N, OC}, 0);
            k.expect("dinp", dd, d);
            const std::vector<double> stored = k.values_of(dd);         // dbias sums the values as stored
            bias_backward_cpu<double>({{before.data(), acc}, nullptr, stored.data(), N, OC}, 0);
            k.expect("dbias", g, before);
        }
    }
}

// What tensor cores make of an operand: it is rounded to floatX or, of fp32 where `tf32`, to TF32: 10 bits
// after the point.
static double to_operand(double x, bool tf32) {
    if (!tf32 || x == 0.0) { return round_to((floatX*)nullptr, x); }
    const int exponent = ilogb(x) - 10;
    return ldexp(round(ldexp(x, -exponent)), exponent);
}

// Attention as tensor cores must do it: exact products and sums, P, dS and O rounded where they become
// operands. In fp32 builds without TF32 it rounds to fp32 and so says what that type can do.
static void attention_plain(double* out /*(B,T,NH,HS)*/, double* lse /*(B,NH,T)*/,
                            double* dqkv /*(B,T,3,NH,HS)*/, const double* qkv, const double* dout, int B,
                            int T, int NH, int HS, bool tf32, const AttentionKeep& keep) {
    const double scale = 1.0 / sqrt((double)HS);
    auto is_kept = [&](size_t bh, int t, int u) {
        return !keep.bits || keep.bits[bh * keep_words(T) + u / 32 * padded_T(T) + t] >> u % 32 & 1;
    };
    const size_t C = (size_t)NH * HS;
    std::vector<double> qkv_operand(qkv, qkv + 3 * C * B * T), dout_operand(dout, dout + C * B * T);
    for (double& x : qkv_operand) { x = to_operand(x, tf32); }
    for (double& x : dout_operand) { x = to_operand(x, tf32); }
    #pragma omp parallel for
    for (int bh = 0; bh < B * NH; bh++) {
        const size_t at = (size_t)(bh / NH) * T * C + (size_t)(bh % NH) * HS;
        const size_t qkv_at = (size_t)(bh / NH) * T * 3 * C + (size_t)(bh % NH) * HS;
        const double *q = &qkv_operand[qkv_at], *k = q + C, *v = q + 2 * C;
        const double *dO = dout + at, *dO_operand = &dout_operand[at];
        double* O = out + at;
        double *dq = dqkv + qkv_at, *dk = dq + C, *dv = dq + 2 * C;
        std::vector<double> p(T), dkv((size_t)T * 2 * HS, 0.0), row(HS);
        for (int t = 0; t < T; t++) {
            double max = -HUGE_VAL, sum = 0.0, D = 0.0;
            for (int u = 0; u <= t; u++) {
                p[u] = 0.0;
                for (int i = 0; i < HS; i++) { p[u] += q[t * 3 * C + i] * k[u * 3 * C + i]; }
                p[u] *= scale;
                max = std::max(max, p[u]);
            }
            for (int u = 0; u <= t; u++) { p[u] = exp(p[u] - max); sum += p[u]; }
            lse[(size_t)bh * T + t] = max + log(sum);
            for (int i = 0; i < HS; i++) {
                double o = 0.0;
                for (int u = 0; u <= t; u++) {
                    if (is_kept(bh, t, u)) { o += to_operand(p[u], tf32) * v[u * 3 * C + i]; }
                }
                O[t * C + i] = round_to((floatX*)nullptr, o * keep.scale / sum);
                D += O[t * C + i] * dO[t * C + i];
            }
            std::fill(row.begin(), row.end(), 0.0);
            for (int u = 0; u <= t; u++) {
                double dp = 0.0;
                for (int i = 0; i < HS; i++) { dp += dO_operand[t * C + i] * v[u * 3 * C + i]; }
                const double prob = p[u] / sum, factor = is_kept(bh, t, u) ? keep.scale : 0.0;
                const double ds = to_operand(prob * (factor * dp - D), tf32);
                const double rounded = factor * to_operand(prob, tf32);
                for (int i = 0; i < HS; i++) {
                    row[i] += ds * k[u * 3 * C + i];
                    dkv[((size_t)u * 2) * HS + i] += ds * q[t * 3 * C + i];
                    dkv[((size_t)u * 2 + 1) * HS + i] += rounded * dO_operand[t * C + i];
                }
            }
            for (int i = 0; i < HS; i++) { dq[t * 3 * C + i] = round_to((floatX*)nullptr, row[i] * scale); }
        }
        for (int t = 0; t < T; t++) {
            for (int i = 0; i < HS; i++) {
                dk[t * 3 * C + i] = round_to((floatX*)nullptr, dkv[((size_t)t * 2) * HS + i] * scale);
                dv[t * 3 * C + i] = round_to((floatX*)nullptr, dkv[((size_t)t * 2 + 1) * HS + i]);
            }
        }
    }
}

// The bits that attention's dropout keeps: the twin's.
static std::vector<uint32_t> test_attention_dropout(const Dropout& dropout, int B, int T, int NH) {
    Case k(format("attention_dropout B=%d T=%d NH=%d dropped=%u", B, T, NH, dropout.dropped));
    std::vector<uint32_t> keep(B * NH * keep_words(T)), got(keep.size());
    uint32_t* d_keep = k.poisoned<uint32_t>("keep", keep.size());
    k.run([&] { attention_dropout({d_keep, dropout, B, T, NH}, 0); });
    attention_dropout_cpu<double>({keep.data(), dropout, B, T, NH}, 0);
    cudaCheck(cudaMemcpy(got.data(), d_keep, got.size() * sizeof(uint32_t), cudaMemcpyDeviceToHost));
    size_t differ = 0;
    for (size_t i = 0; i < keep.size(); i++) { differ += got[i] != keep[i]; }
    CHECK(differ == 0, "%s: %zu of %zu words that the dropout keeps are not the twin's", k.title.c_str(),
          differ, keep.size());
    return keep;
}

// `form`: what must run it, as attention_form says it; null: whatever does. p: what is dropped.
static void test_attention(int B, int T, int NH, int HS, const char* form = nullptr, double p = 0.0) {
    const char* runs = attention_form(HS);
    Case k(format("attention B=%d T=%d NH=%d HS=%d dropout=%g %s", B, T, NH, HS, p, runs));
    CHECK(!form || strcmp(form, runs) == 0, "%s: '%s' was to run it", k.title.c_str(), form);
    std::vector<uint32_t> bits;
    AttentionKeep keep, d_keep;
    if (p > 0.0) {
        const Dropout dropout = dropout_of(p, {1337, 4, 11}, 5000000000ull);
        bits = test_attention_dropout(dropout, B, T, NH);
        keep = {bits.data(), dropout.scale};
        d_keep = {k.bytes_of("keep", bits), dropout.scale};
    }
    const bool tf32 = strcmp(runs, "mma.sync (TF32)") == 0;
    const size_t n = (size_t)B * T * NH * HS, rows = (size_t)B * NH * T;
    std::vector<double> qkv = k.random(3 * n), dout = k.random(n), out(n), lse(rows), dqkv(3 * n), D(rows);
    const floatX *d_qkv = k.tensor<floatX>("qkv", qkv), *d_dout = k.tensor<floatX>("dout", dout);
    floatX *d_out = k.poisoned<floatX>("out", n), *d_dqkv = k.poisoned<floatX>("dqkv", 3 * n);
    float *d_lse = k.poisoned<float>("lse", rows),
          *scratch = k.poisoned<float>("scratch", attention_backward_scratch_bytes(B, T, NH) / 4);
    k.run([&] {
        attention_forward({d_out, d_lse, d_qkv, B, T, NH, HS, d_keep}, 0);
        attention_backward({d_dqkv, scratch, d_dout, d_out, d_qkv, d_lse, B, T, NH, HS, d_keep}, 0);
    });
    attention_forward_cpu<double>({out.data(), lse.data(), qkv.data(), B, T, NH, HS, keep}, 0);
    attention_backward_cpu<double>({dqkv.data(), D.data(), dout.data(), out.data(), qkv.data(), lse.data(), B,
                                    T, NH, HS, keep}, 0);
    std::vector<double> plain_out(n), plain_lse(rows), plain_dqkv(3 * n);
    attention_plain(plain_out.data(), plain_lse.data(), plain_dqkv.data(), qkv.data(), dout.data(), B, T, NH,
                    HS, tf32, keep);
    k.expect_as_good_as("out", d_out, out, plain_out, 5e-6);
    k.expect_as_good_as("dqkv", d_dqkv, dqkv, plain_dqkv, 2e-5);
    if (tf32) { k.expect_as_good_as("lse", d_lse, lse, plain_lse, 5e-6); }
    else { k.expect("lse", d_lse, lse, 5e-6); }
    if (p > 0.0) { return; }

    // The kernels with dropout where all is kept, in the padding too: the same bits
    const std::vector<double> kept_out = k.values_of(d_out), kept_lse = k.values_of(d_lse),
                              kept_dqkv = k.values_of(d_dqkv);
    const std::vector<uint32_t> all(B * NH * keep_words(T), 0xffffffffu);
    const AttentionKeep keeps_all = {k.bytes_of("keep", all), 1.0f};
    k.run([&] {
        attention_forward({d_out, d_lse, d_qkv, B, T, NH, HS, keeps_all}, 0);
        attention_backward({d_dqkv, scratch, d_dout, d_out, d_qkv, d_lse, B, T, NH, HS, keeps_all}, 0);
    });
    CHECK(k.values_of(d_out) == kept_out && k.values_of(d_lse) == kept_lse &&
              k.values_of(d_dqkv) == kept_dqkv,
          "%s: a dropout that keeps all gives other bits", k.title.c_str());
}

// Every form at the head sizes that it serves, by all that chooses one: head size, --kernels, -f, and how
// much shared memory the GPU has.
static void test_attention_forms() {
    const char* mma = kLowPrecision ? "mma.sync" : "mma.sync (TF32)";
    for (bool tf32 : {false, true}) {
        if (tf32 && kLowPrecision) { continue; }
        select_kernels(true, tf32);
        for (int HS : {64, 16, 32, 40, 48, 80, 96, 112, 128, 136, 192, 20}) {
            // TF32's tiles are twice as large: those of 128 want more than the 99 KiB of some GPUs
            const bool fits = HS <= 96 || (HS <= 128 && (kLowPrecision || shared_memory_limit() > 101376));
            const char* form = HS % kWidth == 0 && fits && (kLowPrecision || tf32) ? mma : "plain";
            for (int T : {1, 63, 64, 65, 257}) {
                for (double p : {0.0, 0.1, 0.5}) {
                    if (small_shapes && ((T != 1 && T != 65) || p == 0.5)) { continue; }
                    test_attention(T == 1 ? 1 : 2, T, T == 1 ? 1 : 2, HS, form, p);
                }
            }
        }
        for (double p : {0.0, 0.2}) {
            test_attention(1, 34, 1, 512, "plain", p);
            if (!small_shapes) {
                test_attention(1, 1024, 2, 64, nullptr, p);
                test_attention(1, 1000, 2, 128, nullptr, p);
            }
        }
    }
    for (double p : {1e-9, 0.3, 0.95}) {
        for (int T : {1, 31, 128, 129, 300}) { test_attention_dropout(dropout_of(p, {7, 1, 3}, 1), 2, T, 3); }
    }
    select_kernels(false, false);
    if (attention_uses_sm90(64)) {
        for (double p : {0.0, 0.1, 0.5}) {
            for (int T : {1, 63, 64, 65, 130}) { test_attention(2, T, 2, 64, "sm90 (wgmma)", p); }
            if (!small_shapes) {
                test_attention(2, 257, 3, 64, nullptr, p);
                test_attention(1, 1024, 2, 64, nullptr, p);
            }
        }
    }

    // GPUs with 99 KiB a block, and one with so little that the tensor cores' tiles do not fit
    struct { size_t cap; int HS; const char* form; } limits[] = {
        {101376, 64, mma}, {101376, 96, mma}, {101376, 128, kLowPrecision ? mma : "plain"},
        {30000, 64, "plain"}};
    select_kernels(true, true);
    for (auto& l : limits) {
        hooks.shared_memory = l.cap;
        for (double p : {0.0, 0.1}) { test_attention(2, 33, 2, l.HS, l.form, p); }
    }
    hooks.shared_memory = SIZE_MAX;
    for (int HS : {0, -1, 513}) { CHECK(!attention_error(HS).empty(), "head size %d is taken", HS); }
    select_kernels(false, false);
}

static void test_gather_rows(int N, int from, int C) {
    Case k(format("gather_rows N=%d C=%d", N, C));
    std::vector<double> inp = k.random((size_t)from * C), out((size_t)N * C);
    std::vector<int> rows;
    for (int n = 0; n < N; n++) { rows.push_back((n * 7 + from - 1) % from); }      // the last, then others
    const floatX* d_inp = k.tensor<floatX>("inp", inp);
    const int* d_rows = k.bytes_of("rows", rows);
    floatX* d_out = k.poisoned<floatX>("out", out.size());
    k.run([&] { gather_rows({d_out, d_inp, d_rows, N, C}, 0); });
    gather_rows_cpu<double>({out.data(), inp.data(), rows.data(), N, C}, 0);
    k.expect("out", d_out, out);
}

static void test_classifier(int N, int V, int Vp) {
    for (ClassifierMode mode : {ClassifierMode::LossOnly, ClassifierMode::LossAndGrad}) {
        Case k(format("classifier N=%d V=%d Vp=%d mode=%d", N, V, Vp, (int)mode));
        std::vector<double> logits = k.random((size_t)N * Vp, 3.0), losses(N), scale = {16.0};
        std::vector<int> targets = random_tokens(N, V, 2);
        targets[N - 1] = V - 1;
        for (int v = V; v < Vp; v++) { logits[v] = 1e4; }       // padding must not matter
        floatX* d_logits = k.tensor<floatX>("logits", logits);
        float* d_losses = k.poisoned<float>("losses", N);
        const float* d_scale = k.tensor<float>("loss_scale", scale);
        const int* d_targets = k.bytes_of("targets", targets);
        k.run([&] { classifier({d_logits, d_losses, d_targets, 1.0f / 64, d_scale, N, V, Vp, mode}, 0); });
        const float host_scale = 16.0f;
        classifier_cpu<double>({logits.data(), losses.data(), targets.data(), 1.0f / 64, &host_scale, N, V,
                                Vp, mode}, 0);
        k.expect("losses", d_losses, losses, 3e-6);
        k.expect("logits", d_logits, logits, mode == ClassifierMode::LossOnly ? 1e-12 : 3e-6);
        for (Accumulate acc : kBothAccumulate) {
            Case k2(format("loss_sum N=%d", N));
            std::vector<double> mean = {3.0};
            const float* in = k2.tensor<float>("losses", losses);
            float* d_mean =
                acc == Accumulate::Yes ? k2.tensor<float>("mean", mean) : k2.poisoned<float>("mean", 1);
            k2.run([&] { loss_sum({d_mean, in, 1.0f / (float)N, acc, N}, 0); });
            loss_sum_cpu<double>({mean.data(), losses.data(), 1.0f / (float)N, acc, N}, 0);
            k2.expect("mean", d_mean, mean);
        }
    }
}

// The tree's order is the point: the same bits as the twin's in float.
static void test_lane_sum(int pieces, int chain, size_t n, bool bf16) {
    Case k(format("lane_sum pieces=%d chain=%d n=%zu bf16=%d", pieces, chain, n, bf16));
    const RoundKey key = {7, 3, 4, kRoundGrads}, out_key = {7, 3, 9, kRoundGradSums};
    const size_t first = 3 * kChunk;
    const uint32_t stride = 5;
    std::vector<double> values;
    std::vector<uint16_t> stored;
    for (int r = 0; r < pieces; r++) {
        RoundKey piece_key = key;
        piece_key.micro += (uint32_t)r * stride;
        std::vector<double> piece = k.random(n, 1.0 + r);
        for (size_t i = 0; i < n; i++) {
            const uint32_t draw = round_bits16(piece_key, first + i);
            stored.push_back(bf16_encode_dithered((float)piece[i], draw));
            piece[i] = bf16 ? bf16_decode_dithered(stored.back(), draw) : (double)(float)piece[i];
        }
        values.insert(values.end(), piece.begin(), piece.end());
    }
    LaneSum<floatX, float> a = {};
    a.pieces = {bf16 ? (const void*)k.bytes_of("pieces", stored)
                     : (const void*)k.tensor<float>("pieces", values), bf16, key, first};
    a.piece_micros = stride;
    a.num_pieces = pieces;
    a.num_chain = chain;
    a.n = n;
    std::vector<std::vector<float>> chains;
    for (int c = 0; c < chain; c++) {
        std::vector<double> x = k.random(n);
        a.chain[c] = k.tensor<float>("chain", x);
        chains.push_back({x.begin(), x.end()});
    }
    a.out = {bf16 ? (float*)k.poisoned<uint16_t>("out", n) : k.poisoned<float>("out", n), Accumulate::No,
             bf16, out_key, first};
    k.run([&] { lane_sum(a, 0); });
    std::vector<float> flat(values.begin(), values.end()), sum(n);
    LaneSum<float, float> twin = {};
    twin.out = {sum.data(), Accumulate::No};
    twin.pieces = {.data = flat.data()};
    twin.num_pieces = pieces;
    twin.num_chain = chain;
    for (int c = 0; c < chain; c++) { twin.chain[c] = chains[c].data(); }
    twin.n = n;
    lane_sum_cpu<float>(twin, 0);
    const std::vector<double> got = k.values_of(a.out);
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t draw = round_bits16(out_key, first + i);
        const float want = bf16 ? bf16_decode_dithered(bf16_encode_dithered(sum[i], draw), draw) : sum[i];
        wrong += (float)got[i] != want;
    }
    CHECK(wrong == 0, "%s: %zu elements differ from the twin's", k.title.c_str(), wrong);
}

// Two ranks' records of three buckets, the last one with fewer chunks than places; then clipping and scale.
static void test_decision(bool interleaved, float factor, size_t chunks) {
    Case k(format("update_decision interleaved=%d x %g, %zu chunks", interleaved, factor, chunks));
    const int ranks = 2, lanes = 4;
    const std::vector<ChunkRange> ranges = {{chunks * 2, chunks, 0}, {3, 2, chunks}, {1, 1, chunks + 2}};
    const size_t per_rank = chunks + 3, lanes_at = per_rank * sizeof(double), bytes = lanes_at + 64;
    std::vector<unsigned char> records(ranks * bytes, 0xFF);        // padding is NaN: it must not be read
    double squares = 0.0, total = 0.0;
    for (int b = 0; b < 3; b++) {
        for (size_t c = 0; c < ranges[b].chunks; c++) {
            const double x = factor * (1.0 + rand_normal(3, b, c) * 0.1);
            const size_t r = c / ranges[b].per_rank, at = ranges[b].at + c % ranges[b].per_rank;
            memcpy(&records[r * bytes + at * sizeof(double)], &x, sizeof(x));
            squares += x;
        }
    }
    for (int r = 0; r < ranks; r++) {
        for (int lane = 0; lane < lanes; lane++) {
            const float x = 1.0f + 0.1f * (r * lanes + lane);
            memcpy(&records[r * bytes + lanes_at + lane * sizeof(float)], &x, sizeof(x));
            total += x;
        }
    }
    UpdateState state = {};
    state.loss_scale = 4.0f;
    state.t = 2;
    UpdateState* d_state = k.bytes_of("state", std::vector<UpdateState>{state});
    const char* d_records = (const char*)k.bytes_of("records", records);
    const ChunkRange* d_ranges = k.bytes_of("ranges", ranges);
    float* d_loss = k.poisoned<float>("loss", 1);
    const UpdatePolicy policy = {true, 1, 65536.0f};
    k.run([&] {
        update_decision({d_state, d_loss, d_records, bytes, lanes_at, ranks, lanes, interleaved, d_ranges, 3,
                         1.0f, policy}, 0);
    });
    float loss = 0.0f;
    update_decision_cpu<float>({&state, &loss, (const char*)records.data(), bytes, lanes_at, ranks, lanes,
                                interleaved, ranges.data(), 3, 1.0f, policy}, 0);
    UpdateState got;
    cudaCheck(cudaMemcpy(&got, d_state, sizeof(got), cudaMemcpyDeviceToHost));
    const double norm = sqrt(squares) / 4.0;
    CHECK(fabs(state.norm / norm - 1) <= 1e-6 && fabs(loss / total - 1) <= 1e-6, "the twin: norm %g, loss %g",
          state.norm, loss);
    CHECK(fabs(got.norm / state.norm - 1) <= 1e-6 && fabs(got.grad_scale / state.grad_scale - 1) <= 1e-6 &&
              got.t == state.t && got.skip == 0 && got.loss_scale == state.loss_scale &&
              got.good_steps == state.good_steps,
          "%s: norm %g grad_scale %g t %lld loss_scale %g, expected %g %g %lld %g", k.title.c_str(), got.norm,
          got.grad_scale, got.t, got.loss_scale, state.norm, state.grad_scale, state.t, state.loss_scale);
    k.expect("loss", d_loss, {loss});
}

// 400 steps of all kinds, one after another, with a sum and a loss that leave nothing to round: after each
// the kernel's state is the twin's to the bit.
static void test_outliers() {
    Case k("update_decision, outliers");
    struct Record { double squares; float loss, unused; };
    const UpdatePolicy policy = {true, 50, 65536.0f, 3.0f, 4.0f};
    const ChunkRange range = {1, 1, 0};
    UpdateState state = {};
    state.loss_scale = 4.0f;
    UpdateState* d_state = k.bytes_of("state", std::vector<UpdateState>{state});
    Record* d_record = k.poisoned<Record>("record", 1);
    const ChunkRange* d_range = k.bytes_of("range", std::vector<ChunkRange>{range});
    float *d_loss = k.poisoned<float>("loss", 1), mean = 0.0f;
    int count[4] = {}, wrong = 0;
    for (uint32_t step = 0; step < 400 && wrong == 0; step++) {
        const double coin = rand_unit(11, RAND_SAMPLE, 0, step);
        float loss = 3.0f + 0.002f * (float)step + 0.1f * rand_normal(11, 0, step);
        double norm = state.loss_scale * (1.0 + 0.2 * fabs(rand_normal(11, 1, step)));
        if (coin < 0.04) { loss += coin < 0.02 ? 1.0f : -1.0f; }
        else if (coin < 0.08) { norm *= coin < 0.06 ? 5.0 : 0.1; }
        else if (coin < 0.12) { norm = coin < 0.10 ? NAN : INFINITY; }
        else if (coin < 0.16) { loss = coin < 0.14 ? NAN : INFINITY; }
        const Record record = {norm * norm, loss, 0.0f};
        cudaCheck(cudaMemcpy(d_record, &record, sizeof(record), cudaMemcpyHostToDevice));
        update_decision({d_state, d_loss, (const char*)d_record, sizeof(record), sizeof(double), 1, 1, false,
                         d_range, 1, 1.0f, policy}, 0);
        update_decision_cpu<float>({&state, &mean, (const char*)&record, sizeof(record), sizeof(double), 1, 1,
                                    false, &range, 1, 1.0f, policy}, 0);
        UpdateState got, want = state;
        cudaCheck(cudaMemcpy(&got, d_state, sizeof(got), cudaMemcpyDeviceToHost));
        for (UpdateState* s : {&got, &want}) {          // a NaN has many bits, and others on a GPU
            for (float* x : {&s->norm, &s->loss_score, &s->norm_score}) { *x = isnan(*x) ? 0.0f : *x; }
        }
        update_state_fields(want, [&](const char* name, auto* first, size_t elements) {
            const size_t at = (const char*)first - (const char*)&want;
            if (memcmp((const char*)&got + at, first, elements * sizeof(*first)) == 0) { return; }
            printf("step %u: %s is not the twin's\n", step, name);
            wrong++;
        });
        count[state.skip]++;
    }
    k.values_of((const float*)d_state);                 // looks at the guards
    CHECK(wrong == 0, "%d fields differ from the twin's", wrong);
    CHECK(count[SKIP_NOT_FINITE] > 5 && count[SKIP_LOSS] > 5 && count[SKIP_NORM] > 2,
          "400 steps: %d skipped as not finite, %d by their loss, %d by their norm", count[SKIP_NOT_FINITE],
          count[SKIP_LOSS], count[SKIP_NORM]);
}

static void test_square_sums(size_t chunks) {
    for (bool bf16 : {false, true}) {
        Case k(format("square_sums chunks=%zu bf16=%d", chunks, bf16));
        const RoundKey key = {1, 2, 5, kRoundGrads};
        std::vector<double> g = k.random(chunks * kChunk), sums(chunks);
        const void* dg = bf16 ? (const void*)k.dithered("grads", g, key, kChunk)
                              : (const void*)k.tensor<float>("grads", g);
        std::vector<unsigned char> empty(chunks * sizeof(double), 0xFF);
        double* d_sums = (double*)k.bytes_of("sums", empty);
        // two rows where they can be halved
        const int rows = chunks % 2 == 0 ? 2 : 1;
        const size_t n = g.size() / rows;
        k.run([&] {
            square_sums({d_sums, {dg, bf16, key, kChunk}, n, {rows, 0, n * (bf16 ? 2 : 4), n}}, 0);
        });
        square_sums_cpu<double>({sums.data(), {.data = g.data()}, g.size(), {}}, 0);
        std::vector<double> got(chunks);
        cudaCheck(cudaMemcpy(got.data(), d_sums, chunks * sizeof(double), cudaMemcpyDeviceToHost));
        for (size_t c = 0; c < chunks; c++) {
            CHECK(fabs(got[c] / sums[c] - 1) <= 2e-6, "%s: chunk %zu: %g, expected %g", k.title.c_str(), c,
                  got[c], sums[c]);
        }
    }
}

template <class Param> static void test_adamw(size_t n, bool bf16, bool use_master) {
    constexpr bool fp32 = sizeof(Param) == sizeof(float);
    Case k(format("adamw_update n=%zu bf16=%d master=%d fp32=%d", n, bf16, use_master, fp32));
    std::vector<double> g = k.random(n), p = k.random(n), m = k.random(n, 0.1), v = k.random(n, 0.1);
    for (double& x : v) { x = x * x; }
    UpdateState state = {};
    state.grad_scale = 0.25f;
    state.t = 3;
    // two rows, with their parameters and gradients packed as everything else, but for the keys' positions
    const size_t first = 8 * 1001, half = n / 16 * 8;
    n = 2 * half;
    for (auto* x : {&g, &p, &m, &v}) { x->resize(n); }
    const RoundKey grad_key = {1, 2, 5, kRoundGrads}, key = {1, 2, 0, kRoundParams};
    const void* dg = bf16 ? (const void*)k.dithered("grads", g, grad_key, first)
                          : (const void*)k.tensor<float>("grads", g);
    std::vector<double> master = p;
    float* d_master = use_master ? k.tensor<float>("master", master) : nullptr;
    Param* dp = k.tensor<Param>("params", p);
    if (!use_master) { master = p; }
    float *dm = k.tensor<float>("m", m), *dv = k.tensor<float>("v", v);
    const UpdateState* d_state = k.bytes_of("state", std::vector<UpdateState>{state});
    k.run([&] {
        adamw_update({.params = dp, .params_fp32 = fp32, .master = d_master, .m = dm, .v = dv,
                      .grads = {dg, bf16, grad_key, first}, .state = d_state, .n = half,
                      .rows = {2, half * sizeof(Param), half * (bf16 ? 2 : 4), half}, .weight_decay = 0.1,
                      .lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .key = key, .first = first}, 0);
    });
    adamw_update_cpu<double>({.params = p.data(), .params_fp32 = false, .master = master.data(),
                              .m = m.data(), .v = v.data(), .grads = {.data = g.data()}, .state = &state,
                              .n = n, .rows = {}, .weight_decay = 0.1, .lr = 0.01, .beta1 = 0.9,
                              .beta2 = 0.95, .eps = 1e-8, .key = key, .first = 0}, 0);
    k.expect("m", dm, m, 1e-5);
    k.expect("v", dv, v, 1e-5);
    if (use_master) { k.expect("master", d_master, master, 1e-5); }
    k.expect_type<Param>("params", k.values_of(dp), p, 1e-5, use_master || fp32 ? 2.0 : 2.5);
}

static void test_muon(size_t n, bool bf16, bool use_master) {
    Case k(format("muon n=%zu bf16=%d master=%d", n, bf16, use_master));
    const size_t first = 8 * 1001, half = n / 16 * 8, update_row = half + 128;
    n = 2 * half;
    std::vector<double> g = k.random(n), p = k.random(n), m = k.random(n, 0.1), u(2 * update_row, 0.0);
    UpdateState state = {};
    state.grad_scale = 0.25f;
    state.t = 3;
    const RoundKey grad_key = {1, 2, 5, kRoundGrads}, key = {1, 2, 0, kRoundParams};
    const void* dg = bf16 ? (const void*)k.dithered("grads", g, grad_key, first)
                          : (const void*)k.tensor<float>("grads", g);
    std::vector<double> master = p;
    float* d_master = use_master ? k.tensor<float>("master", master) : nullptr;
    floatX* dp = k.tensor<floatX>("params", p);
    if (!use_master) { master = p; }
    float* dm = k.tensor<float>("m", m);
    muonX* du = k.tensor<muonX>("update", u);           // zeros, which stay between the rows
    const UpdateState* d_state = k.bytes_of("state", std::vector<UpdateState>{state});
    const Rows rows = {2, half * sizeof(floatX), half * (bf16 ? 2 : 4), half};
    const Rows twin_rows = {2, half * sizeof(double), half * sizeof(double), half};
    k.run([&] {
        muon_momentum({du, dm, {dg, bf16, grad_key, first}, d_state, half, update_row, rows, 0.95}, 0);
        muon_update({dp, d_master, du, d_state, half, update_row, rows, 0.1, 0.01, key, first}, 0);
    });
    muon_momentum_cpu<double>({u.data(), m.data(), {.data = g.data()}, &state, half, update_row, twin_rows,
                               0.95}, 0);
    k.expect("m", dm, m, 1e-5);
    k.expect("update", du, u, 1e-5);
    u = k.values_of(du);                                // rounded, as the update below has it
    muon_update_cpu<double>({p.data(), master.data(), u.data(), &state, half, update_row, twin_rows, 0.1,
                             0.01, key, first}, 0);
    if (use_master) { k.expect("master", d_master, master, 1e-5); }
    k.expect_type<floatX>("params", k.values_of(dp), p, 1e-5, use_master || !kLowPrecision ? 2.0 : 2.5);
}

// Two parts of each of three layers at once, in place, against the twin; each layer alone has the same bits.
static void test_orthogonalise(int rows, int cols, int steps) {
    const int layers = 3, parts = std::min(2, kMuonParts), count = layers * parts;
    const int side = std::min(rows, cols);
    const size_t size = (size_t)rows * cols, square = (size_t)side * side;
    // as in a layer's bucket: one behind the other, the second at a multiple of 128, then something else
    const size_t second = round_up(size, (size_t)128), stride = 2 * second + 128;
    auto places_of = [&](int n) {
        MuonPlaces places = {parts, n, {}, stride};
        for (int part = 0; part < parts; part++) { places.at[part] = part * second; }
        return places;
    };
    const MuonPlaces places = places_of(layers);
    Case k(format("muon_orthogonalise %d x %d, %d steps", rows, cols, steps));
    std::vector<double> inp = k.random(layers * stride, 1e-6);
    muonX* d_inout = k.tensor<muonX>("updates", inp);
    muonX *x = k.poisoned<muonX>("x scratch", count * size),
          *y = k.poisoned<muonX>("y scratch", count * size);
    muonX *gram = k.poisoned<muonX>("gram scratch", count * square),
          *poly = k.poisoned<muonX>("poly scratch", count * square);
    double* sums = (double*)k.poisoned<float>("sums scratch", 2 * count * ceil_div(size, kChunk));
    auto call = [&](int first, int n) {
        muonX* at = d_inout + first * stride;
        muon_orthogonalise({at, at, x, y, gram, poly, sums, places_of(n), rows, cols, steps, layers}, 0);
    };
    std::vector<double> out = inp, plain = inp;
    for (int i = 0; i < count; i++) {
        const auto at = inp.begin() + places.of(i);
        const Values start(at, at + size);
        const Values y = plain_newton_schulz(start, rows, cols, steps, kLowPrecision ? as_bf16 : as_fp32);
        std::copy(y.begin(), y.end(), plain.begin() + places.of(i));
    }
    std::vector<double> x_cpu(count * size), y_cpu(count * size), gram_cpu(count * square),
        poly_cpu(count * square);
    muon_orthogonalise_cpu<double>({out.data(), inp.data(), x_cpu.data(), y_cpu.data(), gram_cpu.data(),
                                    poly_cpu.data(), nullptr, places, rows, cols, steps, layers}, 0);
    k.run([&] { call(0, layers); });
    k.expect_as_good_as("updates", d_inout, out, plain, 1e-4);
    const std::vector<double> got = k.values_of(d_inout);
    double along = 0.0, plain_along = 0.0, length = 0.0;
    size_t beside = 0;
    for (size_t e = 0; e < got.size(); e++) {
        const bool taken = e % stride % second < size && e % stride < parts * second;
        beside += !taken && got[e] != inp[e];
        along += taken * got[e] * out[e];
        plain_along += taken * plain[e] * out[e];
        length += taken * out[e] * out[e];
    }
    CHECK(beside == 0, "%s: %zu elements beside the matrices have changed", k.title.c_str(), beside);
    CHECK(fabs(along - plain_along) <= 3e-3 * length, "%s: %.5f times as long, plainly %.5f", k.title.c_str(),
          along / length, plain_along / length);
    k.run([&] { for (int l = 0; l < layers; l++) { call(l, 1); } });
    CHECK(k.values_of(d_inout) == got, "%s: alone each has other bits", k.title.c_str());
}

static void test_update(size_t n) {
    for (bool bf16 : {false, true}) {
        for (bool master : {false, true}) {
            if (master && !kLowPrecision) { continue; }
            test_adamw<floatX>(n, bf16, master);
            test_muon(n, bf16, master);
            if (kLowPrecision) { test_adamw<float>(n, bf16, master); }
        }
    }
}

// Each of N rows, then one of them alone: the same bits.
static void test_decode_matmul(int N, int C, int OC) {
    for (int mode = 0; mode < 3; mode++) {              // plain; bias; bias, GELU
        const bool has_gelu = mode == 2;
        Case k(format("decode_matmul N=%d C=%d OC=%d mode=%d", N, C, OC, mode));
        std::vector<double> x = k.random((size_t)N * C, 2.0, 0.5), b = k.random(OC), y((size_t)N * OC),
                            w = k.random((size_t)OC * C, 1.0 / sqrt((double)C));
        const floatX *dx = k.tensor<floatX>("inp", x), *dw = k.tensor<floatX>("weight", w);
        const floatX* db = mode > 0 ? k.tensor<floatX>("bias", b) : nullptr;
        floatX* out = k.poisoned<floatX>("out", y.size());
        auto run = [&](int first, int rows) {
            decode_matmul({out + (size_t)first * OC, dx + (size_t)first * C, dw, db, has_gelu, rows, C, OC},
                          0);
        };
        k.run([&] { run(0, N); });
        const std::vector<double> among = k.values_of(out);
        decode_matmul_cpu<double>({y.data(), x.data(), w.data(), mode > 0 ? b.data() : nullptr, false, N, C,
                                   OC}, 0);
        for (double& v : y) { if (has_gelu) { v = gelu(round_to((floatX*)nullptr, v)); } }
        k.expect("out", out, y, 5e-6);

        for (Buffer* buffer : k.buffers) { buffer->reset(); }
        run(N - 1, 1);
        cudaCheck(cudaDeviceSynchronize());
        const std::vector<double> alone = k.values_of(out);
        int differ = 0;
        for (size_t i = (size_t)(N - 1) * OC; i < alone.size(); i++) { differ += alone[i] != among[i]; }
        CHECK(differ == 0, "%s: alone, %d of %d values of a row differ", k.title.c_str(), differ, OC);
    }
}

static void test_decode_attention(int T, int NH, int HS, const std::vector<int>& positions) {
    const int N = (int)positions.size(), C = NH * HS;
    Case k(format("decode_attention N=%d T=%d NH=%d HS=%d", N, T, NH, HS));
    std::vector<double> qkv = k.random((size_t)N * 3 * C), keys = k.random((size_t)N * T * C),
                        values = k.random((size_t)N * T * C), out((size_t)N * C);
    const floatX* d_qkv = k.tensor<floatX>("qkv", qkv);
    floatX *d_keys = k.tensor<floatX>("keys", keys), *d_values = k.tensor<floatX>("values", values);
    floatX* d_out = k.poisoned<floatX>("out", out.size());
    const int* d_positions = k.bytes_of("positions", positions);
    k.run([&] {
        decode_attention({d_out, d_keys, d_values, d_qkv, d_positions, N, T, NH, HS}, 0);
    });
    decode_attention_cpu<double>({out.data(), keys.data(), values.data(), qkv.data(), positions.data(), N, T,
                                  NH, HS}, 0);
    k.expect("out", d_out, out, 1e-5);
    k.expect("keys", d_keys, keys);
    k.expect("values", d_values, values);
}

static void test_decode_rows(int N, int C) {            // the embedding, and a prompt's keys and values
    Case k(format("decode_encoder, cache_store N=%d C=%d", N, C));
    const int V = 30, T = 9, count = 5;
    std::vector<double> wte = k.random((size_t)V * C), wpe = k.random((size_t)T * C), out((size_t)N * C),
                        qkv = k.random((size_t)count * 3 * C), keys = k.random((size_t)N * T * C),
                        values = k.random((size_t)N * T * C);
    std::vector<int> tokens, positions;
    for (int n = 0; n < N; n++) {
        tokens.push_back(n == 0 ? -1 : (n * 17 + 3) % V);
        positions.push_back(n * 5 % T);
    }
    const floatX *d_wte = k.tensor<floatX>("wte", wte), *d_wpe = k.tensor<floatX>("wpe", wpe),
                 *d_qkv = k.tensor<floatX>("qkv", qkv);
    floatX *d_keys = k.tensor<floatX>("keys", keys), *d_values = k.tensor<floatX>("values", values);
    floatX* d_out = k.poisoned<floatX>("out", out.size());
    const int *d_tokens = k.bytes_of("tokens", tokens), *d_positions = k.bytes_of("positions", positions);
    k.run([&] {
        decode_encoder({d_out, d_tokens, d_positions, d_wte, d_wpe, N, C}, 0);
        cache_store({d_keys, d_values, d_qkv, N, count, T, C}, 0);
    });
    decode_encoder_cpu<double>({out.data(), tokens.data(), positions.data(), wte.data(), wpe.data(), N, C},
                               0);
    cache_store_cpu<double>({keys.data(), values.data(), qkv.data(), N, count, T, C}, 0);
    k.expect("out", d_out, out);
    k.expect("keys", d_keys, keys);
    k.expect("values", d_values, values);
}

// Rows of all kinds: the same tokens as sample_token's.
static void test_sample_tokens(int N, int V, const Sampling& sampling) {
    Case k(format("sample_tokens N=%d V=%d temperature %g top %d part %g", N, V, sampling.temperature,
                  sampling.top_k, sampling.top_p));
    std::vector<double> logits = k.random((size_t)N * V, 3.0);
    for (int n = 0; n < N; n++) {
        for (int i = 0; i < V; i++) {
            double& x = logits[(size_t)n * V + i];
            if (n % 4 == 1) { x = 0.5 * floor(x); }     // many are equal
            if (n % 4 == 2 && i % 3 == 0) { x = i % 2 ? NAN : -INFINITY; }
            if (n % 8 == 3 && i % 100 == 7) { x = INFINITY; }
            if (n % 8 == 7) { x = n == 7 ? NAN : n == 15 ? -1.0 : x - 40; }
        }
    }
    std::vector<int> tokens(N), positions(N);
    std::vector<uint64_t> draws(N);
    std::vector<uint32_t> ids(N);
    for (int n = 0; n < N; n++) {
        positions[n] = n;
        draws[n] = ((uint64_t)n << 24) + 77;
        ids[n] = (uint32_t)n % 5;
    }
    const floatX* d_logits = k.tensor<floatX>("logits", logits);
    int *d_tokens = k.poisoned<int>("tokens", N), *d_positions = k.bytes_of("positions", positions);
    uint64_t* d_draws = k.bytes_of("draws", draws);
    const uint32_t* d_ids = k.bytes_of("ids", ids);
    k.run([&] {
        sample_tokens({d_tokens, d_positions, d_draws, d_ids, d_logits, sampling, 1337, N, V}, 0);
    });
    sample_tokens_cpu<double>({tokens.data(), positions.data(), draws.data(), ids.data(), logits.data(),
                               sampling, 1337, N, V}, 0);
    auto compare = [&](const char* name, const auto* device, const auto& want) {
        const std::vector<double> got = k.values_of(device);
        for (int n = 0; n < N; n++) {
            CHECK(got[n] == (double)(float)want[n], "%s row %d: %s %g, not %g", k.title.c_str(), n, name,
                  got[n], (double)want[n]);
        }
    };
    compare("token", d_tokens, tokens);
    compare("position", d_positions, positions);
    compare("draw", d_draws, draws);
}

static void test_decoding() {
    for (int N : {1, 3, 8, 9, 17, 33, 64}) {
        test_decode_matmul(N, 40, 57);
        test_decode_matmul(N, 64, 72);
    }
    test_decode_matmul(5, 8, 19);
    test_decode_attention(64, 2, 64, {0, 1, 63});
    test_decode_attention(70, 3, 20, {69, 64, 0});
    test_decode_attention(33, 1, 7, {32, 3});
    test_decode_rows(6, 40);
    for (const Sampling& s : {Sampling{0.0f, 0, 1.0f}, {1.0f, 0, 1.0f}, {0.7f, 5, 1.0f}, {1.3f, 0, 0.6f},
                              {0.8f, 40, 0.9f}, {1.0f, 1, 0.5f}, {1.0f, 0, 0.0f}}) {
        test_sample_tokens(17, 300, s);
        test_sample_tokens(9, 33, s);
        if (!small_shapes) { test_sample_tokens(24, 50257, s); }
    }
    if (small_shapes) { return; }
    for (int N : {1, 20, 64}) {
        test_decode_matmul(N, 768, 2304);
        test_decode_matmul(N, 3072, 768);
        test_decode_matmul(N, 1600, 401);
    }
    test_decode_attention(1024, 12, 64, {0, 63, 64, 500, 1022, 1023});
    test_decode_attention(1030, 2, 128, {1029, 128});
    test_decode_attention(300, 2, 512, {299, 10});
    test_decode_attention(3000, 2, 96, {2999, 191, 192});
}

static void test_kernels() {
    void* workspace = device_malloc(gemm_workspace_bytes(), "matmul workspace");
    gemm_init(workspace, gemm_workspace_bytes(), false);
    TEST("kernels: encoder") {
        test_encoder(3, 33, 40, 67, 40);
        test_encoder(1, 1, 8, 5, 3);
        if (!small_shapes) { test_encoder(4, 257, 768, 509, 300); }
    }
    TEST("kernels: norms of the residual stream") {
        for (int C : {8, 40, 768}) { test_norm(7, C); }
        hooks.norm_blocks = 2;                    // few rows then go through all stages
        test_norm(11, (kNormMaxThreads + 1) * kWidth);      // a vector more than a block has threads
        if (!small_shapes) {
            for (int C : {40, 768, kNormMaxThreads * kWidth}) { test_norm(29, C); }
        }
        hooks.norm_blocks = INT_MAX;
        if (!small_shapes) {
            test_norm(1, 768);
            // on both sides of what a lane's vectors hold, with branches, without, and of GPT-2's forms
            for (int lanes : {64, 96, 128, 160, 224, 256}) {
                for (int vectors : {lanes, lanes + 1}) { test_norm(33, vectors * kWidth); }
            }
            for (int C : {1600, 16384}) { test_norm(5, C); }
            test_norm(7001, 40);                // so many rows that all blocks take several steps
        }
    }
    TEST("kernels: matmul and bias") {
        test_matmul(33, 40, 120);
        test_matmul(1, 64, 72);
        test_matmul(7, 8, 24);
        if (!small_shapes) {
            test_matmul(257, 768, 2304);
            test_matmul(130, 1600, 400);
            test_matmul(1000, 128, 512);
        }
    }
    TEST("kernels: gradients in bf16") {
        test_grad_accumulate(1000);
        if (!small_shapes) { test_grad_accumulate(1 << 20); }
    }
    TEST("kernels: gelu") {
        test_gelu(7, 160);
        test_gelu(1, 8);
        if (!small_shapes) { test_gelu(1000, 3072); }
    }
    TEST("kernels: attention") {
        test_attention_forms();
    }
    TEST("kernels: classifier and loss") {
        test_gather_rows(5, 9, 40);
        test_gather_rows(300, 70, 1000);            // rows that occur often; more columns than threads
        test_classifier(7, 509, 512);
        test_classifier(5, 67, 128);
        test_classifier(2, 8100, 8192);             // threads that hold nothing but padding
        if (!small_shapes) {
            for (int V : {8065, 8184, 8185, 8191, 8192}) { test_classifier(3, V, 8192); }
            test_classifier(3, 8064, 8064);         // too short for the kernel that streams rows
            test_classifier(3, 57217, 57344);       // the longest rows that it takes
            test_classifier(3, 57345, 57472);       // one vector too long
            test_classifier(3, 50257, 50304);
            test_classifier(1000, 256, 256);
            test_classifier(3, 65533, 65536);
        }
    }
    TEST("kernels: sums of lanes") {
        for (int pieces : {1, 2, 3, 4, 6, 7, 8, 16, 37}) {
            for (int chain : {0, 1, 3}) {
                test_lane_sum(pieces, chain, kChunk * (small_shapes ? 1 : 5), false);
            }
            test_lane_sum(pieces, 0, kChunk * (small_shapes ? 1 : 5), true);
        }
    }
    TEST("kernels: Muon") {
        for (int steps : {1, 4, 5}) {
            test_orthogonalise(40, 40, steps);
            test_orthogonalise(24, 96, steps);
            test_orthogonalise(96, 24, steps);
        }
        if (!small_shapes) {
            test_orthogonalise(256, 256, 5);
            test_orthogonalise(128, 512, 5);
            test_orthogonalise(640, 160, 5);
        }
    }
    TEST("kernels: norm, decision, updates") {
        test_square_sums(1);
        test_square_sums(4);
        if (!small_shapes) { test_square_sums(1301); }
        for (bool interleaved : {false, true}) {
            for (float factor : {1e-4f, 100.0f}) { test_decision(interleaved, factor, 700); }
        }
        test_decision(false, 1.0f, 1);
        test_outliers();
        test_update(1024 + 8);
        if (!small_shapes) { test_update(128 * 10007); }
    }
    TEST("kernels: decoding") { test_decoding(); }
    gemm_free();
    device_free(workspace);
}
#endif  // GPT2_CPU

// == main ==
// Prefix of a committed reference's files, whatever the working directory: in this program's folder, or
// one or two above it (build/check/).
static std::string committed_reference(const std::string& name) {
    char exe[4096];
    const ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe));
    std::string folder(exe, n > 0 ? (size_t)n : 0);
    const std::string prefix = "dev/reference/fixture/" + name;
    for (int up = 0; up < 3 && !folder.empty(); up++) {
        folder.resize(folder.rfind('/') == std::string::npos ? 0 : folder.rfind('/'));
        if (file_size((folder + "/" + prefix + ".json").c_str()) >= 0) { return folder + "/" + prefix; }
    }
    return prefix;
}

int main(int argc, char** argv) {
    device_prepare(argv);
    std::vector<std::string> modes, references;
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        const bool more = i + 1 < argc;
        if (arg == "dump-grads" || arg == "dump-sums") {
            device_init();
            const std::vector<std::string> words(argv + i + 1, argv + argc);
            if (arg == "dump-grads") { dump_grads(words); } else { dump_sums(words); }
            return 0;
        }
        if (arg == "--list") {
            for (const std::string& name : output_names()) { puts(name.c_str()); }
            return 0;
        }
#ifndef GPT2_CPU
        if (arg == "--small") { small_shapes = true; continue; }
#endif
        if (arg == "--break" && more) { break_name = argv[++i]; }
        else if (arg == "--reference" && more) { references.push_back(argv[++i]); }
        else if (arg == "kernels" || arg == "model" || arg == "invariance") { modes.push_back(arg);
        } else {
            die("'%s' is not an argument of this test\nhint: kernels, model, invariance, --reference PREFIX, "
                "--break NAME, --list",
                argv[i]);
        }
    }
    bool known = break_name == nullptr;
    for (const std::string& name : output_names()) { known = known || name == break_name; }
    if (!known) { die("--break %s: there is no such output\nhint: --list prints them", break_name); }
    if (modes.empty()) { modes = {"kernels", "model", "invariance"}; }
    const DeviceInfo device = device_init();
    printf("device: %s, precision %s\n", device.name.c_str(), PRECISION_NAME);

    // whatever else is broken, the other tests notice
    const bool variants = !break_name || strncmp(break_name, "norm_", 5) == 0;
    for (const std::string& mode : modes) {
#ifndef GPT2_CPU
        if (mode == "kernels") { test_kernels(); }
#endif
        if (mode == "model") {
            const bool given = !references.empty();
            if (!given) { references = {committed_reference("ugly"), committed_reference("head64")}; }
            for (const std::string& prefix : references) {
                for (bool fp32 : {false, true}) {
                    if (fp32 && !variants) { continue; }
                    const char* stream = fp32 ? ", residual stream in fp32" : "";
                    TEST(format("model against PyTorch: %s%s", prefix.c_str(), stream).c_str()) {
                        test_model(prefix, default_options(), fp32, given ? 2e-5 : 1e-5,
                                   given ? 1e-4 : 2e-5);
                    }
                }
            }
        }
        if (mode == "invariance") {
            TEST("layout of the arenas, lanes") {
                test_layout();
                test_lanes();
            }
            TEST("sums of lanes") { test_lane_gradients(kTensorCore); }
            if (variants) TEST("a stream in fp32 beside rounded branches") { test_stream_rounding(); }
            if (variants) TEST("other blocks, norms and dropout") {
                test_variants({17, 131, 256, 2, 2, 40});
#ifndef GPT2_CPU
                test_variants(kTensorCore);
#endif
            }
            test_invariance("plain attention, C=40 V=509 T=33", kTiny);
            test_invariance("head size 64, V=300 T=70", kTensorCore);
            test_writing("plain, C=40 V=509 T=33", kTiny);
            const Config two_norms = {17, 131, 256, 2, 2, 40, Block::Parallel};
            if (variants) { test_writing("stream in fp32, C=40 V=509 T=33", with_fp32_stream(kTiny)); }
            if (variants) { test_writing("stream in fp32, two norms", with_fp32_stream(two_norms)); }
            test_writing("head size 64, V=300 T=70", kTensorCore);
#ifndef GPT2_CPU
            Config apart = with_fp32_stream(kTensorCore);       // norms between the decoding on tensor cores
            test_writing("stream in fp32, head size 64", apart);
            apart.block = Block::Parallel;
            test_writing("stream in fp32, head size 64, two norms", apart);
            test_cuda_options(kTensorCore);
#endif
        }
    }
    if (break_name && break_hits == 0) { printf("note: %s was not computed in this run\n", break_name); }
    return test_summary();
}
