/*
Named texts in an order: what a state file, run.json or a table in JSON says, what all ranks must agree on.

    const Facts facts = {{"step", "1000"}, {"precision", "BF16"}};
    const std::string* precision = facts_find(facts, "precision");      // nullptr: no such name
    const int64_t step = fact_number(facts, "step", 0, INT_MAX);        // of a state: dies if it is not there
*/
#pragma once

#include <stdint.h>     // gives: int64_t

#include <string>       // gives: std::string
#include <utility>      // gives: std::pair
#include <vector>       // gives: std::vector

#include "check.h"      // gives: die
#include "numbers.h"    // gives: parse_int

typedef std::vector<std::pair<std::string, std::string>> Facts;     // names and values

static inline const std::string* facts_find(const Facts& facts, const std::string& key) {
    for (const auto& fact : facts) { if (fact.first == key) { return &fact.second; } }
    return nullptr;
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
