/*
The built-in corpus: simple English stories from a seeded generator, so that a GPT-2 can be trained where
nothing can be downloaded. The same seed gives the same stories on every machine, another seed gives others.

    g++ -std=c++17 -O2 -I. dev/data/stories.cpp -o stories
    ./stories --seed 1 --bytes 20000000 -o train.txt
    ./stories --seed 2 --bytes 1000000  -o val.txt      # another seed: stories nobody has trained on

Documents are separated by a line <|endoftext|>. Story n of a seed draws from its own Philox stream, so it is
a pure function of (seed, n).

A story is a plot told with a cast, things and places picked for it. Plots keep track of who has what and of
what follows from what: the lost thing is found where it was put, the way home passes the landmarks backwards,
the sums come out right. What a plot says is a template:
    {A} {A.he} {A.him} {A.his}      words of the story: a name and its pronouns
    [ran|walked [home|away]|]       one of these, at random
    /                               a new paragraph; a line break is a blank
polish() adds capitals, turns "a owl" into "an owl" and tidies the blanks.
*/
#include "llmc/check.h"         // gives: die, AtomicFile
#include "llmc/run/flags.h"     // gives: flags_parse
#include "llmc/rand.h"          // gives: rand_block

#include <ctype.h>              // gives: isalpha, toupper

#include <map>                  // gives: std::map
#include <string>               // gives: std::string
#include <vector>               // gives: std::vector

// == the words ==

typedef std::vector<std::string> Row;
typedef std::vector<Row> Table;

// Semicolons and line breaks part the texts; each `columns` of them are a row.
static Table table(size_t columns, const char* text) {
    Table rows;
    for (; *text; text += *text != '\0') {
        text += strspn(text, " \n;");
        size_t n = strcspn(text, ";\n");
        if (n > 0 && (rows.empty() || rows.back().size() == columns)) { rows.push_back({}); }
        if (n > 0) { rows.back().push_back(std::string(text, n)); }
        text += n;
    }
    return rows;
}

