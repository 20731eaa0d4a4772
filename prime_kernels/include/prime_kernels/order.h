// The order of work, and nothing else: compiled into the kernels and, as plain C++, into the tests that prove on a CPU
// that every task runs once and every wait points backward.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#include <cuda/std/cstdint>
#define PK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#include <cstdint>
#define PK_HOST_DEVICE inline
#endif

namespace prime_kernels {

// Rows are counted in blocks of kBlockM. A cluster of kClusterSize CTAs takes that many neighbouring blocks of one expert
// and shares (multicasts) the other operand. An expert's odd last block is split the other way: the cluster shares the
// rows and each CTA takes its own n block.
constexpr uint32_t kBlockM = 128;
constexpr uint32_t kClusterSize = 2;

PK_HOST_DEVICE uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// Rows that each rank sends to each local expert: rows[expert * num_ranks + rank].
struct ExpertRows {
    const uint32_t* rows;
    uint32_t num_experts;
    uint32_t num_ranks;

    PK_HOST_DEVICE uint32_t total(uint32_t expert) const {
        uint32_t sum = 0;
        for (uint32_t rank = 0; rank < num_ranks; ++rank) sum += rows[expert * num_ranks + rank];
        return sum;
    }
};

// Walks the experts in order and knows where each one's row blocks start in the pool: an expert owns whole blocks.
struct ExpertCursor {
    uint32_t expert = 0;
    uint32_t pool_block = 0;
    uint32_t rows = 0;

    PK_HOST_DEVICE void load(const ExpertRows& table) { rows = expert < table.num_experts ? table.total(expert) : 0; }
    PK_HOST_DEVICE uint32_t blocks() const { return ceil_div(rows, kBlockM); }
    PK_HOST_DEVICE void step(const ExpertRows& table) {
        pool_block += blocks();
        ++expert;
        load(table);
    }
};

// One phase of the work: how many tasks an expert has in it, and how many waves it runs behind the first phase.
struct PhaseShape {
    bool by_rows;       // true: tasks cover the expert's row blocks; false: a fixed number (weight gradients)
    uint32_t m_groups;  // block groups if not by_rows
    uint32_t n_blocks;  // 0: the phase is switched off
    uint32_t lag;
};

struct Task {
    uint32_t phase;
    uint32_t expert;
    uint32_t rows;         // of this expert
    uint32_t pool_block;   // first row block of this expert in the pool
    uint32_t block;        // first of the cluster's blocks, along rows or along the gradient's first dimension
    uint32_t n_block;      // first of the cluster's n blocks
    uint32_t splits_n;     // the cluster shares `block` and takes n blocks n_block, n_block + 1, ... (those that exist)
};

// Waves of experts, several phases deep. A wave is a run of experts with at least `min_wave_tasks` tasks of phase 0. Step i
// runs phase 0 on wave i, then phase p on wave i - lag[p]. Forward (lags 0, 1): L1(0) L1(1) L2(0) L1(2) L2(1) ... A task of
// phase p only waits for tasks of lower phases of the same expert: these stand earlier in the order, whole waves earlier
// where lags differ. Handed out in this order to workers that take them in turn, no wait can deadlock.
template <uint32_t kPhases, uint32_t kMaxLag>
struct WaveOrder {
    ExpertRows table;
    PhaseShape shapes[kPhases];
    uint32_t min_wave_tasks;
    ExpertCursor cursors[kPhases];
    uint32_t wave_ends[kMaxLag + 1];  // of the newest waves, by step
    uint32_t step;
    uint32_t wave_tasks;              // of phase 0 in this step so far
    uint32_t phase;
    uint32_t begin;                   // index of the first task of the current phase and expert
    uint32_t count;                   // tasks of the current phase and expert

    PK_HOST_DEVICE void init(const ExpertRows& rows, uint32_t min_tasks) {  // `shapes` are set before
        table = rows;
        min_wave_tasks = min_tasks;
        for (uint32_t p = 0; p < kPhases; ++p) {
            cursors[p] = ExpertCursor();
            cursors[p].load(table);
        }
        for (uint32_t i = 0; i <= kMaxLag; ++i) wave_ends[i] = 0;
        step = phase = begin = count = wave_tasks = 0;
        enter();
    }

