/*
Device helpers: what the kernels of train_gpt2.cu have in common. Vectors of floatX and the one pair of
functions that owns the bounds check, sums in a fixed order, rounding, gradients in fp32 or bf16, and one
function per instruction of the tensor cores and copy engines. No kernel. The includer has defined floatX.

    Floats x = load_floats(row, c, C);                  // elements [c, c + kWidth) of a row of C, as fp32
    store(out, c, C, to_pack<floatX>(x));               // rounded to nearest
    float total = block_sum(x.at[0], shared);           // the same bits every time
*/
#pragma once

#include <cuda.h>               // gives: CUtensorMap
#include <cuda_bf16.h>          // gives: __nv_bfloat16: --grad-dtype bf16 exists in every build
#include <cuda_fp16.h>          // gives: half
#include <cuda_fp8.h>           // gives: __nv_fp8_e4m3, which converts to float
#include <stdint.h>             // gives: uint32_t
#include <string.h>             // gives: memcpy

#include <type_traits>          // gives: std::is_same, std::conditional_t

#include "fp8.h"                // gives: Fp8Format, Fp8Stats
#include "op_types.h"           // gives: Accumulate, Grad
#include "../rand.h"            // gives: RoundKey, round_block, bf16_encode_dithered

constexpr int kWarp = 32;
constexpr float kLog2e = 1.4426950408889634f;

// Kernels walk rows in vectors of kWidth elements: 16 bytes of floatX, which are 8 elements, or 4 in the FP32
// build. A Pack is such a vector of any element type: Pack<float> in a 16-bit build has 32 bytes.
constexpr int kWidth = 16 / (int)sizeof(floatX);
template <class T> struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Pack {
    static constexpr int size = kWidth;
    T data[kWidth];
};
typedef Pack<floatX> x128;
static_assert(sizeof(x128) == 16, "one x128 is one 16-byte access");
struct Floats { float at[kWidth]; };                    // a Pack in arithmetic

// What a load or a store moves at once of a Pack.
template <class T> using PackWord = std::conditional_t<
    sizeof(Pack<T>) == 4, uint32_t, std::conditional_t<sizeof(Pack<T>) == 8, uint2, uint4>>;

// The one pair of functions that owns the bounds check: elements [i, i + kWidth) of a row or array of n
// elements. Vectors beyond n read as zero and are not written. n and i are multiples of kWidth, and p is
// aligned to 16 bytes (all tensors are: kAlign).
template <class T, class Index> __device__ __forceinline__ Pack<T> load(const T* p, Index i, Index n) {
    typedef PackWord<T> Word;
    Pack<T> pack;
    for (int w = 0; w < (int)(sizeof(pack) / sizeof(Word)); w++) {
        Word word = {};
        if (i < n) { word = ((const Word*)(p + i))[w]; }
        memcpy((char*)&pack + sizeof(Word) * w, &word, sizeof(Word));
    }
    return pack;
}
template <class T, class Index>
__device__ __forceinline__ void store(T* p, Index i, Index n, const Pack<T>& pack) {
    typedef PackWord<T> Word;
    for (int w = 0; w < (int)(sizeof(pack) / sizeof(Word)); w++) {
        Word word;
        memcpy(&word, (const char*)&pack + sizeof(Word) * w, sizeof(Word));
        if (i < n) { ((Word*)(p + i))[w] = word; }
    }
}

