// Runs a CUDA kernel on a CPU: enough of the language to execute paged_kv's .cu files with g++.
//
//   g++ -x c++ -include cuda_on_cpu.h -I <CUDA headers> kernel.cu     conversions come from NVIDIA's own headers
//
// Each CUDA thread is a fiber with its own stack. One OS thread runs them all, the blocks of a grid one after
// another, so a __shared__ variable is simply a static one. A fiber runs until it waits: for its warp (shuffle,
// __syncwarp) or for its block (__syncthreads).
//
// The order is chosen to expose mistakes, not to be fair: one warp runs as far ahead as it can before the next
// one starts, in an order that the seed shuffles. A reader that needs a barrier then finds the value of another
// moment. A barrier that some threads cannot reach, and a shuffle that reads an exited lane, are errors.
//
// What this does not show: races that no schedule of whole warps exposes, the memory model, streams, cp.async,
// tensor cores, inline PTX, fast-math rounding. One launch at a time per process (the Python side holds a lock).
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <ucontext.h>
#include <vector_types.h>

#include <cstring>
#include <type_traits>
#include <utility>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

// Set whenever a fiber is resumed.
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

namespace cuda_on_cpu {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr unsigned WARP_LANES = 32;
constexpr unsigned MAX_THREADS = 1024;  // of a block: CUDA's own limit
constexpr unsigned MAX_WARPS = MAX_THREADS / WARP_LANES;

enum class Waiting { NOT, FOR_WARP, FOR_BLOCK };

struct Fiber {
    ucontext_t first_entry;  // used once; afterwards setjmp/longjmp, which need no system call
    jmp_buf resume_point;
    bool is_started, is_done;
    Waiting waiting;
    uint3 index;
    unsigned number, num_shuffles;
};

// Two slots per lane: a lane that has read shuffle n may write n + 1 while a slower one still reads n.
struct Exchange {
    unsigned char bytes[2][WARP_LANES][16];
    unsigned shuffle[2][WARP_LANES];
};

struct Machine {
    Fiber fibers[MAX_THREADS];
    alignas(64) char stacks[MAX_THREADS][STACK_BYTES];  // pages that no fiber touches take no memory
    unsigned num_threads;
    Exchange exchange[MAX_WARPS];
    jmp_buf scheduler;
    Fiber* current;
    void (*kernel_entry)(void*);
    void* kernel_arguments;
    unsigned random_state;
    char error[160];
};
static Machine machine;

static void fail(const char* what) {
    if (!machine.error[0]) {
        snprintf(machine.error, sizeof machine.error, "%s (block %u,%u,%u)", what, blockIdx.x,
                 blockIdx.y, blockIdx.z);
    }
}

static unsigned random_below(unsigned limit) {
    machine.random_state = machine.random_state * 1664525u + 1013904223u;
    return (machine.random_state >> 8) % limit;
}

// ---- fibers -----------------------------------------------------------------------------------------------------

static void wait_for(Waiting reason) {
    Fiber* fiber = machine.current;
    fiber->waiting = reason;
    if (!_setjmp(fiber->resume_point)) _longjmp(machine.scheduler, 1);
}

static void fiber_main() {
    machine.kernel_entry(machine.kernel_arguments);
    machine.current->is_done = true;
    _longjmp(machine.scheduler, 1);
}

// Run a fiber until it waits or ends. No local lives across the jump.
__attribute__((noinline)) static void run_fiber(Fiber* fiber) {
    machine.current = fiber;
    threadIdx = fiber->index;
    if (_setjmp(machine.scheduler)) return;
    if (fiber->is_started) _longjmp(fiber->resume_point, 1);
    fiber->is_started = true;
    getcontext(&fiber->first_entry);
    fiber->first_entry.uc_stack.ss_sp = machine.stacks[fiber->number];
    fiber->first_entry.uc_stack.ss_size = STACK_BYTES;
    fiber->first_entry.uc_link = nullptr;
    makecontext(&fiber->first_entry, fiber_main, 0);
    setcontext(&fiber->first_entry);
}

// ---- one block --------------------------------------------------------------------------------------------------

static void start_fibers() {
    machine.num_threads = blockDim.x * blockDim.y * blockDim.z;
    for (unsigned number = 0; number < machine.num_threads; number++) {
        Fiber& fiber = machine.fibers[number];
        const unsigned row = number / blockDim.x;
        fiber.is_started = fiber.is_done = false;
        fiber.waiting = Waiting::NOT;
        fiber.index = {number % blockDim.x, row % blockDim.y, row / blockDim.y};
        fiber.number = number;
        fiber.num_shuffles = 0;
    }
    memset(machine.exchange, 0, sizeof machine.exchange);
}

// Let a warp run until all its lanes wait for the block or have ended; return whether anything ran.
static bool run_warp(unsigned first, unsigned end) {
    bool has_run = false;
    for (;;) {
        const unsigned lanes = end - first, start = random_below(lanes);
        for (unsigned i = 0; i < lanes && !machine.error[0]; i++) {
            Fiber& fiber = machine.fibers[first + (start + i) % lanes];
            if (fiber.is_done || fiber.waiting != Waiting::NOT) continue;
            has_run = true;
            run_fiber(&fiber);
        }
        unsigned num_waiting = 0, num_done = 0;
        for (unsigned i = first; i < end; i++) {
            num_done += machine.fibers[i].is_done;
            num_waiting += !machine.fibers[i].is_done && machine.fibers[i].waiting == Waiting::FOR_WARP;
        }
        if (machine.error[0] || num_waiting == 0 || num_waiting + num_done != lanes) return has_run;
        for (unsigned i = first; i < end; i++) machine.fibers[i].waiting = Waiting::NOT;
    }
}

static void run_block() {
    start_fibers();
    const unsigned num_threads = machine.num_threads, num_warps = (num_threads + WARP_LANES - 1) / WARP_LANES;
    unsigned order[MAX_WARPS];
    for (unsigned i = 0; i < num_warps; i++) order[i] = i;
    while (!machine.error[0]) {
        for (unsigned i = num_warps - 1; i > 0; i--) {
            const unsigned other = random_below(i + 1), moved = order[i];
            order[i] = order[other];
            order[other] = moved;
        }
        bool has_run = false;
        for (unsigned i = 0; i < num_warps; i++) {
            const unsigned first = order[i] * WARP_LANES;
            has_run |= run_warp(first, first + WARP_LANES < num_threads ? first + WARP_LANES : num_threads);
        }
        unsigned num_done = 0, num_at_barrier = 0;
        for (unsigned i = 0; i < num_threads; i++) {
            const Fiber& fiber = machine.fibers[i];
            num_done += fiber.is_done;
            num_at_barrier += !fiber.is_done && fiber.waiting == Waiting::FOR_BLOCK;
        }
        if (num_done == num_threads) return;
        if (num_at_barrier == num_threads) {
            for (unsigned i = 0; i < num_threads; i++) machine.fibers[i].waiting = Waiting::NOT;
        } else if (num_at_barrier + num_done == num_threads) {
            fail("__syncthreads() is not reached by threads that have exited");
        } else if (!has_run) {
            fail("deadlock: a barrier or shuffle that some threads of the warp or block do not reach");
        }
    }
}

// ---- shuffles and launches --------------------------------------------------------------------------------------

template <class Value>
Value shuffle(Value value, unsigned source_lane) {
    static_assert(sizeof(Value) <= 16, "a shuffle moves at most 16 bytes");
    Fiber* fiber = machine.current;
    Exchange& exchange = machine.exchange[fiber->number / WARP_LANES];
    const unsigned count = ++fiber->num_shuffles, slot = count % 2, lane = fiber->number % WARP_LANES;
    memcpy(exchange.bytes[slot][lane], &value, sizeof value);
    exchange.shuffle[slot][lane] = count;
    wait_for(Waiting::FOR_WARP);
    if (exchange.shuffle[slot][source_lane] != count) fail("a shuffle reads a lane that does not take part");
    memcpy(&value, exchange.bytes[slot][source_lane], sizeof value);
    return value;
}

template <class... Parameters>
struct Call {
    void (*kernel)(Parameters...);
    void** arguments;

