/*
Streams and events for a test of the CPU build: a missing stream_wait or event_wait, on a GPU a race that may
never be seen, gives wrong bits here. llmc/ops/cpu_device.h includes it under -DLAZY_STREAMS.

    Stream stream = stream_create();
    copy_to_host(pinned, device, bytes, stream);    // does nothing yet
    event_record(event, stream);
    event_wait(event);                              // now it is done, and nothing that stands behind it

A stream is a queue of work, with its arguments by value. Work runs only when the host waits for something,
and no more of it than that needs. Which of the streams that can go on does so is up to the environment:

    GPT2_LAZY=201           the last of three, if it can; else the first, else the second. Default: 012...
    GPT2_LAZY=random:SEED   any

All of these are orders that CUDA allows. Like there, the host's waits are event_wait, event_ms, stream_sync,
to free memory, and copies to memory that is not pinned. Copies from such memory may be as late as others: the
host waits before it lets the memory go. Of all this, other threads than main's may call event_wait only.

A graph's capture keeps work for later, as CUDA's does. What CUDA refuses ends the program: see "graphs".
*/
#pragma once

#include <stdint.h>     // gives: uint64_t
#include <stdlib.h>     // gives: getenv, strtoull
#include <string.h>     // gives: memcpy
#include <unistd.h>     // gives: usleep

#include <algorithm>    // gives: std::max
#include <deque>        // gives: std::deque
#include <functional>   // gives: std::function
#include <map>          // gives: std::map
#include <memory>       // gives: std::shared_ptr
#include <mutex>        // gives: std::recursive_mutex
#include <random>       // gives: std::mt19937_64
#include <string>       // gives: std::string
#include <thread>       // gives: std::this_thread
#include <vector>       // gives: std::vector

#include "llmc/errors.h" // gives: die
#include "llmc/comm/comm.h" // gives: comm_meet, comm_now, CommWait
#include "llmc/ops/op_types.h" // gives: Stream

constexpr bool kDeviceIsAsync = true;

// Behind so many pieces of the stream's work; capture: of its nodes in that capture, 0: in no graph.
struct LazyPoint { Stream stream = 0; uint64_t number = 0, capture = 0; };
struct LazyEvent { LazyPoint recorded; double seconds = 0.0; };
struct Event { std::shared_ptr<LazyEvent> at; };                // work in a queue may outlive its destruction
struct LazyWork {
    std::function<void()> run;
    LazyPoint after;            // not before this point is passed
    uint64_t turn;              // among the collectives, from 1 on; 0: it is none
};
struct LazyStream { std::deque<LazyWork> queue; uint64_t done = 0; };
struct LazyNode { Stream stream; std::function<void()> run; LazyPoint after; };
struct LazyGraph {
    uint64_t capture;                           // from 1 on
    Stream origin;                              // the captured stream; others join when they wait for it
    std::vector<LazyNode> nodes;
    std::map<Stream, uint64_t> ends;            // how many nodes each of its streams has
};
struct LazyState {
    std::vector<LazyStream> streams;
    std::shared_ptr<LazyGraph> capturing;       // null: no capture goes on
    uint64_t captures = 0;
    std::map<Stream, Stream> branches;          // where graphs run the nodes of streams that joined
    uint64_t turns_queued = 0, turns_done = 0;
    bool met = false;           // all ranks have agreed on the next collective
    uint64_t calls = 0;         // how often work was queued or waited for
    std::map<const char*, size_t> pinned;       // where it begins: bytes
    std::string order;          // of preference; empty: a random one
    std::mt19937_64 draw;
    std::recursive_mutex mutex;                 // held by whoever looks at all this
    const std::thread::id main = std::this_thread::get_id();
};

static inline LazyState* lazy_begin() {
    LazyState* state = new LazyState;           // never freed: exit() does not wait for other threads
    const char* policy = getenv("GPT2_LAZY");
    state->order = policy ? policy : "0123456789";
    if (state->order.compare(0, 7, "random:") == 0) {
        state->draw.seed(strtoull(policy + 7, nullptr, 10));
        state->order.clear();
    } else if (state->order.find_first_not_of("0123456789") != std::string::npos || state->order.empty()) {
        die("GPT2_LAZY='%s': choose an order of streams, as 201, or random:SEED", policy);
    }
    return state;
}
static LazyState& lazy = *lazy_begin();

struct LazyLock {
    LazyLock() { lazy.mutex.lock(); }
    ~LazyLock() { lazy.mutex.unlock(); }
    LazyLock(const LazyLock&) = delete;
};

