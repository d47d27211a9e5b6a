// Definitions that CUDA C++ provides, for a host compiler. compile_kernel.py prepends this file to every kernel.
// The threads of a block run one after the other. In a kernel with barriers, each thread is a separate fiber.
#pragma once
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <tuple>
#include <type_traits>
#include <ucontext.h>
#include <utility>

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
using std::signbit;

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __restrict__

struct gpu_dim3 {
    unsigned x, y, z;
};
static gpu_dim3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;
static char *gpu_shared;

// ---- fibers ----
static ucontext_t gpu_scheduler, *gpu_fibers;
static unsigned gpu_now;
static bool *gpu_finished;
static std::function<void()> *gpu_kernel;

static void __syncthreads() { swapcontext(&gpu_fibers[gpu_now], &gpu_scheduler); }
static void __syncwarp(unsigned = 0) { __syncthreads(); }

static void gpu_fiber() {
    (*gpu_kernel)();
    gpu_finished[gpu_now] = true;
    swapcontext(&gpu_fibers[gpu_now], &gpu_scheduler);
}

static void gpu_set_thread(unsigned t) {
    threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
}

static void gpu_run_fibers(unsigned threads, char *stacks, size_t stack) {
    for (unsigned t = 0; t < threads; t++) {
        gpu_finished[t] = false;
        getcontext(&gpu_fibers[t]);
        gpu_fibers[t].uc_stack.ss_sp = stacks + t * stack;
        gpu_fibers[t].uc_stack.ss_size = stack;
        gpu_fibers[t].uc_link = nullptr;
        makecontext(&gpu_fibers[t], gpu_fiber, 0);
    }
    for (bool any = true; any;) {
        any = false;
        for (unsigned t = 0; t < threads; t++) {
            if (gpu_finished[t]) continue;
            any = true;
            gpu_now = t;
            gpu_set_thread(t);
            swapcontext(&gpu_scheduler, &gpu_fibers[t]);
        }
    }
}

extern "C" void gpu_run(void *bound, const unsigned *sizes, size_t shared, int with_barriers) {
    const size_t stack = 65536;
    gpu_kernel = static_cast<std::function<void()> *>(bound);
    gridDim = {sizes[0], sizes[1], sizes[2]};
    blockDim = {sizes[3], sizes[4], sizes[5]};
    unsigned threads = sizes[3] * sizes[4] * sizes[5];
    gpu_shared = static_cast<char *>(calloc(1, shared + 64));
    char *stacks = with_barriers ? static_cast<char *>(malloc(threads * stack)) : nullptr;
    if (with_barriers) {
        gpu_fibers = new ucontext_t[threads];
        gpu_finished = new bool[threads];
    }
    for (unsigned z = 0; z < sizes[2]; z++)
        for (unsigned y = 0; y < sizes[1]; y++)
            for (unsigned x = 0; x < sizes[0]; x++) {
                blockIdx = {x, y, z};
                if (with_barriers) {
                    gpu_run_fibers(threads, stacks, stack);
                    continue;
                }
                for (unsigned t = 0; t < threads; t++) {
                    gpu_set_thread(t);
                    (*gpu_kernel)();
                }
            }
    free(gpu_shared);
    free(stacks);
    if (with_barriers) {
        delete[] gpu_fibers;
        delete[] gpu_finished;
    }
}

extern "C" void gpu_drop(void *bound) { delete static_cast<std::function<void()> *>(bound); }

// ---- a kernel with its arguments, copied when it is launched ----
template <class... A, size_t... I>
static void *gpu_bind_each(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    std::tuple<std::decay_t<A>...> copied{*static_cast<std::decay_t<A> *>(arguments[I])...};
    return new std::function<void()>([kernel, copied]() mutable { std::apply(kernel, copied); });
}
template <class... A>
static void *gpu_bind(void (*kernel)(A...), void **arguments) {
    return gpu_bind_each(kernel, arguments, std::index_sequence_for<A...>{});
}

// ---- intrinsics ----
template <class T>
static inline T __ldg(const T *p) {
    return *p;
}
template <class To, class From>
static inline To gpu_bits(From value) {
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
static inline int __float_as_int(float x) { return gpu_bits<int>(x); }
static inline float __int_as_float(int x) { return gpu_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return gpu_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return gpu_bits<double>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline void __threadfence() {}

template <class T, class F>
static inline T gpu_atomic(T *place, F change) {
    T old = *place;
    *place = change(old);
    return old;
}
#define GPU_ATOMICS(T)                                                                                       \
    static inline T atomicCAS(T *p, T expected, T value) {                                                    \
        return gpu_atomic(p, [=](T old) { return old == expected ? value : old; });                          \
    }                                                                                                         \
    static inline T atomicAdd(T *p, T value) { return gpu_atomic(p, [=](T old) { return (T)(old + value); }); } \
    static inline T atomicMax(T *p, T value) { return gpu_atomic(p, [=](T old) { return max(old, value); }); } \
    static inline T atomicMin(T *p, T value) { return gpu_atomic(p, [=](T old) { return min(old, value); }); } \
    static inline T atomicExch(T *p, T value) { return gpu_atomic(p, [=](T) { return value; }); }            \
    static inline T atomicOr(T *p, T value) { return gpu_atomic(p, [=](T old) { return old | value; }); }    \
    static inline T atomicAnd(T *p, T value) { return gpu_atomic(p, [=](T old) { return old & value; }); }   \
    static inline T atomicXor(T *p, T value) { return gpu_atomic(p, [=](T old) { return old ^ value; }); }
GPU_ATOMICS(int)
GPU_ATOMICS(unsigned)
GPU_ATOMICS(unsigned long long)
static inline float atomicAdd(float *p, float value) { return gpu_atomic(p, [=](float old) { return old + value; }); }
static inline double atomicAdd(double *p, double value) { return gpu_atomic(p, [=](double old) { return old + value; }); }
