/*
Tests of train_gpt2.cu, in both builds: `make test_gpt2cu && ./test_gpt2cu`, `make test_gpt2cpu && ./test_gpt2cpu`.

    ./test_gpt2cu [kernels] [model] [invariance]    the named modes, all without a name
        kernels      each CUDA op against its twin in double (llmc/cpu_ops.h); CUDA builds only
        model        against PyTorch: logits, loss, every gradient by name, 10 AdamW steps
        invariance   facts that need no reference: splits, recompute, two runs, skipped updates, files
    --reference PREFIX   model mode on PREFIX_model.bin, PREFIX_tensors.bin, PREFIX.json (dev/reference writes them)
    --break NAME         scales that op's output by 1.01: the run must then fail. --list prints the names
    --dump-grads PREFIX OUT [MICRO_STEPS]   gradients of the reference's batch, in the reference file's format

Tolerances: 16-bit builds may have at most twice the error of plain 16-bit PyTorch, both against fp32. Closing line:
`N passed, N failed, N skipped`.
*/
#define TESTING
#include "train_gpt2.cu"
#include "dev/test/test.h"      // gives: TEST, CHECK, SKIP, test_summary

// ---- --break: the hook behind OUTPUT ----
static const char* break_name = nullptr;
static int64_t break_hits = 0;

#define X(name) name,
static const char* const kOutputNames[] = {GPT2_OUTPUTS(X)};
#undef X

#ifdef GPT2_CPU
static void break_output(const char* name, float* data, size_t count) {
    if (!break_name || strcmp(name, break_name) != 0) { return; }
    break_hits++;
    for (size_t i = 0; i < count; i++) { data[i] *= 1.01f; }
}
#else
template <class Real>
__global__ void break_kernel(Real* data, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
        data[i] = (Real)((float)data[i] * 1.01f);
    }
}
template <class Real> static void break_device(const char* name, Real* data, size_t count, Stream stream) {
    if (!break_name || strcmp(name, break_name) != 0 || count == 0) { return; }
    break_hits++;
    break_kernel<<<1024, 256, 0, stream>>>(data, count);
    cudaCheck(cudaGetLastError());
}
static void break_output(const char* name, floatX* data, size_t count, Stream stream) { break_device(name, data, count, stream); }
#ifndef ENABLE_FP32
static void break_output(const char* name, float* data, size_t count, Stream stream) { break_device(name, data, count, stream); }
#endif
static void break_output(const char* name, Grad grad, size_t count, Stream stream) {
    if (grad.is_bf16) { break_device(name, (__nv_bfloat16*)grad.data, count, stream); }
    else { break_device(name, (float*)grad.data, count, stream); }
}
#endif

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
    std::string prefix, json;
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