static inline void capture_refuses(const char* what) {  // other threads may do it: the mode is thread-local
    if (std::this_thread::get_id() == lazy.main && lazy.capturing) {
        die("in a graph's capture: %s (cudaErrorStreamCaptureUnsupported)", what);
    }
}

// ---- running ----

static inline bool lazy_passed(const LazyPoint& p) {
    return p.number == 0 || lazy.streams[p.stream].done >= p.number;
}
static inline LazyPoint lazy_end(Stream stream) {
    LazyLock lock;
    return {stream, lazy.streams[stream].done + lazy.streams[stream].queue.size(), 0};
}

// Runs one piece of work.
static inline void lazy_step() {
    std::string ready;                          // digits of the streams that can go on
    for (LazyStream& s : lazy.streams) {
        if (s.queue.empty() || !lazy_passed(s.queue.front().after)) { continue; }
        const uint64_t turn = s.queue.front().turn;
        if (turn == 0 || turn == lazy.turns_done + 1) { ready += (char)('0' + (&s - &lazy.streams[0])); }
    }
    if (ready.empty()) { die("the host waits for work that cannot run"); }
    char chosen = ready[lazy.order.empty() ? lazy.draw() % ready.size() : 0];
    const size_t first = lazy.order.find_first_of(ready);
    if (first != std::string::npos) { chosen = lazy.order[first]; }
    LazyStream* s = &lazy.streams[chosen - '0'];
    const LazyWork work = std::move(s->queue.front());
    s->queue.pop_front();
    work.run();
    if (work.turn) { lazy.turns_done = work.turn; }
    s->done++;
}

static inline void lazy_run(const LazyPoint& until) {
    LazyLock lock;
    capture_refuses("the host waits");
    if (until.capture) { die("the host waits for an event of a graph (cudaErrorCapturedEvent)"); }
    lazy.calls++;
    while (!lazy_passed(until)) { lazy_step(); }
}

static inline LazyPoint on_stream(Stream stream, std::function<void()> work, LazyPoint after = {},
                                  uint64_t turn = 0) {
    LazyLock lock;
    lazy.calls++;
    LazyGraph* graph = lazy.capturing.get();
    const bool joins = graph && after.capture == graph->capture;
    if (graph && (joins || graph->ends.count(stream))) {
        if (turn) { die("in a graph's capture: a collective"); }
        if (!joins && after.number) {
            die("in a graph's capture: a wait for an event from outside (cudaErrorStreamCaptureIsolation)");
        }
        graph->nodes.push_back({stream, std::move(work), after});
        return {stream, ++graph->ends[stream], graph->capture};
    }
    if (after.capture) { die("a stream waits for an event of a graph (cudaErrorCapturedEvent)"); }
    lazy.streams[stream].queue.push_back({std::move(work), after, turn});
    return lazy_end(stream);
}

template <class Args> static inline void run_op(void (*twin)(const Args&, Stream), const Args& a, Stream s) {
    on_stream(s, [=] { twin(a, s); });
}

// ---- collectives ----
// Ranks may run ahead of each other, as rank 0 does when it samples, but what goes over their sockets has to
// come in one order. So before each collective they meet: those that come from the host learn whether others
// are at one from a queue, and then run as far as that one before they ask again. Queues' collectives are
// taken in the order in which they were queued, which is the same on all ranks.
enum : uint32_t { kLazyMeet = 100 };

static inline void in_turn(Stream stream, std::function<void()> collective) {
    on_stream(stream, [collective = std::move(collective)] {
        CommWait waiting;
        if (comm_state && !lazy.met) { comm_meet(kLazyMeet, 0, 1); }
        lazy.met = false;
        collective();
    }, {}, ++lazy.turns_queued);
}

// Lives as long as a collective of the host.
struct LazyHostTurn {
    LazyLock lock;
    LazyHostTurn() {
        CommWait waiting;
        while (comm_state && comm_meet(kLazyMeet, 0, 0) > 0) {
            lazy.met = true;
            while (lazy.met) { lazy_step(); }
        }
    }
};

// ---- the runtime, as in llmc/ops/cuda_device.h ----

static inline Stream stream_create() {
    LazyLock lock;
    lazy.streams.emplace_back();
    return (Stream)lazy.streams.size() - 1;
}
static inline Stream stream_create_urgent() { return stream_create(); }
static inline void stream_destroy(Stream) {}
static inline void stream_sync(Stream stream) { lazy_run(lazy_end(stream)); }
static inline void device_sync() { for (Stream s = 0; s < (int)lazy.streams.size(); s++) { stream_sync(s); } }