// The stories play among people or among animals: [0] and [1]. A person is a name, a pronoun and a kind.
static const Table kCast[2] = {table(3, R"(
    Mina; she; girl; Clara; she; girl; Nora; she; girl; Ivy; she; girl; Tessa; she; girl; Ruth; she; girl
    Hanna; she; girl; Poppy; she; girl; Amira; she; girl; Lotte; she; girl; June; she; girl; Sanna; she; girl
    Edda; she; girl; Wilma; she; girl; Mei; she; girl; Greta; she; girl; Oscar; he; boy; Felix; he; boy
    Jonas; he; boy; Theo; he; boy; Milo; he; boy; Hugo; he; boy; Anton; he; boy; Karim; he; boy
    Peter; he; boy; Luca; he; boy; Emil; he; boy; David; he; boy; Kofi; he; boy; Tobias; he; boy
    Ravi; he; boy; Simon; he; boy)"), table(3, R"(
    Nib; he; mouse; Hazel; she; squirrel; Bramble; he; hedgehog; Velvet; she; mole; Rusty; he; fox
    Clover; she; rabbit; Puddle; he; frog; Dot; she; ladybird; Willow; she; deer; Barley; he; bear
    Skip; he; hare; Minnow; she; otter; Ash; he; badger; Fern; she; duck; Pebble; she; turtle
    Thimble; he; dormouse)")};
static const Table kElders[2] = {table(3, R"(
    Grandma Rose; she; elder; Grandpa Otto; he; elder; Mrs. Plum; she; elder; Mr. Finch; he; elder
    Aunt Lena; she; elder; Uncle Ben; he; elder; Mrs. Moon; she; elder; Mr. Oakley; he; elder)"), table(3, R"(
    Old Owl; she; elder; Grandfather Toad; he; elder; Grey Goose; she; elder; Old Raven; he; elder
    Mother Hen; she; elder; Uncle Beaver; he; elder)")};
static const Table kHomes[2] = {table(1, R"(
    in a small house by the river; in a village at the foot of a hill; in a tall house with a blue door
    on a farm at the edge of the woods; near the harbour, above a bakery; in a cottage with a green roof
    at the end of a long, quiet street; in a town with seven bridges)"), table(1, R"(
    in a hollow tree; under the roots of an oak; beside a slow brown stream; at the edge of the forest
    in a burrow below the hill; behind the old stone wall; in a nest of moss and leaves
    near the mill pond)")};
static const Table kSpots[2] = {table(1, R"(
    under the bed; behind the door; on the windowsill; in the kitchen drawer; inside the big basket
    on top of the cupboard; under the stairs; beside the stove; in the pocket of an old coat
    behind the curtain; between two cushions; on the garden bench; in the shed; under the table
    in the wheelbarrow; on the highest shelf)"), table(1, R"(
    under a fern; inside the hollow log; behind a white stone; in the long grass; under a heap of leaves
    between two roots; on the flat rock; in the empty nest; beside the puddle; under the bramble bush
    in a crack of the wall; behind the mushrooms; on the old tree stump; at the mouth of the burrow)")};
static const Table kPlaces = table(2, R"(
    the river; by the river; the park; in the park; the hill; on the hill; the beach; on the beach
    the market; at the market; the old mill; near the old mill; the garden; in the garden
    the forest; in the forest; the meadow; in the meadow; the lake; by the lake; the orchard; in the orchard
    the bridge; under the bridge; the barn; behind the barn; the well; beside the well
    the big rock; next to the big rock; the field; in the field)");
static const Table kThings = table(1, R"(
    kite; ball; hat; drum; whistle; toy boat; book; scarf; lantern; key; ring; shell; bell; map; spoon; cup
    basket; blanket; umbrella; marble; paintbrush; teapot; coin; button; feather; box; flute; wagon; mirror
    bucket; compass; ribbon)");
static const Table kColours = table(1, R"(
    red; blue; green; yellow; purple; orange; white; silver; golden; brown; black; pink)");
static const Table kLooks = table(1, "little; old; new; tiny; big; shiny; plain; fine");
static const Table kTraits = table(1, R"(
    kind; brave; shy; curious; careful; clever; patient; cheerful; quiet; proud; gentle; stubborn; busy)");
static const Table kChores = table(1, R"(
    sweep the floor; fetch some water; water the beans; gather firewood; pick some berries
    chase the crows away; hang up the washing; count the eggs; help {E} with the jam; mend the fence
    peel the carrots; open the gate for {E})");
static const Table kWeather = table(1, R"(
    bright; windy; cold; warm; grey; quiet; misty; sunny; frosty; golden)");
static const Table kLandmarks = table(1, R"(
    the crooked pine; the stone bridge; the red gate; the windmill; the lily pond; the fallen log
    the white rock; the scarecrow; the empty cabin; the blackberry hedge; the signpost; the waterfall)");
// what one does, a present that fits it, and what the present is used for
static const Table kHobbies = table(3, R"(
    painting; box of paints; paint the sunset
    music; wooden flute; play a tune
    reading; book of old tales; read the first page aloud
    gardening; bag of seeds; dig a flower bed
    looking at the stars; map of the stars; find the Great Bear
    cooking; long wooden spoon; stir a soup
    sailing; toy boat; sail across the pond
    dancing; pair of red shoes; dance around the table
    drawing; bundle of pencils; draw all the guests
    sewing; basket of bright thread; sew a tiny flag
    flying kites; ball of strong string; send a kite up to the clouds)");
// sound, source, where
static const Table kNoises = table(3, R"(
    tap, tap, tap; a branch that knocked when the wind blew; at the window
    scratch, scratch; a hungry beetle in a paper bag; in the corner
    drip, drip, drip; rain that fell into an iron pot; below the roof
    thump, thump; a shutter that swung to and fro; behind the wall
    creak, creak; the garden gate, which nobody had closed; outside
    whoo, whoo; the wind in an empty bottle; near the chimney
    rustle, rustle; a lost kitten in a heap of leaves; under the steps
    clink, clink; two cups that touched on the shelf; above the stove)");
// a dish, its three parts, and how it tastes without each
static const Table kDishes = table(7, R"(
    pancakes; flour; milk; eggs; thin as water; dry as dust; flat and sad
    apple pie; apples; butter; sugar; of nothing but sugar; hard as stone; much too sour
    vegetable soup; carrots; onions; salt; pale and thin; dull; of nothing at all
    berry jam; berries; sugar; lemons; of nothing but sugar; terribly sour; far too sweet
    bread; flour; yeast; salt; like glue; heavy as a brick; of nothing at all
    porridge; oats; milk; honey; like warm milk; like wet sand; rather plain
    nut cake; nuts; honey; eggs; like any other cake; not sweet at all; like crumbs)");
static const Table kPlants = table(2, R"(
    sunflower; a yellow flower as wide as a plate; poppy; a red flower, thin as paper
    pumpkin; a round orange pumpkin; bluebell; a row of small blue bells
    bean; long green pods; strawberry; three sweet red berries
    daisy; a white flower with a yellow eye; lavender; purple flowers that smelled of summer)");
// stuck where, and the way out
static const Table kTraps = table(3, R"(
    at the bottom of a deep hole; rope; let the rope down and pulled slowly
    at the top of a tall tree; ladder; climbed the ladder step by step
    in a bush full of thorns; pair of thick gloves; put on the gloves and bent the thorns aside
    in the soft mud; wide board; laid the board on the mud and crept along it
    on a rock in the middle of the stream; small raft; paddled the raft across the stream
    inside an old net; sharp pair of scissors; cut the net, one string after the other)");
static const Table kSmallOnes = table(1, R"(
    duckling; kitten; lamb; young bird; puppy; baby goat; little hedgehog; young squirrel; foal
    small rabbit)");
// to do what, where, how it fails, what helps, how it is done at last
static const Table kSkills = table(5, R"(
    whistle; the hill; only air came out; Make your lips small and round; a clear, high note rang out
    swim; the pond; water went up {A.his} nose; Kick slowly, like a frog
        {A.he} swam all the way across the pond
    juggle; the yard; all the balls fell down; Start with two, not with three; the balls flew round and round
    skate; the frozen lake; {A.he} sat down hard on the ice; Bend your knees and look ahead
        {A.he} glided like a swan
    tie a sailor's knot; the harbour; the rope came loose; Go round the tree and back into the hole
        the knot held as fast as iron
    walk on stilts; the yard; {A.he} tipped over into the hay; Take small steps and never stop
        {A.he} marched across the whole yard
    skip stones; the river; the stone sank with a plop; Choose a flat one and throw it low
        the stone hopped five times)");
static const Table kForage = table(1, R"(
    berries; nuts; mushrooms; wild strawberries; chestnuts; plums; blue flowers; feathers; round stones)");
static const Table kFragile = table(1, R"(
    blue bowl; white jug; glass bird; clay pot; old clock; painted plate; tall vase; tea cup; green lamp)");
static const Table kNumbers = table(1, R"(
    no; one; two; three; four; five; six; seven; eight; nine; ten; eleven; twelve; thirteen; fourteen
    fifteen; sixteen)");
static const Table kFruit = table(1, R"(
    apples; plums; pears; cherries; nuts; berries; buns; carrots; biscuits)");

// == the machinery ==

struct Story {
    uint64_t seed;
    uint32_t number;                // the story's stream of random numbers ...
    uint64_t drawn;                 // ... and how many were used
    Rand4 block;
    int world;                      // 0: people, 1: animals
    std::map<std::string, std::string> words;
    std::string raw;
};

static size_t roll(Story* s, size_t n) {        // 0 .. n-1
    if (s->drawn % 4 == 0) { s->block = rand_block(s->seed, RAND_STORY, s->number, s->drawn / 4); }
    return (size_t)(((uint64_t)s->block.w[s->drawn++ % 4] * n) >> 32);
}

static void say(Story* s, const std::string& text) {
    for (size_t at = 0; at < text.size(); at++) {
        char c = text[at];
        if (c == '{') {
            size_t close = text.find('}', at);
            const std::string word = text.substr(at + 1, close - at - 1);
            if (!s->words.count(word)) { die("template: no word {%s}", word.c_str()); }
            say(s, s->words[word]);             // a word may be a template, too
            at = close;
        } else if (c == '[') {
            std::vector<size_t> ends = {at};    // each option begins behind the end of the one before
            for (int depth = 1; depth > 0;) {
                at++;
                depth += (text[at] == '[') - (text[at] == ']');
                if (depth == 0 || (text[at] == '|' && depth == 1)) { ends.push_back(at); }
            }
            size_t k = roll(s, ends.size() - 1);
            say(s, text.substr(ends[k] + 1, ends[k + 1] - ends[k] - 1));
        } else {
            s->raw += c == '\n' ? ' ' : c == '/' ? '\n' : c;
        }
    }
}

static std::string polish(const std::string& raw) {
    std::string out;
    bool capital = true, quoted = false;
    for (size_t i = 0; i < raw.size(); i++) {
        char c = raw[i];
        char last = out.empty() ? '\n' : out.back();
        if (c == ' ') {
            if (last != ' ' && last != '\n') { out += c; }
        } else if (c == '\n') {
            while (!out.empty() && isspace((unsigned char)out.back())) { out.pop_back(); }
            out += "\n\n";
            capital = true;
            quoted = false;
        } else if (c == '"') {                  // opening: a capital. Closing: only after a full stop
            capital = !quoted || last == '.';
            quoted = !quoted;
            out += c;
        } else if (c == '.' || c == '!' || c == '?' || c == ',') {
            if (last == ' ') { out.pop_back(); }
            out += c;
            if (c != ',') { capital = true; }
        } else {
            bool article = (c == 'a' || c == 'A') && !isalpha((unsigned char)last) && raw[i + 1] == ' ';
            out += capital ? (char)toupper((unsigned char)c) : c;
            capital = false;
            if (article) {
                size_t next = raw.find_first_not_of(' ', i + 1);
                if (next != std::string::npos && strchr("aeiou", raw[next])) { out += 'n'; }
            }
        }
    }
    while (!out.empty() && isspace((unsigned char)out.back())) { out.pop_back(); }
    return out + "\n";
}

// == picking the cast and the things ==

static const Row& any_row(Story* s, const Table& rows) { return rows[roll(s, rows.size())]; }

static const Row& new_row(Story* s, const Table& rows) {    // its first text is no word of the story yet
    for (;;) {
        const Row& row = any_row(s, rows);
        bool used = false;
        for (const auto& word : s->words) { used |= word.second == row[0]; }
        if (!used) { return row; }
    }
}

static void set(Story* s, const std::vector<std::string>& keys, const Row& row) {
    for (size_t i = 0; i < keys.size(); i++) { s->words[keys[i]] = row[i]; }
}

static void person(Story* s, const std::string& key, const Table& rows) {
    set(s, {key, key + ".he", key + ".kind"}, new_row(s, rows));
    bool she = s->words[key + ".he"] == "she";
    set(s, {key + ".him", key + ".his"}, she ? Row{"her", "her"} : Row{"him", "his"});
}

static void thing(Story* s, const std::string& key) {       // "red kite", short "kite"
    std::string name = new_row(s, kThings)[0], look = new_row(s, kColours)[0];
    if (roll(s, 3) == 0) { look = new_row(s, kLooks)[0] + " " + look; }
    set(s, {key + ".short", key}, {name, look + " " + name});
}

static void pick(Story* s, const std::vector<std::string>& keys, const Table& rows) {   // one row for each
    for (const std::string& key : keys) { set(s, {key}, new_row(s, rows)); }
}

static void cast(Story* s) {
    s->world = roll(s, 3) == 0;
    for (const char* key : {"A", "B", "C"}) { person(s, key, kCast[s->world]); }
    person(s, "E", kElders[s->world]);
    pick(s, {"home"}, kHomes[s->world]);
    pick(s, {"trait", "trait2"}, kTraits);
    pick(s, {"weather"}, kWeather);
    set(s, {"cap"}, {any_row(s, kColours)[0] + " [hat|scarf|coat|ribbon]"});
    set(s, {"num"}, kNumbers[3 + roll(s, 6)]);
    pick(s, {"chore"}, kChores);
    set(s, {"p", "p.at"}, new_row(s, kPlaces));
    set(s, {"q", "q.at"}, new_row(s, kPlaces));
}

// == what many plots say ==

static const char* const kOpening = R"(
    [[Once upon a time|Once|Long ago|Not so long ago] there was a [little|young|{trait}] {A.kind}
    [called|named] {A}. {A.he} lived {home}.|{A} was a {trait} [little|young] {A.kind} who lived {home}.|At
    the time of this story, a {A.kind} called {A} lived {home}. [Everybody knew {A.him}.|{A.he} was
    [very|rather] {trait}.]|A {A.kind} called {A} lived {home}, [not far from {p}|and {A.his} friend {B} lived
    next door].] [|||[When {A.he} was happy|In the morning|When nobody was listening], {A.he} sang [loudly|a
    song without words|an old song about {q}].|{A.he} always wore a {cap}.|{A.he} had [two|{num}]
    [sisters|brothers] and a {trait2} [uncle|aunt].|{A.he} [collected|liked to collect]
    [stones|stamps|feathers|strange words].|Of all the places {A.he} knew, {A.he} liked {p} best.])";
static const char* const kOpeningOfSecond = R"(
    / [But that was not the end.|There is more to tell about {A} and {B}.|Some days went by.|The week after
    that, something else happened.|Another day, another adventure.])";
static const char* const kOneDay = R"(
    [One {weather} morning, |One {weather} day, |On a {weather} afternoon, |One day, |Early one morning, |One
    {weather} evening, |It was [the first day of [spring|summer|autumn]|a {weather} [day|morning]], and [the
    sun hung over {q}|the air smelled of [hay|rain|apples|cut grass]|somewhere [a dog barked|a bell rang|a
    bird sang]|the [clouds|shadows] were [long|soft|as big as houses]]. ])";
static const char* const kEnding = R"(
    [That [night|evening], {A} [slept well|fell asleep with a smile|dreamed of {p}].|It had been a
    [good|long|fine|strange but happy] day.|And [that is how it ended|that was that].|{A}
    [laughed|talked|thought] about it for [days|weeks|a long time].|Before {A.he} slept, {A} told {E}
    everything once more.|The end.|{A} was [very|so] happy.|])";

