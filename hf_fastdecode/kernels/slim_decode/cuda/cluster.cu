// Slim decode on thread block clusters: scores and averages of the cached keys, each key read from device memory once.
//
// Averages P K have all columns of the cached keys for each head, more sums than one multiprocessor holds. A cluster of
// MEMBERS blocks shares the columns: a block owns OWN heads and their columns, and some columns of the V-coordinates.
// For each tile of TILE tokens a block computes the scores of its heads from its columns, in shared memory, and their
// weights; it sends the weights to all blocks of its cluster through distributed shared memory, and adds the tile,
// which is still in its shared memory, to the averages of all heads over its own columns.
//
// Warps are specialised, and tiles pass from one role to the next through mbarriers in shared memory:
//
//     copying    1 warp                        a tile to shared memory
//     rotating   1 warp                        the queries, back by the position of the tile's first token
//     scoring    4 or 8 warps                  scores of the block's heads
//     exchanging 1 warp                        scores to weights, sent to all blocks of the cluster
//     adding     4 or 8 warps                  weights times tile to the averages, by warpgroup matrix products
//
// Keys in 8 bits are copied as they are. A scoring warp dequantises what it has read for its scores to fp16, in units
// of a power of 2 near the largest scale so far, and stores that for the adding warps, so that copies are read once.
// Scales come from device memory through registers of the rotating warp.
//
// Clusters take equal shares of the tiles of all rows (LeanAttention, section 4), computed here from the lengths. A
// piece is what a cluster has of one row; it writes an fp32 partial, which `merge_pieces` merges.
//
// ClusterShape.numbers in cluster.py defines HEADS, HEAD_DIM, RANK, ROTATED, OFFSET, STARTS, BF16, SCALED (8 bits),
// FP8, MEMBERS, TILE, STAGES, COPIES, LEAD, ADDERS and SCORERS (groups of four warps) and SHARED_BYTES.

#include "averages.cuh"
#include "scores.cuh"

// The copying warp's part, of one thread.
__device__ __forceinline__ void copy_tiles(char* memory, const TensorMap& keys, const TensorMap& coordinates,
                                           const Piece& piece, int member) {
    const u32 base = shared_address(memory);
    for (int tile = piece.begin; tile < piece.end; tile++) {
        const u32 number = piece.sequence + (tile - piece.begin), place = number % PLACES;
        if (SCALED && number >= PLACES) {  // the tile before in this place has been scored, and so dequantised
            const u32 before = number - PLACES;
            wait(base + SCORED_AT + 8 * (before % STAGES), before / STAGES & 1);
        } else if (number >= STAGES) {
            wait(base + EMPTY_AT + 8 * place, (number / STAGES - 1) & 1);
        }
        const u32 barrier = base + FULL_AT + 8 * place, to = base + COPIES_AT + place * COPY_BYTES;
        const int token = piece.first + tile * TILE;
        expect(barrier, COPY_BYTES);
        copy(to, keys, 0, token, member * KEY_COPY_BOXES, piece.row, barrier);
#pragma unroll
        for (int box = KEY_COPY_BOXES; box < COPY_BOXES; box++) {
            const int column = member * RANK_COLUMNS / (SCALED ? 2 : 1) + (box - KEY_COPY_BOXES) * 64;  // of 16 bits
            copy(to + box * BOX_BYTES, coordinates, column, token, 0, piece.row, barrier);
        }
    }
}