// Kernels keep a row in registers as words and read them through this. In an array of 16-bit values each
// element would take a register of its own.
__device__ __forceinline__ x128 as_pack(uint4 word) {
    x128 pack;
    memcpy(&pack, &word, sizeof(pack));
    return pack;
}
// Makes the compiler read these words anew. It would otherwise keep the floats that an earlier phase made of
// them, in twice the registers.
template <int kRows, int kVectors>
__device__ __forceinline__ void keep_packed(uint4 (&words)[kRows][kVectors]) {
#pragma unroll
    for (int i = 0; i < kRows * kVectors; i++) {
        uint4& word = words[i / kVectors][i % kVectors];
        asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
    }
}
// bf16 is the upper half of a float, so a shift or a mask of the word converts it. The compiler on its own
// extracts the element first.
template <class T> __device__ __forceinline__ Floats to_floats(const Pack<T>& pack) {
    Floats f;
    if constexpr (std::is_same<T, __nv_bfloat16>::value) {
        uint32_t words[kWidth / 2];
        memcpy(words, &pack, sizeof(pack));
        for (int k = 0; k < kWidth; k++) {
            const uint32_t word = words[k / 2];
            f.at[k] = __uint_as_float(k % 2 == 0 ? word << 16 : word & 0xffff0000u);
        }
    } else {
        for (int k = 0; k < kWidth; k++) { f.at[k] = (float)pack.data[k]; }
    }
    return f;
}
// Rounds to nearest. 16-bit values go in pairs: the instruction for one value has a quarter of the rate, and
// its results would still have to be combined.
template <class T> __device__ __forceinline__ Pack<T> to_pack(const Floats& f) {
    Pack<T> pack;
    if constexpr (sizeof(T) == 2) {
        uint32_t words[kWidth / 2];
#pragma unroll
        for (int k = 0; k < kWidth; k += 2) {
            if constexpr (std::is_same<T, __nv_bfloat16>::value) {
                const __nv_bfloat162 pair = __floats2bfloat162_rn(f.at[k], f.at[k + 1]);
                memcpy(&words[k / 2], &pair, 4);
            } else {
                const half2 pair = __floats2half2_rn(f.at[k], f.at[k + 1]);
                memcpy(&words[k / 2], &pair, 4);
            }
        }
        memcpy(&pack, words, sizeof(pack));
    } else {
        for (int k = 0; k < kWidth; k++) { pack.data[k] = (T)f.at[k]; }
    }
    return pack;
}
template <class T, class Index> __device__ __forceinline__ Floats load_floats(const T* p, Index i, Index n) {
    return to_floats(load(p, i, n));
}

// x / n, rounded like the division; inverse is 1.0f / n. The remainder corrects the product. A division would
// compute the inverse each time, and it has a slow path for zeros and subnormals.
__device__ __forceinline__ float divide(float x, float n, float inverse) {
    const float quotient = x * inverse;
    return fmaf(fmaf(-quotient, n, x), inverse, quotient);
}

// ---- sums in a fixed order ----
template <class T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) { x += __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
    return x;
}
template <class T> __device__ __forceinline__ T warp_max(T x) {
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) { x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, mask)); }
    return x;
}

// kCount sums at once: each step halves the values a lane carries, so 8 sums take 9 shuffles instead of 40.
// The lane returns the sum of value number lane / (32 / kCount). kApart neighbouring lanes have sums of their
// own, each of every kApart-th lane.
template <int kApart = 1, int kCount> __device__ __forceinline__ float warp_sums(float (&x)[kCount]) {
    static_assert(kCount >= 1 && kCount * kApart <= kWarp && (kCount & (kCount - 1)) == 0,
                  "halved until one value is left");
    const int lane = threadIdx.x % kWarp;
    int mask = kWarp / 2;
#pragma unroll
    for (int count = kCount / 2; count > 0; count /= 2, mask /= 2) {
        const bool upper = (lane & mask) != 0;
#pragma unroll
        for (int i = 0; i < count; i++) {
            float mine = upper ? x[i + count] : x[i];
            float other = upper ? x[i] : x[i + count];
            x[i] = mine + __shfl_xor_sync(0xFFFFFFFFu, other, mask);
        }
    }
#pragma unroll
    for (; mask >= kApart; mask /= 2) { x[0] += __shfl_xor_sync(0xFFFFFFFFu, x[0], mask); }
    return x[0];
}

// Over a one-dimensional block of whole warps: the sum, or the largest of numbers that are 0 or more. Every
// thread gets the result. `shared` has an element for each warp.
template <bool kMax, class T> __device__ __forceinline__ T block_combine(T x, T* shared /*(32)*/) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    x = kMax ? warp_max(x) : warp_sum(x);
    if (lane == 0) { shared[warp] = x; }
    __syncthreads();
    x = lane < (int)blockDim.x / kWarp ? shared[lane] : (T)0;
    x = kMax ? warp_max(x) : warp_sum(x);
    __syncthreads();            // the next call may write `shared`
    return x;
}
template <class T> __device__ __forceinline__ T block_sum(T x, T* shared) {
    return block_combine<false>(x, shared);
}
template <class T> __device__ __forceinline__ T block_max(T x, T* shared) {
    return block_combine<true>(x, shared);
}

