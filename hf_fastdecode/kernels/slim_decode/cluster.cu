// Slim decode on thread block clusters: scores and averages of the cached keys, each key read from device memory once.
//
// Averages P K have all columns of the cached keys for each head, more sums than one multiprocessor holds. A cluster of
// MEMBERS blocks shares the columns: a block owns OWN heads and their columns, and some columns of the V-coordinates.
// For each tile of TILE tokens a block computes the scores of its heads from its columns, in shared memory, and their
// weights; it sends the weights to all blocks of its cluster through distributed shared memory, and adds the tile,
// which is still in its shared memory, to the averages of all heads over its own columns. The averages of a tile are
// added while the scores of the next one are exchanged.
//
// Clusters take equal shares of the tiles of all rows (LeanAttention, section 4), computed here from the lengths. A
// piece is what a cluster has of one row; it writes an fp32 partial, which `merge_pieces` merges.
//
// ClusterShape.numbers in cluster.py defines HEADS, HEAD_DIM, RANK, ROTATED, OFFSET, STARTS, BF16, MEMBERS, TILE,
// STAGES, WARPS and SHARED_BYTES.

#include "instructions.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int OWN = HEADS / MEMBERS;
constexpr int HALF = HEAD_DIM / 2;
constexpr int KEYS = HEADS * HEAD_DIM;
constexpr int WIDTH = KEYS + RANK;
constexpr int KEY_COLUMNS = OWN * HEAD_DIM;
constexpr int RANK_COLUMNS = (RANK + 16 * MEMBERS - 1) / (16 * MEMBERS) * 16;  // per block
constexpr int ROW_BYTES = (2 * (KEY_COLUMNS + RANK_COLUMNS) + 127) / 128 * 128;
constexpr int STAGE_BYTES = TILE * ROW_BYTES;
constexpr int BLOCKS = (KEY_COLUMNS + RANK_COLUMNS) / 16;  // of 16 columns, as matrix units take them
constexpr int WARP_BLOCKS = (BLOCKS + WARPS - 1) / WARPS;
constexpr int HEAD_BLOCKS = (HEADS + 7) / 8;
constexpr int PADDED_HEADS = 8 * HEAD_BLOCKS;
constexpr int STEPS = TILE / 16;
// Buffers of weights, which tiles take in turns. No message says that a buffer is free: a block sends the weights of
// tile t after it has received those of t - 2 from all members, and each member sent these after all its warps had
// added t - 4, the last tile that had the same buffer.
constexpr int RING = 4;
constexpr int WEIGHT_BYTES = PADDED_HEADS * TILE * 2;
constexpr float SHIFT = BF16 ? 0.0f : 14.0f;  // weights are scaled by 2^SHIFT, away from fp16's subnormal numbers
constexpr float LOWEST = -1e30f;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

// How a warp computes the scores of its tokens. RoPE mixes column i of a head with column i + HALF: a pair.
constexpr int PAIRS = 8;                       // per lane: 16 bytes of each half of a head
constexpr int LANES = HALF / PAIRS;            // per token
constexpr int AT_ONCE = 32 / LANES;            // tokens
constexpr int WARP_TOKENS = TILE / WARPS;      // of each tile
constexpr int TOKENS = WARP_TOKENS / AT_ONCE;  // per lane, one after the other

static_assert(HEADS % MEMBERS == 0 && HEAD_DIM % 64 == 0 && RANK % 8 == 0 && STAGES >= 3);
static_assert((TILE == 32 || TILE == 64) && LANES <= 32);
static_assert(TOKENS >= 1 && TOKENS * AT_ONCE == WARP_TOKENS && TOKENS <= LANES);

// Shared memory, in bytes from its beginning. A head's factors are two: that on its averages of earlier tiles, and the
// sum of its weights so far.
constexpr int WEIGHTS_AT = STAGES * STAGE_BYTES;
constexpr int SCORES_AT = WEIGHTS_AT + RING * WEIGHT_BYTES;
constexpr int FACTORS_AT = SCORES_AT + OWN * TILE * 4;
constexpr int QUERY_AT = FACTORS_AT + RING * PADDED_HEADS * 8;
constexpr int OFFSET_AT = QUERY_AT + OWN * HEAD_DIM * 4;
constexpr int TURNS_AT = OFFSET_AT + (OFFSET ? OWN * HEAD_DIM * 4 : 0);
constexpr int BARRIERS_AT = TURNS_AT + (ROTATED ? WARP_TOKENS * HEAD_DIM * 4 : 0);
static_assert(BARRIERS_AT + RING * 8 == SHARED_BYTES);

