/*
Tests of lazy_streams.h's graphs: what CUDA refuses in a capture ends the program here too, and the rest runs
late. test_lazy.py has the trainer's graphs.

    make build/test_lazy_streams && build/test_lazy_streams
*/
#define GPT2_CPU
#define LAZY_STREAMS
#include "llmc/ops/cpu_device.h"        // gives: what is tested
#include "child.h"                      // gives: check_dies, folder_begin
#include "test.h"                       // gives: TEST, CHECK

static Stream stream, side;
static Event outside, forked, rejoined;
static int *device, *pinned;

static void add(Stream s, int n) { on_stream(s, [=] { *device += n; }); }
static void fork_side() { event_record(forked, stream), stream_wait(side, forked); }
static void join_side() { event_record(rejoined, side), stream_wait(stream, rejoined); }

// The second run is recorded.
static void run_twice(const std::function<void()>& work) {
    Graph graph;
    for (int i = 0; i < 2; i++) { graph_run(&graph, stream, work); }
}

int main() {
    folder_begin("lazy_streams");
    stream = stream_create(), side = stream_create();
    outside = event_create(), forked = event_create(), rejoined = event_create();
    device = (int*)device_malloc(sizeof(int), "a number");
    pinned = (int*)pinned_malloc(sizeof(int), "a number");
    *device = 0;
    event_record(outside, stream);

    TEST("what a capture refuses") {
        const struct { const char* what; std::function<void()> work; const char* said; } cases[] = {
            {"stream_sync", [] { stream_sync(stream); }, "Unsupported"},
            {"another stream's", [] { stream_sync(side); }, "Unsupported"},
            {"event_wait", [] { event_wait(outside); }, "Unsupported"},
            {"an allocation", [] { device_free(device_malloc(1, "a byte")); }, "Unsupported"},
            {"a release", [] { device_free(nullptr); }, "Unsupported"},
            {"a copy of pageable memory", [] { int n = 1; copy_to_device(device, &n, sizeof(n), stream); },
             "not pinned"},
            {"a copy to it", [] { int n; copy_to_host(&n, device, sizeof(n), stream); }, "Unsupported"},
            {"an event from outside", [] { stream_wait(stream, outside); }, "Isolation"},
            {"a capture", [] { run_twice([] {}); }, "Unsupported"},
            {"a branch without a join", [] { fork_side(); add(side, 1); }, "Unjoined"},
            {"work behind the join", [] { fork_side(); join_side(); add(side, 1); }, "Unjoined"},
            {"a stream waits outside", [] { event_record(forked, stream); }, "CapturedEvent"}};
        for (const auto& c : cases) {
            check_dies(c.what, [&] { run_twice(c.work); stream_wait(side, forked); }, {c.said});
        }
        check_dies("the host waits outside", [] {
            run_twice([] { event_record(forked, stream); });
            event_wait(forked);
        }, {"CapturedEvent"});
    }

    TEST("what a graph runs, and when") {
        Graph graph;
        int n = 1;
        auto work = [&] {
            add(stream, n), fork_side(), add(side, 10 * n), join_side(), add(stream, 100 * n);
        };
        graph_run(&graph, stream, work);
        stream_sync(stream);
        CHECK(*device == 111, "%d, not recorded", *device);
        n = 2;
        graph_run(&graph, stream, work);
        CHECK(*device == 111, "%d before anybody waits", *device);
        n = 3;
        graph_run(&graph, stream, work);        // as it was recorded
        stream_sync(stream);
        CHECK(*device == 111 + 222 + 222, "%d after two launches", *device);
        graph_run(&graph, stream, work, true);
        stream_sync(stream);
        CHECK(*device == 555 + 333, "%d after a new recording", *device);
        graph_free(&graph);

        for (int i = 0; i < 3; i++) {           // the host's memory is read when the graph runs
            *pinned = i;
            graph_run(&graph, stream, [] { copy_to_device(device, pinned, sizeof(int), stream); });
            *pinned = 7;
            stream_sync(stream);
            CHECK(*device == 7, "launch %d copied %d", i, *device);
        }
        graph_free(&graph);
    }
    return folder_end();
}
