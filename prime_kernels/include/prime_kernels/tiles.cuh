// Shared-memory tiles, the pipeline between the TMA producer and the math warpgroups, and the main loop they feed.
// Both operands K-major in 128-byte swizzled rows, as TMA writes and WGMMA reads them.
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
constexpr uint32_t kBlockK = kSwizzleBytes / sizeof(Bf16);
constexpr uint32_t kStages = 4;
constexpr uint32_t kHalfN = kBlockN / kClusterSize;  // each CTA of a cluster loads this part of B for both
constexpr uint32_t kWarpSize = 32;
constexpr uint32_t kWarpgroup = 128;
constexpr uint32_t kMathWarpgroups = 2;
constexpr uint32_t kMathThreads = kMathWarpgroups * kWarpgroup;
constexpr uint32_t kMathWarps = kMathThreads / kWarpSize;
constexpr uint32_t kRowsPerWarpgroup = kBlockM / kMathWarpgroups;
constexpr uint32_t kRowsPerWarp = 16;

constexpr uint32_t kBytesA = kBlockM * kBlockK * sizeof(Bf16);
constexpr uint32_t kBytesB = kBlockN * kBlockK * sizeof(Bf16);

struct Stage {
    uint32_t index = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        index = index + 1 == kStages ? 0 : index + 1;
        phase ^= index == 0;
    }
};

// The operand ring. `full[s]`: both operands of stage s have landed (one arrival plus their bytes). `empty[s]`: every math
// warp of both CTAs of the cluster is done with stage s, since the half of B that this CTA loads is written into both.
struct OperandRing {
    uint8_t* a;
    uint8_t* b;
    Barrier* full;
    Barrier* empty;

    __device__ __forceinline__ Bf16* a_stage(uint32_t s) const { return reinterpret_cast<Bf16*>(a + s * kBytesA); }
    __device__ __forceinline__ Bf16* b_stage(uint32_t s) const { return reinterpret_cast<Bf16*>(b + s * kBytesB); }

    __device__ __forceinline__ void init() const {
        for (uint32_t s = 0; s < kStages; ++s) {
            full[s].init(1);
            empty[s].init(kClusterSize * kMathWarps);
        }
    }
    // One lane per CTA of the cluster tells that CTA.
    __device__ __forceinline__ void release(uint32_t s, uint32_t lane) const {
        if (lane < kClusterSize) empty[s].arrive(lane);
    }
};

// acc[64 x kBlockN] of this warpgroup += A[64 rows, K] B[kBlockN, K]^T. One k block stays in flight while the next is
// issued; its stage is released one step later.
struct MainLoop {
    using Wgmma = deep_gemm::mma::sm90::BF16MMASelector<kBlockN, Major::K, Major::K>::type;
    static constexpr uint32_t kAccumulators = Wgmma::kNumAccum;

    __device__ __forceinline__ static void run(const OperandRing& ring, Stage& stage, uint32_t k_blocks, uint32_t warpgroup,
                                               uint32_t lane, float (&acc)[kAccumulators]) {
        namespace sm90 = deep_gemm::mma::sm90;
        auto a_desc = sm90::make_gmma_desc<Major::K, kBlockM, kBlockK, kSwizzleBytes>(ring.a_stage(0), warpgroup * kRowsPerWarpgroup, 0);
        auto b_desc = sm90::make_gmma_desc<Major::K, kBlockN, kBlockK, kSwizzleBytes>(ring.b_stage(0), 0, 0);
        const uint32_t a_low = __shfl_sync(0xffffffff, a_desc.reg32_[0], 0);
        const uint32_t b_low = __shfl_sync(0xffffffff, b_desc.reg32_[0], 0);
        uint32_t previous = 0;
        for (uint32_t k_block = 0; k_block < k_blocks; ++k_block) {
            ring.full[stage.index].wait(stage.phase);
            const uint32_t a_base = a_low + stage.index * (kBytesA / 16);
            const uint32_t b_base = b_low + stage.index * (kBytesB / 16);
            #pragma unroll
            for (uint32_t i = 0; i < kAccumulators; ++i) deep_gemm::ptx::warpgroup_fence_operand(acc[i]);
            deep_gemm::ptx::warpgroup_arrive();
            #pragma unroll
            for (uint32_t k = 0; k < kBlockK / Wgmma::K; ++k) {
                a_desc.reg32_[0] = sm90::advance_gmma_desc_lo<Major::K, kBlockM, kBlockK, kSwizzleBytes, Bf16>(a_base, 0, k * Wgmma::K);
                b_desc.reg32_[0] = sm90::advance_gmma_desc_lo<Major::K, kBlockN, kBlockK, kSwizzleBytes, Bf16>(b_base, 0, k * Wgmma::K);
                Wgmma::wgmma(a_desc, b_desc, acc, k_block > 0 or k > 0);
            }
            deep_gemm::ptx::warpgroup_commit_batch();
            #pragma unroll
            for (uint32_t i = 0; i < kAccumulators; ++i) deep_gemm::ptx::warpgroup_fence_operand(acc[i]);
            if (k_block > 0) {
                deep_gemm::ptx::warpgroup_wait<1>();
                ring.release(previous, lane);
            }
            previous = stage.index;
            stage.advance();
        }
        deep_gemm::ptx::warpgroup_wait<0>();
        #pragma unroll
        for (uint32_t i = 0; i < kAccumulators; ++i) deep_gemm::ptx::warpgroup_fence_operand(acc[i]);
        ring.release(previous, lane);
    }

    // A CTA without a row block of its own still takes part in the cluster's ring.
    __device__ __forceinline__ static void skip(const OperandRing& ring, Stage& stage, uint32_t k_blocks, uint32_t lane) {
        for (uint32_t k_block = 0; k_block < k_blocks; ++k_block) {
            ring.full[stage.index].wait(stage.phase);
            ring.release(stage.index, lane);
            stage.advance();
        }
    }
};

// A 64-row, 128-column bf16 tile of one warpgroup as two 64-column halves of 128-byte swizzled rows (what a TMA box of
// 64 x 64 reads). Column groups are 8 wide, as WGMMA hands them out: values[4g .. 4g+3] of a thread are columns
// 8g + 2 (lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8.
constexpr uint32_t kOutputColumns = 128;
constexpr uint32_t kOutputHalfBytes = kRowsPerWarpgroup * kSwizzleBytes;
constexpr uint32_t kOutputTileBytes = kOutputColumns * sizeof(Bf16) * kRowsPerWarpgroup;

__device__ __forceinline__ uint32_t output_chunk_address(uint32_t tile, uint32_t row, uint32_t chunk) {
    constexpr uint32_t kChunksPerRow = kSwizzleBytes / 16;
    return tile + (chunk / kChunksPerRow) * kOutputHalfBytes + row * kSwizzleBytes + ((chunk % kChunksPerRow) ^ (row % 8)) * 16;
}

// Packed bf16 pairs of two neighbouring column groups (`group`, `group` + 1) of this warp's 16 rows.
__device__ __forceinline__ void store_output_groups(uint32_t tile, uint32_t warp_row, uint32_t group, uint32_t lane,
                                                    uint32_t top0, uint32_t bottom0, uint32_t top1, uint32_t bottom1) {
    const uint32_t row = warp_row + lane % 16;
    ptx::stmatrix_x4(output_chunk_address(tile, row, group + lane / 16), top0, bottom0, top1, bottom1);
}

}  // namespace prime_kernels
