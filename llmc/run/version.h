/*
What --version prints: of which sources this program was built, by what, and with what. Host only.

    if (version_asked(argc, argv)) { version_print(PRECISION_NAME); return 0; }

The Makefile gives the commit. It is that of the last compilation: no commit alone rebuilds a program.
*/
#pragma once

#include "../errors.h"      // gives: format

#ifndef GIT_COMMIT
#define GIT_COMMIT unknown
#endif
constexpr char kRelease[] = "0.1";      // CHANGELOG.md says what is new in it
#define VERSION_TEXT_OF(x) #x
#define VERSION_TEXT(x) VERSION_TEXT_OF(x)

static inline bool version_asked(int argc, char** argv) {
    return argc > 1 && strcmp(argv[1], "--version") == 0;
}

static inline void version_print(const char* precision) {
    std::string with;
#ifdef CUDART_VERSION
    with += format(", CUDA %d.%d for compute", CUDART_VERSION / 1000, CUDART_VERSION / 10 % 100);
    for (int arch : {__CUDA_ARCH_LIST__}) { with += format(" %d.%d", arch / 100, arch / 10 % 10); }
#else
    with += ", CPU";
#endif
#ifdef NCCL_MAJOR
    with += format(", NCCL %d.%d", NCCL_MAJOR, NCCL_MINOR);
#endif
#ifdef USE_MPI
    with += ", MPI";
#endif
#ifdef USE_OPENBLAS
    with += ", OpenBLAS";
#endif
#ifdef _OPENMP
    with += ", OpenMP";
#endif
    printf("samebits %s, commit %s\n%s%s\ncompiler %s\n", kRelease, VERSION_TEXT(GIT_COMMIT), precision,
           with.c_str(), __VERSION__);
}
