/*
The built-in corpus: simple English stories from a seeded generator, so that a GPT-2 can be trained where
nothing can be downloaded. The same seed gives the same stories on every machine, another seed gives others.

    g++ -std=c++17 -O2 -I. dev/data/stories.cpp -o stories
    ./stories --seed 1 --bytes 20000000 -o train.txt
    ./stories --seed 2 --bytes 1000000  -o val.txt      # another seed: stories nobody has trained on

Documents are separated by a line <|endoftext|>. Story n of a seed draws from its own Philox stream, so it is
a pure function of (seed, n).

A story is an opening, a plot and an ending. Each is a template:
    {A} {A.his} {spot}              words of the story; kTables says which
    [ran|walked [home|away]|]       one of these, drawn anew each time
    /                               a new paragraph; a line break is a blank
A word stays the same through the story. So the lost thing is found where it was put, the way home passes the
landmarks backwards, and the sums come out right.
*/
#include "llmc/atomic_files.h"  // gives: die, AtomicFile
#include "llmc/run/flags.h"     // gives: flags_parse
#include "llmc/rand.h"          // gives: rand_block

#include <ctype.h>              // gives: toupper

#include <algorithm>            // gives: std::min
#include <map>                  // gives: std::map
#include <string>               // gives: std::string
#include <vector>               // gives: std::vector

// == the words ==

// In a story each of the words stands for a row, no two for the same one. Semicolons separate rows. Colons
// separate columns, which the first row names: {A} is the first column of A's row, {A.he} the one called he.
// A row that is too short ends as the row above.
struct WordTable { const char* words; const char* rows; };
static const WordTable kTables[] = {
// A is the hero, B a friend, C another child, E an elder.
{"A B C", R"(name:he:him:his:kind; Mina:she:her:her:girl; Clara; Nora; Ivy; Tessa; Ruth; Poppy; Amira; June;
    Wilma; Mei; Greta; Oscar:he:him:his:boy; Felix; Jonas; Theo; Milo; Hugo; Anton; Karim; Peter; Kofi)"},
{"E", "name:he; Grandma Rose:she; Mrs. Plum; Aunt Lena; Mrs. Moon; Grandpa Otto:he; Mr. Finch; Uncle Ben"},
{"home", R"(where; in a small house by the river; in a village at the foot of a hill; on a farm; by the sea;
    in a tall house with a blue door; in the rooms above a bakery; in a town with seven bridges)"},
{"trait", "is; kind; brave; shy; curious; careful; clever; patient; cheerful; quiet; proud; stubborn"},
{"weather", "is; bright; windy; cold; warm; grey; quiet; misty; sunny; frosty; golden"},
{"place place2", R"(name:at; the river:by the river; the park:in the park; the hill:on the hill;
    the beach:on the beach; the old mill:near the old mill; the forest:in the forest; the lake:by the lake)"},
{"spot spot2 spot3", R"(where; under the bed; behind the door; on the windowsill; in the kitchen drawer;
    inside the big basket; on top of the cupboard; under the stairs; beside the stove; in the shed)"},
{"thing", R"(name; kite; ball; hat; drum; whistle; book; scarf; lantern; key; ring; shell; bell; map; spoon;
    cup; blanket; umbrella; marble; teapot; coin; button; feather; box; flute; mirror; ribbon)"},
{"colour", "is; red; blue; green; yellow; purple; orange; white; silver; golden; brown; black; pink"},
{"chore", "does; sweep the floor; fetch some water; gather firewood; count the eggs; hang up the washing"},
{"food", "name; apples; plums; pears; cherries; nuts; berries; buns; carrots; mushrooms; chestnuts"},
{"mark mark2 mark3", R"(name; the crooked pine; the stone bridge; the red gate; the windmill; the lily pond;
    the fallen log; the white rock; the scarecrow; the empty cabin; the blackberry hedge; the signpost)"},
{"hobby", "name; painting; music; reading; gardening; cooking; sailing; dancing; drawing; flying kites"},
// a dish, what goes into it, and how it tastes without x
{"dish", R"(name:x:y:z:bad; pancakes:salt:flour:milk:of nothing; apple pie:butter:sugar:apples:dry as dust;
    berry jam:sugar:lemon juice:berries:terribly sour; bread:yeast:flour:salt:heavy as a brick)"},
// all less first is some, some less second is rest
{"sum", R"(all:first:some:second:rest; seven:two:five:one:four; eight:one:seven:three:four;
    nine:three:six:two:four; ten:two:eight:three:five; eleven:one:ten:two:eight; twelve:two:ten:one:nine)"}};

// == the templates ==

static const char* const kOpening = R"(
    [[Once upon a time|Once|Long ago] there was a [little|young|{trait}] {A.kind} [called|named] {A}. {A.he}
    lived {home}.|{A} was a {trait} [little|young] {A.kind} who lived {home}.|A {A.kind} called {A} lived
    {home}, and {A.his} friend {B} lived next door.] [|In the morning, {A.he} sang [loudly|a song about
    {place}].|Of all the places {A.he} knew, {A.he} liked {place} best.] [One {weather} [morning|day|evening],
    |One day, |It was a {weather} [day|morning], and the [clouds|shadows] were [long|soft]. ])";
