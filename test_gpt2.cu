/*
Tests of train_gpt2.cu, in both builds: `make test_gpt2cu && ./test_gpt2cu`, `make test_gpt2cpu &&
./test_gpt2cpu`.

    ./test_gpt2cu [kernels] [model] [invariance]    the named modes, all without a name
        kernels      each CUDA op against its twin in double (llmc/ops/cpu_ops.h); CUDA builds only
        model        against PyTorch: logits, loss, every gradient by name, 10 AdamW steps
        invariance   facts that need no reference: splits, recompute, two runs, skipped updates, files
    --reference PREFIX   model mode on PREFIX_model.bin, PREFIX_tensors.bin, PREFIX.json (from dev/reference)
    --small              kernels mode with its small shapes only: for compute-sanitizer
    --only TEXT          of the modes' tests only those whose heading contains TEXT
    --break NAME         scales that op's output by 1.01: the run must then fail. --list prints the names
    dump-grads MODEL.bin TENSORS.bin OUT.bin MICRO_STEPS [-f 0] [--grad-dtype bf16] [--dropout P]
                         what this build computes for that reference's batch, in the reference file's format;
                         of TENSORS.bin no more is read than the tokens

Tolerances: logits and gradients of 16-bit builds may have at most twice the error of plain 16-bit PyTorch,
both against fp32; their losses and norms are held to 3 %. Closing line: `N passed, N failed, N skipped`.
*/
#define TESTING
#include "train_gpt2.cu"
#include "llmc/ops/cpu_ops.h"    // gives: the twins, here as the oracle of the CUDA build
#include "llmc/ops/rotation_table.h" // gives: rotation_table
#include <memory>               // gives: std::unique_ptr
#include <numeric>              // gives: std::accumulate
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
#define X(op, Args) op_outputs(Args{}, add);
    MODEL_OPS(X)
#undef X
    return names;
}

// 1.01 x. A whole number may be small, where 1.01 is 1 again, or a float's bits, where one more is too few.
template <class Real> LLMC_HD static Real broken(Real x) {
    if constexpr (std::is_integral<Real>::value) { return (Real)(x + x / 64 + 1); }
    return (Real)((float)x * 1.01f);
}
#ifdef GPT2_CPU
template <class Real> static void break_output(Real* data, size_t count, Stream) {
    for (size_t i = 0; i < count; i++) { data[i] = broken(data[i]); }
}
#else
template <class Real>
__global__ void break_kernel(Real* data, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        data[i] = broken(data[i]);
    }
}
template <class Real> static void break_output(Real* data, size_t count, Stream stream) {
    break_kernel<<<1024, 256, 0, stream>>>(data, count);
    cudaCheck(cudaGetLastError());
}
#endif

// Calls f(pointer of the output's type) if the op was to compute it.
template <class Real, class F> static void with_output(Real* data, F f) {
    if (data) { f(data); }
}
template <class S, class F> static void with_output(const GradOf<S>& grad, F f) {
    if (!grad.data) { return; }
#ifndef GPT2_CPU
    if (grad.is_bf16) { f((__nv_bfloat16*)grad.data); return; }
#endif
    f(grad.data);
}

template <class S, class F> static void with_output(const StateOf<S>& state, F f) {
    if (!state.data) { return; }
#ifndef GPT2_CPU
    if (state.is_bf16) { f((__nv_bfloat16*)state.data); return; }
#endif
    f((S*)state.data);
}

template <class Args> static void break_outputs(const Args& args, Stream stream) {
    if (!break_name) { return; }
    op_outputs(args, [&](const char* op, const char* output, auto where, size_t count) {
        with_output(where, [&](auto* data) {
            if (count == 0 || format("%s.%s", op, output) != break_name) { return; }
            break_hits++;
            break_output(data, count, stream);
        });
    });
}

// ---- measures ----
typedef std::vector<float> Vector;
typedef std::vector<double> Doubles;

// |a - b| / |b|, in double. NaN anywhere gives NaN, which fails every bound written as err <= tol.
static double relative_error(const Vector& a, const Vector& b, size_t from = 0) {
    double distance = 0.0, size = 0.0;
    for (size_t i = from; i < b.size(); i++) {
        const double d = (double)a.at(i) - (double)b[i];
        distance += d * d;
        size += (double)b[i] * (double)b[i];
    }
    return size > 0.0 ? sqrt(distance / size) : distance == 0.0 ? 0.0 : HUGE_VAL;
}

static bool same_bits(const Vector& a, const Vector& b) {
    return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// ---- models and batches ----
static Options default_options() {
    Options o = {};
    o.master = true;
    o.seed = 1337;
    return o;
}

struct TestModel : Model {
    TestModel(const Config& c, Options o, int B, int T) {
        o.B = B, o.T = T;
        model_allocate(this, c, o);
    }
    ~TestModel() { model_free(this); }
    TestModel(const TestModel&) = delete;
};

struct Batch { int B, T; std::vector<int> x, y; };

// The gradients of a batch, in `micro_steps` parts: host_grad and step_update need their number.
static int last_count = 1;
static void accumulate(Model* model, const Batch& batch, int micro_steps = 1) {
    const int rows = batch.B / micro_steps;
    for (int micro = 0; micro < micro_steps; micro++) {
        const size_t at = (size_t)micro * rows * batch.T;
        model_micro_step(model, &batch.x[at], &batch.y[at], rows, batch.T, micro, micro_steps);
    }
    last_count = micro_steps;
}

static void step_update(Model* model, double lr, double muon_lr = 0.0) {
    model_update(model, last_count, lr, muon_lr);
}

// The mean loss of a batch. LossOnly: its logits stay.
static float mean_loss(Model* model, const Batch& batch, ClassifierMode mode = ClassifierMode::LossOnly) {
    const int B = batch.B, T = batch.T;
    const MicroStep micro;
    model_feed(model, batch.x.data(), batch.y.data(), B, T, mode);
    const MicroStep* trains = mode == ClassifierMode::LossAndGrad ? &micro : nullptr;
    model_forward(model, B, T, trains);
    model_head(model, B, T, 1.0f / (float)(B * T), &model->state->loss, Accumulate::No, trains);
    return model_read_state(model).loss;
}

// ---- a model's tensors on the host ----
template <class T> static std::vector<T> from_device(Model* model, const T* device, size_t n) {
    std::vector<T> values(n);
    copy_to_host(values.data(), device, n * sizeof(T), model->stream);
    stream_sync(model->stream);
    return values;
}

static Vector host_param(Model* model, int i, int l, bool from_master) {
    const ParamSpec& s = model->param_specs[i];
    const char* data = model_param_data(model, i, l);
    if (s.elem_bytes == sizeof(float)) { return from_device(model, (const float*)data, s.elems); }
    const auto raw = from_device(model, (const floatX*)data, s.elems);
    Vector values(raw.begin(), raw.end());
    if (!from_master || !model->opt.master) { return values; }
    const auto masters = from_device(model, model_whole_master(model, i, l), s.elems);
    for (size_t e = 0; e < s.elems; e++) {
        const masterX master = masters[e];
        values[e] = sizeof(masterX) == 2 ? master_join((uint16_t)(bits_of(values[e]) >> 16), (uint16_t)master)
                                         : (float)master;
    }
    return values;
}

static Vector host_params(Model* model) {            // every parameter, as the optimizer holds it
    Vector all;
    for (int i = 0; i < NUM_PARAMS; i++) {
        for (int l : model->param_specs[i].layers) {
            const Vector values = host_param(model, i, l, true);
            all.insert(all.end(), values.begin(), values.end());
        }
    }
    return all;
}

// Between a micro-step and the update: layers together, tight, without FP16's loss scale.
static Vector host_grad(Model* model, int i) {
    const ParamSpec& s = model->param_specs[i];
    const float scale = model_read_state(model).update.loss_scale;
    Vector all;
    for (int l : s.layers) {
        MicroStep micro;                        // of lane 0, whose buffer has the sum of all
        micro.number = last_count - 1;
        const Grad grad = model_grad(model, (ParamId)i, l, micro);
        Vector values;
        if (grad.is_bf16) {
            const auto raw = from_device(model, (const uint16_t*)grad.data, s.elems);
            for (size_t k = 0; k < s.elems; k++) {
                values.push_back(bf16_decode_dithered(raw[k], round_bits16(grad.key, grad.first + k)));
            }
        } else {
            values = from_device(model, grad.data, s.elems);
        }
        for (float x : values) { all.push_back(x / scale); }
    }
    return all;
}

static std::vector<Vector> host_grads(Model* model) {
    std::vector<Vector> grads;
    for (int i = 0; i < NUM_PARAMS; i++) { grads.push_back(host_grad(model, i)); }
    return grads;
}

// bound: on the relative error of each tensor; 0: the same bits.
static void check_grads(const std::string& what, Model* model, const std::vector<Vector>& want,
                        double bound) {
    for (int i = 0; i < NUM_PARAMS; i++) {
        const Vector got = host_grad(model, i);
        const double error = relative_error(got, want[i]);
        CHECK(bound > 0.0 ? error <= bound : same_bits(got, want[i]), "%s: gradient of %s differs by %g",
              what.c_str(), model->param_specs[i].name, error);
    }
}

static Acts model_acts(const Model* model, int l) {
    return act_views(model->acts.data, model->acts.specs, l);
}

static Vector host_logits(Model* model, int rows) {  // (rows, V): live columns
    const Config& c = model->config;
    const auto raw = from_device(model, model_acts(model, 0).logits, (size_t)rows * c.Vp);
    Vector logits;
    for (int n = 0; n < rows; n++) {
        logits.insert(logits.end(), raw.begin() + (size_t)n * c.Vp, raw.begin() + (size_t)n * c.Vp + c.V);
    }
    return logits;
}

// == model ==
// ---- reference files (dev/reference) ----
struct Reference : Batch {
    Vector logits;                          // (B,T,V)
    float loss;
    Vector grads[NUM_PARAMS];               // layers together, tight
};

static Reference reference_load(const std::string& path, const Config& c, bool tokens_alone = false) {
    Reference r;
    FILE* f = fopen_check(path.c_str(), "rb");
    auto read = [&](auto* values, size_t n) {
        values->resize(n);
        fread_check(values->data(), sizeof((*values)[0]), n, f, path.c_str());
    };
    std::vector<int> header;
    read(&header, 256);
    if (header[0] != 20240327 || header[1] != 2) {
        die("'%s' is not a reference file of version 2", path.c_str());
    }
    r.B = header[2], r.T = header[3];
    const size_t N = (size_t)r.B * r.T;
    read(&r.x, N);
    read(&r.y, N);
    if (!tokens_alone) {
        read(&r.logits, N * c.V);
        fread_check(&r.loss, sizeof(float), 1, f, path.c_str());
        const std::vector<ParamSpec> specs = param_table(c);
        for (int i = 0; i < NUM_PARAMS; i++) { read(&r.grads[i], specs[i].elems * specs[i].layers.size()); }
    }
    fclose(f);
    return r;
}

// The number, or the list of numbers, of this name; "a.b" is b of the object a.
static Doubles json_numbers(const Facts& json, const std::string& name) {
    Doubles numbers;
    for (const auto& value : json) {
        const bool is_one = value.first == name || value.first.compare(0, name.size() + 1, name + ".") == 0;
        if (is_one) { numbers.push_back(strtod(value.second.c_str(), nullptr)); }
    }
    if (numbers.empty()) { die("the reference's JSON has no key '%s'", name.c_str()); }
    return numbers;
}

static void test_model(const std::string& prefix, const Options& options, double logits_bound,
                       double grad_bound) {
    const std::string path = prefix + "_model.bin";
    const Config c = checkpoint_config(path.c_str());
    const Reference r = reference_load(prefix + "_tensors.bin", c);
    Facts json;
    const std::string unread = json_file_read(prefix + ".json", &json);
    if (!unread.empty()) { die("'%s.json' %s", prefix.c_str(), unread.c_str()); }
    auto hyper = [&](const char* name) { return json_numbers(json, std::string("hyper.") + name)[0]; };
    // on an error: in fp32 an absolute one, else twice what PyTorch's own type does to the same tensor
    auto bound = [&](const std::string& what, double fp32_bound) {
        return kLowPrecision ? 2.0 * json_numbers(json, (kFp16 ? "float16_" : "bfloat16_") + what)[0]
                             : fp32_bound;
    };
    Options o = options;
    o.weight_decay = (float)hyper("weight_decay"), o.grad_clip = (float)hyper("grad_clip");
    if (facts_find(json, "document_end")) { o.document_end = (int)json_numbers(json, "document_end")[0]; }
    o.beta1 = hyper("beta1"), o.beta2 = hyper("beta2"), o.eps = hyper("eps");
    TestModel model(c, o, r.B, r.T);
    checkpoint_load(&model, path.c_str());

    const float loss = mean_loss(&model, r);
    const Vector logits = host_logits(&model, r.B * r.T);
    double worst = 0.0, square = 0.0;
    const double cap = c.shape().softcap;       // the classifier caps them, where they are read
    for (size_t i = 0; i < logits.size(); i++) {
        const double logit = cap > 0.0 ? cap * tanh(logits[i] / cap) : logits[i];
        const double d = fabs(logit - (double)r.logits[i]);
        if (!(d <= worst)) { worst = d; }       // keeps a NaN
        square += (double)r.logits[i] * (double)r.logits[i];
    }
    const double error = worst / sqrt(square / (double)logits.size());
    const double allowed = bound("logits_error", logits_bound);
    CHECK(error <= allowed, "logits: max |d| / rms = %g, allowed %g", error, allowed);
    CHECK(fabs(loss - r.loss) <= (kLowPrecision ? 0.02 : 2e-5), "loss %.7f, PyTorch %.7f", loss, r.loss);
    printf("   logits max|d|/rms %.3g (allowed %.3g), loss %.6f (PyTorch %.6f)\n", error, allowed, loss,
           r.loss);

    accumulate(&model, r);
    for (int i = 0; i < NUM_PARAMS; i++) {
        const char* name = model.param_specs[i].name;
        if (model.param_specs[i].layers.empty()) { continue; }
        const double off = relative_error(host_grad(&model, i), r.grads[i]);
        const double most = bound(std::string("total_error.") + name, grad_bound);
        CHECK(off <= most, "gradient of %s: |d|/|g| = %g, allowed %g", name, off, most);
        printf("   d%-9s |d|/|g| %.3g (allowed %.3g)\n", name, off, most);
    }

    // ten AdamW steps on this batch, from the start
    const Doubles losses = json_numbers(json, "losses"), norms = json_numbers(json, "norms");
    for (size_t step = 0; step < losses.size(); step++) {
        accumulate(&model, r);
        step_update(&model, hyper("learning_rate"));
        const DeviceState state = model_read_state(&model);
        CHECK(fabs(state.loss - losses[step]) <= (kLowPrecision ? 0.03 : 5e-5),
              "step %zu: loss %.7f, PyTorch %.7f", step, state.loss, losses[step]);
        CHECK(fabs(state.update.norm / norms[step] - 1.0) <= (kLowPrecision ? 0.03 : 2e-4),
              "step %zu: norm %.7f, PyTorch %.7f", step, state.update.norm, norms[step]);
        const double clipped = std::min(1.0, (double)o.grad_clip / state.update.norm);
        const double scale = clipped / state.update.loss_scale;
        CHECK(fabs(state.update.grad_scale / scale - 1.0) <= 1e-5,
              "step %zu: gradients scaled by %g, expected %g", step, state.update.grad_scale, scale);
    }
}

// ---- what dev/reference compares ----
static Options dump_options(const std::vector<std::string>& args) {
    Options o = default_options();
    o.tf32 = true;
    for (size_t i = 4; i + 1 < args.size(); i += 2) {
        if (args[i] == "-f") { o.tf32 = args[i + 1] != "0"; }
        else if (args[i] == "--grad-dtype") { o.grads_bf16 = args[i + 1] == "bf16"; }
        else if (args[i] == "--dropout") { o.dropout = atof(args[i + 1].c_str()); }
        else { die("dump: '%s' is not one of -f, --grad-dtype, --dropout", args[i].c_str()); }
    }
    return o;
}

// What this build computes for a reference's batch, written like a reference (dev/reference/compare.py
// compares): logits without dropout, loss and gradients with it.
static void dump_grads(const std::vector<std::string>& args) {
    if (args.size() < 4) { die("dump-grads needs MODEL.bin TENSORS.bin OUT.bin MICRO_STEPS"); }
    const Config c = checkpoint_config(args[0].c_str());
    const Reference r = reference_load(args[1], c, true);
    const int micro_steps = atoi(args[3].c_str());
    if (micro_steps < 1 || r.B % micro_steps != 0) {
        die("dump-grads: %s micro-steps of %d rows", args[3].c_str(), r.B);
    }
    const int rows = r.B / micro_steps;
    TestModel model(c, dump_options(args), rows, r.T);
    checkpoint_load(&model, args[0].c_str());

    AtomicFile out = atomic_open(args[2]);
    auto write = [&](const auto* values, size_t n) { atomic_write(&out, values, n * sizeof(*values)); };
    const int header[256] = {20240327, 2, r.B, r.T};
    write(header, 256);
    write(r.x.data(), r.x.size());
    write(r.y.data(), r.y.size());
    for (int micro = 0; micro < micro_steps; micro++) {
        const size_t at = (size_t)micro * rows * r.T;
        model_feed(&model, &r.x[at], &r.y[at], rows, r.T, ClassifierMode::LossOnly);
        model_loss(&model, rows, r.T, 1.0f / (float)(r.B * r.T), &model.state->loss,
                   micro == 0 ? Accumulate::No : Accumulate::Yes);
        const Vector logits = host_logits(&model, rows * r.T);
        write(logits.data(), logits.size());
    }
    accumulate(&model, r, micro_steps);
    const auto* losses = (const float*)(model.exchange.records + model.exchange.losses_at);
    const float loss = from_device(&model, losses, 1)[0];
    write(&loss, 1);
    for (int i = 0; i < NUM_PARAMS; i++) {
        const Vector grad = host_grad(&model, i);
        write(grad.data(), grad.size());
    }
    atomic_commit(&out);
    printf("loss %.6f\n", loss);
}

// == invariance ==
static const Config kTiny = {33, 509, 512, 3, 2, 40};       // head size 20: the plain attention
static const Config kSmall = {17, 131, 256, 2, 2, 40};      // for what is done many times
// Head size 64. Smaller in ASan, where all its matrices go through plain loops: rows, columns and keys still
// go beyond the tiles of llmc/ops/cpu_ops.h. More heads than one are in the other.
#ifdef __SANITIZE_ADDRESS__
static const Config kTensorCore = {70, 300, 384, 2, 1, 64};
#else
static const Config kTensorCore = {70, 300, 384, 2, 2, 128};
#endif
static const Config kWide = {70, 300, 384, 2, 8, 512};      // the CUDA build's: sm90's products with GELU

// Limits and epsilons so strong that they matter.
static const Config kLlama = descriptor_config("llama:L2,NH4,NKV2,HS16,C40,F72,T17,V300,qk_norm,eps=0.01");
static const Config kNano = descriptor_config("llama:L2,NH3,NKV1,HS32,C48,F80,T17,V300,relu2,qk_norm,"
                                              "no_norm_weights,embed_norm,tied,eps=0.001,softcap=0.5");
// Multiples of 16, as FP8 wants them, and a layer with FP8 between two without.
static const Config kLlama8 = descriptor_config("llama:L3,NH4,NKV2,HS16,C64,F176,T18,V300,qk_norm");
static const Config kNano8 = descriptor_config("llama:L3,NH3,NKV1,HS32,C64,F144,T18,V300,relu2,qk_norm,"
                                               "no_norm_weights,embed_norm,tied,softcap=15");

// Layers of both kinds, in both families
static const Config kWindows = descriptor_config("L2,NH2,C128,T70,V300,window=9,pattern=SL");
static const Config kLlamaWindows = descriptor_config("llama:L3,NH4,NKV2,HS16,C40,F72,T17,V300,qk_norm,"
                                                      "eps=0.01,window=5,pattern=SSL");

// Biases of q, k and v, and frequencies that are kept, blended and divided
static const Config kQwen2 = descriptor_config("llama:L2,NH4,NKV2,HS16,C40,F72,T17,V300,qkv_bias,eps=0.01,"
                                               "rope_factor=8,rope_low=1,rope_high=4,rope_original=40");
static const Config kQwen28 = descriptor_config("llama:L3,NH4,NKV2,HS16,C64,F176,T18,V300,qkv_bias");

// Value embeddings; with FP8 in the layer that has it
static const Config kValues = descriptor_config("llama:L4,NH4,NKV2,HS16,C40,F72,T17,V300,qk_norm,eps=0.01,"
                                                "value_embed");
static const Config kValues8 = descriptor_config("llama:L3,NH4,NKV2,HS16,C64,F176,T18,V300,tied,qk_norm,"
                                                 "value_embed");

static const Config kPacked = descriptor_config("llama:L2,NH2,NKV1,HS64,C40,F72,T200,V300");   // documents

// Both, and the first one with each activation that they lack
static std::vector<Config> family(const Config& llama, const Config& nano) {
    std::vector<Config> all = {llama, nano};
    for (const MlpRow& row : kMlps) {
        if (row.mlp == llama.llama.mlp || row.mlp == nano.llama.mlp) { continue; }
        all.push_back(llama);
        all.back().llama.mlp = row.mlp;
    }
    return all;
}

static Batch random_batch(const Config& c, int B, uint32_t id) {
    Batch batch = {B, c.maxT, {}, {}};
    for (int i = 0; i < B * c.maxT; i++) {
        // a few common tokens, so that buckets are split into segments
        const uint32_t r = rand_u32(99, RAND_SAMPLE, id, (uint64_t)i);
        batch.x.push_back((int)(r % 3 == 0 ? r / 3 % 4 : r / 3 % (uint32_t)c.V));
        batch.y.push_back((int)(rand_u32(98, RAND_SAMPLE, id, (uint64_t)i) % (uint32_t)c.V));
    }
    return batch;
}

// Weights away from their symmetric start (biases 0, LayerNorm weights 1), so that no term of a gradient
// vanishes.
struct RandomModel : TestModel {
    RandomModel(const Config& c, const Options& o, int B) : TestModel(c, o, B, c.maxT) {
        model_init_random(this, o.seed);
        for (int i = 0; i < NUM_PARAMS; i++) {
            const ParamSpec& s = param_specs[i];
            for (int l : s.layers) {
                Vector values = host_param(this, i, l, true);
                for (size_t k = 0; k < s.live_rows * s.cols; k++) {
                    values[k] += 0.05f * rand_normal(7, (uint32_t)(100 + i), l * s.elems + k);
                }
                model_set_param(this, i, l, values.data());
            }
        }
    }
};

static void one_step(Model* model, int B, uint32_t batch, int micro_steps = 1) {
    accumulate(model, random_batch(model->config, B, batch), micro_steps);
    step_update(model, 1e-3, 1e-2);
}

// A few steps of training; returns the losses, then the parameters.
static Vector short_run(const Config& c, const Options& o, int B, int steps, int micro_steps = 1) {
    RandomModel model(c, o, B);
    Vector result;
    for (int step = 0; step < steps; step++) {
        one_step(&model, B, (uint32_t)step, micro_steps);
        result.push_back(model_read_state(&model).loss);
    }
    const Vector params = host_params(&model);
    result.insert(result.end(), params.begin(), params.end());
    return result;
}

// ---- arenas and lanes ----
typedef std::vector<std::pair<size_t, size_t>> Ranges;         // [begin, end)
static bool are_apart(Ranges ranges) {
    std::sort(ranges.begin(), ranges.end());
    bool apart = true;
    for (size_t i = 1; i < ranges.size(); i++) { apart = apart && ranges[i - 1].second <= ranges[i].first; }
    return apart;
}

static void check_layout(const std::vector<ParamSpec>& specs, const Config& c, const Split& split, bool bf16,
                         const Layout& alone) {
    const Layout layout = param_layout(specs, c.L, split, bf16, false);
    std::vector<Ranges> tensors(layout.buckets.size());
    Ranges grads;                               // bytes of the buckets'
    bool good = layout.buckets.size() == alone.buckets.size();
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = specs[i];
        for (int l : s.layers) {
            const ParamAddress at = param_address(specs, layout, i, l);
            const Bucket& b = layout.buckets[at.bucket];
            good = good && b.kind == s.kind && b.elem_bytes == s.elem_bytes && at.offset % 128 == 0 &&
                   at.offset + s.elems <= b.elems;
            tensors[at.bucket].push_back({at.offset, at.offset + s.elems});
        }
    }
    for (int k = 0; k < (int)layout.buckets.size(); k++) {
        const Bucket& b = layout.buckets[k];
        good = good && are_apart(tensors[k]) && b.padded == b.shard * split.world && b.shard % kChunk == 0 &&
               b.padded >= b.elems && b.padded - b.elems < kChunk * (size_t)split.world + split.world &&
               b.first == alone.buckets[k].first && b.params % kAlign == 0 && b.grads % kAlign == 0;
        const size_t end = b.grads + b.padded * (bf16 && is_2d(b.kind) ? 2 : 4);
        grads.push_back({b.grads, end});
        good = good && end <= layout.grads_bytes;
    }
    CHECK(good && are_apart(grads), "L=%d, %d ranks, stage %d, bf16 %d", c.L, split.world, split.zero, bf16);
}

