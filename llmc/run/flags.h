/*
The command line as one table. Parsing, --help, the settings at the start and in files use the same rows,
so they cannot disagree. A default is text that is parsed like user text. Host only.

    struct { int B; double lr; int schedule; const char* out; } cfg;
    const FlagTable table = {
        // letters name      type         where          default   min max    options          help
        {"b", "micro-batch", FLAG_INT,    &cfg.B,        "4",      1,  65536, nullptr,         "rows (B)"},
        {"l", "lr",          FLAG_FLOAT,  &cfg.lr,       "3e-4",   0,  10,    nullptr,         "peak rate"},
        {"k", "lr-schedule", FLAG_ENUM,   &cfg.schedule, "cosine", 0,  0,     "cosine|linear", "its shape"},
        {"o", "output",      FLAG_STRING, &cfg.out,      "",       0,  0,     nullptr,         "folder"},
    };
    flags_parse(table, argc, argv);         // fills cfg; dies if the command line is wrong

A user writes `-b 8`, `-b=8`, `--micro-batch 8` or `--micro-batch=8`; `_` in a long name counts as `-`. In
`--prompt -b` the value of --prompt counts as missing, because -b is a flag; the form with = takes any value
(`--prompt=-b`).
*/
#pragma once

#include "../errors.h"      // gives: die, format
#include "../files/json.h"  // gives: json_quote
#include "../numbers.h"     // gives: parse_int, parse_double, parse_int_hint

enum FlagType { FLAG_INT, FLAG_INT64, FLAG_FLOAT, FLAG_STRING, FLAG_BOOL, FLAG_ENUM };

// A resumed run takes a KEPT flag's value from the earlier start unless the user gives another; for a FIXED
// flag, another value is an error. A NOW flag concerns this start only.
enum FlagResume { FLAG_KEPT, FLAG_FIXED, FLAG_NOW };

struct Flag {
    const char* letters;    // "b"; "z,d": synonyms, written -z and -d; "l,-lr": -l and --lr; "": none
    const char* name;       // "micro-batch": written --micro-batch
    FlagType type;
    void* where;            // int*, int64_t*, double*, const char**, int* (0 or 1), int* or enum* (option)
    const char* def;        // default, parsed like user text
    double min, max;        // numbers: both ends allowed; strings: min is the shortest length; else unused
    const char* options;    // ENUM: "cosine|linear"; else nullptr
    const char* help;
    FlagResume resume = FLAG_KEPT;
    bool is_auto = false;   // the program chooses its value, unless the command has a letter, such as -b
    mutable const char* given = nullptr;    // what the user typed ("-b", "--micro-batch=8"); nullptr: default
    mutable std::string from = {};          // what has chosen its value, if not the user; "": the default
};
typedef std::vector<Flag> FlagTable;

// What to do instead, where one of these names is no flag of the table, or was given twice. Names have blanks
// between them and no dashes in front.
struct FlagAnswer { const char *names, *instead; };
typedef std::vector<FlagAnswer> FlagAnswers;

// ---- text ----

// User text for an error message: at most 60 characters, on one line.
static inline std::string flags_show(const std::string& text) {
    return shown(text.substr(0, 60)) + (text.size() > 60 ? "..." : "");
}

static inline std::vector<std::string> flags_split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    for (size_t from = 0; !text.empty() && from <= text.size();) {
        size_t to = std::min(text.find(separator, from), text.size());
        parts.push_back(text.substr(from, to - from));
        from = to + 1;
    }
    return parts;
}

// All spellings of the flag: "-z", "-d", "--total-batch".
static inline std::vector<std::string> flags_spellings(const Flag* f) {
    std::vector<std::string> all;
    for (const std::string& letter : flags_split(f->letters, ',')) { all.push_back("-" + letter); }
    all.push_back(std::string("--") + f->name);
    return all;
}

static inline std::string flags_title(const Flag* f) {      // "-b (--micro-batch)"
    std::vector<std::string> all = flags_spellings(f);
    return all.size() == 1 ? all[0] : all[0] + " (" + all.back() + ")";
}

// The shortest text that reads back as the same number: 0.1 is "0.1".
static inline std::string flags_real_text(double x) {
    for (int digits = 6; digits < 17; digits++) {
        std::string s = format("%.*g", digits, x);
        if (strtod(s.c_str(), nullptr) == x) { return s; }
    }
    return format("%.17g", x);
}

static inline std::string flags_text(const Flag* f) {       // the current value, as a user would write it
    int option;                                             // an ENUM: an int, or an enum of that size
    switch (f->type) {
        case FLAG_INT: case FLAG_BOOL: return format("%d", *(int*)f->where);
        case FLAG_INT64: return format("%lld", (long long)*(int64_t*)f->where);
        case FLAG_FLOAT: return flags_real_text(*(double*)f->where);
        case FLAG_STRING: return *(const char**)f->where;
        case FLAG_ENUM:
            memcpy(&option, f->where, sizeof(option));
            return flags_split(f->options, '|')[(size_t)option];
    }
    return "";
}