// Where a head's number `column` lies in shared memory: quads that lanes read at once follow one another. Likewise for
// rows of the table of turns.
__device__ __forceinline__ int pair_place(int column) {
    const int half = column / HALF, pair = column % HALF;
    return ((half * 2 + pair % PAIRS / 4) * LANES + pair / PAIRS) * 4 + pair % 4;
}

// Loads a lane's PAIRS numbers of one half of such a row.
__device__ __forceinline__ void load_pairs(float (&to)[PAIRS], const float* row, int half, int lane) {
#pragma unroll
    for (int quad = 0; quad < 2; quad++) {
        const float4 found = reinterpret_cast<const float4*>(row)[(half * 2 + quad) * LANES + lane];
        to[4 * quad] = found.x, to[4 * quad + 1] = found.y, to[4 * quad + 2] = found.z, to[4 * quad + 3] = found.w;
    }
}

// Byte of a column in a tile. Chunks of 16 bytes are permuted within 128, so that reads of 8 tokens meet all banks.
__device__ __forceinline__ u32 tile_byte(int token, int column) {
    const u32 byte = 2 * column;
    return token * ROW_BYTES + (byte & ~127u) + ((byte & 127u) ^ ((token & 7) << 4));
}

// Byte of a weight: a row per head, permuted likewise.
__device__ __forceinline__ u32 weight_byte(int head, int token) {
    const int permuted = TILE == 64 ? head & 7 : (head >> 1) & 3;
    return head * (TILE * 2) + ((2 * token) ^ (permuted << 4));
}

// Sums each of COUNT values over the LANES lanes of a token. Lane l of them gets the sum of value l * COUNT / LANES.
template <int COUNT>
__device__ __forceinline__ float sum_over_lanes(float (&value)[COUNT], int lane) {
    int distance = LANES / 2;
#pragma unroll
    for (int count = COUNT; count > 1; count /= 2, distance /= 2) {
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < count / 2; i++) {
            const float kept = upper ? value[i + count / 2] : value[i];
            const float given = upper ? value[i] : value[i + count / 2];
            value[i] = kept + __shfl_xor_sync(~0u, given, distance);
        }
    }
    float sum = value[0];
