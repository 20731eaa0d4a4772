// Shared-memory operand tiles, the ring between the TMA producer and the math warpgroups, and the main loops it feeds.
// Tiles lie as TMA writes them and WGMMA reads them: 128-byte swizzled rows, K-major or MN-major.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <deep_gemm/common/math.cuh>
#include <deep_gemm/mma/sm90.cuh>
#include <deep_gemm/ptx/wgmma.cuh>

#include <prime_kernels/order.h>
#include <prime_kernels/ptx.cuh>

namespace prime_kernels {

using Barrier = cutlass::arch::ClusterTransactionBarrier;
using Bf16 = cutlass::bfloat16_t;
using Major = cute::UMMA::Major;

constexpr uint32_t kSwizzleBytes = 128;
constexpr uint32_t kBlockN = 256;
constexpr uint32_t kAtom = kSwizzleBytes / sizeof(Bf16);  // elements of a swizzled row
constexpr uint32_t kBlockK = kAtom;
constexpr uint32_t kStages = 4;
constexpr uint32_t kWarpSize = 32;
constexpr uint32_t kWarpgroup = 128;
constexpr uint32_t kMathWarpgroups = 2;
constexpr uint32_t kMathThreads = kMathWarpgroups * kWarpgroup;
constexpr uint32_t kMathWarps = kMathThreads / kWarpSize;
constexpr uint32_t kRowsPerWarpgroup = kBlockM / kMathWarpgroups;
constexpr uint32_t kRowsPerWarp = 16;

constexpr uint32_t kBytesA = kBlockM * kBlockK * sizeof(Bf16);
constexpr uint32_t kBytesB = kBlockN * kBlockK * sizeof(Bf16);
constexpr uint32_t kAtomBytes = kAtom * kBlockK * sizeof(Bf16);  // one 64 x 64 piece: what a TMA box moves at most

// What both kernels take. Tiles at the edge of a matrix hold less: the copy engine reads zeros beyond it, and what would be
// written there is left out, 64 columns (or rows) at a time.
// H is at least a whole ring deep: only then does a product need a stage that the store warp gives back when it has seen the
// last tile of the task before (see OutputStages), so that no warpgroup announces a part twice before it is seen.
constexpr bool takes_shape(uint32_t hidden, uint32_t intermediate) {
    return hidden % kAtom == 0 and hidden >= kStages * kBlockK and intermediate % kAtom == 0 and intermediate > 0;
}

// Whether a 64-column piece from `column` on exists in a matrix of kColumns that is worked on in tiles of kTile.
template <uint32_t kColumns, uint32_t kTile>
__device__ __forceinline__ bool in_range(uint32_t column) { return kColumns % kTile == 0 or column < kColumns; }

// Columns of n block `n_block` that exist.
template <uint32_t kColumns>
__device__ __forceinline__ uint32_t columns_left(uint32_t n_block) {
    return kColumns % kBlockN == 0 ? kBlockN : min(kBlockN, kColumns - n_block * kBlockN);
}

struct Stage {
    uint32_t index = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        index = index + 1 == kStages ? 0 : index + 1;
        phase ^= index == 0;
    }
};

// --- Shared memory ------------------------------------------------------------------------------------------------

constexpr uint32_t kOutputSlots = 2;
constexpr uint32_t kMaxOutputs = 4;  // slots, or parts in operand stages, that a warpgroup announces
constexpr uint32_t kOutputTileBytes = kRowsPerWarpgroup * kSwizzleBytes;
constexpr uint32_t kTaskSlots = 3;
constexpr uint32_t kClaimSlots = 2;
constexpr uint32_t kMaxRowCounts = 600;  // rounds x local experts x ranks = rounds x E

struct CtaTask {
    uint32_t phase;       // kNoMoreTasks: the end
    uint32_t expert;      // group: (round, local expert)
    uint32_t rows;        // by rows: valid rows of this CTA's block, 0 if it has none; else: all rows of the expert
    uint32_t pool_block;  // by rows: this CTA's block; else: the expert's first block
    uint32_t m_block;     // not by rows: this CTA's block of the gradient's first dimension
    uint32_t n_block;
    uint32_t pushes_over; // all pushes of this CTA to other ranks lie before this task
    uint32_t splits_n;    // by rows: both CTAs of the cluster have the same block and different n blocks
    uint32_t first_stage; // of the operand ring, that this task's operands come through
};