// Every tensor's place: whole, aligned, in a bucket of its kind, alone; every bucket cut into equal shards of
// whole chunks; keys of rounding that do not depend on the number of ranks.
static void test_layout() {
    const Config one_layer = {8, 67, 128, 1, 1, 8}, seven_layers = {70, 300, 384, 7, 2, 40};
    for (const Config& c : {kTiny, kTensorCore, kValues, one_layer, seven_layers}) {
        const std::vector<ParamSpec> specs = param_table(c);
        const Layout alone = param_layout(specs, c.L, {0, 1, 0}, false, false);
        Ranges keys;
        for (const Bucket& b : alone.buckets) { keys.push_back({b.first, b.first + b.padded}); }
        CHECK(are_apart(keys), "L=%d: two elements have one key", c.L);
        for (int world = 1; world <= 64; world++) {
            for (int zero = 0; zero <= (world > 1); zero++) {
                for (bool bf16 : {false, true}) {
                    check_layout(specs, c, {world - 1, world, zero}, bf16, alone);
                }
            }
        }
    }
}

// The speed that MFU is a part of, by hand: a token takes 6 FLOPs for each parameter that multiplies it, and
// 6*T in causal attention for each layer's width of all heads. An untied embedding is only looked up.
static void test_peak_speed() {
    const struct { const char* model; double parameters, width; } rows[] = {
        {"L2,NH2,C64,T32,V256", 256 * 64 + 32 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64, 2 * 64},
        {"llama:L3,NH4,NKV2,HS32,C64,F96,T32,V256",
         256 * 64 + 3 * (64 * (128 + 2 * 64) + 128 * 64 + 3 * 96 * 64 + 2 * 64) + 64, 3 * 128},
        {"llama:L3,NH4,NKV2,HS32,C64,F96,T32,V256,value_embed",        // 12 channels a gate, in one layer
         256 * 64 + 3 * (64 * (128 + 2 * 64) + 128 * 64 + 3 * 96 * 64 + 2 * 64) + 64 + 2 * 12, 3 * 128},
        {"llama:L3,NH4,NKV2,HS32,C64,F96,T32,V256,tied",
         256 * 64 + 3 * (64 * (128 + 2 * 64) + 128 * 64 + 3 * 96 * 64 + 2 * 64) + 64, 3 * 128}};
    for (const auto& row : rows) {
        const Config c = descriptor_config(row.model);
        const double parameters = (double)report_parameters(param_table(c));
        const double flops = 6 * row.parameters + 6 * row.width * 24;
        for (const bool known : {true, false}) {
            Reports reports = {};
            reports_init(&reports, c, parameters, 24, {"NVIDIA H200", 0, 0, "", ""}, known, 9);
            const double want = known ? 989e12 / flops : 0.0, got = reports.report.peak_speed;
            CHECK(fabs(got - want) <= 1e-9 * want, "%s: a peak of %.9g tok/s, not %.9g", row.model, got,
                  want);
            reports_free(&reports);
        }
    }
    // a window of 256 leaves at most 5 tiles of 64 in a row of tiles
    const struct { const char* model; int T; double share; } shares[] = {
        {"m12", 1024, 1.0}, {"m12,window=1024", 1024, 1.0}, {"m12,window=1024", 70, 1.0},
        {"d12,window=256,pattern=SSSL", 1024, (3 * 70.0 / 136 + 1) / 4}, {"d12,window=1", 130, 3.0 / 6},
        {"d12,window=66", 256, 9.0 / 10}};
    for (const auto& s : shares) {
        const Config c = descriptor_config(s.model);
        CHECK(fabs(visited_tiles(c, s.T) - s.share) < 1e-12, "%s, T=%d: %g visited", s.model, s.T,
              visited_tiles(c, s.T));
        const double looked_up = c.is_llama() ? (double)c.V * c.C : 0.0;
        const double flops = step_flops(c, looked_up, s.T);
        CHECK(fabs(flops - 6.0 * 12 * 768 * s.T * s.share) < 1e-3, "%s: FLOPs of attention", s.model);
    }
}

// Micro-steps in as many lanes: against each one's gradients alone, summed here by the tree, whose pairs are
// (0 + 1) + (2 + 3).
static void test_lane_gradients(const Config& c) {
    for (int lanes : {4, 8}) {
        Options o = default_options();
        o.lanes = lanes;
        const Batch batch = random_batch(c, lanes, 1);
        RandomModel model(c, o, 1);
        std::vector<std::vector<Vector>> sums;          // of a part of the tree, of a tensor
        for (int lane = 0; lane < lanes; lane++) {
            const size_t at = (size_t)lane * batch.T;
            model_micro_step(&model, &batch.x[at], &batch.y[at], 1, batch.T, 0, lanes);
            sums.push_back(host_grads(&model));
        }
        for (int apart = 1; apart < lanes; apart *= 2) {
            for (int k = 0; k + apart < lanes; k += 2 * apart) {
                for (int i = 0; i < NUM_PARAMS; i++) {
                    Vector &sum = sums[k][i], &other = sums[k + apart][i];
                    for (size_t e = 0; e < sum.size(); e++) { sum[e] += other[e]; }
                }
            }
        }
        accumulate(&model, batch, lanes);
        check_grads(format("%d lanes", lanes), &model, sums[0], 0.0);
    }
}

// ---- one model, computed in several ways ----
// A batch in 1, 2 and 4 micro-steps. And a short run of few rows, which has the same bits as a CUDA graph of
// each micro-step, at each recompute level.
static void test_variant(const Config& c, double dropout, int document_end = -1) {
    const std::string what = format("C=%d block %d, norm %d, dropout %g, end %d", c.C, (int)c.block,
                                    (int)c.norm, dropout, document_end);
    Options o = default_options();
    o.dropout = dropout;
    o.document_end = document_end;
    const Batch batch = random_batch(c, 4, 0);
    RandomModel model(c, o, batch.B);
    accumulate(&model, batch);
    const std::vector<Vector> whole = host_grads(&model);
    for (int micro_steps : {2, 4}) {
        accumulate(&model, batch, micro_steps);
        check_grads(format("%s, in %d micro-steps", what.c_str(), micro_steps), &model, whole,
                    kLowPrecision ? 1e-2 : 1e-6);
    }
    o.graphs = false;
    const Vector base = short_run(c, o, 2, 2, 2);       // of a graph's runs the first is not recorded
    o.graphs = true;
    for (int recompute : {0, 1, 2, 3}) {
        o.recompute = recompute;
        CHECK(same_bits(base, short_run(c, o, 2, 2, 2)), "%s: -r %d has other bits than without a graph",
              what.c_str(), recompute);
    }
}

// The LM head's rows in three parts, the last one shorter: the same losses and gradients.
static void test_head_chunks(const Config& c, bool grads_bf16) {
    Options o = default_options();
    o.grads_bf16 = grads_bf16;
    const Batch batch = random_batch(c, 8, 0);
    RandomModel whole(c, o, batch.B);
    o.head_chunks = 3;
    RandomModel parts(c, o, batch.B);
    const int N = batch.B * batch.T, rows = head_rows(o, N);
    CHECK(2 * rows < N && N < 3 * rows, "%d rows in parts of %d", N, rows);
    const float want = mean_loss(&whole, batch), loss = mean_loss(&parts, batch);
    CHECK(fabsf(loss / want - 1.0f) <= (kLowPrecision ? 1e-4f : 1e-6f), "loss %.9g, at once %.9g", loss,
          want);
    for (int micro_steps : {1, 2}) {
        accumulate(&whole, batch, micro_steps), accumulate(&parts, batch, micro_steps);
        check_grads("head in parts", &parts, host_grads(&whole), kLowPrecision ? 1e-2 : 1e-6);
    }
}

// Two models that compute at the same time have the gradients of one alone.
static void test_side_by_side(const Config& c) {
    const Batch batch = random_batch(c, 8, 0);
    RandomModel one(c, default_options(), batch.B), other(c, default_options(), batch.B);
    accumulate(&one, batch);
    const std::vector<Vector> want = host_grads(&one);      // waits
    for (int i = 0; i < 50; i++) {
        accumulate(&one, batch), accumulate(&other, batch);
        const bool equal = host_grads(&one) == want && host_grads(&other) == want;
        CHECK(equal, "C=%d: beside another model, gradients have other bits (try %d)", c.C, i);
        if (!equal) { return; }
    }
}

// Two documents that share a row, in either order: the losses of each are the same but for rounding, and to
// the bit whatever the other one says. Where one alone counts, the other has no gradient.
static void test_packed(const Config& c) {
    const int end = c.V - 1, T = c.maxT, cut = T / 3;
    Options o = default_options();
    o.document_end = end;
    RandomModel model(c, o, 1);
    // tokens of the first are below 100, of the second 100 to 199; `more` is added to those of the second
    auto row = [&](bool turned, int more) {
        Batch batch = {1, T, {}, {}};
        const int first = turned ? T - cut : cut;
        for (int t = 0; t < T; t++) {
            const bool second = (t >= first) != turned;
            const int at = t >= first ? t - first : t;          // in its document
            batch.x.push_back(at == 0 ? end : 100 * second + (at * at + more * second) % 100);
            batch.y.push_back(second ? 7 : 3);
        }
        return batch;
    };
    auto losses = [&](const Batch& batch, int from, int n) {
        mean_loss(&model, batch);
        const Vector all = from_device(&model, model_acts(&model, 0).losses, batch.x.size());
        return Vector(all.begin() + from, all.begin() + from + n);
    };
    const Batch plain = row(false, 0), turned = row(true, 0);
    const Vector first = losses(plain, 0, cut), second = losses(plain, cut, T - cut);
    CHECK(losses(row(false, 5), 0, cut) == first, "C=%d: another document behind it changes losses", c.C);
    CHECK(losses(row(true, 5), T - cut, cut) == losses(turned, T - cut, cut),
          "C=%d: another document before it changes losses", c.C);
    const double most = kLowPrecision ? 1e-2 : 1e-6;
    CHECK(relative_error(losses(turned, T - cut, cut), first) <= most &&
              relative_error(losses(turned, 0, T - cut), second) <= most, "C=%d: in another order", c.C);

    const ParamSpec& wte = model.param_specs[PARAM_wte];
    for (bool of_second : {false, true}) {
        Batch batch = plain;
        for (int t = 0; t < T; t++) { batch.y[t] = (t >= cut) == of_second ? batch.y[t] : -1; }
        accumulate(&model, batch);
        const Vector grad = host_grad(&model, PARAM_wte);
        bool own = false, other = false;
        for (size_t i = 0; i < 200 * wte.cols; i++) {
            (i / wte.cols / 100 == (size_t)of_second ? own : other) |= grad[i] != 0.0f;
        }
        CHECK(own && !other, "C=%d: gradient of the %s document", c.C, other ? "other" : "own");
    }
}

static void test_variants(Config c) {
    for (Block block : {Block::Sequential, Block::Parallel, Block::ParallelTied}) {
        for (NormKind norm : {NormKind::Layer, NormKind::Rms}) {
            c.block = block, c.norm = norm;
            for (double dropout : {0.0, 0.2}) { test_variant(c, dropout); }
        }
    }
}

// Along a tensor's gradient the loss's slope is the square of this gradient's norm. Differences of fourth
// order say so, of steps that change the loss by some 0.005, or of gates, which bend, by less. In one row, an
// op that is wrong at a position shows.
static void test_slopes(const char* name, const Config& c, double dropout = 0.0, int document_end = -1) {
    Options o = default_options();
    o.dropout = dropout;
    o.document_end = document_end;
    const Batch batch = random_batch(c, 1, 0);
    RandomModel model(c, o, batch.B);
    accumulate(&model, batch);
    const std::vector<Vector> grads = host_grads(&model);
    double worst = 0.0;
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = model.param_specs[i];
        if (s.layers.empty()) { continue; }
        Vector start;
        double squares = 0.0, largest = 0.0;
        for (int l : s.layers) {
            for (float x : host_param(&model, i, l, true)) { start.push_back(x); }
        }
        for (float g : grads[i]) { squares += (double)g * g, largest = std::max(largest, fabs((double)g)); }
        auto loss = [&](double step) {
            Vector values = start;
            for (size_t k = 0; k < values.size(); k++) { values[k] += (float)(step * grads[i][k]); }
            for (size_t k = 0; k < s.layers.size(); k++) {
                model_set_param(&model, i, s.layers[k], &values[k * s.elems]);
            }
            mean_loss(&model, batch, ClassifierMode::LossAndGrad);      // with the step's dropout
            const auto losses = from_device(&model, model_acts(&model, 0).losses, batch.x.size());
            return std::accumulate(losses.begin(), losses.end(), 0.0) / (double)losses.size();
        };
        const double h = std::min(0.005 / squares, i == PARAM_vegw ? 0.03 / largest : INFINITY);
        const double slope = (loss(-2 * h) - 8 * loss(-h) + 8 * loss(h) - loss(2 * h)) / (12 * h * squares);
        loss(0.0);
        const double off = fabs(slope - 1.0);
        CHECK(off <= (kDeviceIsAsync ? 5e-4 : 1e-4),
              "%s, %s: the loss changes %.6f as fast as its gradient says", name, s.name, slope);
        if (!(off <= worst)) { worst = off; }           // keeps a NaN
    }
    printf("   %s: gradients off their slopes by up to %.1e\n", name, worst);
}

// Everything that decides about the next steps, as bits: what is no float compares as well.
static std::vector<std::vector<uint32_t>> host_state(Model* model) {
    const size_t n = model->layout.state_elems, width = model->options.state_bytes();
    auto words = [&](const void* data, size_t bytes) {
        return from_device(model, (const uint32_t*)data, bytes / sizeof(uint32_t));
    };
    std::vector<std::vector<uint32_t>> all = {words(model->params, model->layout.params_bytes),
                                              words(model->opt.m, n * width),
                                              words(model->opt.v, model->layout.v_elems * width)};
    if (model->opt.master) { all.push_back(words(model->opt.master, n * sizeof(masterX))); }
    return all;
}

// ---- FP8 ----
static bool fp8_runs() {
#ifdef GPT2_CPU
    return true;
#else
    return kLowPrecision && !kFp16 && fp8_error().empty();
#endif
}

static std::vector<Fp8Tensor> fp8_state(Model* model) {
    return from_device(model, model->fp8.tensors, 2 * model->fp8.linears);
}

// bound: on the mean error of the gradients against those without FP8; each may have 1.5 times that. Three
// operands are rounded by 2.6 % each, and the gradients of the first layers have come through many products.
// Scales four times too large, or all gradients in e5m2, are outside; smaller scales change nothing.
static void test_fp8(const Config& c, bool head, double bound) {
    const int B = 8;
    Options o = default_options(), plain = o;
    o.fp8 = true, o.fp8_head = head;
    RandomModel model(c, o, B), other(c, plain, B);
    auto update = [&](double lr) {
        step_update(&model, lr, 0.0);
        return model_read_state(&model);
    };
    accumulate(&model, random_batch(c, B, 0));
    accumulate(&other, random_batch(c, B, 0));
    const std::vector<Vector> want = host_grads(&other);
    check_grads("FP8, first step", &model, want, 0.0);
    DeviceState state = update(0.0);
    CHECK(state.update.skip == SKIP_NO && state.fp8_saturated == 0.0f, "skip %d", state.update.skip);
    const std::vector<Fp8Tensor> scaled = fp8_state(&model);
    for (int i = 0; i < (int)scaled.size(); i++) {
        // not the ends, nor attproj, nor the logits' gradient, whose scale is fixed
        const bool end = c.L > 2 && (i / 8 == 0 || i / 8 == c.L - 1), attproj = i / 2 % 4 == 1;
        const bool cast = i < 8 * c.L ? !end && !attproj : i == 8 * c.L && head;
        CHECK((scaled[i].amax[0] > 0.0f) == cast && scaled[i].scale == fp8_scale(scaled[i].amax[0], 1),
              "tensor %d: amax %g scale %g", i, scaled[i].amax[0], scaled[i].scale);
    }

    // the first step with bytes, twice: its scales are the first step's
    if (c.is_llama()) { model.step = kFp8LlamaBegins; }
    accumulate(&model, random_batch(c, B, 0));
    double errors = 0.0;
    int tensors = 0;
    for (int i = 0; i < NUM_PARAMS; i++) {
        if (model.param_specs[i].layers.empty()) { continue; }
        const double error = relative_error(host_grad(&model, i), want[i]);
        printf("FP8: gradient of %-8s differs by %.4f\n", model.param_specs[i].name, error);
        CHECK(error > 0.0 && error <= 1.5 * bound, "FP8: gradient of %s differs by %g",
              model.param_specs[i].name, error);
        errors += error, tensors++;
    }
    CHECK(errors <= bound * tensors, "FP8: gradients differ by %g in the mean", errors / tensors);
    const std::vector<Vector> first = host_grads(&model);
    accumulate(&model, random_batch(c, B, 0));
    check_grads("FP8, again", &model, first, 0.0);

    // scales that no longer fit: the update is skipped, and the next one is made with scales that do
    const auto before = host_state(&model);
    std::vector<Fp8Tensor> wrong = scaled;
    const int grown = 8 * (c.L > 2) + 6;                    // the input of the first FP8 layer's fcproj
    fp8_set_scale(&wrong[grown], wrong[grown].scale * 64.0f);
    copy_to_device(model.fp8.tensors, wrong.data(), wrong.size() * sizeof(wrong[0]), model.stream);
    accumulate(&model, random_batch(c, B, 0));
    state = update(1e-3);
    CHECK(state.update.skip == SKIP_NOT_FINITE && state.fp8_saturated > kFp8MaxSaturated &&
              host_state(&model) == before, "saturated %g, skip %d", state.fp8_saturated, state.update.skip);
    const Fp8Tensor repaired = fp8_state(&model)[grown];
    CHECK(repaired.scale == fp8_scale(std::max(repaired.amax[0], repaired.amax[1]), kFp8Headroom) &&
              fabsf(repaired.amax[0] / scaled[grown].amax[0] - 1.0f) <= 0.1f, "scale %g", repaired.scale);
    accumulate(&model, random_batch(c, B, 0));
    check_grads("FP8, after a skipped update", &model, want, 1.5 * bound);
    state = update(1e-3);
    CHECK(state.update.skip == SKIP_NO && host_state(&model) != before, "then skip %d", state.update.skip);
}

// The second step, the first with bytes, at each recompute level: gradients, scales and weights to the bit.
static void test_fp8_recompute(const Config& c, double dropout) {
    const int B = kDeviceIsAsync ? 16 : 4;          // a GPU's micro-step: 8 rows, a multiple of 16 tokens
    Options o = default_options();
    o.fp8 = o.fp8_head = true, o.dropout = dropout;
    std::vector<Vector> want;
    std::vector<std::vector<uint32_t>> want_state;
    Vector want_scales;
    for (int recompute : {0, 1, 2, 3}) {
        o.recompute = recompute;
        RandomModel model(c, o, B);
        accumulate(&model, random_batch(c, B, 0));
        step_update(&model, 1e-3, 0.0);
        if (c.is_llama()) { model.step = kFp8LlamaBegins; }
        accumulate(&model, random_batch(c, B, 1), 2);
        const std::vector<Vector> grads = host_grads(&model);
        step_update(&model, 1e-3, 0.0);
        const auto state = host_state(&model);
        Vector scales = {model_read_state(&model).fp8_saturated};
        for (const Fp8Tensor& t : fp8_state(&model)) {
            for (float x : {t.scale, t.amax[0], t.amax[1]}) { scales.push_back(x); }
        }
        if (recompute == 0) { want = grads, want_state = state, want_scales = scales; }
        CHECK(grads == want && state == want_state && scales == want_scales,
              "FP8, C=%d, block %d, dropout %g: -r %d has other bits", c.C, (int)c.block, dropout, recompute);
    }
}

// Tokens that the batch does not have: their rows of wte's gradient are probabilities of 1/50,257 times lnf.
// Without them a model would go on giving such tokens a tenth of all probability.
static void test_fp8_rare_tokens() {
    const Config c = {16, 50257, 50304, 1, 1, 64};
    const int B = 8;
    Options o = default_options(), plain = o;
    o.fp8 = true, o.fp8_head = true;
    RandomModel model(c, o, B), other(c, plain, B);
    for (Model* m : {(Model*)&model, (Model*)&other}) {        // most probabilities around 1e-6
        Vector weight = host_param(m, PARAM_lnfw, 0, true);
        for (float& x : weight) { x *= 5.0f; }
        model_set_param(m, PARAM_lnfw, 0, weight.data());
    }
    const Batch batch = random_batch(c, B, 0);
    accumulate(&other, batch);
    accumulate(&model, batch);
    step_update(&model, 0.0, 0.0);
    accumulate(&model, batch);
    const Vector got = host_grad(&model, PARAM_wte), want = host_grad(&other, PARAM_wte);
    std::vector<bool> rare(c.V, true);
    for (size_t i = 0; i < batch.x.size(); i++) { rare[batch.x[i]] = rare[batch.y[i]] = false; }
    double sum = 0.0, count = 0.0;
    for (int v = 0; v < c.V; v++) {
        auto row = [&](const Vector& x) { return Vector(x.begin() + v * c.C, x.begin() + (v + 1) * c.C); };
        if (rare[v]) { sum += relative_error(row(got), row(want)), count++; }
    }
    printf("FP8: gradients of %.0f rare tokens differ by %.4f in the mean\n", count, sum / count);
    CHECK(sum / count <= 0.15, "FP8: gradients of rare tokens differ by %g in the mean", sum / count);
}

// ---- Muon ----
// Newton-Schulz in plain loops; rounded(x) is what x becomes when it is stored.
static Doubles plain_newton_schulz(Doubles x, int rows, int cols, int steps, double (*rounded)(double)) {
    auto transposed = [](const Doubles& from, int r, int c) {
        Doubles to(from.size());
        for (int i = 0; i < r * c; i++) { to[i % c * r + i / c] = from[i]; }
        return to;
    };
    auto product = [](const Doubles& a, const Doubles& b, int m, int n, int k) {        // (m,k) (k,n)
        Doubles out((size_t)m * n);
        for (int i = 0; i < m; i++) {
            for (int e = 0; e < k; e++) {
                for (int j = 0; j < n; j++) { out[i * n + j] += a[i * k + e] * b[e * n + j]; }
            }
        }
        return out;
    };
    if (rows > cols) {                                  // of the transposed matrix, times sqrt(rows/cols)
        x = plain_newton_schulz(transposed(x, rows, cols), cols, rows, steps, rounded);
        x = transposed(x, cols, rows);
        for (double& value : x) { value *= sqrt((double)rows / cols); }
        return x;
    }
    double squares = 0.0;
    for (double value : x) { squares += value * value; }
    for (double& value : x) { value = squares > 0.0 ? rounded(value / sqrt(squares)) : 0.0; }
    for (int step = 0; step < steps; step++) {
        Doubles gram = product(x, transposed(x, rows, cols), rows, rows, cols);
        for (double& value : gram) { value = rounded(value); }
        Doubles poly = product(gram, gram, rows, rows, rows);
        for (size_t i = 0; i < gram.size(); i++) { poly[i] = rounded(-4.7750 * gram[i] + 2.0315 * poly[i]); }
        const Doubles more = product(poly, x, rows, cols, rows);
        for (size_t i = 0; i < x.size(); i++) { x[i] = rounded(3.4445 * x[i] + more[i]); }
    }
    return x;
}
static double exactly(double x) { return x; }
[[maybe_unused]] static double as_fp32(double x) { return (double)(float)x; }
static double as_bf16(double x) { return (double)bf16_to_float(bf16_round_nearest((float)x)); }

