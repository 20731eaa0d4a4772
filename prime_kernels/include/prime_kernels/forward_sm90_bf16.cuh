// SM90 BF16 forward: one persistent kernel from the staged tokens to y.
//
//   dispatch warp   pulls routed rows from all ranks into the pool, in the order in which they are read
//   producer warp   feeds the operand ring by TMA (clusters of two share the weights by multicast)
//   store warp      writes L1's activation tiles to the activation pool and publishes them
//   math warpgroups L1: gate|up product and SwiGLU in registers; L2: down product, rows pushed to their owners' slots
//   all warps       at the end: all-rank "done" flags, then combine
#pragma once

#include <prime_kernels/combine.cuh>
#include <prime_kernels/dispatch.cuh>
#include <prime_kernels/tiles.cuh>
#include <prime_kernels/wait.cuh>

namespace prime_kernels {

template <uint32_t kHidden_, uint32_t kIntermediate_, bool kTrace_ = false>
struct ForwardConfig {
    static constexpr bool kTrace = kTrace_;
    static constexpr uint32_t kHidden = kHidden_;
    static constexpr uint32_t kIntermediate = kIntermediate_;
    static constexpr uint32_t kL1Blocks = kIntermediate / kOutputColumns;  // an L1 tile: 128 gate and 128 up columns
    static constexpr uint32_t kL2Blocks = kHidden / kBlockN;
    static constexpr uint32_t kL1Depth = kHidden / kBlockK;
    static constexpr uint32_t kL2Depth = kIntermediate / kBlockK;
    static constexpr uint32_t kHiddenBytes = kHidden * sizeof(Bf16);
    static_assert(kHidden % kBlockN == 0, "H must be a multiple of 256");
    static_assert(kIntermediate % kOutputColumns == 0, "I must be a multiple of 128");
};

constexpr uint32_t kAuxWarps = 4;
constexpr uint32_t kProducerWarp = kMathWarps;
constexpr uint32_t kStoreWarp = kMathWarps + 1;
constexpr uint32_t kFirstDispatchWarp = kMathWarps + 2;
constexpr uint32_t kDispatchWarps = 2;
constexpr uint32_t kForwardThreads = kMathThreads + kAuxWarps * kWarpSize;
constexpr uint32_t kMathRegisters = 216;
constexpr uint32_t kAuxRegisters = 72;
constexpr uint32_t kMaxRowCounts = 480;  // local experts x ranks: the table in shared memory

struct ForwardShared {
    static constexpr uint32_t kRingA = 0;
    static constexpr uint32_t kRingB = kRingA + kStages * kBytesA;
    static constexpr uint32_t kOutput = kRingB + kStages * kBytesB;
    static constexpr uint32_t kRows = kOutput + kMathWarpgroups * kOutputTileBytes;
    static constexpr uint32_t kBarriers = kRows + kMaxRowCounts * sizeof(uint32_t);
    static constexpr uint32_t kNumBarriers = 2 * kStages + 2 * kMathWarpgroups;
    static constexpr uint32_t kBytes = kBarriers + kNumBarriers * sizeof(Barrier);
};
constexpr uint32_t kForwardSharedBytes = ForwardShared::kBytes;

// What every role needs to know; all of it is uniform over the CTA.
struct ForwardState {
    OperandRing ring;
    Barrier* output_full;    // [warpgroup]: an activation tile is in shared memory
    Barrier* output_empty;   // [warpgroup]: it has been read by the store
    uint32_t output_tiles;   // shared address of the first warpgroup's tile
    ExpertRows table;
    Counters counters;
    Watchdog dog;
    uint32_t cta_in_cluster;
    uint32_t cluster;
    uint32_t num_clusters;
};

// The row block of a task that belongs to this CTA.
struct OwnBlock {
    uint32_t pool_block;
    uint32_t rows;  // valid rows; 0: the expert has no block here
    __device__ __forceinline__ OwnBlock(const ForwardTask& task, uint32_t cta_in_cluster) {
        const uint32_t block = task.block_group * kClusterSize + cta_in_cluster;
        pool_block = task.pool_block + block;
        const uint32_t first = block * kBlockM;
        rows = task.rows > first ? min(kBlockM, task.rows - first) : 0;
    }
};

template <typename Config>
__device__ __forceinline__ ForwardOrder make_order(const ForwardState& state, const Problem& problem) {
    return ForwardOrder(state.table, Config::kL1Blocks, Config::kL2Blocks, problem.min_wave_tasks);
}

// --- Producer -----------------------------------------------------------------------------------------------------

template <typename Config>
__device__ __forceinline__ void produce(const ForwardState& state, const Problem& problem,
                                        const cute::TmaDescriptor* x_map, const cute::TmaDescriptor* w1_map,
                                        const cute::TmaDescriptor* a_map, const cute::TmaDescriptor* w2_map) {
    constexpr uint16_t kBothCtas = (1u << kClusterSize) - 1;
    constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    ForwardOrder order = make_order<Config>(state, problem);
    ForwardTask task;
    Stage stage;
    const OperandRing& ring = state.ring;
    for (uint32_t index = state.cluster; order.seek(index, task); index += state.num_clusters) {
        const OwnBlock own(task, state.cta_in_cluster);
        const bool is_l1 = task.phase == ForwardPhase::kL1;
        const cute::TmaDescriptor* a_operand = is_l1 ? x_map : a_map;
        const cute::TmaDescriptor* b_operand = is_l1 ? w1_map : w2_map;
        const uint32_t depth = is_l1 ? Config::kL1Depth : Config::kL2Depth;
        // L1: CTA 0 loads the gate rows and CTA 1 the up rows of the natural layout; L2: each half of the tile.
        const uint32_t b_row = is_l1 ? task.n_block * kOutputColumns + state.cta_in_cluster * Config::kIntermediate
                                     : task.n_block * kBlockN + state.cta_in_cluster * kHalfN;
        const uint32_t a_row = own.pool_block * kBlockM;
        const uint32_t bytes = kBytesB + (own.rows > 0 ? kBytesA : 0);

        if (own.rows > 0) {
            if (is_l1) wait_counter(state.dog, state.counters.rows_dispatched(own.pool_block), own.rows, kFaultDispatchRows);
            else wait_counter(state.dog, state.counters.tiles_activated(own.pool_block), Config::kL1Blocks, kFaultActivationRows);
            ptx::fence_proxy_async();
        }
        for (uint32_t k_block = 0; k_block < depth; ++k_block) {
            ring.empty[stage.index].wait(stage.phase ^ 1);
            Barrier& full = ring.full[stage.index];
            full.arrive_and_expect_tx(bytes);
            if (own.rows > 0)
                cute::SM90_TMA_LOAD_2D::copy(a_operand, reinterpret_cast<uint64_t*>(&full), kHint, ring.a_stage(stage.index),
                                             k_block * kBlockK, a_row);
            cute::SM90_TMA_LOAD_MULTICAST_3D::copy(b_operand, reinterpret_cast<uint64_t*>(&full), kBothCtas, kHint,
                                                   ring.b_stage(stage.index) + state.cta_in_cluster * kHalfN * kBlockK,
                                                   k_block * kBlockK, b_row, task.expert);
            stage.advance();
        }
    }
    // Both CTAs' last reads are over before either leaves: nothing arrives at barriers of an exited CTA.
    for (uint32_t s = 0; s < kStages; ++s, stage.advance()) ring.empty[stage.index].wait(stage.phase ^ 1);
}

// --- Store --------------------------------------------------------------------------------------------------------

template <typename Config>
__device__ __forceinline__ void store_activations(const ForwardState& state, const Problem& problem,
                                                  const cute::TmaDescriptor* a_store_map, const uint8_t* output) {
    ForwardOrder order = make_order<Config>(state, problem);
    ForwardTask task;
    uint32_t phase = 0;
    for (uint32_t index = state.cluster; order.seek(index, task); index += state.num_clusters) {
        const OwnBlock own(task, state.cta_in_cluster);
        if (task.phase != ForwardPhase::kL1 or own.rows == 0) continue;
        #pragma unroll
        for (uint32_t wg = 0; wg < kMathWarpgroups; ++wg) {
            state.output_full[wg].wait(phase);
            const uint8_t* tile = output + wg * kOutputTileBytes;
            #pragma unroll
            for (uint32_t half = 0; half < kOutputTileBytes / kOutputHalfBytes; ++half)
                cute::SM90_TMA_STORE_2D::copy(a_store_map, tile + half * kOutputHalfBytes,
                                              task.n_block * kOutputColumns + half * kBlockK,
                                              own.pool_block * kBlockM + wg * kRowsPerWarpgroup);
            cute::tma_store_arrive();
        }
        cute::tma_store_wait<1>();  // read from shared memory, oldest group first
        state.output_empty[0].arrive();
        cute::tma_store_wait<0>();
        state.output_empty[1].arrive();
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // and now written
        ptx::fence_proxy_async();
        ptx::add_release_gpu(state.counters.tiles_activated(own.pool_block), 1);
        phase ^= 1;
    }
}

// --- Math ---------------------------------------------------------------------------------------------------------

// SwiGLU with both inputs rounded to bf16 first. The limit binds the gate from above and the linear part on both sides.
__device__ __forceinline__ float swiglu(float gate, float up, float clamp) {
    gate = fminf(gate, clamp);
    up = fmaxf(fminf(up, clamp), -clamp);
    return gate * up * __fdividef(1.0f, 1.0f + __expf(-gate));
}

__device__ __forceinline__ uint32_t swiglu_pair(float g0, float g1, float u0, float u1, float clamp) {
    const uint32_t g = ptx::pack_bf16(g0, g1), u = ptx::pack_bf16(u0, u1);
    return ptx::pack_bf16(swiglu(ptx::bf16_low(g), ptx::bf16_low(u), clamp), swiglu(ptx::bf16_high(g), ptx::bf16_high(u), clamp));
}

// L1 epilogue: this thread holds the gate of a column in the first half of its accumulators and the up in the second.
__device__ __forceinline__ void activate(const float (&acc)[MainLoop::kAccumulators], uint32_t tile, uint32_t warp_row,
                                         uint32_t lane, float clamp) {
    constexpr uint32_t kUp = MainLoop::kAccumulators / 2;
    #pragma unroll
    for (uint32_t group = 0; group < kOutputColumns / 8; group += 2) {
        uint32_t packed[4];
        #pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t at = group * 4 + i * 2;
            packed[i] = swiglu_pair(acc[at], acc[at + 1], acc[kUp + at], acc[kUp + at + 1], clamp);
        }
        store_output_groups(tile, warp_row, group, lane, packed[0], packed[1], packed[2], packed[3]);
    }
}