// ---- maths ----
__device__ __forceinline__ float exp2_fast(float x) {       // 2 ulp (PTX ex2.approx); exp2(-inf) = 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {     // 1 ulp (PTX rcp.approx.ftz)
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float max_nan(float x, float y) {    // NaN if either is (PTX max.NaN)
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
    return most;
}

__device__ inline double power(double x, long long n) {     // x^n by squaring: the same bits on every GPU
    double result = 1.0;
    for (; n > 0; n /= 2, x *= x) {
        if (n % 2 == 1) { result *= x; }
    }
    return result;
}

// ---- stochastic rounding: E[result] = x ----
__device__ __forceinline__ void store_stochastic(__nv_bfloat16* p, float x, uint32_t bits16) {
    *(uint16_t*)p = bf16_round_stochastic(x, bits16);
}
__device__ __forceinline__ void store_stochastic(float* p, float x, uint32_t) { *p = x; }
#ifdef ENABLE_FP16
// Between the two neighbours of x: the one towards zero, and the next away from it with probability (distance
// from the first) / gap. Beyond the largest half (65504) there is no next one.
__device__ __forceinline__ void store_stochastic(half* p, float x, uint32_t bits16) {
    half low = __float2half_rz(x);
    half high = __ushort_as_half((unsigned short)(__half_as_ushort(low) + 1));
    float part = (x - __half2float(low)) / (__half2float(high) - __half2float(low));
    *p = part * 65536.0f > (float)bits16 ? high : low;      // NaN and inf: the comparison is false, low is x
}
#endif

// The random bits of elements [first, first + kWidth), 16 each. One call of the generator gives the bits of
// eight elements; kWidth is 8 or 4, and `first` a multiple of it, so one call is enough.
struct Draws { uint32_t at[kWidth]; };
__device__ __forceinline__ Draws round_draws(const RoundKey& key, size_t first) {
    const Rand4 random = round_block(key, first / 8);
    Draws draws;
    for (int k = 0; k < kWidth; k++) { draws.at[k] = rand_bits16(random, (int)(first % 8) + k); }
    return draws;
}

// ---- gradients: every load of bf16 gradients and every store to a Grad is one of these ----
// bf16 gradients are dithered (rand.h): to read one takes the key that it was stored with, and to add to one
// means to read what the micro-step before stored.
__device__ __forceinline__ RoundKey previous_micro_step(RoundKey key) {
    key.micro--;
    return key;
}

// Elements [i, i + kWidth) of n. `key` is that of the micro-step that stored them, `first` the position of
// element 0 in the whole gradient.
__device__ __forceinline__ Floats load_dithered(const __nv_bfloat16* p, size_t i, size_t n,
                                                const RoundKey& key, size_t first) {
    const Pack<__nv_bfloat16> pack = load(p, i, n);
    const Draws draws = round_draws(key, first + i);
    Floats f;
    for (int k = 0; k < kWidth; k++) {
        f.at[k] = bf16_decode_dithered(__bfloat16_as_ushort(pack.data[k]), draws.at[k]);
    }
    return f;
}

__device__ __forceinline__ void grad_store(const Grad& grad, size_t i, float value) {
    if (grad.is_bf16) {
        uint16_t* p = (uint16_t*)grad.data + i;
        const size_t position = grad.first + i;
        if (grad.acc == Accumulate::Yes) {
            value += bf16_decode_dithered(*p, round_bits16(previous_micro_step(grad.key), position));
        }
        *p = bf16_encode_dithered(value, round_bits16(grad.key, position));
    } else {
        float* p = (float*)grad.data + i;
        *p = grad.acc == Accumulate::Yes ? *p + value : value;
    }
}

// Elements [i, i + kWidth), as far as they lie below `end`. grad.first is a multiple of kWidth, too.
__device__ __forceinline__ void grad_store(const Grad& grad, size_t i, size_t end, Floats value) {
    const bool add = grad.acc == Accumulate::Yes;
    if (grad.is_bf16) {
        __nv_bfloat16* p = (__nv_bfloat16*)grad.data;
        Floats old = {};
        if (add) { old = load_dithered(p, i, end, previous_micro_step(grad.key), grad.first); }
        const Draws draws = round_draws(grad.key, grad.first + i);
        Pack<__nv_bfloat16> pack;
        for (int k = 0; k < kWidth; k++) {
            pack.data[k] = __ushort_as_bfloat16(bf16_encode_dithered(old.at[k] + value.at[k], draws.at[k]));
        }
        store(p, i, end, pack);
    } else {
        float* p = (float*)grad.data;
        if (add) {
            Floats old = load_floats(p, i, end);
            for (int k = 0; k < kWidth; k++) { value.at[k] += old.at[k]; }
        }
        store(p, i, end, to_pack<float>(value));
    }
}

// ---- one function per instruction: shared memory, copies, mma.sync (sm_80 and later) ----
// The PTX name of floatX where it is an operand of tensor cores. (FP32 builds compile but never call these.)
#ifdef ENABLE_FP16
#define MMA_TYPE "f16"
#else
#define MMA_TYPE "bf16"
#endif

// The 32-bit address that instructions on shared memory take.
__device__ __forceinline__ uint32_t smem_address(const void* shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}

// Starts a copy of 16 bytes that bypasses the registers (PTX cp.async).
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(shared)), "l"(global)
                 : "memory");
}
// The same, or 16 bytes of zeros if not live: the instruction reads the first `bytes` and fills the rest.
__device__ __forceinline__ void cp_async_16_or_zero(void* shared, const void* global, bool live) {
    const int bytes = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(shared)), "l"(global),
                 "r"(bytes)
                 : "memory");
}
// commit closes the thread's group of copies. wait returns when at most the last kPending groups are pending.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements, one into each r[i]; lane 8 i + j gives the address of row j of matrix
// i. Lane l receives elements 2 (l % 4) and the next of row l / 4; with _trans, of column l / 4.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// How many values an mma sums: 16 of 16 bits, or 8 of fp32 (TF32). Either is 32 bytes of a row, so ldmatrix,
// which moves rows of 16 bytes, fetches the operands of both.
constexpr int kMmaK = 32 / (int)sizeof(floatX);

