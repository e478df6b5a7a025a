// Runs `slim_cluster`, as `kernel.inc` has it for a CPU.
#include "instructions.h"
#include "kernel.inc"

static std::function<void()> body;

static void run_thread() {
    body();
    current->done = true;
    progress++;
    let_others_run();
}

// Whether a warp of a block has a role: 0 adds, 1 scores, 2 exchanges, 3 rotates and 4 copies.
static bool has_role(int warp, int role) {
    const int begin[] = {0, ADDING, ADDING + SCORING, ADDING + SCORING + 1, ADDING + SCORING + 2};
    return role >= 0 && warp >= begin[role] && (role == 4 || warp < begin[role + 1]);
}

// Warps of the role `starved`, unless it is -1, only run where all others wait.
// Returns 0, or 1 when all threads wait for each other.
extern "C" int run(int block_count, unsigned seed, int starved, const float* query, const TensorMap* keys,
                   const TensorMap* coordinates, const unsigned short* key_scales,
                   const unsigned short* coordinate_scales, const float* key_offset, const float* cosines,
                   const float* sines, const float* turns, const int* starts, const int* lengths, float* part_out,
                   float* part_lse, i64 rows, float scale_log2, i64 query_row_stride, i64 query_head_stride,
                   i64 table_row_stride, i64 key_row_stride, i64 key_stride, i64 coordinate_row_stride,
                   i64 coordinate_stride) {
    std::srand(seed);
    cluster_size = MEMBERS, gridDim.x = block_count;
    cluster_barriers.clear(), in_flight.clear();
    blocks.assign(block_count, {});
    for (Block& block : blocks) {
        block.memory = static_cast<char*>(std::aligned_alloc(1024, (SHARED_BYTES + 1023) / 1024 * 1024));
        std::memset(block.memory, 0xff, SHARED_BYTES);  // NaN
        block.warps.resize(BLOCK_THREADS / 32);
    }
    body = [=] {
        slim_cluster(query, *keys, *coordinates, key_scales, coordinate_scales, key_offset, cosines, sines, turns,
                     starts, lengths, part_out, part_lse, rows, scale_log2, query_row_stride, query_head_stride,
                     table_row_stride, key_row_stride, key_stride, coordinate_row_stride, coordinate_stride);
    };
    constexpr size_t STACK = 256 * 1024;
    std::vector<Thread> threads(block_count * BLOCK_THREADS);
    char* const stacks = static_cast<char*>(std::malloc(STACK * threads.size()));
    for (size_t i = 0; i < threads.size(); i++) {
        threads[i].block = i / BLOCK_THREADS, threads[i].index = i % BLOCK_THREADS;
        ucontext_t& beginning = threads[i].beginning;
        getcontext(&beginning);
        beginning.uc_stack.ss_sp = stacks + i * STACK, beginning.uc_stack.ss_size = STACK;
        makecontext(&beginning, run_thread, 0);
    }
    size_t left = threads.size();
    int idle = 0;
    while (left && idle < 100) {
        const u64 before = progress;
        for (size_t first = 0; first < threads.size(); first += 32) {
            if (std::rand() % 4 == 0) continue;  // warps fall behind each other
            if (idle < 20 && has_role(first % BLOCK_THREADS / 32, starved)) continue;
            for (size_t i = first; i < first + 32; i++) {
                if (threads[i].done) continue;
                run_until_it_waits(threads[i]);
                left -= threads[i].done;
            }
        }
        std::vector<Work> begun;
        std::swap(begun, in_flight);
        for (const Work& work : begun) {
            if (std::rand() % 3) {
                in_flight.push_back(work);
            } else {
                work();
            }
        }
        idle = progress == before && in_flight.empty() ? idle + 1 : 0;
    }
    std::free(stacks);
    for (Block& block : blocks) std::free(block.memory);
    return left > 0;
}