// == plots ==

struct Plot { void (*begin)(Story*); const char* text; };

static const std::vector<Plot> kPlots = {
// a new friend
{[](Story* s) {
    set(s, {"hobby"}, any_row(s, kHobbies));
    pick(s, {"food"}, kFruit);
}, R"(
    {A} [liked|loved] {hobby} [more than anything|best of all|very much], but [nobody else did|{A.he} had
    nobody to share it with].
    / {one day} a new {C.kind} came to [live near {p}|the place]. {C.his} name was {C}, and {C.he} was
    [shy|quiet]. {C.he} sat [alone|all alone] {p.at} and [did not speak|looked at the ground|watched the
    others]. {A} saw {C.him} and thought, "[I know how that feels|Nobody should sit alone|Perhaps {C.he} needs
    a friend]."
    / {A} [went over|walked up to {C}] and [smiled|sat down]. "[Hello|Good morning], I am {A}. Would you like
    some {food}?"
    / "[Yes, please|Thank you|Oh yes]," said {C} [softly|in a small voice]. They [shared|ate] the {food}
    [together|side by side].
    / "What do you like to do?" asked {A}.
    / "[You will laugh|It is nothing special]," said {C}, and looked away. "I like {hobby}."
    / {A} [jumped up|laughed out loud, but in a kind way|clapped]. "[So do I|I do too]!" {A.he} cried. ["Come
    with me!"|"Let us do it together!"]
    / From that day on, {A} and {C} [were friends|met {q.at} every day]. [They spent hours {hobby}.|And nobody
    ever saw {C} sit alone again.|{C} was not shy any more, at least not with {A}.])"},
// something lost
{[](Story* s) {
    thing(s, "o");
    pick(s, {"s1", "s2", "s3", "s4"}, kSpots[s->world]);
    bool full = roll(s, 2) == 0;
    set(s, {"why", "because"}, full ? Row{"because {A.his} hands were full", "My hands were full"} :
                                      Row{"where nobody would step on it", "Nobody should step on it"});
}, R"(
    {A} had a {o}. [It was a present from {E}.|{E} had made it for {A.him}.|{A} had found it {p.at} [last
    summer|in the spring].|{A.he} took it everywhere.] [One evening|One afternoon|After breakfast|Before
    supper], {A} put the {o.short} {s1}, {why}, and went to {chore}.
    / [The next morning|Later|The next day], {A} wanted to [show {B} the {o.short}|take the {o.short} to {q}],
    but [it was not there|{A.he} could not find it]. "[Where is my {o.short}|Where can it be|Who has seen my
    {o.short}]?" {A.he} [asked|cried|said]. {A} looked {s2}. [There was only dust.|It was not there.|{A.he}
    found nothing but a spider.] {A.he} looked {s3}. [It was not there either.|Still nothing.] {A.he} even
    looked {s4}. [No {o.short}!|In vain.] {A} [felt sad|began to cry|sat down and sighed].
    / Then {B} came [by|along|to help]. "[What is wrong|What are you looking for|Why are you sad]?" asked {B}.
    / "I [have lost|cannot find] my {o}," said {A}.
    / "[Think back|Think hard]. What did you do [when you last had it|before you lost it]?" [asked|said] {B}.
    / {A} [thought hard|closed {A.his} eyes]. "I went to {chore}," {A.he} said slowly. "{because}, so I put it
    {s1}!"
    / They [ran|hurried] to look {s1}, and [there was the {o.short}|there it was]. ["Thank you, {B}," said
    {A}.|{A} hugged {B}.|{A} [laughed|jumped] for joy.] [From then on, {A} always put the {o.short} back in
    the same place.|"Next time I will remember," said {A}.|])"},