// The exchanging warp's part: makes scores into weights, and sends them.
__device__ __forceinline__ void exchange(char* memory, float* part_lse, const Piece& piece, int member, int lane) {
    const u32 base = shared_address(memory);
    // The lane's head in a pass, and its tokens.
    const int of_pass = lane / HEAD_LANES, token = 4 * (lane % HEAD_LANES);
    float row_max[PASSES], row_sum[PASSES];  // the sum of the lane's weights; after the last tile, of the head's
    const int to = lane % HEAD_LANES;
    const u32 there = remote(base, min(to, MEMBERS - 1));  // shared memory of the member to which the lane sends
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) row_max[pass] = LOWEST, row_sum[pass] = 0.0f;

    for (int tile = piece.begin; tile < piece.end; tile++) {
        const u32 number = piece.sequence + (tile - piece.begin), stage = number % STAGES, buffer = number % RING;
        const int tokens = piece.length - (piece.first + tile * TILE) - token;  // from the lane's on
        if (number >= LEAD) {
            const u32 before = number - LEAD;
            wait(base + EMPTY_AT + 8 * (before % STAGES), before / STAGES & 1);
        }
        const u32 barrier = WEIGHED_AT + 8 * buffer;
        wait(base + SCORED_AT + 8 * stage, number / STAGES & 1);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int h = pass * WARP_HEADS + of_pass, head = member * OWN + h;
            const int at = SCORES_AT + ((stage * OWN + min(h, OWN - 1)) * TILE + token) * 4;
            const float4 found = *reinterpret_cast<const float4*>(memory + at);
            float score[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
            for (int t = 0; t < 4; t++) score[t] = t < tokens ? score[t] : NEGATIVE_INFINITY;
            float largest = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
#pragma unroll
            for (int distance = HEAD_LANES / 2; distance > 0; distance /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
            }
            const float new_row_max = fmaxf(row_max[pass], largest), rescale = exp2_of(row_max[pass] - new_row_max);
            float weight[4];
#pragma unroll
            for (int t = 0; t < 4; t++) weight[t] = exp2_of(score[t] - new_row_max + SHIFT);
            row_sum[pass] = row_sum[pass] * rescale + (weight[0] + weight[1]) + (weight[2] + weight[3]);
            row_max[pass] = new_row_max;
            if (tile == piece.end - 1) {
#pragma unroll
                for (int distance = HEAD_LANES / 2; distance > 0; distance /= 2) {
                    row_sum[pass] += __shfl_xor_sync(~0u, row_sum[pass], distance);
                }
            }
            if (h < OWN) {
                const u32 weight_at = WEIGHTS_AT + buffer * WEIGHT_BYTES + weight_byte(head, token);
                const u32 low = pack(weight[0], weight[1]), high = pack(weight[2], weight[3]);
                *reinterpret_cast<uint2*>(memory + weight_at) = {low, high};
                if (to < MEMBERS) {
                    const u32 at = FACTORS_AT + (buffer * PADDED_HEADS + head) * 8;
                    send(there + at, __float_as_uint(rescale), __float_as_uint(row_sum[pass]), there + barrier);
                }
            }
        }
        async_fence();
        __syncwarp();
        if (lane == 0) expect(base + barrier, (HEADS - OWN) * TILE * 2 + HEADS * 8);
        if (lane < MEMBERS && lane != member) {
            const u32 at = WEIGHTS_AT + buffer * WEIGHT_BYTES + member * OWN * TILE * 2;
            copy_to_member(there + at, base + at, OWN * TILE * 2, there + barrier);
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        const int h = pass * WARP_HEADS + of_pass;
        if (h < OWN && token == 0) {
            part_lse[static_cast<i64>(piece.number) * HEADS + member * OWN + h] =
                row_max[pass] + log2f(row_sum[pass]) - SHIFT;
        }
    }
}

