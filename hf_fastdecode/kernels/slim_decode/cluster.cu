// Slim decode on thread block clusters: scores and averages of the cached keys, each key read from device memory once.
//
// Averages P K have all columns of the cached keys for each head, more sums than one multiprocessor holds. A cluster of
// MEMBERS blocks shares the columns: a block owns OWN heads and their columns, and some columns of the V-coordinates.
// For each tile of TILE tokens a block computes the scores of its heads from its columns, in shared memory, and their
// weights; it sends the weights to all blocks of its cluster through distributed shared memory, and adds the tile,
// which is still in its shared memory, to the averages of all heads over its own columns.
//
// One warp of a block issues the copies, one computes the weights and sends them. The others, in each step, compute the
// scores of one tile and add the tile that is LAG before, whose weights have come meanwhile. They do not wait for one
// another, so that the arithmetic of one overlaps with matrix products of others, and with waiting.
//
// Clusters take equal shares of the tiles of all rows (LeanAttention, section 4), computed here from the lengths. A
// piece is what a cluster has of one row; it writes an fp32 partial, which `merge_pieces` merges.
//
// ClusterShape.numbers in cluster.py defines HEADS, HEAD_DIM, RANK, ROTATED, OFFSET, STARTS, BF16, MEMBERS, TILE,
// STAGES, WARPS (that compute) and SHARED_BYTES.

#include "instructions.cuh"

constexpr int COMPUTING = 32 * WARPS;     // threads
constexpr int THREADS = COMPUTING + 128;  // with one warp that copies, one that exchanges, and two without work
constexpr int OWN = HEADS / MEMBERS;
constexpr int HALF = HEAD_DIM / 2;
constexpr int KEYS = HEADS * HEAD_DIM;
constexpr int WIDTH = KEYS + RANK;
constexpr int KEY_COLUMNS = OWN * HEAD_DIM;
constexpr int RANK_COLUMNS = (RANK + 16 * MEMBERS - 1) / (16 * MEMBERS) * 16;  // per block
constexpr int BOX_BYTES = TILE * 128;                                          // 64 columns of a tile
constexpr int KEY_BOXES = KEY_COLUMNS / 64, RANK_BOXES = (RANK_COLUMNS + 63) / 64, BOXES = KEY_BOXES + RANK_BOXES;
constexpr int STAGE_BYTES = BOXES * BOX_BYTES;
constexpr int BLOCKS = (KEY_COLUMNS + RANK_COLUMNS) / 16;  // of 16 columns, as matrix units take them
constexpr int WARP_BLOCKS = (BLOCKS + WARPS - 1) / WARPS;
constexpr int HEAD_BLOCKS = (HEADS + 7) / 8;
constexpr int PADDED_HEADS = 8 * HEAD_BLOCKS;
constexpr int K_STEPS = TILE / 16;
constexpr int LAG = STAGES >= 6 ? 3 : 2;  // tiles between scores and sums
// Buffers of weights, which tiles take in turns. No message says that a buffer is free: a block sends the weights of
// tile t after it has received those of t - LAG from all members, and each member sent these after all its warps had
// added t - 2 LAG.
constexpr int RING = LAG == 2 ? 4 : 8;
constexpr int SCORE_RING = 4;  // buffers of scores; computing warps are at most LAG tiles ahead of the exchanging one
constexpr int WEIGHT_BYTES = PADDED_HEADS * TILE * 2;
constexpr float SHIFT = BF16 ? 0.0f : 14.0f;  // weights are scaled by 2^SHIFT, away from fp16's subnormal numbers
constexpr float LOWEST = -1e30f;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