static inline Event event_create() { return {std::make_shared<LazyEvent>()}; }
static inline void event_destroy(Event) {}
static inline void event_record(const Event& event, Stream stream) {
    LazyLock lock;
    event.at->recorded = on_stream(stream, [at = event.at] { at->seconds = comm_now(); });
}
static inline void event_wait(const Event& event) {
    LazyLock lock;
    const LazyPoint until = event.at->recorded;
    // Another thread's wait is late too: it leaves the work to main, unless main has called nothing for a
    // while, and so may be waiting for that thread.
    const bool is_main = std::this_thread::get_id() == lazy.main;
    for (uint64_t seen = 0; !is_main && !lazy_passed(until) && seen != lazy.calls;) {
        seen = lazy.calls;
        lazy.mutex.unlock();
        usleep(20000);
        lazy.mutex.lock();
    }
    lazy_run(until);
}
static inline void stream_wait(Stream stream, const Event& event) {
    on_stream(stream, [] {}, event.at->recorded);
}
static inline double event_ms(const Event& from, const Event& to) {
    event_wait(from);
    event_wait(to);
    return (to.at->seconds - from.at->seconds) * 1e3;
}

static inline bool lazy_is_pinned(const void* p) {
    auto next = lazy.pinned.upper_bound((const char*)p);
    if (next == lazy.pinned.begin()) { return false; }
    --next;
    return (const char*)p < next->first + next->second;
}
static inline void copy_to_device(void* device, const void* host, size_t bytes, Stream stream) {
    if (!lazy_is_pinned(host)) {
        capture_refuses("a copy of memory that is not pinned, which would be read at each launch");
    }
    on_stream(stream, [=] { memcpy(device, host, bytes); });
}
static inline void copy_to_host(void* host, const void* device, size_t bytes, Stream stream) {
    on_stream(stream, [=] { memcpy(host, device, bytes); });
    if (!lazy_is_pinned(host)) { stream_sync(stream); }
}
// llmc/ops/cpu_device.h tells of pinned memory here.
static inline void pinned_begins(const void* p, size_t bytes) { lazy.pinned[(const char*)p] = bytes; }
static inline void pinned_ends(const void* p) { lazy.pinned.erase((const char*)p); }

// ---- graphs, as in llmc/ops/cuda_device.h ----
// In a capture, work becomes nodes of a graph. They keep the arguments that they had, and run after a launch.
// What memory holds counts then, also the host's.
static inline void capture_begin(Stream stream) {
    capture_refuses("a second capture begins");
    lazy.capturing = std::make_shared<LazyGraph>();
    lazy.capturing->capture = ++lazy.captures;
    lazy.capturing->origin = stream;
    lazy.capturing->ends[stream] = 0;
}

static inline std::shared_ptr<LazyGraph> capture_end() {
    const std::shared_ptr<LazyGraph> graph = std::move(lazy.capturing);
    // How many nodes of each stream come before the origin's end, directly or through other streams?
    std::map<Stream, uint64_t> joined = {{graph->origin, graph->ends[graph->origin]}}, left = graph->ends;
    for (auto node = graph->nodes.rbegin(); node != graph->nodes.rend(); ++node) {
        if (left[node->stream]-- > joined[node->stream] || !node->after.capture) { continue; }
        uint64_t& other = joined[node->after.stream];
        other = std::max(other, node->after.number);
    }
    if (joined != graph->ends) { die("a graph's branch is never joined (cudaErrorStreamCaptureUnjoined)"); }
    return graph;
}

static inline void graph_launch(const LazyGraph& graph, Stream stream) {
    std::map<Stream, LazyPoint> begins;         // of each of its streams: where its nodes run, behind what
    for (const auto& [its, count] : graph.ends) {
        const bool branch = its != graph.origin;
        if (branch && !lazy.branches.count(its)) { lazy.branches[its] = stream_create(); }
        begins[its] = lazy_end(branch ? lazy.branches[its] : stream);
    }
    for (const LazyNode& node : graph.nodes) {
        LazyPoint after;
        if (node.after.capture) {
            after = begins[node.after.stream];
            after.number += node.after.number;
        }
        on_stream(begins[node.stream].stream, node.run, after);
    }
}

struct Graph { std::shared_ptr<LazyGraph> exec; bool begun = false; };
static inline void graph_free(Graph* g) { *g = Graph(); }
template <class Work>
static inline void graph_run(Graph* g, Stream stream, const Work& work, bool changes = false) {
    if (!g->begun) { g->begun = true; work(); return; }
    if (!g->exec || changes) {
        capture_begin(stream);
        work();
        g->exec = capture_end();
    }
    graph_launch(*g->exec, stream);
}