static const char* const kEnding = R"(
    [That night, {A} [slept well|dreamed of {place}].|It had been a [good|long|strange but happy] day.|{A}
    [laughed|talked|thought] about it for [days|a long time].|The end.|{A} was [very|so] happy.])";

static const char* const kPlots[] = {
R"( a new {C.kind} came to live near {place2}. {C.his} name was {C}, and {C.he} was [shy|quiet]. {C.he} sat
    alone {place2.at} and [did not speak|looked at the ground]. {A} saw {C.him} and thought, "[Nobody should
    sit alone|Perhaps {C.he} needs a friend]."
    / {A} [went over|walked up to {C}] and [smiled|sat down]. "[Hello|Good morning], I am {A}. Would you like
    some {food}?"
    / "[Yes, please|Thank you]," said {C} [softly|in a small voice]. "What do you like to do?" asked {A}.
    / "[You will laugh|It is nothing special]," said {C}, and looked away. "I like {hobby}."
    / "[So do I|I do too]!" cried {A}. And from that day on, they spent [hours|many days] {hobby}.)",
R"( {A} put {A.his} {colour} {thing} {spot}, because {A.his} hands were full, and went to {chore}.
    / Later, {A} wanted to [show {B} the {thing}|take the {thing} to {place2}], but [it was not there|{A.he}
    could not find it]. {A} looked {spot2}. [There was only dust.|It was not there.] {A.he} looked {spot3}.
    [It was not there either.|Still nothing.] {A} [felt sad|began to cry|sat down and sighed].
    / Then {B} came [by|along]. "[What is wrong|What are you looking for]?" asked {B}.
    / "I cannot find my {colour} {thing}," said {A}.
    / "Think [back|hard]. What did you do before you lost it?" [asked|said] {B}.
    / {A} [thought hard|closed {A.his} eyes]. "I went to {chore}," {A.he} said slowly. "My hands were full, so
    I put it {spot}!" They [ran|hurried] to look {spot}, and there was the {thing}.)",
R"( {A} [wanted|decided] to make {dish} for {E}. "I need {dish.y}, {dish.z} and {dish.x}," {A.he} said.
    / First {A} went to {place}, where {B} gave {A.him} the {dish.y}. Then {A} [went on|walked] to {place2}.
    There {A.he} met {C}, who had plenty of {dish.z}. "Take [some|as much as you need]," said {C}. {A} ran
    home. [{A.he} was in such a hurry that {A.he}|But on the way {A.he}] forgot the {dish.x}.
    / Soon the {dish} [smelled|looked] good. But when {A} took a bite, it tasted {dish.bad}. "[Oh no|Oh dear]!
    What did I do wrong?" {A.he} [asked|cried].
    / "There is {dish.y} in it, and {dish.z}," said {E}. "But where is the {dish.x}?"
    / "I forgot the {dish.x}!" said {A}. They began again, and the {dish} [tasted good|came out right].)",
R"( {A} and {B} went out to look for {food}. They walked past {mark}. [After that|Then] they came to {mark2}.
    [A little later|At last] they passed {mark3}, and behind it they found plenty of {food}.
    / They gathered {food} until [it grew dark|fog came up]. "How do we get home?" asked {B}.
    / "[Let us think|Do not worry]," said {A}. "What did we pass last, before we found the {food}?"
    / "{mark3}," said {B}. They [looked around|walked slowly], and there was {mark3}. "And before that?"
    "{mark2}!" said {B}. [Soon|After a while] they found {mark2}. "Now only {mark} is left," said {A}. And
    when they had passed {mark}, they saw [the lights of home|{E}, who was waiting with a lantern].)",
R"( {A} [picked|gathered|was given] {sum} {food}. On the way home {A.he} met {B}, who [looked hungry|had
    nothing to eat]. {A} gave {B} {sum.first}. Now there were {sum.some} left. "Thank you," said {B}.
    / Then {A} came to {place}. There sat {C}, [tired and pale|all alone]. {A} gave {C.him} {sum.second} of
    the {sum.some}. Now {A} had {sum.rest} {food}.
    / At home, {E} [looked into the basket|counted the {food}]. "Only {sum.rest}? There should be {sum}!"
    / "I gave {sum.first} to {B} and {sum.second} to {C}," said {A}.)"};

// == the machinery ==

typedef std::vector<std::string> Row;
typedef std::vector<Row> Table;

struct Story {
    uint64_t seed;
    uint32_t number;                // the story's stream of random numbers ...
    uint64_t drawn;                 // ... and how many were used
    std::map<std::string, const Row*> words;
    std::string raw;
};

static size_t roll(Story* s, size_t n) {        // 0 .. n-1
    const Rand4 block = rand_block(s->seed, RAND_STORY, s->number, s->drawn / 4);
    return (size_t)(((uint64_t)block.w[s->drawn++ % 4] * n) >> 32);
}