// L2 epilogue: each warp turns its 16 rows into 16-byte pieces through shared memory and pushes them to the slots of the
// ranks that sent the rows. `slot` is this lane's row (lane < 16) in its owner's slots, 0 for a padding row.
__device__ __forceinline__ void push_rows(const float (&acc)[MainLoop::kAccumulators], uint32_t tile, uint32_t warp_row,
                                          uint32_t lane, uint64_t slot, uint32_t column_bytes) {
    constexpr uint32_t kChunks = kOutputColumns * sizeof(Bf16) / kVectorBytes;
    constexpr uint32_t kRowsPerPass = kWarpSize / kChunks;
    #pragma unroll
    for (uint32_t half = 0; half < kBlockN / kOutputColumns; ++half) {
        #pragma unroll
        for (uint32_t group = 0; group < kOutputColumns / 8; group += 2) {
            const uint32_t at = (half * (kOutputColumns / 8) + group) * 4;
            store_output_groups(tile, warp_row, group, lane, ptx::pack_bf16(acc[at], acc[at + 1]), ptx::pack_bf16(acc[at + 2], acc[at + 3]),
                                ptx::pack_bf16(acc[at + 4], acc[at + 5]), ptx::pack_bf16(acc[at + 6], acc[at + 7]));
        }
        __syncwarp();
        #pragma unroll
        for (uint32_t pass = 0; pass < kRowsPerWarp / kRowsPerPass; ++pass) {
            const uint32_t row = pass * kRowsPerPass + lane / kChunks, chunk = lane % kChunks;
            const uint64_t to = __shfl_sync(0xffffffff, slot, row);
            const uint4 piece = ptx::load_shared(output_chunk_address(tile, warp_row + row, chunk));
            if (to != 0)
                ptx::store_global(reinterpret_cast<uint8_t*>(to) + column_bytes + half * kOutputColumns * sizeof(Bf16) + chunk * kVectorBytes, piece);
        }
        __syncwarp();
    }
}

