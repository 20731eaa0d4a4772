// SM90 BF16 backward: one persistent kernel from staged tokens and dy to dx, dtopk and the weight gradients.
//
//   dispatch warps  pull x, dy and the routing weight of every row into the pools; later combine dx and dtopk
//   producer warp   hands out tasks and feeds the operand ring by TMA
//   store warp      writes the tiles of dz and w*a to their pools and publishes them
//   math warpgroups kGrad: gate|up recomputed (or read, if the forward kept them) and da' = dy W2, SwiGLU's backward in registers; kDx: dz W13, rows pushed to
//                   their owners' slots; kDw2, kDw13: weight gradients over all rows of an expert; then combine
#pragma once

#include <prime_kernels/exchange.cuh>
#include <prime_kernels/swiglu.cuh>
#include <prime_kernels/trace.cuh>

namespace prime_kernels {

template <uint32_t kHidden_, uint32_t kIntermediate_, bool kClamped_ = false, bool kKeptZ_ = false, bool kTrace_ = false>
struct BackwardConfig {
    static constexpr bool kClamped = kClamped_;
    static constexpr bool kKeptZ = kKeptZ_;  // gate and up come from the forward instead of being recomputed
    static constexpr bool kTrace = kTrace_;
    static constexpr uint32_t kHidden = kHidden_;
    static constexpr uint32_t kIntermediate = kIntermediate_;
    // Columns of a kGrad tile. With gate, up and da' in registers there is room for 128 each; with z in memory for 256 of da'.
    static constexpr uint32_t kGradColumns = kKeptZ ? 256 : 128;
    static constexpr uint32_t kParts = kGradColumns / kAtom;
    static constexpr uint32_t kGradBlocks = (kIntermediate + kGradColumns - 1) / kGradColumns;
    static constexpr uint32_t kDxBlocks = (kHidden + kBlockN - 1) / kBlockN;
    static constexpr uint32_t kHiddenDepth = kHidden / kBlockK;
    static constexpr uint32_t kZStages = kKeptZ ? kParts : kHiddenDepth;  // ring stages of gate and up, behind da', or their product before it
    static constexpr uint32_t kDzDepth = 2 * kIntermediate / kBlockK;
    static constexpr uint32_t kHiddenBytes = kHidden * sizeof(Bf16);
    // Recomputing takes 192 accumulators in kGrad; else dispatch gets the registers, since kGrad then outruns it.
    static constexpr uint32_t kMathRegisters = kKeptZ ? 216 : 232;
    static constexpr uint32_t kAuxRegisters = kKeptZ ? 72 : 40;
    static constexpr uint32_t kInFlight = kKeptZ ? 8 : 4;
    static constexpr uint32_t kCombineUnroll = kKeptZ ? 8 : 4;
    static constexpr uint32_t kClusterRows = kBlockM * kClusterSize;  // of a weight gradient
    static constexpr BackwardBlocks kBlocks = {kGradBlocks, kDxBlocks, (kHidden + kClusterRows - 1) / kClusterRows,
                                               (kIntermediate + kBlockN - 1) / kBlockN,
                                               (2 * kIntermediate + kClusterRows - 1) / kClusterRows, kDxBlocks};
    static_assert(takes_shape(kHidden, kIntermediate), "H and I must be multiples of 64, H 256 at least");
};

// Tiles that TMA moves. "tile": 64 x 64 of a pool; "rows": 128 x 64 of weights, K-major; "columns": 64 x 64, for MN-major B.
struct BackwardMaps {
    cute::TmaDescriptor x_tile, dy_tile, dz_tile, activation_tile;
    cute::TmaDescriptor w13_rows, w13_columns, w2_columns;
    cute::TmaDescriptor x_columns, activation_columns;
    cute::TmaDescriptor z_tile;  // kept by the forward
};

using GateUpLoop = MainLoop<Major::K, Major::K, kBlockN>;
template <typename Config>
using DaLoop = MainLoop<Major::K, Major::MN, Config::kGradColumns>;
using DxLoop = MainLoop<Major::K, Major::MN, kBlockN>;
using WeightLoop = MainLoop<Major::MN, Major::MN, kBlockN>;
using BackwardOrder = WaveOrder<kBackwardPhases, kBackwardMaxLag>;
static_assert(sizeof(BackwardOrder) <= sizeof(SharedMap::order), "The order must fit its place in shared memory");

// --- Producer -----------------------------------------------------------------------------------------------------

template <typename Config>
struct BackwardProducer {
    const LaunchParams& launch;
    const BackwardMaps& maps;
    Producer& producer;
    TaskClaims& claims;