    // The task with index `task` (they must be asked for in rising order), or false behind the last one.
    PK_HOST_DEVICE bool seek(uint32_t task, Task& out) {
        while (task - begin >= count) {
            if (over()) return false;
            begin += count;
            cursors[phase].step(table);
            enter();
        }
        const ExpertCursor& cursor = cursors[phase];
        const uint32_t local = task - begin, n_blocks = shapes[phase].n_blocks;
        const uint32_t groups = shapes[phase].by_rows ? cursor.blocks() / kClusterSize : shapes[phase].m_groups;
        out.phase = phase;
        out.expert = cursor.expert;
        out.rows = cursor.rows;
        out.pool_block = cursor.pool_block;
        out.splits_n = local >= groups * n_blocks;
        out.block = kClusterSize * (out.splits_n ? groups : local / n_blocks);
        out.n_block = out.splits_n ? kClusterSize * (local - groups * n_blocks) : local % n_blocks;
        return true;
    }

    // Whether every task of phase `p` lies before the current position.
    PK_HOST_DEVICE bool passed(uint32_t p) const { return cursors[p].expert >= table.num_experts; }

private:
    PK_HOST_DEVICE bool over() const {
        for (uint32_t p = 0; p < kPhases; ++p)
            if (not passed(p)) return false;
        return true;
    }
    PK_HOST_DEVICE uint32_t tasks_here() const {
        const PhaseShape& shape = shapes[phase];
        if (not shape.by_rows) return shape.m_groups * shape.n_blocks;
        const uint32_t blocks = cursors[phase].blocks();
        return blocks / kClusterSize * shape.n_blocks + blocks % kClusterSize * ceil_div(shape.n_blocks, kClusterSize);
    }
    // The expert at which phase `phase` stops in this step.
    PK_HOST_DEVICE bool more_here() const {
        const uint32_t expert = cursors[phase].expert;
        if (expert >= table.num_experts) return false;
        if (phase == 0) return wave_tasks < min_wave_tasks;
        const uint32_t lag = shapes[phase].lag;
        return step >= lag and expert < wave_ends[(step - lag) % (kMaxLag + 1)];
    }
    // Moves on to the next (phase, expert) that the order visits, from a cursor that has just been stepped (or is new).
    PK_HOST_DEVICE void enter() {
        while (not over()) {
            if (more_here()) {
                count = tasks_here();
                if (phase == 0) wave_tasks += count;
                return;
            }
            if (phase == 0) wave_ends[step % (kMaxLag + 1)] = cursors[0].expert;
            if (++phase == kPhases) {
                phase = 0;
                ++step;
                wave_tasks = 0;
            }
        }
        count = 0;
    }
};

enum ForwardPhase : uint32_t { kForwardL1 = 0, kForwardL2 = 1, kForwardPhases = 2, kForwardMaxLag = 1 };

// Forward tasks of an expert: L1 over I / 128 output columns, L2 over H / 256.
PK_HOST_DEVICE void shape_forward(PhaseShape (&shapes)[kForwardPhases], uint32_t l1_blocks, uint32_t l2_blocks) {
    shapes[kForwardL1] = {true, 0, l1_blocks, 0};
    shapes[kForwardL2] = {true, 0, l2_blocks, 1};
}

static_assert(kClusterSize == 2, "An odd last block is one block");

// Backward: kGrad recomputes gate and up, takes da' and writes dz and w*a; kDx returns rows to their owners; the weight
// gradients depend on local data only and come one wave later still: they are what runs while dx rows are on the wire.
enum BackwardPhase : uint32_t { kGrad = 0, kDx = 1, kDw2 = 2, kDw13 = 3, kBackwardPhases = 4, kBackwardMaxLag = 2 };

struct BackwardBlocks {
    uint32_t grad, dx;              // n blocks
    uint32_t dw2_groups, dw2;       // block groups along H, n blocks along I
    uint32_t dw13_groups, dw13;     // block groups along 2 I, n blocks along H
};

PK_HOST_DEVICE void shape_backward(PhaseShape (&shapes)[kBackwardPhases], const BackwardBlocks& blocks, bool with_dw2, bool with_dw13) {
    shapes[kGrad] = {true, 0, blocks.grad, 0};
    shapes[kDx] = {true, 0, blocks.dx, 1};
    shapes[kDw2] = {false, blocks.dw2_groups, with_dw2 ? blocks.dw2 : 0, 2};
    shapes[kDw13] = {false, blocks.dw13_groups, with_dw13 ? blocks.dw13 : 0, 2};
}

}  // namespace prime_kernels
