// Dispatch: rows are pulled from the ranks that hold the tokens into this rank's pool, in the order in which L1 reads
// them. Rows of an expert are ordered by (rank, token, slot), so no atomic decides an order.
#pragma once

#include <prime_kernels/order.h>
#include <prime_kernels/params.cuh>
#include <prime_kernels/ptx.cuh>
#include <prime_kernels/wait.cuh>

namespace prime_kernels {

constexpr uint32_t kRowsPerChunk = 32;  // one lane finds each row's origin; a chunk never crosses a row block
constexpr uint32_t kVectorBytes = 16;

// Where a group (round, local expert) stands in a rank's route plan.
__device__ __forceinline__ uint32_t route_key(const LaunchParams& launch, uint32_t group) {
    const Problem& problem = launch.problem;
    const uint32_t all_experts = problem.num_local_experts * launch.comm.num_ranks;
    return problem.round_of(group) * all_experts + launch.comm.rank * problem.num_local_experts + problem.expert_of(group);
}

// Finds the origin of row `row` of the cursor's expert.
__device__ __forceinline__ RowOrigin find_origin(const LaunchParams& launch, const ExpertRows& table, const ExpertCursor& cursor,
                                                 uint32_t row) {
    const Communicator& comm = launch.comm;
    uint32_t rank = 0, before = 0;
    for (uint32_t count; rank + 1 < comm.num_ranks and
                         row >= before + (count = table.rows[cursor.expert * comm.num_ranks + rank]); ++rank)
        before += count;
    const uint32_t begin = comm.peer<uint32_t>(rank, comm.at.route_begin)[route_key(launch, cursor.expert)];
    // A peer that has given up may be writing the plan of another call: what it sends must not become an address.
    const uint32_t limit = launch.problem.max_entries, index = begin + row - before;
    const uint32_t entry = index < limit ? comm.peer<uint32_t>(rank, comm.at.route_list)[index] : limit;
    if (entry < limit) return {rank, entry};
    raise_fault(launch, kFaultPeerAborted, rank, limit, entry);
    return {comm.rank, 0};
}

template <uint32_t kInFlight, uint32_t kRowBytes>
__device__ __forceinline__ void copy_row(uint8_t* to, const uint8_t* from, uint32_t lane) {
    constexpr uint32_t kVectors = kRowBytes / kVectorBytes;
    constexpr uint32_t kStep = 32 * kInFlight;
    static_assert(kRowBytes % kVectorBytes == 0, "A row must be whole vectors");
    #pragma unroll 1
    for (uint32_t first = lane; first < kVectors; first += kStep) {
        uint4 held[kInFlight];
        #pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i)
            if (kVectors % kStep == 0 or first + i * 32 < kVectors) held[i] = ptx::load_streaming(from + (first + i * 32) * kVectorBytes);
        #pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i)
            if (kVectors % kStep == 0 or first + i * 32 < kVectors) ptx::store_global(to + (first + i * 32) * kVectorBytes, held[i]);
    }
}

template <uint32_t kRowBytes>
__device__ __forceinline__ void zero_row(uint8_t* to, uint32_t lane) {
    for (uint32_t i = lane; i < kRowBytes / kVectorBytes; i += 32) ptx::store_global(to + i * kVectorBytes, make_uint4(0, 0, 0, 0));
}

// Where dispatched rows go. `dy` and `weights` are of the backward alone. There rows beyond an expert's last are written as
// zeros up to the end of their block: weight gradients sum over whole blocks, and 0 x NaN is NaN.
struct DispatchPools {
    uint8_t* x;          // bf16 [C, H]
    uint8_t* dy;         // bf16 [C, H]
    float* weights;      // fp32 [C]
};

// `rows` rows from `first_row` of the cursor's expert, by one warp. Publishes them.
template <bool kBackward, uint32_t kInFlight, uint32_t kRowBytes>
__device__ __forceinline__ void dispatch_piece(const LaunchParams& launch, const DispatchPools& pools, const ExpertRows& table,
                                               const ExpertCursor& cursor, uint32_t first_row, uint32_t rows, uint32_t lane) {
    const Communicator& comm = launch.comm;
    const uint32_t valid = cursor.rows > first_row ? min(rows, cursor.rows - first_row) : 0;
    const uint64_t pool_row = static_cast<uint64_t>(cursor.pool_block) * kBlockM + first_row;
    uint64_t source = 0;
    if (lane < valid) {
        const RowOrigin origin = find_origin(launch, table, cursor, first_row + lane);
        launch.origins[pool_row + lane] = origin;
        source = comm.peers[origin.rank] + static_cast<uint64_t>(origin.entry / launch.problem.num_topk) * kRowBytes;
        if (kBackward) pools.weights[pool_row + lane] = comm.peer<float>(origin.rank, comm.at.topk_weights)[origin.entry];
    }
    #pragma unroll 1
    for (uint32_t i = 0; i < valid; ++i) {
        const auto from = reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffff, source, i));
        copy_row<kInFlight, kRowBytes>(pools.x + (pool_row + i) * kRowBytes, from + comm.at.x, lane);
        if (kBackward) copy_row<kInFlight, kRowBytes>(pools.dy + (pool_row + i) * kRowBytes, from + comm.at.dy, lane);
    }
    if (kBackward) {
        #pragma unroll 1
        for (uint32_t i = valid; i < rows; ++i) {
            zero_row<kRowBytes>(pools.x + (pool_row + i) * kRowBytes, lane);
            zero_row<kRowBytes>(pools.dy + (pool_row + i) * kRowBytes, lane);
        }
    }
    // Each lane orders its ordinary stores before the copy engine's reads; then one lane publishes for the warp.
    ptx::fence_proxy_async();
    ptx::fence_gpu();
    __syncwarp();
    const uint32_t published = kBackward ? rows : valid;
    if (lane == 0 and published > 0) ptx::add_release_gpu(Counters{launch}.rows_dispatched(cursor.pool_block + first_row / kBlockM), published);
}

