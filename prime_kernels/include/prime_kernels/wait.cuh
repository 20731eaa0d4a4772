// Waiting on flags and counters without ever hanging: every spin is bounded by a clock. What expires is recorded once in
// host-visible memory and raises the abort flag, after which every wait of this rank returns at once, the kernel runs to
// its end on whatever data is there, peers are told, and the host raises. No trap: the CUDA context survives.
#pragma once

#include <prime_kernels/params.cuh>
#include <prime_kernels/ptx.cuh>

namespace prime_kernels {

constexpr uint32_t kPollsPerClockRead = 64;
constexpr uint32_t kIdlePollNanoseconds = 250;  // between polls of a wait that may last as long as the kernel

__device__ __forceinline__ bool aborted(const LaunchParams& launch) {
    return *reinterpret_cast<volatile const uint32_t*>(Counters{launch}.abort()) != 0;
}

// The epoch of this launch, counted by the route plan before it.
__device__ __forceinline__ uint64_t current_epoch(const Communicator& comm) { return *comm.own<const uint64_t>(comm.at.epoch); }

__device__ __forceinline__ void raise_fault(const LaunchParams& launch, uint32_t site, uint32_t peer, uint64_t expected, uint64_t seen) {
    if (atomicCAS(Counters{launch}.abort(), 0u, site) != 0u) return;
    FaultRecord* record = launch.fault;
    if (*reinterpret_cast<volatile uint32_t*>(&record->site) != kFaultNone) return;  // an earlier one that the host has not read yet
    record->rank = launch.comm.rank;
    record->peer = peer;
    record->epoch = current_epoch(launch.comm);
    record->expected = expected;
    record->seen = seen;
    ptx::fence_sys();
    *reinterpret_cast<volatile uint32_t*>(&record->site) = site;  // last: the host reads the record only when it is set
    ptx::fence_sys();
}

// `kIdle`: a wait that may last as long as the kernel leaves the memory system alone between polls.
// Until the counter (gpu scope, written by this rank) has reached `expected`.
template <bool kIdle = false>
__device__ __forceinline__ void wait_counter(const LaunchParams& launch, const uint32_t* counter, uint32_t expected, uint32_t site) {
    uint32_t seen = ptx::load_acquire_gpu(counter);
    if (seen >= expected) return;
    const uint64_t start = ptx::nanoseconds();
    for (uint32_t polls = 1; (seen = ptx::load_acquire_gpu(counter)) < expected; ++polls) {
        if constexpr (kIdle) __nanosleep(kIdlePollNanoseconds);
        if (polls % kPollsPerClockRead == 0) {
            if (aborted(launch)) return;
            if (ptx::nanoseconds() - start > launch.comm.timeout_ns) {
                raise_fault(launch, site, launch.comm.rank, expected, seen);
                return;
            }
        }
    }
}

// Until the peer's flag (system scope) has reached this epoch.
template <bool kIdle = false>
__device__ __forceinline__ void wait_flag(const LaunchParams& launch, const uint64_t* flag, uint32_t peer, uint32_t site) {
    const uint64_t start = ptx::nanoseconds(), epoch = current_epoch(launch.comm);
    uint64_t seen;
    for (uint32_t polls = 1; ((seen = ptx::load_acquire_sys(flag)) & ~kAbortedBit) < epoch; ++polls) {
        if constexpr (kIdle) __nanosleep(kIdlePollNanoseconds);
        if (polls % kPollsPerClockRead == 0) {
            if (aborted(launch)) return;
            if (ptx::nanoseconds() - start > launch.comm.timeout_ns) {
                raise_fault(launch, site, peer, epoch, seen);
                return;
            }
        }
    }
    // A healthy peer cannot be ahead: it needs this rank's flags. Any other value is a peer that gave up, then or since.
    if (seen != epoch) raise_fault(launch, kFaultPeerAborted, peer, epoch, seen);
}

}  // namespace prime_kernels