template <typename Config>
__device__ __forceinline__ void compute(const ForwardState& state, const ForwardParams& params, uint32_t warp, uint32_t lane) {
    const uint32_t warpgroup = warp / 4;
    const uint32_t warp_row = warp % 4 * kRowsPerWarp;
    const uint32_t tile = state.output_tiles + warpgroup * kOutputTileBytes;
    ForwardOrder order = make_order<Config>(state, params.problem);
    ForwardTask task;
    Stage stage;
    [[maybe_unused]] TraceEvent event;
    uint32_t activations = 0;  // tiles of this warpgroup handed to the store warp
    for (uint32_t index = state.cluster; order.seek(index, task); index += state.num_clusters) {
        const OwnBlock own(task, state.cta_in_cluster);
        const bool is_l1 = task.phase == ForwardPhase::kL1;
        const uint32_t depth = is_l1 ? Config::kL1Depth : Config::kL2Depth;
        if (own.rows == 0) {
            MainLoop::skip(state.ring, stage, depth, lane);
            continue;
        }
        if constexpr (Config::kTrace) event.begin = ptx::nanoseconds();
        // Once the first operands are here, the producer has acquired this block's rows, and with them their origins.
        state.ring.full[stage.index].wait(stage.phase);
        if constexpr (Config::kTrace) event.operands = ptx::nanoseconds();
        uint64_t slot = 0;
        if (not is_l1) {
            const uint32_t row = warpgroup * kRowsPerWarpgroup + warp_row + lane % kRowsPerWarp;
            if (row < own.rows and not state.dog.aborted()) {  // after a fault the origins may be anything
                const uint2 origin = ptx::load_fresh(params.origins + static_cast<uint64_t>(own.pool_block) * kBlockM + row);
                slot = params.comm.peers[origin.x] + params.comm.at.slots + static_cast<uint64_t>(origin.y) * Config::kHiddenBytes;
            }
        }
        float acc[MainLoop::kAccumulators];
        MainLoop::run(state.ring, stage, depth, warpgroup, lane, acc);
        if constexpr (Config::kTrace) event.product = ptx::nanoseconds();
        if (activations > 0) state.output_empty[warpgroup].wait((activations - 1) & 1);
        if (is_l1) {
            activate(acc, tile, warp_row, lane, params.problem.clamp);
            ptx::fence_proxy_async();
            state.output_full[warpgroup].arrive();
            ++activations;
        } else {
            push_rows(acc, tile, warp_row, lane, slot, task.n_block * kBlockN * sizeof(Bf16));
        }
        if constexpr (Config::kTrace) {
            event.end = ptx::nanoseconds();
            if (warp % 4 == 0 and lane == 0) {
                const uint32_t line = blockIdx.x * kMathWarpgroups + warpgroup;
                asm volatile("mov.u32 %0, %%smid;" : "=r"(event.sm));
                event.what = static_cast<uint32_t>(task.phase) << 16 | warpgroup;
                event.expert = task.expert;
                event.block = own.pool_block;
                const uint32_t count = params.trace.counts[line];
                if (count < params.trace.capacity) params.trace.events[line * params.trace.capacity + count] = event;
                params.trace.counts[line] = count + 1;
            }
        }
    }
}

