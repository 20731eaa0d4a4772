// Runs the order of work (order.h, as the kernels compile it) on a CPU, for test_order.py. Reads cases from standard
// input, one a line, and answers each with one line:
//
//   order DIRECTION first stride             the tasks with index first, first + stride, ... as numbers
//   simulate DIRECTION ranks ...             R ranks at work: "ok", "deadlock: why" or "broken: what"
//
// The simulation has actors that each do one thing at a time: per cluster a producer (claims tasks, waits for what they
// read), math (fetches the head of the dispatch, multiplies, pushes rows) and store (publishes tiles); per dispatch warp
// one; per rank one that combines. Which of those that can go on goes next is drawn at random, with speeds that differ by
// orders of magnitude. If none can and not all are done, the order or the protocol deadlocks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iostream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <prime_kernels/order.h>

namespace pk = prime_kernels;
using Numbers = std::vector<uint32_t>;

constexpr uint32_t kRowsPerChunk = 32;  // dispatch.cuh
constexpr uint32_t kFirst = 0, kPush = 1;  // phases: reads dispatched rows; returns rows. Later ones: weight gradients

struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void require(bool holds, const std::string& what) {
    if (not holds) throw Broken(what);
}

uint32_t read(std::istream& in) {
    uint32_t value;
    if (not(in >> value)) throw std::invalid_argument("a number is missing");
    return value;
}

struct Forward {
    static constexpr bool kZeroFills = false;
    using Order = pk::WaveOrder<pk::kForwardPhases, pk::kForwardMaxLag>;
    uint32_t l1, l2;
    explicit Forward(std::istream& in) : l1(read(in)), l2(read(in)) {}
    void shape(Order& order) const { pk::shape_forward(order.shapes, l1, l2); }
};

struct Backward {
    static constexpr bool kZeroFills = true;  // dispatch fills blocks up with zeros
    using Order = pk::WaveOrder<pk::kBackwardPhases, pk::kBackwardMaxLag>;
    pk::BackwardBlocks blocks;
    bool with_dw2, with_dw13;
    explicit Backward(std::istream& in) {
        blocks.grad = read(in), blocks.dx = read(in), blocks.dw2_groups = read(in), blocks.dw2 = read(in);
        blocks.dw13_groups = read(in), blocks.dw13 = read(in);
        with_dw2 = read(in), with_dw13 = read(in);
    }
    void shape(Order& order) const { pk::shape_backward(order.shapes, blocks, with_dw2, with_dw13); }
};

template <typename Direction>
typename Direction::Order make_order(const Direction& direction, const pk::ExpertRows& table, uint32_t min_wave_tasks) {
    typename Direction::Order order;
    direction.shape(order);
    order.init(table, min_wave_tasks);
    return order;
}

template <typename Direction>
std::string list_order(std::istream& in) {
    const Direction direction(in);
    const uint32_t first = read(in), stride = read(in), min_wave_tasks = read(in), groups = read(in), ranks = read(in);
    Numbers rows(groups * ranks);
    for (uint32_t& value : rows) value = read(in);
    auto order = make_order(direction, {rows.data(), groups, ranks}, min_wave_tasks);
    std::ostringstream out;
    pk::Task task;
    for (uint32_t index = first; order.seek(index, task); index += stride)
        out << task.phase << ' ' << task.expert << ' ' << task.rows << ' ' << task.pool_block << ' ' << task.block << ' '
            << task.n_block << ' ' << task.splits_n << ' ' << order.passed(kPush) << ' ';
    return out.str();
}

enum Claims : uint32_t { kDynamic = 0, kInTurn = 1, kBackwards = 2 };  // kBackwards: a wrong order, which must deadlock

