/*
How conversations are written for a model: chat template 1. Host only. dev/data/answers.py writes the shards
by it, and dev/eval/export_hf.py says it in Jinja; `chat RUN` continues

    END System: Be brief.\n\nUser: Hello\n\nAssistant:

where END is the end-of-text token and the line of the system may be missing. The answer is a space, its text,
and END; the next question follows at once. A text between two END is encoded as one, in which GPT-2's pattern
begins a piece with the answer's space. The words are plain text: any tokenizer has tokens for them, and
nothing is added to a vocabulary. Each part is without ASCII white space at its ends.

    const std::string text = chat_system("Be brief.") + chat_question("Hello");
*/
#pragma once

#include <string>       // gives: std::string

constexpr int kChatTemplates = 1;       // numbers 1 .. kChatTemplates are known; 0: no conversations

static inline std::string chat_trimmed(const std::string& text) {
    const char* white = " \t\n\v\f\r";
    const size_t begin = text.find_first_not_of(white);
    return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(white) - begin + 1);
}

// In front of the first question; "" of nothing.
static inline std::string chat_system(const std::string& text) {
    const std::string trimmed = chat_trimmed(text);
    return trimmed.empty() ? "" : "System: " + trimmed + "\n\n";
}

static inline std::string chat_question(const std::string& text) {
    return "User: " + chat_trimmed(text) + "\n\nAssistant:";
}