    __device__ __forceinline__ void gradient_inputs(const CtaTask& own) {
        constexpr uint32_t kDepth = Config::kHiddenDepth;
        const uint32_t row = own.pool_block * kBlockM, column = own.n_block * Config::kGradColumns;
        const bool splits_n = own.splits_n, with_b = not splits_n or own.rows > 0;
        wait_counter(launch, Counters{launch}.rows_dispatched(own.pool_block), kBlockM, kFaultDispatchRows);
        ptx::fence_proxy_async();
        if constexpr (not Config::kKeptZ) {
            for (uint32_t k_block = 0; k_block < kDepth; ++k_block, producer.advance()) {
                Barrier& full = producer.acquire(kBytesA + (with_b ? kBytesB : 0));
                producer.load_a(&maps.x_tile, full, k_block * kBlockK, row, splits_n);
                if (with_b) producer.load_b(&maps.w13_rows, full, k_block * kBlockK, column, column + Config::kIntermediate, own.expert, splits_n);
            }
        }
        for (uint32_t k_block = 0; k_block < kDepth; ++k_block, producer.advance()) {
            claims.tick(kDepth - k_block);
            Barrier& full = producer.acquire(kBytesA + (with_b ? Config::kParts * kAtomBytes : 0));
            producer.load_a(&maps.dy_tile, full, k_block * kBlockK, row, splits_n);
            if (with_b) producer.load_b_transposed<Config::kParts>(&maps.w2_columns, full, column, k_block * kBlockK, own.expert, splits_n);
        }
        if constexpr (Config::kKeptZ) {
            for (uint32_t part = 0; part < Config::kParts; ++part, producer.advance()) {
                Barrier& full = producer.acquire(own.rows > 0 ? 2 * kBlockM * kSwizzleBytes : 0);
                for (uint32_t half = 0; own.rows > 0 and half < 2; ++half)
                    producer.load_part(&maps.z_tile, full, half, column + part * kAtom + half * Config::kIntermediate, row);
            }
        }
    }

    __device__ __forceinline__ void dx_inputs(const CtaTask& own) {
        const bool splits_n = own.splits_n, with_b = not splits_n or own.rows > 0;
        wait_counter(launch, Counters{launch}.tiles_done(own.pool_block), Config::kGradBlocks, kFaultActivationRows);
        ptx::fence_proxy_async();
        for (uint32_t k_block = 0; k_block < Config::kDzDepth; ++k_block, producer.advance()) {
            claims.tick(Config::kDzDepth - k_block);
            Barrier& full = producer.acquire(kBytesA + (with_b ? kBytesB : 0));
            producer.load_a(&maps.dz_tile, full, k_block * kBlockK, own.pool_block * kBlockM, splits_n);
            if (with_b) producer.load_b_transposed<kBlockN / kAtom>(&maps.w13_columns, full, own.n_block * kBlockN, k_block * kBlockK, own.expert, splits_n);
        }
    }