#pragma unroll
    for (; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

struct Share {
    int begin, end;  // tiles, among those of all rows
};

__device__ __forceinline__ int first_token(const int* starts, int row) { return STARTS ? starts[row] : 0; }

__device__ __forceinline__ int tiles_of(const int* starts, const int* lengths, int row) {
    const int tokens = lengths[row] - first_token(starts, row);
    return tokens > 0 ? (tokens + TILE - 1) / TILE : 0;
}

// Issues the copies of a tile; zeros behind the last token.
template <bool WHOLE>
__device__ __forceinline__ void copy_tile(u32 stage, const char* keys, const char* coordinates, int token, int length,
                                          i64 key_stride, i64 coordinate_stride, int member, int thread) {
    constexpr int CHUNKS = KEY_COLUMNS / 8;
    keys += 2 * member * KEY_COLUMNS;
    if constexpr (THREADS % CHUNKS == 0 && TILE * CHUNKS % THREADS == 0) {  // a thread keeps to its columns
        constexpr int AT_A_TIME = THREADS / CHUNKS;
        const int column = thread % CHUNKS * 8;
        int t = thread / CHUNKS;
        const char* source = keys + (token + t) * key_stride + 2 * column;
#pragma unroll
        for (int pass = 0; pass < TILE / AT_A_TIME; pass++, t += AT_A_TIME, source += AT_A_TIME * key_stride) {
            const bool valid = WHOLE || token + t < length;
            copy16(stage + tile_byte(t, column), valid ? source : keys, valid);
        }
    } else {
#pragma unroll 4
        for (int index = thread; index < TILE * CHUNKS; index += THREADS) {
            const int t = index / CHUNKS, column = index % CHUNKS * 8;
            const bool valid = WHOLE || token + t < length;
            copy16(stage + tile_byte(t, column), keys + (valid ? (token + t) * key_stride + 2 * column : 0), valid);
        }
    }
    if constexpr (RANK > 0) {
        constexpr int RANK_CHUNKS = RANK > 0 ? RANK_COLUMNS / 8 : 1;  // without a warning of a division by 0
        for (int index = thread; index < TILE * RANK_CHUNKS; index += THREADS) {
            const int t = index / RANK_CHUNKS, column = index % RANK_CHUNKS * 8;
            const int of_rank = member * RANK_COLUMNS + column;
            const bool valid = (WHOLE || token + t < length) && of_rank < RANK;
            const char* source = coordinates + (valid ? (token + t) * coordinate_stride + 2 * of_rank : 0);
            copy16(stage + tile_byte(t, KEY_COLUMNS + column), source, valid);
        }
    }
}

extern "C" __global__ void __cluster_dims__(MEMBERS, 1, 1) __launch_bounds__(THREADS, 1)
    slim_cluster(const float* __restrict__ query,       // [rows, heads, head_dim]
                 const char* __restrict__ keys,         // [rows, slots, heads * head_dim]
                 const char* __restrict__ coordinates,  // [rows, slots, r]
                 const float* __restrict__ key_offset,  // [heads * head_dim], with OFFSET
                 const float* __restrict__ cosines,     // [rows or 1, slots, head_dim / 2], with ROTATED
                 const float* __restrict__ sines,       // likewise
                 const float* __restrict__ turns,       // [8, 2, head_dim / 2]: rotations by 0 to 7 positions
                 const int* __restrict__ starts,        // [rows], with STARTS
                 const int* __restrict__ lengths,       // [rows]
                 float* __restrict__ part_out,          // [groups + rows - 1, heads, heads * head_dim + r]
                 float* __restrict__ part_lse,          // [groups + rows - 1, heads], base 2
                 i64 rows, i64 slots, float scale_log2, i64 query_row_stride, i64 query_head_stride, i64 key_row_stride,
                 i64 key_stride, i64 coordinate_row_stride, i64 coordinate_stride,  // in bytes
                 i64 table_row_stride) {
    extern __shared__ __align__(1024) char memory[];
    const u32 base = shared_address(memory);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int member = blockIdx.x % MEMBERS, group = blockIdx.x / MEMBERS, groups = gridDim.x / MEMBERS;
    float* const scores = reinterpret_cast<float*>(memory + SCORES_AT);
    float* const own_query = reinterpret_cast<float*>(memory + QUERY_AT);
    float* const own_offset = reinterpret_cast<float*>(memory + OFFSET_AT);

    if (thread < RING) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(base + BARRIERS_AT + 8 * thread), "r"(1));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = thread; i < RING * WEIGHT_BYTES / 4; i += THREADS) {  // of padding heads, which nobody sends
        reinterpret_cast<u32*>(memory + WEIGHTS_AT)[i] = 0;
    }
    for (int i = thread; i < RING * PADDED_HEADS * 2; i += THREADS) {
        reinterpret_cast<float*>(memory + FACTORS_AT)[i] = 1.0f;
    }
    if constexpr (ROTATED) {
        for (int i = thread; i < WARP_TOKENS * HEAD_DIM; i += THREADS) {
            reinterpret_cast<float*>(memory + TURNS_AT)[i / HEAD_DIM * HEAD_DIM + pair_place(i % HEAD_DIM)] = turns[i];
        }
    }
    cluster_sync();

    i64 total = 0;
    for (int row = lane; row < rows; row += 32) total += tiles_of(starts, lengths, row);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
    const Share share{static_cast<int>(group * total / groups), static_cast<int>((group + 1) * total / groups)};

    const int lane_in_token = lane % LANES;
    // The lane's first token in its warp. Where 8 lanes read 64 bytes of two tokens at once, those are 4 apart, so that
    // the permutation in tile_byte gives them different banks.
    const int lane_token = (LANES == 4 ? lane / 8 + (lane & 4) : lane / LANES) * TOKENS;
    const int warp_token = warp * WARP_TOKENS;

    u32 sequence = 0;  // number of a tile among all tiles of this cluster
    int row_begin = 0;
    for (int row = 0; row < rows && row_begin < share.end; row++) {
        const int row_tiles = tiles_of(starts, lengths, row);
        const int begin = max(share.begin - row_begin, 0), end = min(share.end - row_begin, row_tiles);
        row_begin += row_tiles;
        if (begin >= end) continue;
        const int first = first_token(starts, row), length = lengths[row];
        const char* const row_keys = keys + row * key_row_stride;
        const char* const row_coordinates = coordinates + row * coordinate_row_stride;
        const float* const row_cosines = cosines + row * table_row_stride;
        const float* const row_sines = sines + row * table_row_stride;
        const auto load = [&](int tile) {
            const u32 stage = base + tile % STAGES * STAGE_BYTES;
            const int token = first + tile * TILE;
            if (tile < end && token + TILE <= length) {
                copy_tile<true>(stage, row_keys, row_coordinates, token, length, key_stride, coordinate_stride, member,
                                thread);
            } else if (tile < end) {
                copy_tile<false>(stage, row_keys, row_coordinates, token, length, key_stride, coordinate_stride, member,
                                 thread);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        };

        __syncthreads();  // all have read the query and the tiles of the row before
#pragma unroll
        for (int ahead = 0; ahead < STAGES - 2; ahead++) load(begin + ahead);
        const float* const row_query = query + row * query_row_stride;
        for (int i = thread; i < OWN * HALF; i += THREADS) {
            const int own_head = i / HALF, pair = i % HALF, at = own_head * HEAD_DIM;
            const float* const of_head = row_query + (member * OWN + own_head) * query_head_stride;
            const float low = of_head[pair] * scale_log2, high = of_head[pair + HALF] * scale_log2;
            own_query[at + pair_place(pair)] = low, own_query[at + pair_place(pair + HALF)] = high;
            if constexpr (OFFSET) {  // what the key offset adds to the two products of a pair
                const float* const offset = key_offset + member * KEY_COLUMNS + at;
                own_offset[at + pair_place(pair)] = low * offset[pair] + high * offset[pair + HALF];
                own_offset[at + pair_place(pair + HALF)] = high * offset[pair] - low * offset[pair + HALF];
            }
        }

        // The table's entries of this warp's first token of the next tile.
        float next_cos[PAIRS], next_sin[PAIRS];
        const auto load_tables = [&](int tile) {
            if constexpr (ROTATED) {
                const i64 token = min(static_cast<i64>(first + tile * TILE + warp_token), slots - 1);
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    next_cos[p] = row_cosines[token * HALF + lane_in_token * PAIRS + p];
                    next_sin[p] = row_sines[token * HALF + lane_in_token * PAIRS + p];
                }
            }
        };
        load_tables(begin);

        float sums[WARP_BLOCKS][HEAD_BLOCKS][4];
#pragma unroll
        for (int b = 0; b < WARP_BLOCKS; b++)
#pragma unroll
            for (int n = 0; n < HEAD_BLOCKS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[b][n][i] = 0.0f;
        constexpr int WARP_HEADS = (OWN + WARPS - 1) / WARPS;  // whose weights this warp computes
        float row_max[WARP_HEADS], row_sum[WARP_HEADS];
#pragma unroll
        for (int i = 0; i < WARP_HEADS; i++) row_max[i] = LOWEST, row_sum[i] = 0.0f;

        // Adds a tile, once all weights have come: sums = rescale * sums + weights * tile.
        const auto add_tile = [&](int tile, u32 sequence) {
            const u32 buffer = sequence % RING;
            wait(base + BARRIERS_AT + 8 * buffer, sequence / RING & 1);
            u32 weights[STEPS][HEAD_BLOCKS][2];
            const u32 weights_at = base + WEIGHTS_AT + buffer * WEIGHT_BYTES;
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
#pragma unroll
                for (int n = 0; n < HEAD_BLOCKS; n += 2) {
                    const int head = min(8 * n + (lane & 7) + (lane & 16) / 2, PADDED_HEADS - 1);
                    u32 found[4];
                    load_matrices(found, weights_at + weight_byte(head, 16 * k + (lane & 8)));
                    weights[k][n][0] = found[0], weights[k][n][1] = found[1];
                    if (n + 1 < HEAD_BLOCKS) weights[k][n + 1][0] = found[2], weights[k][n + 1][1] = found[3];
                }
            }
            const float* const factors =
                reinterpret_cast<const float*>(memory + FACTORS_AT) + buffer * PADDED_HEADS * 2;
            const u32 stage = base + tile % STAGES * STAGE_BYTES;
#pragma unroll
            for (int b = 0; b < WARP_BLOCKS; b++) {
                const int block = warp + b * WARPS;
                if (block < BLOCKS) {
                    // The product of a tile is added in fp32, outside the matrix unit, whose sums truncate: errors of a
                    // column grow by the matrix from keys to values, unlike errors of a weight, which all share.
                    float part[HEAD_BLOCKS][4];
#pragma unroll
                    for (int n = 0; n < HEAD_BLOCKS; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) part[n][i] = 0.0f;
#pragma unroll
                    for (int k = 0; k < STEPS; k++) {
                        u32 columns[4];
                        const int token = 16 * k + (lane & 7) + (lane & 16) / 2;
                        load_transposed(columns, stage + tile_byte(token, 16 * block + (lane & 8)));
#pragma unroll
                        for (int n = 0; n < HEAD_BLOCKS; n++) multiply(part[n], columns, weights[k][n]);
                    }
#pragma unroll
                    for (int n = 0; n < HEAD_BLOCKS; n++) {
                        const int head = 8 * n + 2 * (lane & 3);
                        const float4 pair = *reinterpret_cast<const float4*>(factors + 2 * head);
                        sums[b][n][0] = fmaf(sums[b][n][0], pair.x, part[n][0]);
                        sums[b][n][1] = fmaf(sums[b][n][1], pair.z, part[n][1]);
                        sums[b][n][2] = fmaf(sums[b][n][2], pair.x, part[n][2]);
                        sums[b][n][3] = fmaf(sums[b][n][3], pair.z, part[n][3]);
                    }
                }
            }
        };

        for (int tile = begin; tile < end; tile++, sequence++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 3) : "memory");
            __syncthreads();  // the tile has arrived, and that of two before has been added
            load(tile + STAGES - 2);

            // Of each head weights and factors, from whichever member has it.
            if (thread == 0) expect(base + BARRIERS_AT + 8 * (sequence % RING), HEADS * (2 * TILE + 8));

            // Scores of this warp's tokens.
            float rotation_cos[TOKENS][PAIRS], rotation_sin[TOKENS][PAIRS];
            if constexpr (ROTATED) {
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    const float* const turn_row =
                        reinterpret_cast<const float*>(memory + TURNS_AT) + (lane_token + t) * HEAD_DIM;
                    float turn_cos[PAIRS], turn_sin[PAIRS];
                    load_pairs(turn_cos, turn_row, 0, lane_in_token);
                    load_pairs(turn_sin, turn_row, 1, lane_in_token);
#pragma unroll
                    for (int p = 0; p < PAIRS; p++) {
                        rotation_cos[t][p] = next_cos[p] * turn_cos[p] - next_sin[p] * turn_sin[p];
                        rotation_sin[t][p] = next_sin[p] * turn_cos[p] + next_cos[p] * turn_sin[p];
                    }
                }
                load_tables(tile + 1);
            }
            const u32 stage = base + tile % STAGES * STAGE_BYTES;
