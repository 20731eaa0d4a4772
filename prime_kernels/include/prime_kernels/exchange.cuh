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

// Rows of each group (round, local expert) from each rank.
__device__ __forceinline__ ExpertRows group_rows(const Communicator& comm) {
    return {shared_map().rows, shared_map().num_groups, comm.num_ranks};
}

// Called by all threads of the CTA at once; behind it every rank's staging and the table of rows can be read.
__device__ __forceinline__ void begin_exchange(const LaunchParams& launch, int32_t* recv_stats) {
    const Communicator& comm = launch.comm;
    const uint32_t num_groups = launch.problem.num_groups();
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
        shared_map().num_groups = num_groups;
        cutlass::arch::fence_barrier_init();
    }
    // The peer CTA runs from here on: its shared memory may be written.
    cute::cluster_arrive();
    cute::cluster_wait();
    if (threadIdx.x < comm.num_ranks)
        wait_flag(launch, comm.own<uint64_t>(comm.at.ready_flags) + threadIdx.x, threadIdx.x, kFaultReadyFlag);
    // After a fault the counts may be anything: no rows then.
    const bool stop = __syncthreads_or(aborted(launch));
    SharedMap& map = shared_map();
    for (uint32_t i = threadIdx.x; i < num_groups * comm.num_ranks; i += kThreads)
        map.rows[i] = stop ? 0 : comm.peer<uint32_t>(i % comm.num_ranks, comm.at.route_count)[route_key(launch, i / comm.num_ranks)];
    __syncthreads();
    if (threadIdx.x == 0) {
        const ExpertRows table = group_rows(comm);
        uint64_t blocks_needed = 0;
        for (uint32_t group = 0; group < num_groups; ++group) blocks_needed += ceil_div(table.total(group), kBlockM);
        const bool overflow = blocks_needed > launch.problem.pool_blocks;
        if (overflow)
            raise_fault(launch, kFaultPoolOverflow, comm.rank, blocks_needed * kBlockM, static_cast<uint64_t>(launch.problem.pool_blocks) * kBlockM);
        const uint32_t cta = cute::block_rank_in_cluster();
        for (uint32_t other = 0; other < kClusterSize; ++other) ptx::store_cluster(&map.stops[cta], stop or overflow, other);
    }
    cute::cluster_arrive();
    cute::cluster_wait();
    // The CTAs of a cluster work together or not at all: they wait for each other's multicasts. Other clusters may decide
    // otherwise; whatever waits for them ends by the abort flag, and the host raises.
    if (threadIdx.x == 0)
        for (uint32_t cta = 0; cta < kClusterSize; ++cta)
            if (map.stops[cta]) map.num_groups = 0;
    __syncthreads();
    if (recv_stats != nullptr and blockIdx.x == 0) {
        const ExpertRows table = group_rows(comm);
        for (uint32_t group = threadIdx.x; group < table.num_experts; group += kThreads)
            atomicAdd(recv_stats + launch.problem.expert_of(group), static_cast<int32_t>(table.total(group)));
    }
}

// The math warpgroups' account of what they have pushed: rounds end in order.
struct PushAnnouncer {
    const LaunchParams& launch;
    uint32_t warpgroup;
    uint32_t announced = 0;

    // This warpgroup has pushed all it will push of the rounds before `round`.
    __device__ __forceinline__ void reached(uint32_t round) {
        if (announced >= round) return;
        ptx::fence_sys();  // each thread's pushes before the flags that announce them
        ptx::named_barrier_sync(1 + warpgroup, kWarpgroup);
        for (; announced < round; ++announced)
            if (threadIdx.x % kWarpgroup == 0) ptx::add_release_gpu(Counters{launch}.pushers_done(announced), 1);
    }
};