// How a warp computes the scores of its tokens. RoPE mixes column i of a head with column i + HALF: a pair.
constexpr int PAIRS = 8;                       // per lane: 16 bytes of each half of a head
constexpr int LANES = HALF / PAIRS;            // per token
constexpr int AT_ONCE = 32 / LANES;            // tokens
constexpr int WARP_TOKENS = TILE / WARPS;      // of each tile
constexpr int TOKENS = WARP_TOKENS / AT_ONCE;  // per lane
constexpr int VALUES = OWN * TOKENS;           // scores to which a lane contributes, in each tile
constexpr int REFRESH = 16;                    // tiles until queries are rotated from RoPE's tables again

// How the exchanging warp computes weights: a lane has 4 tokens of a head.
constexpr int HEAD_LANES = TILE / 4;
constexpr int WARP_HEADS = 32 / HEAD_LANES;                  // at once
constexpr int PASSES = (OWN + WARP_HEADS - 1) / WARP_HEADS;  // of the own heads

static_assert(HEADS % MEMBERS == 0 && HEAD_DIM % 64 == 0 && RANK % 8 == 0 && STAGES > LAG + 1);
static_assert((TILE == 32 || TILE == 64) && MEMBERS <= HEAD_LANES);
static_assert(WARPS == 8);  // of 240 registers, beside 4 warps of 24
static_assert(LANES <= 32 && TOKENS >= 1 && TOKENS * AT_ONCE == WARP_TOKENS);

// Shared memory, in bytes from its beginning. A head's factors are two: that on its averages of earlier tiles, and the
// sum of its weights so far, which only the last tile of a piece has.
constexpr int WEIGHTS_AT = STAGES * STAGE_BYTES;
constexpr int SCORES_AT = WEIGHTS_AT + RING * WEIGHT_BYTES;
constexpr int FACTORS_AT = SCORES_AT + SCORE_RING * OWN * TILE * 4;
constexpr int QUERY_AT = FACTORS_AT + RING * PADDED_HEADS * 8;
constexpr int OFFSET_AT = QUERY_AT + OWN * HEAD_DIM * 4;
constexpr int TURN_AT = OFFSET_AT + (OFFSET ? OWN * HEAD_DIM * 4 : 0);
// Barriers: a stage is full, is empty; a tile's scores are there, its weights have come.
constexpr int FULL_AT = TURN_AT + (ROTATED ? HEAD_DIM * 4 : 0);
constexpr int EMPTY_AT = FULL_AT + STAGES * 8;
constexpr int SCORED_AT = EMPTY_AT + STAGES * 8;
constexpr int WEIGHED_AT = SCORED_AT + SCORE_RING * 8;
static_assert(WEIGHED_AT + RING * 8 == SHARED_BYTES);

// Where a head's number `column` lies in shared memory: quads that lanes read at once follow one another.
__device__ __forceinline__ int pair_place(int column) {
    const int half = column / HALF, pair = column % HALF;
    return ((half * 2 + pair % PAIRS / 4) * LANES + pair / PAIRS) * 4 + pair % 4;
}

// Loads a lane's PAIRS numbers of one half of a head.
__device__ __forceinline__ void load_pairs(float (&to)[PAIRS], const float* head, int half, int lane_in_token) {
#pragma unroll
    for (int quad = 0; quad < 2; quad++) {
        const float4 found = reinterpret_cast<const float4*>(head)[(half * 2 + quad) * LANES + lane_in_token];
        to[4 * quad] = found.x, to[4 * quad + 1] = found.y, to[4 * quad + 2] = found.z, to[4 * quad + 3] = found.w;
    }
}

// Byte of a column in a tile. The copies permute chunks of 16 bytes so that reads of 8 tokens meet all banks.
__device__ __forceinline__ u32 tile_byte(int token, int column) {
    return column / 64 * BOX_BYTES + token * 128 + ((2 * (column % 64)) ^ ((token & 7) << 4));
}

// Byte of a weight: a row per head, whose chunks are permuted, so that reads of 8 heads meet all banks.
__device__ __forceinline__ u32 weight_byte(int head, int token) {
    const int permuted = TILE == 64 ? head & 7 : (head >> 1) & 3;
    return head * (TILE * 2) + ((2 * token) ^ (permuted << 4));
}