// Two updates of Muon's matrices from the gradients that the model has, beside the formula in double. Where
// the memory is for one layer at a time, the bits are the same.
static void test_muon_updates(const Config& c) {
    const int B = 2, steps = c.C <= 40 ? 5 : 2;
    const double lr = 0.02, decay = 0.5, momentum = 0.9;
    Options o = default_options();
    o.muon = true, o.muon_steps = steps, o.muon_momentum = momentum, o.muon_decay = decay;
    o.weight_decay = 3.0f;                              // is AdamW's
    o.grad_clip = 0.0f;
    RandomModel model(c, o, B);
    std::map<std::pair<int, int>, Doubles> ms;
    for (uint32_t step = 0; step < 2; step++) {
        accumulate(&model, random_batch(c, B, step));
        const std::vector<Vector> grads = host_grads(&model);
        std::map<std::pair<int, int>, Vector> before;
        for (int i = 0; i < NUM_PARAMS; i++) {
            if (model.param_specs[i].kind != Kind::Matrix) { continue; }
            for (int l : model.param_specs[i].layers) {
                before[{i, l}] = host_param(&model, i, l, true);
            }
        }
        step_update(&model, 1e-3, lr);
        for (const auto& it : before) {
            const int i = it.first.first, l = it.first.second;
            const ParamSpec& s = model.param_specs[i];
            const int rows = (int)s.parts[0], cols = (int)s.cols;
            const Vector after = host_param(&model, i, l, true);
            Doubles& m = ms[it.first];
            m.resize(s.elems);
            for (int part = 0; part < (int)s.parts.size(); part++) {
                const size_t size = (size_t)rows * cols, first = part * size;
                Doubles ahead(size);
                for (size_t k = 0; k < size; k++) {
                    const double g = grads[i][l * s.elems + first + k];
                    m[first + k] = momentum * m[first + k] + (1 - momentum) * g;
                    ahead[k] = (1 - momentum) * g + momentum * m[first + k];
                }
                const Doubles want = plain_newton_schulz(ahead, rows, cols, steps, exactly);
                for (double& u : ahead) { u = kLowPrecision ? as_bf16(u) : u; }
                const Doubles plain = kLowPrecision ? plain_newton_schulz(ahead, rows, cols, steps, as_bf16)
                                                    : want;
                double off = 0.0, near = 0.0, along = 0.0, length = 0.0;
                for (size_t k = 0; k < size; k++) {
                    const double got = (it.second[first + k] * (1 - lr * decay) - after[first + k]) / lr;
                    off += (got - want[k]) * (got - want[k]);
                    near += (plain[k] - want[k]) * (plain[k] - want[k]);
                    along += got * want[k];
                    length += want[k] * want[k];
                }
                // 16 bits: small singular values decide how far each rounding comes through
                const double error = sqrt(off / length), allowed = 2 * sqrt(near / length) + 2e-3;
                CHECK(error <= allowed && fabs(along / length - 1) <= (kLowPrecision ? 2e-2 : 2e-3),
                      "%s.%d, part %d, update %u: off by %.2e, allowed %.2e; %.5f times as long", s.name, l,
                      part, step + 1, error, allowed, along / length);
            }
        }
    }
    const Vector together = short_run(c, o, B, 2);
    Options narrow = o;
    narrow.muon_bytes = 1;
    CHECK(same_bits(together, short_run(c, narrow, B, 2)), "one layer at a time has other bits");
    CHECK(same_bits(together, short_run(c, o, B, 2)), "two equal runs differ");
}

// ---- disks and files ----
struct TemporaryFolder {
    std::string name;
    TemporaryFolder() {
        const char* tmp = getenv("TMPDIR");
        name = std::string(tmp ? tmp : "/tmp") + "/test_gpt2_XXXXXX";
        if (!mkdtemp(&name[0])) { die("cannot make a folder '%s': %s", name.c_str(), strerror(errno)); }
    }
    ~TemporaryFolder() {
        CHECK(rmdir(name.c_str()) == 0, "something is left in %s: %s", name.c_str(), strerror(errno));
    }
};

// A job of several ranks, whose watchdog is patient while a rank may wait for a disk.
struct Job {
    Job() { comm_state = new CommState(); }
    ~Job() {
        delete comm_state;
        comm_state = nullptr;
    }
    static bool is_patient() { return comm_state->disk > 0; }
    static bool becomes_patient(CommState* state) {             // within a minute
        for (int i = 0; i < 6000 && state->disk == 0; i++) { usleep(10000); }
        return state->disk > 0;
    }
};

// The disk stalls while rows are read and lines are written: a job of several ranks bears with it.
static void test_stalled_disk(const Config& c) {
    const TemporaryFolder folder;
    const std::string path = folder.name + "/rows.bin";
    int header[256] = {kShardKinds[0].magic, kShardKinds[0].version, 10 * c.maxT};
    const std::vector<uint16_t> tokens(header[2], 1);
    AtomicFile file = atomic_open(path);
    atomic_write(&file, header, sizeof(header));
    atomic_write(&file, tokens.data(), tokens.size() * sizeof(tokens[0]));
    atomic_commit(&file);
    settings.B = 2, settings.T = c.maxT, settings.val_batches = 1, settings.max_steps = "1";
    RandomModel model(c, default_options(), run.B);
    RunData data;
    DataLoader& loader = data.val;
    dataloader_init(&loader, path.c_str(), run.B, run.T, false, 0, c.V);
    static int lines, hasty;                    // written to the logs; of these, in haste
    lines = hasty = 0;
    cookie_io_functions_t writes = {};
    writes.write = [](void*, const char*, size_t bytes) {
        lines++;
        hasty += !Job::is_patient();
        return (ssize_t)bytes;
    };
    Logger logger;
    logger.folder = folder.name;
    logger.main_log = fopencookie(nullptr, "w", writes);
    logger.metrics = fopencookie(nullptr, "w", writes);
    Reports reports = {};
    reports.report = {9, 1};                    // steps, tokens a step; a line after each
    std::vector<DeviceState> slots(Reports::kSlots);
    reports.states = slots.data();
    reports.begun[1] = reports.ended[1] = event_create();
    event_record(reports.ended[1], model.stream);
    const Job job;

    std::atomic<bool> stalled(false), patient(false);
    std::thread disk([&] {
        std::lock_guard<std::mutex> lock(loader.prefetch->worker->mutex);
        stalled = true;
        patient = Job::becomes_patient(comm_state);
    });
    while (!stalled) { usleep(1000); }
    data.bits = {NAN};
    CHECK(validate(&model, &data, &logger, 1), "the validation fails");
    disk.join();
    CHECK(patient, "a job would end while rows are read for validation");
    reports.first = 1, reports.end = 2;         // step 1 waits for its report
    report_step(&reports, &logger, {});
    CHECK(lines == 4 && hasty == 0, "%d lines, %d of them while a job would soon end", lines, hasty);
    CHECK(!Job::is_patient(), "its patience lasts");
    event_destroy(reports.ended[1]);
    logger_free(&logger);
    dataloader_free(&loader);
    unlink(path.c_str());
}

// Saved after the first step while two more go on; another model goes on from there, and both end with the
// same bits. in_parts: no memory can be pinned for all of it.
static void test_checkpoint(const Config& c, const Options& o, bool in_parts) {
    const TemporaryFolder folder;
    const int B = 2;
    RandomModel a(c, o, B);
    one_step(&a, B, 0);
    DeviceState full = model_read_state(&a);     // its windows hold floats that need nine digits
    for (int i = 0; i < kWindow; i++) {
        full.update.losses.values[i] = 1000.0f + rand_normal(1, 0, i);
        full.update.norms.values[i] = 1000.0f + rand_normal(1, 1, i);
    }
    full.update.losses.count = full.update.norms.count = kWindow;
    model_write_state(&a, full);
    const auto then = host_state(&a);
    static Logger logger;
    logger_init(&logger, folder.name.c_str());
    logger_train(&logger, {0, 1, 1, 1, 1, 1, 1});
    Saver saver = {};
    if (in_parts) { saver_pin = [](size_t) -> void* { return nullptr; }; }
    model_saver_init(&saver, &a, &logger, folder.name, true, {2, 0, {}});
    saver_pin = pinned_try;
    CHECK((saver.groups.size() > 2) == in_parts, "%zu groups", saver.groups.size() - 1);

    static CommState* watched;                  // the writer's thread may outlast the job
    static std::atomic<bool> patient, main_log_synced, metrics_synced, in_order;
    main_log_synced = metrics_synced = in_order = false;
    patient = true;
    file_layer.fsync = [](int fd) {
        if (!Job::becomes_patient(watched)) { patient = false; }
        main_log_synced = main_log_synced || fd == fileno(logger.main_log);
        metrics_synced = metrics_synced || fd == fileno(logger.metrics);
        return fsync(fd);
    };
    file_layer.rename = [](const char* from, const char* to) {
        if (strstr(to, "/DONE_")) { in_order = main_log_synced && metrics_synced; }
        return rename(from, to);
    };
    {
        const Job job;
        watched = comm_state;
        model_save(&a, &saver, 1, model_facts(&a));
        saver_hold(saver);
        for (uint32_t step : {1, 2}) { one_step(&a, B, step); }
        saver_finish(&saver);
    }
    file_layer.fsync = fsync;
    file_layer.rename = rename;
    CHECK(in_order, "there is a DONE before the logs are on disk");
    CHECK(patient, "a job would end while its model goes to a slow disk");
    saver_free(&saver);

    std::set<int64_t> bad;
    Checkpoint found = checkpoint_find(folder.name, {1}, &bad);
    CHECK(found.step == 1 && bad.empty(), "found step %lld", (long long)found.step);
    TestModel b(facts_config(found.facts), o, B, c.maxT);
    const std::string error = model_load_state(&b, &found);
    CHECK(error.empty(), "%s", error.c_str());
    CHECK(host_state(&b) == then, "what was loaded is not what was saved");
    for (uint32_t step : {1, 2}) { one_step(&b, B, step); }
    const DeviceState end_a = model_read_state(&a), end_b = model_read_state(&b);
    CHECK(host_state(&a) == host_state(&b), "a resumed run ends with other bits");
    CHECK(memcmp(&end_a.update, &end_b.update, sizeof(UpdateState)) == 0 && end_a.loss == end_b.loss,
          "a resumed run ends in another state");
    checkpoint_remove(folder.name, 1);
    logger_free(&logger);
    for (const char* file : {"/main.log", "/metrics.jsonl", "/run.json"}) {
        unlink((folder.name + file).c_str());
    }
}

// ---- writing ----
// Texts that are written with kept keys and values, past T, three at once: logits against those of whole
// forwards, the device's draws against sample_token's; then the same texts as the trainer writes them.
static void test_writing(const char* name, const Config& c) {
    const int T = c.maxT, count = T + 9, kRow = 1;
    const std::vector<int> prompt = {7, c.V - 1, 0, 250, 7};
    Options o = default_options();
    o.text_rows = 3;
    o.sampling = {0.9f, 20, 0.9f, c.shape().softcap};
    RandomModel model(c, o, 2);
    Decoder d;
    decoder_init(&d, &model);
    std::vector<std::vector<int>> texts(o.text_rows, prompt);
    std::vector<Vector> logits;                 // of one of the texts
    int wrong = 0;
    for (int i = 0, position = T; i < count; i++, position++) {
        if (position == T) { position = decoder_begin(&d, texts, 0, 5u << 24); }
        decoder_step(&d, 0);
        const Acts acts = act_views(model.acts.data, d.step_specs, 0);
        const auto raw = from_device(&model, acts.logits, (size_t)o.text_rows * c.V);
        const Vector all(raw.begin(), raw.end());
        for (int row = 0; row < o.text_rows; row++) {
            const double coin = rand_unit(o.seed, RAND_SAMPLE, (uint32_t)row, (5u << 24) + texts[row].size());
            wrong += d.drawn[row] != sample_token(&all[(size_t)row * c.V], c.V, o.sampling, coin);
            texts[row].push_back(std::min(std::max(d.drawn[row], 0), c.V - 1));
        }
        logits.emplace_back(all.begin() + kRow * c.V, all.begin() + (kRow + 1) * c.V);
    }
    CHECK(wrong == 0, "%s: %d of %d tokens are not sample_token's", name, wrong, count * o.text_rows);
    CHECK(texts[0] != texts[1] && texts[1] != texts[2], "%s: texts of different streams are equal", name);

    std::vector<int> context = prompt;
    double worst = 0.0;
    int other = 0;
    for (int i = 0; i < count; i++) {
        if ((int)context.size() > T) { context.erase(context.begin(), context.end() - T / 2); }
        const int n = (int)context.size();
        model_feed(&model, context.data(), nullptr, 1, n, ClassifierMode::LossOnly);
        Forward all({&model, 1, n}), last({&model, 1, 1});
        model_forward(all);
        Head head = last.head_of();
        head.lnf.data += (n - 1) * c.C;
        last.product(head.logits, head.lnf, head.w);
        const Vector whole = host_logits(&model, 1);
        const double error = relative_error(logits[i], whole);
        if (!(error <= worst)) { worst = error; }
        other += std::max_element(whole.begin(), whole.end()) - whole.begin() !=
                 std::max_element(logits[i].begin(), logits[i].end()) - logits[i].begin();
        context.push_back(texts[kRow][prompt.size() + i]);
    }
    CHECK(worst <= (kFp16 ? 5e-3 : kLowPrecision ? 3e-2 : 1e-5), "%s: logits are off by %.2e", name, worst);
    CHECK(kLowPrecision || other == 0, "%s: %d of %d likeliest tokens are others", name, other, count);
    printf("   %s: logits off by %.1e; %d of %d likeliest tokens are others than a whole forward's\n", name,
           worst, other, count);

    std::vector<std::vector<int>> written(o.text_rows, prompt);
    decoder_write(&d, prompt, count, {}, 0, 5u << 24, [&](int row, int token) {
        written[row].push_back(token);
        return true;
    });
    CHECK(written == texts, "%s: written while the host waits now and then, other texts", name);
    decoder_free(&d);
}

#ifndef GPT2_CPU
// == options that only the CUDA build has ==
static void test_options(const Config& c) {
    const int B = 8, steps = 4;
    const Vector base = short_run(c, default_options(), B, steps);
    auto compare = [&](const char* name, Options o) {
        const int micro_steps = o.grads_bf16 ? 4 : 1;
        const Vector other = short_run(c, o, B, steps, micro_steps);
        for (int i = 0; i < steps; i++) {
            CHECK(fabs(other[i] - base[i]) <= 2e-2, "%s: loss %.6f, default %.6f", name, other[i], base[i]);
        }
        const double error = relative_error(other, base, steps);
        CHECK(error <= 2e-2 && error > 0.0, "%s: parameters differ by %g", name, error);
        o.graphs = false;
        CHECK(same_bits(other, short_run(c, o, B, steps, micro_steps)), "%s: a CUDA graph differs", name);
    };
    Options o = default_options();
    o.grads_bf16 = true;
    compare("bf16 gradients", o);
    o = default_options();
    o.state_bf16 = true;
    compare("bf16 states", o);
    if (!kLowPrecision) { return; }
    o = default_options();
    o.master = false;
    compare("no master weights", o);
}

static void test_bf16_gradients(const Config& c) {
    Options o = default_options();
    RandomModel a(c, o, 2);
    o.grads_bf16 = true;
    RandomModel b(c, o, 2);
    std::vector<Vector> grads[2];
    float norms[2];
    for (Model* model : {(Model*)&a, (Model*)&b}) {
        const bool bf16 = model->options.grads_bf16;
        accumulate(model, random_batch(c, 8, 0), 4);
        grads[bf16] = host_grads(model);
        step_update(model, 1e-3);
        norms[bf16] = model_read_state(model).update.norm;
    }
    for (int i = 0; i < NUM_PARAMS; i++) {
        if (a.param_specs[i].layers.empty()) { continue; }
        const double error = relative_error(grads[1][i], grads[0][i]);
        const bool bf16 = is_2d(a.param_specs[i].kind);
        CHECK(bf16 ? error > 0.0 && error <= 5e-3 : same_bits(grads[1][i], grads[0][i]),
              "gradient of %s differs by %g", a.param_specs[i].name, error);
    }
    CHECK(fabs(norms[1] / norms[0] - 1.0) <= 2e-4, "norm %.7f, of fp32 gradients %.7f", norms[1], norms[0]);
}

// A step is a small part of the gap between bf16 neighbours: rounded to nearest, most weights would never
// move.
static void test_small_steps(const Config& c) {
    Vector moved[2];                            // with master copies, and without
    for (bool without : {false, true}) {
        Options o = default_options();
        o.master = !without;
        RandomModel model(c, o, 8);
        const Vector start = host_params(&model);
        for (int step = 0; step < 20; step++) {
            accumulate(&model, random_batch(c, 8, 0));
            step_update(&model, 1e-5);
        }
        moved[without] = host_params(&model);
        for (size_t i = 0; i < start.size(); i++) { moved[without][i] -= start[i]; }
    }
    double along = 0.0, size = 0.0;
    for (size_t i = 0; i < moved[0].size(); i++) {
        along += (double)moved[0][i] * moved[1][i];
        size += (double)moved[0][i] * moved[0][i];
    }
    // without master copies fp32 is its own
    CHECK(fabs(along / size - 1.0) <= (kLowPrecision ? 0.5 : 0.0), "moved %.3f of the way", along / size);
}

static void test_loss_scale(const Config& c) {
    for (float start : {kFirstLossScale, 16 * kFirstLossScale, 0x1p30f}) {
        const bool overflows = start == 0x1p30f;                // for certain
        Options o = default_options();
        o.loss_scale = start;
        RandomModel model(c, o, 8);
        DeviceState state = model_read_state(&model);
        CHECK(state.update.loss_scale == start, "the scale starts at %g", state.update.loss_scale);
        state.update.good_steps = kLossScaleSteps - 1;
        model_write_state(&model, state);
        one_step(&model, 8, 0);
        state = model_read_state(&model);
        CHECK(state.update.skip == (overflows ? SKIP_NOT_FINITE : SKIP_NO) &&
                  state.update.loss_scale == (overflows ? 0.5f : 2.0f) * start,
              "from %g: skip %d, scale %g", start, state.update.skip, state.update.loss_scale);
    }
}

static void test_scratch() {
    for (int C : {8, 40, 64, 72, 80, 128, 136, 168, 384, 768, 1280, 1600}) {
        for (int N : {1, 4096, 8192, 16384, 65536}) {
            const Config shape = {N, 256, 256, 2, 1, C};
            const std::vector<ParamSpec> specs = param_table(shape);
            Options o = default_options();
            o.B = 1, o.T = N;
            const size_t bytes = model_scratch_bytes(shape, o);
            o.grads_bf16 = true;
            const size_t bf16 = model_scratch_bytes(shape, o);
            const size_t dwte = specs[PARAM_wte].elems * sizeof(float);     // behind it: both parts of dwte
            CHECK(bf16 >= bytes + dwte && bf16 >= dwte + (size_t)C * C * 16, "C=%d N=%d: bf16 gradients", C,
                  N);
            for (size_t op : {encoder_backward_scratch_bytes(1, N, C), norm_backward_scratch_bytes(N, C, 3),
                              bias_backward_scratch_bytes(N, 3 * C),
                              activate_backward_scratch_bytes(N, 4 * C),
                              attention_backward_scratch_bytes(1, N, 1)}) {
                CHECK(bytes >= op, "C=%d N=%d: %zu bytes, an op takes %zu", C, N, bytes, op);
            }
        }
    }
    // a table of value embeddings that is wider than the residual stream; in bf16 it is summed in scratch
    const Config valued = descriptor_config("llama:L2,NH16,NKV16,HS128,C64,F64,T65536,V256,value_embed");
    for (bool bf16 : {false, true}) {
        Options o = default_options();
        o.B = 1, o.T = 65536, o.grads_bf16 = bf16;
        const size_t sums = (64 + 2048) * 256 * sizeof(float);
        const size_t bytes = model_scratch_bytes(valued, o);
        const size_t slots = encoder_backward_scratch_bytes(1, o.T, 2048);
        CHECK(bytes >= (bf16 ? sums : 0) + slots && bytes >= value_embed_scratch_bytes(o.T, 16),
              "value embeddings, bf16 %d: %zu bytes", bf16, bytes);
    }
    // biases of heads that are wider than the residual stream
    const Config wide = descriptor_config("llama:L1,NH16,NKV16,HS128,C64,F64,T65536,V256,qkv_bias");
    for (int N : {16, 4096, 65536}) {
        Options o = default_options();
        o.B = 1, o.T = N, o.fp8 = true;
        const size_t bytes = model_scratch_bytes(wide, o);
        CHECK(bytes >= bias_backward_scratch_bytes(N, 6144) && bytes >= fp8_cast_scratch_bytes(N, 6144),
              "N=%d: %zu bytes", N, bytes);
    }
}

static void test_large_logits() {
    const Config wide = {1024, 50257, 50304, 1, 1, 64};
    const int B = 44;                           // 45056 * 50304 = 2.27e9
    Options o = default_options();
    o.B = B, o.T = 1024;
    if (memory_total(model_memory_plan(wide, o)) > device_init().memory_free) {
        SKIP(1, "not enough GPU memory");
        return;
    }
    TestModel model(wide, o, B, 1024);
    model_init_random(&model, 1);
    const Batch batch = random_batch(wide, B, 3);
    auto losses = [&] { return from_device(&model, model_acts(&model, 0).losses, (size_t)B * 1024); };
    accumulate(&model, batch);
    const Vector all = losses();
    const std::vector<Vector> whole = host_grads(&model);
    accumulate(&model, batch, 2);               // the first half of `losses` is then the second half's
    const Vector half = losses();
    const double error = relative_error(Vector(half.begin(), half.begin() + half.size() / 2),
                                        Vector(all.begin() + all.size() / 2, all.end()));
    CHECK(error <= (kLowPrecision ? 1e-3 : 1e-6), "losses of the second half differ by %g", error);
    check_grads("logits beyond 2^31", &model, whole, kLowPrecision ? 2e-2 : 1e-5);
}

// == kernels ==
// Every op against its twin in double, from inputs rounded to the kernel's types. Outputs are poisoned with
// NaN first, stand between guards, and are computed twice: the bits must agree.
static bool small_shapes = false;                   // --small: for the sanitizers

constexpr size_t kGuardBytes = 4096;
constexpr unsigned char kGuard = 0xA5, kPoison = 0xFF;      // 0xFF..: NaN in every type

// Dithered: bf16 gradients; Master: the lower halves of masters; Exact: no numbers.
enum class Type { Fp32, Fp16, Bf16, Dithered, Master, Exact };
template <class T> static Type type_of() {
    if (std::is_same<T, float>::value) { return Type::Fp32; }
    return std::is_same<T, floatX>::value && kFp16 ? Type::Fp16 : Type::Bf16;
}
static double round_to(Type type, double x) {
#ifdef ENABLE_FP16
    if (type == Type::Fp16) { return (double)__half2float(__float2half_rn((float)x)); }
#endif
    return type == Type::Fp32 || type == Type::Master ? (double)(float)x : as_bf16(x);
}

// How a tensor starts, and the floor of the error that an output is allowed (Buffer::expect).
struct Start {
    size_t n;
    double scale, mean;             // of normal numbers; or these values
    const Doubles* values;
    bool poisoned, is_output;
    double floor;
};
static Start In(size_t n, double scale = 1.0, double mean = 0.0) {
    return {n, scale, mean, nullptr, false, false, 0.0};
}
static Start Out(size_t n, double floor = 2e-6) { return {n, 0.0, 0.0, nullptr, true, true, floor}; }
static Start InOut(size_t n, double scale = 1.0, double floor = 2e-6) {
    return {n, scale, 0.0, nullptr, false, true, floor};
}
static Start Of(const Doubles& values) { return {values.size(), 0.0, 0.0, &values, false, false, 0.0}; }
static Start InOut(const Doubles& values, double floor) {
    return {values.size(), 0.0, 0.0, &values, false, true, floor};
}
static Start Scratch(size_t n) { return {n, 0.0, 0.0, nullptr, true, false, 0.0}; }

// A tensor of an op: on the device between guards, and for the twin in double.
struct Buffer {
    std::string title, name;
    Type type;
    bool is_output, is_scratch;
    double floor, factor = 2.0;
    Doubles twin;
    std::vector<unsigned char> initial;             // with the guards
    unsigned char* memory;
    RoundKey key = {};                              // of a Dithered one, and its first element's number
    size_t first = 0;
    const Buffer* upper = nullptr;                  // of a Master: the weights