    __device__ __forceinline__ void weight_inputs(const CtaTask& own, const cute::TmaDescriptor* a_map, const cute::TmaDescriptor* b_map) {
        const uint32_t blocks = ceil_div(own.rows, kBlockM), depth = ceil_div(own.rows, kBlockK);
        wait_counter(launch, Counters{launch}.expert_done(own.expert), blocks * Config::kGradBlocks, kFaultActivationRows);
        ptx::fence_proxy_async();
        for (uint32_t k_block = 0; k_block < depth; ++k_block, producer.advance()) {
            claims.tick(depth - k_block);
            const uint32_t row = own.pool_block * kBlockM + k_block * kBlockK;
            Barrier& full = producer.acquire(kBytesA + kBytesB);
            producer.load_a_transposed(a_map, full, own.m_block * kBlockM, row);
            producer.load_b_transposed<kBlockN / kAtom>(b_map, full, own.n_block * kBlockN, row, 0, false);
        }
    }
};

template <typename Config>
__device__ __forceinline__ void produce(const BackwardParams& params, BackwardOrder& order, const BackwardMaps& maps) {
    const LaunchParams& launch = params.launch;
    shape_backward(order.shapes, Config::kBlocks, params.dw[0].data != nullptr, params.dw[1].data != nullptr);
    order.init(group_rows(launch.comm), launch.problem.min_wave_tasks);
    const uint32_t cta_in_cluster = cute::block_rank_in_cluster();
    Producer producer{cta_in_cluster};
    TaskClaims claims{Counters{launch}.next_task(), cta_in_cluster};
    BackwardProducer<Config> inputs{launch, maps, producer, claims};
    TaskWriter writer;
    Task task;
    while (order.seek(claims.take(), task)) {
        CtaTask own = cta_task(task, task.phase <= kDx, order.shapes[task.phase].n_blocks, cta_in_cluster);
        own.pushes_over = order.passed(kDx);
        own.first_stage = producer.stage.index;
        writer.put(own);
        if (own.phase == kGrad) inputs.gradient_inputs(own);
        else if (own.phase == kDx) inputs.dx_inputs(own);
        else if (own.phase == kDw2) inputs.weight_inputs(own, &maps.dy_tile, &maps.activation_columns);
        else inputs.weight_inputs(own, &maps.dz_tile, &maps.x_columns);
    }
    writer.put({kNoMoreTasks});
    producer.drain();
}

// --- Store --------------------------------------------------------------------------------------------------------

static_assert(kTilesPerPart == 3, "dgate, dup, w*a");

// Where the tiles of a kGrad task lie that begins at ring stage `first_stage`: in its last stages, those of z if it was kept.
template <typename Config>
__device__ __forceinline__ OutputStages gradient_stages(uint32_t first_stage) {
    return held_stages<Config::kParts>(first_stage + Config::kHiddenDepth + Config::kZStages);
}

template <typename Config>
__device__ __forceinline__ void store_gradients(const LaunchParams& launch, const BackwardMaps& maps) {
    TaskReader reader;
    uint32_t uses = 0;
    for (; reader.next(); reader.done()) {
        const CtaTask& task = reader.task();
        if (task.phase != kGrad or task.rows == 0) continue;
        store_parts<Config::kParts>(gradient_stages<Config>(task.first_stage), uses, [&](uint32_t part, uint32_t output, uint32_t wg, const uint8_t* shared) {
            const uint32_t column = task.n_block * Config::kGradColumns + part * kAtom;
            if (in_range<Config::kIntermediate, Config::kGradColumns>(column))
                cute::SM90_TMA_STORE_2D::copy(output < 2 ? &maps.dz_tile : &maps.activation_tile, shared,
                                              column + (output == 1 ? Config::kIntermediate : 0),
                                              task.pool_block * kBlockM + wg * kRowsPerWarpgroup);
        });
        ptx::fence_proxy_async();
        ptx::add_release_gpu(Counters{launch}.tiles_done(task.pool_block), 1);
        ptx::add_release_gpu(Counters{launch}.expert_done(task.expert), 1);
    }
}

// --- Math ---------------------------------------------------------------------------------------------------------

// This thread's two rows of the warp: lane / 4 and lane / 4 + 8.
constexpr uint32_t kLowerRow = 8;

// This thread's gate and up of 64 columns (a part) of a kGrad tile, by pair of columns: pair 2g + l is columns
// 8g + 2 (lane % 4) + {0, 1} of its upper (l = 0) or lower row.
constexpr uint32_t kPairsPerPart = kGroupsPerTile * 2;

struct RecomputedZ {
    const float (&z)[GateUpLoop::kAccumulators];
    uint32_t part = 0;
    static constexpr uint32_t kUp = GateUpLoop::kAccumulators / 2;

