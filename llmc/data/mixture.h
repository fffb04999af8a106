/*
A mixture of token shards, `web_*.bin:0.7,code_*.bin:0.3`: its sources, and which of them each row comes from.
Host only.

    const std::vector<MixturePart> parts = mixture_split(text);     // a text without weights is one part
    const Mixture m = mixture_init(mixture_weights(text, parts));   // dies of a bad weight
    const MixtureRow r = mixture_row(m, g);         // row g of all is row r.number of source r.source

Weights are fractions that sum to 1, or whole numbers. They become whole numbers w of the same ratios without
a common divisor, here 7 and 3; W is their sum. Let c of the first g rows be from a source. Row g comes from
the source with the largest (g + 1) * w - W * c, which without it would lag most behind its share; of several,
from the first.

The shares are exact. The lag g * w - W * c of a source stays above -W: none is ever a whole row ahead. At
g = W the lags are multiples of W above -W, and their sum is 0, so each of them is 0: of W rows, exactly w are
from a source. There the order begins again, so a table of W rows holds it.
*/
#pragma once

#include <numeric>          // gives: std::gcd, std::accumulate

#include "../checked_files.h" // gives: die, file_size, format
#include "../numbers.h"     // gives: parse_double

struct MixturePart { std::string pattern, weight; bool has_weight; };
struct MixtureRow { int source; int64_t number; };

struct Mixture {
    std::vector<int64_t> weights;           // (sources) w
    std::vector<MixtureRow> rows;           // (W) the first ones
};

static const int64_t kMixtureUnits = 1000000;           // the largest W
static const char* const kMixtureHint =
    "hint: in a mixture each source has a weight: 'web_*.bin:0.7,code_*.bin:0.3'; in a path, write \\: and "
    "\\, for a colon and a comma";

// Splits the text at its commas, and each part at its last colon, behind which its weight stands. The text is
// one pattern without a weight if it names a file, or if none of these weights looks like a number. A
// backslash makes the next character part of the pattern, where glob removes the backslash.
static inline std::vector<MixturePart> mixture_split(const std::string& text) {
    std::vector<MixturePart> parts = {{"", "", false}};
    for (size_t i = 0; i < text.size(); i++) {
        MixturePart& part = parts.back();
        if (text[i] == ',') { parts.push_back({"", "", false}); continue; }
        if (text[i] == ':') {
            if (part.has_weight) { part.pattern += ":" + part.weight; }
            part.weight = "";
            part.has_weight = true;
            continue;
        }
        std::string& to = part.has_weight ? part.weight : part.pattern;
        to += text[i];
        if (text[i] == '\\' && i + 1 < text.size()) { to += text[++i]; }
    }
    auto looks_weighted = [](const MixturePart& part) {
        return !part.weight.empty() && part.weight.find_first_not_of("0123456789.eE+-") == std::string::npos;
    };
    const bool is_mixture = std::any_of(parts.begin(), parts.end(), looks_weighted);
    if (!is_mixture || file_size(text.c_str()) >= 0) { return {{text, "", false}}; }
    return parts;
}

// The last `count` components of a path, or all.
static inline std::string mixture_path_end(const std::string& path, int count) {
    size_t at = path.size();
    while (count-- > 0 && at > 0 && at != std::string::npos) { at = path.rfind('/', at - 1); }
    return at == std::string::npos ? path : path.substr(at + 1);
}

