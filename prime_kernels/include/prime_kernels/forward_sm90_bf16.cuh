// SM90 BF16 forward: one persistent kernel from the staged tokens to y.
//
//   dispatch warps  pull routed rows from all ranks into the pool, in the order in which they are read; later combine
//   producer warp   hands out tasks and feeds the operand ring by TMA (clusters of two share the weights by multicast)
//   store warp      writes L1's activation tiles to the activation pool and publishes them
//   math warpgroups L1: gate|up product and SwiGLU in registers; L2: down product, rows pushed to their owners' slots;
//                   then combine
#pragma once

#include <prime_kernels/exchange.cuh>
#include <prime_kernels/swiglu.cuh>
#include <prime_kernels/trace.cuh>

namespace prime_kernels {

constexpr uint32_t kActivationColumns = 128;  // an L1 tile: 128 gate and 128 up columns

template <uint32_t kHidden_, uint32_t kIntermediate_, bool kClamped_ = false, bool kKeepZ_ = false, bool kTrace_ = false>
struct ForwardConfig {
    static constexpr bool kClamped = kClamped_;
    static constexpr bool kKeepZ = kKeepZ_;  // gate and up are written to memory for the backward
    static constexpr bool kTrace = kTrace_;
    static constexpr uint32_t kHidden = kHidden_;
    static constexpr uint32_t kIntermediate = kIntermediate_;
    static constexpr uint32_t kL1Blocks = (kIntermediate + kActivationColumns - 1) / kActivationColumns;
    static constexpr uint32_t kL2Blocks = (kHidden + kBlockN - 1) / kBlockN;
    static constexpr uint32_t kL1Depth = kHidden / kBlockK;
    static constexpr uint32_t kL2Depth = kIntermediate / kBlockK;
    static constexpr uint32_t kHiddenBytes = kHidden * sizeof(Bf16);
    static constexpr uint32_t kMathRegisters = 216;
    static constexpr uint32_t kAuxRegisters = 72;
    static constexpr uint32_t kInFlight = 8;  // 16-byte pieces a dispatching lane has under way
    static_assert(takes_shape(kHidden, kIntermediate), "H and I must be multiples of 64, H 256 at least");
};

using ForwardLoop = MainLoop<Major::K, Major::K, kBlockN>;
using ForwardOrder = WaveOrder<kForwardPhases, kForwardMaxLag>;
static_assert(sizeof(ForwardOrder) <= sizeof(SharedMap::order), "The order must fit its place in shared memory");

// --- Producer -----------------------------------------------------------------------------------------------------

template <typename Config>
__device__ __forceinline__ void produce(const LaunchParams& launch, ForwardOrder& order, const cute::TmaDescriptor* x_map,
                                        const cute::TmaDescriptor* w1_map, const cute::TmaDescriptor* a_map, const cute::TmaDescriptor* w2_map) {
    shape_forward(order.shapes, Config::kL1Blocks, Config::kL2Blocks);
    order.init(group_rows(launch.comm), launch.problem.min_wave_tasks);
    const uint32_t cta_in_cluster = cute::block_rank_in_cluster();
    Producer producer{cta_in_cluster};
    TaskClaims claims{Counters{launch}.next_task(), cta_in_cluster};
    TaskWriter writer;
    Task task;
    while (order.seek(claims.take(), task)) {
        CtaTask own = cta_task(task, true, order.shapes[task.phase].n_blocks, cta_in_cluster);
        own.first_stage = producer.stage.index;
        writer.put(own);
        const bool is_l1 = own.phase == kForwardL1, splits_n = own.splits_n;
        const cute::TmaDescriptor* a_operand = is_l1 ? x_map : a_map;
        const cute::TmaDescriptor* b_operand = is_l1 ? w1_map : w2_map;
        const uint32_t depth = is_l1 ? Config::kL1Depth : Config::kL2Depth;
        // L1: gate rows and up rows of the natural layout; L2: the two halves of the tile.
        const uint32_t rows0 = own.n_block * (is_l1 ? kActivationColumns : kBlockN);
        const uint32_t rows1 = rows0 + (is_l1 ? Config::kIntermediate : kBlockN / 2);
        const bool with_b = not splits_n or own.rows > 0;
        const uint32_t bytes = kBytesA + (with_b ? kBytesB : 0);
        if (is_l1) wait_counter(launch, Counters{launch}.rows_dispatched(own.pool_block), task_rows(task, own), kFaultDispatchRows);
        else wait_counter(launch, Counters{launch}.tiles_done(own.pool_block), Config::kL1Blocks, kFaultActivationRows);
        ptx::fence_proxy_async();
        for (uint32_t k_block = 0; k_block < depth; ++k_block, producer.advance()) {
            claims.tick(depth - k_block);
            Barrier& full = producer.acquire(bytes);
            producer.load_a(a_operand, full, k_block * kBlockK, own.pool_block * kBlockM, splits_n);
            if (with_b) producer.load_b(b_operand, full, k_block * kBlockK, rows0, rows1, launch.problem.expert_of(own.expert), splits_n);
        }
    }
    writer.put({kNoMoreTasks});
    producer.drain();
}

// --- Store --------------------------------------------------------------------------------------------------------

template <typename Config>
__device__ __forceinline__ void store_activations(const LaunchParams& launch, const cute::TmaDescriptor* a_map, const cute::TmaDescriptor* z_map) {
    constexpr uint32_t kParts = kActivationColumns / kAtom;
    TaskReader reader;
    uint32_t uses = 0;
    for (; reader.next(); reader.done()) {
        const CtaTask& task = reader.task();
        if (task.phase != kForwardL1 or task.rows == 0) continue;
        // Tile `part` of the task's columns, to column `offset` of the row on.
        const auto store = [&](const cute::TmaDescriptor* map, const uint8_t* shared, uint32_t part, uint32_t offset, uint32_t wg) {
            const uint32_t column = task.n_block * kActivationColumns + part * kAtom;
            if (in_range<Config::kIntermediate, kActivationColumns>(column))
                cute::SM90_TMA_STORE_2D::copy(map, shared, column + offset, task.pool_block * kBlockM + wg * kRowsPerWarpgroup);
        };
        if constexpr (Config::kKeepZ) {
            const OutputStages stages = held_stages<kParts>(task.first_stage + Config::kL1Depth);
            store_parts<kParts>(stages, uses, [&](uint32_t part, uint32_t index, uint32_t wg, const uint8_t* shared) {
                store(index == 2 ? a_map : z_map, shared, part, index == 1 ? Config::kIntermediate : 0, wg);
            });
        } else {
            store_tiles<kParts>(uses, [&](uint32_t part, uint32_t wg, const uint8_t* shared) {
                store(a_map, shared, part, 0, wg);
            });
        }
        ptx::fence_proxy_async();
        ptx::add_release_gpu(Counters{launch}.tiles_done(task.pool_block), 1);
    }
}

// --- Math ---------------------------------------------------------------------------------------------------------

template <typename Config>
__device__ __forceinline__ void compute(const ForwardParams& params, uint32_t warp, uint32_t lane) {
    const uint32_t warpgroup = warp / 4;
    const uint32_t warp_row = warp % 4 * kRowsPerWarp;
    OutputWriter output{warpgroup, warp_row, lane};
    TaskReader reader;
    Tracer<Config::kTrace> tracer{params.launch.trace, blockIdx.x * kMathWarpgroups + warpgroup, warp % 4 == 0 and lane == 0};
    const float limit = params.launch.problem.clamp;
    PushAnnouncer pushes{params.launch, warpgroup};
    Stage stage;
    for (tracer.mark(0); reader.next(); reader.done(), tracer.mark(0)) {
        const CtaTask& task = reader.task();
        const bool is_l1 = task.phase == kForwardL1;
        const uint32_t depth = is_l1 ? Config::kL1Depth : Config::kL2Depth;
        if (not is_l1) pushes.reached(params.launch.problem.round_of(task.expert));
        if (task.rows == 0) {
            skip_operands(stage, depth, lane);
            continue;
        }
        // Once the first operands are here, the producer has acquired this block's rows, and with them their origins.
        OperandRing::full(stage.index).wait(stage.phase);
        tracer.mark(1);
        uint64_t slot = 0;
        if (not is_l1) {
            const uint32_t row = warpgroup * kRowsPerWarpgroup + warp_row + lane % kRowsPerWarp;
            if (row < task.rows and not aborted(params.launch)) {  // after a fault the origins may be anything
                const uint2 origin = ptx::load_fresh(params.launch.origins + static_cast<uint64_t>(task.pool_block) * kBlockM + row);
                slot = params.launch.comm.peers[origin.x] + params.launch.comm.at.slots + static_cast<uint64_t>(origin.y) * Config::kHiddenBytes
                       + task.n_block * kBlockN * sizeof(Bf16);
            }
        }
        float acc[ForwardLoop::kAccumulators];
        if (Config::kKeepZ and is_l1) ForwardLoop::template run_and_hold<kActivationColumns / kAtom>(stage, depth, warpgroup, lane, acc);
        else ForwardLoop::run(stage, depth, warpgroup, lane, acc);
        tracer.mark(2);
        if (is_l1) {
            // This thread holds the gate of a column in the first half of its accumulators and the up in the second.
            constexpr uint32_t kUp = ForwardLoop::kAccumulators / 2;
            #pragma unroll
            for (uint32_t tile = 0; tile < kActivationColumns / kAtom; ++tile) {
                const float* gate = acc + tile * kGroupsPerTile * 4;
                const float* up = gate + kUp;
                const auto at = [](uint32_t group, uint32_t lower) { return group * 4 + lower * 2; };
                const auto activation = [&](uint32_t group, uint32_t lower) {
                    const uint32_t i = at(group, lower);
                    return swiglu_pair<Config::kClamped>(gate[i], gate[i + 1], up[i], up[i + 1], limit);
                };
                if constexpr (Config::kKeepZ) {
                    const OutputStages stages = held_stages<kActivationColumns / kAtom>(stage.index);
                    if (tile == 0) stages.begin();
                    const auto to = [&](uint32_t index) { return ptx::shared_address(stages.tile(tile, index, warpgroup)); };
                    output.write_tile(to(0), [&](uint32_t group, uint32_t lower) {
                        return pack_gate<Config::kClamped>(gate[at(group, lower)], gate[at(group, lower) + 1], limit);
                    });
                    output.write_tile(to(1), [&](uint32_t group, uint32_t lower) {
                        return pack_up<Config::kClamped>(up[at(group, lower)], up[at(group, lower) + 1], limit);
                    });
                    output.write_tile(to(2), activation);
                    stages.announce(tile, warpgroup);
                } else {
                    output.put_tile(activation);
                }
            }
        } else {
            output.store_rows<kBlockN>(acc, slot, columns_left<Config::kHidden>(task.n_block));
        }
        tracer.finish(task.phase, warpgroup, task.expert, task.pool_block);
    }
    pushes.reached(params.launch.problem.num_rounds);
}

// --- Kernel -------------------------------------------------------------------------------------------------------

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1)
forward_sm90_bf16(const __grid_constant__ ForwardParams params, const __grid_constant__ cute::TmaDescriptor x_map,
                  const __grid_constant__ cute::TmaDescriptor w1_map, const __grid_constant__ cute::TmaDescriptor a_map,
                  const __grid_constant__ cute::TmaDescriptor w2_map, const __grid_constant__ cute::TmaDescriptor z_map) {
    const uint32_t warp = __shfl_sync(0xffffffff, threadIdx.x / kWarpSize, 0);
    const uint32_t lane = threadIdx.x % kWarpSize;
    begin_exchange(params.launch, params.recv_stats);
    const DispatchPools pools = {params.pool_x, nullptr, nullptr};
    Finisher<Config::kHidden, true, 8> finisher{params.launch, params.y, nullptr, lane, blockIdx.x == 0 and warp == kFirstDispatchWarp};

    if (warp < kMathWarps) {
        cutlass::arch::warpgroup_reg_alloc<Config::kMathRegisters>();
        dispatch_head<false, Config::kInFlight, Config::kHiddenBytes>(params.launch, pools, group_rows(params.launch.comm), blockIdx.x * kMathWarps + warp, lane);
        compute<Config>(params, warp, lane);
        finisher.finish();
    } else {
        cutlass::arch::warpgroup_reg_dealloc<Config::kAuxRegisters>();
        if (warp == kProducerWarp) {
            if (lane == 0)
                produce<Config>(params.launch, *reinterpret_cast<ForwardOrder*>(shared_map().order), &x_map, &w1_map, &a_map, &w2_map);
        } else if (warp == kStoreWarp) {
            if (lane == 0) store_activations<Config>(params.launch, &a_map, &z_map);
        } else {
            const uint32_t index = blockIdx.x * kDispatchWarps + warp - kFirstDispatchWarp;
            dispatch_rows<false, Config::kInFlight, Config::kHiddenBytes>(params.launch, pools, group_rows(params.launch.comm), gridDim.x * kMathWarps, index,
                                                                           gridDim.x * kDispatchWarps, lane, [&] { return finisher.step(); });
            finisher.finish();
        }
        __syncwarp();
    }
    cute::cluster_arrive();
    cute::cluster_wait();
}

}  // namespace prime_kernels