// How often `values` per lane can be halved among so many lanes.
__device__ constexpr int rounds(int values, int lanes) {
    return values % 2 == 0 && lanes > 1 ? 1 + rounds(values / 2, lanes / 2) : 0;
}

// Sums values, of each of a lane's tokens those of all heads, over the LANES lanes of a token, and stores them as
// scores. In each round lanes exchange one half of their values and keep the other, as long as they have several.
__device__ __forceinline__ void store_scores(float (&value)[VALUES], float* scores, int token, int lane) {
    constexpr int ROUNDS = rounds(VALUES, LANES), LEFT = VALUES >> ROUNDS;
    int first = 0;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const int count = VALUES >> (round + 1), distance = LANES >> (round + 1);
        const bool upper = lane & distance;
        first += upper ? count : 0;
#pragma unroll
        for (int i = 0; i < count; i++) {
            const float kept = upper ? value[i + count] : value[i];
            const float given = upper ? value[i] : value[i + count];
            value[i] = kept + __shfl_xor_sync(~0u, given, distance);
        }
    }
#pragma unroll
    for (int distance = LANES >> (ROUNDS + 1); distance > 0; distance /= 2) {
#pragma unroll
        for (int i = 0; i < LEFT; i++) value[i] += __shfl_xor_sync(~0u, value[i], distance);
    }
    if (lane % (LANES >> ROUNDS) == 0) {
#pragma unroll
        for (int i = 0; i < LEFT; i++) scores[(first + i) % OWN * TILE + token + (first + i) / OWN] = value[i];
    }
}

template <bool VALUE>
struct Flag {
    static constexpr bool value = VALUE;
};

// What a cluster has of one row.
struct Piece {
    int row, number;
    int begin, end;     // tiles, among those of the row
    int first, length;  // the row's first token, and the one behind its last
    u32 sequence;       // number of its first tile, among all tiles of the cluster
};

__device__ __forceinline__ int first_token(const int* starts, int row) { return STARTS ? starts[row] : 0; }

__device__ __forceinline__ int tiles_of(const int* starts, const int* lengths, int row) {
    const int tokens = lengths[row] - first_token(starts, row);
    return tokens > 0 ? (tokens + TILE - 1) / TILE : 0;
}

// The copying warp's part, of one thread.
__device__ __forceinline__ void copy_tiles(char* memory, const TensorMap& keys, const TensorMap& coordinates,
                                           const Piece& piece, int member) {
    const u32 base = shared_address(memory);
    for (int tile = piece.begin; tile < piece.end; tile++) {
        const u32 number = piece.sequence + (tile - piece.begin), stage = number % STAGES;
        if (number >= STAGES) wait(base + EMPTY_AT + 8 * stage, (number / STAGES - 1) & 1);
        const u32 barrier = base + FULL_AT + 8 * stage, to = base + stage * STAGE_BYTES;
        const int token = piece.first + tile * TILE;
        expect(barrier, STAGE_BYTES);
        copy(to, keys, 0, token, member * KEY_BOXES, piece.row, barrier);
#pragma unroll
        for (int box = 0; box < RANK_BOXES; box++) {
            const int column = member * RANK_COLUMNS + box * 64;
            copy(to + (KEY_BOXES + box) * BOX_BYTES, coordinates, column, token, 0, piece.row, barrier);
        }
    }
}