    __device__ __forceinline__ void open(OutputStages stages, uint32_t next) {
        part = next;
        if (part == 0) stages.begin();
    }
    __device__ __forceinline__ float exact_gate(uint32_t pair, uint32_t odd) const { return z[(part * kPairsPerPart + pair) * 2 + odd]; }
    __device__ __forceinline__ float exact_up(uint32_t pair, uint32_t odd) const { return z[kUp + (part * kPairsPerPart + pair) * 2 + odd]; }
    __device__ __forceinline__ uint32_t gate(uint32_t pair) const { return ptx::pack_bf16(exact_gate(pair, 0), exact_gate(pair, 1)); }
    __device__ __forceinline__ uint32_t up(uint32_t pair) const { return ptx::pack_bf16(exact_up(pair, 0), exact_up(pair, 1)); }
};

// Read from the stages that the producer filled behind da', whose place dgate and dup then take.
struct KeptZ {
    Stage& stage;
    const OutputWriter& output;
    uint32_t rows;
    uint32_t gates[kPairsPerPart], ups[kPairsPerPart];

    __device__ __forceinline__ void open(OutputStages stages, uint32_t part) {
        OperandRing::full(stage.index).wait(stage.phase);
        stage.advance();
        read(ptx::shared_address(stages.tile(part, 0, output.warpgroup)), gates);
        read(ptx::shared_address(stages.tile(part, 1, output.warpgroup)), ups);
        __syncwarp();  // all have read before any writes there
    }
    __device__ __forceinline__ uint32_t gate(uint32_t pair) const { return gates[pair]; }
    __device__ __forceinline__ uint32_t up(uint32_t pair) const { return ups[pair]; }
    __device__ __forceinline__ float exact_gate(uint32_t pair, uint32_t odd) const { return odd ? ptx::bf16_high(gates[pair]) : ptx::bf16_low(gates[pair]); }
    __device__ __forceinline__ float exact_up(uint32_t pair, uint32_t odd) const { return odd ? ptx::bf16_high(ups[pair]) : ptx::bf16_low(ups[pair]); }

private:
    // Rows from `rows` on were never written by the forward: zero, as if recomputed from zero rows.
    __device__ __forceinline__ void read(uint32_t tile, uint32_t (&values)[kPairsPerPart]) const {
        const uint32_t lane = output.lane, first = output.warpgroup * kRowsPerWarpgroup + output.warp_row + lane / 4;
        #pragma unroll
        for (uint32_t group = 0; group < kGroupsPerTile; group += 2)
            ptx::ldmatrix_x4(chunk_address(tile, output.warp_row + lane % 16, group + lane / 16), values[group * 2], values[group * 2 + 1],
                             values[group * 2 + 2], values[group * 2 + 3]);
        #pragma unroll
        for (uint32_t pair = 0; pair < kPairsPerPart; ++pair)
            if (first + pair % 2 * kLowerRow >= rows) values[pair] = 0;
    }
};

// Waits for da' and takes SwiGLU's backward over the tile in registers, 64 columns at a time, each handed to the store warp
// when it is ready. The row sums of da' a over the tile's columns are this tile's part of dtopk.
template <typename Config, typename Z, uint32_t kCount, typename Finish>
__device__ __forceinline__ void gradient_epilogue(const BackwardParams& params, const CtaTask& task, const OutputWriter& output, OutputStages stages,
                                                  Z&& z, float (&da)[kCount], const Finish& finish) {
    // Read while the last block of the product is under way, and not before: the main loops have no registers to spare.
    const uint32_t lane = output.lane, block_row = output.warpgroup * kRowsPerWarpgroup + output.warp_row;
    const uint64_t pool_row = static_cast<uint64_t>(task.pool_block) * kBlockM + block_row;
    const float limit = params.launch.problem.clamp;
    float weights[2], dtopk[2] = {0.0f, 0.0f};
    #pragma unroll
    for (uint32_t lower = 0; lower < 2; ++lower) {
        const uint32_t row = lane / 4 + lower * kLowerRow;
        weights[lower] = block_row + row < task.rows ? ptx::load_fresh_float(params.weights + pool_row + row) : 0.0f;
    }
    finish();
    #pragma unroll
    for (uint32_t part = 0; part < Config::kParts; ++part) {
        z.open(stages, part);
        uint32_t dgate[kPairsPerPart], dup[kPairsPerPart], weighted[kPairsPerPart];
        #pragma unroll
        for (uint32_t pair = 0; pair < kPairsPerPart; ++pair) {
            const uint32_t lower = pair % 2, g = z.gate(pair), u = z.up(pair);
            const float* grad = da + (part * kPairsPerPart + pair) * 2;
            const SwigluGrads even = swiglu_backward<Config::kClamped>(ptx::bf16_low(g), ptx::bf16_low(u), z.exact_gate(pair, 0), z.exact_up(pair, 0),
                                                                       grad[0], weights[lower], limit, dtopk[lower]);
            const SwigluGrads odd = swiglu_backward<Config::kClamped>(ptx::bf16_high(g), ptx::bf16_high(u), z.exact_gate(pair, 1), z.exact_up(pair, 1),
                                                                      grad[1], weights[lower], limit, dtopk[lower]);
            dgate[pair] = ptx::pack_bf16(even.dgate, odd.dgate);
            dup[pair] = ptx::pack_bf16(even.dup, odd.dup);
            weighted[pair] = ptx::pack_bf16(even.weighted, odd.weighted);
        }
        if (part + 1 == Config::kParts) {
            #pragma unroll
            for (uint32_t lower = 0; lower < 2; ++lower) {
                dtopk[lower] += __shfl_xor_sync(0xffffffff, dtopk[lower], 1);
                dtopk[lower] += __shfl_xor_sync(0xffffffff, dtopk[lower], 2);
                if (lane % 4 == 0)
                    params.dtopk_parts[(pool_row + lane / 4 + lower * kLowerRow) * Config::kGradBlocks + task.n_block] = dtopk[lower];
            }
        }
        const auto put = [&](uint32_t index, const uint32_t (&values)[kPairsPerPart]) {
            output.write_tile(ptx::shared_address(stages.tile(part, index, output.warpgroup)),
                              [&](uint32_t group, uint32_t lower) { return values[group * 2 + lower]; });
        };
        put(0, dgate);
        put(1, dup);
        put(2, weighted);
        stages.announce(part, output.warpgroup);
    }
}

// One thread's accumulators of a 64 x 256 tile of a weight gradient, fp32: overwritten or added to.
__device__ __forceinline__ void store_weight_fp32(const float (&acc)[WeightLoop::kAccumulators], const WeightGradient& out,
                                                  uint64_t element, uint32_t columns, uint32_t lane) {
    auto base = reinterpret_cast<float*>(out.data) + element + (lane / 4) * out.row_stride + lane % 4 * 2;
    #pragma unroll
    for (uint32_t group = 0; group < kBlockN / 8; ++group) {
        if (group * 8 >= columns) continue;
        #pragma unroll
        for (uint32_t lower = 0; lower < 2; ++lower) {
            float* to = base + lower * kLowerRow * out.row_stride + group * 8;
            const float x = acc[group * 4 + lower * 2], y = acc[group * 4 + lower * 2 + 1];
            if (out.accumulate) ptx::add_float2(to, x, y);  // the only writer of this element: no order to be decided
            else ptx::store_float2(to, x, y);
        }
    }
}

// This warp's part of a tile of a weight gradient.
struct WeightTile {
    uint64_t element;  // its first
    uint32_t columns;  // that exist, 0 if its rows don't
};

template <typename Config>
__device__ __forceinline__ WeightTile weight_tile(const WeightGradient& out, const CtaTask& task, const OutputWriter& output) {
    const bool is_dw2 = task.phase == kDw2;
    const uint32_t all_rows = is_dw2 ? Config::kHidden : 2 * Config::kIntermediate;
    const uint32_t all_columns = is_dw2 ? Config::kIntermediate : Config::kHidden;
    const uint32_t row = task.m_block * kBlockM + output.warpgroup * kRowsPerWarpgroup + output.warp_row;
    const uint32_t column = task.n_block * kBlockN;
    return {task.expert * out.expert_stride + row * out.row_stride + column, row < all_rows ? min(kBlockN, all_columns - column) : 0};
}

__device__ __forceinline__ void store_weight(const float (&acc)[WeightLoop::kAccumulators], const WeightGradient& out, const WeightTile& tile,
                                             const OutputWriter& output) {
    if (out.is_fp32) {
        store_weight_fp32(acc, out, tile.element, tile.columns, output.lane);
    } else {
        const uint64_t address = reinterpret_cast<uint64_t>(out.data) + (tile.element + (output.lane % kRowsPerWarp) * out.row_stride) * sizeof(Bf16);
        output.store_rows<kBlockN>(acc, address, tile.columns);
    }
}

// The gradient of an expert without rows. A path of its own: zeroed accumulators that meet those of a product at a branch
// would make ptxas serialise every product of the kernel.
__device__ __forceinline__ void store_no_weight(const WeightGradient& out, const WeightTile& tile, uint32_t lane) {
    if (out.accumulate) return;
    const uint32_t size = out.is_fp32 ? sizeof(float) : sizeof(Bf16);
    #pragma unroll 1
    for (uint32_t row = 0; row < kRowsPerWarp; ++row)
        for (uint32_t offset = lane * kChunkBytes; offset < tile.columns * size; offset += kWarpSize * kChunkBytes)
            ptx::store_global(out.data + (tile.element + row * out.row_stride) * size + offset, make_uint4(0, 0, 0, 0));
}

// The owner of this lane's row (lane < 16) of a kDx task: where its dx goes; also returns dtopk, once per row.
template <typename Config>
__device__ __forceinline__ uint64_t dx_slot(const BackwardParams& params, const CtaTask& task, uint64_t pool_row, bool valid) {
    if (not valid) return 0;
    const uint2 origin = ptx::load_fresh(params.launch.origins + pool_row);
    if (task.n_block == 0) {
        float sum = 0.0f;
        for (uint32_t part = 0; part < Config::kGradBlocks; ++part)
            sum += ptx::load_fresh_float(params.dtopk_parts + pool_row * Config::kGradBlocks + part);
        params.launch.comm.peer<float>(origin.x, params.launch.comm.at.dtopk_slots)[origin.y] = sum;
    }
    return params.launch.comm.peers[origin.x] + params.launch.comm.at.slots + static_cast<uint64_t>(origin.y) * Config::kHiddenBytes
           + task.n_block * kBlockN * sizeof(Bf16);
}

template <typename Config>
__device__ __forceinline__ void compute(const BackwardParams& params, uint32_t warp, uint32_t lane) {
    const uint32_t warpgroup = warp / 4;
    const uint32_t warp_row = warp % 4 * kRowsPerWarp;
    OutputWriter output{warpgroup, warp_row, lane};
    TaskReader reader;
    Tracer<Config::kTrace> tracer{params.launch.trace, blockIdx.x * kMathWarpgroups + warpgroup, warp % 4 == 0 and lane == 0};
    PushAnnouncer pushes{params.launch, warpgroup};
    Stage stage;
    for (tracer.mark(0); reader.next(); reader.done(), tracer.mark(0)) {
        const CtaTask& task = reader.task();
        if (task.pushes_over) pushes.reached(params.launch.problem.num_rounds);
        const bool by_rows = task.phase <= kDx;
        if (by_rows and task.rows == 0) {
            skip_operands(stage, task.phase == kGrad ? Config::kZStages + Config::kHiddenDepth : Config::kDzDepth, lane);
            continue;
        }
        // Once the first operands are here, the producer has acquired what this task reads, and so may these threads.
        if (task.rows > 0) OperandRing::full(stage.index).wait(stage.phase);
        tracer.mark(1);
        const uint32_t block_row = warpgroup * kRowsPerWarpgroup + warp_row;
        const uint64_t pool_row = static_cast<uint64_t>(task.pool_block) * kBlockM + block_row;
        if (task.phase == kGrad) {
            float da[DaLoop<Config>::kAccumulators];
            if constexpr (Config::kKeptZ) {
                const uint32_t last = DaLoop<Config>::start(stage, Config::kHiddenDepth, warpgroup, lane, da);
                gradient_epilogue<Config>(params, task, output, OutputStages{stage.index}, KeptZ{stage, output, task.rows}, da, [&] {
                    DaLoop<Config>::finish(da);
                    OperandRing::release(last, lane);
                    tracer.mark(2);
                });
            } else {
                // One pipeline: da' starts while the last block of z is still under way. Its last stages are not released.
                float z[GateUpLoop::kAccumulators];
                const uint32_t last = GateUpLoop::start(stage, Config::kHiddenDepth, warpgroup, lane, z);
                DaLoop<Config>::template start<Config::kParts>(stage, Config::kHiddenDepth, warpgroup, lane, da, last);
                fence_accumulators(z);
                gradient_epilogue<Config>(params, task, output, held_stages<Config::kParts>(stage.index), RecomputedZ{z}, da, [&] {
                    DaLoop<Config>::finish(da);
                    tracer.mark(2);
                });
            }
        } else if (task.phase == kDx) {
            const uint32_t row = lane % kRowsPerWarp;
            const bool valid = lane < kRowsPerWarp and block_row + row < task.rows and not aborted(params.launch);
            const uint64_t slot = dx_slot<Config>(params, task, pool_row + row, valid);
            float acc[DxLoop::kAccumulators];
            DxLoop::run(stage, Config::kDzDepth, warpgroup, lane, acc);
            tracer.mark(2);
            output.store_rows<kBlockN>(acc, slot, columns_left<Config::kHidden>(task.n_block));
        } else {
            const WeightGradient& out = params.dw[task.phase - kDw2];
            if (task.rows == 0) {
                store_no_weight(out, weight_tile<Config>(out, task, output), lane);
                continue;
            }
            float acc[WeightLoop::kAccumulators];
            WeightLoop::run(stage, ceil_div(task.rows, kBlockK), warpgroup, lane, acc);
            tracer.mark(2);
            store_weight(acc, out, weight_tile<Config>(out, task, output), output);
        }
        tracer.finish(task.phase, warpgroup, task.expert, task.pool_block);
    }
    pushes.reached(params.launch.problem.num_rounds);
}

// --- Kernel -------------------------------------------------------------------------------------------------------

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1)
backward_sm90_bf16(const __grid_constant__ BackwardParams params, const __grid_constant__ BackwardMaps maps) {
    const uint32_t warp = __shfl_sync(0xffffffff, threadIdx.x / kWarpSize, 0);
    const uint32_t lane = threadIdx.x % kWarpSize;
    begin_exchange(params.launch, nullptr);
    const DispatchPools pools = {params.pool_x, params.pool_dy, params.weights};
    Finisher<Config::kHidden, false, Config::kCombineUnroll> finisher{params.launch, params.dx, params.dtopk, lane,
                                                                      blockIdx.x == 0 and warp == kFirstDispatchWarp};

    if (warp < kMathWarps) {
        cutlass::arch::warpgroup_reg_alloc<Config::kMathRegisters>();
        dispatch_head<true, Config::kInFlight, Config::kHiddenBytes>(params.launch, pools, group_rows(params.launch.comm), blockIdx.x * kMathWarps + warp, lane);
        compute<Config>(params, warp, lane);
        finisher.finish();
    } else {
        cutlass::arch::warpgroup_reg_dealloc<Config::kAuxRegisters>();
        if (warp == kProducerWarp) {
            if (lane == 0) produce<Config>(params, *reinterpret_cast<BackwardOrder*>(shared_map().order), maps);
        } else if (warp == kStoreWarp) {
            if (lane == 0) store_gradients<Config>(params.launch, maps);
        } else {
            const uint32_t index = blockIdx.x * kDispatchWarps + warp - kFirstDispatchWarp;
            dispatch_rows<true, Config::kInFlight, Config::kHiddenBytes>(params.launch, pools, group_rows(params.launch.comm), gridDim.x * kMathWarps, index,
                                                                           gridDim.x * kDispatchWarps, lane, [&] { return finisher.step(); });
            finisher.finish();
        }
        __syncwarp();
    }
    cute::cluster_arrive();
    cute::cluster_wait();
}

}  // namespace prime_kernels