// cooking, without what was forgotten
{[](Story* s) {
    const Row& dish = any_row(s, kDishes);
    size_t x = roll(s, 3);
    set(s, {"dish", "x", "y", "z", "bad"},
        {dish[0], dish[1 + x], dish[1 + (x + 1) % 3], dish[1 + (x + 2) % 3], dish[4 + x]});
}, R"(
    {one day} {A} [wanted|decided] to make {dish} for {E}. "[I need|We need] {y}, {z} and {x}," {A.he} said.
    [{A} took a basket and set out.|{A} made a list and went out.]
    / First {A} went to {p}, where {B} gave {A.him} the {y}. "[Good luck|Save some for me]!" said {B}. Then
    {A} [went on|walked] to {q}. There {A.he} met {C}, who had plenty of {z}. "Take [some|as much as you
    need]," said {C}. {A} thanked {C.him} and [hurried|ran] home. [{A.he} was in such a hurry that {A.he}
    forgot the {x}.|But on the way {A.he} forgot about the {x}.]
    / {A} [mixed|stirred] and [sang|hummed]. Soon the {dish} [smelled good|looked good]. But when {A} took a
    bite, it tasted {bad}. "[Oh no|Oh dear]! What did I do wrong?" {A.he} [asked|cried].
    / {E} tried a [little|spoonful] too. "[You had {y} and {z}|There is {y} in it, and {z}]," said {E}. "[But
    where is the {x}|And what about the {x}]?"
    / "The {x}! I forgot the {x}!" said {A}. {E} [laughed|smiled] and [opened|went to] the cupboard, where
    there was [a little|just enough]. They began again, and this time they used {y}, {z} and {x}. The {dish}
    [tasted wonderful|came out just right]. [{B} and {C} came too, and nothing was left over.|They ate until
    they could eat no more.|"Now it is perfect," said {E}.])"},
