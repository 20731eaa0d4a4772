// What the host hands to the kernels: where things are. The host fills these structs (exchange.py, sm90.py and the two sm90_bf16.py mirror them).
#pragma once

#include <cuda/std/cstdint>

namespace prime_kernels {

constexpr uint32_t kMaxRanks = 32;
constexpr uint32_t kMaxRounds = 4;
constexpr uint64_t kAbortedBit = 1ull << 63;  // a peer that gave up in an epoch says so with its flag

// Byte offsets into a rank's symmetric buffer, the same on every rank.
struct SymmetricOffsets {
    uint64_t x;             // bf16 [T, H]
    uint64_t dy;            // bf16 [T, H]
    uint64_t topk_idx;      // int64 [T, K]
    uint64_t topk_weights;  // fp32 [T, K]
    uint64_t route_count;   // uint32 [rounds, E]: rows this rank sends to each expert in each round
    uint64_t route_begin;   // uint32 [rounds, E]: where these entries start in the list
    uint64_t route_list;    // uint32 [T * K]: token * K + slot, by (round, expert, token, slot)
    uint64_t slots;         // bf16 [T, K, H]: results returned to this rank
    uint64_t dtopk_slots;   // fp32 [T, K]
    uint64_t ready_flags;   // uint64 [R]: written by peer p: its staging and route plan of this epoch are ready
    uint64_t done_flags;    // uint64 [rounds, kMaxRanks]: written by peer p: it has pushed this round's rows to this rank
    uint64_t epoch;         // uint64: calls so far, counted on the device by the route plan so that graphs can be replayed
};

struct Communicator {
    uint64_t peers[kMaxRanks];  // base of each rank's symmetric buffer as mapped here
    SymmetricOffsets at;
    uint64_t timeout_ns;
    uint32_t rank;
    uint32_t num_ranks;

    template <typename T>
    __device__ __forceinline__ T* peer(uint32_t rank_index, uint64_t offset) const {
        return reinterpret_cast<T*>(peers[rank_index] + offset);
    }
    template <typename T>
    __device__ __forceinline__ T* own(uint64_t offset) const { return peer<T>(rank, offset); }
};

// One record in host-visible memory: the first wait of this rank that expired, or the first check that failed.
struct FaultRecord {
    uint32_t site;
    uint32_t rank;
    uint32_t peer;
    uint32_t reserved;
    uint64_t epoch;
    uint64_t expected;
    uint64_t seen;
};

enum FaultSite : uint32_t {
    kFaultNone = 0,
    kFaultReadyFlag = 1,
    kFaultDoneFlag = 2,
    kFaultPeerAborted = 3,
    kFaultDispatchRows = 4,
    kFaultActivationRows = 5,
    kFaultPoolOverflow = 7,
    kFaultExpertIndex = 8,
};

struct RowOrigin {
    uint32_t rank;
    uint32_t entry;  // token * K + slot
};

struct Problem {
    uint32_t num_tokens;
    uint32_t num_topk;
    uint32_t max_entries;     // T * K: entries of a route list
    uint32_t num_local_experts;
    uint32_t pool_blocks;     // capacity of the pools in row blocks
    uint32_t min_wave_tasks;
    uint32_t num_rounds;      // parts that each rank's tokens are worked on in, one after the other
    uint32_t dispatch_lead;   // row blocks that dispatch may run ahead of the work, so that rows are still in L2 when read
    float clamp;              // +inf: no clamp

    // Each rank's tokens are cut into num_rounds runs of this many; a round is combined while the next is worked on. To the
    // kernels every (round, local expert) is a group of rows of its own.
    __device__ __forceinline__ uint32_t tokens_per_round() const { return (num_tokens + num_rounds - 1) / num_rounds; }
    __device__ __forceinline__ uint32_t num_groups() const { return num_rounds * num_local_experts; }
    __device__ __forceinline__ uint32_t round_of(uint32_t group) const { return group / num_local_experts; }
    __device__ __forceinline__ uint32_t expert_of(uint32_t group) const { return group % num_local_experts; }
};

// One task of one warpgroup, in nanoseconds of the global timer; written only by kernels compiled with tracing.
struct TraceEvent {
    uint32_t sm;
    uint32_t what;  // phase << 16 | warpgroup
    uint32_t expert;
    uint32_t block;
    uint64_t begin;
    uint64_t operands;  // the first operands were there
    uint64_t product;   // the main loop was over
    uint64_t end;
};

struct Trace {
    TraceEvent* events;  // [warpgroups of the grid, capacity]
    uint32_t* counts;
    uint64_t capacity;
};

// What both directions need; it stays in constant memory, so that passing it on by reference costs no registers.
struct LaunchParams {
    Communicator comm;
    Problem problem;
    RowOrigin* origins;       // [C]
    uint32_t* counters;       // see Counters
    FaultRecord* fault;       // host-visible
    Trace trace;
};

struct ForwardParams {
    LaunchParams launch;
    uint8_t* pool_x;          // bf16 [C, H]
    uint8_t* y;               // bf16 [n, H]
    int32_t* recv_stats;      // int32 [El] or null
};

// A weight gradient: element [e, row, column] at e * expert_stride + row * row_stride + column.
struct WeightGradient {
    uint8_t* data;            // null: not wanted
    uint64_t expert_stride;   // elements
    uint64_t row_stride;
    uint32_t is_fp32;         // else bf16
    uint32_t accumulate;      // add into it (fp32 only)
};

struct BackwardParams {
    LaunchParams launch;
    uint8_t* pool_x;          // bf16 [C, H]
    uint8_t* pool_dy;         // bf16 [C, H]
    float* weights;           // fp32 [C]
    float* dtopk_parts;       // fp32 [C, ceil(I / columns of a kGrad tile)]
    uint8_t* dx;              // bf16 [n, H]
    float* dtopk;             // fp32 [n, K] or null
    WeightGradient dw[2];     // dW2 [El, H, I], dW13 [El, 2I, H]
};

// Counters of one launch in local memory, zeroed by the route plan: a header, then per row block the rows dispatched and the
// tasks of the first phase done, then per local expert the tasks of the first phase done.
struct Counters {
    const LaunchParams& launch;
    static constexpr uint32_t kHeader = 32;
    __device__ __forceinline__ uint32_t* abort() const { return launch.counters; }
    __device__ __forceinline__ uint32_t* next_task() const { return launch.counters + 1; }
    // Warpgroups that have pushed all rows of a round; the next token of a round to be combined.
    __device__ __forceinline__ uint32_t* pushers_done(uint32_t round) const { return launch.counters + 4 + round; }
    __device__ __forceinline__ uint32_t* next_token(uint32_t round) const { return launch.counters + 4 + kMaxRounds + round; }
    __device__ __forceinline__ uint32_t* rows_dispatched(uint32_t block) const { return launch.counters + kHeader + block; }
    __device__ __forceinline__ uint32_t* tiles_done(uint32_t block) const { return rows_dispatched(launch.problem.pool_blocks + block); }
    __device__ __forceinline__ uint32_t* expert_done(uint32_t expert) const { return rows_dispatched(2 * launch.problem.pool_blocks + expert); }
};

}  // namespace prime_kernels
