/*
What is in a run's checkpoints, and is it still what was written?

    g++ -std=c++17 -O2 -pthread -I. dev/tools/checkpoint.cpp -o build/checkpoint
    build/checkpoint runs/a                     # a line for each checkpoint: step, size, sound or what is not
    build/checkpoint runs/a/state_*.bin         # what the run knew of itself; every checksum is computed
    build/checkpoint --tensors FILE             # and a line for each tensor
    build/checkpoint runs/a/model_*.bin         # the model's shape, and the checksum of the whole file

Exit code 1 if anything is damaged. Nothing is written.
*/
#include <stdio.h>                      // gives: printf

#include <string>                       // gives: std::string
#include <vector>                       // gives: std::vector

#include "llmc/files/checkpoints.h"     // gives: checkpoint_check, model_file_error, StateFile

static bool show_tensors;

static std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

static std::string size_text(double bytes) {
    const char* units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    for (; bytes >= 1024 && unit < 4; unit++) { bytes /= 1024; }
    return format(unit == 0 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
}

// Reads every tensor of an open state file. Returns the first fault, or ""; prints all of them, if it is to.
static std::string read_tensors(const StateFile& s, bool print) {
    std::string first;
    std::vector<char> data;
    for (size_t i = 0; i < s.rows.size(); i++) {
        const StateRow& row = s.rows[i];
        data.resize(state_row_bytes(row));
        const std::string error = state_read(&s, i, data.data());
        if (first.empty()) { first = error; }
        const std::string shape = format("%llu x %llu", (unsigned long long)row.rows,
                                         (unsigned long long)row.cols);
        const bool whole = row.count == row.rows * row.cols;
        const std::string part = whole ? "all" : format("%llu to %llu", (unsigned long long)row.begin,
                                                        (unsigned long long)(row.begin + row.count - 1));
        if (print && show_tensors) {
            printf("  %-24s %-4s %14s  %-24s %s%s\n", shown(row.name).c_str(), row.type, shape.c_str(),
                   part.c_str(), checksum_text(row.checksum).c_str(), error.empty() ? "" : "  DAMAGED");
        } else if (print && !error.empty()) { printf("  %s\n", shown(error).c_str()); }
    }
    return first;
}

static std::string state_error(const std::string& path, bool print) {
    StateFile s;
    std::string error = state_open(&s, path);
    if (error.empty()) {
        for (size_t i = 0; print && i < s.facts.size(); i++) {
            printf("  %s = %s\n", shown(s.facts[i].first).c_str(), shown(s.facts[i].second).c_str());
        }
        error = read_tensors(s, print);
    }
    if (print && error.empty()) { printf("  %zu tensors, all as they were written\n", s.rows.size()); }
    return error;
}

// variant: not GPT-2, words 8 and 9 of the header say which block and norm.
static double gpt2_parameters(const int* h, bool variant) {
    const bool tied = variant && h[8] == 2, rms = variant && h[9] == 1;
    const double C = h[6], norms = (tied ? 1 : 2) * (rms ? 1 : 2);         // vectors of a layer
    return C * h[7] + C * h[2] + h[4] * (12 * C * C + (9 + norms) * C) + (rms ? 1 : 2) * C;
}

static double llama_parameters(const int* h) {
    Config c = {};
    c.maxT = h[2], c.V = h[3], c.L = h[4], c.NH = h[5], c.C = h[6], c.llama = llama_from_header(h);
    printf("  %s\n", llama_text(c).c_str());
    const Config::Shape& s = c.llama;
    const double C = c.C, norms = s.norm_weights ? 1 : 0;
    const double attention = (2.0 * c.NH + 2.0 * s.NKV) * s.HS * C, mlp = is_gated(s.mlp) ? 3 : 2;
    const double biases = s.qkv_bias ? (c.NH + 2.0 * s.NKV) * s.HS : 0;
    const double layer = attention + biases + mlp * s.F * C + norms * (2 * C + (s.qk_norm ? 2 * s.HS : 0));
    const double heads = s.value_embed ? c.L / 2 * s.NKV : 0;       // with value embeddings
    return C * h[7] * (s.tied ? 1 : 2) + c.L * layer + norms * C + heads * (h[7] * s.HS + kGateChannels);
}

static std::string model_error(const std::string& path) {
    int h[256];
    FILE* f = fopen_check(path.c_str(), "rb");
    const bool read = fread(h, sizeof(h), 1, f) == 1;
    fclose(f);
    if (!read || h[0] != kModelMagic) { return "is neither a state file nor a model file"; }
    const auto [version, variant, llama, later, windows] = model_kind(h[1]);
    if (version != kModelFp32 && version != kModelBf16) {
        return format("has version %d; known are " MODEL_VERSIONS, h[1]);
    }
    printf("  version %d (%s), maxT %d, V %d, L %d, NH %d, C %d, Vp %d\n", h[1],
           version == kModelFp32 ? "fp32" : "bf16", h[2], h[3], h[4], h[5], h[6], h[7]);
    if (variant) { printf("  not GPT-2: block %d, norm %d\n", h[8], h[9]); }
    Config c = {};
    if (windows) { windows_from_header(h, &c), printf("  windows%s\n", window_text(c).c_str()); }
    const double parameters = llama ? llama_parameters(h) : gpt2_parameters(h, variant);
    const double bytes = sizeof(h) + parameters * (version == kModelFp32 ? 4 : 2);
    if ((double)file_size(path.c_str()) != bytes) {
        return format("has %lld bytes, and its header means %.0f", (long long)file_size(path.c_str()), bytes);
    }
    uint64_t sum;
    const std::string error = model_file_error(path, &sum);
    if (error.empty()) {
        printf("  %s\n", sum ? ("checksum " + checksum_text(sum) + ", as it was written").c_str()
                             : "no checksum: that nothing has changed cannot be told");
    }
    return error;
}

// A line on a checkpoint. True if it is sound.
static bool show_checkpoint(const std::string& folder, int64_t step) {
    std::vector<std::string> states;
    std::string error = checkpoint_check(folder, step, &states);
    const std::string model = checkpoint_model(folder, step);
    double bytes = (double)file_size(model.c_str());
    uint64_t sum;
    if (error.empty()) {
        error = model_file_error(model, &sum);
        if (!error.empty()) { error = file_name(model) + " " + error; }
    }
    for (size_t i = 0; i < states.size() && error.empty(); i++) {
        bytes += (double)file_size(states[i].c_str());
        error = state_error(states[i], false);
        if (!error.empty()) { error = file_name(states[i]) + " " + error; }
    }
    if (!error.empty()) {
        printf("  step %lld: NOT SOUND: %s\n", (long long)step, shown(error).c_str());
        return false;
    }
    const bool marked = file_size(checkpoint_marker(folder, step).c_str()) >= 0;
    printf("  step %lld: %s in %zu files, sound%s\n", (long long)step, size_text(bytes).c_str(),
           states.size() + 1, marked ? "" : ", but without its DONE file");
    return true;
}

static bool show_path(const std::string& path) {
    struct stat st;
    if (stat(path.c_str(), &st) != 0) { die("cannot open '%s': %s", path.c_str(), strerror(errno)); }
    if (S_ISDIR(st.st_mode)) {
        const std::vector<int64_t> steps = checkpoint_steps(path, true);
        printf("%s: %zu checkpoint%s\n", shown(path).c_str(), steps.size(), steps.size() == 1 ? "" : "s");
        bool sound = true;
        for (int64_t step : steps) { sound = show_checkpoint(path, step) && sound; }
        return sound;
    }
    input_check(path.c_str());
    printf("%s: %s\n", shown(path).c_str(), size_text((double)st.st_size).c_str());
    char magic[sizeof(kStateMagic)] = {};
    FILE* f = fopen_check(path.c_str(), "rb");
    const bool read = fread(magic, sizeof(magic), 1, f) == 1;
    fclose(f);
    const bool is_state = read && memcmp(magic, kStateMagic, sizeof(magic)) == 0;
    const std::string error = is_state ? state_error(path, true) : model_error(path);
    if (!error.empty()) { printf("  NOT SOUND: it %s\n", shown(error).c_str()); }
    return error.empty();
}

int main(int argc, char** argv) {
    std::vector<std::string> paths;
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "--help") {
            printf("usage: %s [--tensors] PATH...\n\n"
                   "  PATH       a run's folder, state_*.bin or model_*.bin: what it has, and is it sound?\n"
                   "  --tensors  of a state: name, type, shape, which elements and checksum of each tensor\n",
                   argv[0]);
            stdout_check();
            return 0;
        }
        if (word == "--tensors") { show_tensors = true; }
        else if (word[0] == '-') { die("unknown flag '%s'\nhint: --help lists all flags", argv[i]); }
        else { paths.push_back(word); }
    }
    if (paths.empty()) { die("no PATH is given\nhint: %s runs/a; --help tells more", argv[0]); }
    bool sound = true;
    for (const std::string& path : paths) { sound = show_path(path) && sound; }
    stdout_check();
    return sound ? 0 : 1;
}