// --- End of the kernel --------------------------------------------------------------------------------------------

// All tasks of all CTAs of this rank are over -> tell every peer -> wait for every peer. Called by all threads of the CTA.
__device__ __forceinline__ void finish_exchange(const ForwardParams& params, const ForwardState& state) {
    const Communicator& comm = params.comm;
    ptx::fence_sys();  // this thread's pushes, before the flags that announce them
    __syncthreads();
    if (threadIdx.x == 0) ptx::add_release_gpu(state.counters.finished_ctas(), 1);
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) wait_counter(state.dog, state.counters.finished_ctas(), gridDim.x, kFaultLocalDone);
        __syncthreads();
        if (threadIdx.x < comm.num_ranks)
            ptx::store_release_sys(comm.peer<uint64_t>(threadIdx.x, comm.at.done_flags) + comm.rank,
                                   state.dog.aborted() ? kAbortedEpoch : state.dog.epoch);
    }
    if (threadIdx.x < comm.num_ranks)
        wait_flag(state.dog, comm.own<uint64_t>(comm.at.done_flags) + threadIdx.x, threadIdx.x, kFaultDoneFlag);
    __syncthreads();
}

// --- Kernel -------------------------------------------------------------------------------------------------------

template <typename Config>
__global__ void __launch_bounds__(kForwardThreads, 1)
forward_sm90_bf16(const __grid_constant__ ForwardParams params, const __grid_constant__ cute::TmaDescriptor x_map,
                  const __grid_constant__ cute::TmaDescriptor w1_map, const __grid_constant__ cute::TmaDescriptor a_map,
                  const __grid_constant__ cute::TmaDescriptor a_store_map, const __grid_constant__ cute::TmaDescriptor w2_map) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t warp = __shfl_sync(0xffffffff, threadIdx.x / kWarpSize, 0);
    const uint32_t lane = threadIdx.x % kWarpSize;
    const Communicator& comm = params.comm;
    auto rows = reinterpret_cast<uint32_t*>(shared + ForwardShared::kRows);
    auto barriers = reinterpret_cast<Barrier*>(shared + ForwardShared::kBarriers);

    ForwardState state;
    state.ring = {shared + ForwardShared::kRingA, shared + ForwardShared::kRingB, barriers, barriers + kStages};
    state.output_full = barriers + 2 * kStages;
    state.output_empty = state.output_full + kMathWarpgroups;
    state.output_tiles = ptx::shared_address(shared + ForwardShared::kOutput);
    state.table = {rows, params.problem.num_local_experts, comm.num_ranks};
    state.counters = {params.counters, params.problem.pool_blocks};
    state.dog = {state.counters.abort(), params.fault, comm.timeout_ns, *comm.own<uint64_t>(comm.at.epoch), comm.rank};
    state.cta_in_cluster = cute::block_rank_in_cluster();
    state.cluster = blockIdx.x / kClusterSize;
    state.num_clusters = gridDim.x / kClusterSize;

    // The plan and staging of this rank were written by earlier work on this stream: tell every peer, wait for every peer.
    if (blockIdx.x == 0 and threadIdx.x < comm.num_ranks) {
        ptx::fence_sys();
        ptx::store_release_sys(comm.peer<uint64_t>(threadIdx.x, comm.at.ready_flags) + comm.rank, state.dog.epoch);
    }
    if (warp == kProducerWarp and cute::elect_one_sync()) {
        state.ring.init();
        for (uint32_t wg = 0; wg < kMathWarpgroups; ++wg) {
            state.output_full[wg].init(kWarpgroup);
            state.output_empty[wg].init(1);
        }
        cutlass::arch::fence_barrier_init();
    }
    if (threadIdx.x < comm.num_ranks)
        wait_flag(state.dog, comm.own<uint64_t>(comm.at.ready_flags) + threadIdx.x, threadIdx.x, kFaultReadyFlag);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < state.table.num_experts * comm.num_ranks; i += kForwardThreads) {
        const uint32_t expert = i / comm.num_ranks, rank = i % comm.num_ranks;
        // After a fault the counts may be anything: no rows then.
        rows[i] = state.dog.aborted() ? 0 : comm.peer<uint32_t>(rank, comm.at.route_count)[comm.rank * state.table.num_experts + expert];
    }
    cute::cluster_arrive();
    cute::cluster_wait();
    uint64_t blocks_needed = 0;
    for (uint32_t expert = 0; expert < state.table.num_experts; ++expert) blocks_needed += ceil_div(state.table.total(expert), kBlockM);
    if (blocks_needed > params.problem.pool_blocks) {
        if (threadIdx.x == 0) state.dog.raise(kFaultPoolOverflow, comm.rank, blocks_needed * kBlockM, static_cast<uint64_t>(params.problem.pool_blocks) * kBlockM);
        state.table.num_experts = 0;  // the same on every CTA of this rank: nothing is run, nothing is written out of bounds
    }
    if (params.recv_stats != nullptr and blockIdx.x == 0)
        for (uint32_t expert = threadIdx.x; expert < state.table.num_experts; expert += kForwardThreads)
            params.recv_stats[expert] += state.table.total(expert);

    if (warp < kMathWarps) {
        cutlass::arch::warpgroup_reg_alloc<kMathRegisters>();
        compute<Config>(state, params, warp, lane);
    } else {
        cutlass::arch::warpgroup_reg_dealloc<kAuxRegisters>();
        if (warp == kProducerWarp) {
            if (cute::elect_one_sync()) produce<Config>(state, params.problem, &x_map, &w1_map, &a_map, &w2_map);
        } else if (warp == kStoreWarp) {
            if (cute::elect_one_sync()) store_activations<Config>(state, params.problem, &a_store_map, shared + ForwardShared::kOutput);
        } else {
            dispatch_rows<Config::kHiddenBytes>(params, state.counters, state.dog, state.table, blockIdx.x * kDispatchWarps + warp - kFirstDispatchWarp,
                                                gridDim.x * kDispatchWarps, lane);
        }
        __syncwarp();
    }
    finish_exchange(params, state);
    if (warp < kMathWarps and not state.dog.aborted())
        combine_tokens<Config::kHidden, true>(comm, params.problem, params.y, blockIdx.x * kMathWarps + warp, gridDim.x * kMathWarps, lane);
    cute::cluster_arrive();
    cute::cluster_wait();
}

}  // namespace prime_kernels