static inline std::string flags_number(const Flag* f, double x) {
    return f->type == FLAG_FLOAT ? flags_real_text(x) : format("%.0f", x);
}

// The allowed values: "1 to 65536", "at least 0" (max is INT_MAX), "cosine|linear".
static inline std::string flags_range(const Flag* f) {
    if (f->type == FLAG_ENUM) { return f->options; }
    if (f->type == FLAG_BOOL) { return "0|1"; }
    const std::string min = flags_number(f, f->min);
    return f->max == INT_MAX ? "at least " + min : min + " to " + flags_number(f, f->max);
}

// ---- names ----

// "--learning_rate" is "--learning-rate".
static inline std::string flags_dashed(std::string spelling) {
    if (spelling.compare(0, 2, "--") == 0) { std::replace(spelling.begin(), spelling.end(), '_', '-'); }
    return spelling;
}

static inline const Flag* flags_find(const FlagTable& table, const std::string& written) {
    const std::string spelling = flags_dashed(written);
    for (const Flag& flag : table) {
        for (const std::string& s : flags_spellings(&flag)) { if (s == spelling) { return &flag; } }
    }
    return nullptr;
}

// Edits (insert, delete, replace) between two words, regardless of case.
static inline int flags_distance(const std::string& a, const std::string& b) {
    std::vector<int> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) { row[j] = (int)j; }
    for (size_t i = 1; i <= a.size(); i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= b.size(); j++) {
            int replace = diagonal + (tolower((unsigned char)a[i - 1]) != tolower((unsigned char)b[j - 1]));
            diagonal = row[j];
            row[j] = std::min(replace, 1 + std::min(row[j], row[j - 1]));
        }
    }
    return row[b.size()];
}

// The known word nearest to a wrong one, "" if none is near. Dashes do not count: -batch finds --batch.
static inline std::string flags_nearest(const std::vector<std::string>& known, const std::string& wrong) {
    auto bare = [](const std::string& s) { return s.substr(std::min(s.find_first_not_of('-'), s.size())); };
    std::string word = bare(wrong).substr(0, 64), best;
    int limit = std::min(2 + (int)word.size() / 3, (int)word.size());   // beyond it, no typing error
    for (const std::string& s : known) {
        int d = flags_distance(word, bare(s));
        if (d < limit) { best = s; limit = d; }
    }
    return best;
}

// "": there is no answer.
static inline std::string flags_answer(const FlagAnswers& answers, const std::string& spelling) {
    const std::string dashed = flags_dashed(spelling);
    const std::string name = dashed.substr(std::min(dashed.find_first_not_of('-'), dashed.size()));
    for (const FlagAnswer& answer : answers) {
        const std::vector<std::string> names = flags_split(answer.names, ' ');
        if (std::count(names.begin(), names.end(), name)) { return answer.instead; }
    }
    return "";
}

// ---- values ----

[[noreturn]] static inline void flags_value_error(const Flag* f, const std::string& wants, const char* text,
                                                  const std::string& hint) {
    die("%s wants %s, not '%s'\nhint: %s", flags_title(f).c_str(), wants.c_str(), flags_show(text).c_str(),
        hint.c_str());
}

static inline std::string flags_about(const Flag* f) {
    const std::string def = f->def[0] ? f->def : "none";
    const char* beside = f->is_auto ? "auto; beside letters, as -b, " : "";
    return f->help + format(" (default %s%s)", beside, def.c_str());
}

// Does the text leave the choice to the program?
static inline bool flags_says_auto(const Flag* f, const char* text) {
    return f->is_auto && strcmp(text, "auto") == 0;
}