// a rescue
{[](Story* s) {
    set(s, {"where", "tool", "how"}, any_row(s, kTraps));
    pick(s, {"small"}, kSmallOnes);
}, R"(
    {one day} {A} and {B} were walking [to {p}|home from {p}] when they heard a [small|sad|faint] cry.
    "[Listen|Hush]! [What is that|Who is calling]?" said {A}. They followed the sound and found a {small}
    {where}. It [was afraid|shook with fear|could not get out].
    / "[Poor thing|Do not be afraid, little one]," said {A}. {B} [tried to reach it|stretched out an arm], but
    it was [too far away|no use]. "We need a {tool}," said {A}. "[I will stay here|I will keep it company],
    and you [run|go] to {E}. {E.he} has one."
    / {B} ran as fast as {B.he} could. {A} [talked to|sang to] the {small} [all the while|so that it would not
    be afraid]. [Soon|At last|After a while] {B} came back with {E} and the {tool}. {A} {how}. [Nobody said a
    word.|{B} held {B.his} breath.] [Then the {small} was free!|Now the {small} was safe.]
    / [It licked {A}'s hand.|It looked at them once and ran to its mother.|It would not leave {A}'s
    side.|"Well done," said {E}. "You were brave, and you were [clever|quick] too."])"},
// a rainy day
{[](Story* s) { thing(s, "o"); }, R"(
    {A} and {B} had a plan. [Tomorrow|On the next day] they would go to {p} and [have a picnic|build a
    dam|look for treasure|fly a kite]. {A} could hardly sleep.
    / But in the morning it rained. It rained [and rained|on the roof|cats and dogs]. {A} [pressed {A.his}
    nose to the window|looked at the clouds]. "[Our day is spoiled|Now we cannot go]," {A.he} said
    [sadly|crossly].
    / "[Rain is no reason to be sad|A wet day can be a good day]," said {E}. "[What could we do with a {o},
    two chairs and an old sheet?|Here is a {o}, and here are two chairs and an old sheet.]"
    / {B} [had an idea|began to smile]. "[The sheet could be a sail|We could build a ship]! The {o.short} can
    be [our flag|the treasure|the captain]." They [pushed|pulled|carried] everything into the middle of the
    room. {A} was the [captain|queen|pirate|cook] and {B} was the [sailor|dragon|lookout]. [They crossed the
    sea three times.|They fought a storm and found an island.] They [forgot|did not even hear] the rain.
    / When {E} called them for supper, [the sun was shining|the rain had stopped]. There was a rainbow over
    {q}. "[I did not notice|I had forgotten all about it]," said {A}. "[I hope that it rains again
    tomorrow!|Can we play the same game again?]")"},