// The exchanging warp's part: makes scores into weights, and sends them.
__device__ __forceinline__ void exchange(char* memory, float* part_lse, const Piece& piece, int member, int lane) {
    const u32 base = shared_address(memory);
    // The lane's head in a pass, and its tokens.
    const int of_pass = lane / HEAD_LANES, token = 4 * (lane % HEAD_LANES);
    float row_max[PASSES], row_sum[PASSES];  // the sum of the lane's weights; after the last tile, of the head's
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) row_max[pass] = LOWEST, row_sum[pass] = 0.0f;

    for (int tile = piece.begin; tile < piece.end; tile++) {
        const u32 number = piece.sequence + (tile - piece.begin), buffer = number % RING;
        const u32 barrier = base + WEIGHED_AT + 8 * buffer;
        const int tokens = piece.length - (piece.first + tile * TILE) - token;  // from the lane's on
        if (lane == 0) expect(barrier, HEADS * (2 * TILE + 8));
        wait(base + SCORED_AT + 8 * (number % SCORE_RING), number / SCORE_RING & 1);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int h = pass * WARP_HEADS + of_pass, head = member * OWN + h;
            const int at = SCORES_AT + ((number % SCORE_RING * OWN + min(h, OWN - 1)) * TILE + token) * 4;
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
                const u32 weight_at = base + WEIGHTS_AT + buffer * WEIGHT_BYTES + weight_byte(head, token);
                const u32 factor_at = base + FACTORS_AT + (buffer * PADDED_HEADS + head) * 8;
                const u32 low = pack(weight[0], weight[1]), high = pack(weight[2], weight[3]);
#pragma unroll
                for (int to = 0; to < MEMBERS; to++) send(remote(weight_at, to), low, high, remote(barrier, to));
                if (const int to = lane % HEAD_LANES; to < MEMBERS) {
                    send(remote(factor_at, to), __float_as_uint(rescale), __float_as_uint(row_sum[pass]),
                         remote(barrier, to));
                }
            }
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

__device__ __forceinline__ void computing_sync() { asm volatile("bar.sync 1, %0;" ::"n"(COMPUTING) : "memory"); }

// The part of the computing warps. `query`, `cosines` and `sines` are those of the row.
__device__ __forceinline__ void compute(char* memory, const float* query, i64 query_head_stride,
                                        const float* key_offset, const float* cosines, const float* sines,
                                        float* part_out, const Piece& piece, i64 slots, float scale_log2, int member,
                                        int warp, int lane) {
    const u32 base = shared_address(memory);
    float* const own_query = reinterpret_cast<float*>(memory + QUERY_AT);
    float* const own_offset = reinterpret_cast<float*>(memory + OFFSET_AT);
    const float* const own_turn = reinterpret_cast<const float*>(memory + TURN_AT);
    const int begin = piece.begin, end = piece.end;
    const auto number = [&](int tile) { return piece.sequence + (tile - begin); };

    computing_sync();  // all have read the query of the piece before
    for (int i = 32 * warp + lane; i < KEY_COLUMNS; i += COMPUTING) {
        const int h = i / HEAD_DIM, column = i % HEAD_DIM, at = h * HEAD_DIM + pair_place(column);
        own_query[at] = query[(member * OWN + h) * query_head_stride + column] * scale_log2;
        if constexpr (OFFSET) own_offset[at] = key_offset[member * KEY_COLUMNS + i];
    }
    computing_sync();

    const int lane_in_token = lane % LANES;
    // The lane's first token in a tile. Where 8 lanes read 64 bytes of two tokens at once, those are 4 apart, and so
    // have different banks.
    const int lane_token = warp * WARP_TOKENS + (LANES == 4 ? lane / 8 + (lane & 4) : lane / LANES) * TOKENS;

    // Queries, rotated back by the positions of the lane's tokens: q R k = (R^T q) k. From tile to tile they are
    // turned on, and every REFRESH tiles rotated from the tables again, so that rounding errors do not add up.
    float query_low[VALUES][PAIRS], query_high[VALUES][PAIRS];
    const auto rotate_queries = [&](int tile) {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float cosine[PAIRS], sine[PAIRS];
            if constexpr (ROTATED) {
                const i64 token = min(static_cast<i64>(piece.first + tile * TILE + lane_token + t), slots - 1);
                const i64 at = token * HALF + lane_in_token * PAIRS;
#pragma unroll
                for (int p = 0; p < PAIRS; p++) cosine[p] = cosines[at + p], sine[p] = sines[at + p];
            }
#pragma unroll
            for (int h = 0; h < OWN; h++) {
                float low[PAIRS], high[PAIRS];
                load_pairs(low, own_query + h * HEAD_DIM, 0, lane_in_token);
                load_pairs(high, own_query + h * HEAD_DIM, 1, lane_in_token);
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    query_low[t * OWN + h][p] = ROTATED ? low[p] * cosine[p] + high[p] * sine[p] : low[p];
                    query_high[t * OWN + h][p] = ROTATED ? high[p] * cosine[p] - low[p] * sine[p] : high[p];
                }
            }
        }
    };

    float sums[WARP_BLOCKS][HEAD_BLOCKS][4];