struct Setting {
    uint32_t seed, ranks, experts, rounds, clusters, warps, head_chunks, lead, min_wave_tasks, claims, steps, task_slots;
    explicit Setting(std::istream& in)
        : seed(read(in)), ranks(read(in)), experts(read(in)), rounds(read(in)), clusters(read(in)), warps(read(in)),
          head_chunks(read(in)), lead(read(in)), min_wave_tasks(read(in)), claims(read(in)), steps(read(in)),
          task_slots(read(in)) {}
    uint32_t groups() const { return rounds * experts; }
    uint32_t round_of(uint32_t group) const { return group / experts; }
};

struct Chunk {
    uint32_t block, published;
    Numbers sources;  // ranks whose rows are in it
};

template <typename Direction>
struct Cluster {
    typename Direction::Order order;
    uint32_t next_index;
    std::vector<pk::Task> tasks;      // claimed, in order
    std::vector<bool> pushes_over;    // per task: no push of this cluster lies behind it
    uint32_t loaded = 0, multiplied = 0, stored = 0;  // tasks
    uint32_t announced = 0;           // rounds whose pushes this cluster has done
    bool all_claimed = false, head_fetched = false, math_over = false;
};

template <typename Direction>
struct Rank {
    Numbers rows;                     // [group][source rank]
    pk::ExpertRows table;
    std::vector<pk::Task> all_tasks;
    std::vector<Chunk> chunks;
    std::vector<Numbers> block_rows;  // [block][source rank]
    Numbers block_group;
    Numbers n_blocks;                 // per phase
    uint32_t step = 0;                // launches begun; the epoch
    bool running = false;

    std::vector<Cluster<Direction>> clusters;
    Numbers next_chunk;               // of each dispatch warp
    uint32_t next_task = 0, published = 0, combined = 0;
    Numbers rows_dispatched, tiles_done, expert_done, times_run, pushers_done, pushed_here;
    Numbers ready_flags, done_flags;  // [source rank], [round][source rank]: epochs
};

template <typename Direction>
class Simulation {
public:
    explicit Simulation(std::istream& in) : direction_(in), setting_(in), random_(setting_.seed), ranks_(setting_.ranks) {
        for (Rank& rank : ranks_) prepare(rank, in);
        for (uint32_t r = 0; r < setting_.ranks; ++r) {
            add_actor([this, r] { return begin_or_end(ranks_[r]); });
            add_actor([this, r] { return combine(ranks_[r]); });
            for (uint32_t c = 0; c < setting_.clusters; ++c) {
                add_actor([this, r, c] { return produce(ranks_[r], ranks_[r].clusters[c]); });
                add_actor([this, r, c] { return multiply(r, ranks_[r].clusters[c], c); });
                add_actor([this, r, c] { return store(ranks_[r], ranks_[r].clusters[c]); });
            }
            for (uint32_t w = 0; w < setting_.warps; ++w) add_actor([this, r, w] { return dispatch(r, w); });
        }
    }

    std::string run() {
        while (not finished()) {
            if (not one_event()) return "deadlock: " + where();
        }
        return "ok";
    }

private:
    using Rank = ::Rank<Direction>;
    using Cluster = ::Cluster<Direction>;
    struct Actor {
        std::function<bool()> act;  // whether it could do something
        double speed;
    };

    template <typename Act>
    void add_actor(const Act& act) {
        actors_.push_back({act, std::pow(10.0, -3.0 * std::uniform_real_distribution<>()(random_))});
    }