// d (16,8) += A (16,kMmaK) B (kMmaK,8). PTX ISA, "Matrix Fragments for mma.m16n8k16" and "... mma.m16n8k8":
// with g = lane / 4 and c = 2 * (lane % 4), d is (g,c) (g,c+1) (g+8,c) (g+8,c+1).
__device__ __forceinline__ void mma_16x8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef ENABLE_FP32
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3}, "
#endif
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds fp32 to TF32, 10 bits of mantissa, which is what tensor cores read of it.
__device__ __forceinline__ uint32_t to_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}
// Makes operands from ldmatrix ready for mma: fp32 is rounded, 16-bit types stay as they are.
__device__ __forceinline__ void round_operands(uint32_t (&r)[4]) {
    if constexpr (sizeof(floatX) == 4) {
        for (int i = 0; i < 4; i++) { r[i] = to_tf32(__uint_as_float(r[i])); }
    }
}

// Two values, rounded to floatX, in one register: `low` in the lower half.
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
    uint32_t bits;
    asm("cvt.rn." MMA_TYPE "x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// The two values of such a register.
__device__ __forceinline__ float2 unpack_pair(uint32_t pair) {
    if constexpr (std::is_same<floatX, __nv_bfloat16>::value) {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    } else {
        floatX two[2];
        memcpy(two, &pair, sizeof(pair));
        return make_float2((float)two[0], (float)two[1]);
    }
}

// Rounds to FP8 (PTX cvt, sm_89 and later): as fp8_encode.
template <Fp8Format kFormat> __device__ __forceinline__ Pack<uint8_t> to_fp8(const Floats& f) {
    Pack<uint8_t> pack;
    uint32_t quads[kWidth / 4] = {};
#if __CUDA_ARCH__ >= 890
#define FP8_QUAD(format)                                                                                  \
    asm("{.reg .b16 low, high;\n"                                                                         \
        "cvt.rn.satfinite." format "x2.f32 low, %2, %1;\n"                                                \
        "cvt.rn.satfinite." format "x2.f32 high, %4, %3;\n"                                               \
        "mov.b32 %0, {low, high};}" : "=r"(quads[q]) : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]))
    for (int q = 0; q < kWidth / 4; q++) {
        const float* x = f.at + 4 * q;
        if (kFormat == Fp8Format::E4m3) { FP8_QUAD("e4m3"); }
        else { FP8_QUAD("e5m2"); }
    }
