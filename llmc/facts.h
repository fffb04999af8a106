/*
Named texts in an order: what a state file, run.json or a table in JSON says, what all ranks must agree on.

    const Facts facts = {{"step", "1000"}, {"precision", "BF16"}};
    const std::string* precision = facts_find(facts, "precision");      // nullptr: no such name
    const int64_t step = fact_number(facts, "step", 0, INT_MAX);        // of a state: dies if it is not there
*/
#pragma once

#include "errors.h"     // gives: die
#include "numbers.h"    // gives: parse_int

typedef std::vector<std::pair<std::string, std::string>> Facts;     // names and values

static inline const std::string* facts_find(const Facts& facts, const std::string& key) {
    for (const auto& fact : facts) { if (fact.first == key) { return &fact.second; } }
    return nullptr;
}

// Facts as lines `key=value`; \n stands for a line's end, \\ for a backslash.
static inline std::string facts_text(const Facts& facts) {
    std::string text;
    for (const auto& fact : facts) {
        assert(fact.first.find_first_of("=\n\\") == std::string::npos);
        text += fact.first + "=";
        for (char c : fact.second) { text += c == '\n' ? "\\n" : c == '\\' ? "\\\\" : std::string(1, c); }
        text += "\n";
    }
    return text;
}

// Appends the facts of such a text. False: it is none.
static inline bool facts_parse(const std::string& text, Facts* facts) {
    for (size_t at = 0, end; at < text.size(); at = end + 1) {
        const size_t equals = text.find('=', at);
        end = text.find('\n', at);
        if (end == std::string::npos || equals > end) { return false; }
        std::string value;
        for (size_t i = equals + 1; i < end; i++) {
            if (text[i] != '\\') { value += text[i]; continue; }
            const char escaped = text[++i];     // the line's end at the latest
            if (escaped != 'n' && escaped != '\\') { return false; }
            value += escaped == 'n' ? '\n' : '\\';
        }
        facts->push_back({text.substr(at, equals - at), value});
    }
    return true;
}

// A whole number among the facts; dies if it is missing or out of range.
static inline int64_t fact_number(const Facts& facts, const std::string& key, int64_t least, int64_t most) {
    const std::string* text = facts_find(facts, key);
    if (!text) { die("the state to resume from does not say '%s'", key.c_str()); }
    int64_t n;
    if (!parse_int(*text, &n) || n < least || n > most) {
        die("the state to resume from says '%s' is %s: expected %lld to %lld", key.c_str(), text->c_str(),
            (long long)least, (long long)most);
    }
    return n;
}