    void prepare(Rank& rank, std::istream& in) {
        const uint32_t groups = setting_.groups();
        rank.rows.resize(groups * setting_.ranks);
        for (uint32_t& value : rank.rows) value = read(in);
        rank.table = {rank.rows.data(), groups, setting_.ranks};
        auto order = make_order(direction_, rank.table, setting_.min_wave_tasks);
        for (const pk::PhaseShape& shape : order.shapes) rank.n_blocks.push_back(shape.n_blocks);
        pk::Task task;
        for (uint32_t index = 0; order.seek(index, task); ++index) rank.all_tasks.push_back(task);
        pk::ExpertCursor cursor;
        for (cursor.load(rank.table); cursor.expert < groups; cursor.step(rank.table)) {
            uint32_t source = 0, left = rank.rows[cursor.expert * setting_.ranks];
            for (uint32_t first = 0; first < cursor.blocks() * pk::kBlockM; first += kRowsPerChunk) {
                const uint32_t valid = first < cursor.rows ? std::min(kRowsPerChunk, cursor.rows - first) : 0;
                if (valid == 0 and not Direction::kZeroFills) break;
                Chunk chunk = {cursor.pool_block + first / pk::kBlockM, Direction::kZeroFills ? kRowsPerChunk : valid, {}};
                if (first % pk::kBlockM == 0) {
                    rank.block_rows.emplace_back(setting_.ranks);
                    rank.block_group.push_back(cursor.expert);
                }
                for (uint32_t row = 0; row < valid; ++row, --left) {
                    while (left == 0) left = rank.rows[cursor.expert * setting_.ranks + ++source];
                    if (chunk.sources.empty() or chunk.sources.back() != source) chunk.sources.push_back(source);
                    ++rank.block_rows.back()[source];
                }
                rank.chunks.push_back(chunk);
            }
        }
        rank.ready_flags.assign(setting_.ranks, 0);
        rank.done_flags.assign(setting_.rounds * setting_.ranks, 0);
    }

    // --- A launch of one rank ---------------------------------------------------------------------------------------

    bool begin_or_end(Rank& rank) {
        if (rank.running) {
            bool over = rank.combined == setting_.rounds and rank.published == setting_.rounds;
            for (const Cluster& cluster : rank.clusters) over = over and cluster.math_over and cluster.stored == cluster.tasks.size();
            for (const uint32_t chunk : rank.next_chunk) over = over and chunk >= rank.chunks.size();
            if (not over) return false;
            for (const uint32_t times : rank.times_run) require(times == 1, "a task ran " + std::to_string(times) + " times");
            rank.running = false;
            return true;
        }
        if (rank.step == setting_.steps) return false;
        ++rank.step;
        rank.running = true;
        rank.clusters.clear();
        for (uint32_t c = 0; c < setting_.clusters; ++c)
            rank.clusters.push_back({make_order(direction_, rank.table, setting_.min_wave_tasks), c, {}, {}});
        rank.next_chunk.clear();
        for (uint32_t w = 0; w < setting_.warps; ++w) rank.next_chunk.push_back(setting_.head_chunks * setting_.clusters + w);
        rank.next_task = rank.published = rank.combined = 0;
        const uint32_t blocks = rank.block_rows.size();
        rank.rows_dispatched.assign(blocks, 0), rank.tiles_done.assign(blocks, 0);
        rank.expert_done.assign(setting_.groups(), 0), rank.times_run.assign(rank.all_tasks.size(), 0);
        rank.pushers_done.assign(setting_.rounds, 0), rank.pushed_here.assign(setting_.rounds, 0);
        const uint32_t self = &rank - ranks_.data();
        for (Rank& peer : ranks_) peer.ready_flags[self] = rank.step;
        return true;
    }

    bool begun(const Rank& rank) const {
        if (not rank.running) return false;
        for (const uint32_t flag : rank.ready_flags)
            if (flag < rank.step) return false;
        return true;
    }

    // --- Dispatch ---------------------------------------------------------------------------------------------------

    void fetch(Rank& rank, const Chunk& chunk) {
        for (const uint32_t source : chunk.sources)
            require(ranks_[source].running and ranks_[source].step == rank.step, "rows are pulled from staging of another launch");
        rank.rows_dispatched[chunk.block] += chunk.published;
    }

    bool dispatch(uint32_t r, uint32_t warp) {
        Rank& rank = ranks_[r];
        if (not begun(rank)) return false;
        uint32_t& next = rank.next_chunk[warp];
        if (next < rank.chunks.size()) {
            const Chunk& chunk = rank.chunks[next];
            if (chunk.block < setting_.lead or rank.tiles_done[chunk.block - setting_.lead] > 0) {
                fetch(rank, chunk);
                next += setting_.warps;
                return true;
            }
        }
        return warp == 0 and publish(r);
    }