// Stores the value in *f->where, or dies and names the allowed values.
static inline void flags_set(const Flag* f, const char* text) {
    const std::string see = flags_about(f);
    if (flags_says_auto(f, text)) { return flags_set(f, f->def); }
    if (f->type == FLAG_STRING) {
        if ((double)strlen(text) < f->min) {
            flags_value_error(f, format("a text of %.0f or more characters", f->min), text, see);
        }
        *(const char**)f->where = text;
        return;
    }
    if (f->type == FLAG_BOOL) {
        if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0) { flags_value_error(f, "0 or 1", text, see); }
        *(int*)f->where = text[0] == '1';
        return;
    }
    if (f->type == FLAG_ENUM) {
        std::vector<std::string> options = flags_split(f->options, '|');
        for (int i = 0; i < (int)options.size(); i++) {
            if (options[i] == text) { memcpy(f->where, &i, sizeof(i)); return; }
        }
        std::string near = flags_nearest(options, text);
        flags_value_error(f, std::string("one of ") + f->options, text,
                          near.empty() ? see : "did you mean '" + near + "'?");
    }

    if (f->type == FLAG_FLOAT) {
        const std::string wants = "a number, " + flags_range(f);
        if (!is_number(text)) { flags_value_error(f, wants, text, see); }
        double x;                               // must not become inf or 0 as a float
        if (!parse_double(text, &x) || !isfinite((float)x) || ((float)x == 0.0f && x != 0.0)) {
            flags_value_error(f, wants, text, "this is more than a float can hold");
        }
        if (!(x >= f->min && x <= f->max)) { flags_value_error(f, wants, text, see); }
        *(double*)f->where = x;
        return;
    }
    const std::string wants = "a whole number, " + flags_range(f);
    int64_t n;
    if (!parse_int(text, &n)) {
        std::string hint = parse_int_hint(text);
        flags_value_error(f, wants, text, hint.empty() ? see : hint);
    }
    if ((double)n < f->min || (double)n > f->max) { flags_value_error(f, wants, text, see); }
    if (f->type == FLAG_INT) { *(int*)f->where = (int)n; } else { *(int64_t*)f->where = n; }
}

// Takes over the settings of an earlier start. saved(name) returns a flag's text, which must stay allocated,
// or nullptr if the earlier start did not know the flag.
template <class Saved> static inline void flags_resume(const FlagTable& table, Saved saved) {
    for (const Flag& f : table) {
        const char* text = f.resume == FLAG_NOW ? nullptr : saved(f.name);
        if (!text) { continue; }
        if (!f.given) { flags_set(&f, text); continue; }
        if (f.resume == FLAG_FIXED && flags_text(&f) != text) {
            die("%s %s: the run in this folder began with %s, and a resumed run keeps that\n"
                "hint: leave the flag out, or start another run in another folder", flags_title(&f).c_str(),
                flags_show(flags_text(&f)).c_str(), flags_show(text).c_str());
        }
    }
}

// ---- the table as help, settings and JSON ----

// A part of --help. Names have blanks between them; `others` are shown by --help all only.
struct FlagGroup { std::string title, everyday, others; };

// Prints the words of `text` after `start`, in lines no longer than `columns`, all but the first indented.
static inline void flags_wrap(const std::string& start, const std::string& text, size_t columns) {
    std::string line = start;
    bool fresh = true;                                      // no word on this line yet
    for (const std::string& word : flags_split(text, ' ')) {
        if (!fresh && line.size() + 1 + word.size() > columns) {
            printf("%s\n", line.c_str());
            line.assign(start.size(), ' ');
            fresh = true;
        }
        line += (fresh ? "" : " ") + word;
        fresh = false;
    }
    printf("%s\n", line.c_str());
}

// `-z,-d --total-batch N`; other long names stand behind the explanation.
static inline void flags_help_one(const Flag& f, size_t indent) {
    const char* kinds[] = {"N", "N", "X", "TEXT", "0|1", "WORD"};
    std::string letters, text = flags_about(&f);
    if (f.type == FLAG_ENUM || (f.type == FLAG_INT && f.max < 10)) {
        text.insert(text.size() - 1, "; " + flags_range(&f));
    }
    for (const std::string& s : flags_split(f.letters, ',')) {
        if (s[0] == '-') { text += "; or -" + s; }
        else { letters += (letters.empty() ? "-" : ",-") + s; }
    }
    std::string line = format(" %-5s --%s %s", letters.c_str(), f.name, kinds[f.type]);
    line.resize(std::max(indent, line.size() + 1), ' ');
    flags_wrap(line, text, terminal_columns(80));
}

static inline void flags_help(const FlagTable& table, const char* program,
                              const std::vector<FlagGroup>& groups, bool all) {
    const size_t indent = 28;
    printf("usage: %s [flags]\n", program);
    if (groups.empty()) { for (const Flag& flag : table) { flags_help_one(flag, indent); } }
    for (const FlagGroup& group : groups) {
        std::string names = group.everyday;
        if (all && !group.others.empty()) { names += (names.empty() ? "" : " ") + group.others; }
        if (names.empty() && !group.others.empty()) { continue; }
        printf("\n%s\n", group.title.c_str());
        for (const std::string& name : flags_split(names, ' ')) {
            flags_help_one(*flags_find(table, "--" + name), indent);
        }
    }
    const bool has_more = !groups.empty() && !all;
    printf("\n %-*s%s\n", (int)indent - 1, has_more ? "--help all" : "--help",
           has_more ? "all flags" : "this text");
}

