// From accumulators to memory. Each warpgroup owns two 64 x 64 bf16 tiles of shared memory. Tiles for the pools go through
// the store warp and TMA; rows for other ranks are read back in 16-byte pieces and stored by the warp itself.
//
// Column groups are 8 wide, as WGMMA hands them out: acc[4g .. 4g+3] of a thread are columns 8g + 2 (lane % 4) + {0, 1} of
// rows lane / 4 and lane / 4 + 8 of its warp.
#pragma once

#include <prime_kernels/tasks.cuh>

namespace prime_kernels {

constexpr uint32_t kGroupsPerTile = kAtom / 8;
constexpr uint32_t kChunkBytes = 16;
constexpr uint32_t kChunksPerTileRow = kSwizzleBytes / kChunkBytes;

// output_full[warpgroup][slot]: written by the warpgroup; output_empty: read by the store.
__device__ __forceinline__ void init_output_tiles() {
    for (uint32_t wg = 0; wg < kMathWarpgroups; ++wg)
        for (uint32_t slot = 0; slot < kMaxOutputs; ++slot) {
            shared_map().output_full[wg][slot].init(kWarpgroup);
            if (slot < kOutputSlots) shared_map().output_empty[wg][slot].init(1);
        }
}

__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, uint32_t row, uint32_t chunk) {
    return tile + row * kSwizzleBytes + ((chunk % kChunksPerTileRow) ^ (row % 8)) * kChunkBytes;
}

// One warpgroup's side of its output tiles. A tile is used in turn; use `n` of the warpgroup goes to slot n % kOutputSlots.
struct OutputWriter {
    uint32_t warpgroup;
    uint32_t warp_row;  // first row of this warp in the warpgroup's tile
    uint32_t lane;
    uint32_t uses = 0;

    __device__ __forceinline__ uint32_t address(uint32_t slot) const { return ptx::shared_address(shared_map().output[warpgroup][slot]); }
    __device__ __forceinline__ void wait_free(uint32_t use) const {
        shared_map().output_empty[warpgroup][use % kOutputSlots].wait(use / kOutputSlots % 2 ^ 1);
    }

    // A 64 x 64 tile; `packed(group, half_rows)` gives the bf16 pair of the upper (0) or lower (1) row.
    template <typename PackedPair>
    __device__ __forceinline__ void write_tile(uint32_t tile, const PackedPair& packed) const {
        #pragma unroll
        for (uint32_t group = 0; group < kGroupsPerTile; group += 2)
            put_groups(tile, group, packed(group, 0), packed(group, 1), packed(group + 1, 0), packed(group + 1, 1));
    }

    // A tile for the store warp.
    template <typename PackedPair>
    __device__ __forceinline__ void put_tile(const PackedPair& packed) {
        wait_free(uses);
        write_tile(address(uses % kOutputSlots), packed);
        ptx::fence_proxy_async();  // before the copy engine reads it
        shared_map().output_full[warpgroup][uses % kOutputSlots].arrive();
        ++uses;
    }

    __device__ __forceinline__ void put_groups(uint32_t tile, uint32_t group, uint32_t top0, uint32_t bottom0, uint32_t top1, uint32_t bottom1) const {
        ptx::stmatrix_x4(chunk_address(tile, warp_row + lane % 16, group + lane / 16), top0, bottom0, top1, bottom1);
    }

    // kColumns columns of this warp's 16 rows as bf16, in 16-byte pieces. `row_address` of lane l < 16 is where row l goes,
    // 0: nowhere. Columns from `valid_columns` on are left out.
    template <uint32_t kColumns>
    __device__ __forceinline__ void store_rows(const float* acc, uint64_t row_address, uint32_t valid_columns) const {
        constexpr uint32_t kTiles = kOutputSlots;
        constexpr uint32_t kPassColumns = kTiles * kAtom;
        constexpr uint32_t kChunks = kTiles * kChunksPerTileRow;
        constexpr uint32_t kRowsPerPass = kWarpSize / kChunks;
        static_assert(kColumns % kPassColumns == 0, "Rows are stored in whole pairs of tiles");
        wait_free(uses);
        wait_free(uses + 1);
        const uint32_t base = address(0);
        #pragma unroll
        for (uint32_t first = 0; first < kColumns; first += kPassColumns) {
            #pragma unroll
            for (uint32_t group = 0; group < kPassColumns / 8; group += 2) {
                const float* a = acc + (first / 8 + group) * 4;
                put_groups(base + group / kGroupsPerTile * kOutputTileBytes, group % kGroupsPerTile, ptx::pack_bf16(a[0], a[1]),
                           ptx::pack_bf16(a[2], a[3]), ptx::pack_bf16(a[4], a[5]), ptx::pack_bf16(a[6], a[7]));
            }
            __syncwarp();
            const uint32_t chunk = lane % kChunks;
            const bool in_range = first + chunk * (kChunkBytes / sizeof(Bf16)) < valid_columns;
            #pragma unroll
            for (uint32_t pass = 0; pass < kRowsPerWarp / kRowsPerPass; ++pass) {
                const uint32_t row = pass * kRowsPerPass + lane / kChunks;
                const uint64_t to = __shfl_sync(0xffffffff, row_address, row);
                const uint4 piece = ptx::load_shared(chunk_address(base + chunk / kChunksPerTileRow * kOutputTileBytes, warp_row + row, chunk));
                if (to != 0 and in_range)
                    ptx::store_global(reinterpret_cast<uint8_t*>(to) + first * sizeof(Bf16) + chunk * kChunkBytes, piece);
            }
            __syncwarp();
        }
    }
};

