/*
A thread that does one job at a time. Host only.

    Worker* worker = worker_start("reads the data");    // the words end an error message
    worker_post(worker, [=] { ... });                   // the worker must be idle
    worker_wait(worker);                                // until it is idle
    worker_free(worker);                                // waits, and ends the thread

A Worker is on the heap, where exit() destroys nothing: die() may end the program while the thread works.
*/
#pragma once

#include <condition_variable>   // gives: std::condition_variable
#include <system_error>         // gives: std::system_error

#include "errors.h"             // gives: die

struct Worker {
    std::mutex mutex;
    std::condition_variable changed;
    std::function<void()> work;         // empty: idle
    bool quit = false;
    std::thread thread;
};

static inline void worker_loop(Worker* w) {
    std::unique_lock<std::mutex> lock(w->mutex);
    for (;;) {
        w->changed.wait(lock, [w] { return w->work || w->quit; });
        if (w->quit) { return; }
        std::function<void()> work = w->work;
        lock.unlock();
        work();
        lock.lock();
        w->work = nullptr;
        w->changed.notify_all();
    }
}

static inline Worker* worker_start(const char* task = "works") {
    Worker* w = new Worker();
    try { w->thread = std::thread(worker_loop, w); }
    catch (const std::system_error& e) {
        die("cannot start the thread that %s: %s\nhint: give the program more memory or more threads "
            "(ulimit -a)", task, e.what());
    }
    return w;
}

static inline bool worker_busy(Worker* w) {
    std::lock_guard<std::mutex> lock(w->mutex);
    return (bool)w->work;
}

static inline void worker_wait(Worker* w) {
    std::unique_lock<std::mutex> lock(w->mutex);
    w->changed.wait(lock, [w] { return !w->work; });
}

static inline void worker_post(Worker* w, std::function<void()> work) {
    std::lock_guard<std::mutex> lock(w->mutex);
    assert(!w->work);
    w->work = work;
    w->changed.notify_all();
}

static inline void worker_free(Worker* w) {
    worker_wait(w);
    {
        std::lock_guard<std::mutex> lock(w->mutex);
        w->quit = true;
        w->changed.notify_all();
    }
    w->thread.join();
    delete w;
}