static Row split(const std::string& text, char by) {
    Row parts;
    for (size_t at = 0, end; at < text.size(); at = end + 1) {
        at = text.find_first_not_of(" \n", at);
        end = std::min(text.find(by, at), text.size());
        parts.push_back(text.substr(at, end - at));
    }
    return parts;
}

static std::map<std::string, const Table*> parse_tables() {     // by word
    static std::vector<Table> parsed(sizeof(kTables) / sizeof(kTables[0]));
    std::map<std::string, const Table*> tables;
    for (size_t i = 0; i < parsed.size(); i++) {
        for (const std::string& text : split(kTables[i].rows, ';')) {
            Row row = split(text, ':'), above = parsed[i].empty() ? row : parsed[i].back();
            while (row.size() < above.size()) { row.push_back(above[row.size()]); }
            parsed[i].push_back(row);
        }
        for (const std::string& word : split(kTables[i].words, ' ')) { tables[word] = &parsed[i]; }
    }
    return tables;
}

// What stands for {word} or {word.column}. Its first use draws a row that no other word of the story has.
static const std::string& value(Story* s, const std::string& name) {
    static const std::map<std::string, const Table*> tables = parse_tables();
    const Row parts = split(name, '.');
    if (!tables.count(parts[0])) { die("template: no word {%s}", name.c_str()); }
    const Table& table = *tables.at(parts[0]);
    const Row*& mine = s->words[parts[0]];
    while (mine == nullptr) {
        const Row* row = &table[1 + roll(s, table.size() - 1)];
        bool taken = false;
        for (const auto& word : s->words) { taken |= word.second == row; }
        if (!taken) { mine = row; }
    }
    size_t column = 0;
    while (parts.size() > 1 && table[0].at(column) != parts[1]) { column++; }
    return (*mine)[column];
}

static void say(Story* s, const std::string& text) {
    for (size_t at = 0; at < text.size(); at++) {
        if (text[at] == '{') {
            const size_t begin = at + 1;
            at = text.find('}', at);
            s->raw += value(s, text.substr(begin, at - begin));
        } else if (text[at] == '[') {
            std::vector<size_t> ends = {at};    // each option begins behind the end of the one before
            for (int depth = 1; depth > 0;) {
                at++;
                depth += (text[at] == '[') - (text[at] == ']');
                if (depth == 0 || (text[at] == '|' && depth == 1)) { ends.push_back(at); }
            }
            const size_t k = roll(s, ends.size() - 1);
            say(s, text.substr(ends[k] + 1, ends[k + 1] - ends[k] - 1));
        } else {
            s->raw += text[at] == '\n' ? ' ' : text[at];
        }
    }
}

// Adds capitals and paragraphs, and leaves one blank where there are several.
static std::string polish(const std::string& raw) {
    std::string out = "\n";
    bool capital = true, quoted = false;
    for (const char c : raw) {
        const char last = out.back();
        if (c == ' ' && (last == ' ' || last == '\n')) { continue; }
        if (c == '/') { out.back() = '\n'; }    // it was a blank
        if (c == '"') {                         // opening: a capital. Closing: only after a full stop
            quoted = !quoted;
            capital = quoted || last == '.';
        }
        out += c == '/' ? '\n' : capital ? (char)toupper(c) : c;
        if (c != ' ' && c != '"') { capital = strchr("/.!?", c) != nullptr; }
    }
    return out.substr(1) + "\n";
}

static std::string tell(uint64_t seed, uint32_t number) {
    Story s = {seed, number, 0, {}, ""};
    say(&s, kOpening);
    say(&s, kPlots[roll(&s, sizeof(kPlots) / sizeof(kPlots[0]))]);
    say(&s, kEnding);
    return polish(s.raw);
}

int main(int argc, char** argv) {
    int64_t seed, count, bytes;
    const char* path;
    const FlagTable table = {
        {"", "seed", FLAG_INT64, &seed, "1", 0, 9e18, nullptr, "which stories"},
        {"n", "count", FLAG_INT64, &count, "3", 1, 4294967296.0, nullptr, "how many stories"},
        {"", "bytes", FLAG_INT64, &bytes, "0", 0, 1e13, nullptr, "instead: stop when this much is written"},
        {"o", "output", FLAG_STRING, &path, "", 0, 0, nullptr, "file to write; none: standard output"},
    };
    flags_parse(table, argc, argv);
    if (bytes > 0 && !flags_given(table, "count")) { count = INT64_MAX; }
    const bool to_file = path[0] != '\0';
    AtomicFile out = {};
    if (to_file) { out = atomic_open(path); }
    int64_t written = 0;
    for (int64_t n = 0; n < count && (bytes == 0 || written < bytes); n++) {
        const std::string text = (n > 0 ? "<|endoftext|>\n" : "") + tell((uint64_t)seed, (uint32_t)n);
        if (to_file) {
            atomic_write(&out, text.data(), text.size());
        } else if (fwrite(text.data(), 1, text.size(), stdout) != text.size()) {
            break;                              // see stdout_check
        }
        written += (int64_t)text.size();
    }
    if (to_file) { atomic_commit(&out); }
    stdout_check();
    return 0;
}