    bool publish(uint32_t r) {
        Rank& rank = ranks_[r];
        if (rank.published == setting_.rounds or rank.pushers_done[rank.published] < setting_.clusters) return false;
        for (Rank& peer : ranks_) peer.done_flags[rank.published * setting_.ranks + r] = rank.step;
        ++rank.published;
        return true;
    }

    bool combine(Rank& rank) {
        if (not begun(rank) or rank.combined == setting_.rounds) return false;
        const uint32_t self = &rank - ranks_.data();
        uint32_t expected = 0;
        for (uint32_t source = 0; source < setting_.ranks; ++source) {
            if (rank.done_flags[rank.combined * setting_.ranks + source] < rank.step) return false;
            for (uint32_t group = rank.combined * setting_.experts; group < (rank.combined + 1) * setting_.experts; ++group)
                expected += ranks_[source].rows[group * setting_.ranks + self] * rank.n_blocks[kPush];
        }
        require(rank.pushed_here[rank.combined] == expected, "a round is combined before all of its rows are back");
        ++rank.combined;
        return true;
    }

    // --- A cluster --------------------------------------------------------------------------------------------------

    // The row blocks that a task by rows covers, and how many of its n blocks exist in each.
    void for_blocks(const Rank& rank, const pk::Task& task, const std::function<void(uint32_t block, uint32_t tiles)>& visit) const {
        const uint32_t tiles = task.splits_n ? std::min(pk::kClusterSize, rank.n_blocks[task.phase] - task.n_block) : 1;
        for (uint32_t i = 0; i < (task.splits_n ? 1 : pk::kClusterSize); ++i) visit(task.pool_block + task.block + i, tiles);
    }

    bool can_read(const Rank& rank, const pk::Task& task) const {
        const uint32_t tiles_of_block = rank.n_blocks[kFirst];
        if (task.phase > kPush) return rank.expert_done[task.expert] >= pk::ceil_div(task.rows, pk::kBlockM) * tiles_of_block;
        bool there = true;
        for_blocks(rank, task, [&](uint32_t block, uint32_t) {
            uint32_t rows = Direction::kZeroFills ? pk::kBlockM : 0;
            if (not Direction::kZeroFills)
                for (const uint32_t count : rank.block_rows[block]) rows += count;
            there = there and (task.phase == kFirst ? rank.rows_dispatched[block] >= rows : rank.tiles_done[block] >= tiles_of_block);
        });
        return there;
    }

    bool produce(Rank& rank, Cluster& cluster) {
        if (not begun(rank)) return false;
        if (cluster.loaded < cluster.tasks.size()) {
            if (not can_read(rank, cluster.tasks[cluster.loaded])) return false;
            ++cluster.loaded;
            return true;
        }
        if (cluster.all_claimed or cluster.tasks.size() - std::min(cluster.multiplied, cluster.stored) >= setting_.task_slots) return false;
        const uint32_t index = setting_.claims == kInTurn ? cluster.next_index : rank.next_task++;
        cluster.next_index += setting_.clusters;
        pk::Task task;
        if (not cluster.order.seek(index, task)) {
            cluster.all_claimed = true;
            return true;
        }
        const uint32_t taken = setting_.claims == kBackwards ? rank.all_tasks.size() - 1 - index : index;
        ++rank.times_run[taken];
        cluster.tasks.push_back(rank.all_tasks[taken]);
        cluster.pushes_over.push_back(setting_.claims != kBackwards and cluster.order.passed(kPush));
        return true;
    }

    void announce(Rank& rank, Cluster& cluster, uint32_t rounds) {
        for (; cluster.announced < rounds; ++cluster.announced) ++rank.pushers_done[cluster.announced];
    }