    Buffer(const std::string& title, const char* name, Type type, const Start& start, const void* data,
           size_t bytes)
        : title(title), name(name), type(type), is_output(start.is_output),
          is_scratch(start.poisoned && !start.is_output), floor(start.floor) {
        initial.assign(bytes + 2 * kGuardBytes, kGuard);
        if (start.poisoned) { memset(&initial[kGuardBytes], kPoison, bytes); }
        else { memcpy(&initial[kGuardBytes], data, bytes); }
        memory = (unsigned char*)device_malloc(initial.size(), name);
        reset();
    }
    ~Buffer() { cudaCheck(cudaFree(memory)); }
    Buffer(const Buffer&) = delete;

    void reset() { cudaCheck(cudaMemcpy(memory, initial.data(), initial.size(), cudaMemcpyHostToDevice)); }
    template <class T> std::vector<T> read() const {        // checks the guards, returns what is between
        std::vector<unsigned char> all(initial.size());
        cudaCheck(cudaMemcpy(all.data(), memory, all.size(), cudaMemcpyDeviceToHost));
        bool intact = true;
        for (size_t i = 0; i < kGuardBytes; i++) {
            intact = intact && all[i] == kGuard && all[all.size() - 1 - i] == kGuard;
        }
        CHECK(intact, "%s %s: written outside the tensor", title.c_str(), name.c_str());
        const T* data = (const T*)&all[kGuardBytes];
        return std::vector<T>(data, data + (all.size() - 2 * kGuardBytes) / sizeof(T));
    }
    template <class T> Doubles read_as() const {
        Doubles values;
        for (const T& x : read<T>()) { values.push_back((double)(float)x); }
        return values;
    }
    Doubles values() const {                        // what the device holds, as its readers see it
        if (type == Type::Fp32) { return read_as<float>(); }
        if (type == Type::Fp16) { return read_as<floatX>(); }
        if (type == Type::Bf16) { return read_as<__nv_bfloat16>(); }
        Doubles values;
        if (type == Type::Master) {
            const auto weights = upper->read<uint16_t>(), lows = read<uint16_t>();
            for (size_t i = 0; i < lows.size(); i++) { values.push_back(master_join(weights[i], lows[i])); }
            return values;
        }
        for (uint16_t x : read<uint16_t>()) {
            values.push_back(bf16_decode_dithered(x, round_bits16(key, first + values.size())));
        }
        return values;
    }

    // Allowed: `factor` times the error of rounding the twin's values once, plus `floor` for fp32 arithmetic;
    // per element against its size + rms. Dither moves what is a bf16 number already as much as any other: by
    // gap/sqrt(12).
    void expect() const {
        if (type == Type::Exact) {
            const auto got = read<unsigned char>();
            CHECK(memcmp(got.data(), twin.data(), got.size()) == 0, "%s %s: not the twin's", title.c_str(),
                  name.c_str());
            return;
        }
        const bool fp32 = type == Type::Fp32 || type == Type::Master;
        const double eps = fp32 ? 0.0 : type == Type::Fp16 ? 1.0 / 2048 : 1.0 / 256;
        const Doubles got = values();
        double distance = 0.0, rounding = 0.0, size = 0.0, worst = 0.0;
        for (double w : twin) {
            size += w * w;
            const double gap = w == 0.0 ? 0.0 : ldexp(1.0, ilogb(w) - 7);
            const double r = type == Type::Dithered ? gap / sqrt(12.0) : round_to(type, w) - w;
            rounding += r * r;
        }
        const double rms = sqrt(size / (double)twin.size());
        for (size_t i = 0; i < twin.size(); i++) {
            const double d = got[i] - twin[i];
            distance += d * d;
            const double relative = fabs(d) / ((fabs(twin[i]) + rms) * (factor * eps + 50 * floor) + 1e-30);
            if (!(relative <= worst)) { worst = relative; }     // keeps a NaN
        }
        const double error = sqrt(distance), allowed = factor * sqrt(rounding) + floor * sqrt(size) + 1e-30;
        CHECK(got.size() == twin.size() && error <= allowed && worst <= 1.0,
              "%s %s: |d| %.3g, allowed %.3g (|x| %.3g); worst element at %.2f of its bound", title.c_str(),
              name.c_str(), error, allowed, sqrt(size), worst);
    }
    // Within twice the error (norm and worst element) of a plain version of the op in the kernel's types,
    // both against the twin, plus `floor`.
    void expect_as_good_as(const Doubles& plain) const {
        const Doubles got = values();
        double error = 0.0, plain_error = 0.0, worst = 0.0, plain_worst = 0.0, size = 0.0, largest = 0.0;
        for (size_t i = 0; i < twin.size(); i++) {
            const double d = fabs(got[i] - twin[i]), r = fabs(plain[i] - twin[i]);
            error += d * d;
            plain_error += r * r;
            size += twin[i] * twin[i];
            if (!(d <= worst)) { worst = d; }       // keeps a NaN
            plain_worst = std::max(plain_worst, r);
            largest = std::max(largest, fabs(twin[i]));
        }
        const double allowed = 2.0 * sqrt(plain_error) + floor * sqrt(size),
                     worst_allowed = 2.0 * plain_worst + floor * largest;
        CHECK(sqrt(error) <= allowed && worst <= worst_allowed,
              "%s %s: |d| %.3g, allowed %.3g; worst element %.3g, allowed %.3g", title.c_str(), name.c_str(),
              sqrt(error), allowed, worst, worst_allowed);
    }
};

// One case: an op at one shape. Its tensors live until the case ends.
struct Case {
    std::string title;
    std::vector<std::unique_ptr<Buffer>> buffers;
    uint32_t next_id = 0;

    explicit Case(std::string text) : title(std::move(text)) {}
    Case(const Case&) = delete;

    Buffer* find(const std::string& name) const {
        for (const auto& b : buffers) { if (b->name == name) { return b.get(); } }
        return nullptr;
    }
    Buffer& operator[](const char* name) const {
        Buffer* b = find(name);
        if (!b) { die("%s: there is no tensor '%s'", title.c_str(), name); }
        return *b;
    }
    Buffer* add(const char* name, Type type, const Start& start, const void* data, size_t bytes,
                Doubles twin) {
        buffers.emplace_back(new Buffer(title, name, type, start, data, bytes));
        buffers.back()->twin = std::move(twin);
        return buffers.back().get();
    }
    Doubles random(size_t n, double scale = 1.0, double mean = 0.0) {
        Doubles values(n);
        const uint32_t id = next_id++;
        #pragma omp parallel for
        for (size_t i = 0; i < n; i += 4) {
            float z[4];
            rand_normal4(z, 5, id, i / 4);
            for (size_t k = i; k < n && k < i + 4; k++) { values[k] = mean + scale * z[k - i]; }
        }
        return values;
    }
    Doubles start_values(const Start& start) {
        return start.values ? *start.values : start.poisoned ? Doubles(start.n)
                                                             : random(start.n, start.scale, start.mean);
    }
    // Of type T; its values become what the device holds: rounded.
    template <class T> Buffer* tensor(const char* name, const Start& start) {
        if (Buffer* b = find(name)) { return b; }
        Doubles values = start_values(start);
        std::vector<T> stored;
        for (double& x : values) {
            x = round_to(type_of<T>(), x);
            stored.push_back((T)(float)x);
        }
        return add(name, type_of<T>(), start, stored.data(), stored.size() * sizeof(T), std::move(values));
    }
    // Master copies. In BF16 builds they are halves, and `weights`, already there, become the others.
    Buffer* master(const char* name, const Start& start, Buffer* weights) {
        if (Buffer* b = find(name)) { return b; }
        if (sizeof(masterX) != 2) { return tensor<float>(name, start); }
        Doubles values = start_values(start);
        std::vector<uint16_t> lows(values.size());
        for (size_t i = 0; i < lows.size(); i++) {
            values[i] = (double)(float)values[i];
            master_split((float)values[i], (uint16_t*)&weights->initial[kGuardBytes] + i, &lows[i]);
        }
        weights->reset();
        Buffer* b = add(name, Type::Master, start, lows.data(), 2 * lows.size(), std::move(values));
        b->upper = weights;
        return b;
    }
    // m, v: a bf16 one is rounded stochastically, which the twin does not do.
    Buffer* state(const char* name, const Start& start, bool bf16) {
        if (!bf16) { return tensor<float>(name, start); }
        Buffer* b = tensor<__nv_bfloat16>(name, start);
        b->factor = 2.5;
        return b;
    }
    // Gradients as the micro-step before this key's stored them; the values become what their readers see.
    Buffer* grad(const char* name, const Start& start, bool bf16, const RoundKey& key) {
        if (Buffer* b = find(name)) { return b; }
        if (!bf16) { return tensor<float>(name, start); }
        const size_t first = 40;
        const RoundKey before = {key.seed, key.step, key.micro - 1, key.tensor};
        Doubles values = start_values(start);
        std::vector<uint16_t> stored;
        for (double& x : values) {
            const uint32_t draw = round_bits16(before, first + stored.size());
            stored.push_back(bf16_encode_dithered((float)x, draw));
            x = bf16_decode_dithered(stored.back(), draw);
        }
        Buffer* b = add(name, Type::Dithered, start, stored.data(), 2 * stored.size(), std::move(values));
        b->key = key, b->first = first;
        return b;
    }
    template <class T>
    Buffer* exact(const char* name, const std::vector<T>& values, bool poisoned, bool is_output) {
        if (Buffer* b = find(name)) { return b; }
        const size_t bytes = values.size() * sizeof(T);
        Doubles twin(bytes / sizeof(double) + 1);
        memcpy(twin.data(), values.data(), bytes);
        const Start start = {values.size(), 0.0, 0.0, nullptr, poisoned, is_output, 0.0};
        return add(name, Type::Exact, start, values.data(), bytes, std::move(twin));
    }

    void expect() const {                           // of all outputs
        for (const auto& b : buffers) { if (b->is_output) { b->expect(); } }
    }
    void take(const char* name) const {             // the twin goes on from what the device has stored
        Buffer& b = (*this)[name];
        if (b.is_output) { b.expect(); }
        b.is_output = false;
        b.twin = b.values();
    }
};

// Who runs an op and what its arguments point to: the device, or the twin. A tensor is made where it is asked
// for first; at.x("inp", In(n)) is of the ops' type X, at.s("mean", Out(N)) of their S.
static const RoundKey kGradKey = {7, 3, 1, kRoundGrads};
template <class X, class S> struct Side {
    static constexpr bool is_twin = std::is_same<X, double>::value;
    Case* k;

    template <class T> T* pointer(const Buffer* b) const {
        return is_twin ? (T*)b->twin.data() : (T*)(b->memory + kGuardBytes);
    }
    X* x(const char* name, const Start& start) const { return pointer<X>(k->tensor<floatX>(name, start)); }
    S* s(const char* name, const Start& start) const { return pointer<S>(k->tensor<float>(name, start)); }
    auto* master(const char* name, const Start& start, const char* weights) const {
        return pointer<typename MasterValue<X, S>::type>(k->master(name, start, &(*k)[weights]));
    }
    StateOf<S> state(const char* name, const Start& start, bool bf16) const {
        return {pointer<S>(k->state(name, start, bf16)), bf16 && !is_twin};
    }
    auto* muon(const char* name, const Start& start) const {
        return pointer<typename MuonValue<X>::type>(k->tensor<muonX>(name, start));
    }
    template <class T>
    T* exact(const char* name, const std::vector<T>& values, bool is_output = false) const {
        return pointer<T>(k->exact(name, values, false, is_output));
    }
    template <class T> T* exact_out(const char* name, const std::vector<T>& values) const {     // poisoned
        return pointer<T>(k->exact(name, values, true, true));
    }
    template <class T> T* scratch(const char* name, const std::vector<T>& values) const {       // poisoned
        return pointer<T>(k->exact(name, values, true, false));
    }
    // Poisoned where the op is to store, not add.
    GradOf<S> grad(const char* name, Start start, Accumulate acc, bool bf16) const {
        start.poisoned = acc == Accumulate::No, start.is_output = true, start.floor = 1e-5;
        const Buffer* b = k->grad(name, start, bf16, kGradKey);
        if (is_twin) { return {pointer<S>(b), acc}; }
        return {pointer<S>(b), acc, bf16, b->key, b->first};
    }
    StoredGrads stored(const char* name, size_t n, bool bf16) const {
        const Buffer* b = k->grad(name, In(n), bf16, kGradKey);
        RoundKey key = b->key;
        key.micro--;
        if (is_twin) { return {.data = pointer<S>(b)}; }
        return {pointer<S>(b), bf16, key, b->first};
    }
};
typedef Side<floatX, float> OnDevice;
typedef Side<double, double> Twin;

#define X(name, Args)                                                  \
    [[maybe_unused]] static void call(const Args& a) { name(a, 0); }   \
    [[maybe_unused]] static void call(const Args##Of<double, double>& a) { name##_cpu<double>(a, 0); }
MODEL_OPS(X)
#undef X
// op<ActivateOf>(at, {at.x("out", Out(n)), at.x("inp", In(n)), N, F, mlp}) runs the op on the device, or its
// twin.
template <template <class, class> class Args, class X, class S>
static void op(const Side<X, S>&, const Args<X, S>& a) { call(a); }
// For those whose arguments are filled in one by one, and then called.
template <template <class, class> class Args, class X, class S> static Args<X, S> args(const Side<X, S>&) {
    return {};
}

// Runs ops on the device twice, from the same start. They ask for all their tensors the first time.
template <class Ops> static void repeat(Case& k, Ops ops) {
    std::vector<std::vector<unsigned char>> first;
    for (bool again : {false, true}) {
        for (auto& b : k.buffers) { b->reset(); }
        ops(OnDevice{&k});
        cudaCheck(cudaDeviceSynchronize());
        for (size_t i = 0; i < k.buffers.size(); i++) {
            const Buffer& b = *k.buffers[i];
            const auto bytes = b.read<unsigned char>();
            if (!again) { first.push_back(bytes); continue; }
            CHECK(b.is_scratch || first[i] == bytes, "%s %s: two runs differ", k.title.c_str(),
                  b.name.c_str());
        }
    }
}
// Then their twins. ops gets the side.
template <class Ops> static void compute(Case& k, Ops ops) {
    repeat(k, ops);
    ops(Twin{&k});
}
template <class Ops> static void check(Case& k, Ops ops) {
    compute(k, ops);
    k.expect();
}

struct GradForm { Accumulate acc; bool bf16; };
static const GradForm kGradForms[] = {{Accumulate::No, false}, {Accumulate::No, true},
                                      {Accumulate::Yes, false}, {Accumulate::Yes, true}};
static const Accumulate kBothAccumulate[] = {Accumulate::No, Accumulate::Yes};

static std::vector<int> random_tokens(int n, int V, uint32_t id) {
    std::vector<int> tokens(n);
    for (int i = 0; i < n; i++) {
        const uint32_t r = rand_u32(6, RAND_SAMPLE, id, (uint64_t)i);
        // Half of them common: split buckets
        tokens[i] = (int)(r % 2 == 0 ? r / 2 % 3 : r / 2 % (uint32_t)V);
    }
    return tokens;
}

static void test_encoder(int B, int T, int C, int V, int maxT) {
    const std::vector<int> tokens = random_tokens(B * T, V, 1);
    Case forward(format("encoder_forward B=%d T=%d C=%d", B, T, C));
    check(forward, [&](auto at) {
        op<EncoderForwardOf>(at, {at.x("out", Out(B * T * C)), at.exact("tokens", tokens),
                                at.x("wte", In(V * C)), at.x("wpe", In(maxT * C)), B, T, C});
    });
    std::vector<int> order(B * T);
    std::vector<int4> segments(max_bucket_segments(B * T)), splits(max_bucket_splits(B * T) + 1);
    TokenBuckets sorted = {};
    build_token_buckets(&sorted, order.data(), segments.data(), splits.data(), tokens.data(), B * T, V);
    for (const GradForm& is : kGradForms) {
        Case k(format("encoder_backward B=%d T=%d C=%d acc=%d bf16=%d", B, T, C, (int)is.acc, is.bf16));
        Doubles old = k.random(maxT * C);           // the first micro-step left zeros in dwpe's other rows
        for (size_t i = (size_t)T * C; i < old.size(); i++) { old[i] = 0.0; }
        check(k, [&](auto at) {
            const TokenBuckets buckets = {at.exact("order", order), at.exact("segments", segments),
                                          at.exact("splits", splits), sorted.num_segments, sorted.num_splits};
            op<EncoderBackwardOf>(at, {at.grad("dwte", In(V * C), Accumulate::Yes, false),
                                     at.grad("dwpe", Of(old), is.acc, is.bf16),
                                     at.s("slots", Scratch(encoder_backward_scratch_bytes(B, T, C) / 4 + 1)),
                                     at.x("dout", In(B * T * C)), buckets, B, T, maxT, C});
        });
    }
    Case apart(format("encoder_backward of parts of rows, B=%d T=%d C=%d", B, T, C));
    check(apart, [&](auto at) {
        auto a = args<EncoderBackwardOf>(at);
        a.dwte = at.grad("dwte", In(V * C), Accumulate::Yes, false), a.stride = 3 * C;
        a.scratch = at.s("slots", Scratch(encoder_backward_scratch_bytes(B, T, C) / 4 + 1));
        a.dout = at.x("dout", In(B * T * a.stride)) + C;
        a.buckets = {at.exact("order", order), at.exact("segments", segments), at.exact("splits", splits),
                     sorted.num_segments, sorted.num_splits};
        a.B = B, a.T = T, a.maxT = maxT, a.C = C;
        call(a);
    });
}

// starts: nothing comes before the branches.
struct NormCase { NormKind kind; int norms, branches; bool drops, starts, weighted = true; };

static std::string norm_title(const char* op, const NormCase& is, int N, int C) {
    return format("%s N=%d C=%d %s norms=%d branches=%d drops=%d starts=%d weighted=%d", op, N, C,
                  is.kind == NormKind::Rms ? "rms" : "layer", is.norms, is.branches, is.drops, is.starts,
                  is.weighted);
}
static Dropout norm_dropout(const NormCase& is, int branch) {
    return dropout_of(is.drops ? 0.2 : 0.0, {1337, 4, 7 + (uint32_t)branch}, 5000000000ull);
}
static const char* const kNormNames[2][8] = {
    {"y0", "dout0", "weight0", "bias0", "dweight0", "dbias0", "branch0", "branch_bias0"},
    {"y1", "dout1", "weight1", "bias1", "dweight1", "dbias1", "branch1", "branch_bias1"}};

// Bytes of a kernel's fp32 numbers, which are not quite the twin's: it may round to the neighbour.
static void expect_bytes(const Case& k, const char* name, Fp8Format format) {
    const Fp8Grid grid = fp8_grid(format);
    const std::vector<uint8_t> got = k[name].read<uint8_t>();
    const uint8_t* want = (const uint8_t*)k[name].twin.data();
    size_t wrong = 0, unlike = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double x = fp8_decode(got[i], format), y = fp8_decode(want[i], format);
        unlike += got[i] != want[i] && x != y;
        wrong += !(fabs(x - y) <= std::max(fabs(y) / ((1 << grid.mantissa) - 1), (double)grid.step));
    }
    CHECK(wrong == 0 && unlike <= 1 + got.size() / 500, "%s: %zu wrong, %zu rounded otherwise",
          k.title.c_str(), wrong, unlike);
}

static void expect_stats(const Case& k, const char* name) {
    const Fp8Stats got = k[name].read<Fp8Stats>()[0], &want = *(const Fp8Stats*)k[name].twin.data();
    const float amax = float_of(got.amax);
    const long long saturated = (long long)got.saturated, expected = (long long)want.saturated;
    CHECK(fabsf(amax / float_of(want.amax) - 1.0f) <= 1e-3f && got.elements == want.elements &&
              llabs(saturated - expected) <= 2, "%s %s: amax %g, %lld saturated, not %lld", k.title.c_str(),
          name, amax, saturated, expected);
}

// fp8: the rows are bytes.
static void test_norm_forward(const NormCase& is, int N, int C, bool fp8 = false) {
    const bool layer = is.kind == NormKind::Layer;
    const int n = N * C;
    Case k(norm_title("norm_forward", is, N, C) + (fp8 ? " fp8" : ""));
    const char *const kBytes[] = {"bytes0", "bytes1"}, *const kStats[] = {"stats0", "stats1"};
    std::vector<Fp8Tensor> tensor(1);
    fp8_set_scale(&tensor[0], 128.0f);              // 448/128 = 3.5: some saturate
    auto forward = [&](auto at, bool is_added) {
        auto a = args<NormForwardOf>(at);
        for (int i = 0; i < is.norms; i++) {
            const auto& name = kNormNames[i];
            a.y[i] = {fp8 ? nullptr : at.x(name[0], Out(n)),
                      is.weighted ? at.s(name[2], In(C, 0.3, 1.0)) : nullptr,
                      layer ? at.s(name[3], In(C)) : nullptr};
            if (!fp8) { continue; }
            a.y[i].fp8 = at.exact(kBytes[i], std::vector<uint8_t>(n, 0xFF));
            a.y[i].tensor = at.exact("tensor", tensor);
            a.y[i].stats = at.exact(kStats[i], std::vector<Fp8Stats>(1));
        }
        a.mean = layer ? at.s("mean", Out(N)) : nullptr, a.rstd = at.s("rstd", Out(N));
        a.inp = is.starts ? nullptr : at.x("inp", In(n, 1.0, 0.5));
        if (is.branches > 0) {
            auto* sum = at.x("sum", Out(n));
            if (is_added) { a.inp = sum; }
            else { a.sum = sum; }
        }
        for (int i = 0; i < is.branches && !is_added; i++) {
            a.branch[i] = at.x(kNormNames[i][6], In(n, 1.0, 0.1));     // a mean of zero has no digits
            a.dropout[i] = norm_dropout(is, i);
        }
        a.kind = is.kind, a.N = N, a.C = C;
        if (!is.weighted) { a.eps = 0.1; }
        call(a);
    };
    compute(k, [&](auto at) { forward(at, false); });
    if (is.branches > 0) {                          // what is normalised is the sum as rounded
        k.take("sum");
        for (int i = 0; i < is.norms && fp8; i++) { *(Fp8Stats*)k[kStats[i]].twin.data() = {}; }
        forward(Twin{&k}, true);
    }
    k.expect();
    for (int i = 0; i < is.norms && fp8; i++) {
        expect_bytes(k, kBytes[i], Fp8Format::E4m3);
        expect_stats(k, kStats[i]);
    }
}

// bf16: of the vectors' gradients; sums: the branches' biases want theirs.
static void test_norm_backward(const NormCase& is, int N, int C, Accumulate acc, bool bf16, bool sums) {
    const bool layer = is.kind == NormKind::Layer;
    const int n = N * C, rows = 2 * is.norms + (is.branches == 2 ? 2 : 1);
    Case k(norm_title("norm_backward", is, N, C) + format(" acc=%d bf16=%d sums=%d", (int)acc, bf16, sums));
    compute(k, [&](auto at) {
        const Twin twin = {&k};
        auto stats = args<NormForwardOf>(twin);       // mean and rstd of each row, known to both sides
        Doubles y(n), mean(N), rstd(N);
        auto a = args<NormBackwardOf>(at);
        a.inp = at.x("inp", In(n, 1.0, 0.5));
        for (int i = 0; i < is.norms; i++) {
            const auto& name = kNormNames[i];
            a.y[i] = {at.x(name[1], In(n)), nullptr, {}, {}};
            if (is.weighted) {
                a.y[i].weight = at.s(name[2], In(C, 0.3, 1.0));
                a.y[i].dweight = at.grad(name[4], In(C), acc, bf16);
            }
            if (layer) { a.y[i].dbias = at.grad(name[5], In(C), acc, bf16); }
        }
        for (int i = 0; i < is.branches; i++) {
            const auto& name = kNormNames[i];
            a.branch[i] = {is.drops ? at.x(name[6], Out(n)) : nullptr, norm_dropout(is, i), {}};
            // its twin's: below
            if (sums && !at.is_twin) { a.branch[i].dbias = at.grad(name[7], In(C), acc, bf16); }
        }
        stats.y[0] = {y.data(), nullptr, nullptr};
        stats.mean = mean.data(), stats.rstd = rstd.data(), stats.inp = k["inp"].twin.data();
        stats.kind = is.kind, stats.N = N, stats.C = C;
        norm_forward_cpu<double>(stats, 0);
        a.mean = layer ? at.s("mean", Of(mean)) : nullptr, a.rstd = at.s("rstd", Of(rstd));
        a.dresidual = at.x("dresidual", acc == Accumulate::Yes ? InOut(n) : Out(n));
        a.scratch = at.s("scratch", Scratch(norm_backward_scratch_bytes(N, C, rows) / 4));
        a.dresidual_acc = acc, a.kind = is.kind, a.N = N, a.C = C;
        call(a);
    });
    for (int i = 0; i < is.branches && sums; i++) {         // of the values as stored
        const char* summed = is.drops ? kNormNames[i][6] : "dresidual";
        const Twin at = {&k};
        k.take(summed);
        op<BiasBackwardOf>(at, {at.grad(kNormNames[i][7], In(C), acc, bf16), nullptr, k[summed].twin.data(),
                                N, C});
    }
    k.expect();
}

