// The frame of both directions: what a CTA knows, how a launch begins (tell every peer that my tokens are staged, wait for
// every peer, read who sends how much) and how it ends (tell every peer that I have pulled and pushed, wait, combine).
#pragma once

#include <prime_kernels/combine.cuh>
#include <prime_kernels/dispatch.cuh>
#include <prime_kernels/output.cuh>
#include <prime_kernels/wait.cuh>

namespace prime_kernels {

constexpr uint32_t kAuxWarps = 4;
constexpr uint32_t kProducerWarp = kMathWarps;
constexpr uint32_t kStoreWarp = kMathWarps + 1;
constexpr uint32_t kFirstDispatchWarp = kMathWarps + 2;
constexpr uint32_t kDispatchWarps = 2;
constexpr uint32_t kThreads = kMathThreads + kAuxWarps * kWarpSize;

__device__ __forceinline__ ExpertRows expert_rows(const Communicator& comm) {
    return {shared_map().rows, shared_map().num_experts, comm.num_ranks};
}

// Called by all threads of the CTA at once; behind it every rank's staging and the table of rows can be read.
__device__ __forceinline__ void begin_exchange(const LaunchParams& launch, int32_t* recv_stats) {
    const Communicator& comm = launch.comm;
    const uint32_t num_experts = launch.problem.num_local_experts;
    // The plan and staging of this rank were written by earlier work on this stream.
    if (blockIdx.x == 0 and threadIdx.x < comm.num_ranks) {
        ptx::fence_sys();
        ptx::store_release_sys(comm.peer<uint64_t>(threadIdx.x, comm.at.ready_flags) + comm.rank, current_epoch(comm));
    }
    if (threadIdx.x == kProducerWarp * kWarpSize) {
        OperandRing::init();
        init_task_ring();
        init_output_tiles();
        init_claims();
        shared_map().num_experts = num_experts;
        cutlass::arch::fence_barrier_init();
    }
    if (threadIdx.x < comm.num_ranks)
        wait_flag(launch, comm.own<uint64_t>(comm.at.ready_flags) + threadIdx.x, threadIdx.x, kFaultReadyFlag);
    __syncthreads();
    // After a fault the counts may be anything: no rows then.
    const bool stop = aborted(launch);
    uint32_t* rows = shared_map().rows;
    for (uint32_t i = threadIdx.x; i < num_experts * comm.num_ranks; i += kThreads) {
        const uint32_t expert = i / comm.num_ranks, rank = i % comm.num_ranks;
        rows[i] = stop ? 0 : comm.peer<uint32_t>(rank, comm.at.route_count)[comm.rank * num_experts + expert];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const ExpertRows table = expert_rows(comm);
        uint64_t blocks_needed = 0;
        for (uint32_t expert = 0; expert < num_experts; ++expert) blocks_needed += ceil_div(table.total(expert), kBlockM);
        if (blocks_needed > launch.problem.pool_blocks) {
            // The same on every CTA of this rank: nothing is run, nothing is written out of bounds, and the host raises.
            raise_fault(launch, kFaultPoolOverflow, comm.rank, blocks_needed * kBlockM, static_cast<uint64_t>(launch.problem.pool_blocks) * kBlockM);
            shared_map().num_experts = 0;
        }
    }
    cute::cluster_arrive();
    cute::cluster_wait();
    if (recv_stats != nullptr and blockIdx.x == 0) {
        const ExpertRows table = expert_rows(comm);
        for (uint32_t expert = threadIdx.x; expert < table.num_experts; expert += kThreads)
            recv_stats[expert] += static_cast<int32_t>(table.total(expert));
    }
}

// One warpgroup has pushed all it will push to any rank.
__device__ __forceinline__ void announce_pushes(const LaunchParams& launch, uint32_t warpgroup) {
    ptx::fence_sys();  // each thread's pushes before the flags that announce them
    ptx::named_barrier_sync(1 + warpgroup, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) ptx::add_release_gpu(Counters{launch}.pushers_done(), 1);
}

// When all warpgroups of this rank have pushed: tell every peer. One warp of the grid.
__device__ __forceinline__ void publish_done(const LaunchParams& launch, uint32_t lane) {
    const Communicator& comm = launch.comm;
    if (lane == 0) wait_counter<true>(launch, Counters{launch}.pushers_done(), gridDim.x * kMathWarpgroups, kFaultLocalDone);
    __syncwarp();
    ptx::fence_sys();
    const uint64_t value = aborted(launch) ? kAbortedEpoch : current_epoch(comm);
    if (lane < comm.num_ranks) ptx::store_release_sys(comm.peer<uint64_t>(lane, comm.at.done_flags) + comm.rank, value);
    __syncwarp();
}

// Every rank has pushed to this one. One warp.
__device__ __forceinline__ void wait_done(const LaunchParams& launch, uint32_t lane) {
    const Communicator& comm = launch.comm;
    if (lane < comm.num_ranks)
        wait_flag<true>(launch, comm.own<uint64_t>(comm.at.done_flags) + lane, lane, kFaultDoneFlag);
    __syncwarp();
}

}  // namespace prime_kernels