#undef FP8_QUAD
#endif
    memcpy(&pack, quads, sizeof(pack));
    return pack;
}

// Adds up bytes of e4m3 by tensor cores: each lane gives four of row lane / 4 and four of the row 8 below it,
// and has these rows' sums in d[0] and d[2]. Half holds every number of e4m3 (PTX mma.m16n8k16).
__device__ __forceinline__ void add_e4m3_rows(float (&d)[4], uint32_t row, uint32_t row_8) {
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 w, x, y, z;\n"
        ".reg .b32 a, b, c, d;\n"
        "mov.b32 {w, x}, %4;\n"
        "mov.b32 {y, z}, %5;\n"
        "cvt.rn.f16x2.e4m3x2 a, w;\n"
        "cvt.rn.f16x2.e4m3x2 b, y;\n"
        "cvt.rn.f16x2.e4m3x2 c, x;\n"
        "cvt.rn.f16x2.e4m3x2 d, z;\n"
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {a, b, c, d}, {%6, %6}, "
        "{%0, %1, %2, %3};}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(row), "r"(row_8), "r"(0x3C003C00));     // ones
#endif
}

// Rounds a tensor to e4m3 and counts for its Fp8Stats: each thread its own elements, then a warp for all.
struct Fp8Counts {
    float amax = 0.0f;                  // NaN if there was one, which is larger than all else
    uint32_t saturated = 0;
    // A few vectors at once, as the rare branch cuts the code: x becomes x times scale.
    template <int kCount>
    __device__ __forceinline__ void round(Pack<uint8_t> (&out)[kCount], Floats (&x)[kCount], float scale) {
        float most = 0.0f;
#pragma unroll
        for (int r = 0; r < kCount; r++) {
            for (int k = 0; k < kWidth; k++) {
                most = max_nan(most, fabsf(x[r].at[k]));
                x[r].at[k] *= scale;
            }
            out[r] = to_fp8<Fp8Format::E4m3>(x[r]);
        }
        amax = max_nan(amax, most);
        if (most * scale <= kFp8Max) { return; }
        for (int r = 0; r < kCount; r++) {                      // rare
            for (int k = 0; k < kWidth; k++) { saturated += fabsf(x[r].at[k]) > kFp8Max; }
        }
    }
    __device__ __forceinline__ Pack<uint8_t> round(const Floats& x, float scale) {
        Pack<uint8_t> out[1];
        Floats in[1] = {x};
        round(out, in, scale);
        return out[0];
    }
    __device__ __forceinline__ uint2 of_warp() const {          // bits of the largest |x|, saturated
        return make_uint2(__reduce_max_sync(~0u, __float_as_uint(amax)), __reduce_add_sync(~0u, saturated));
    }
};
// Few threads have a larger amax than those before. To look first spares the others an atomic; whoever looks
// early does not wait for the answer.
__device__ __forceinline__ uint32_t fp8_amax_so_far(const Fp8Stats* stats) {
    return *(const volatile uint32_t*)&stats->amax;
}
__device__ __forceinline__ void fp8_count(Fp8Stats* stats, uint32_t so_far, uint32_t amax,
                                          uint32_t saturated) {
    if (amax > so_far) { atomicMax(&stats->amax, amax); }
    if (saturated > 0) { atomicAdd((unsigned long long*)&stats->saturated, saturated); }
}