// Every member of the family.
static void test_norm(int N, int C) {
    for (NormKind kind : {NormKind::Layer, NormKind::Rms}) {
        for (int norms : {1, 2}) {
            for (int branches : {0, 1, 2}) {
                for (int i = 0; i < (branches == 0 ? 1 : 4); i++) {
                    const NormCase is = {kind, norms, branches, i % 2 == 1, i / 2 == 1};
                    test_norm_forward(is, N, C);
                    if (is.starts) { continue; }
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
    for (int i = 0; i < 6; i++) {                   // without weights
        const NormCase is = {NormKind::Rms, 1 + i % 2, i / 2, i == 2, false, false};
        test_norm_forward(is, N, C);
        for (Accumulate acc : kBothAccumulate) { test_norm_backward(is, N, C, acc, false, true); }
    }
}

// Each of the kernel's forms.
static void test_fp8_norm(int N, int C) {
    test_norm_forward({NormKind::Layer, 1, 0, false, false}, N, C, true);
    test_norm_forward({NormKind::Rms, 2, 2, true, false}, N, C, true);
    test_norm_forward({NormKind::Rms, 1, 0, false, false, false}, N, C, true);
}

static void test_matmul(int N, int C, int OC) {
    for (int mode = 0; mode < 3; mode++) {              // plain; bias; bias + residual
        Case k(format("matmul_forward N=%d C=%d OC=%d mode=%d", N, C, OC, mode));
        check(k, [&](auto at) {
            op<MatmulForwardOf>(at, {at.x("out", Out(N * OC, 5e-6)), at.x("inp", In(N * C)),
                                   at.x("weight", In(OC * C, 1.0 / sqrt(C))),
                                   mode >= 1 ? at.x("bias", In(OC)) : nullptr,
                                   mode == 2 ? at.x("residual", In(N * OC)) : nullptr, nullptr, N, C, OC});
        });
    }
    for (bool added : {false, true}) {                  // a residual
        Case k(format("matmul_backward_input N=%d C=%d OC=%d residual=%d", N, C, OC, added));
        check(k, [&](auto at) {
            op<MatmulBackwardInputOf>(at, {at.x("dinp", Out(N * C, 5e-6)), at.x("dout", In(N * OC)),
                                         at.x("weight", In(OC * C, 1.0 / sqrt(OC))),
                                         added ? at.x("residual", In(N * C)) : nullptr, nullptr, N, C, OC});
        });
    }
    for (const GradForm& is : kGradForms) {
        Case k(format("matmul_backward_weight, bias_backward N=%d C=%d OC=%d acc=%d bf16=%d", N, C, OC,
                      (int)is.acc, is.bf16));
        check(k, [&](auto at) {
            auto* dout = at.x("dout", In(N * OC));
            op<MatmulBackwardWeightOf>(at, {at.grad("dweight", In(OC * C, sqrt(N)), is.acc, is.bf16),
                                          at.s("scratch", Scratch(OC * C)), dout, at.x("inp", In(N * C)),
                                          N, C, OC});
            for (bool of_qkv : {false, true}) {
                if (of_qkv && OC % 24 > 0) { continue; }                // the thirds are whole vectors
                op<BiasBackwardOf>(at, {at.grad(of_qkv ? "qkv's dbias" : "dbias", In(OC), is.acc, is.bf16),
                                      at.s("sums", Scratch(bias_backward_scratch_bytes(N, OC) / 4 + 1)), dout,
                                      N, OC, of_qkv});
            }
        });
    }
}

// Bytes, counts and scales to the bit.
static void test_fp8_cast(int N, int C, float scale) {
    Case k(format("fp8_cast, fp8_transpose N=%d C=%d scale=%g", N, C, scale));
    Fp8Tensor tensor = {};
    fp8_set_scale(&tensor, scale);
    const std::vector<uint8_t> bytes(N * C, 0xFF);
    check(k, [&](auto at) {
        auto* stats = at.exact("stats", std::vector<Fp8Stats>{{7, 1, 0, 0}}, true);
        auto* own = at.exact("own stats", std::vector<Fp8Stats>(1), true);
        auto *x = at.x("inp", In(N * C)), *weight = at.x("weight", In(N * C, 4.0));
        auto* t = at.exact("tensor", std::vector<Fp8Tensor>{tensor});
        auto* own_t = at.exact("own tensor", std::vector<Fp8Tensor>{tensor}, true);
        auto* out = at.exact_out("out", bytes);
        op<Fp8CastOf>(at, {out, at.exact_out("out_t", bytes), stats, t,
                         at.grad("dbias", In(C, sqrt(N)), Accumulate::Yes, false),
                         at.s("sums", Scratch(fp8_cast_scratch_bytes(N, C) / 4)), x, nullptr,
                         Fp8Source::Plain, N, C});
        op<Fp8TransposeOf>(at, {at.exact_out("turned", bytes), out, N, C});
        for (bool of_qkv : {false, true}) {
            if (of_qkv && C % 48 > 0) { continue; }             // the thirds are multiples of 16
            op<Fp8TransposeOf>(at, {at.exact_out(of_qkv ? "qkv's turned" : "turned too", bytes), out, N, C,
                                  at.grad(of_qkv ? "sums of qkv's bytes" : "sums of bytes", In(C, sqrt(N)),
                                          Accumulate::Yes, false),
                                  at.s("sums", Scratch(fp8_cast_scratch_bytes(N, C) / 4)), t, of_qkv});
        }
        op<Fp8CastOf>(at, {nullptr, nullptr, own, own_t, {}, nullptr, weight, nullptr, Fp8Source::Weight, N,
                         C});
        op<Fp8CastOf>(at, {at.exact_out("own out", bytes), at.exact_out("own out_t", bytes), own, own_t, {},
                         nullptr, weight, nullptr, Fp8Source::Weight, N, C});
        op<Fp8CastOf>(at, {at.exact_out("rows alone", bytes), nullptr, own, own_t, {}, nullptr, weight,
                         nullptr, Fp8Source::Weight, N, C});
        op<Fp8CastOf>(at, {nullptr, at.exact_out("columns alone", bytes), own, own_t, {}, nullptr, weight,
                         nullptr, Fp8Source::Weight, N, C});
    });
    // With an activation: a kernel's fast exp may round to the neighbour.
    for (int i = 0; i < 2 * (int)std::size(kMlps); i++) {
        const MlpRow& row = kMlps[i / 2];
        const Fp8Source source = i % 2 == 0 ? Fp8Source::Act : Fp8Source::Slope;
        Case g(format("fp8_cast N=%d C=%d scale=%g %s source=%d", N, C, scale, row.name, (int)source));
        const bool wide = source == Fp8Source::Slope && row.gated;
        const int pre_act = act_columns(row.mlp, C), width = wide ? pre_act : C;
        const std::vector<uint8_t> filler(N * width, 0xFF);
        auto cast = [&](auto at) {
            auto a = args<Fp8CastOf>(at);
            a.out = at.exact("out", filler), a.out_t = at.exact("out_t", filler);
            a.stats = at.exact("stats", std::vector<Fp8Stats>(1));
            a.tensor = at.exact("tensor", std::vector<Fp8Tensor>{tensor});
            if (!wide) { a.dbias = at.grad("dbias", In(C, sqrt(N)), Accumulate::No, false); }
            a.scratch = at.s("sums", Scratch(fp8_cast_scratch_bytes(N, C) / 4));
            a.inp = at.x("inp", In(N * (source == Fp8Source::Act ? pre_act : C)));
            a.before = at.x("before", In(N * pre_act, 2.0));
            a.source = source, a.N = N, a.C = C, a.mlp = row.mlp;
            call(a);
        };
        compute(g, cast);
        if (!wide) { g["dbias"].expect(); }
        expect_bytes(g, "out", Fp8Format::E4m3);
        const std::vector<uint8_t> got = g["out"].read<uint8_t>(), got_t = g["out_t"].read<uint8_t>();
        expect_stats(g, "stats");
        size_t wrong = 0;
        for (int i = 0; i < N * width; i++) { wrong += got_t[i % width * N + i / width] != got[i]; }
        CHECK(wrong == 0, "%s: %zu bytes of out_t are not out's", g.title.c_str(), wrong);
    }
}

// Tensor cores add up 128 products with some 14 bits before they add to an fp32 sum; `fast` skips the latter.
constexpr double kFp8Floor = 3e-4;
static void test_fp8_matmul(int M, int N, int K, Fp8Format as = Fp8Format::E4m3) {
    auto bytes = [](size_t n, uint32_t id, Fp8Format as) {      // of normal numbers, some of which saturate
        std::vector<uint8_t> b(n);
        for (size_t i = 0; i < n; i++) { b[i] = fp8_encode(150.0f * rand_normal(7, id, i), as); }
        return b;
    };
    const std::vector<uint8_t> a_bytes = bytes((size_t)M * K, 1, as);
    const std::vector<uint8_t> b_bytes = bytes((size_t)N * K, 2, Fp8Format::E4m3);
    std::vector<Fp8Tensor> tensors(2);
    fp8_set_scale(&tensors[0], 128.0f), fp8_set_scale(&tensors[1], 128.0f * (float)exp2(round(log2(K) / 2)));
    for (int mode = 0; mode < 6; mode++) {          // plain; bias; bias + residual, slow and fast
        const bool fast = mode % 2;
        Case k(format("fp8_matmul M=%d N=%d K=%d format=%d mode=%d", M, N, K, (int)as, mode));
        check(k, [&](auto at) {
            auto* t = at.exact("tensors", tensors);
            auto a = args<Fp8MatmulOf>(at);
            a.out = at.x("out", Out(M * N, fast ? 1e-3 : kFp8Floor));
            a.a = at.exact("a", a_bytes), a.b = at.exact("b", b_bytes), a.a_tensor = t, a.b_tensor = t + 1;
            a.bias = mode >= 2 ? at.x("bias", In(N)) : nullptr;
            a.residual = mode >= 4 ? at.x("residual", In(M * N)) : nullptr;
            a.M = M, a.N = N, a.K = K, a.fast = fast, a.a_format = as;
            call(a);
        });
    }
    for (const GradForm& is : kGradForms) {
        Case k(format("fp8_matmul M=%d N=%d K=%d format=%d acc=%d bf16=%d", M, N, K, (int)as, (int)is.acc,
                      is.bf16));
        check(k, [&](auto at) {
            auto* t = at.exact("tensors", tensors);
            auto a = args<Fp8MatmulOf>(at);
            a.grad = at.grad("grad", In(M * N), is.acc, is.bf16);
            k["grad"].floor = kFp8Floor;
            a.scratch = at.s("scratch", Scratch(M * N));
            a.a = at.exact("a", a_bytes), a.b = at.exact("b", b_bytes), a.a_tensor = t, a.b_tensor = t + 1;
            a.M = M, a.N = N, a.K = K, a.a_format = as;
            call(a);
        });
    }
}

// A product and the cast of its output, an MLP's activation or its gradient, in one op. The product is of
// small whole numbers, so that it is exact in 16 bits, in whatever order it is summed.
static void test_fp8_matmul_act(Mlp mlp, int N, int K, int F) {
    const bool gated = is_gated(mlp);
    const int wide = act_columns(mlp, F);
    auto ones = [](size_t n, uint32_t id) {
        std::vector<uint8_t> b(n);
        for (size_t i = 0; i < n; i++) {
            const float draw = rand_normal(7, id, i);
            b[i] = fp8_encode(draw > 0.5f ? 1.0f : draw < -0.5f ? -1.0f : 0.0f);
        }
        return b;
    };
    std::vector<Fp8Tensor> tensors(3);              // 448/64 = 7: some saturate
    fp8_set_scale(&tensors[0], 4.0f), fp8_set_scale(&tensors[1], 2.0f), fp8_set_scale(&tensors[2], 64.0f);
    for (int form = 0; form < 4; form++) {
        const bool forward = form % 2, nan = form >= 2, biased = forward && !gated;
        const int of = forward ? wide : F, out = forward ? F : wide, n = N * of;        // the product; bytes
        Case k(format("fp8_matmul mlp=%d N=%d K=%d F=%d forward=%d nan=%d", (int)mlp, N, K, F, forward, nan));
        std::vector<uint8_t> a_bytes = ones((size_t)N * K, 1);
        const std::vector<uint8_t> b_bytes = ones((size_t)of * K, 2), filler((size_t)N * out, 0xFF);
        Doubles pre_act = k.random(N * wide, 2.0);
        if (nan && forward) { a_bytes.back() = 0x7F; }
        else if (nan) { pre_act.back() = NAN; }
        Doubles eighths(of);
        for (int c = 0; c < of; c++) { eighths[c] = c == 5 ? 12.0 : (c % 7 - 3) / 8.0; }
        compute(k, [&](auto at) {
            auto* t = at.exact("tensors", tensors);
            auto to = args<Fp8CastOf>(at);
            to.out = at.exact("bytes", filler), to.out_t = at.exact("turned", filler);
            to.stats = at.exact("stats", std::vector<Fp8Stats>{{7, 1, 0, 0}}), to.tensor = t + 2;
            to.source = forward ? Fp8Source::Act : Fp8Source::Slope, to.N = N, to.C = F, to.mlp = mlp;
            to.scratch = at.s("sums", Scratch(std::max(activate_backward_scratch_bytes(N, F),
                                                       fp8_cast_scratch_bytes(N, F)) / 4));
            auto a = args<Fp8MatmulOf>(at);
            a.a = at.exact("a", a_bytes), a.b = at.exact("b", b_bytes), a.a_tensor = t, a.b_tensor = t + 1;
            a.M = N, a.N = of, a.K = K, a.fast = true;
            a.out = at.x("out", forward ? Out(n) : Scratch(n)), to.inp = a.out;
            if (biased) { a.bias = at.x("bias", Of(eighths)); }
            if (!forward) { to.before = at.x("pre_act", Of(pre_act)); }
            if (!gated && !forward) {
                to.dbias = at.grad("dbias", In(F, sqrt(N)), Accumulate::Yes, false);
            }
            a.cast = to;
            call(a);

            // The same by two ops. The product is exact, so the bytes have to be the same.
            a.cast = {}, a.out = at.x("plain", Scratch(n));
            call(a);
            to.inp = a.out, to.stats = at.exact("apart_stats", std::vector<Fp8Stats>{{7, 1, 0, 0}});
            to.out = at.exact("apart", filler), to.out_t = at.exact("apart_turned", filler), to.dbias = {};
            call(to);
        });
        CHECK(k["bytes"].read<uint8_t>() == k["apart"].read<uint8_t>(), "%s: bytes of two ops",
              k.title.c_str());
        const Fp8Stats one = k["stats"].read<Fp8Stats>()[0], two = k["apart_stats"].read<Fp8Stats>()[0];
        CHECK((nan ? !fp8_is_finite(one.amax) : one.amax == two.amax) && one.saturated == two.saturated &&
              one.elements == two.elements, "%s: counts of two ops", k.title.c_str());
        if (nan) { continue; }
        if (forward) { k["out"].expect(); }
        else if (!gated) { k["dbias"].expect(); }
        expect_bytes(k, "bytes", Fp8Format::E4m3);
        expect_stats(k, "stats");
        const std::vector<uint8_t> got = k["bytes"].read<uint8_t>(), turned = k["turned"].read<uint8_t>();
        size_t wrong = 0;
        for (int i = 0; i < N * out; i++) { wrong += turned[(size_t)(i % out) * N + i / out] != got[i]; }
        CHECK(wrong == 0, "%s: %zu bytes of the transpose are not the rows'", k.title.c_str(), wrong);
    }
}

static void test_fp8_scales(int count, float amax) {
    const int ranks = 3;
    const size_t stats_at = 24, bytes = stats_at + count * sizeof(Fp8Stats);
    std::vector<char> records(ranks * bytes);
    std::vector<Fp8Tensor> tensors(count);
    for (int i = 0; i < count * ranks; i++) {
        const Fp8Stats stats = {1000, (uint64_t)(i % 4), bits_of(i == 5 ? amax : 0.01f * (float)i), 0};
        memcpy(&records[i / count * bytes + stats_at + i % count * sizeof(stats)], &stats, sizeof(stats));
        for (float& x : tensors[i % count].amax) { x = rand_normal(7, 3, i) * rand_normal(7, 3, i); }
    }
    for (Fp8Tensor& t : tensors) { for (float& x : t.amax) { x = fabsf(x); } }
    Case k(format("fp8_scales count=%d amax=%g", count, amax));
    check(k, [&](auto at) {
        const Start saturated = isfinite(amax) ? Out(1) : Scratch(1);       // inf - inf is no distance
        op<Fp8ScalesOf>(at, {at.exact("tensors", tensors, true), at.s("saturated", saturated),
                           at.exact("records", records, true), bytes, stats_at, ranks, 1, count});
    });
}

// In bf16, to the bit: the sum in fp32, dithered.
static void test_grad_accumulate(size_t n) {
    for (const GradForm& is : kGradForms) {
        Case k(format("grad_accumulate n=%zu acc=%d bf16=%d", n, (int)is.acc, is.bf16));
        auto accumulate = [&](auto at) {
            op<GradAccumulateOf>(at, {at.grad("grad", In(n), is.acc, is.bf16), at.s("values", In(n)), n});
        };
        repeat(k, accumulate);
        const Buffer& grad = k["grad"];
        const Doubles got = grad.values(), old = grad.twin, &x = k["values"].twin;
        accumulate(Twin{&k});
        k.expect();
        size_t wrong = 0;
        for (size_t i = 0; i < n && is.bf16; i++) {
            const uint32_t draw = round_bits16(grad.key, grad.first + i);
            const float sum = (is.acc == Accumulate::Yes ? (float)old[i] : 0.0f) + (float)x[i];
            wrong += (float)got[i] != bf16_decode_dithered(bf16_encode_dithered(sum, draw), draw);
        }
        CHECK(wrong == 0, "%s: %zu elements are not the dithered sum", k.title.c_str(), wrong);
    }
}

// The gradient of GELU's input and, with it, of the biases.
static void test_gelu_backward(int N, int K, int columns) {
    const size_t n = (size_t)N * columns;
    for (const GradForm& is : kGradForms) {
        Case k(format("matmul_backward_input N=%d C=%d OC=%d GELU acc=%d bf16=%d", N, columns, K, (int)is.acc,
                      is.bf16));
        compute(k, [&](auto at) {
            auto dbias = at.grad("dbias", In(columns), is.acc, is.bf16);
            auto* scratch = at.s("sums", Scratch(activate_backward_scratch_bytes(N, columns) / 4));
            if (at.is_twin) { dbias.data = nullptr; }
            op<MatmulBackwardInputOf>(at, {at.x("dinp", Out(n, 7e-6)), at.x("dout", In(N * K)),
                                         at.x("weight", In(columns * K, 1.0 / sqrt(K))), nullptr,
                                         at.x("pre_act", In(n, 2.0)), N, columns, K, dbias, scratch});
        });
        k.take("dinp");                                 // dbias sums the values as stored
        op<BiasBackwardOf>(Twin{&k}, {Twin{&k}.grad("dbias", In(columns), is.acc, is.bf16), nullptr,
                                    k["dinp"].twin.data(), N, columns});
        k.expect();
        if (N > 1000) { break; }
    }
}

// Products of K terms with the activation of an MLP F wide: against the twin; and with whole numbers, whose
// product is exact in 16 bits, to the bit as a product and then the activation's op.
static void test_matmul_act(Mlp mlp, int N, int K, int F) {
    const int pre = act_columns(mlp, F), n = N * F;
    const std::string shape = format("mlp=%d N=%d K=%d F=%d", (int)mlp, N, K, F);
    Doubles inp(N * K), forward_weight(pre * K), weight(K * F);
    auto draw = [](Doubles& values, double unit) {
        for (size_t i = 0; i < values.size(); i++) {
            const float z = rand_normal(8, values.size(), i);
            values[i] = z > 0.5f ? unit : z < -0.5f ? -unit : 0.0;
        }
    };
    draw(inp, 1.0), draw(forward_weight, 0.125), draw(weight, 0.125);
    for (bool biased : {false, true}) {
        if (biased && mlp != Mlp::Gelu) { continue; }   // the others' models have no biases
        Case k(format("matmul_forward %s bias=%d", shape.c_str(), biased));
        compute(k, [&](auto at) {
            op<MatmulForwardOf>(at, {at.x("out", Out(n)), at.x("inp", In(N * K)),
                                   at.x("weight", In(pre * K, 1.0 / sqrt(K))),
                                   biased ? at.x("bias", In(pre)) : nullptr, nullptr,
                                   at.x("pre_act", Out(N * pre, 5e-6)), N, K, pre, mlp});
        });
        k.take("pre_act");                              // the activation reads it as stored
        op<ActivateOf>(Twin{&k}, {k["out"].twin.data(), k["pre_act"].twin.data(), N, F, mlp});
        k.expect();
    }
    if (mlp == Mlp::Gelu) {
        test_gelu_backward(N, K, F);
    } else {
        Case b("matmul_backward_input " + shape);
        check(b, [&](auto at) {
            auto* inplace = at.x("pre_act", InOut(N * pre, 2.0, 7e-6));
            op<MatmulBackwardInputOf>(at, {inplace, at.x("dout", In(N * K)),
                                         at.x("weight", In(F * K, 1.0 / sqrt(K))), nullptr, inplace, N, F, K,
                                         {}, nullptr, at.x("dact", Scratch(n)), mlp});
        });
    }
    Case k("whole numbers " + shape);
    repeat(k, [&](auto at) {
        auto *x = at.x("inp", Of(inp)), *w = at.x("forward_weight", Of(forward_weight));
        auto *pre_act = at.x("pre_act", Out(N * pre)), *plain = at.x("plain", Out(N * pre));
        op<MatmulForwardOf>(at, {at.x("out", Out(n)), x, w, nullptr, nullptr, pre_act, N, K, pre, mlp});
        op<MatmulForwardOf>(at, {plain, x, w, nullptr, nullptr, nullptr, N, K, pre});
        op<ActivateOf>(at, {at.x("out_apart", Out(n)), plain, N, F, mlp});

        auto *dinp = at.x("dinp", Out(N * pre)), *apart = at.x("dinp_apart", Out(N * pre));
        auto *dact = at.x("dact", Scratch(n)), *of_x = at.x("weight", Of(weight));
        op<MatmulBackwardInputOf>(at, {dinp, x, of_x, nullptr, pre_act, N, F, K, {}, nullptr, dact, mlp});
        op<MatmulBackwardInputOf>(at, {dact, x, of_x, nullptr, nullptr, N, F, K});
        op<ActivateBackwardOf>(at, {apart, dact, plain, N, F, mlp});
    });
    auto same = [&](const char* one, const char* two) {
        const bool equal = k[one].read<uint16_t>() == k[two].read<uint16_t>();
        CHECK(equal, "%s: %s and %s differ", k.title.c_str(), one, two);
    };
    same("pre_act", "plain"), same("out", "out_apart"), same("dinp", "dinp_apart");
}

// The epilogues of product_sm90_kernel, called as ProductLoop calls them, without products and without
// clusters: compute-sanitizer's racecheck (2025.3.1) cannot run kernels with clusters, and runs this one.
template <class E>
__global__ void __launch_bounds__(256, 1) epilogue_kernel(const __grid_constant__ ProductMaps maps,
                                                          const Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char sm90_bytes[];
    auto& shared = *(ProductShared<E>*)sm90_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; i++) { mbarrier_init(&shared.loaded[i / 2][i % 2], 1); }
        mbarrier_fence_init();
    }
    __syncthreads();
    E epilogue(shared, maps, p);
    const int tiles = product_tiles<E>(p);
    ProductTile before = product_tile<E>(p, 0);
    for (int t = 0; t < tiles; t++) {
        const ProductTile tile = product_tile<E>(p, t);
        epilogue.begin(tile);
#pragma unroll
        for (int s = 0; s < E::kSlices; s++) { if (t > 0) { epilogue.finish(before, s); } }
        epilogue.load(tile);
        float d[32][4];
#pragma unroll
        for (int n = 0; n < 32; n++) {
            for (int i = 0; i < 4; i++) { d[n][i] = (int)((threadIdx.x * 5 + n * 7 + i + t) % 13) - 6; }
        }
        epilogue.meet();
        epilogue.take(d);
        before = tile;
    }
#pragma unroll
    for (int s = 0; s < E::kSlices; s++) { epilogue.finish(before, s); }
    epilogue.end();
#endif
}

// Of an MLP F wide, backward or forward. A cluster's two blocks have two tiles each or more.
template <class E> static void test_epilogue(const std::string& name, bool gated, bool forward) {
    const int N = 192, F = 512, K = 512, wide = gated ? 2 * F : F, out = forward ? F : wide;
    Case k("epilogue " + name);
    repeat(k, [&](auto at) {
        std::vector<Fp8Tensor> tensors(3);
        fp8_set_scale(&tensors[0], 4.0f), fp8_set_scale(&tensors[1], 2.0f), fp8_set_scale(&tensors[2], 64.0f);
        auto* t = at.exact("tensors", tensors);
        const std::vector<uint8_t> filler((size_t)N * out, 0xFF);
        const Product p = {.rows = at.x("rows", In(N * K)), .weight = at.x("weight", In(wide * K)),
                           .bias = forward && !gated ? at.x("bias", In(F)) : nullptr,
                           .pre_act = at.x("pre_act", InOut(N * wide, 2.0)), .out = at.x("out", Out(N * out)),
                           .partial = at.s("partial", Scratch(N / 64 * F)), .N = N, .K = K / 2, .columns = F,
                           .pre_columns = wide, .out_columns = out,
                           .bytes = at.exact("bytes", filler), .transposed = at.exact("turned", filler),
                           .rows8 = t, .weight8 = t + 1, .bytes8 = t + 2,
                           .stats = at.exact("stats", std::vector<Fp8Stats>(1))};
        const auto kernel = epilogue_kernel<E>;
        allow_shared_memory(kernel, sizeof(ProductShared<E>), kSm90Shared);
        kernel<<<kProductCluster, 256, sizeof(ProductShared<E>), 0>>>(product_maps<E>(p), p);
    });
    if (!E::kFp8) { return; }
    const auto bytes = k["bytes"].read<uint8_t>(), turned = k["turned"].read<uint8_t>();
    size_t wrong = 0;
    for (int i = 0; i < N * out; i++) { wrong += bytes[i] != turned[i % out * N + i / out]; }
    CHECK(wrong == 0, "%s: %zu of the transposed bytes differ", name.c_str(), wrong);
}

template <class X> static void test_epilogues() {
    if constexpr (sizeof(X) == 2) {
        if (!products_activate(512, 512)) { return; }
        for (const MlpRow& row : kMlps) {
            with_act(row.mlp, [&](auto act) {
                typedef decltype(act) Act;
                const std::string name = row.name;
                test_epilogue<ActivationForward<Act, Store16>>(name + " forward", row.gated, true);
                test_epilogue<ActivationBackward<Act, Store16>>(name + " backward", row.gated, false);
                test_epilogue<ActivationForward<Act, StoreBytes>>(name + " forward, bytes", row.gated, true);
                test_epilogue<ActivationBackward<Act, StoreBytes>>(name + " backward, bytes", row.gated,
                                                                   false);
            });
        }
    }
}

// An activation and its gradient: into memory of its own, and into that of what it reads.
static void test_activate(Mlp mlp, int N, int F) {
    const int n = N * F, wide = act_columns(mlp, F);
    const std::string title = format("%s N=%d F=%d", kMlps[(int)mlp].name, N, F);
    Case k("activate " + title);
    check(k, [&](auto at) {
        auto *inp = at.x("inp", In(N * wide, 2.0)), *dout = at.x("dout", In(n));
        op<ActivateOf>(at, {at.x("out", Out(n)), inp, N, F, mlp});
        op<ActivateBackwardOf>(at, {at.x("dinp", Out(N * wide)), dout, inp, N, F, mlp});
        auto* inplace = at.x("inplace", InOut(N * wide, 2.0));
        op<ActivateBackwardOf>(at, {inplace, dout, inplace, N, F, mlp});
        if (is_gated(mlp)) { return; }
        auto *d = at.x("d_inplace", InOut(n)), *x = at.x("inp_inplace", InOut(n));
        op<ActivateBackwardOf>(at, {d, d, inp, N, F, mlp});
        op<ActivateOf>(at, {x, x, N, F, mlp});
    });
    for (const GradForm& is : kGradForms) {
        if (is_gated(mlp)) { break; }
        Case g(format("dbias of %s acc=%d bf16=%d", title.c_str(), (int)is.acc, is.bf16));
        compute(g, [&](auto at) {
            auto dbias = at.grad("dbias", In(F), is.acc, is.bf16);
            if (at.is_twin) { dbias.data = nullptr; }
            op<ActivateBackwardOf>(at, {at.x("dinp", Out(n)), at.x("dout", In(n)), at.x("inp", In(n, 2.0)), N,
                                      F, mlp, dbias,
                                      at.s("scratch", Scratch(activate_backward_scratch_bytes(N, F) / 4))});
        });
        g.take("dinp");                                 // dbias sums the values as stored
        const Twin at = {&g};
        op<BiasBackwardOf>(at, {at.grad("dbias", In(F), is.acc, is.bf16), nullptr, g["dinp"].twin.data(), N,
                              F});
        g.expect();
    }
}

// Of the weights, one is 0. The backward's qkv and rstd need not be a forward's: it is a formula of them.
enum class QkNorm { No, Weightless, Weighted };
static void test_rotate(int B, int T, int NH, int NKV, int HS, QkNorm norm) {
    const int N = B * T, heads = NH + NKV, n = N * (heads + NKV) * HS, maxT = T + 7;
    const bool norms = norm != QkNorm::No, weighted = norm == QkNorm::Weighted;
    const std::string shape = format("B=%d T=%d NH=%d NKV=%d HS=%d norm=%d", B, T, NH, NKV, HS, (int)norm);
    Doubles table(rotation_table_size(maxT, HS));
    rotation_table(table.data(), maxT, HS, 10000.0, {8.0, 1.0, 4.0, 40.0});
    std::vector<int> positions;                         // as when texts are written
    for (int i = 0; i < N; i++) { positions.push_back((int)(rand_u32(6, RAND_SAMPLE, 4, i) % maxT)); }
    Case random(shape);
    Doubles of_q = random.random(HS, 0.3, 1.0), of_k = random.random(HS, 0.3, 1.0);
    of_q[1] = of_k[HS - 2] = 0.0;
    auto weight = [&](auto at, const char* name, const Doubles& values) {
        return weighted ? at.s(name, Of(values)) : nullptr;
    };
    for (bool given : {false, true}) {
        Case k("rotate_forward_inplace " + shape + format(" positions=%d", given));
        compute(k, [&](auto at) {
            op<RotateForwardOf>(at, {at.x("qkv_inplace", InOut(n)),
                                   norms ? at.s("rstd", Out(N * heads)) : nullptr,
                                   weight(at, "q_weight", of_q), weight(at, "k_weight", of_k),
                                   at.s("table", Of(table)),
                                   given ? at.exact("positions", positions) : nullptr, N, T, NH, NKV, HS,
                                   1e-5f});
        });
        k.expect();
        const Doubles got = k["qkv_inplace"].values(), &want = k["qkv_inplace"].twin;
        bool same = true;
        for (int i = 0; i < n; i++) { same = same && (i / HS % (heads + NKV) < heads || got[i] == want[i]); }
        CHECK(same, "%s: heads of v have changed", k.title.c_str());
    }
    auto backward = [&](Case& k, const GradForm& is, bool fp8) {
        std::vector<Fp8Tensor> tensor(1);
        fp8_set_scale(&tensor[0], 256.0f);              // 448/256 = 1.75: some saturate
        compute(k, [&](auto at) {
            auto a = args<RotateBackwardOf>(at);
            a.dqkv = at.x(fp8 ? "dqkv" : "dqkv_inplace", InOut(n)), a.table = at.s("table", Of(table));
            if (norms) { a.qkv = at.x("qkv", In(n)), a.rstd = at.s("rstd", In(N * heads, 0.1, 1.0)); }
            if (weighted) {
                a.dq_weight = at.grad("dq_weight", In(HS), is.acc, is.bf16);
                a.dk_weight = at.grad("dk_weight", In(HS), is.acc, is.bf16);
                a.scratch = at.s("scratch", Scratch(rotate_backward_scratch_bytes(HS) / 4));
            }
            a.q_weight = weight(at, "q_weight", of_q), a.k_weight = weight(at, "k_weight", of_k);
            a.N = N, a.T = T, a.NH = NH, a.NKV = NKV, a.HS = HS;
            if (fp8) {
                a.fp8 = at.exact("bytes", std::vector<uint8_t>(n, 0x38));       // 1: v's stay
                a.tensor = at.exact("tensor", tensor), a.stats = at.exact("stats", std::vector<Fp8Stats>(1));
            }
            call(a);
        });
    };
    for (const GradForm& is : kGradForms) {
        Case k("rotate_backward_inplace " + shape + format(" acc=%d bf16=%d", (int)is.acc, is.bf16));
        backward(k, is, false);
        k.expect();
        if (!weighted) { break; }
    }
    if (!fp8_runs()) { return; }
    Case k("rotate_backward_inplace, FP8 " + shape);
    backward(k, {Accumulate::Yes, false}, true);
    expect_bytes(k, "bytes", Fp8Format::E4m3);
    expect_stats(k, "stats");
    if (weighted) { k["dq_weight"].expect(), k["dk_weight"].expect(); }
}

// C is not a multiple of 12. fp8: what the gates read, and dv, are bytes.
static void test_value_embed(int N, int V, int NH, int NKV, int HS, bool fp8) {
    const int C = 40, heads = NH + 2 * NKV, n = N * heads * HS;
    const std::string shape = format("N=%d V=%d NH=%d NKV=%d HS=%d fp8=%d", N, V, NH, NKV, HS, fp8);
    std::vector<int> tokens = random_tokens(N, V, 1);
    tokens[N / 2] = -1;                                 // as after logits that are NaN
    std::vector<Fp8Tensor> tensors(2);
    fp8_set_scale(&tensors[0], 64.0f), fp8_set_scale(&tensors[1], 32.0f);
    Case random(shape);
    auto bytes = [&](size_t count, float scale) {
        std::vector<uint8_t> encoded;
        for (double x : random.random(count)) { encoded.push_back(fp8_encode((float)x * scale)); }
        return encoded;
    };
    const auto inp_bytes = bytes((size_t)C * N, 64.0f), dqkv_bytes = bytes(n, 32.0f);
    auto filled = [&](auto at) {
        auto a = args<ValueEmbedOf>(at);
        a.table = at.x("table", In(V * NKV * HS)), a.tokens = at.exact("tokens", tokens);
        a.weight = at.s("weight", In(NKV * kGateChannels, 0.5));
        a.N = N, a.C = C, a.NH = NH, a.NKV = NKV, a.HS = HS;
        if (fp8) { a.inp_t8 = at.exact("inp_t8", inp_bytes), a.inp_tensor = at.exact("tensors", tensors); }
        else { a.inp = at.x("inp", In(N * C)); }
        return a;
    };
    Case k("value_embed " + shape);
    check(k, [&](auto at) {
        auto a = filled(at);
        a.qkv = at.x("qkv_inplace", InOut(n));
        call(a);
    });
    const Doubles got = k["qkv_inplace"].values(), &want = k["qkv_inplace"].twin;
    bool same = true;
    for (int i = 0; i < n; i++) { same = same && (i / HS % heads >= NH + NKV || got[i] == want[i]); }
    CHECK(same, "%s: heads of q or k have changed", k.title.c_str());
    for (Accumulate acc : kBothAccumulate) {
        Case k("value_embed, backward " + shape + format(" acc=%d", (int)acc));
        check(k, [&](auto at) {
            auto a = filled(at);
            a.qkv = at.x("dqkv_inplace", InOut(n)), a.dinp = at.x("dinp", InOut(N * C));
            a.dweight = at.grad("dweight", In(NKV * kGateChannels), acc, false);
            a.scratch = at.s("scratch", Scratch(value_embed_scratch_bytes(N, NKV) / 4));
            if (fp8) { a.dv8 = at.exact("dqkv8", dqkv_bytes), a.dv_tensor = a.inp_tensor + 1; }
            call(a);
        });
    }
}

// What tensor cores make of an operand: it is rounded to floatX or, of fp32 where `tf32`, to TF32: 10 bits
// after the point.
static double to_operand(double x, bool tf32) {
    if (!tf32 || x == 0.0) { return round_to(type_of<floatX>(), x); }
    const int exponent = ilogb(x) - 10;
    return ldexp(round(ldexp(x, -exponent)), exponent);
}

static double dot(const double* x, const double* y, int n) {
    double sum = 0.0;
    for (int i = 0; i < n; i++) { sum += x[i] * y[i]; }
    return sum;
}
static void add_scaled(double* sum, double factor, const double* x, int n) {
    for (int i = 0; i < n; i++) { sum[i] += factor * x[i]; }
}

// Attention as tensor cores must do it: exact products and sums, P, dS and O rounded where they become
// operands. In fp32 builds without TF32 it rounds to fp32 and so says what that type can do.
static void direct_attention(double* out /*(B,T,NH,HS)*/, double* lse /*(B,NH,T)*/,
                             double* dqkv /*(B,T,NH+2*NKV,HS) zeros*/, Doubles qkv, const Doubles& dout,
                             int B, int T, int NH, int NKV, int HS, Mask mask, bool tf32) {
    const Type type = type_of<floatX>();
    const double scale = 1.0 / sqrt((double)HS);
    Doubles dout_operand = dout;
    for (double& x : qkv) { x = to_operand(x, tf32); }
    for (double& x : dout_operand) { x = to_operand(x, tf32); }
    const int group = NH / NKV, row_heads = NH + 2 * NKV;
    #pragma omp parallel for
    for (int bkv = 0; bkv < B * NKV; bkv++) {
        const int b = bkv / NKV, kv = bkv % NKV, k_head = NH + kv, v_head = k_head + NKV;
        auto of = [&](int t, int head) { return ((size_t)(b * T + t) * row_heads + head) * HS; };
        Doubles p(T);
        for (int h = kv * group; h < (kv + 1) * group; h++) {
            for (int t = 0; t < T; t++) {
                const size_t row = ((size_t)(b * T + t) * NH + h) * HS;
                const double *q = &qkv[of(t, h)], *dO = &dout_operand[row];
                double *O = out + row, *dq = dqkv + of(t, h), max = -HUGE_VAL, sum = 0.0;
                const int first = mask.row(b, T).keys(t).within(T).first;
                for (int u = first; u <= t; u++) {
                    p[u] = scale * dot(q, &qkv[of(u, k_head)], HS);
                    max = std::max(max, p[u]);
                }
                for (int u = first; u <= t; u++) { p[u] = exp(p[u] - max); sum += p[u]; }
                lse[(size_t)(b * NH + h) * T + t] = max + log(sum);
                std::fill(O, O + HS, 0.0);
                for (int u = first; u <= t; u++) {
                    add_scaled(O, to_operand(p[u], tf32), &qkv[of(u, v_head)], HS);
                }
                for (int i = 0; i < HS; i++) { O[i] = round_to(type, O[i] / sum); }
                const double D = dot(O, &dout[row], HS);
                for (int u = first; u <= t; u++) {
                    const double prob = p[u] / sum, dp = dot(dO, &qkv[of(u, v_head)], HS);
                    const double ds = to_operand(prob * (dp - D), tf32);
                    add_scaled(dq, ds, &qkv[of(u, k_head)], HS);
                    add_scaled(dqkv + of(u, k_head), ds, q, HS);
                    add_scaled(dqkv + of(u, v_head), to_operand(prob, tf32), dO, HS);
                }
            }
        }
    }
    for (size_t i = 0; i < qkv.size(); i++) {
        const bool is_v = i / HS % row_heads >= (size_t)(NH + NKV);
        dqkv[i] = round_to(type, is_v ? dqkv[i] : dqkv[i] * scale);
    }
}

// Documents of `size` tokens; in each row they begin one token earlier than in the row before. 0: one each.
static std::vector<Span> even_documents(int B, int T, int size) {
    std::vector<int> tokens;
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) { tokens.push_back(size > 0 && (t + b) % size == 0); }
    }
    std::vector<Span> documents((size_t)B * T);
    find_documents(documents.data(), tokens.data(), B, T, 1, nullptr);
    return documents;
}