// The map of both kernels. Everything is found from the one symbol, so that no pointers are kept in registers.
struct SharedMap {
    uint8_t a[kStages][kBytesA];
    uint8_t b[kStages][kBytesB];
    uint8_t output[kMathWarpgroups][kOutputSlots][kOutputTileBytes];
    uint32_t rows[kMaxRowCounts];  // [group][rank]
    CtaTask tasks[kTaskSlots];
    uint64_t order[30];            // the producer's walk through the order of work
    Barrier full[kStages], empty[kStages];
    Barrier task_full[kTaskSlots], task_empty[kTaskSlots];
    Barrier output_full[kMathWarpgroups][kMaxOutputs], output_empty[kMathWarpgroups][kOutputSlots];
    Barrier claim_full[kClaimSlots], claim_empty[kClaimSlots];
    uint32_t claims[kClaimSlots];
    uint32_t num_groups;           // groups to work on: 0 after a fault
    uint32_t stops[kClusterSize];  // whether each CTA of the cluster can't work
};
constexpr uint32_t kSharedBytes = 232392;  // forward/sm90_bf16.py launches with this many
static_assert(sizeof(SharedMap) == kSharedBytes, "The host must allocate what the map needs");

extern __shared__ __align__(1024) uint8_t shared_memory[];
__device__ __forceinline__ SharedMap& shared_map() { return *reinterpret_cast<SharedMap*>(shared_memory); }

// The operand ring. `full[s]`: both operands of stage s have landed (one arrival plus their bytes). `empty[s]`: every math
// warp of both CTAs of the cluster is done with stage s, since the part of B that this CTA loads is written into both.
struct OperandRing {
    __device__ __forceinline__ static Bf16* a_stage(uint32_t s) { return reinterpret_cast<Bf16*>(shared_map().a[s]); }
    __device__ __forceinline__ static Bf16* b_stage(uint32_t s) { return reinterpret_cast<Bf16*>(shared_map().b[s]); }
    __device__ __forceinline__ static Barrier& full(uint32_t s) { return shared_map().full[s]; }
    __device__ __forceinline__ static Barrier& empty(uint32_t s) { return shared_map().empty[s]; }

    __device__ __forceinline__ static void init() {
        for (uint32_t s = 0; s < kStages; ++s) {
            full(s).init(1);
            empty(s).init(kClusterSize * kMathWarps);
        }
    }
    // One lane per CTA of the cluster tells that CTA.
    __device__ __forceinline__ static void release(uint32_t s, uint32_t lane) {
        if (lane < kClusterSize) empty(s).arrive(lane);
    }
    // The same by one thread for all math warps of this CTA.
    __device__ __forceinline__ static void release_for_all(uint32_t s) {
        for (uint32_t cta = 0; cta < kClusterSize; ++cta) ptx::arrive_cluster(reinterpret_cast<uint64_t*>(&empty(s)), cta, kMathWarps);
    }
};

constexpr uint32_t kNoStage = ~0u;

// The compiler may not move reads of these registers to before this point.
template <uint32_t kCount>
__device__ __forceinline__ void fence_accumulators(float (&acc)[kCount]) {
    #pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) deep_gemm::ptx::warpgroup_fence_operand(acc[i]);
}

// acc[64, kN] of this warpgroup = A[64 rows, K] B[kN, K]^T over `k_blocks` >= 1 blocks. One k block stays in flight while
// the next is issued; its stage is released one step later. The first block is peeled, so that "overwrite" is known to the
// assembler: with a run-time choice the accumulators of every product in a kernel would count as live all the time.
template <Major kMajorA, Major kMajorB, uint32_t kN>
struct MainLoop {
    using Wgmma = typename deep_gemm::mma::sm90::BF16MMASelector<kN, kMajorA, kMajorB>::type;
    static constexpr uint32_t kAccumulators = Wgmma::kNumAccum;

    template <bool kFirst>
    __device__ __forceinline__ static void issue(uint32_t a_base, uint32_t b_base, cute::GmmaDescriptor& a_desc,
                                                 cute::GmmaDescriptor& b_desc, float (&acc)[kAccumulators]) {
        namespace sm90 = deep_gemm::mma::sm90;
        if constexpr (not kFirst) fence_accumulators(acc);
        deep_gemm::ptx::warpgroup_arrive();
        #pragma unroll
        for (uint32_t k = 0; k < kBlockK / Wgmma::K; ++k) {
            a_desc.reg32_[0] = sm90::advance_gmma_desc_lo<kMajorA, kBlockM, kBlockK, kSwizzleBytes, Bf16>(a_base, 0, k * Wgmma::K);
            b_desc.reg32_[0] = sm90::advance_gmma_desc_lo<kMajorB, kN, kBlockK, kSwizzleBytes, Bf16>(b_base, 0, k * Wgmma::K);
            if (kFirst and k == 0) Wgmma::wgmma(a_desc, b_desc, acc, false);
            else Wgmma::wgmma(a_desc, b_desc, acc, true);
        }
        deep_gemm::ptx::warpgroup_commit_batch();
        fence_accumulators(acc);
    }

