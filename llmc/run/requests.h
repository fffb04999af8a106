/*
Texts for another program, dev/serve.py, which has the words. Requests are lines of ids on stdin, tokens are
lines on stdout. Host only.

    id=7 tokens=50256,464,3139 sample-tokens=20 temperature=0.8 top-k=40 top-p=1 seed=1 stop=50256,13
    cancel=7                    ends the text of 7, or takes it back while it waits

    7 1169                      a token as it is drawn; one of `stop` is the last
    7 end stop                  or length, or cancel
    7 error WHAT                instead of a text

    requests_answer(V, T, [&](const Request& request, const OnToken& on_token) { ... });    // draws a text

Requests wait for their turn. What one does not say is the flag of that name. A text depends on its request
alone: it is that of `sample` with these flags.
*/
#pragma once

#include <poll.h>       // gives: poll

#include <deque>        // gives: std::deque
#include <iostream>     // gives: std::cin

#include "../data/sampler.h"    // gives: Sampling
#include "../errors.h"  // gives: format
#include "run_config.h" // gives: run, kFlags
#include "samples.h"    // gives: OnToken

struct Request {
    std::string id = "-";
    std::vector<int> prompt, stops;
    int tokens = run.sample_tokens;
    Sampling sampling = {(float)run.temperature, run.top_k, (float)run.top_p};
    uint64_t seed = run.seed;
};
typedef std::function<void(const Request&, const OnToken&)> RequestDraw;

// What is wrong with the line; "": it is understood.
static inline std::string request_read(const std::string& line, int V, int T, Request* r) {
    const std::map<std::string, std::function<void(double)>> numbers = {
        {"sample-tokens", [=](double x) { r->tokens = (int)x; }},
        {"temperature", [=](double x) { r->sampling.temperature = (float)x; }},
        {"top-k", [=](double x) { r->sampling.top_k = (int)x; }},
        {"top-p", [=](double x) { r->sampling.top_p = (float)x; }},
        {"seed", [=](double x) { r->seed = (uint64_t)x; }}};
    std::string error;
    for (const std::string& word : flags_split(line, ' ')) {
        const std::string name = word.substr(0, word.find('=')), value = word.substr(word.find('=') + 1);
        const auto number = numbers.find(name);
        if (name == "id") { r->id = value; }
        else if (name == "tokens" || name == "stop") {
            for (const std::string& text : flags_split(value, ',')) {
                int64_t token = 0;
                if (!parse_int(text, &token) || token < 0 || token >= V) {
                    error = format("%s: '%s' is no id from 0 to %d", name.c_str(), text.c_str(), V - 1);
                }
                (name == "stop" ? r->stops : r->prompt).push_back((int)token);
            }
        }
        else if (number != numbers.end()) {
            const Flag* flag = flags_find(kFlags, "--" + name);
            double x = NAN;
            const bool is_whole = parse_double(value, &x) && x == floor(x);
            const bool fits = x >= flag->min && x <= flag->max && (is_whole || flag->type == FLAG_FLOAT);
            if (fits) { number->second(x); }
            else { error = word + "; allowed are " + flags_range(flag); }
        }
        else { error = format("a request has no '%s'", word.c_str()); }
    }
    if (error.empty() && (r->prompt.empty() || r->prompt.size() > (size_t)T)) {
        error = format("the prompt has %zu tokens; allowed are 1 to %d", r->prompt.size(), T);
    }
    return error;
}

// Takes the lines that stdin has; if none waits, and `waits`, until there is one. False: stdin has ended.
static inline bool requests_take(std::deque<std::string>* lines, bool waits) {
    pollfd in = {STDIN_FILENO, POLLIN, 0};
    std::string line;
    while ((waits && lines->empty()) || std::cin.rdbuf()->in_avail() > 0 || poll(&in, 1, 0) > 0) {
        if (!std::getline(std::cin, line)) { break; }
        lines->push_back(line);
    }
    return !lines->empty();
}

// Answers until stdin ends.
static inline void requests_answer(int V, int T, const RequestDraw& draw) {
    std::ios::sync_with_stdio(false);           // in_avail() then knows what was read ahead
    for (std::deque<std::string> lines; requests_take(&lines, true);) {
        const std::string line = lines.front();
        lines.pop_front();
        if (line.rfind("cancel=", 0) == 0) { continue; }        // that text has ended
        Request r;
        const std::string error = request_read(line, V, T, &r);
        const char* id = r.id.c_str();
        auto is_cancelled = [&] {
            requests_take(&lines, false);
            return std::count(lines.begin(), lines.end(), "cancel=" + r.id) > 0;
        };
        const char* end = is_cancelled() ? "cancel" : "length";
        if (error.empty() && end[0] == 'l') {
            draw(r, [&](int, int token) {
                printf("%s %d\n", id, token);
                fflush(stdout);
                if (std::count(r.stops.begin(), r.stops.end(), token)) { end = "stop"; }
                else if (is_cancelled()) { end = "cancel"; }
                return end[0] == 'l';
            });
        }
        printf("%s %s %s\n", id, error.empty() ? "end" : "error", error.empty() ? end : error.c_str());
        fflush(stdout);
    }
}