#pragma unroll
    for (int b = 0; b < WARP_BLOCKS; b++)
#pragma unroll
        for (int n = 0; n < HEAD_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[b][n][i] = 0.0f;

    u32 score_stage = piece.sequence % STAGES, score_phase = piece.sequence / STAGES & 1, add_stage = score_stage;

    // One step. In the first and last ones a part has no tile; `all` says that each has one.
    const auto step = [&](int tile, auto all) {
        constexpr bool ALL = decltype(all)::value;
        const bool scores_one = ALL || tile < end, adds_one = ALL || tile >= begin + LAG;
        const u32 add_buffer = number(tile - LAG) % RING;
        if (scores_one) {
            if (ROTATED && (tile - begin) % REFRESH == 0) rotate_queries(tile);
            wait(base + FULL_AT + 8 * score_stage, score_phase);
            const int tokens = piece.length - (piece.first + tile * TILE);
            if (tokens < TILE) {  // what was copied of later ones may be anything, even NaN
                for (int i = lane; i < WARP_TOKENS * BOXES * 8; i += 32) {
                    const int t = warp * WARP_TOKENS + i / (BOXES * 8), column = i % (BOXES * 8) * 8;
                    const int at = score_stage * STAGE_BYTES + tile_byte(t, column);
                    if (t >= tokens) *reinterpret_cast<float4*>(memory + at) = {};
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before later copies
                __syncwarp();
            }
        }
        if (adds_one) wait(base + WEIGHED_AT + 8 * add_buffer, number(tile - LAG) / RING & 1);

        // The factors of the tile to add.
        u32 weights[K_STEPS][HEAD_BLOCKS][2];
        float2 factors[HEAD_BLOCKS];
        if (adds_one) {
            const u32 weights_at = base + WEIGHTS_AT + add_buffer * WEIGHT_BYTES;
#pragma unroll
            for (int k = 0; k < K_STEPS; k++) {
#pragma unroll
                for (int n = 0; n < HEAD_BLOCKS; n += 2) {
                    const int head = min(8 * n + (lane & 7) + (lane & 16) / 2, PADDED_HEADS - 1);
                    u32 found[4];
                    load_matrices(found, weights_at + weight_byte(head, 16 * k + (lane & 8)));
                    weights[k][n][0] = found[0], weights[k][n][1] = found[1];
                    if (n + 1 < HEAD_BLOCKS) weights[k][n + 1][0] = found[2], weights[k][n + 1][1] = found[3];
                }
            }
#pragma unroll
            for (int n = 0; n < HEAD_BLOCKS; n++) {
                const int at = FACTORS_AT + (add_buffer * PADDED_HEADS + 8 * n + 2 * (lane & 3)) * 8;
                const float4 found = *reinterpret_cast<const float4*>(memory + at);
                factors[n] = {found.x, found.z};
            }
        }

        float turn_cos[PAIRS], turn_sin[PAIRS], products[VALUES];
        if constexpr (ROTATED) {
            load_pairs(turn_cos, own_turn, 0, lane_in_token);
            load_pairs(turn_sin, own_turn, 1, lane_in_token);
        }
        const u32 score_at = base + score_stage * STAGE_BYTES, add_at = base + add_stage * STAGE_BYTES;
        constexpr int BOTH = OWN > WARP_BLOCKS ? OWN : WARP_BLOCKS;
#pragma unroll
        for (int index = 0; index < BOTH; index++) {  // of an own head, and of a block of columns
            if (index < OWN && scores_one) {
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    const int value = t * OWN + index, column = index * HEAD_DIM + lane_in_token * PAIRS;
                    u32 low_words[4], high_words[4];
                    load_shared(low_words, score_at + tile_byte(lane_token + t, column));
                    load_shared(high_words, score_at + tile_byte(lane_token + t, column + HALF));
                    float offset_low[PAIRS] = {}, offset_high[PAIRS] = {};
                    if constexpr (OFFSET) {
                        load_pairs(offset_low, own_offset + index * HEAD_DIM, 0, lane_in_token);
                        load_pairs(offset_high, own_offset + index * HEAD_DIM, 1, lane_in_token);
                    }
                    float product_low = 0.0f, product_high = 0.0f;
#pragma unroll
                    for (int p = 0; p < PAIRS; p++) {
                        float low[2], high[2];
                        unpack(low_words[p / 2], low[0], low[1]);
                        unpack(high_words[p / 2], high[0], high[1]);
                        const float k1 = OFFSET ? low[p % 2] + offset_low[p] : low[p % 2];
                        const float k2 = OFFSET ? high[p % 2] + offset_high[p] : high[p % 2];
                        const float q1 = query_low[value][p], q2 = query_high[value][p];
                        product_low = fmaf(q1, k1, product_low);
                        product_high = fmaf(q2, k2, product_high);
                        if constexpr (ROTATED) {
                            query_low[value][p] = q1 * turn_cos[p] + q2 * turn_sin[p];
                            query_high[value][p] = q2 * turn_cos[p] - q1 * turn_sin[p];
                        }
                    }
                    products[value] = product_low + product_high;
                }
            }
            if (index < WARP_BLOCKS && adds_one && (BLOCKS % WARPS == 0 || warp + index * WARPS < BLOCKS)) {
                // The product of a tile is added in fp32, outside the matrix unit, whose sums truncate: errors of a
                // column grow by the matrix from keys to values, unlike errors of a weight, which all share.
                float part[HEAD_BLOCKS][4];
#pragma unroll
                for (int n = 0; n < HEAD_BLOCKS; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) part[n][i] = 0.0f;
#pragma unroll
                for (int k = 0; k < K_STEPS; k++) {
                    u32 columns[4];
                    const int token = 16 * k + (lane & 7) + (lane & 16) / 2;
                    load_transposed(columns, add_at + tile_byte(token, 16 * (warp + index * WARPS) + (lane & 8)));
#pragma unroll
                    for (int n = 0; n < HEAD_BLOCKS; n++) multiply(part[n], columns, weights[k][n]);
                }
#pragma unroll
                for (int n = 0; n < HEAD_BLOCKS; n++) {
                    sums[index][n][0] = fmaf(sums[index][n][0], factors[n].x, part[n][0]);
                    sums[index][n][1] = fmaf(sums[index][n][1], factors[n].y, part[n][1]);
                    sums[index][n][2] = fmaf(sums[index][n][2], factors[n].x, part[n][2]);
                    sums[index][n][3] = fmaf(sums[index][n][3], factors[n].y, part[n][3]);
                }
            }
        }
        const u32 score_buffer = number(tile) % SCORE_RING;
        if (scores_one) {
            float* const scores = reinterpret_cast<float*>(memory + SCORES_AT) + score_buffer * OWN * TILE;
            store_scores(products, scores, lane_token, lane);
        }
        __syncwarp();
        if (lane == 0) {
            if (scores_one) arrive(base + SCORED_AT + 8 * score_buffer);
            if (adds_one) arrive(base + EMPTY_AT + 8 * add_stage);
        }
        if (++score_stage == STAGES) score_stage = 0, score_phase ^= 1;
        if (adds_one && ++add_stage == STAGES) add_stage = 0;
    };

    if constexpr (!ROTATED) rotate_queries(begin);
    for (int tile = begin; tile < end + LAG; tile++) {
        if (tile >= begin + LAG && tile < end) {
            step(tile, Flag<true>());
        } else {
            step(tile, Flag<false>());
        }
    }

    float* const out = part_out + static_cast<i64>(piece.number) * HEADS * WIDTH;
    const float* const factors =
        reinterpret_cast<const float*>(memory + FACTORS_AT) + number(end - 1) % RING * PADDED_HEADS * 2;
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
}

