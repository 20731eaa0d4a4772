// The task ring: the producer warp walks the order of work and hands each task of its CTA to the math warpgroups and the
// store warp, so that finding the next task costs them nothing.
#pragma once

#include <prime_kernels/tiles.cuh>

namespace prime_kernels {

constexpr uint32_t kNoMoreTasks = ~0u;

__device__ __forceinline__ void init_task_ring() {
    for (uint32_t s = 0; s < kTaskSlots; ++s) {
        shared_map().task_full[s].init(1);
        shared_map().task_empty[s].init(kMathWarps + 1);  // the math warps and the store warp
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

// A reader's side. The task stays in shared memory until the warp's elected lane gives the slot back, and is read from
// there when needed: it would cost the math warps registers they do not have.
struct TaskReader {
    TaskPosition at;

    __device__ __forceinline__ bool next() const {
        shared_map().task_full[at.index].wait(at.phase);
        return task().phase != kNoMoreTasks;
    }
    __device__ __forceinline__ const CtaTask& task() const { return shared_map().tasks[at.index]; }
    __device__ __forceinline__ void done(bool elected) {
        __syncwarp(__activemask());  // the other lanes have read
        if (elected) shared_map().task_empty[at.index].arrive();
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

// This CTA's part of a cluster's task.
__device__ __forceinline__ CtaTask cta_task(const Task& task, bool by_rows, uint32_t cta_in_cluster) {
    const uint32_t block = task.block_group * kClusterSize + cta_in_cluster;
    CtaTask own = {task.phase, task.expert, task.rows, task.pool_block, block, task.n_block, 0, 0};
    if (by_rows) {
        const uint32_t first = block * kBlockM;
        own.rows = task.rows > first ? min(kBlockM, task.rows - first) : 0;
        own.pool_block = task.pool_block + block;
    }
    return own;
}

}  // namespace prime_kernels