// `form`: what must run it, as attention_form says it; null: whatever does. document: 0: there is no mask of
// documents.
static void test_attention(int B, int T, int NH, int NKV, int HS, const char* form = nullptr,
                           int window = 0, int document = 0) {
    const char* runs = attention_form(HS);
    const bool tf32 = strcmp(runs, "mma.sync (TF32)") == 0;
    const std::vector<Span> documents = even_documents(B, T, document);
    Case k(format("attention B=%d T=%d NH=%d NKV=%d HS=%d window %d document %d %s", B, T, NH, NKV, HS,
                  window, document, runs));
    CHECK(!form || strcmp(form, runs) == 0, "%s: '%s' was to run it", k.title.c_str(), form);
    const size_t n = (size_t)B * T * NH * HS, all = (size_t)B * T * (NH + 2 * NKV) * HS;
    const size_t rows = (size_t)B * NH * T;
    compute(k, [&](auto at) {
        auto *qkv = at.x("qkv", In(all)), *out = at.x("out", Out(n, 5e-6)), *dout = at.x("dout", In(n));
        auto* lse = at.s("lse", Out(rows, 5e-6));
        const Mask mask = {window, document > 0 ? at.exact("documents", documents) : nullptr};
        op<AttentionForwardOf>(at, {out, lse, qkv, B, T, NH, NKV, HS, mask});
        op<AttentionBackwardOf>(at, {at.x("dqkv", Out(all, 2e-5)),
                                   at.s("scratch", Scratch(attention_backward_scratch_bytes(B, T, NH) / 4)),
                                   dout, out, qkv, lse, B, T, NH, NKV, HS, mask});
    });
    Doubles out(n), lse(rows), dqkv(all);
    direct_attention(out.data(), lse.data(), dqkv.data(), k["qkv"].twin, k["dout"].twin, B, T, NH, NKV, HS,
                     {window, document > 0 ? documents.data() : nullptr}, tf32);
    k["out"].expect_as_good_as(out);
    k["dqkv"].expect_as_good_as(dqkv);
    if (tf32) { k["lse"].expect_as_good_as(lse); }
    else { k["lse"].expect(); }
}

// Bytes of the gradient: next to what the same form stores as floatX, which is rounded from the same fp32.
static void test_fp8_attention(int B, int T, int NH, int NKV, int HS) {
    Case k(format("attention_backward, FP8 B=%d T=%d NH=%d NKV=%d HS=%d %s", B, T, NH, NKV, HS,
                  attention_form(HS)));
    std::vector<Fp8Tensor> tensor(1);
    fp8_set_scale(&tensor[0], 256.0f);                  // 448/256 = 1.75: some saturate
    const size_t n = (size_t)B * T * NH * HS, all = (size_t)B * T * (NH + 2 * NKV) * HS;
    compute(k, [&](auto at) {
        auto *qkv = at.x("qkv", In(all)), *out = at.x("out", Out(n)), *dout = at.x("dout", In(n));
        auto* lse = at.s("lse", Out((size_t)B * NH * T));
        auto* dqkv = at.x("dqkv", Out(all));
        auto* scratch = at.s("scratch", Scratch(attention_backward_scratch_bytes(B, T, NH) / 4));
        op<AttentionForwardOf>(at, {out, lse, qkv, B, T, NH, NKV, HS});
        op<AttentionBackwardOf>(at, {dqkv, scratch, dout, out, qkv, lse, B, T, NH, NKV, HS});
        op<AttentionBackwardOf>(at, {nullptr, scratch, dout, out, qkv, lse, B, T, NH, NKV, HS, {},
                                   at.exact_out("bytes", std::vector<uint8_t>(all)),
                                   at.exact("tensor", tensor), at.exact("stats", std::vector<Fp8Stats>(1))});
        op<AttentionBackwardOf>(at, {at.x("dqk", Of(Doubles(all, 0.5))), scratch, dout, out, qkv, lse, B, T,
                                   NH, NKV, HS, {}, at.exact("v bytes", std::vector<uint8_t>(all, 0x38)),
                                   at.exact("tensor", tensor),
                                   at.exact("v stats", std::vector<Fp8Stats>(1)), true});
    });
    const std::vector<uint8_t> got = k["bytes"].read<uint8_t>(), of_v = k["v bytes"].read<uint8_t>();
    const Doubles dqkv = k["dqkv"].values(), dqk = k["dqk"].values();
    size_t unlike = 0;                                  // only_v: each value where it belongs
    for (size_t i = 0; i < all; i++) {
        const bool is_v = i / HS % (NH + 2 * NKV) >= (size_t)(NH + NKV);
        unlike += is_v ? of_v[i] != got[i] || dqk[i] != 0.5 : of_v[i] != 0x38 || dqk[i] != dqkv[i];
    }
    const size_t counted = k["v stats"].read<Fp8Stats>()[0].elements;
    CHECK(unlike == 0 && counted == (size_t)B * T * NKV * HS, "%s: only v: %zu values are wrong, %zu counted",
          k.title.c_str(), unlike, counted);
    const Fp8Stats stats = k["stats"].read<Fp8Stats>()[0];
    const double gap = 0x1p-8;                          // floatX's own rounding, and as much again
    double most = 0.0;
    uint64_t least = 0, at_most = 0, i = 0, wrong = 0;
    for (double x : k["dqkv"].values()) {
        const double size = fabs(x) * 256.0, want = copysign(std::min(size, 448.0), x);
        wrong += !(fabs(fp8_decode(got[i++]) - want) <= std::max(size / 16, 0x1p-10) + size * gap);
        most = std::max(most, fabs(x));
        least += size * (1.0 - gap) > 448.0, at_most += size * (1.0 + gap) > 448.0;
    }
    CHECK(wrong == 0, "%s: %lld bytes are wrong", k.title.c_str(), (long long)wrong);
    CHECK(fabs(float_of(stats.amax) - most) <= gap * most && stats.elements == all &&
              stats.saturated >= least && stats.saturated <= at_most,
          "%s: amax %g, not %g; %lld of %lld saturated, not %lld to %lld", k.title.c_str(),
          float_of(stats.amax), most, (long long)stats.saturated, (long long)stats.elements,
          (long long)least, (long long)at_most);
}

static void test_fp8_attention_forms() {
    for (bool portable : {false, true}) {
        select_kernels(portable, false);
        for (int T : {1, 65, 130}) { test_fp8_attention(2, T, 2, 2, 64); }
        for (int HS : {16, 40, 96, 128, 20}) { test_fp8_attention(1, 70, 2, 2, HS); }
        for (int HS : {64, 128, 20}) { test_fp8_attention(2, 70, 6, 2, HS); }
        if (!small_shapes) { test_fp8_attention(1, 1024, 3, 3, 64); }
    }
    select_kernels(false, false);
}

// A NaN anywhere is the largest element of what is rounded to FP8.
static void test_fp8_nan() {
    const int N = 32, C = 64;
    for (int i : {0, 13, 5 * C + 7, N * C - 1}) {
        Case k(format("FP8, element %d is NaN", i));
        Doubles inp = k.random(N * C);
        inp[i] = NAN;
        const std::vector<uint8_t> bytes(3 * N * C);
        const std::vector<Fp8Stats> zero(1);
        compute(k, [&](auto at) {
            auto *x = at.x("inp", Of(inp)), *out = at.x("out", In(N * C));
            auto* t = at.exact("tensor", std::vector<Fp8Tensor>(1));
            op<Fp8CastOf>(at, {at.exact("cast bytes", bytes), at.exact("out_t", bytes),
                               at.exact("cast", zero), t, {}, nullptr, x, nullptr, Fp8Source::Plain, N, C});
            auto norm = args<NormForwardOf>(at);
            norm.y[0].weight = at.s("weight", In(C)), norm.y[0].fp8 = at.exact("norm bytes", bytes);
            norm.y[0].tensor = t, norm.y[0].stats = at.exact("norm", zero);
            norm.rstd = at.s("rstd", Scratch(N)), norm.inp = x, norm.kind = NormKind::Rms;
            norm.N = N, norm.C = C;
            call(norm);
            auto* scratch = at.s("scratch", Scratch(attention_backward_scratch_bytes(1, N, 1) / 4));
            op<AttentionBackwardOf>(at, {nullptr, scratch, x, out, at.x("qkv", In(3 * N * C)),
                                       at.s("lse", In(N, 0.1, 5.0)), 1, N, 1, 1, C, {},
                                       at.exact("attention bytes", bytes), t, at.exact("attention", zero)});
        });
        for (const char* name : {"cast", "norm", "attention"}) {
            const bool on_device = !fp8_is_finite(k[name].read<Fp8Stats>()[0].amax);
            CHECK(on_device && !fp8_is_finite(((const Fp8Stats*)k[name].twin.data())->amax),
                  "%s: not seen in %s", k.title.c_str(), name);
        }
    }
}

