// The task ring: the producer warp walks the order of work and hands each task of its CTA to the math warpgroups and the
// store warp, so that finding the next task costs them nothing.
#pragma once

#include <prime_kernels/tiles.cuh>

namespace prime_kernels {

constexpr uint32_t kNoMoreTasks = ~0u;

__device__ __forceinline__ void init_task_ring() {
    for (uint32_t s = 0; s < kTaskSlots; ++s) {
        shared_map().task_full[s].init(1);
        shared_map().task_empty[s].init(kMathThreads + 1);  // the math threads and the store warp's elected lane
    }
}

struct TaskPosition {
    uint32_t index = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        index = index + 1 == kTaskSlots ? 0 : index + 1;
        phase ^= index == 0;
    }
};

// A reader's side. The task stays in shared memory until every reading thread has given the slot back, and is read from there
// when needed: it would cost the math warps registers they do not have.
struct TaskReader {
    TaskPosition at;

    __device__ __forceinline__ bool next() const {
        shared_map().task_full[at.index].wait(at.phase);
        return task().phase != kNoMoreTasks;
    }
    __device__ __forceinline__ const CtaTask& task() const { return shared_map().tasks[at.index]; }
    __device__ __forceinline__ void done() {
        shared_map().task_empty[at.index].arrive();
        at.advance();
    }
};

struct TaskWriter {
    TaskPosition at;

    __device__ __forceinline__ void put(const CtaTask& task) {
        shared_map().task_empty[at.index].wait(at.phase ^ 1);
        shared_map().tasks[at.index] = task;
        shared_map().task_full[at.index].arrive();
        at.advance();
    }
};

// Clusters claim tasks one at a time, in order, so that none waits for a slower one. The producer of the first CTA claims
// and tells the other.
constexpr uint32_t kClaimAhead = 8;  // k blocks before the end of a task: the claim's latency is hidden, little is hoarded

__device__ __forceinline__ void init_claims() {
    for (uint32_t s = 0; s < kClaimSlots; ++s) {
        shared_map().claim_full[s].init(1);
        shared_map().claim_empty[s].init(1);
    }
}

struct TaskClaims {
    uint32_t* next_task;
    uint32_t cta_in_cluster;
    uint32_t slot = 0, phase = 0;
    uint32_t claimed = 0;
    bool requested = false;

    // `k_blocks_left` of the current task: claims the next one early enough.
    __device__ __forceinline__ void tick(uint32_t k_blocks_left) {
        if (k_blocks_left <= kClaimAhead and not requested) request();
    }

    __device__ __forceinline__ uint32_t take() {
        if (not requested) request();
        requested = false;
        SharedMap& map = shared_map();
        if (cta_in_cluster != 0) {
            map.claim_full[slot].arrive_and_expect_tx(sizeof(uint32_t));
            map.claim_full[slot].wait(phase);
            claimed = *reinterpret_cast<volatile uint32_t*>(&map.claims[slot]);
            map.claim_empty[slot].arrive(0u);  // of the first CTA
        }
        slot = slot + 1 == kClaimSlots ? 0 : slot + 1;
        phase ^= slot == 0;
        return claimed;
    }

private:
    __device__ __forceinline__ void request() {
        requested = true;
        if (cta_in_cluster != 0) return;
        SharedMap& map = shared_map();
        map.claim_empty[slot].wait(phase ^ 1);
        claimed = atomicAdd(next_task, 1u);
        ptx::store_async_cluster(&map.claims[slot], claimed, reinterpret_cast<uint64_t*>(&map.claim_full[slot]), 1);
    }
};

// Valid rows of the block of a task by rows, also for a CTA that has no n block of its own in it.
__device__ __forceinline__ uint32_t task_rows(const Task& task, const CtaTask& own) {
    return min(kBlockM, task.rows - own.m_block * kBlockM);
}

// This CTA's part of a cluster's task.
__device__ __forceinline__ CtaTask cta_task(const Task& task, bool by_rows, uint32_t n_blocks, uint32_t cta_in_cluster) {
    const uint32_t block = task.block + (task.splits_n ? 0 : cta_in_cluster);
    CtaTask own = {task.phase, task.expert, task.rows, task.pool_block, block, task.n_block, 0, task.splits_n};
    if (by_rows) {
        const uint32_t first = block * kBlockM;
        own.rows = min(kBlockM, task.rows - first);
        own.pool_block = task.pool_block + block;
        own.n_block += task.splits_n ? cta_in_cluster : 0;
        if (own.n_block >= n_blocks) own.rows = 0;
    }
    return own;
}

}  // namespace prime_kernels