// a quarrel
{[](Story* s) { thing(s, "o"); }, R"(
    {one day} {A} and {B} found a {o} {p.at}. "[I saw it first|It is mine]!" said {A}. "No, [I saw it first|it
    is mine]!" said {B}. {A} pulled [on one side|this way], and {B} pulled [on the other|that way]. [They
    shouted so loudly that the birds flew up.|Soon both of them were angry.] "[I will never play with you
    again|You are not my friend any more]!" said {B}.
    / {E} heard [the noise|them] and came [out|over]. "What is [the matter|all this shouting about]?" asked
    {E}. Both spoke at once. {E} [held up one hand|waited until they were quiet]. "[One {o.short} and two
    friends|I see one {o.short} and two cross faces]," said {E}. "[What would be fair|How can both of you have
    it]?"
    / [{A} looked at {B}, and {B} looked at {A}.|It was quiet for a while.] "[{B} could have it in the morning
    and I in the afternoon|We could take turns: I count to fifty, and then it is {B}'s turn]," said {A}.
    / "[Or we play with it together|And on Sundays we share it]," said {B}.
    / "[Now that is fair|That sounds right to me]," said {E}. So that was what they did. [The {o.short} was
    more fun with two.|{A} said sorry, and {B} said sorry too.|They never quarrelled about the {o.short}
    again.])"},
// a noise in the night
{[](Story* s) { set(s, {"sound", "source", "where"}, any_row(s, kNoises)); }, R"(
    {A} was [brave|not afraid of anything] by day, but {A.he} did not like the dark.
    / One night {A} woke up. There was a noise {where}. "{sound}," it went. {A} [pulled the blanket over
    {A.his} head|lay very still|held {A.his} breath]. "{sound}," it went again. "[Is it a monster|Is it a
    ghost|Is it a wolf]?" thought {A}.
    / {A} [woke|called] {B}, who [was staying for the night|slept in the next room]. "Do you hear that?" {A}
    whispered.
    / "[I hear it|Yes]," said {B}. "[It sounds big|I am afraid too]. [Shall we look?|Let us look together.]"
    / {A} took [a lantern|a candle] and {B} took [a broom|a spoon]. [Step by step|Slowly, slowly] they
    [crept|went] towards the noise. "{sound}!" {A} lifted the light, and what did they see? It was {source}.
    / [{A} began to laugh.|They looked at each other and laughed.] "[So that was our monster|And I thought it
    was a monster]!" said [{A}|{B}]. [After that, the night was quiet.|They went back to bed.] ["A thing is
    only scary until you look at it," said {E} at breakfast.|Since then, {A} takes a light and looks when
    {A.he} hears something strange.|])"},
// a present
{[](Story* s) {
    set(s, {"hobby", "present", "use"}, any_row(s, kHobbies));
    thing(s, "o");
    pick(s, {"s1"}, kSpots[s->world]);
}, R"(
    {A.his} best friend {B} loved {hobby}. [Tomorrow|On Sunday] was {B}'s birthday, and {A} had no present
    yet.
    / "[Shall I give {B.him}|Would {B.he} like] a {o}?" {A} asked {E}. {E} shook {E.his} head. "[It is pretty,
    but|Perhaps, but] what does {B} love [most|best of all]?"
    / "{hobby}!" said {A} at once. [Now {A.he} knew what to do.|"Then I know the right thing!"] {A} [worked
    for {E} all day|sold some berries at the market|emptied {A.his} money box] and [bought|got] a {present}.
    {A.he} hid it {s1} so that {B} would not see it.
    / In the afternoon, {B} came to play. {B.he} [almost looked|wanted to look] {s1}. "[Not there|Stop]!"
    cried {A}. "There is a [big|fat|hairy] spider." {B} [wondered|was puzzled], but {A} only smiled.
    / On the birthday, {A} [brought|carried] the present to {B}. {B} [opened it|pulled off the paper] and
    [gasped|beamed]. "A {present}! [How did you know|That is just what I wished for]!" said {B}. [Right
    away|Before the cake was cut], {B} began to {use}. "So that was your spider!" [{B.he}
    laughed.|said {B}.])"},
// a race
{[](Story* s) {
    set(s, {"rest"}, {roll(s, 2) == 0 ? R"(
        When {A} ran on, {A.he} did not look where {A.he} was going. {A.he} [tripped over a root|slipped in
        the mud] and hurt {A.his} [knee|foot]. One after the other, the runners passed {A.him}. [Nobody
        stopped.|Nobody looked.] Then {B} came along. {B} could have run on, but {B.he} stopped. "[Lean on
        me|Take my arm]," said {B}. Together they [walked|limped] to {q}, and they were the last.
        / But {E} gave the [prize|medal] to {B}. "[The others ran fast|Anyone can run]," said {E}. "But {B}
        has a good heart." {A} [clapped louder than anybody|was quiet for a moment]. "Thank you," {A.he} said.
        ["I was proud, and I was silly."|From then on they ran together.])" : R"(
        {B} ran on and on, [step by step|not fast, but without a stop]. {A} [fell asleep|looked at the clouds]
        and forgot the time. When {A} looked up, {B} was almost at {q}. {A} [jumped up and ran|ran like the
        wind], but it was too late. {B} had won!
        / "How did you do it?" asked {A}.
        / "[I did not stop|I just kept going]," said {B}. {A} [thought about that|laughed at last] and shook
        {B}'s hand. [{A} never boasted again.|"Next time I will not stop either," said {A}.])"});
}, R"(
    {A} was the fastest runner [of all|far and wide], and {A.he} [knew it|said so every day]. "Nobody can beat
    me," said {A}. {B} was [slow|not fast], but {B.he} never gave up.
    / {one day} there was a race from {p} to {q}. {E} [raised a flag|counted to three], and off they went. {A}
    was soon far ahead. {B} [came last|was far behind]. "[I have plenty of time|This is too easy]," said {A},
    [and lay down in the shade|and stopped to eat a plum|and waved to everybody].
    / {rest})"},
// a seed
{[](Story* s) { set(s, {"plant", "bloom"}, any_row(s, kPlants)); }, R"(
    [In spring|One day in spring], {E} gave {A} a {plant} seed. "[Give it earth, water and time|It needs
    water, sun and patience]," said {E}. {A} [dug a hole|made a small hole] [in a sunny corner|beside the
    wall|next to the door], put the seed in and covered it.
    / The next day, {A} went to look. [Nothing had happened.|There was only earth.] {A} watered it. On the
    second day, [there was still nothing|it looked the same]. {A} watered it again. "[It will never
    grow|Perhaps it is asleep]," said {A}. On the third day, {B} laughed. "[You are watering mud|There is
    nothing there]!" said {B}. But {A} [did not give up|came back every day].
    / [Then, after a week|At last, one {weather} morning], there was a tiny green [leaf|tip]. "[It is
    growing|Look, {B}]!" shouted {A}. Now {B} [helped|carried water too]. The {plant} grew [taller|bigger]
    [every day|with every rain]. And when summer came, it had {bloom}.
    / "[I am sorry that I laughed|I did not believe it]," said {B}. "How did you know [that it would grow|it
    was there]?"
    / "I did not know," said {A}. "[I only waited|I only gave it water and time]." [{E} smiled.|{A} kept one
    {plant} seed for the next year.])"},