    bool multiply(uint32_t r, Cluster& cluster, uint32_t c) {
        Rank& rank = ranks_[r];
        if (not begun(rank) or cluster.math_over) return false;
        if (not cluster.head_fetched) {
            for (uint32_t i = 0; i < setting_.head_chunks; ++i) {
                const uint32_t chunk = c * setting_.head_chunks + i;
                if (chunk < rank.chunks.size()) fetch(rank, rank.chunks[chunk]);
            }
            cluster.head_fetched = true;
            return true;
        }
        if (cluster.multiplied == cluster.tasks.size()) {
            if (not cluster.all_claimed) return false;
            announce(rank, cluster, setting_.rounds);
            cluster.math_over = true;
            return true;
        }
        const pk::Task& task = cluster.tasks[cluster.multiplied];
        if (cluster.pushes_over[cluster.multiplied]) announce(rank, cluster, setting_.rounds);
        if (cluster.multiplied == cluster.loaded) return false;
        if (task.phase == kPush) {
            announce(rank, cluster, setting_.round_of(task.expert));
            for_blocks(rank, task, [&](uint32_t block, uint32_t tiles) {
                const uint32_t round = setting_.round_of(rank.block_group[block]);
                require(round >= cluster.announced, "a row is pushed after its round was announced");
                for (uint32_t source = 0; source < setting_.ranks; ++source) {
                    const uint32_t rows = rank.block_rows[block][source];
                    if (rows == 0) continue;
                    require(ranks_[source].running and ranks_[source].step == rank.step, "a row is pushed into another launch");
                    ranks_[source].pushed_here[round] += rows * tiles;
                }
            });
        }
        ++cluster.multiplied;
        return true;
    }

    bool store(Rank& rank, Cluster& cluster) {
        if (not begun(rank) or cluster.stored == cluster.multiplied) return false;
        const pk::Task& task = cluster.tasks[cluster.stored++];
        if (task.phase == kFirst)
            for_blocks(rank, task, [&](uint32_t block, uint32_t tiles) {
                rank.tiles_done[block] += tiles;
                rank.expert_done[task.expert] += tiles;
            });
        return true;
    }

    // --- Progress ---------------------------------------------------------------------------------------------------

    bool finished() const {
        for (const Rank& rank : ranks_)
            if (rank.running or rank.step < setting_.steps) return false;
        return true;
    }

    bool one_event() {
        std::uniform_int_distribution<uint32_t> pick(0, actors_.size() - 1);
        std::uniform_real_distribution<> chance;
        for (uint32_t attempt = 0; attempt < 4 * actors_.size(); ++attempt) {
            const Actor& actor = actors_[pick(random_)];
            if (chance(random_) < actor.speed and actor.act()) return true;
        }
        const uint32_t start = pick(random_);
        for (uint32_t i = 0; i < actors_.size(); ++i)
            if (actors_[(start + i) % actors_.size()].act()) return true;
        return false;
    }

    std::string where() const {
        std::ostringstream out;
        for (uint32_t r = 0; r < setting_.ranks; ++r) {
            const Rank& rank = ranks_[r];
            out << "rank " << r << " step " << rank.step << ":";
            for (const Cluster& cluster : rank.clusters)
                if (cluster.loaded < cluster.tasks.size()) {
                    const pk::Task& task = cluster.tasks[cluster.loaded];
                    out << " (phase " << task.phase << " group " << task.expert << " block " << task.block << ")";
                }
            out << "; ";
        }
        return out.str();
    }

    const Direction direction_;
    const Setting setting_;
    std::mt19937 random_;
    std::vector<Rank> ranks_;
    std::vector<Actor> actors_;
};

template <typename Direction>
std::string answer(const std::string& what, std::istream& in) {
    if (what == "order") return list_order<Direction>(in);
    try {
        return Simulation<Direction>(in).run();
    } catch (const Broken& broken) {
        return std::string("broken: ") + broken.what();
    }
}

int main() {
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream in(line);
        std::string what, direction;
        in >> what >> direction;
        std::cout << (direction == "forward" ? answer<Forward>(what, in) : answer<Backward>(what, in)) << std::endl;
    }
}