extern "C" __global__ void __cluster_dims__(MEMBERS, 1, 1) __launch_bounds__(THREADS, 1)
    slim_cluster(const float* __restrict__ query,                // [rows, heads, head_dim]
                 const __grid_constant__ TensorMap keys,         // [rows, slots, heads * head_dim], of 16 bits or 8
                 const __grid_constant__ TensorMap coordinates,  // [rows, slots, r]
                 const unsigned short* __restrict__ key_scales,  // [rows, slots, heads] bf16, with SCALED
                 const unsigned short* __restrict__ coordinate_scales,  // [rows, slots, groups of r], likewise
                 const float* __restrict__ key_offset,                  // [heads * head_dim], with OFFSET
                 const float* __restrict__ cosines,  // [rows or 1, slots, head_dim / 2], with ROTATED
                 const float* __restrict__ sines,    // likewise
                 const float* __restrict__ turns,    // [TILE or more, 2, head_dim / 2]: RoPE's tables
                 const int* __restrict__ starts,     // [rows], with STARTS
                 const int* __restrict__ lengths,    // [rows]
                 float* __restrict__ part_out,       // [groups + rows - 1, heads, heads * head_dim + r]
                 float* __restrict__ part_lse,       // [groups + rows - 1, heads], base 2
                 i64 rows, float scale_log2, i64 query_row_stride, i64 query_head_stride, i64 table_row_stride,
                 i64 key_row_stride, i64 key_stride,  // of scales, in numbers
                 i64 coordinate_row_stride, i64 coordinate_stride) {
    extern __shared__ __align__(1024) char memory[];
    const u32 base = shared_address(memory);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int member = blockIdx.x % MEMBERS, group = blockIdx.x / MEMBERS, groups = gridDim.x / MEMBERS;

    if (thread < (SHARED_BYTES - FULL_AT) / 8) {
        const int at = FULL_AT + 8 * thread;
        int arrivals = 1;
        if (at >= EMPTY_AT && at < ROTATED_AT) arrivals = ADDING;
        if (at >= ROTATED_AT && at < SCORED_AT) arrivals = SCALED ? 2 : 1;
        if (at >= SCORED_AT && at < WEIGHED_AT) arrivals = SCORING;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(base + at), "r"(arrivals));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = thread; i < RING * WEIGHT_BYTES / 4; i += THREADS) {  // of padding heads, which nobody sends
        reinterpret_cast<u32*>(memory + WEIGHTS_AT)[i] = 0;
    }
    for (int i = thread; i < RING * PADDED_HEADS * 2; i += THREADS) {
        reinterpret_cast<float*>(memory + FACTORS_AT)[i] = 1.0f;
    }
    if constexpr (OFFSET) {
        for (int i = thread; i < KEY_COLUMNS; i += THREADS) {
            const int place = i / HEAD_DIM * HEAD_DIM + pair_place(i % HEAD_DIM);
            reinterpret_cast<float*>(memory + OFFSET_AT)[place] = key_offset[member * KEY_COLUMNS + i];
        }
    }
    if (thread == 0) prefetch(keys);
    if (thread == 0 && RANK) prefetch(coordinates);
    async_fence();
    cluster_sync();

    i64 total = 0;
    for (int row = lane; row < rows; row += 32) total += tiles_of(starts, lengths, row);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
    const int share_begin = group * total / groups, share_end = (group + 1) * total / groups;  // tiles of all rows

    const auto for_each_piece = [&](auto run) {
        u32 sequence = 0;
        int row_begin = 0;
        for (int row = 0; row < rows && row_begin < share_end; row++) {
            const int row_tiles = tiles_of(starts, lengths, row);
            const int begin = max(share_begin - row_begin, 0), end = min(share_end - row_begin, row_tiles);
            row_begin += row_tiles;
            if (begin >= end) continue;
            run(Piece{row, group + row, begin, end, first_token(starts, row), lengths[row], sequence});
            sequence += end - begin;
        }
    };
    if (warp < ADDING) {
        set_registers<ADDING_REGISTERS>();
        for_each_piece([&](const Piece& piece) { add(memory, part_out, piece, member, warp, lane); });
    } else if (warp < ADDING + SCORING) {
        set_registers<SCORING_REGISTERS>();
        for_each_piece([&](const Piece& piece) { score(memory, turns, piece, member, warp - ADDING, lane); });
    } else {
        set_registers<OTHER_REGISTERS>();
        const int role = warp - ADDING - SCORING;
        if (role == 0) {
            for_each_piece([&](const Piece& piece) { exchange(memory, part_lse, piece, member, lane); });
        } else if (role == 1) {
            for_each_piece([&](const Piece& piece) {
                const i64 tables = piece.row * table_row_stride;
                rotate_queries(memory, query + piece.row * query_row_stride, query_head_stride, cosines + tables,
                               sines + tables, piece, scale_log2, member, lane);
            });
        } else if (role == 2 && lane == 0) {
            for_each_piece([&](const Piece& piece) { copy_tiles(memory, keys, coordinates, piece, member); });
        } else if (role == 3 && SCALED) {
            const Scales scales{key_scales, coordinate_scales,     key_row_stride,
                                key_stride, coordinate_row_stride, coordinate_stride};
            for_each_piece([&](const Piece& piece) { hand_on_scales(memory, scales, piece, member, lane); });
        }
        __syncwarp();
    }
    cluster_sync();  // no block leaves while another may write to its shared memory
}