// swaps
{[](Story* s) {
    for (const char* key : {"o", "q1", "q2", "w"}) { thing(s, key); }
}, R"(
    {one day} {A} saw a {w} {p.at}. It belonged to {E}. "[How much is it|What does it cost]?" asked {A}. "[I
    do not want money|It is not for sale]," said {E}. "But I would give it away for a {q2}." {A} had no
    {q2.short}. All {A.he} had was a {o}.
    / {A} [went to|asked] {B}. "Do you have a {q2}?" "No," said {B}. "I have only this {q1}. [But I would like
    your {o.short}|I have always wanted a {o.short}]." So {A} gave {B} the {o} and got the {q1}.
    / Then {A} went to {q}. There sat {C} with a {q2}! "[Would you swap|Will you give it to me]?" asked {A}.
    "[For that {q1.short}|For your {q1}]? [Gladly|At once]!" said {C}. So {A} gave {C} the {q1} and got the
    {q2}.
    / {A} ran back to {E}. "Here is [a {q2}|the {q2.short}]!" "[Well done|I can hardly believe it]," said {E},
    and gave {A} the {w}. "How did you [get it|do it]?"
    / "I gave my {o.short} to {B} for a {q1.short}, and the {q1.short} to {C} for the {q2.short}," said {A}.
    "And now [I have the {w.short}|the {w.short} is mine], and everybody is [happy|glad].")"},
// the way home
{[](Story* s) {
    pick(s, {"l1", "l2", "l3"}, kLandmarks);
    pick(s, {"food"}, kForage);
}, R"(
    {one day} {A} and {B} went out to look for {food}. They walked past {l1}. [Then they walked past|After
    that they came to] {l2}. [A little later|At last] they passed {l3}, and behind it they found [more {food}
    than they could carry|plenty of {food}].
    / They [gathered|collected] {food} until [it grew dark|fog came up]. "[How do we get home|Which way did we
    come]?" asked {B}. [{B.his} voice shook.|{B} was afraid.] "[I do not know this place|Everything looks
    different]."
    / "[Let us think|Do not worry]," said {A}. "What did we pass last, before we found the {food}?"
    / "{l3}," said {B}.
    / "Then we must look for {l3} first," said {A}. They [looked around|walked slowly], and there was {l3}.
    "[And before that|What came before]?" "{l2}!" said {B}. [Soon|After a while] they found {l2}. "Now only
    {l1} [is missing|is left]," said {A}. And when they had passed {l1}, they saw [the lights of home|{E}, who
    was waiting with a lantern].
    / "[You are late|There you are]!" said {E}. "How did you find the way?"
    / "Backwards!" said {B}, and [they all laughed|{A} laughed].)"},
// fruit given away
{[](Story* s) {
    size_t total = 7 + roll(s, 10), first = 1 + roll(s, 3), second = 1 + roll(s, 3);
    pick(s, {"food"}, kFruit);
    set(s, {"n", "n1", "left1", "n2", "left2"}, {kNumbers[total][0], kNumbers[first][0],
        kNumbers[total - first][0], kNumbers[second][0], kNumbers[total - first - second][0]});
}, R"(
    {one day} {A} [picked|gathered|was given] {n} {food} and [put them into|carried them in] a basket. "{n}
    {food}, [all for me|what a treasure]!" said {A}.
    / [On the way|By and by] {A.he} met {B}, who [looked hungry|had nothing to eat]. "[Are those for me|May I
    have some]?" asked {B}. {A} [thought about it|did not want to be mean] and gave {B} {n1}. Now there were
    {left1} left. "Thank you," said {B}.
    / Then {A} came to {p}. There sat {C}, [tired and pale|all alone]. "[I have walked since morning|I have
    not eaten today]," said {C}. {A} gave {C.him} {n2} of the {left1}. Now {A} had {left2} {food}.
    / At home, {E} [looked into the basket|counted the {food}]. "Only {left2}? [You told me there were|There
    should be] {n}!" said {E}.
    / "I gave {n1} to {B} and {n2} to {C}," said {A}.
    / "[Then you have done well|Then they were not lost]," said {E}. [The next day, {B} and {C} brought {A} a
    whole cake.|"{left2} {food} taste better when nobody is hungry."|{A} ate the {left2} {food}, and they were
    very good.])"},