__device__ __forceinline__ void prefetch_l2(const void* p) {            // a line of 128 bytes
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Programmatic dependent launch (PTX griddepcontrol): lets the stream's next kernel begin before this one
// ends; waits until the one before has ended and its writes are visible. Nothing before Hopper.
__device__ __forceinline__ void next_kernel_may_begin() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_last_kernel() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- one function per instruction, Hopper: mbarrier, clusters, bulk and tensor copies (TMA), wgmma ----
// Only what is inside of __CUDA_ARCH_FEAT_SM90_ALL may call them.

// A barrier in shared memory counts arrivals and bytes. When all that it expects have come, its phase ends
// and the next begins. fence_init makes new barriers visible to the copy engine. expect arrives once and
// announces `bytes` to come. wait returns when the phase of this parity has ended. The n-th phase has parity
// n % 2; on a new barrier a wait for parity 1 returns at once.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(smem_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}
// Arrives at the barrier which block `rank` of the cluster has at this address. (With .release.cluster the
// warp would first wait until all its stores are visible to the GPU.)
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, int rank) {
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(
                     smem_address(barrier)),
                 "r"(rank)
                 : "memory");
}
// Of all threads of a cluster; of `threads` of a block, whole warps (number 0 is __syncthreads).
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
__device__ __forceinline__ void named_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// A warpgroup gives registers back, and others take them: kCount a thread from now on, a multiple of 8.
template <int kCount> __device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount> __device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// The ways back of ldmatrix_x4 and of ldmatrix_x4_trans.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Starts the copy of the map's box at coordinates (c0, c1, c2, c3), innermost first. Elements outside of the
// tensor arrive as zeros, and their bytes count. One thread calls it; the bytes arrive at `barrier`.
__device__ __forceinline__ void tma_load_4d(void* shared, const CUtensorMap* map, uint64_t* barrier, int c0,
                                            int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(smem_address(shared)),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(smem_address(barrier))
        : "memory");
}
// The same into all `blocks` (a bit each) of the cluster, at the addresses that this block gives.
__device__ __forceinline__ void tma_load_4d_multicast(void* shared, const CUtensorMap* map, uint64_t* barrier,
                                                      int c0, int c1, int c2, int c3, int blocks) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(smem_address(shared)),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(smem_address(barrier)), "h"((uint16_t)blocks)
        : "memory");
}
__device__ __forceinline__ void tma_load_5d_multicast(void* shared, const CUtensorMap* map, uint64_t* barrier,
                                                      int c0, int c1, int c2, int c3, int c4, int blocks) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(smem_address(shared)),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(smem_address(barrier)),
        "h"((uint16_t)blocks)
        : "memory");
}
// The way back. Elements outside of the tensor are not written. fence makes what this thread has written to
// shared memory visible to the copy engine. commit closes the thread's group of copies. wait returns when at
// most the last kPending groups have still to read shared memory.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, const void* shared, int c0, int c1,
                                             int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
                     map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(smem_address(shared))
                 : "memory");
}
__device__ __forceinline__ void tma_store_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kPending> __device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Starts the copy of `bytes` contiguous bytes, a multiple of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint64_t* barrier, int bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            smem_address(shared)),
        "l"(global), "r"(bytes), "r"(smem_address(barrier))
        : "memory");
}

// wgmma is asynchronous. fence makes the threads' writes to registers (accumulators, A operand) visible to
// it. commit closes a group of products. wait returns when at most the last kPending groups are under way.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Until the wait wgmma writes its accumulators and reads its A operand, which the compiler does not know. It
// moves no use of these registers across this function, and gives none of them away before it.
template <int kRows> __device__ __forceinline__ void pin_registers(float (&d)[kRows][4]) {
#pragma unroll
    for (int n = 0; n < kRows; n++) {
        for (int i = 0; i < 4; i++) { asm volatile("" : "+f"(d[n][i])::"memory"); }
    }
}
template <int kRows> __device__ __forceinline__ void pin_registers(uint32_t (&a)[kRows][4]) {
#pragma unroll
    for (int k = 0; k < kRows; k++) {
        for (int i = 0; i < 4; i++) { asm volatile("" : "+r"(a[k][i])::"memory"); }
    }
}

// Descriptor of a tile with rows of 64 16-bit elements in the 128-byte swizzle (PTX ISA, "Matrix Descriptor
// Format"), in units of 16 bytes: its address; in bits 16 to 29 how far apart its blocks of 64 columns are,
// read only of a transposed operand that has several; 64, as groups of 8 rows are 1024 bytes apart; and in
// bits 62 and 63 the swizzle's number, 1.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* tile, int block_bytes = 16) {
    return (uint64_t)((smem_address(tile) & 0x3ffff) >> 4) | ((uint64_t)(block_bytes / 16) << 16) |
           (64ull << 32) | (1ull << 62);
}