// Prints the settings that the user gave or something else has chosen and, with `all`, the others.
static inline void flags_print(const FlagTable& table, bool all) {
    for (const bool given : {true, false}) {
        std::string text;
        for (const Flag& f : table) {
            if ((f.given || !f.from.empty()) != given) { continue; }
            text += (text.empty() ? "" : ", ") + std::string(f.name) + "=" + flags_show(flags_text(&f));
            if (!f.from.empty()) { text += " (" + f.from + ")"; }
        }
        if (text.empty() || (!given && !all)) { continue; }
        flags_wrap(given ? "settings: " : "defaults: ", text, terminal_columns(80));
    }
}

static inline std::string flags_json(const FlagTable& table) {
    std::string json;
    for (const Flag& f : table) {
        std::string value = flags_text(&f);
        if (f.type == FLAG_STRING || f.type == FLAG_ENUM) { value = json_quote(value); }
        if (f.type == FLAG_BOOL) { value = *(int*)f.where ? "true" : "false"; }
        json += (json.empty() ? "{" : ", ") + json_quote(f.name) + ": " + value;
    }
    return json + "}";
}

// ---- the command line ----

static inline bool flags_given(const FlagTable& table, const char* name) {
    const Flag* f = flags_find(table, std::string("--") + name);
    assert(f && "flags_given: no such flag in the table");
    return f->given != nullptr;
}

// Is a flag given by a letter, as llm.c's users write them?
static inline bool flags_lettered(const FlagTable& table) {
    return std::any_of(table.begin(), table.end(), [](const Flag& f) {
        return f.given && f.given[0] == '-' && f.given[1] != '-';
    });
}

[[noreturn]] static inline void flags_unknown(const FlagTable& table, const FlagAnswers& answers,
                                              const std::string& spelling) {
    std::string hint = flags_answer(answers, spelling);
    if (hint.empty()) {
        std::vector<std::string> known = {"--help"};
        const size_t first = spelling.find_first_not_of('-'), last = spelling.find_last_not_of("0123456789");
        const bool is_short = last < first + 2;         // -b16 is near to -b, and --foo to no -o
        for (const Flag& flag : table) {
            for (const std::string& s : flags_spellings(&flag)) {
                if (is_short || s[1] == '-') { known.push_back(s); }
            }
        }
        const std::string near = flags_nearest(known, spelling);
        const Flag* flag = flags_find(table, near);
        const std::string shown = flag && near[1] != '-' ? flags_title(flag) : near;
        hint = (near.empty() ? "" : "did you mean " + shown + "? ") + "--help all lists all flags";
    }
    die("unknown flag '%s'\nhint: %s", flags_show(spelling).c_str(), hint.c_str());
}

static inline void flags_parse(const FlagTable& table, int argc, const char* const* argv,
                               const std::vector<FlagGroup>& groups = {}, const FlagAnswers& answers = {}) {
    for (const Flag& flag : table) {
        flag.given = nullptr, flag.from = "";
        flags_set(&flag, flag.def);
    }
    std::vector<const Flag*> open;          // as if these were not given
    for (int i = 1; i < argc; i++) {
        const char* arg = argv[i];
        const char* equals = arg[0] == '-' ? strchr(arg, '=') : nullptr;
        std::string spelling = equals ? std::string(arg, (size_t)(equals - arg)) : arg;
        if (spelling == "--help") {
            flags_help(table, argv[0], groups, i + 1 < argc && strcmp(argv[i + 1], "all") == 0);
            exit(fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE);
        }
        if (arg[0] != '-' || spelling == "-" || spelling == "--") {
            die("unexpected '%s': every value follows a flag\nhint: a value with blanks or * needs quotes; "
                "--help lists the flags", flags_show(arg).c_str());
        }
        const Flag* f = flags_find(table, spelling);
        if (!f) { flags_unknown(table, answers, spelling); }
        if (f->given) {
            const std::string hint = flags_answer(answers, f->name);
            die("%s is given twice: '%s' and '%s'\nhint: %s", flags_title(f).c_str(),
                flags_show(f->given).c_str(), flags_show(arg).c_str(),
                hint.empty() ? "keep one of them" : hint.c_str());
        }
        f->given = arg;
        const char* value = equals ? equals + 1 : i + 1 < argc ? argv[i + 1] : nullptr;
        bool is_flag = !equals && value && value[0] == '-' &&
                       flags_find(table, flags_split(value, '=')[0]);
        if (!value || is_flag) {
            std::string found = is_flag ? ", found the flag '" + flags_show(value) + "'" : "";
            die("%s needs a value%s\nhint: %s", flags_title(f).c_str(), found.c_str(),
                flags_about(f).c_str());
        }
        flags_set(f, value);
        if (flags_says_auto(f, value)) { open.push_back(f); }
        if (!equals) { i++; }
    }
    if (!open.empty() && flags_lettered(table)) {
        die("%s auto: beside letters, as -b, nothing is chosen, and it is %s\n"
            "hint: write all flags by their long names, or leave it out", open[0]->given, open[0]->def);
    }
    for (const Flag* f : open) { f->given = nullptr; }
}
