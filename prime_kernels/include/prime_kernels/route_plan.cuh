// The route plan of one rank: a stable counting sort of (token, slot) by round and expert (the key), in two small launches. Each CTA owns a
// run of consecutive entries; within a CTA each warp owns a run; so the order of an expert's entries is their own order.
#pragma once

#include <prime_kernels/params.cuh>

namespace prime_kernels {

constexpr uint32_t kPlanWarps = 8;
constexpr uint32_t kPlanThreads = kPlanWarps * 32;
constexpr uint32_t kEntriesPerLane = 8;
constexpr uint32_t kEntriesPerWarp = kEntriesPerLane * 32;
constexpr uint32_t kEntriesPerCta = kPlanWarps * kEntriesPerWarp;

struct PlanParams {
    const int64_t* topk_idx;   // [n * K]
    uint32_t num_entries;      // n * K
    uint32_t num_experts;
    uint32_t* chunk_counts;    // [chunks, rounds * E]
    uint32_t* route_count;     // [rounds, E]
    uint32_t* route_begin;     // [rounds, E]
    uint32_t* route_list;      // [T * K]
    uint32_t* counters;        // zeroed here for the kernel that follows
    uint32_t num_counters;
    uint32_t rank;
    uint32_t num_rounds;
    uint32_t entries_per_round;
    uint64_t* epoch;
    FaultRecord* fault;
};

// Key of an entry, or num_keys for none. An id outside [0, E) that is not -1 is a fault: reported by the first launch, then skipped.
__device__ __forceinline__ uint32_t num_keys(const PlanParams& params) { return params.num_rounds * params.num_experts; }

template <bool kReports>
__device__ __forceinline__ uint32_t key_of(const PlanParams& params, uint32_t entry) {
    if (entry >= params.num_entries) return num_keys(params);
    const int64_t id = params.topk_idx[entry];
    if (id >= 0 and id < params.num_experts) return entry / params.entries_per_round * params.num_experts + static_cast<uint32_t>(id);
    if (kReports and id != -1 and atomicCAS(&params.fault->reserved, 0u, 1u) == 0u and *reinterpret_cast<volatile uint32_t*>(&params.fault->site) == kFaultNone) {
        params.fault->rank = params.rank;
        params.fault->peer = entry;
        params.fault->epoch = *params.epoch;
        params.fault->expected = params.num_experts;
        params.fault->seen = static_cast<uint64_t>(id);
        __threadfence_system();
        *reinterpret_cast<volatile uint32_t*>(&params.fault->site) = kFaultExpertIndex;
    }
    return num_keys(params);
}

// Launch 1: entries of each key in each CTA's run; zeroes the counters of the coming launch and counts it.
extern "C" __global__ void __launch_bounds__(kPlanThreads) route_plan_count(const __grid_constant__ PlanParams params) {
    extern __shared__ uint32_t counts[];
    const uint32_t keys = num_keys(params);
    if (blockIdx.x == 0 and threadIdx.x == 0) *params.epoch += 1;
    for (uint32_t i = threadIdx.x; i < keys; i += kPlanThreads) counts[i] = 0;
    for (uint32_t i = blockIdx.x * kPlanThreads + threadIdx.x; i < params.num_counters; i += gridDim.x * kPlanThreads) params.counters[i] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < kEntriesPerCta; i += kPlanThreads) {
        const uint32_t key = key_of<true>(params, blockIdx.x * kEntriesPerCta + i);
        if (key < keys) atomicAdd(&counts[key], 1u);  // only the sum matters: no order is decided here
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < keys; i += kPlanThreads)
        params.chunk_counts[static_cast<uint64_t>(blockIdx.x) * keys + i] = counts[i];
}

// Launch 2: where this CTA's, then each warp's entries of each key begin; then each warp places its entries in order.
extern "C" __global__ void __launch_bounds__(kPlanThreads) route_plan_place(const __grid_constant__ PlanParams params) {
    extern __shared__ uint32_t shared_plan[];
    constexpr uint32_t kLoadsInFlight = 16;
    const uint32_t keys = num_keys(params);
    uint32_t* next = shared_plan;                        // [kPlanWarps][keys]: where the warp's next entry of the key goes
    uint32_t* begins = next + kPlanWarps * keys;  // [keys]: where the key's entries begin in the list
    uint32_t* carry = begins + keys;              // [kPlanWarps]
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t first = blockIdx.x * kEntriesPerCta + warp * kEntriesPerWarp;

    uint32_t entry_keys[kEntriesPerLane];
    #pragma unroll
    for (uint32_t i = 0; i < kEntriesPerLane; ++i) entry_keys[i] = key_of<false>(params, first + i * 32 + lane);
    for (uint32_t i = threadIdx.x; i < kPlanWarps * keys; i += kPlanThreads) next[i] = 0;
    __syncthreads();
    #pragma unroll
    for (uint32_t i = 0; i < kEntriesPerLane; ++i)
        if (entry_keys[i] < keys) atomicAdd(&next[warp * keys + entry_keys[i]], 1u);
    __syncthreads();

    // Keys are scanned kPlanThreads at a time; `base` is where this group's entries begin.
    uint32_t base = 0;
    for (uint32_t group = 0; group < keys; group += kPlanThreads) {
        const uint32_t key = group + threadIdx.x;
        uint32_t before = 0, total = 0;
        if (key < keys) {
            for (uint32_t chunk = 0; chunk < gridDim.x; chunk += kLoadsInFlight) {
                uint32_t held[kLoadsInFlight];
                #pragma unroll
                for (uint32_t i = 0; i < kLoadsInFlight; ++i)
                    held[i] = chunk + i < gridDim.x ? params.chunk_counts[static_cast<uint64_t>(chunk + i) * keys + key] : 0;
                #pragma unroll
                for (uint32_t i = 0; i < kLoadsInFlight; ++i) {
                    if (chunk + i < blockIdx.x) before += held[i];
                    total += held[i];
                }
            }
            for (uint32_t w = 0; w < kPlanWarps; ++w) {
                const uint32_t count = next[w * keys + key];
                next[w * keys + key] = before;
                before += count;
            }
        }
        uint32_t inclusive = total;
        #pragma unroll
        for (uint32_t delta = 1; delta < 32; delta *= 2) {
            const uint32_t lower = __shfl_up_sync(0xffffffff, inclusive, delta);
            if (lane >= delta) inclusive += lower;
        }
        if (lane == 31) carry[warp] = inclusive;
        __syncthreads();
        uint32_t begin = base + inclusive - total;
        for (uint32_t w = 0; w < kPlanWarps; ++w) {
            if (w < warp) begin += carry[w];
            base += carry[w];
        }
        if (key < keys) {
            begins[key] = begin;
            if (blockIdx.x == 0) {
                params.route_count[key] = total;
                params.route_begin[key] = begin;
            }
        }
        __syncthreads();
    }

    #pragma unroll
    for (uint32_t i = 0; i < kEntriesPerLane; ++i) {
        const uint32_t key = entry_keys[i];
        const uint32_t same = __match_any_sync(0xffffffff, key);
        const uint32_t earlier = __popc(same & ((1u << lane) - 1u));
        uint32_t place = 0;
        if (key < keys) place = next[warp * keys + key];
        __syncwarp();
        if (key < keys) {
            params.route_list[begins[key] + place + earlier] = first + i * 32 + lane;
            if (earlier == 0) next[warp * keys + key] = place + __popc(same);
        }
        __syncwarp();
    }
}

}  // namespace prime_kernels