extern "C" __global__ void __cluster_dims__(MEMBERS, 1, 1) __launch_bounds__(THREADS, 1)
    slim_cluster(const float* __restrict__ query,                // [rows, heads, head_dim]
                 const __grid_constant__ TensorMap keys,         // [rows, slots, heads * head_dim]
                 const __grid_constant__ TensorMap coordinates,  // [rows, slots, r]
                 const float* __restrict__ key_offset,           // [heads * head_dim], with OFFSET
                 const float* __restrict__ cosines,              // [rows or 1, slots, head_dim / 2], with ROTATED
                 const float* __restrict__ sines,                // likewise
                 const float* __restrict__ turn,                 // [2, head_dim / 2]: rotation by TILE positions
                 const int* __restrict__ starts,                 // [rows], with STARTS
                 const int* __restrict__ lengths,                // [rows]
                 float* __restrict__ part_out,                   // [groups + rows - 1, heads, heads * head_dim + r]
                 float* __restrict__ part_lse,                   // [groups + rows - 1, heads], base 2
                 i64 rows, i64 slots, float scale_log2, i64 query_row_stride, i64 query_head_stride,
                 i64 table_row_stride) {
    extern __shared__ __align__(1024) char memory[];
    const u32 base = shared_address(memory);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int member = blockIdx.x % MEMBERS, group = blockIdx.x / MEMBERS, groups = gridDim.x / MEMBERS;
    float* const own_turn = reinterpret_cast<float*>(memory + TURN_AT);

    if (thread < (SHARED_BYTES - FULL_AT) / 8) {
        const int at = FULL_AT + 8 * thread;
        const bool of_warps = at >= EMPTY_AT && at < WEIGHED_AT;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(base + at), "r"(of_warps ? WARPS : 1));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = thread; i < RING * WEIGHT_BYTES / 4; i += THREADS) {  // of padding heads, which nobody sends
        reinterpret_cast<u32*>(memory + WEIGHTS_AT)[i] = 0;
    }
    for (int i = thread; i < RING * PADDED_HEADS * 2; i += THREADS) {
        reinterpret_cast<float*>(memory + FACTORS_AT)[i] = 1.0f;
    }
    if constexpr (ROTATED) {
        for (int i = thread; i < HEAD_DIM; i += THREADS) own_turn[pair_place(i)] = turn[i];
    }
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
    // Registers go to the warps that compute.
    if (warp < WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        for_each_piece([&](const Piece& piece) {
            const i64 tables = piece.row * table_row_stride;
            compute(memory, query + piece.row * query_row_stride, query_head_stride, key_offset, cosines + tables,
                    sines + tables, part_out, piece, slots, scale_log2, member, warp, lane);
        });
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == WARPS) {
            for_each_piece([&](const Piece& piece) { exchange(memory, part_lse, piece, member, lane); });
        } else if (warp == WARPS + 1 && lane == 0) {
            for_each_piece([&](const Piece& piece) { copy_tiles(memory, keys, coordinates, piece, member); });
        }
        __syncwarp();
    }
    cluster_sync();  // no block leaves while another may write to its shared memory
}