    template <size_t... I>
    void run(std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[I])...);
    }
    static void entry(void* call) { static_cast<Call*>(call)->run(std::index_sequence_for<Parameters...>{}); }
};

// Run all blocks; return null or what went wrong. `shape` is the grid's x, y, z and the block's x, y, z.
template <class... Parameters>
const char* launch(void (*kernel)(Parameters...), const unsigned* shape, void** arguments, unsigned seed) {
    Call<Parameters...> call{kernel, arguments};
    machine.kernel_entry = Call<Parameters...>::entry;
    machine.kernel_arguments = &call;
    gridDim = dim3{shape[0], shape[1], shape[2]};
    blockDim = dim3{shape[3], shape[4], shape[5]};
    machine.random_state = seed;
    machine.error[0] = 0;
    for (unsigned z = 0; z < shape[2]; z++) {
        for (unsigned y = 0; y < shape[1]; y++) {
            for (unsigned x = 0; x < shape[0] && !machine.error[0]; x++) {
                blockIdx = {x, y, z};
                run_block();
            }
        }
    }
    return machine.error[0] ? machine.error : nullptr;
}

}  // namespace cuda_on_cpu

#define EXPORT_KERNEL(name)                                                                          \
    extern "C" const char* host_##name(const unsigned* shape, void** arguments, unsigned seed) { \
        return cuda_on_cpu::launch(name, shape, arguments, seed);                                    \
    }

// ---- the language, as far as the kernels use it -----------------------------------------------------------------

inline void __syncthreads() { cuda_on_cpu::wait_for(cuda_on_cpu::Waiting::FOR_BLOCK); }
inline void __syncwarp(unsigned = ~0u) { cuda_on_cpu::wait_for(cuda_on_cpu::Waiting::FOR_WARP); }

template <class Value>
Value __shfl_xor_sync(unsigned, Value value, unsigned distance) {
    return cuda_on_cpu::shuffle(value, (cuda_on_cpu::machine.current->number ^ distance) % 32);
}
template <class Value>
Value atomicAdd(Value* target, Value value) {
    const Value before = *target;
    *target = before + value;
    return before;
}
template <class Value>
Value min(Value a, Value b) { return b < a ? b : a; }
template <class Value>
Value max(Value a, Value b) { return a < b ? b : a; }