// Groups of 3, 4 and 8 query heads. Where a head has fewer tiles than copies are under way, these are of the
// next heads. The last shape has 40 heads of keys, more than a section of blocks.
static void test_attention_groups(int HS, const char* form = nullptr) {
    struct { int B, T, NH, NKV; } shapes[] = {
        {2, 65, 3, 1}, {1, 130, 6, 2}, {2, 63, 4, 1}, {1, 257, 8, 2}, {1, 1, 8, 1}, {1, 200, 16, 2},
        {5, 33, 32, 8}};
    for (auto& s : shapes) {
        if (small_shapes && s.T > 65) { continue; }
        test_attention(s.B, s.T, s.NH, s.NKV, HS, form);
    }
}

// Copies and products that overlap by chance: a thousand runs beside a kernel that takes SMs and memory away.
static void test_attention_repeats(int HS, int window, int document = 0) {
    constexpr int B = 1, T = 300, NH = 4, NKV = 2;
    const std::vector<Span> documents = even_documents(B, T, document);
    Case k(format("attention, repeated, HS=%d window %d document %d", HS, window, document));
    const size_t n = (size_t)B * T * NH * HS, all = (size_t)B * T * (NH + 2 * NKV) * HS;
    const auto run = [&](auto at) {
        auto *qkv = at.x("qkv", In(all)), *out = at.x("out", Out(n)), *dout = at.x("dout", In(n));
        auto* lse = at.s("lse", Out((size_t)B * NH * T));
        const Mask mask = {window, document > 0 ? at.exact("documents", documents) : nullptr};
        op<AttentionForwardOf>(at, {out, lse, qkv, B, T, NH, NKV, HS, mask});
        op<AttentionBackwardOf>(at, {at.x("dqkv", Out(all)),
                                   at.s("scratch", Scratch(attention_backward_scratch_bytes(B, T, NH) / 4)),
                                   dout, out, qkv, lse, B, T, NH, NKV, HS, mask});
    };
    const Stream beside = stream_create();
    const size_t bytes = 16 << 20;
    void* filled = device_malloc(bytes, "a test");
    std::vector<unsigned char> out, dqkv;
    int differ = 0;
    for (int i = 0; i < (small_shapes ? 10 : 1000); i++) {
        if (i > 0) { device_fill(filled, i, bytes, beside); }
        run(OnDevice{&k});
        stream_sync(0);
        if (i == 0) { out = k["out"].read<unsigned char>(), dqkv = k["dqkv"].read<unsigned char>(); }
        differ += out != k["out"].read<unsigned char>() || dqkv != k["dqkv"].read<unsigned char>();
    }
    CHECK(differ == 0, "%s: %d runs differ from the first", k.title.c_str(), differ);
    stream_sync(beside);
    stream_destroy(beside);
    device_free(filled);
}

// Windows and documents on both sides of every tile's border, in a form, in rows that end in a tile or with
// one, and where query heads share keys. One that hides nothing leaves the bits of none.
static void test_masks(int HS, const char* form) {
    for (int T : {200, 256}) {
        for (int window : {1, 16, 63, 64, 65, 127, 128, T - 1}) {
            if (small_shapes && (T != 200 || window % 64 != 1)) { continue; }
            test_attention(1, T, 2, T == 200 ? 1 : 2, HS, form, window);
            test_attention(2, T, 2, T == 200 ? 1 : 2, HS, form, 0, window);
            if (window > 64) { test_attention(1, T, 2, T == 200 ? 2 : 1, HS, form, 70, window); }
        }
    }
    const int T = 130, NH = 2, all = T * NH * HS;
    const size_t scratch = attention_backward_scratch_bytes(1, T, NH) / 4;
    std::vector<std::vector<unsigned char>> bits;
    for (int window : {0, T, T + 1, 1 << 24, -1}) {         // -1: a document that is the row
        Case k("attention, a mask that hides nothing");
        const auto run = [&](auto at) {
            auto *qkv = at.x("qkv", In(3 * all)), *out = at.x("out", Out(all)), *dout = at.x("dout", In(all));
            auto* lse = at.s("lse", Out(NH * T));
            const Mask mask = {window, window < 0 ? at.exact("documents", even_documents(1, T, 0)) : nullptr};
            op<AttentionForwardOf>(at, {out, lse, qkv, 1, T, NH, NH, HS, mask});
            op<AttentionBackwardOf>(at, {at.x("dqkv", Out(3 * all)), at.s("scratch", Scratch(scratch)), dout,
                                       out, qkv, lse, 1, T, NH, NH, HS, mask});
        };
        run(OnDevice{&k});
        stream_sync(0);
        bits.push_back(k["out"].read<unsigned char>());
        for (unsigned char byte : k["dqkv"].read<unsigned char>()) { bits.back().push_back(byte); }
        CHECK(bits.back() == bits[0], "attention HS=%d T=%d: window %d has other bits than none", HS, T,
              window);
    }
}

// Every form at the head sizes that it serves, by all that chooses one: head size, --kernels and -f.
static void test_attention_forms() {
    const char* mma = kLowPrecision ? "mma.sync" : "mma.sync (TF32)";
    for (bool tf32 : {false, true}) {
        if (tf32 && kLowPrecision) { continue; }
        select_kernels(true, tf32);
        for (int HS : {64, 16, 32, 40, 48, 80, 96, 112, 128, 136, 192, 20}) {
            const char* form = HS % kWidth == 0 && HS <= 128 && (kLowPrecision || tf32) ? mma : "plain";
            for (int T : {1, 63, 64, 65, 257}) {
                if (small_shapes && T != 1 && T != 65) { continue; }
                const int many = T == 1 ? 1 : 2;
                test_attention(many, T, many, many, HS, form);
            }
        }
        for (int HS : {64, 32, 80, 128, 20}) { test_attention_groups(HS); }
        for (int HS : {64, 32, 96, 128, 20}) { test_masks(HS, nullptr); }
        test_attention(1, 34, 1, 1, 512, "plain");
        if (small_shapes) { continue; }
        test_attention(1, 1024, 2, 2, 64);
        test_attention(1, 1000, 2, 2, 128);
    }
    select_kernels(false, false);
    if (attention_uses_sm90(64)) {
        const char* sm90 = "sm90 (wgmma)";
        for (int HS : {64, 128, 48, 80, 96, 112}) {
            for (int T : {1, 63, 64, 65, 130, 257}) { test_attention(2, T, 2, 2, HS, sm90); }
            for (int window : {0, 100}) {
                test_attention_repeats(HS, window), test_attention_repeats(HS, window, 90);
            }
            if (!small_shapes && HS % 64 == 0) { test_attention(1, 1024, 2, 2, HS, sm90); }
        }
        for (int HS : {64, 96, 128}) { test_attention_groups(HS, sm90), test_masks(HS, sm90); }
        for (int window : {kNear, kNear + 1}) {
            if (!small_shapes) { test_attention(1, 1024, 2, 2, 128, sm90, window); }
        }
        if (!small_shapes) { test_attention(2, 1000, 2, 2, 128, sm90, 0, 300); }
        test_attention(1, 130, 2, 2, 56, "mma.sync");
    }

    for (int HS : {0, -1, 513}) { CHECK(!attention_error(4, 2, HS).empty(), "head size %d is taken", HS); }
    CHECK(!attention_error(4, 3, 64).empty(), "4 heads of queries, 3 of keys are taken");
    select_kernels(false, false);
}

static void test_rows_alone(int N, int from, int C) {
    Case k(format("encoder_forward, rows alone N=%d C=%d", N, C));
    std::vector<int> rows;
    for (int n = 0; n < N; n++) { rows.push_back((n * 7 + from - 1) % from); }      // the last, then others
    check(k, [&](auto at) {
        op<EncoderForwardOf>(at, {at.x("out", Out(N * C)), at.exact("rows", rows), at.x("inp", In(from * C)),
                                nullptr, 1, N, C});
    });
}

static void test_classifier(int N, int V, int Vp, float softcap = 0.0f) {
    for (ClassifierMode mode : {ClassifierMode::LossOnly, ClassifierMode::LossAndGrad}) {
        Case k(format("classifier, loss_sum N=%d V=%d Vp=%d softcap %g mode=%d", N, V, Vp, softcap,
                      (int)mode));
        Doubles logits = k.random(N * Vp, 3.0);
        for (int v = V; v < Vp; v++) { logits[v] = 1e4; }       // padding must not matter
        std::vector<int> targets = random_tokens(N, V, 2);
        targets[N - 1] = V - 1;
        for (int n = 1; n < N - 1; n += 2) { targets[n] = -1; }     // not counted
        const double floor = mode == ClassifierMode::LossOnly ? 1e-12 : 3e-6;
        const Doubles three = {3.0};
        auto sums = [&](auto at) {
            const auto* losses = at.s("losses", Out(N, 3e-6));
            op<LossSumOf>(at, {at.s("mean", Out(1)), losses, 1.0f / (float)N, Accumulate::No, N});
            op<LossSumOf>(at, {at.s("added", InOut(three, 2e-6)), losses, 1.0f / (float)N, Accumulate::Yes,
                               N});
        };
        compute(k, [&](auto at) {
            op<ClassifierOf>(at, {at.x("logits", InOut(logits, floor)), at.s("losses", Out(N, 3e-6)),
                                at.exact("targets", targets), 1.0f / 64,
                                at.exact("loss_scale", std::vector<float>{16.0f}), N, V, Vp, mode, nullptr,
                                nullptr, softcap});
            if (!at.is_twin) { sums(at); }
        });
        k.take("losses");
        sums(Twin{&k});
        k.expect();
    }
}

// The second row's target is the last of three that are as likely, and the others' the first.
static void test_mark_likeliest(int V, int Vp) {
    Case k(format("mark_likeliest V=%d Vp=%d", V, Vp));
    const int N = 4, targets[N] = {V / 2, V - 1, 0, V - 1};
    Doubles logits = k.random(N * Vp, 1.0);
    for (int n = 0; n < N; n++) {
        for (int v = V; v < Vp; v++) { logits[n * Vp + v] = 1e4; }      // padding must not matter
        logits[n * Vp + targets[n]] = 50;
    }
    logits[Vp] = logits[Vp + V / 2] = logits[V / 2 + 1] = logits[2 * Vp + V - 1] = 50;
    check(k, [&](auto at) {
        op<MarkLikeliestOf>(at, {at.exact_out("likeliest", std::vector<int>(N)),
                                 at.x("logits", InOut(logits, 1e-12)),
                                 at.exact("targets", std::vector<int>(targets, targets + N)), N, V, Vp});
    });
}

// The gradient as bytes; the logits stay.
static void test_fp8_classifier(int N, int V, int Vp, float softcap = 0.0f) {
    Case k(format("classifier, FP8 N=%d V=%d Vp=%d softcap %g", N, V, Vp, softcap));
    const Doubles logits = k.random(N * Vp, 3.0);
    std::vector<int> targets = random_tokens(N, V, 2);
    targets[0] = -1;                                            // not counted
    const std::vector<uint8_t> bytes(N * Vp, 0xFF);
    compute(k, [&](auto at) {
        op<ClassifierOf>(at, {at.x("logits", InOut(logits, 1e-12)), at.s("losses", Out(N, 3e-6)),
                            at.exact("targets", targets), 1.0f / 48,
                            at.exact("loss_scale", std::vector<float>{16.0f}), N, V, Vp,
                            ClassifierMode::LossAndGrad, at.exact("bytes", bytes),
                            at.exact("tensor", std::vector<Fp8Tensor>(1), true), softcap});
    });
    k.expect();
    expect_bytes(k, "bytes", Fp8Format::E5m2);
}

// The tree's order is the point: the same bits as the twin's in float.
static void test_lane_sum(int pieces, int chain, size_t n, bool bf16) {
    Case k(format("lane_sum pieces=%d chain=%d n=%zu bf16=%d", pieces, chain, n, bf16));
    const RoundKey key = {7, 3, 4, kRoundGrads}, out_key = {7, 3, 9, kRoundGradSums};
    const size_t first = 3 * kChunk;
    const uint32_t stride = 5;
    std::vector<float> values, sum(n);
    std::vector<uint16_t> dithered;
    for (int r = 0; r < pieces; r++) {
        RoundKey piece_key = key;
        piece_key.micro += (uint32_t)r * stride;
        for (double x : k.random(n, 1.0 + r)) {
            const uint32_t draw = round_bits16(piece_key, first + values.size() % n);
            dithered.push_back(bf16_encode_dithered((float)x, draw));
            values.push_back(bf16 ? bf16_decode_dithered(dithered.back(), draw) : (float)x);
        }
    }
    const char* const names[] = {"chain0", "chain1", "chain2"};
    std::vector<std::vector<float>> chains;
    for (int c = 0; c < chain; c++) {
        const Doubles x = k.random(n);
        chains.emplace_back(x.begin(), x.end());
    }
    repeat(k, [&](auto at) {
        LaneSum a = {};
        a.out = at.grad("out", In(n), Accumulate::No, bf16);
        a.out.key = out_key, a.out.first = first;
        for (int c = 0; c < chain; c++) { a.chain[c] = at.exact(names[c], chains[c]); }
        a.pieces = {bf16 ? (void*)at.exact("dithered", dithered) : (void*)at.exact("pieces", values), bf16,
                    key, first};
        a.num_chain = chain, a.piece_micros = stride, a.num_pieces = pieces, a.n = n;
        lane_sum(a, 0);
    });
    LaneSumOf<float, float> twin = {};
    twin.out = {sum.data(), Accumulate::No};
    for (int c = 0; c < chain; c++) { twin.chain[c] = chains[c].data(); }
    twin.pieces = {.data = values.data()};
    twin.num_chain = chain, twin.num_pieces = pieces, twin.n = n;
    lane_sum_cpu<float>(twin, 0);
    k["out"].key = out_key, k["out"].first = first;
    const Doubles got = k["out"].values();
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t draw = round_bits16(out_key, first + i);
        const float want = bf16 ? bf16_decode_dithered(bf16_encode_dithered(sum[i], draw), draw) : sum[i];
        wrong += (float)got[i] != want;
    }
    CHECK(wrong == 0, "%s: %zu elements differ from the twin's", k.title.c_str(), wrong);
}

// Two ranks' records of three buckets, the last one with fewer chunks than places; then clipping and scale.
static void test_decision(float factor, size_t chunks) {
    Case k(format("update_decision x %g, %zu chunks", factor, chunks));
    const int ranks = 2, lanes = 4;
    const std::vector<ChunkRange> ranges = {{chunks * 2, chunks, 0}, {3, 2, chunks}, {1, 1, chunks + 2}};
    const size_t lanes_at = (chunks + 3) * sizeof(double), bytes = lanes_at + 64;
    std::vector<char> records(ranks * bytes, (char)0xFF);           // padding is NaN: it must not be read
    for (int b = 0; b < 3; b++) {
        for (size_t c = 0; c < ranges[b].chunks; c++) {
            const double x = factor * (1.0 + rand_normal(3, b, c) * 0.1);
            const size_t r = c / ranges[b].per_rank, place = ranges[b].at + c % ranges[b].per_rank;
            memcpy(&records[r * bytes + place * sizeof(double)], &x, sizeof(x));
        }
    }
    for (int i = 0; i < ranks * lanes; i++) {
        const float x = 1.0f + 0.1f * i;
        memcpy(&records[i / lanes * bytes + lanes_at + i % lanes * sizeof(float)], &x, sizeof(x));
    }
    UpdateState state = {};
    state.loss_scale = 4.0f;
    state.t = 2;
    const UpdatePolicy policy = {true, 1, 65536.0f};
    repeat(k, [&](auto at) {
        update_decision({at.exact("state", std::vector<UpdateState>{state}), at.s("loss", Out(1)),
                         at.exact("records", records), bytes, lanes_at, ranks, lanes,
                         at.exact("ranges", ranges), 3, 1.0f, policy}, 0);
    });
    float loss = 0.0f;                                              // losses are floats, the twin's too
    update_decision_cpu<float>({&state, &loss, records.data(), bytes, lanes_at, ranks, lanes,
                                ranges.data(), 3, 1.0f, policy}, 0);
    const UpdateState got = k["state"].read<UpdateState>()[0];
    CHECK(fabs(got.norm / state.norm - 1) <= 1e-6 && fabs(got.grad_scale / state.grad_scale - 1) <= 1e-6 &&
              got.t == state.t && got.skip == 0 && got.loss_scale == state.loss_scale &&
              got.good_steps == state.good_steps,
          "%s: norm %g grad_scale %g t %lld loss_scale %g, expected %g %g %lld %g", k.title.c_str(), got.norm,
          got.grad_scale, got.t, got.loss_scale, state.norm, state.grad_scale, state.t, state.loss_scale);
    k["loss"].twin[0] = loss;
    k.expect();
}

// `count` rows of n elements, packed as everything else but for the keys' positions.
template <class Side>
static Rows packed_rows(const Side& at, int count, size_t n, size_t param_bytes, bool bf16) {
    if (at.is_twin) { return {count, n * sizeof(double), n * sizeof(double), n}; }
    return {count, n * param_bytes, n * (bf16 ? 2 : 4), n};
}

static void test_square_sums(size_t chunks) {
    for (bool bf16 : {false, true}) {
        Case k(format("square_sums chunks=%zu bf16=%d", chunks, bf16));
        const int rows = chunks % 2 == 0 ? 2 : 1;       // two where they can be halved
        const size_t n = chunks * kChunk / rows;
        Doubles want(chunks);
        compute(k, [&](auto at) {
            double* sums = at.exact_out("sums", want);
            op<SquareSumsOf>(at, {at.is_twin ? want.data() : sums, at.stored("grads", rows * n, bf16), n,
                                packed_rows(at, rows, n, 0, bf16)});
        });
        const Doubles got = k["sums"].read<double>();
        double worst = 0.0;
        for (size_t c = 0; c < chunks; c++) {
            const double error = fabs(got[c] / want[c] - 1);
            if (!(error <= worst)) { worst = error; }   // keeps a NaN
        }
        CHECK(worst <= 2e-6, "%s: a chunk is off by %.2e", k.title.c_str(), worst);
    }
}

static const RoundKey kParamKey = {1, 2, 0, kRoundParams};
static std::vector<UpdateState> third_update() {
    UpdateState state = {};
    state.grad_scale = 0.25f;
    state.t = 3;
    return {state};
}

template <class Param> static void test_adamw(size_t n, bool bf16, bool use_master, bool state) {
    constexpr bool fp32 = sizeof(Param) == sizeof(float);
    Case k(format("adamw_update n=%zu bf16=%d master=%d fp32=%d state=%d", n, bf16, use_master, fp32, state));
    const Doubles params = k.random(2 * n);
    Doubles v = k.random(2 * n, 0.1);
    for (double& x : v) { x = x * x; }
    check(k, [&](auto at) {
        auto a = args<AdamWOf>(at);
        const auto start = InOut(params, 1e-5);
        a.params = fp32 ? (void*)at.s("params", start) : (void*)at.x("params", start), a.params_fp32 = fp32;
        a.master = use_master ? at.master("master", InOut(params, 1e-5), "params") : nullptr;
        a.m = at.state("m", InOut(2 * n, 0.1, 1e-5), state), a.v = at.state("v", InOut(v, 1e-5), state);
        a.grads = at.stored("grads", 2 * n, bf16), a.state = at.exact("state", third_update());
        a.n = n, a.rows = packed_rows(at, 2, n, sizeof(Param), bf16);
        a.weight_decay = 0.1, a.lr = 0.01, a.beta1 = 0.9, a.beta2 = 0.95, a.eps = 1e-8;
        a.key = kParamKey, a.first = 8 * 1001, a.decays = n / 16 * 8;
        k["params"].factor = use_master || fp32 ? 2.0 : 2.5;
        call(a);
    });
}

static void test_muon(size_t n, bool bf16, bool use_master, bool state) {
    Case k(format("muon n=%zu bf16=%d master=%d state=%d", n, bf16, use_master, state));
    const size_t update_row = n + 128;
    const Doubles params = k.random(2 * n), zeros(2 * update_row);      // zeros stay between the rows
    auto momentum = [&](auto at) {
        auto* update = at.muon("update", InOut(zeros, 1e-5));
        op<MuonMomentumOf>(at, {update, at.state("m", InOut(2 * n, 0.1, 1e-5), state),
                              at.stored("grads", 2 * n, bf16), at.exact("state", third_update()), n,
                              update_row, packed_rows(at, 2, n, 0, bf16), 0.95, kParamKey, 8 * 1001});
    };
    auto step = [&](auto at) {
        auto* weights = at.x("params", InOut(params, 1e-5));
        op<MuonUpdateOf>(at, {weights,
                            use_master ? at.master("master", InOut(params, 1e-5), "params") : nullptr,
                            at.muon("update", InOut(zeros, 1e-5)), at.exact("state", third_update()), n,
                            update_row, packed_rows(at, 2, n, sizeof(floatX), bf16), 0.1, 0.01, kParamKey,
                            8 * 1001});
    };
    compute(k, [&](auto at) {
        momentum(at);
        if (!at.is_twin) { step(at); }
    });
    k.take("update");                                   // rounded, as the step has it
    step(Twin{&k});
    k["params"].factor = use_master || !kLowPrecision ? 2.0 : 2.5;
    k.expect();
}

// Masters that an update of almost nothing leaves as they are: ties, numbers that round to inf, inf, and NaN.
static void test_extreme_masters() {
    if (sizeof(masterX) != 2) { return; }
    const float largest = FLT_MAX, tie = float_of(0x3F808000);
    const Doubles masters = {tie, -tie, float_of(0x3F818000), float_of(0x3F807FFF), largest, -largest,
                             HUGE_VAL, -HUGE_VAL, NAN, -NAN, 0.0, float_of(1), float_of(0x8000), 1, -1, 2};
    const Doubles rounded = {1.0078125, -1.0078125, 1.015625, 1, HUGE_VAL, -HUGE_VAL,
                             HUGE_VAL, -HUGE_VAL, NAN, NAN, 0.0, 0.0, float_of(0x10000), 1, -1, 2};
    const size_t n = masters.size();
    for (bool muon : {false, true}) {
        Case k(format("masters at the ends, %s", muon ? "muon_update" : "adamw_update"));
        repeat(k, [&](auto at) {
            auto* weights = at.x("params", InOut(masters, 0.0));
            auto* master = at.master("master", InOut(masters, 0.0), "params");
            const Doubles zeros(n);
            auto* state = at.exact("state", third_update());
            if (muon) {
                op<MuonUpdateOf>(at, {weights, master, at.muon("update", Of(zeros)), state, n, n, {}, 0.0,
                                    0.01, kParamKey, 0});
                return;
            }
            op<AdamWOf>(at, {weights, false, master, {at.s("m", Of(zeros))}, {at.s("v", Of(zeros))},
                           at.stored("grads", n, false), state, n, {}, 0.0, 0.0, 0.9, 0.95, 1e-8, kParamKey,
                           0});
        });
        for (const char* name : {"params", "master"}) {
            const Doubles got = k[name].values(), &want = *name == 'p' ? rounded : masters;
            for (size_t i = 0; i < n; i++) {
                CHECK(got[i] == want[i] || (isnan(got[i]) && isnan(want[i])), "%s: %s of %g is %g, not %g",
                      k.title.c_str(), name, masters[i], got[i], want[i]);
            }
        }
    }
}

