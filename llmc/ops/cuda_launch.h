/*
What launchers of CUDA kernels have in common: shared memory above 48 KB, whole vectors, and the descriptions
of tensors that Hopper's copy engine (TMA) takes. The includer has defined floatX and kFp16.

    check_width(args, args.C);                              // dies if rows are no whole vectors
    allow_shared_memory(kernel, bytes);                     // at most kPortableShared
    allow_shared_memory(kernel, bytes, kSm90Shared);        // one that runs on Hopper alone
    kernel<<<blocks, threads, bytes, stream>>>(tensor_map(qkv, B, T, 3 * NH));
*/
#pragma once

#include <cuda.h>               // gives: CUtensorMap, cuTensorMapEncodeTiled
#include <cuda_runtime.h>       // gives: cudaFuncSetAttribute, cudaGetDriverEntryPointByVersion

#include "../errors.h"          // gives: die
#include "cuda_device.h"        // gives: cudaCheck, device_index
#include "cuda_helpers.h"       // gives: kWidth
#include "ops.h"                // gives: op_name

// What a block may have of shared memory, in bytes: on every GPU from sm_80 on, such as a 4090, an A10 and
// an L4; and on Hopper.
constexpr size_t kPortableShared = 99 * 1024, kSm90Shared = 227 * 1024;

// Dynamic shared memory above 48 KB has to be asked for, kernel by kernel. Dies if it is more than `most`: so
// a test on any GPU sees what would fail on a smaller one.
template <class Kernel>
static inline void allow_shared_memory(Kernel kernel, size_t bytes, size_t most = kPortableShared) {
    if (bytes > most) { die("a kernel asks for %zu bytes of shared memory a block, of %zu", bytes, most); }
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

// Rows of n elements must be whole vectors.
template <class Args> static inline void check_width(const Args& a, size_t n) {
    if (n % kWidth == 0) { return; }
    die("%s: rows of %zu elements; their number must be a multiple of %d", op_name(a), n, kWidth);
}

// The most bytes of shared memory that a block may ask for: 227 KiB on Hopper, 163 on an A100, 99 on most
// others.
static inline size_t shared_memory_limit() {
    static const int limit = [] {
        int bytes = 0;
        cudaCheck(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_index));
        return bytes;
    }();
    return (size_t)limit;
}

// Describes a tensor to the copy engine (TMA), the innermost dimension first; there `box` 16-bit elements, 64
// or 32, are a row of shared memory, in the swizzle of as many bytes. Outside of the tensor are zeros.
struct MapDim { size_t size, bytes; int box; };         // bytes from one index to the next
template <int kRank> static inline CUtensorMap encode_map(const void* tensor, const MapDim (&d)[kRank]) {
    typedef decltype(&cuTensorMapEncodeTiled) EncodeTiled;
    static const EncodeTiled encode = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaCheck(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                                   &found));
        if (found != cudaDriverEntryPointSuccess) { die("the CUDA driver has no cuTensorMapEncodeTiled"); }
        return (EncodeTiled)entry;
    }();
    cuuint64_t sizes[kRank], strides[kRank];
    cuuint32_t box[kRank], steps[kRank];
    for (int i = 0; i < kRank; i++) {
        sizes[i] = d[i].size, box[i] = d[i].box, steps[i] = 1;
        if (i > 0) { strides[i - 1] = d[i].bytes; }
    }
    CUtensorMap map;
    const CUresult result =
        encode(&map, kFp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank,
               (void*)tensor, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               d[0].box == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        die("tensor map of %zu x %zu x %zu x %zu at %p refused (CUDA error %d)", d[0].size, d[1].size,
            d[2].size, d[3].size, tensor, (int)result);
    }
    return map;
}

// A (B,T,slots,width) tensor in boxes of box_rows rows of box_slots slots, by coordinates {0, t, slot, b}.
// Slots are heads, NH + 2*NKV of qkv, NH of dout, of any width: boxes are 64 wide, with zeros behind the last
// column. Or they are blocks of columns of a matrix (1,rows,columns), 64 wide, or 32 for 64 FP8 bytes. (FP32
// builds never call it.)
static inline CUtensorMap tensor_map(const void* tensor, int B, int T, int slots, int box_rows = 64,
                                     int box_slots = 1, int width = 64) {
    const size_t slot = width * sizeof(floatX), row = slots * slot;
    return encode_map<4>(tensor, {{(size_t)width, 2, width == 32 ? 32 : 64}, {(size_t)T, row, box_rows},
                                  {(size_t)slots, slot, box_slots}, {(size_t)B, row * T, 1}});
}