    // Issues all blocks and leaves the last under way; returns its stage. `pending`: a stage of an earlier product that is
    // still under way, to be released behind this one's first block. The last `kHold` stages are not released.
    template <uint32_t kHold = 1>
    __device__ __forceinline__ static uint32_t start(Stage& stage, uint32_t k_blocks, uint32_t warpgroup, uint32_t lane,
                                                     float (&acc)[kAccumulators], uint32_t pending = kNoStage) {
        namespace sm90 = deep_gemm::mma::sm90;
        auto a_desc = sm90::make_gmma_desc<kMajorA, kBlockM, kBlockK, kSwizzleBytes>(OperandRing::a_stage(0), 0, 0);
        auto b_desc = sm90::make_gmma_desc<kMajorB, kN, kBlockK, kSwizzleBytes>(OperandRing::b_stage(0), 0, 0);
        // Both layouts keep a warpgroup's 64 rows of A together, so its part starts kRowsPerWarpgroup * kBlockK elements on.
        const uint32_t a_low = __shfl_sync(0xffffffff, a_desc.reg32_[0], 0) + warpgroup * (kRowsPerWarpgroup * kBlockK * sizeof(Bf16) / 16);
        const uint32_t b_low = __shfl_sync(0xffffffff, b_desc.reg32_[0], 0);
        OperandRing::full(stage.index).wait(stage.phase);
        issue<true>(a_low + stage.index * (kBytesA / 16), b_low + stage.index * (kBytesB / 16), a_desc, b_desc, acc);
        if (pending != kNoStage) {
            deep_gemm::ptx::warpgroup_wait<1>();
            OperandRing::release(pending, lane);
        }
        uint32_t previous = stage.index;
        stage.advance();
        #pragma unroll 1
        for (uint32_t k_block = 1; k_block < k_blocks; ++k_block) {
            OperandRing::full(stage.index).wait(stage.phase);
            issue<false>(a_low + stage.index * (kBytesA / 16), b_low + stage.index * (kBytesB / 16), a_desc, b_desc, acc);
            deep_gemm::ptx::warpgroup_wait<1>();
            // A choice of lanes, not a branch: around a branch the products would be serialised.
            OperandRing::release(previous, kHold > 1 and k_block + kHold > k_blocks ? kWarpSize : lane);
            previous = stage.index;
            stage.advance();
        }
        return previous;
    }

    // Waits for the block that `start` left under way.
    __device__ __forceinline__ static void finish(float (&acc)[kAccumulators]) {
        deep_gemm::ptx::warpgroup_wait<0>();
        fence_accumulators(acc);
    }

    __device__ __forceinline__ static void run(Stage& stage, uint32_t k_blocks, uint32_t warpgroup, uint32_t lane,
                                               float (&acc)[kAccumulators]) {
        const uint32_t last = start(stage, k_blocks, warpgroup, lane, acc);
        finish(acc);
        OperandRing::release(last, lane);
    }

    // Keeps the last `kHold` stages, those before `stage` as it is afterwards, from being filled again.
    template <uint32_t kHold>
    __device__ __forceinline__ static void run_and_hold(Stage& stage, uint32_t k_blocks, uint32_t warpgroup, uint32_t lane,
                                                        float (&acc)[kAccumulators]) {
        start<kHold>(stage, k_blocks, warpgroup, lane, acc);
        finish(acc);
    }
};

// A CTA without a row block of its own in a task still takes part in the cluster's ring.
__device__ __forceinline__ void skip_operands(Stage& stage, uint32_t k_blocks, uint32_t lane) {
    for (uint32_t k_block = 0; k_block < k_blocks; ++k_block) {
        OperandRing::full(stage.index).wait(stage.phase);
        OperandRing::release(stage.index, lane);
        stage.advance();
    }
}

// --- Producer's side ------------------------------------------------------------------------------------------------

constexpr uint64_t kCacheHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
constexpr uint16_t kBothCtas = (1u << kClusterSize) - 1;

struct Producer {
    uint32_t cta_in_cluster;
    Stage stage;

    // The next stage, empty, expecting `bytes`.
    __device__ __forceinline__ Barrier& acquire(uint32_t bytes) {
        OperandRing::empty(stage.index).wait(stage.phase ^ 1);
        OperandRing::full(stage.index).arrive_and_expect_tx(bytes);
        return OperandRing::full(stage.index);
    }
    __device__ __forceinline__ void advance() { stage.advance(); }

