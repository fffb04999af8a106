/*
Texts on the terminal: samples, and a chat. A callback draws the tokens, so no model is needed. Host only.

    const TextTask task = {&tokenizer, prompt_tokens(&tokenizer, "Once", V, T), 100, true};
    const TextDraw draw = [&](const std::vector<int>& prompt, int count, const std::vector<int>& ends,
                              uint32_t first_id, const OnToken& on_token) { ... };
    write_samples(task, {8, 4, 0, "Once", false}, draw);    // eight texts, four at a time
    chat(task, "model.bin", true, draw);                    // continues the lines of stdin
*/
#pragma once

#include <pthread.h>    // gives: pthread_sigmask
#include <sys/select.h> // gives: pselect

#include "../checked_files.h"   // gives: die, format, shown, print_text, file_size
#include "../comm/comm.h"       // gives: comm_now, warn
#include "../data/chat_template.h"  // gives: chat_system, chat_question
#include "../data/tokenizer.h"  // gives: Tokenizer
#include "../files/json.h"      // gives: json_file_read
#include "stop.h"               // gives: stop_requested

// Called with each token, the one that ends a text included; false stops all rows.
typedef std::function<bool(int row, int token)> OnToken;
// Continues `prompt` in each of its rows, by `count` tokens or up to one of `ends`. Row r draws from the
// random stream first_id + r.
typedef std::function<void(const std::vector<int>& prompt, int count, const std::vector<int>& ends,
                           uint32_t first_id, const OnToken& on_token)> TextDraw;

struct TextTask {
    const Tokenizer* tokenizer;         // null: ids are printed
    std::vector<int> prompt;            // from prompt_tokens(); its first token also ends a document
    int tokens;                         // most tokens of a text
    bool tell_speed;
    const char* system = nullptr;       // chat with a model of answers: what it is told first; null: another
    std::vector<int> other_ends = {};   // tokens that also end a text

    std::vector<int> ends() const {
        std::vector<int> all = other_ends;
        all.push_back(prompt[0]);
        return all;
    }
    bool is_end(int token) const {
        return token == prompt[0] || std::count(other_ends.begin(), other_ends.end(), token) > 0;
    }
};

// The tokenizer is that of a tokenizer.bin; file "": the vocabulary's. For an unknown one, or without GPT-2's
// file, it stays empty. The tokens up to V that it lacks are padding, and print nothing.
static inline void text_init(Tokenizer* tokenizer, int V, const std::string& file = "") {
    const uint32_t known = tokenizer_of_vocabulary(V);
    const std::string path = file.empty() && known == TOKENIZER_GPT2 ? tokenizer_default_path() : file;
    if (!path.empty() && file_size(path.c_str()) < 0) {
        warn("%s is not there: samples are printed as token ids", path.c_str());
    }
    else if (!file.empty()) { tokenizer_read(tokenizer, file.c_str()); }
    else if (known == TOKENIZER_GPT2) { tokenizer_init_bpe(tokenizer, nullptr); }
    else if (known == TOKENIZER_BYTES) { tokenizer_init_bytes(tokenizer); }
    if (!tokenizer->bytes.empty()) { tokenizer->bytes.resize((size_t)V); }
}

// Dies if `what`, such as --prompt, has no tokenizer that encodes text. tokenizer: null if there is none.
static inline void text_check_encodes(const Tokenizer* tokenizer, const char* what, int V) {
    if (!tokenizer && tokenizer_of_vocabulary(V) == TOKENIZER_GPT2) {
        die("%s needs GPT-2's vocabulary, which is not there\nhint: %s", what, kVocabularyHint);
    }
    if (!tokenizer) {
        die("%s needs a tokenizer: there is no tokenizer.bin beside the model, and none for V=%d (%s)",
            what, V, kVocabulariesKnown);
    }
    if (tokenizer->pairs.empty()) {
        die("%s needs a tokenizer that cuts text by GPT-2's pattern, and the model's does not\n"
            "hint: without --prompt texts begin anew; dev/hf.py export makes a folder for transformers, "
            "which goes on from any text", what);
    }
}

// Tokens that generation_config.json lists as the end of a text: one, or several.
static inline std::vector<int> listed_ends(const std::string& file) {
    Facts values;
    const std::string error = json_file_read(file, &values);
    if (!error.empty()) {
        warn("%s %s: its end tokens do not count", shown(file).c_str(), error.c_str());
        return {};
    }
    std::vector<int> ends;
    for (const auto& value : values) {
        int64_t id;
        const bool is_listed = value.first.substr(0, value.first.find('.')) == "eos_token_id";
        if (is_listed && parse_int(value.second, &id) && id >= 0 && id < kMaxV) { ends.push_back((int)id); }
    }
    return ends;
}