static Reference reference_load(const std::string& prefix, const Config& c) {
    Reference r;
    r.prefix = prefix;
    r.json = read_text(prefix + ".json");
    const std::string path = prefix + "_tensors.bin";
    FILE* f = fopen_check(path.c_str(), "rb");
    int header[256];
    fread_check(header, sizeof(int), 256, f, path.c_str());
    if (header[0] != 20240327 || header[1] != 2) { die("'%s' is not a reference file of version 2", path.c_str()); }
    r.B = header[2];
    r.T = header[3];
    const size_t N = (size_t)r.B * r.T;
    r.x.resize(N);
    r.y.resize(N);
    r.logits.resize(N * c.V);
    fread_check(r.x.data(), sizeof(int), N, f, path.c_str());
    fread_check(r.y.data(), sizeof(int), N, f, path.c_str());
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
static std::vector<float> host_grad(GPT2* model, int i) {       // layers together, tight, without FP16's loss scale
    const ParamSpec& s = model->param_specs[i];
    const float scale = gpt2_read_state(model).update.loss_scale;
    std::vector<float> values(s.elems * s.copies);
    std::vector<uint16_t> raw(s.elems);
    for (int l = 0; l < s.copies; l++) {
        const Grad grad = gpt2_grad(model, (ParamId)i, l, Accumulate::No);
        float* out = values.data() + l * s.elems;
        if (model->options.grads_bf16) {
            copy_to_host(raw.data(), grad.data, s.elems * 2, model->stream);
            stream_sync(model->stream);
            for (size_t k = 0; k < s.elems; k++) { out[k] = bf16_to_float(raw[k]); }
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
    copy_to_host(raw.data(), act_views(model->acts, model->act_specs, 0).logits, raw.size() * sizeof(floatX), model->stream);
    stream_sync(model->stream);
    std::vector<float> logits((size_t)rows * c.V);
    for (int n = 0; n < rows; n++) {
        for (int v = 0; v < c.V; v++) { logits[(size_t)n * c.V + v] = (float)raw[(size_t)n * c.Vp + v]; }
    }
    return logits;
}

static bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

static Options default_options() {
    Options o = {};
    o.master = true;
    o.residual_in_gemm = true;
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

// == model ==
// Bounds on an error: fp32 absolute ones, or twice what PyTorch's own type does to the same tensor.
static double error_bound(const Reference& r, const std::string& what, double fp32_bound) {
    if (!kLowPrecision) { return fp32_bound; }
    const std::string kind = kFp16 ? "float16" : "bfloat16";
    return 2.0 * json_numbers(r.json, kind + what)[0];
}

static void test_model(const std::string& prefix, const Options& options, double logits_bound, double grad_bound) {
    const std::string path = prefix + "_model.bin";
    const Config c = checkpoint_config(path.c_str());
    Reference r = reference_load(prefix, c);
    Options o = options;
    o.weight_decay = (float)json_numbers(r.json, "hyper/weight_decay")[0];
    GPT2 model;
    gpt2_allocate(&model, c, o, r.B, r.T);
    checkpoint_load(&model, path.c_str());
    const int N = r.B * r.T;

    gpt2_set_inputs(&model, r.x.data(), r.y.data(), r.B, r.T);
    gpt2_loss(&model, r.B, r.T, ClassifierMode::LossOnly, 0.0f, 1.0f / (float)N, Accumulate::No);
    std::vector<float> logits = host_logits(&model, N);
    double worst = 0.0, square = 0.0;
    for (size_t i = 0; i < logits.size(); i++) {
        const double d = fabs((double)logits[i] - (double)r.logits[i]);
        if (!(d <= worst)) { worst = d; }       // keeps a NaN
        square += (double)r.logits[i] * (double)r.logits[i];
    }
    const double logits_error = worst / sqrt(square / (double)logits.size());
    const double logits_allowed = kLowPrecision
        ? 2.0 * json_numbers(r.json, kFp16 ? "float16_logits_error" : "bfloat16_logits_error")[0] : logits_bound;
    CHECK(logits_error <= logits_allowed, "logits: max |d| / rms = %g, allowed %g", logits_error, logits_allowed);
    const float loss = gpt2_read_state(&model).loss;
    const double loss_allowed = kLowPrecision ? 0.02 : 2e-5;
    CHECK(fabs(loss - r.loss) <= loss_allowed, "loss %.7f, PyTorch %.7f", loss, r.loss);
    printf("   logits max|d|/rms %.3g (allowed %.3g), loss %.6f (PyTorch %.6f)\n", logits_error, logits_allowed, loss, r.loss);

    gpt2_micro_step(&model, r.x.data(), r.y.data(), r.B, r.T, 0, 1);
    for (int i = 0; i < NUM_PARAMS; i++) {
        const std::vector<float> grad = host_grad(&model, i);
        const double error = relative_error(grad.data(), r.grads[i].data(), grad.size());
        const double allowed = error_bound(r, std::string("_total_error/") + model.param_specs[i].name, grad_bound);
        CHECK(error <= allowed, "gradient of %s: |d|/|g| = %g, allowed %g", model.param_specs[i].name, error, allowed);
        printf("   d%-9s |d|/|g| %.3g (allowed %.3g)\n", model.param_specs[i].name, error, allowed);
    }

    // ten AdamW steps on this batch, from the start
    const std::vector<double> losses = json_numbers(r.json, "losses");
    const float lr = (float)json_numbers(r.json, "hyper/learning_rate")[0];
    const float beta1 = (float)json_numbers(r.json, "hyper/beta1")[0], beta2 = (float)json_numbers(r.json, "hyper/beta2")[0];
    const float eps = (float)json_numbers(r.json, "hyper/eps")[0], clip = (float)json_numbers(r.json, "hyper/grad_clip")[0];
    const double step_allowed = kLowPrecision ? 0.03 : 5e-5;
    for (size_t step = 0; step < losses.size(); step++) {
        gpt2_micro_step(&model, r.x.data(), r.y.data(), r.B, r.T, 0, 1);
        gpt2_update(&model, lr, beta1, beta2, eps, clip);
        const float got = gpt2_read_state(&model).loss;
        CHECK(fabs(got - losses[step]) <= step_allowed, "step %zu: loss %.7f, PyTorch %.7f", step, got, losses[step]);
    }
    gpt2_free(&model);
}

// == invariance ==
static const Config kTiny = {33, 509, 512, 3, 2, 40};       // head size 20: the plain attention
static const Config kTensorCore = {70, 300, 384, 2, 2, 128};    // head size 64

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

// Weights away from their symmetric start (biases 0, LayerNorm weights 1), so that no term of a gradient vanishes.
static void perturb(GPT2* model) {
    for (int i = 0; i < NUM_PARAMS; i++) {
        const ParamSpec& s = model->param_specs[i];
        std::vector<float> values(s.elems);
        for (int l = 0; l < s.copies; l++) {
            gpt2_get_param(model, i, l, values.data(), true);
            for (size_t k = 0; k < s.live_rows * s.cols; k++) { values[k] += 0.05f * rand_normal(7, (uint32_t)(100 + i), l * s.elems + k); }
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
static std::vector<float> short_run(const Config& c, const Options& o, int B, int T, int steps, int micro_steps = 1) {
    GPT2 model;
    start_model(&model, c, o, B, T);
    std::vector<float> result;
    for (int step = 0; step < steps; step++) {
        Batch batch = random_batch(c, B, T, (uint32_t)step);
        accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, micro_steps);
        gpt2_update(&model, 1e-3f, 0.9f, 0.95f, 1e-8f, 1.0f);
        result.push_back(gpt2_read_state(&model).loss);
    }
    const std::vector<float> params = host_params(&model);
    result.insert(result.end(), params.begin(), params.end());
    gpt2_free(&model);
    return result;
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
        Options r = o;
        r.residual_in_gemm = false;
        const std::vector<float> fused = short_run(c, r, B, T, 3);
        const double residual_error = relative_error(fused.data() + 3, base.data() + 3, base.size() - 3);
        CHECK(residual_error <= (kLowPrecision ? 2e-2 : 1e-4), "residual in LayerNorm differs from residual in GEMM by %g", residual_error);
        CHECK(fabs(fused[0] - base[0]) <= (kLowPrecision ? 1e-2 : 1e-5), "losses %.7f and %.7f", fused[0], base[0]);
    }
    TEST("one batch in 1, 2, 4 and 8 micro-steps") {
        Batch batch = random_batch(c, B, T, 0);
        std::vector<std::vector<float>> whole;
        std::vector<double> floor16(NUM_PARAMS, 0.0);
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
                CHECK(error <= (kLowPrecision ? 1e-2 : 1e-6), "%d micro-steps: gradient of %s differs by %g", micro_steps,
                      model.param_specs[i].name, error);
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
                    gpt2_set_inputs(model, other.x.data(), other.y.data(), B, T);
                    gpt2_loss(model, B, T, ClassifierMode::LossOnly, 0.0f, 1.0f, Accumulate::No);
                    gpt2_set_inputs(model, other.x.data(), nullptr, 1, T / 2);
                    gpt2_forward(model, 1, T / 2);
                    gpt2_logits(model, T / 2 - 1, 1);
                }
                accumulate_batch(model, batch.x.data(), batch.y.data(), B, T, 2);
                gpt2_update(model, 1e-3f, 0.9f, 0.95f, 1e-8f, 1.0f);
            }
        }
        CHECK(same_bits(host_params(&a), host_params(&b)), "parameters differ");
        CHECK(gpt2_read_state(&a).loss == gpt2_read_state(&b).loss, "losses differ");
        gpt2_free(&a);
        gpt2_free(&b);
    }
    TEST("a shorter sequence and a smaller batch than allocated") {
        GPT2 big, small;
        start_model(&big, c, o, B, T);
        start_model(&small, c, o, 2, 7);
        Batch other = random_batch(c, B, T, 5), batch = random_batch(c, 2, 7, 6);
        accumulate_batch(&big, other.x.data(), other.y.data(), B, T, 1);
        accumulate_batch(&big, batch.x.data(), batch.y.data(), 2, 7, 1);
        accumulate_batch(&small, batch.x.data(), batch.y.data(), 2, 7, 1);
        const std::vector<std::vector<float>> a = host_grads(&big), b = host_grads(&small);
        for (int i = 0; i < NUM_PARAMS; i++) { CHECK(same_bits(a[i], b[i]), "gradient of %s differs", big.param_specs[i].name); }
        gpt2_free(&big);
        gpt2_free(&small);
    }
    TEST("a gradient that is not finite changes nothing") {
        GPT2 model;
        start_model(&model, c, o, B, T);
        Batch batch = random_batch(c, B, T, 0);
        accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, 1);
        gpt2_update(&model, 1e-3f, 0.9f, 0.95f, 1e-8f, 1.0f);
        const std::vector<float> before = host_params(&model);
        const UpdateState good = gpt2_read_state(&model).update;
        CHECK(good.t == 1 && good.skip == 0 && isfinite(good.norm), "t %lld skip %d norm %f", good.t, good.skip, good.norm);
        for (float poison : {NAN, INFINITY}) {
            const Grad grad = gpt2_grad(&model, PARAM_fcw, c.L - 1, Accumulate::No);
            accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, 1);
            copy_to_device((float*)grad.data + 3, &poison, sizeof(float), model.stream);
            gpt2_update(&model, 1e-3f, 0.9f, 0.95f, 1e-8f, 1.0f);
            const UpdateState state = gpt2_read_state(&model).update;
            CHECK(state.skip == 1 && state.t == 1 && !isfinite(state.norm), "skip %d t %lld norm %f", state.skip, state.t, state.norm);
            CHECK(same_bits(before, host_params(&model)), "parameters changed");
            CHECK(!kFp16 || state.loss_scale < good.loss_scale, "FP16: the loss scale stayed at %f", state.loss_scale);
        }
        CHECK(gpt2_read_state(&model).update.skipped_in_a_row == 2, "skips in a row");
        accumulate_batch(&model, batch.x.data(), batch.y.data(), B, T, 1);
        gpt2_update(&model, 1e-3f, 0.9f, 0.95f, 1e-8f, 1.0f);
        const UpdateState after = gpt2_read_state(&model).update;
        CHECK(after.skip == 0 && after.t == 2 && after.skipped_in_a_row == 0, "skip %d t %lld", after.skip, after.t);
        CHECK(!same_bits(before, host_params(&model)), "a good step must change the parameters");
        gpt2_free(&model);
    }
    TEST("checkpoints") {
        GPT2 a, b;
        start_model(&a, c, o, 2, T);
        Batch batch = random_batch(c, 2, T, 0);
        accumulate_batch(&a, batch.x.data(), batch.y.data(), 2, T, 1);
        gpt2_update(&a, 1e-2f, 0.9f, 0.95f, 1e-8f, 1.0f);
        char folder[] = "/tmp/test_gpt2_XXXXXX";
        if (!mkdtemp(folder)) { die("cannot make a folder under /tmp"); }
        const std::string path = std::string(folder) + "/model_00000001.bin";
        checkpoint_save(&a, path);
        const Config loaded = checkpoint_config(path.c_str());
        CHECK(memcmp(&loaded, &c, sizeof(Config)) == 0, "the header's sizes differ");
        gpt2_allocate(&b, loaded, o, 2, T);
        checkpoint_load(&b, path.c_str());
        std::vector<float> pa, pb;
        for (int i = 0; i < NUM_PARAMS; i++) {
            for (int l = 0; l < a.param_specs[i].copies; l++) {
                pa.resize(a.param_specs[i].elems);
                pb.resize(a.param_specs[i].elems);
                gpt2_get_param(&a, i, l, pa.data(), kFp16);
                gpt2_get_param(&b, i, l, pb.data(), kFp16);
                CHECK(same_bits(pa, pb), "%s of layer %d differs", a.param_specs[i].name, l);
            }
        }
        // padded rows of wte: zero after a step, and no gradient
        const ParamSpec& wte = a.param_specs[PARAM_wte];
        std::vector<float> values(wte.elems), grad = host_grad(&a, PARAM_wte);
        gpt2_get_param(&a, PARAM_wte, 0, values.data(), true);
        bool zero = true;
        for (size_t k = wte.live_rows * wte.cols; k < wte.elems; k++) { zero = zero && values[k] == 0.0f && grad[k] == 0.0f; }
        CHECK(zero, "the padded vocabulary has weights or gradients");
        unlink(path.c_str());
        rmdir(folder);
        gpt2_free(&a);
        gpt2_free(&b);
    }
}