    // A, K-major: 128 rows from `row`, 64 columns from `column`. `shared_rows`: the cluster shares them, half from each CTA.
    __device__ __forceinline__ void load_a(const cute::TmaDescriptor* map, Barrier& full, uint32_t column, uint32_t row, bool shared_rows) const {
        auto barrier = reinterpret_cast<uint64_t*>(&full);
        Bf16* a = OperandRing::a_stage(stage.index);
        #pragma unroll
        for (uint32_t half = 0; half < kBlockM / kAtom; ++half) {
            const uint32_t first = half * kAtom;
            if (not shared_rows) cute::SM90_TMA_LOAD_2D::copy(map, barrier, kCacheHint, a + first * kBlockK, column, row + first);
            else if (half == cta_in_cluster) cute::SM90_TMA_LOAD_MULTICAST_2D::copy(map, barrier, kBothCtas, kCacheHint, a + first * kBlockK, column, row + first);
        }
    }
    // A, MN-major: 64 rows (the K of the product) from `row`, 128 columns from `column`.
    __device__ __forceinline__ void load_a_transposed(const cute::TmaDescriptor* map, Barrier& full, uint32_t column, uint32_t row) const {
        #pragma unroll
        for (uint32_t atom = 0; atom < kBlockM / kAtom; ++atom)
            cute::SM90_TMA_LOAD_2D::copy(map, reinterpret_cast<uint64_t*>(&full), kCacheHint,
                                         OperandRing::a_stage(stage.index) + atom * kAtom * kBlockK, column + atom * kAtom, row);
    }
    // B, K-major: 128 weight rows of `expert` from `rows0` and 128 from `rows1`. Both CTAs read the same B, so each loads one
    // half for both; with `own` B each loads its own.
    __device__ __forceinline__ void load_b(const cute::TmaDescriptor* map, Barrier& full, uint32_t column, uint32_t rows0, uint32_t rows1,
                                           uint32_t expert, bool own) const {
        constexpr uint32_t kHalf = kBlockN / kClusterSize;
        auto barrier = reinterpret_cast<uint64_t*>(&full);
        Bf16* b = OperandRing::b_stage(stage.index);
        #pragma unroll
        for (uint32_t half = 0; half < kClusterSize; ++half) {
            const uint32_t row = half == 0 ? rows0 : rows1;
            if (own) cute::SM90_TMA_LOAD_3D::copy(map, barrier, kCacheHint, b + half * kHalf * kBlockK, column, row, expert);
            else if (half == cta_in_cluster) cute::SM90_TMA_LOAD_MULTICAST_3D::copy(map, barrier, kBothCtas, kCacheHint, b + half * kHalf * kBlockK, column, row, expert);
        }
    }
    // B, MN-major: `kAtoms` atoms of 64 columns from `column` and 64 rows from `row`.
    template <uint32_t kAtoms>
    __device__ __forceinline__ void load_b_transposed(const cute::TmaDescriptor* map, Barrier& full, uint32_t column, uint32_t row,
                                                      uint32_t expert, bool own) const {
        auto barrier = reinterpret_cast<uint64_t*>(&full);
        Bf16* b = OperandRing::b_stage(stage.index);
        #pragma unroll
        for (uint32_t atom = 0; atom < kAtoms; ++atom) {
            Bf16* to = b + atom * kAtom * kBlockK;
            if (own) cute::SM90_TMA_LOAD_3D::copy(map, barrier, kCacheHint, to, column + atom * kAtom, row, expert);
            else if (atom % kClusterSize == cta_in_cluster) cute::SM90_TMA_LOAD_MULTICAST_3D::copy(map, barrier, kBothCtas, kCacheHint, to, column + atom * kAtom, row, expert);
        }
    }

    // 128 rows x 64 columns for this CTA alone, where a task's output tile `index` will lie (see OutputStages).
    __device__ __forceinline__ void load_part(const cute::TmaDescriptor* map, Barrier& full, uint32_t index, uint32_t column, uint32_t row) const {
        #pragma unroll
        for (uint32_t first = 0; first < kBlockM; first += kAtom)
            cute::SM90_TMA_LOAD_2D::copy(map, reinterpret_cast<uint64_t*>(&full), kCacheHint,
                                         OperandRing::b_stage(stage.index) + (index * kBlockM + first) * kAtom, column, row + first);
    }

    // Both CTAs' last reads are over before either leaves: nothing arrives at barriers of an exited CTA.
    __device__ __forceinline__ void drain() {
        for (uint32_t s = 0; s < kStages; ++s, stage.advance()) OperandRing::empty(stage.index).wait(stage.phase ^ 1);
    }
};

}  // namespace prime_kernels