// The store warp's elected lane: `kTiles` tiles per warpgroup and task, `store(tile, warpgroup, shared)` issues one. Returns
// when all of them are written.
template <uint32_t kTiles, typename StoreTile>
__device__ __forceinline__ void store_tiles(uint32_t& uses, const StoreTile& store) {
    SharedMap& map = shared_map();
    Barrier* previous = nullptr;
    #pragma unroll 1
    for (uint32_t tile = 0; tile < kTiles; ++tile) {
        #pragma unroll 1
        for (uint32_t wg = 0; wg < kMathWarpgroups; ++wg) {
            const uint32_t use = uses + tile, slot = use % kOutputSlots;
            map.output_full[wg][slot].wait(use / kOutputSlots % 2);
            store(tile, wg, map.output[wg][slot]);
            cute::tma_store_arrive();
            if (previous != nullptr) {
                cute::tma_store_wait<1>();  // the one before has been read from shared memory
                previous->arrive();
            }
            previous = &map.output_empty[wg][slot];
        }
    }
    cute::tma_store_wait<0>();
    previous->arrive();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // all are written, not only read
    uses += kTiles;
}

// Where a task writes three tiles for every 64 columns, two slots would make the warpgroups wait for the copy engine. There
// operand stages take the tiles, one stage for each 64 columns (a part): the last of a product, held back when it is over, or
// those in which the kept z came. The store warp releases a stage when the copy engine has read it. Meanwhile the producer
// fills the others.
constexpr uint32_t kTilesPerPart = 3;
constexpr uint32_t kMathBarrier = 3;  // named barrier of all math threads
static_assert(kTilesPerPart * kBlockM * kSwizzleBytes == kBytesA + kBytesB, "A part fills a stage");

struct OutputStages {
    uint32_t first;

    __device__ __forceinline__ uint32_t stage(uint32_t part) const { return (first + part) % kStages; }
    // Tiles 0 and 1 lie in the place of B, the last in that of A.
    __device__ __forceinline__ uint8_t* tile(uint32_t part, uint32_t index, uint32_t warpgroup) const {
        uint8_t* both = index + 1 < kTilesPerPart ? shared_map().b[stage(part)] + index * kBlockM * kSwizzleBytes : shared_map().a[stage(part)];
        return both + warpgroup * kOutputTileBytes;
    }
    // By every math thread, before its first write to stages of a product: both warpgroups have read their operands.
    __device__ __forceinline__ void begin() const { ptx::named_barrier_sync(kMathBarrier, kMathThreads); }
    __device__ __forceinline__ void announce(uint32_t part, uint32_t warpgroup) const {
        ptx::fence_proxy_async();  // before the copy engine reads the tiles
        shared_map().output_full[warpgroup][part].arrive();
    }
};

// The last `kParts` stages of a product that ended before stage `next`.
template <uint32_t kParts>
__device__ __forceinline__ OutputStages held_stages(uint32_t next) { return {(next + kStages - kParts) % kStages}; }

// The store warp's elected lane: all tiles of one task, `store(part, index, warpgroup, shared)` issues one. Returns when all
// of them are written.
template <uint32_t kParts, typename StoreTile>
__device__ __forceinline__ void store_parts(OutputStages stages, uint32_t& uses, const StoreTile& store) {
    #pragma unroll 1
    for (uint32_t part = 0; part < kParts; ++part) {
        #pragma unroll 1
        for (uint32_t wg = 0; wg < kMathWarpgroups; ++wg) {
            shared_map().output_full[wg][part].wait(uses % 2);
            #pragma unroll 1
            for (uint32_t index = 0; index < kTilesPerPart; ++index) store(part, index, wg, stages.tile(part, index, wg));
        }
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();  // read from shared memory: long before the next part is ready
        OperandRing::release_for_all(stages.stage(part));
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // all are written, not only read
    ++uses;
}

}  // namespace prime_kernels