#pragma unroll
            for (int h = 0; h < OWN; h++) {
                float query_low[PAIRS], query_high[PAIRS], along[PAIRS], across[PAIRS];
                load_pairs(query_low, own_query + h * HEAD_DIM, 0, lane_in_token);
                load_pairs(query_high, own_query + h * HEAD_DIM, 1, lane_in_token);
                if constexpr (OFFSET) {
                    load_pairs(along, own_offset + h * HEAD_DIM, 0, lane_in_token);
                    load_pairs(across, own_offset + h * HEAD_DIM, 1, lane_in_token);
                }
                float products[TOKENS];
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    const int token = warp_token + lane_token + t, column = h * HEAD_DIM + lane_in_token * PAIRS;
                    u32 low_words[4], high_words[4];
                    load_shared(low_words, stage + tile_byte(token, column));
                    load_shared(high_words, stage + tile_byte(token, column + HALF));
                    float product = 0.0f;
#pragma unroll
                    for (int p = 0; p < PAIRS; p++) {  // q R k = cos (q1 k1 + q2 k2) + sin (q2 k1 - q1 k2)
                        float low[2], high[2];
                        unpack(low_words[p / 2], low[0], low[1]);
                        unpack(high_words[p / 2], high[0], high[1]);
                        const float k1 = low[p % 2], k2 = high[p % 2], q1 = query_low[p], q2 = query_high[p];
                        const float same = fmaf(q2, k2, OFFSET ? fmaf(q1, k1, along[p]) : q1 * k1);
                        if constexpr (ROTATED) {
                            const float other = fmaf(-q1, k2, OFFSET ? fmaf(q2, k1, across[p]) : q2 * k1);
                            product = fmaf(rotation_cos[t][p], same, product);
                            product = fmaf(rotation_sin[t][p], other, product);
                        } else {
                            product += same;
                        }
                    }
                    products[t] = product;
                }
                const float sum = sum_over_lanes(products, lane);
                if (lane_in_token % (LANES / TOKENS) == 0) {
                    scores[h * TILE + warp_token + lane_token + lane_in_token * TOKENS / LANES] = sum;
                }
            }

            // Weights: a warp takes all scores of a head, and waits for them. Warps without a head go on.
            constexpr int WEIGHT_WARPS = OWN < WARPS ? OWN : WARPS;
            if (warp < WEIGHT_WARPS) {
                asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
#pragma unroll
                for (int i = 0; i < WARP_HEADS; i++) {
                    const int h = warp + i * WARPS;
                    if (h < OWN) {
                        const int token = 2 * lane, tokens = length - (first + tile * TILE);
                        float low = NEGATIVE_INFINITY, high = NEGATIVE_INFINITY;
                        if (token < TILE) {
                            const float2 found = *reinterpret_cast<const float2*>(scores + h * TILE + token);
                            low = token < tokens ? found.x : NEGATIVE_INFINITY;
                            high = token + 1 < tokens ? found.y : NEGATIVE_INFINITY;
                        }
                        float largest = fmaxf(low, high);
#pragma unroll
                        for (int distance = 16; distance > 0; distance /= 2) {
                            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
                        }
                        const float new_row_max = fmaxf(row_max[i], largest);
                        low = exp2_of(low - new_row_max + SHIFT), high = exp2_of(high - new_row_max + SHIFT);
                        float sum = low + high;
#pragma unroll
                        for (int distance = 16; distance > 0; distance /= 2) {
                            sum += __shfl_xor_sync(~0u, sum, distance);
                        }
                        const float rescale = exp2_of(row_max[i] - new_row_max);
                        row_sum[i] = row_sum[i] * rescale + sum;
                        row_max[i] = new_row_max;
                        const u32 packed = pack(low, high);
                        u32 chunk[4];  // of 8 tokens
#pragma unroll
                        for (int word = 0; word < 4; word++) {
                            chunk[word] = __shfl_sync(~0u, packed, lane % (TILE / 8) * 4 + word);
                        }
                        const int head = member * OWN + h;
                        const u32 buffer = sequence % RING, barrier = base + BARRIERS_AT + 8 * buffer;
                        const u32 weight_at =
                            base + WEIGHTS_AT + buffer * WEIGHT_BYTES + weight_byte(head, lane % (TILE / 8) * 8);
#pragma unroll
                        for (int to = lane / (TILE / 8); to < MEMBERS; to += 256 / TILE) {
                            send(remote(weight_at, to), chunk, remote(barrier, to));
                        }
                        const u32 factor_at = base + FACTORS_AT + (buffer * PADDED_HEADS + head) * 8;
                        if (lane < MEMBERS) {
                            send(remote(factor_at, lane), rescale, row_sum[i], remote(barrier, lane));
                        }
                    }
                }
            } else {
                asm volatile("bar.arrive 1, %0;" ::"n"(THREADS) : "memory");
            }

            if (tile > begin) add_tile(tile - 1, sequence - 1);
        }
        add_tile(end - 1, sequence - 1);
        asm volatile("cp.async.wait_group 0;" ::: "memory");

        const i64 piece = group + row;
        float* const out = part_out + piece * HEADS * WIDTH;
        const float* const factors =
            reinterpret_cast<const float*>(memory + FACTORS_AT) + (sequence - 1) % RING * PADDED_HEADS * 2;
#pragma unroll
        for (int b = 0; b < WARP_BLOCKS; b++) {
            const int block = warp + b * WARPS;
#pragma unroll
            for (int n = 0; n < HEAD_BLOCKS; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int head = 8 * n + 2 * (lane & 3) + i % 2;
                    const int own = 16 * block + lane / 4 + i / 2 * 8;
                    const int of_rank = member * RANK_COLUMNS + own - KEY_COLUMNS;
                    const int column = own < KEY_COLUMNS ? member * KEY_COLUMNS + own : KEYS + of_rank;
                    if (block < BLOCKS && head < HEADS && column < WIDTH) {
                        out[static_cast<i64>(head) * WIDTH + column] = sums[b][n][i] / factors[2 * head + 1];
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < WARP_HEADS; i++) {
            const int h = warp + i * WARPS;
            if (h < OWN && lane == 0) {
                part_lse[piece * HEADS + member * OWN + h] = row_max[i] + log2f(row_sum[i]) - SHIFT;
            }
        }
    }
    cluster_sync();  // no block leaves while another may write to its shared memory
}