// The end-of-text token, which begins every document, and --prompt. Dies if the prompt does not fit.
static inline std::vector<int> prompt_tokens(const Tokenizer* tokenizer, const char* text, int V, int T) {
    std::vector<int> prompt = {tokenizer ? (int)tokenizer->eot : 0};
    if (text[0] == '\0') { return prompt; }
    text_check_encodes(tokenizer, "--prompt", V);
    std::vector<uint32_t> ids;
    tokenizer_encode(tokenizer, text, strlen(text), ids);
    if ((int64_t)ids.size() > T - 2) {          // T positions: one before the prompt, one at least after it
        die("the prompt has %zu tokens; with -t %d at most %d fit", ids.size(), T, std::max(0, T - 2));
    }
    prompt.insert(prompt.end(), ids.begin(), ids.end());
    return prompt;
}

// The number of bytes in whole characters: a token may end inside a character.
static inline size_t whole_characters(const std::string& text) {
    const size_t size = text.size();
    for (size_t back = 1; back <= 3 && back <= size; back++) {
        const unsigned char c = (unsigned char)text[size - back];
        if ((c & 0xC0) == 0x80) { continue; }           // not a character's first byte
        return c >= 0xC0 && back < (c >= 0xF0 ? 4u : c >= 0xE0 ? 3u : 2u) ? size - back : size;
    }
    return size;
}

static inline bool ends_sentence(const std::string& text) {
    return text.find_first_of(".!?\n") != std::string::npos;
}

// A text on its way to stdout.
struct TextOut {
    const Tokenizer* tokenizer;         // null: ids are printed
    std::string text;                   // not printed yet

    void add(int token) {
        text += tokenizer ? tokenizer_decode(tokenizer, (uint32_t)token) : format("%d ", token);
    }
    void show(bool all) {
        const size_t bytes = all ? text.size() : whole_characters(text);
        print_text(text.substr(0, bytes));
        fflush(stdout);
        text.erase(0, bytes);
    }
};

// The speed of drawing, without the first token of each text: that one waits for the prompt, or in a chat for
// the user.
struct TextSpeed {
    double start = comm_now(), wait = 0.0;  // seconds until the very first token
    double last = 0.0, seconds = 0.0;       // time of the last token; seconds spent on `later` tokens
    int64_t tokens = 0, later = 0;          // all tokens; those that are not the first of a text

    void add(bool begins) {                 // begins: the first token of a text
        const double now = comm_now();
        if (tokens++ == 0) { wait = now - start; }
        if (!begins) { seconds += now - last; later++; }
        last = now;
    }
    void print() const {
        if (ferror(stdout)) { return; }     // stdout_check reports that at the end
        fprintf(stderr, "note: %lld tokens, the first after %.3f s", (long long)tokens, wait);
        if (later > 0 && seconds > 0) { fprintf(stderr, ", then %.0f tokens/s", (double)later / seconds); }
        fprintf(stderr, "\n");
    }
};

// count texts, `rows` of them drawn together. titled: each has a title with its number and the step.
struct Samples { int count, rows; int64_t step; const char* prompt; bool titled; };

// Writes the samples. The first unfinished one is shown token by token. Without titles stdout has only the
// model's text, and on a terminal also the prompt.
static inline void write_samples(const TextTask& task, const Samples& samples, const TextDraw& draw) {
    auto begin = [&](int sample) {
        if (samples.titled) {
            printf("sample %d at step %lld:\n", sample + 1, (long long)samples.step);
        } else if (sample > 0) {
            printf("---\n");
        }
        if (samples.titled || isatty(STDOUT_FILENO)) { print_text(samples.prompt); }
    };
    TextSpeed speed;
    for (int first = 0; first < samples.count && !stop_requested; first += samples.rows) {
        const int rows = std::min(samples.rows, samples.count - first);
        std::vector<TextOut> texts(rows, {task.tokenizer, ""});
        std::vector<int> lengths(rows, 0);
        std::vector<bool> over(rows, false);
        int current = 0;                                // the row that is shown; those before it are done
        auto advance = [&](bool all_over) {
            texts[current].show(all_over || over[current]);
            while (current < rows && (all_over || over[current])) {
                printf(samples.titled ? "\n---\n" : "\n");
                if (++current == rows || stop_requested) { break; }
                begin(first + current);
                texts[current].show(all_over || over[current]);
            }
        };
        begin(first);
        draw(task.prompt, task.tokens, task.ends(), (uint32_t)first, [&](int row, int token) {
            if (row >= rows) { return true; }           // the last group may have fewer texts
            speed.add(first == 0 && lengths[row]++ == 0);
            over[row] = task.is_end(token);
            if (!over[row]) { texts[row].add(token); }
            if (row == current) { advance(false); }
            return current < rows && !stop_requested;
        });
        if (current < rows) { advance(true); }
        fflush(stdout);
    }
    if (task.tell_speed) { speed.print(); }
}

// ---- chat ----

