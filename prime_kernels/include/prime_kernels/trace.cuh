// A timeline of tasks, for kernels compiled with tracing; costs nothing in the others.
#pragma once

#include <prime_kernels/params.cuh>
#include <prime_kernels/ptx.cuh>

namespace prime_kernels {

template <bool kEnabled>
struct Tracer {
    const Trace& trace;
    uint32_t line;  // warpgroup of the grid
    bool writes;    // one thread of the warpgroup
    uint32_t count = 0;
    uint64_t times[4] = {};

    __device__ __forceinline__ void mark(uint32_t point) {
        if constexpr (kEnabled) times[point] = ptx::nanoseconds();
    }
    __device__ __forceinline__ void finish(uint32_t phase, uint32_t warpgroup, uint32_t expert, uint32_t block) {
        if constexpr (kEnabled) {
            mark(3);
            if (not writes) return;
            uint32_t sm;
            asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
            if (count < trace.capacity)
                trace.events[line * trace.capacity + count] = {sm, phase << 16 | warpgroup, expert, block, times[0], times[1], times[2], times[3]};
            trace.counts[line] = ++count;
        }
    }
};

}  // namespace prime_kernels