// Chunks of kRowsPerChunk rows, counted over all experts.
template <bool kBackward>
struct ChunkWalk {
    const ExpertRows& table;
    ExpertCursor cursor;
    uint32_t begin = 0;  // first chunk of the cursor's expert

    __device__ __forceinline__ explicit ChunkWalk(const ExpertRows& rows) : table(rows) { cursor.load(table); }
    __device__ __forceinline__ uint32_t chunks_here() const {
        return kBackward ? cursor.blocks() * (kBlockM / kRowsPerChunk) : ceil_div(cursor.rows, kRowsPerChunk);
    }
    // Moves to the expert of `chunk` (rising), or false behind the last.
    __device__ __forceinline__ bool seek(uint32_t chunk) {
        while (cursor.expert < table.num_experts and chunk - begin >= chunks_here()) {
            begin += chunks_here();
            cursor.step(table);
        }
        return cursor.expert < table.num_experts;
    }
    __device__ __forceinline__ uint32_t first_row(uint32_t chunk) const { return (chunk - begin) * kRowsPerChunk; }
};

// At the start nobody has anything to do yet: the math warps fetch the first rows together, a few each.
constexpr uint32_t kHeadRows = 8;

template <bool kBackward, uint32_t kInFlight, uint32_t kRowBytes>
__device__ __forceinline__ void dispatch_head(const LaunchParams& launch, const DispatchPools& pools, const ExpertRows& table,
                                              uint32_t warp, uint32_t lane) {
    constexpr uint32_t kPieces = kRowsPerChunk / kHeadRows;
    ChunkWalk<kBackward> walk(table);
    const uint32_t chunk = warp / kPieces;
    if (walk.seek(chunk))
        dispatch_piece<kBackward, kInFlight, kRowBytes>(launch, pools, table, walk.cursor, walk.first_row(chunk) + warp % kPieces * kHeadRows,
                                                        kHeadRows, lane);
}

// The dispatch role of one warp: every `num_warps`-th chunk behind the head. A block is fetched when the phase that reads
// the rows has finished a tile of the block `dispatch_lead` before it; while that is awaited, `idle` may do other work.
template <bool kBackward, uint32_t kInFlight, uint32_t kRowBytes, typename Idle>
__device__ __forceinline__ void dispatch_rows(const LaunchParams& launch, const DispatchPools& pools, const ExpertRows& table, uint32_t head_warps,
                                              uint32_t warp, uint32_t num_warps, uint32_t lane, const Idle& idle) {
    ChunkWalk<kBackward> walk(table);
    const uint32_t lead = launch.problem.dispatch_lead;
    for (uint32_t chunk = head_warps / (kRowsPerChunk / kHeadRows) + warp; walk.seek(chunk); chunk += num_warps) {
        const uint32_t first_row = walk.first_row(chunk);
        const uint32_t block = walk.cursor.pool_block + first_row / kBlockM;
        if (block >= lead) {
            const uint32_t* progress = Counters{launch}.tiles_done(block - lead);
            const uint64_t start = ptx::nanoseconds();
            while (__shfl_sync(0xffffffff, ptx::load_acquire_gpu(progress), 0) == 0) {
                if (__any_sync(0xffffffff, aborted(launch))) break;
                if (idle()) continue;
                if (ptx::nanoseconds() - start > launch.comm.timeout_ns and lane == 0)
                    raise_fault(launch, kFaultActivationRows, launch.comm.rank, 1, 0);
                __nanosleep(kIdlePollNanoseconds);
            }
        }
        dispatch_piece<kBackward, kInFlight, kRowBytes>(launch, pools, table, walk.cursor, first_row, kRowsPerChunk, lane);
    }
}

}  // namespace prime_kernels