#define WGMMA_REGS                                                           \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_OPS_4(IO, d, n) IO(d[n][0]), IO(d[n][1]), IO(d[n][2]), IO(d[n][3])
#define WGMMA_OPS(IO, d, n)                                                                           \
    WGMMA_OPS_4(IO, d, n), WGMMA_OPS_4(IO, d, n + 1), WGMMA_OPS_4(IO, d, n + 2),                      \
        WGMMA_OPS_4(IO, d, n + 3), WGMMA_OPS_4(IO, d, n + 4), WGMMA_OPS_4(IO, d, n + 5),              \
        WGMMA_OPS_4(IO, d, n + 6), WGMMA_OPS_4(IO, d, n + 7)

#define WGMMA_REGS_128                                                                             \
    WGMMA_REGS ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "      \
    "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_OPS_128(IO, d) WGMMA_OPS(IO, d, 0), WGMMA_OPS(IO, d, 8)

// d (64,n) = or += A (64,16) B (n,16)^T, both in shared memory, n = 64 or 128. The first step of a product
// stores ("=f"), the later ones add ("+f"): a "+f" on registers that hold nothing yet would make the compiler
// set them first, and ptxas then serialises the wgmma pipeline (warning C7515).
// Constants end the instruction: add to d; the signs of A and B; whether A (if in shared memory) and B are
// transposed, with k as the slower index.
#define WGMMA_SHAPE(N, REGS) \
    "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." MMA_TYPE "." MMA_TYPE " {" REGS "}, "
#define WGMMA_64 WGMMA_SHAPE("64", WGMMA_REGS)
#define WGMMA_128 WGMMA_SHAPE("128", WGMMA_REGS_128)
template <bool kAdd> __device__ __forceinline__ void wgmma_shared(float (&d)[8][4], uint64_t a, uint64_t b) {
    if constexpr (kAdd) {
        asm volatile(WGMMA_64 "%32, %33, 1, 1, 1, 0, 0;" : WGMMA_OPS("+f", d, 0) : "l"(a), "l"(b));
    } else {
        asm volatile(WGMMA_64 "%32, %33, 0, 1, 1, 0, 0;" : WGMMA_OPS("=f", d, 0) : "l"(a), "l"(b));
    }
}
template <bool kAdd> __device__ __forceinline__ void wgmma_shared(float (&d)[16][4], uint64_t a, uint64_t b) {
    if constexpr (kAdd) {
        asm volatile(WGMMA_128 "%64, %65, 1, 1, 1, 0, 0;" : WGMMA_OPS_128("+f", d) : "l"(a), "l"(b));
    } else {
        asm volatile(WGMMA_128 "%64, %65, 0, 1, 1, 0, 0;" : WGMMA_OPS_128("=f", d) : "l"(a), "l"(b));
    }
}

// d (64,256) = or += A (64,16) B (16,256), both in shared memory. kTransB: B lies with k as the slower index.
// adds: +=. It has to be a constant where d holds nothing yet, as when nvcc peels off a loop's first step:
// then no registers are set (C7515 above).
#define WGMMA_REGS_256                                                                             \
    WGMMA_REGS_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, "  \
    "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "    \
    "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "       \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_OPS_256(IO, d) \
    WGMMA_OPS(IO, d, 0), WGMMA_OPS(IO, d, 8), WGMMA_OPS(IO, d, 16), WGMMA_OPS(IO, d, 24)
template <bool kTransB>
__device__ __forceinline__ void wgmma_shared_256(float (&d)[32][4], uint64_t a, uint64_t b, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %130, 0; "
                 WGMMA_SHAPE("256", WGMMA_REGS_256) "%128, %129, adds, 1, 1, 0, %131;}"
                 : WGMMA_OPS_256("+f", d)
                 : "l"(a), "l"(b), "r"((int)adds), "n"((int)kTransB));
}

// d (64,256) = or += A (64,32) B (256,32)^T of e4m3, both in shared memory; adds: as above.
__device__ __forceinline__ void wgmma_e4m3_256(float (&d)[32][4], uint64_t a, uint64_t b, bool adds) {
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %130, 0; "
                 "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" WGMMA_REGS_256
                 "}, %128, %129, adds, 1, 1;}"
                 : WGMMA_OPS_256("+f", d)
                 : "l"(a), "l"(b), "r"((int)adds));
}

// d (64,n) += A (64,16) B (16,n), A in registers, B in shared memory, n = 64 or 128.
__device__ __forceinline__ void wgmma_registers(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(WGMMA_64 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : WGMMA_OPS("+f", d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_registers(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(WGMMA_128 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : WGMMA_OPS_128("+f", d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