// Two parts of each of three layers at once, in place, against the twin; each layer alone has the same bits.
static void test_orthogonalise(int rows, int cols, int steps) {
    const int layers = 3, parts = 2, count = layers * parts;
    const size_t size = (size_t)rows * cols, square = (size_t)std::min(rows, cols) * std::min(rows, cols);
    // as in a layer's bucket: one behind the other, the second at a multiple of 128, then something else
    const size_t second = round_up(size, (size_t)128), stride = 2 * second + 128;
    auto places = [&](int n) { return MuonPlaces{parts, n, {0, second}, stride}; };
    Case k(format("muon_orthogonalise %d x %d, %d steps", rows, cols, steps));
    const Doubles sums(count * ceil_div(size, kChunk));
    auto orthogonalise = [&](auto at, int first, int n) {
        auto* inout = at.muon("updates", InOut(layers * stride, 1e-6, 1e-4)) + first * stride;
        auto scratch = [&](const char* name, size_t each) { return at.muon(name, Scratch(count * each)); };
        op<MuonOrthogonaliseOf>(at, {inout, inout, scratch("x", size), scratch("y", size),
                                   scratch("gram", square), scratch("poly", square), at.scratch("sums", sums),
                                   places(n), rows, cols, steps, layers});
    };
    repeat(k, [&](auto at) { orthogonalise(at, 0, layers); });
    const Doubles inp = k["updates"].twin, got = k["updates"].values();
    Doubles plain = inp;
    for (int i = 0; i < count; i++) {
        const auto at = inp.begin() + places(layers).of(i);
        const Doubles one = plain_newton_schulz(Doubles(at, at + size), rows, cols, steps,
                                                kLowPrecision ? as_bf16 : as_fp32);
        std::copy(one.begin(), one.end(), plain.begin() + places(layers).of(i));
    }
    orthogonalise(Twin{&k}, 0, layers);
    k["updates"].expect_as_good_as(plain);
    const Doubles& want = k["updates"].twin;
    double along = 0.0, plain_along = 0.0, length = 0.0;
    size_t beside = 0;
    for (size_t e = 0; e < got.size(); e++) {
        const bool taken = e % stride % second < size && e % stride < parts * second;
        beside += !taken && got[e] != inp[e];
        along += taken * got[e] * want[e];
        plain_along += taken * plain[e] * want[e];
        length += taken * want[e] * want[e];
    }
    CHECK(beside == 0, "%s: %zu elements beside the matrices have changed", k.title.c_str(), beside);
    CHECK(fabs(along - plain_along) <= 3e-3 * length, "%s: %.5f times as long, plainly %.5f", k.title.c_str(),
          along / length, plain_along / length);
    repeat(k, [&](auto at) { for (int l = 0; l < layers; l++) { orthogonalise(at, l, 1); } });
    CHECK(k["updates"].values() == got, "%s: alone each has other bits", k.title.c_str());
}

static void test_update(size_t n) {
    for (int i = 0; i < 8; i++) {
        const bool bf16 = i & 1, state = i & 2, master = i & 4;
        if (master && !kLowPrecision) { continue; }
        test_adamw<floatX>(n, bf16, master, state);
        test_muon(n, bf16, master, state);
        if (kLowPrecision && !master) { test_adamw<float>(n, bf16, master, state); }
    }
}

// Each of N rows, then one of them alone: the same bits.
static void test_decode_matmul(int N, int C, int OC) {
    for (int mode = 0; mode < 3; mode++) {              // plain; bias; bias, GELU
        const bool has_gelu = mode == 2;
        Case k(format("decode_matmul N=%d C=%d OC=%d mode=%d", N, C, OC, mode));
        auto rows_from = [&](auto at, int first) {
            op<DecodeMatmulOf>(at, {at.x("out", Out(N * OC, 5e-6)) + first * OC,
                                  at.x("inp", In(N * C, 2.0, 0.5)) + first * C,
                                  at.x("weight", In(OC * C, 1.0 / sqrt(C))),
                                  mode > 0 ? at.x("bias", In(OC)) : nullptr, has_gelu && !at.is_twin,
                                  N - first, C, OC});
        };
        compute(k, [&](auto at) { rows_from(at, 0); });
        for (double& x : k["out"].twin) {
            if (has_gelu) { x = gelu(round_to(type_of<floatX>(), x)); }
        }
        k.expect();
        const Doubles among = k["out"].values();
        repeat(k, [&](auto at) { rows_from(at, N - 1); });
        const Doubles alone = k["out"].values();
        int differ = 0;
        for (int i = (N - 1) * OC; i < N * OC; i++) { differ += alone[i] != among[i]; }
        CHECK(differ == 0, "%s: alone, %d of %d values of a row differ", k.title.c_str(), differ, OC);
    }
}

static void test_decode_attention(int T, int NH, int NKV, int HS, const std::vector<int>& positions,
                                  int window = 0) {
    const int N = (int)positions.size(), C = NKV * HS;
    Case k(format("decode_attention N=%d T=%d NH=%d NKV=%d HS=%d window %d", N, T, NH, NKV, HS, window));
    check(k, [&](auto at) {
        op<DecodeAttentionOf>(at, {at.x("out", Out(N * NH * HS, 1e-5)), at.x("keys", InOut(N * T * C)),
                                 at.x("values", InOut(N * T * C)), at.x("qkv", In(N * (NH * HS + 2 * C))),
                                 at.exact("positions", positions), N, T, NH, NKV, HS, {window}});
    });
}

static void test_decode_rows(int N, int C) {            // the embedding, and a prompt's keys and values
    Case k(format("encoder_forward, cache_store N=%d C=%d", N, C));
    const int V = 30, T = 9, count = 5;
    std::vector<int> tokens, positions;
    for (int n = 0; n < N; n++) {
        tokens.push_back(n == 0 ? -1 : (n * 17 + 3) % V);
        positions.push_back(n * 5 % T);
    }
    check(k, [&](auto at) {
        op<EncoderForwardOf>(at, {at.x("out", Out(N * C)), at.exact("tokens", tokens),
                                at.x("wte", In(V * C)), at.x("wpe", In(T * C)), N, 1, C,
                                at.exact("positions", positions)});
        op<CacheStoreOf>(at, {at.x("keys", InOut(N * T * C)), at.x("values", InOut(N * T * C)),
                            at.x("qkv", In(count * 5 * C)), N, count, T, 3, 1, C});
    });
}

// Rows of all kinds: the same tokens as sample_token's.
static void test_sample_tokens(int N, int V, const Sampling& sampling) {
    Case k(format("sample_tokens N=%d V=%d temperature %g top %d part %g softcap %g", N, V,
                  sampling.temperature, sampling.top_k, sampling.top_p, sampling.softcap));
    Doubles logits = k.random(N * V, 3.0);
    std::vector<int> positions;
    std::vector<uint64_t> draws;
    std::vector<uint32_t> ids;
    for (int n = 0; n < N; n++) {
        for (int i = 0; i < V; i++) {
            double& x = logits[n * V + i];
            if (n % 4 == 1) { x = 0.5 * floor(x); }     // many are equal
            if (n % 4 == 2 && i % 3 == 0) { x = i % 2 ? NAN : -INFINITY; }
            if (n % 8 == 3 && i % 100 == 7) { x = INFINITY; }
            if (n % 8 == 7) { x = n == 7 ? NAN : n == 15 ? -1.0 : x - 40; }
        }
        positions.push_back(n);
        draws.push_back(((uint64_t)n << 24) + 77);
        ids.push_back((uint32_t)n % 5);
    }
    check(k, [&](auto at) {
        op<SampleTokensOf>(at, {at.exact_out("tokens", positions), at.exact("positions", positions, true),
                              at.exact("draws", draws, true), at.exact("ids", ids),
                              at.x("logits", Of(logits)), sampling, 1337, N, V});
    });
}

static void test_decoding() {
    for (int N : {1, 3, 8, 9, 17, 33, 64}) {
        test_decode_matmul(N, 40, 57);
        test_decode_matmul(N, 64, 72);
    }
    test_decode_matmul(5, 8, 19);
    test_decode_attention(64, 2, 2, 64, {0, 1, 63});
    test_decode_attention(70, 3, 3, 20, {69, 64, 0});
    test_decode_attention(33, 1, 1, 7, {32, 3});
    test_decode_attention(70, 6, 2, 64, {69, 64, 0});
    test_decode_attention(33, 4, 1, 40, {32, 3});
    for (int window : {1, 63, 64, 65, 127, 128, 199, 200}) {
        test_decode_attention(200, 4, 2, 64, {0, 1, 63, 64, 127, 199}, window);
    }
    test_decode_rows(6, 40);
    for (const Sampling& s : {Sampling{0.0f, 0, 1.0f}, {1.0f, 0, 1.0f}, {0.7f, 5, 1.0f}, {1.3f, 0, 0.6f},
                              {0.8f, 40, 0.9f}, {1.0f, 1, 0.5f}, {1.0f, 0, 0.0f}, {1.0f, 0, 1.0f, 15.0f},
                              {0.8f, 40, 0.9f, 2.0f}}) {
        test_sample_tokens(17, 300, s);
        test_sample_tokens(9, 33, s);
        if (!small_shapes) {
            test_sample_tokens(24, 50257, s);
            test_sample_tokens(9, 151936, s);
        }
    }
    if (small_shapes) { return; }
    for (int N : {1, 20, 64}) {
        test_decode_matmul(N, 768, 2304);
        test_decode_matmul(N, 3072, 768);
        test_decode_matmul(N, 1600, 401);
    }
    test_decode_attention(1024, 12, 12, 64, {0, 63, 64, 500, 1022, 1023});
    test_decode_attention(1030, 2, 2, 128, {1029, 128});
    test_decode_attention(300, 2, 2, 512, {299, 10});
    test_decode_attention(3000, 2, 2, 96, {2999, 191, 192});
}

static void test_kernels() {
    void* workspace = device_malloc(gemm_workspace_bytes(), "matmul workspace");
    gemm_init(0, workspace, gemm_workspace_bytes(), false);
    TEST("kernels: encoder") {
        test_encoder(3, 33, 40, 67, 40);
        test_encoder(1, 1, 8, 5, 3);
        if (!small_shapes) { test_encoder(4, 257, 768, 509, 300); }
    }
    TEST("kernels: norms of the residual stream") {
        for (int C : {8, 40, 768}) { test_norm(7, C); }
        hooks.norm_blocks = 2;                    // few rows then go through all stages
        test_norm(11, (kRowThreads + 1) * kWidth);         // a vector more than a block has threads
        if (!small_shapes) {
            for (int C : {40, 768, kRowThreads * kWidth}) { test_norm(29, C); }
        }
        hooks.norm_blocks = INT_MAX;
        if (!small_shapes) {
            test_norm(1, 768);
            // on both sides of what a warp holds with 1 and 3 vectors a thread, and a block with 1 and 2
            for (int held : {kWarp, 3 * kWarp, kRowThreads, 2 * kRowThreads}) {
                for (int vectors : {held, held + 1}) { test_norm(33, vectors * kWidth); }
            }
            for (int C : {1024, 1280, 1600, 4096, 8192, kMaxC}) { test_norm(5, C); }
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
    if (fp8_runs()) TEST("kernels: FP8") {
        for (int count : {3, 1000}) {
            for (float amax : {1.0f, INFINITY}) { test_fp8_scales(count, amax); }
        }
        test_fp8_cast(16, 48, 64.0f);
        test_fp8_cast(144, 400, 256.0f);
        test_fp8_matmul(16, 16, 16);
        test_fp8_matmul(144, 400, 272);
        test_fp8_classifier(7, 509, 512);
        test_fp8_classifier(7, 509, 512, 4.0f);
        test_fp8_classifier(2, 8100, 8192);
        test_fp8_norm(7, 48);
        test_fp8_attention_forms();
        test_fp8_nan();
        test_fp8_matmul(144, 400, 272, Fp8Format::E5m2);
        for (const MlpRow& row : kMlps) {
            const Mlp mlp = row.mlp;
            test_fp8_matmul_act(mlp, 48, 64, 80);           // a product, then the cast
            test_fp8_matmul_act(mlp, 64, 512, 256);         // from here on one sm90 kernel: half of a tile
            test_fp8_matmul_act(mlp, 192, 640, 512);        // half of the cluster's second tile
            if (small_shapes) { continue; }
            test_fp8_matmul_act(mlp, 384, 1600, 768);
            test_fp8_matmul_act(mlp, 3136, 512, 1536);      // blocks take several tiles
        }
        if (!small_shapes) {
            test_fp8_cast(1024, 3072, 128.0f);
            test_fp8_classifier(150, 50257, 50304);         // some blocks have a second row
            test_fp8_classifier(3, 151930, 151936);
            for (int C : {768, 1600, 5120, 12288}) { test_fp8_norm(131, C); }
            test_fp8_matmul(1024, 2304, 768);
            test_fp8_matmul(768, 768, 16384);
        }
    }
    TEST("kernels: gradients in bf16") {
        test_grad_accumulate(1000);
        if (!small_shapes) { test_grad_accumulate(1 << 20); }
    }
    TEST("kernels: which products have activations") {
        for (int C : {448, 512, 520, 768, 1600}) {
            const bool fits = attention_uses_sm90(64) && C >= 512 && C % 64 == 0;
            for (const MlpRow& row : kMlps) {
                const char* form = activation_form(row.mlp, C, 4 * C, false);
                const bool both = !row.gated || C <= kMaxGatedTerms;
                const char* fused = both ? "in its products (sm90)" : "in the backward's product (sm90)";
                CHECK(strcmp(form, fits ? fused : "apart") == 0, "C=%d: %s %s", C, row.name, form);
            }
        }
    }
    TEST("kernels: epilogues of products, alone") { test_epilogues<floatX>(); }
    TEST("kernels: products with activations") {
        for (const MlpRow& row : kMlps) {
            const Mlp mlp = row.mlp;
            test_matmul_act(mlp, 7, 40, 120);               // a product, then the op
            test_matmul_act(mlp, 1, 512, 256);              // from here on the sm90 kernel: a row of a tile
            test_matmul_act(mlp, 129, 576, 512);            // a row of the cluster's second tile
            if (small_shapes) { continue; }
            test_matmul_act(mlp, 300, 1600, 768);
            test_matmul_act(mlp, 3112, 512, 1536);          // blocks take several tiles
        }
    }
    TEST("kernels: activations") {
        for (const MlpRow& row : kMlps) {
            test_activate(row.mlp, 7, 160);
            test_activate(row.mlp, 1, 8);
            test_activate(row.mlp, 3, 264 * kWidth);     // a gated one's row is two blocks'
            if (!small_shapes) { test_activate(row.mlp, 1000, 3072); }
        }
    }
    TEST("kernels: rotation") {
        for (QkNorm norm : {QkNorm::No, QkNorm::Weightless, QkNorm::Weighted}) {
            test_rotate(9, 5, 3, 1, 64, norm);          // a lane has four texts; the last one text
            test_rotate(1, 1, 1, 1, 16, norm);
            test_rotate(3, 7, 2, 2, 80, norm);
            test_rotate(1, 9, 6, 2, 96, norm);
            test_rotate(2, 3, 20, 4, 256, norm);        // a row is several blocks'
            if (small_shapes) { continue; }
            test_rotate(2, 300, 12, 12, 64, norm);
            test_rotate(2, 130, 16, 8, 128, norm);
            test_rotate(6, 1111, 3, 1, 32, norm);       // blocks of the backward take several places
        }
    }
    TEST("kernels: value embeddings") {
        for (bool fp8 : {false, true}) {
            if (fp8 && !fp8_runs()) { continue; }
            test_value_embed(1, 1, 1, 1, 16, fp8);
            test_value_embed(9, 3, 4, 2, 80, fp8);
            test_value_embed(67, 40, 6, 1, 96, fp8);    // two blocks of the gates' backward
            test_value_embed(5, 30, 20, 20, 256, fp8);  // a row is several blocks'
            if (small_shapes) { continue; }
            test_value_embed(3000, 509, 6, 6, 128, fp8);
            test_value_embed(200, 50257, 3, 1, 32, fp8);
            test_value_embed(9001, 300, 2, 2, 16, fp8); // blocks take several rows
        }
    }
    TEST("kernels: attention") {
        test_attention_forms();
    }
    TEST("kernels: classifier and loss") {
        test_rows_alone(5, 9, 40);
        test_rows_alone(300, 70, 1000);            // rows that occur often; more columns than threads
        test_mark_likeliest(509, 512);
        test_mark_likeliest(67, 128);
        test_classifier(7, 509, 512);
        test_classifier(5, 67, 128);
        test_classifier(7, 509, 512, 4.0f);
        test_classifier(5, 67, 128, 0.5f);
        test_classifier(2, 8100, 8192, 15.0f);
        test_classifier(2, 8100, 8192);             // threads that hold nothing but padding
        if (!small_shapes) {
            for (int V : {8065, 8184, 8185, 8191, 8192}) { test_classifier(3, V, 8192); }
            test_classifier(3, 8064, 8064);         // too short for the kernel that streams rows
            test_classifier(3, 57217, 57344);       // the longest rows that it takes
            test_classifier(3, 57345, 57472);       // one vector too long
            for (bool portable : {false, true}) {       // portable keeps to the shared memory of a 4090
                select_kernels(portable, false);
                test_classifier(3, 50257, 50304);
            }
            select_kernels(false, false);
            test_classifier(3, 50257, 50304, 15.0f);
            test_classifier(1000, 256, 256);
            test_classifier(3, 65533, 65536);
            test_classifier(3, 151936, 151936);     // Qwen3's vocabulary
            test_classifier(2, 151930, 151936, 15.0f);
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
        for (float factor : {1e-4f, 100.0f}) { test_decision(factor, 700); }
        test_decision(1.0f, 1);
        test_update(512);
        if (!small_shapes) { test_update(64 * 10007); }
        test_extreme_masters();
    }
    TEST("kernels: decoding") { test_decoding(); }
    gemm_free(0);
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
        if (arg == "dump-grads") {
            device_init();
            dump_grads(std::vector<std::string>(argv + i + 1, argv + argc));
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
        else if (arg == "--only" && more) { test_only = argv[++i]; }
        else if (arg == "--reference" && more) { references.push_back(argv[++i]); }
        else if (arg == "kernels" || arg == "model" || arg == "invariance") { modes.push_back(arg);
        } else {
            die("'%s' is not an argument of this test\nhint: kernels, model, invariance, --reference PREFIX, "
                "--only TEXT, --break NAME, --list",
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
    bool variants = !break_name;
    for (const char* op : {"norm_", "activate"}) {
        variants = variants || strncmp(break_name, op, strlen(op)) == 0;
    }
    for (const std::string& mode : modes) {
#ifndef GPT2_CPU
        if (mode == "kernels") { test_kernels(); }
#endif
        if (mode == "model") {
            const bool given = !references.empty();
            if (!given) {
                for (const char* name : {"ugly", "head64", "qwen", "relu2", "parallel", "tied", "windows",
                                         "documents", "qwen2", "values"}) {
                    references.push_back(committed_reference(name));
                }
            }
            for (const std::string& prefix : references) {
                TEST(format("model against PyTorch: %s", prefix.c_str()).c_str()) {
                    test_model(prefix, default_options(), given ? 2e-5 : 1e-5, given ? 1e-4 : 2e-5);
                }
            }
        }
        if (mode == "invariance") {
            TEST("layout of the arenas, lanes") {
                test_layout();
            }
            TEST("the speed that MFU is a part of") { test_peak_speed(); }
            TEST("sums of lanes") { test_lane_gradients(kTiny); }
            if (variants) TEST("other blocks, norms and dropout") {
                test_variants(kSmall);
                if (kDeviceIsAsync) { test_variants(kTensorCore); }
                Config parallel = kSmall;
                parallel.block = Block::Parallel;           // two norms of one sum, two branches behind it
                for (const Config& c : {kSmall, parallel}) {
                    if (!kLowPrecision) { test_slopes("GPT-2's, dropout", c, 0.2); }
                }
            }
            TEST("Llama's family") {
                std::vector<Config> all = family(kLlama, kNano);
                all.insert(all.end(), {kLlamaWindows, kQwen2, kValues});
                for (const Config& c : all) {
                    const char* name = kMlps[(int)c.llama.mlp].name;
                    const std::string text = llama_text(c);
                    CHECK(llama_text(descriptor_config(text.c_str())) == text, "%s", text.c_str());
                    for (double dropout : {0.0, 0.2}) {
                        if (!kLowPrecision) { test_slopes(name, c, dropout); }
                    }
                    if (variants) { for (double dropout : {0.0, 0.2}) { test_variant(c, dropout); } }
                    if (variants) { test_writing(name, c); }
                }
            }
            TEST("LM head in parts") {
                for (bool grads_bf16 : {false, kLowPrecision}) {
                    for (const Config& c : {kTensorCore, kLlama8}) { test_head_chunks(c, grads_bf16); }
                }
            }
            if (kDeviceIsAsync) TEST("two models at once") {
                for (const Config& c : {kTensorCore, kWide}) { test_side_by_side(c); }
            }
            TEST("recomputing, micro-steps") {
                for (const Config& c : {kTiny, kTensorCore, kWindows}) { test_variant(c, 0.0); }
                if (kDeviceIsAsync && kLowPrecision) { test_variant(kWide, 0.0); }
            }
            TEST("documents") {
                for (const Config& c : {kTensorCore, kWindows}) { test_variant(c, 0.0, 1); }
                for (const Config& c : {kLlama, kPacked}) { test_packed(c); }
                if (!kLowPrecision) {
                    test_slopes("GPT-2's, documents", kSmall, 0.0, 1);
                    test_slopes("Llama's, documents", kLlamaWindows, 0.0, 1);
                }
            }
            if (!break_name && fp8_runs()) TEST("FP8: gradients, scales, skipped updates") {
                test_fp8(kTensorCore, false, 0.072);
                test_fp8(kTensorCore, true, 0.082);
                Config deep = kTensorCore;
                deep.L = 4;
                test_fp8(deep, true, 0.07);
                test_fp8(kLlama8, true, 0.075);     // 0.063 to 0.073 with eight seeds on the CPU
                test_fp8(kNano8, true, 0.045);
                test_fp8(kQwen28, true, 0.065);
                test_fp8(kValues8, true, 0.075);
                for (double dropout : {0.0, 0.1}) {
                    test_fp8_recompute(deep, dropout);
                    for (const Config& of : family(kLlama8, kNano8)) { test_fp8_recompute(of, dropout); }
                    for (const Config& of : {kQwen28, kValues8}) { test_fp8_recompute(of, dropout); }
                    Config parallel = kTensorCore;
                    parallel.block = Block::Parallel;
                    test_fp8_recompute(parallel, dropout);
                }
                if (kDeviceIsAsync) {                         // fc's and fcproj's products with GELU (sm90)
                    Config wide = kWide;
                    wide.maxT = 72;                     // 576 rows: whole blocks of 64
                    test_fp8(wide, true, 0.115);
                }
                test_fp8_rare_tokens();
            }
            TEST("Muon: two updates, some layers at a time") {
                test_muon_updates(kSmall);
                if (kDeviceIsAsync) { test_muon_updates(kTensorCore); }
            }
            TEST("a disk that stalls") { test_stalled_disk(kTiny); }
            TEST("checkpoints: at once and in parts, AdamW and Muon, -w 1 and 0, fp32 and bf16 states") {
                Options o = default_options();
                test_checkpoint(kTiny, o, false);
                o.master = false, o.muon = o.state_bf16 = true;
                test_checkpoint(kTiny, o, true);
            }
            TEST("writing") {
                test_writing("C=40 V=509 T=33", kTiny);
                test_writing("head size 64, V=300 T=70", kTensorCore);
                test_writing("windows, V=300 T=70", kWindows);
                if (variants) {
                    Config parallel = kSmall;
                    parallel.block = Block::Parallel;
                    test_writing("parallel, C=40 V=131 T=17", parallel);
                }
            }
#ifndef GPT2_CPU
            TEST("no master weights, bf16 gradients, bf16 states") { test_options(kTensorCore); }
            TEST("bf16 gradients of 4 micro-steps: matrices near fp32's, all others equal to them") {
                for (const Config& c : {kTensorCore, kValues, kValues8}) { test_bf16_gradients(c); }
            }
            TEST("weights without master copies move by less than their spacing") {
                test_small_steps(kTensorCore);
            }
            if (kFp16) TEST("FP16: the loss scale starts as told, grows, and halves at an overflow") {
                test_loss_scale(kTensorCore);
            }
            TEST("scratch holds what each op asks for") { test_scratch(); }
            TEST("logits beyond 2^31 elements") { test_large_logits(); }
#endif
        }
    }
    if (break_name && break_hits == 0) { printf("note: %s was not computed in this run\n", break_name); }
    return test_summary();
}