// KERNELS-PART
// == main ==
int main(int argc, char** argv) {
    std::vector<std::string> modes, references;
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        const bool more = i + 1 < argc;
        if (arg == "--list") {
            for (const char* name : kOutputNames) { puts(name); }
            return 0;
        }
        if (arg == "--break" && more) { break_name = argv[++i]; }
        else if (arg == "--reference" && more) { references.push_back(argv[++i]); }
        else if (arg == "kernels" || arg == "model" || arg == "invariance") { modes.push_back(arg); }
        else { die("'%s' is not an argument of this test\nhint: kernels, model, invariance, --reference PREFIX, --break NAME, --list", argv[i]); }
    }
    bool known = break_name == nullptr;
    for (const char* name : kOutputNames) { known = known || strcmp(name, break_name) == 0; }
    if (!known) { die("--break %s: there is no such output\nhint: --list prints them", break_name); }
    if (modes.empty()) { modes = {"kernels", "model", "invariance"}; }
    const DeviceInfo device = device_init();
    printf("device: %s, precision %s\n", device.name.c_str(), PRECISION_NAME);

    for (const std::string& mode : modes) {
#ifndef GPT2_CPU
        if (mode == "kernels") { test_kernels(); }
#endif
        if (mode == "model") {
            const bool given = !references.empty();
            if (!given) { references = {"dev/reference/fixture/ugly", "dev/reference/fixture/head64"}; }
            for (const std::string& prefix : references) {
                TEST(format("model against PyTorch: %s", prefix.c_str()).c_str()) {
                    test_model(prefix, default_options(), given ? 2e-5 : 1e-5, given ? 1e-4 : 2e-5);
                }
            }
        }
        if (mode == "invariance") {
            test_invariance("plain attention, C=40 V=509 T=33", kTiny);
            test_invariance("head size 64, C=128 V=300 T=70", kTensorCore);
        }
    }
    if (break_name && break_hits == 0) { printf("note: %s was not computed in this run\n", break_name); }
    return test_summary();
}
