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

// Rows are counted in blocks of kBlockM; a cluster of kClusterSize CTAs takes that many neighbouring blocks of one expert
// and shares (multicasts) the other operand.
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
    PK_HOST_DEVICE uint32_t block_groups() const { return ceil_div(blocks(), kClusterSize); }
    PK_HOST_DEVICE void step(const ExpertRows& table) {
        pool_block += blocks();
        ++expert;
        load(table);
    }
};

enum class ForwardPhase : uint32_t { kL1 = 0, kL2 = 1 };

struct ForwardTask {
    ForwardPhase phase;
    uint32_t expert;
    uint32_t rows;         // of this expert
    uint32_t pool_block;   // first row block of this expert in the pool
    uint32_t block_group;  // which kClusterSize row blocks of this expert
    uint32_t n_block;
};

// Forward: L1 of wave 0, L1 of wave 1, L2 of wave 0, L1 of wave 2, L2 of wave 1, ... A wave is a run of experts with at
// least `min_wave_tasks` L1 tasks, so that when an L2 task is reached, the L1 tasks it reads were started a wave ago.
struct ForwardOrder {
    ExpertRows table;
    uint32_t l1_n_blocks;
    uint32_t l2_n_blocks;
    uint32_t min_wave_tasks;

    ForwardPhase phase = ForwardPhase::kL1;
    ExpertCursor l1, l2;
    uint32_t wave_tasks = 0;     // L1 tasks of the wave so far
    uint32_t l2_stop = 0;        // L2 may run up to this expert
    uint32_t last_wave_end = 0;  // end of the newest complete L1 wave
    uint32_t begin = 0;          // index of the first task of the current expert and phase
    uint32_t count = 0;          // tasks of the current expert and phase

    PK_HOST_DEVICE ForwardOrder(const ExpertRows& rows, uint32_t l1_blocks, uint32_t l2_blocks, uint32_t min_tasks)
        : table(rows), l1_n_blocks(l1_blocks), l2_n_blocks(l2_blocks), min_wave_tasks(min_tasks) {
        l1.load(table);
        l2.load(table);
        count = l1.block_groups() * l1_n_blocks;
        wave_tasks = count;
    }

    // The task with index `task` (they must be asked for in rising order), or false behind the last one.
    PK_HOST_DEVICE bool seek(uint32_t task, ForwardTask& out) {
        while (task - begin >= count) {
            begin += count;
            if (not advance()) {
                count = 0;
                return false;
            }
        }
        const bool is_l1 = phase == ForwardPhase::kL1;
        const ExpertCursor& cursor = is_l1 ? l1 : l2;
        const uint32_t n_blocks = is_l1 ? l1_n_blocks : l2_n_blocks;
        const uint32_t local = task - begin;
        out.phase = phase;
        out.expert = cursor.expert;
        out.rows = cursor.rows;
        out.pool_block = cursor.pool_block;
        out.block_group = local / n_blocks;
        out.n_block = local % n_blocks;
        return true;
    }

private:
    PK_HOST_DEVICE bool advance() {
        if (phase == ForwardPhase::kL1) {
            if (l1.expert < table.num_experts) l1.step(table);
            if (l1.expert < table.num_experts and wave_tasks < min_wave_tasks) {
                count = l1.block_groups() * l1_n_blocks;
                wave_tasks += count;
                return true;
            }
            l2_stop = last_wave_end;
            last_wave_end = l1.expert;
            phase = ForwardPhase::kL2;
        } else {
            l2.step(table);
        }
        if (l2.expert >= l2_stop and l1.expert < table.num_experts) {
            phase = ForwardPhase::kL1;
            count = wave_tasks = l1.block_groups() * l1_n_blocks;
            return true;
        }
        if (l2.expert >= l2_stop) l2_stop = table.num_experts;
        count = l2.block_groups() * l2_n_blocks;
        return l2.expert < table.num_experts;
    }
};

}  // namespace prime_kernels