// something broken
{[](Story* s) {
    pick(s, {"o"}, kFragile);
    pick(s, {"s1"}, kSpots[s->world]);
}, R"(
    {E} had [given|lent] {A} a room to play in, but [there was one rule|{E.he} had asked one thing]: no
    running near the {o}.
    / {one day} {A} forgot the rule. {A} and {B} [chased each other|played tag], and {A} bumped into the
    [shelf|table]. Crash! The {o} lay on the floor in [{num}|many] pieces.
    / "[Quick, let us hide it|Nobody saw us]," said {B}. They swept up the pieces and hid them {s1}. But {A}
    could not [eat|sleep|play] any more. [{A.his} stomach hurt.|Every time {E} came in, {A} looked at the
    floor.]
    / "[What is wrong with you|You are so quiet]," said {E} in the evening. {A} [swallowed|took a deep
    breath]. "I broke the {o}," {A.he} said. "[I ran, and I should not have|I am so sorry]. The pieces are
    {s1}."
    / {E} was silent for a [moment|while]. "I am sad about the {o}," {E.he} said. "But I am glad that you told
    me [the truth|yourself]." [Together they glued|The next day they all glued] the pieces together. [There
    was a crack, but it still stood on the shelf.|It was not as good as new, but {E} liked it even more.] And
    {A} [could eat again|slept well again|felt light as a feather].)"},
// an errand
{[](Story* s) { thing(s, "o"); }, R"(
    {one day} {E} said to {A}, "[Please take|Will you take] this {o} to {B}? [{B.he} is ill in bed|{B.he} is
    waiting for it]. Go straight to {p}, and do not stop on the way."
    / "[Of course|I promise]," said {A}, and set out with the {o.short}.
    / [Near|Not far from] {q}, {A} [saw a puppet show|heard music|saw a butterfly with blue wings]. "[Just for
    a minute|Only one look]," thought {A}. {A.he} put the {o.short} down [in the grass|on a stone] and
    [watched|listened]. When {A.he} turned round, the {o.short} was gone!
    / {A} [felt cold with fear|looked everywhere]. Then {A.he} saw {C}, who was carrying a {o}. "[Stop,
    please|Wait]! That is [mine|not yours]," called {A}.
    / "[I found it|It was lying there], and nobody was near," said {C}. "[I was looking for the owner|I was on
    my way to ask whose it was]." {C} gave it back at once. "[Better hold it tight|Take good care of it],"
    {C.he} said.
    / {A} [ran|hurried] the rest of the way to {p} and did not stop again. {B} was [so glad|very happy].
    "[What a fine {o.short}|You came just in time]!" said {B}. In the evening {A} told {E} [the whole
    story|what had happened]. "[Tomorrow you may watch|First the errand, then the fun]," said {E}[, and
    winked|].)"},
// learning
{[](Story* s) { set(s, {"to", "place", "fail", "tip", "done"}, any_row(s, kSkills)); }, R"(
    All {A.his} friends could {to}, but {A} could not. {B} could {to} [best of all|with {B.his} eyes closed].
    "[I want to {to} too|I will learn it]," said {A}.
    / On Monday {A} went to {place} and tried. But {fail}. On Tuesday {A} tried again, and again {fail}. On
    Wednesday [it was no better|{A} almost gave up]. "I will never learn to {to}," said {A}, and [kicked a
    stone|hung {A.his} head].
    / {E} had [watched|seen everything]. "[Do you know how often I failed when I was young?|Nobody can do it
    at once,]" said {E}. "{tip}."
    / "{tip}," {A} said to {A.his} [own feet|own hands|heart]. On Thursday {A.he} went back to {place}. {A.he}
    [thought of|remembered] what {E} had said, and tried once more. And look: {done}!
    / "{B}! {B}! I can {to}!" shouted {A}. {B} [came running|clapped]. ["Show me again!" said {B}. And {A} did
    it again, and again, until the sun went down.|"I knew you could do it," said {B}.|On Friday, {A} taught
    {C} how to {to}.])"}};

static void tell_plot(Story* s, size_t number) {
    kPlots[number].begin(s);
    say(s, "{opening} ");
    say(s, kPlots[number].text);
}

static std::string tell(uint64_t seed, uint32_t number) {
    Story s = {seed, number, 0, Rand4(), 0, {{"opening", kOpening}, {"one day", kOneDay}}, ""};
    cast(&s);
    const size_t plots = kPlots.size(), first = roll(&s, plots);
    tell_plot(&s, first);
    if (roll(&s, 4) == 0) {                     // some have a second part: another plot, the same people
        s.words["opening"] = kOpeningOfSecond;
        tell_plot(&s, (first + 1 + roll(&s, plots - 1)) % plots);
    }
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
    bool to_file = path[0] != '\0';
    AtomicFile out = {};
    if (to_file) { out = atomic_open(path); }
    int64_t written = 0;
    for (int64_t n = 0; n < count && (bytes == 0 || written < bytes); n++) {
        std::string text = (n > 0 ? "<|endoftext|>\n" : "") + tell((uint64_t)seed, (uint32_t)n);
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
