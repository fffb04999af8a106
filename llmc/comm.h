#ifndef LLMC_COMM_H
#define LLMC_COMM_H
#include <stdint.h>
#include <string>
#include <utility>
#include <vector>
struct CommOptions { int gpus; const char *init, *server, *folder; int processes, process, per_node, start_timeout_s; };
struct Comm { int rank = 0, world = 1, local_rank = 0, local_world = 1; };
static Comm comm;
static inline void comm_start(const CommOptions&, int, char**) {}
static inline void comm_broadcast(void*, size_t) {}
static inline void comm_all_gather(void*, size_t) {}
static inline void comm_all_to_all(void*, const void*, size_t) {}
static inline bool comm_any(bool mine) { return mine; }
static inline void comm_check_same(const std::vector<std::pair<std::string, std::string>>&) {}
static inline void comm_progress(int64_t) {}
static inline void comm_patience(double) {}
static inline void comm_end() {}
static std::string (*comm_health)() = nullptr;
static void (*comm_abort)() = nullptr;
#endif