// The end of a round, by warps that have time: one warp of the grid tells the peers when this rank has pushed everything;
// any warp combines tokens of rounds that have arrived. `step` never blocks.
template <uint32_t kHidden, bool kWeighted, uint32_t kUnroll>
struct Finisher {
    const LaunchParams& launch;
    uint8_t* y;
    float* dtopk;
    uint32_t lane;
    bool publishes;
    uint32_t published = 0;  // rounds told to the peers
    uint32_t round = 0;      // the round this warp combines
    bool arrived = false;    // whether every rank has pushed it

    __device__ __forceinline__ bool all_lanes(bool value) const { return __all_sync(0xffffffff, value); }

    __device__ __forceinline__ bool try_publish() {
        if (not publishes or published == launch.problem.num_rounds) return false;
        const uint32_t pushers = gridDim.x * kMathWarpgroups;
        if (not all_lanes(ptx::load_acquire_gpu(Counters{launch}.pushers_done(published)) == pushers)) return false;
        ptx::fence_sys();
        const Communicator& comm = launch.comm;
        const uint64_t value = current_epoch(comm) | (aborted(launch) ? kAbortedBit : 0);
        if (lane < comm.num_ranks)
            ptx::store_release_sys(comm.peer<uint64_t>(lane, comm.at.done_flags) + published * kMaxRanks + comm.rank, value);
        __syncwarp();
        ++published;
        return true;
    }

    // Whether it did something.
    __device__ __forceinline__ bool step() {
        if (try_publish()) return true;
        const Problem& problem = launch.problem;
        if (round == problem.num_rounds) return false;
        if (not arrived) {
            const Communicator& comm = launch.comm;
            const uint64_t* flag = comm.own<uint64_t>(comm.at.done_flags) + round * kMaxRanks + lane;
            const uint64_t seen = lane < comm.num_ranks ? ptx::load_acquire_sys(flag) : 0;
            const uint64_t epoch = current_epoch(comm);
            // A healthy peer cannot be ahead: it needs this rank's flags. Any other value that is reached is a peer that gave up.
            if (lane < comm.num_ranks and (seen & ~kAbortedBit) >= epoch and seen != epoch)
                raise_fault(launch, kFaultPeerAborted, lane, epoch, seen);
            arrived = all_lanes(lane >= comm.num_ranks or (seen & ~kAbortedBit) >= epoch);
            if (not arrived) return false;
            __syncwarp();  // every lane's acquire before any lane's reads of the slots: a vote orders no memory
        }
        uint32_t token = 0;
        if (lane == 0) token = round * problem.tokens_per_round() + atomicAdd(Counters{launch}.next_token(round), 1u);
        token = __shfl_sync(0xffffffff, token, 0);
        if (token >= min((round + 1) * problem.tokens_per_round(), problem.num_tokens)) {
            ++round;
            arrived = false;
            return true;
        }
        if (not __any_sync(0xffffffff, aborted(launch))) combine_token<kHidden, kWeighted, kUnroll>(launch.comm, problem.num_topk, y, dtopk, token, lane);
        return true;
    }

    // Until every round is combined (and told, by the warp that tells).
    __device__ __forceinline__ void finish() {
        const uint64_t start = ptx::nanoseconds();
        const Problem& problem = launch.problem;
        while (round < problem.num_rounds or (publishes and published < problem.num_rounds)) {
            if (step()) continue;
            if (all_lanes(aborted(launch)) and not publishes) return;
            if (ptx::nanoseconds() - start > launch.comm.timeout_ns) time_out();
            if (all_lanes(aborted(launch)) and published == problem.num_rounds) return;
            __nanosleep(kIdlePollNanoseconds);
        }
    }

    __device__ __forceinline__ void time_out() const {
        const Communicator& comm = launch.comm;
        const uint64_t epoch = current_epoch(comm);
        if (lane >= comm.num_ranks) return;
        const uint64_t seen = ptx::load_acquire_sys(comm.own<uint64_t>(comm.at.done_flags) + round * kMaxRanks + lane);
        if ((seen & ~kAbortedBit) < epoch) raise_fault(launch, kFaultDoneFlag, lane, epoch, seen);
    }
};

}  // namespace prime_kernels