static volatile sig_atomic_t chat_interrupted = 0;      // set by Ctrl-C

// Waits for a line on the terminal or the end of the input; false: Ctrl-C came. Only pselect unblocks the
// signal, so none is missed between the look at chat_interrupted and the wait.
static inline bool chat_has_line() {
    sigset_t interrupt, before;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    pthread_sigmask(SIG_BLOCK, &interrupt, &before);
    fd_set files;
    FD_ZERO(&files);
    FD_SET(STDIN_FILENO, &files);
    bool has_line = !chat_interrupted;
    if (has_line) { has_line = pselect(STDIN_FILENO + 1, &files, nullptr, nullptr, nullptr, &before) >= 0; }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return has_line || !chat_interrupted;
}

// Reads the next line of stdin into *said, without its newline. After Ctrl-C it asks again. False: the input
// is over.
static inline bool chat_line(bool is_terminal, std::string* said) {
    for (;;) {
        chat_interrupted = 0;
        if (!is_terminal) { break; }
        printf("> ");
        fflush(stdout);
        if (chat_has_line()) { break; }
        printf("\n");
    }
    char* line = nullptr;
    size_t room = 0;
    ssize_t bytes = getline(&line, &room, stdin);
    if (bytes > 0 && line[bytes - 1] == '\n') { bytes--; }
    if (bytes >= 0) { said->assign(line, (size_t)bytes); }
    free(line);
    return bytes >= 0;
}

// chat RUN: reads lines and continues each, after everything said before. Ctrl-C ends a text, or discards a
// line that is being typed; Ctrl-D ends the program. An empty line continues the text. After a document's end
// the next line begins a new one. whole: a text ends at the end of a sentence. A model that was trained on
// conversations (task.system) is asked by each line; its text is the answer.
static inline void chat(const TextTask& task, const std::string& model, bool whole, const TextDraw& draw) {
    struct sigaction action = {};
    action.sa_handler = [](int) { chat_interrupted = 1; };
    action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, nullptr);
    const bool is_terminal = isatty(STDIN_FILENO);
    const int end = task.prompt[0];
    const bool asks = task.system != nullptr;
    if (is_terminal && task.tell_speed && asks) {
        fprintf(stderr, "note: %s answers each line, with at most %d tokens (-g); after these an empty line "
                "lets it go on, Ctrl-C ends an answer, Ctrl-D the program\n", shown(model).c_str(),
                whole ? 4 * task.tokens : task.tokens);
    } else if (is_terminal && task.tell_speed) {
        fprintf(stderr, "note: %s goes on from each line by %d tokens (-g)%s; an empty line lets it go on, "
                "Ctrl-C ends a text, Ctrl-D the program\n", shown(model).c_str(), task.tokens,
                whole ? " and to the end of the sentence" : "");
    }
    std::vector<int> tokens = task.prompt;              // the whole conversation
    TextSpeed speed;
    std::string line, system = asks ? chat_system(task.system) : "";
    for (uint32_t number = 0; chat_line(is_terminal, &line); number++) {
        const bool begins = task.is_end(tokens.back());
        if (asks) { line = chat_trimmed(line); }        // blanks alone are an empty line
        std::string said = (begins || line.empty() ? "" : "\n") + line;
        bool answers = false;                           // the text begins an answer
        if (asks) {
            if (begins && line.empty()) { continue; }
            answers = !line.empty();
            if (answers && !begins) { tokens.push_back(end); }          // of an answer that was cut short
            if (answers) { said = system + chat_question(line), system = ""; }
        }
        // behind another end token a document has to begin
        if (!asks && begins && tokens.back() != end && !said.empty()) { tokens.push_back(end); }
        std::vector<uint32_t> ids;
        tokenizer_encode(task.tokenizer, said.data(), said.size(), ids);
        tokens.insert(tokens.end(), ids.begin(), ids.end());
        TextOut text = {task.tokenizer, ""};
        const std::vector<int> prompt = tokens;
        if (is_terminal && !asks) { print_text(line); }       // it begins with the line
        if (speed.tokens == 0) { speed.start = comm_now(); }
        draw(prompt, whole ? 4 * task.tokens : task.tokens, task.ends(), number, [&](int, int token) {
            speed.add(tokens.size() == prompt.size());
            tokens.push_back(token);
            if (!task.is_end(token)) { text.add(token); }
            if (answers && text.text[0] == ' ') { text.text.erase(0, 1); }      // in front of each answer
            answers = false;
            const bool ends = !asks && ends_sentence(text.text) &&
                              tokens.size() >= prompt.size() + (size_t)task.tokens;
            text.show(false);
            return !chat_interrupted && !(whole && ends);
        });
        text.show(true);
        printf("\n");
        fflush(stdout);
    }
    if (is_terminal) { printf("\n"); }
    if (task.tell_speed) { speed.print(); }
}