// Short names of the patterns: web and code, of data/web_val_*.bin and data/code_val_*.bin. A name is as much
// of the path's end as tells the paths apart, without what all begin or end with. So names stay if the paths
// become absolute.
static inline std::vector<std::string> mixture_names(const std::vector<MixturePart>& parts) {
    std::vector<std::string> names;
    size_t different = 0;
    for (int components = 1; components < 64 && different < parts.size(); components++) {
        names.clear();
        for (const MixturePart& part : parts) { names.push_back(mixture_path_end(part.pattern, components)); }
        different = std::set<std::string>(names.begin(), names.end()).size();
    }
    if (parts.size() == 1) { return names; }
    for (int turn = 0; turn < 2; turn++) {      // cuts what all begin with; reversed, what all end with
        size_t common = 0;
        auto same = [&](const std::string& name) {
            return common + 1 < name.size() && name[common] == names[0][common];
        };
        while (std::all_of(names.begin(), names.end(), same)) { common++; }
        while (common > 0 && isalnum((unsigned char)names[0][common - 1])) { common--; }        // whole words
        for (std::string& name : names) {
            name.erase(0, common);
            std::reverse(name.begin(), name.end());
        }
    }
    return names;
}

// The weights as whole numbers without a common divisor; {1} for a text without weights. Dies of bad ones.
static inline std::vector<int64_t> mixture_weights(const std::string& text,
                                                   const std::vector<MixturePart>& parts) {
    if (parts.size() == 1 && !parts[0].has_weight) { return {1}; }
    std::vector<double> values;
    for (const MixturePart& part : parts) {
        if (part.pattern.empty()) { die("'%s': a source has no pattern\n%s", text.c_str(), kMixtureHint); }
        if (part.weight.empty()) {
            die("'%s': '%s' has no weight\n%s", text.c_str(), part.pattern.c_str(), kMixtureHint);
        }
        double x;
        const bool is_number = parse_double(part.weight, &x) && x > 0 && x <= kMixtureUnits;
        const double units = is_number ? x * kMixtureUnits : 0.5;
        if (fabs(units - round(units)) > 1e-3) {
            die("'%s': the weight '%s' of '%s' must be a number above 0 and up to %lld, with at most six "
                "decimals\n%s", text.c_str(), part.weight.c_str(), part.pattern.c_str(),
                (long long)kMixtureUnits, kMixtureHint);
        }
        values.push_back(x);
    }
    const bool whole = std::all_of(values.begin(), values.end(), [](double x) { return x == floor(x); });
    std::vector<int64_t> weights;
    for (double x : values) { weights.push_back(llround(whole ? x : x * kMixtureUnits)); }
    const int64_t sum = std::accumulate(weights.begin(), weights.end(), (int64_t)0);
    if (!whole && sum != kMixtureUnits) {
        die("the weights of '%s' sum to %.10g, and fractions must sum to 1\n"
            "hint: whole numbers are parts of their sum: 'web_*.bin:2,code_*.bin:1'", text.c_str(),
            (double)sum / kMixtureUnits);
    }
    if (sum > kMixtureUnits) {
        die("the weights of '%s' sum to %lld: at most %lld", text.c_str(), (long long)sum,
            (long long)kMixtureUnits);
    }
    int64_t divisor = 0;
    for (int64_t w : weights) { divisor = std::gcd(divisor, w); }
    for (int64_t& w : weights) { w /= divisor; }
    return weights;
}

// weights: whole numbers above 0.
static inline Mixture mixture_init(const std::vector<int64_t>& weights) {
    Mixture m = {weights, {}};
    const int64_t W = std::accumulate(weights.begin(), weights.end(), (int64_t)0);
    std::vector<int64_t> counts(weights.size());
    for (int64_t g = 0; g < W; g++) {
        size_t most = 0;
        auto lag = [&](size_t k) { return (g + 1) * weights[k] - W * counts[k]; };
        for (size_t k = 1; k < weights.size(); k++) { if (lag(k) > lag(most)) { most = k; } }
        m.rows.push_back({(int)most, counts[most]++});
    }
    return m;
}

static inline MixtureRow mixture_row(const Mixture& m, int64_t g) {
    const int64_t W = (int64_t)m.rows.size();
    const MixtureRow& r = m.rows[(size_t)(g % W)];
    return {r.source, g / W * m.weights[(size_t)r.source] + r.number};
}
