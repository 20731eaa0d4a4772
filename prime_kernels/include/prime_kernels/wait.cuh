// Waiting on flags and counters without ever hanging: every spin is bounded by a clock. What expires is recorded once in
// host-visible memory and raises the abort flag, after which every wait of this rank returns at once, the kernel runs to
// its end on whatever data is there, peers are told, and the host raises. No trap: the CUDA context survives.
#pragma once

#include <prime_kernels/params.cuh>
#include <prime_kernels/ptx.cuh>

namespace prime_kernels {

constexpr uint32_t kPollsPerClockRead = 64;

struct Watchdog {
    uint32_t* abort_flag;
    FaultRecord* record;
    uint64_t timeout_ns;
    uint64_t epoch;
    uint32_t rank;

    __device__ __forceinline__ bool aborted() const {
        return *reinterpret_cast<volatile const uint32_t*>(abort_flag) != 0;
    }

    __device__ __forceinline__ void raise(uint32_t site, uint32_t peer, uint64_t expected, uint64_t seen) const {
        if (atomicCAS(abort_flag, 0u, site) != 0u) return;
        record->rank = rank;
        record->peer = peer;
        record->epoch = epoch;
        record->expected = expected;
        record->seen = seen;
        ptx::fence_sys();
        *reinterpret_cast<volatile uint32_t*>(&record->site) = site;  // last: the host reads the record only when it is set
        ptx::fence_sys();
    }
};

// Until the counter (gpu scope, written by this rank) has reached `expected`.
__device__ __forceinline__ void wait_counter(const Watchdog& dog, const uint32_t* counter, uint32_t expected, uint32_t site) {
    uint32_t seen = ptx::load_acquire_gpu(counter);
    if (seen >= expected) return;
    const uint64_t start = ptx::nanoseconds();
    for (uint32_t polls = 1; (seen = ptx::load_acquire_gpu(counter)) < expected; ++polls) {
        if (polls % kPollsPerClockRead == 0) {
            if (dog.aborted()) return;
            if (ptx::nanoseconds() - start > dog.timeout_ns) {
                dog.raise(site, dog.rank, expected, seen);
                return;
            }
        }
    }
}

// Until the peer's flag (system scope) has reached this epoch.
__device__ __forceinline__ void wait_flag(const Watchdog& dog, const uint64_t* flag, uint32_t peer, uint32_t site) {
    const uint64_t start = ptx::nanoseconds();
    uint64_t seen;
    for (uint32_t polls = 1; (seen = ptx::load_acquire_sys(flag)) < dog.epoch; ++polls) {
        if (polls % kPollsPerClockRead == 0) {
            if (dog.aborted()) return;
            if (ptx::nanoseconds() - start > dog.timeout_ns) {
                dog.raise(site, peer, dog.epoch, seen);
                return;
            }
        }
    }
    if (seen == kAbortedEpoch) dog.raise(kFaultPeerAborted, peer, dog.epoch, seen);
}

}  // namespace prime_kernels
