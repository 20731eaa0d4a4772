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

// Finds the origin of row `row` of the cursor's expert.
__device__ __forceinline__ RowOrigin find_origin(const Communicator& comm, const ExpertRows& table, const ExpertCursor& cursor,
                                                 uint32_t row) {
    uint32_t rank = 0, before = 0;
    for (uint32_t count; rank + 1 < comm.num_ranks and
                         row >= before + (count = table.rows[cursor.expert * comm.num_ranks + rank]); ++rank)
        before += count;
    const uint32_t global_expert = comm.rank * table.num_experts + cursor.expert;
    const uint32_t begin = comm.peer<uint32_t>(rank, comm.at.route_begin)[global_expert];
    return {rank, comm.peer<uint32_t>(rank, comm.at.route_list)[begin + row - before]};
}

template <uint32_t kRowBytes>
__device__ __forceinline__ void copy_row(uint8_t* to, const uint8_t* from, uint32_t lane) {
    constexpr uint32_t kVectorsPerLane = kRowBytes / (kVectorBytes * 32);
    constexpr uint32_t kInFlight = kVectorsPerLane % 8 == 0 ? 8 : (kVectorsPerLane % 4 == 0 ? 4 : (kVectorsPerLane % 5 == 0 ? 5 : (kVectorsPerLane % 3 == 0 ? 3 : 1)));
    static_assert(kRowBytes % (kVectorBytes * 32) == 0, "A row must be whole 512-byte pieces: H a multiple of 256");
    for (uint32_t first = 0; first < kVectorsPerLane; first += kInFlight) {
        uint4 held[kInFlight];
        #pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) held[i] = ptx::load_streaming(from + ((first + i) * 32 + lane) * kVectorBytes);
        #pragma unroll
        for (uint32_t i = 0; i < kInFlight; ++i) ptx::store_global(to + ((first + i) * 32 + lane) * kVectorBytes, held[i]);
    }
}

// The dispatch role of one warp: every `num_warps`-th chunk.
template <uint32_t kRowBytes>
__device__ __forceinline__ void dispatch_rows(const ForwardParams& params, const Counters& counters, const Watchdog& dog,
                                              const ExpertRows& table, uint32_t warp, uint32_t num_warps, uint32_t lane) {
    const Communicator& comm = params.comm;
    ExpertCursor cursor;
    cursor.load(table);
    uint32_t begin = 0;  // first chunk of the cursor's expert
    for (uint32_t chunk = warp; ; chunk += num_warps) {
        while (cursor.expert < table.num_experts and chunk - begin >= ceil_div(cursor.rows, kRowsPerChunk)) {
            begin += ceil_div(cursor.rows, kRowsPerChunk);
            cursor.step(table);
        }
        if (cursor.expert >= table.num_experts) return;

        const uint32_t first_row = (chunk - begin) * kRowsPerChunk;
        const uint32_t block = cursor.pool_block + first_row / kBlockM;
        if (block >= params.problem.dispatch_lead)
            wait_counter(dog, counters.tiles_activated(block - params.problem.dispatch_lead), 1, kFaultActivationRows);
        const uint32_t valid = min(kRowsPerChunk, cursor.rows - first_row);
        const uint64_t pool_row = static_cast<uint64_t>(cursor.pool_block) * kBlockM + first_row;
        uint64_t source = 0;
        if (lane < valid) {
            const RowOrigin origin = find_origin(comm, table, cursor, first_row + lane);
            params.origins[pool_row + lane] = origin;
            source = comm.peers[origin.rank] + comm.at.x + static_cast<uint64_t>(origin.entry / params.problem.num_topk) * kRowBytes;
        }
        for (uint32_t i = 0; i < valid; ++i) {
            const auto from = reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffff, source, i));
            copy_row<kRowBytes>(params.pool_x + (pool_row + i) * kRowBytes, from, lane);
        }
        // Each lane orders its ordinary stores before the copy engine's reads; then one lane publishes for the warp.
        ptx::fence_proxy_async();
        ptx::fence_gpu();
        __syncwarp();
        if (lane == 0) ptx::add_release_gpu(counters.rows_dispatched(block), valid);
    }
}

}  // namespace prime_kernels
