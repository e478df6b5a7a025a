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
// Keys in 8 bits are copied as they are. A scoring warp dequantises what it has read for its scores to fp16, in units of
// a power of 2 near the tile's largest scale, and stores that for the adding warps, so that copies are read once. Scales
// come from device memory through registers of the rotating warp.
//
// Clusters take equal shares of the tiles of all rows (LeanAttention, section 4), computed here from the lengths. A
// piece is what a cluster has of one row; it writes an fp32 partial, which `merge_pieces` merges.
//
// ClusterShape.numbers in cluster.py defines HEADS, HEAD_DIM, RANK, ROTATED, OFFSET, STARTS, BF16, SCALED (8 bits), FP8,
// MEMBERS, TILE, STAGES, COPIES, LEAD, ADDERS and SCORERS (groups of four warps) and SHARED_BYTES.

#include "instructions.cuh"

constexpr int SCORING = 4 * SCORERS, ADDING = 4 * ADDERS;  // warps
constexpr int THREADS = 32 * (ADDING + SCORING + 4);  // with the warps that copy, rotate and exchange, and an idle one
constexpr int OWN = HEADS / MEMBERS;
constexpr int HALF = HEAD_DIM / 2;
constexpr int KEYS = HEADS * HEAD_DIM;
constexpr int WIDTH = KEYS + RANK;
constexpr int KEY_COLUMNS = OWN * HEAD_DIM;
constexpr int RANK_COLUMNS = (RANK + 16 * MEMBERS - 1) / (16 * MEMBERS) * 16;  // per block
constexpr int BOX_BYTES = TILE * 128;                                          // 64 columns of a tile
constexpr int KEY_BOXES = KEY_COLUMNS / 64, RANK_BOXES = (RANK_COLUMNS + 63) / 64, BOXES = KEY_BOXES + RANK_BOXES;
constexpr int STAGE_BYTES = BOXES * BOX_BYTES;
// What is copied of a tile: to its stage, or where it is dequantised, to a place of its own, in boxes of 128 columns.
constexpr int KEY_COPY_BOXES = SCALED ? KEY_COLUMNS / 128 : KEY_BOXES;
constexpr int COPY_BOXES = KEY_COPY_BOXES + (SCALED ? (RANK_COLUMNS + 127) / 128 : RANK_BOXES);
constexpr int COPY_BYTES = COPY_BOXES * BOX_BYTES;
constexpr int PLACES = SCALED ? COPIES : STAGES;
constexpr int RANK_GROUPS = RANK ? (HEAD_DIM - 16 + RANK_COLUMNS - 1) / HEAD_DIM + 1 : 0;  // at most, of a block
constexpr int SCALES = OWN + RANK_GROUPS;  // per token
constexpr int UNITS = OWN + (RANK ? 1 : 0);  // of the columns of each head, and of V-coordinates
constexpr int ADDER_BOXES = (BOXES + ADDERS - 1) / ADDERS;
constexpr int HEAD_BLOCKS = (HEADS + 7) / 8;
constexpr int PADDED_HEADS = 8 * HEAD_BLOCKS;
// Buffers of weights, which tiles take in turns. Weights of a tile are sent when this block has added the tile LEAD
// before, whose weights came from all members: these had then added the tile 2 LEAD before, so that no message needs to
// say that a buffer is free.
constexpr int RING = 2 * LEAD;
constexpr int QUERY_RING = 2;  // buffers of queries; of scores there are STAGES, by which scoring is ahead at most
constexpr int UNIT_RING = STAGES + QUERY_RING;  // buffers of units, by which rotating is ahead of adding at most
constexpr int WEIGHT_BYTES = PADDED_HEADS * TILE * 2;
constexpr float SHIFT = BF16 ? 0.0f : 14.0f;  // weights are scaled by 2^SHIFT, away from fp16's subnormal numbers
constexpr float LOWEST = -1e30f;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

// How a warp computes the scores of its tokens. RoPE mixes column i of a head with column i + HALF: a pair.
constexpr int PAIRS = 8;                                              // per lane: 16 bytes of each half of a head
constexpr int LANES = HALF / PAIRS;                                   // per token
constexpr int WARP_TOKENS = TILE / SCORING;                           // of each tile
constexpr int HEAD_GROUPS = HEAD_DIM == 128 && OWN % 2 == 0 && !SCALED ? 2 : 1;  // of which lanes have one each
constexpr int AT_ONCE = 32 / LANES / HEAD_GROUPS;                     // tokens, of each group of heads
constexpr int TOKENS = WARP_TOKENS / AT_ONCE;                         // per lane
constexpr int LANE_HEADS = OWN / HEAD_GROUPS;
constexpr int VALUES = LANE_HEADS * TOKENS;  // scores to which a lane contributes, in each tile

// How the exchanging warp computes weights: a lane has 4 tokens of a head.
constexpr int HEAD_LANES = TILE / 4;
constexpr int WARP_HEADS = 32 / HEAD_LANES;                  // at once
constexpr int PASSES = (OWN + WARP_HEADS - 1) / WARP_HEADS;  // of the own heads

static_assert(HEADS % MEMBERS == 0 && HEAD_DIM % 64 == 0 && RANK % 8 == 0 && STAGES >= LEAD && LEAD > 1);
static_assert((TILE == 32 || TILE == 64) && MEMBERS <= HEAD_LANES);
static_assert(!SCALED || (KEY_COLUMNS % 128 == 0 && COPIES <= STAGES && !BF16));
static_assert(LANES <= 32 && TOKENS >= 1 && TOKENS * AT_ONCE == WARP_TOKENS);

// Registers per thread, of 512 for four warps on a scheduler, one of each group.
constexpr int ADDING_REGISTERS = ADDERS == 2 ? 168 : SCALED ? 184 : 216;
constexpr int SCORING_REGISTERS = ADDERS == 1 && SCALED ? 136 : 120, OTHER_REGISTERS = 56;
static_assert(ADDERS + SCORERS == 3);
constexpr int SUMS = 4 * HEAD_BLOCKS * ADDER_BOXES;  // per thread

// Shared memory, in bytes from its beginning. A head's factors are two: that on its averages of earlier tiles, and the
// sum of its weights so far, which only the last tile of a piece has.
constexpr int COPIES_AT = SCALED ? STAGES * STAGE_BYTES : 0;
constexpr int WEIGHTS_AT = COPIES_AT + (SCALED ? COPIES * COPY_BYTES : STAGES * STAGE_BYTES);
constexpr int SCORES_AT = WEIGHTS_AT + RING * WEIGHT_BYTES;
constexpr int FACTORS_AT = SCORES_AT + STAGES * OWN * TILE * 4;
constexpr int ROTATED_QUERY_AT = FACTORS_AT + RING * PADDED_HEADS * 8;
constexpr int QUERY_AT = ROTATED_QUERY_AT + QUERY_RING * KEY_COLUMNS * 4;
constexpr int OFFSET_AT = QUERY_AT + KEY_COLUMNS * 4;
constexpr int SCALES_AT = OFFSET_AT + (OFFSET ? KEY_COLUMNS * 4 : 0);  // over their units, in as many buffers as queries
constexpr int UNITS_AT = SCALES_AT + (SCALED ? QUERY_RING * SCALES * TILE * 4 : 0);
// Barriers: a copy has come, a stage is empty; a tile's queries and scales, its scores are there, its weights have come.
constexpr int FULL_AT = UNITS_AT + (SCALED ? UNIT_RING * UNITS * 8 : 0);
constexpr int EMPTY_AT = FULL_AT + PLACES * 8;
constexpr int ROTATED_AT = EMPTY_AT + STAGES * 8;
constexpr int SCORED_AT = ROTATED_AT + QUERY_RING * 8;
constexpr int WEIGHED_AT = SCORED_AT + STAGES * 8;
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

// Byte of a column in a tile, or of two columns in a copy of 8 bits. The copies permute chunks of 16 bytes so that reads of 8 tokens meet all banks.
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
        for (int i = 0; i < LEFT; i++)
            scores[(first + i) % LANE_HEADS * TILE + token + (first + i) / LANE_HEADS] = value[i];
    }
}

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

// Scales of a cache in 8 bits, in bf16; strides in numbers.
struct Scales {
    const unsigned short *keys, *coordinates;  // [rows, slots, heads] and [rows, slots, groups of r]
    i64 key_row_stride, key_stride, coordinate_row_stride, coordinate_stride;
};

// A power of 2 near a scale: numbers over it are below 1,024, and so fit in fp16, as scales may not.
__device__ __forceinline__ float unit_of(u32 scale) {
    return __uint_as_float(min(max(scale >> 7, 1u), 253u) << 23);  // whose inverse is a normal number too
}

__device__ __forceinline__ float inverse_of(float unit) { return __uint_as_float((254u << 23) - __float_as_uint(unit)); }

// A tile's units, and those of the tile before over them.
__device__ __forceinline__ float2* units_of(char* memory, u32 number) {
    return reinterpret_cast<float2*>(memory + UNITS_AT) + number % UNIT_RING * UNITS;
}

constexpr int LANE_TOKENS = TILE / 32;  // of which a lane of the rotating warp has the scales

// Loads a lane's scales of a tile: those of the block's heads, and of its V-coordinates; 0 behind the last token, where
// a cache may hold anything.
__device__ __forceinline__ void load_scales(u32 (&to)[LANE_TOKENS][SCALES], const Scales& scales, const Piece& piece,
                                            int tile, int member, int lane) {
#pragma unroll
    for (int t = 0; t < LANE_TOKENS; t++) {
        const int token = piece.first + tile * TILE + 32 * t + lane;
        const bool valid = token < piece.length && tile < piece.end;
        const unsigned short* const of_keys =
            scales.keys + piece.row * scales.key_row_stride + token * scales.key_stride + member * OWN;
#pragma unroll
        for (int h = 0; h < OWN; h++) to[t][h] = valid ? of_keys[h] : 0;
        const int group = member * RANK_COLUMNS / HEAD_DIM;
        const unsigned short* const of_coordinates =
            scales.coordinates + piece.row * scales.coordinate_row_stride + token * scales.coordinate_stride;
#pragma unroll
        for (int g = 0; g < RANK_GROUPS; g++) {
            const bool exists = (group + g) * HEAD_DIM < RANK;
            to[t][OWN + g] = valid && exists ? of_coordinates[group + g] : 0;
        }
    }
}

// Stores the units of a tile, of the largest scales of a piece so far, and the tile's scales over them. Scales are
// positive: their bits are in their order.
__device__ __forceinline__ void store_scales(char* memory, const u32 (&scales)[LANE_TOKENS][SCALES],
                                             u32 (&largest)[UNITS], u32 number, int lane) {
    float* const over_units = reinterpret_cast<float*>(memory + SCALES_AT) + number % QUERY_RING * SCALES * TILE;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int last = u < OWN ? u + 1 : SCALES;
        const float unit_before = unit_of(largest[u]);
#pragma unroll
        for (int s = u; s < last; s++) {
#pragma unroll
            for (int t = 0; t < LANE_TOKENS; t++) largest[u] = max(largest[u], scales[t][s]);
        }
        largest[u] = __reduce_max_sync(~0u, largest[u]);
        const float unit = unit_of(largest[u]);
        if (lane == 0) units_of(memory, number)[u] = {unit, unit_before * inverse_of(unit)};
#pragma unroll
        for (int s = u; s < last; s++) {
#pragma unroll
            for (int t = 0; t < LANE_TOKENS; t++) {
                over_units[s * TILE + 32 * t + lane] = __uint_as_float(scales[t][s] << 16) * inverse_of(unit);
            }
        }
    }
}

// The rotating warp's part: rotates the row's scaled queries back by the position of each tile's first token, as
// q R k = (R^T q) k. Scoring warps add the rotation within the tile. It also hands on the scales of 8 bits.
__device__ __forceinline__ void rotate_queries(char* memory, const float* query, i64 query_head_stride,
                                             const float* cosines, const float* sines, const Scales& scales,
                                             const Piece& piece, float scale_log2, int member, int lane) {
    const u32 base = shared_address(memory);
    float* const own_query = reinterpret_cast<float*>(memory + QUERY_AT);
    constexpr int LANE_PAIRS = HALF / 32;
    __syncwarp();
    for (int i = lane; i < KEY_COLUMNS; i += 32) {
        own_query[i] = query[(member * OWN + i / HEAD_DIM) * query_head_stride + i % HEAD_DIM] * scale_log2;
    }
    __syncwarp();
    // Tables of the next tiles, on their way from device memory.
    constexpr int AHEAD = SCALED ? 2 : 8 / LANE_PAIRS < 4 ? 8 / LANE_PAIRS : 4;
    float cosine[AHEAD][LANE_PAIRS], sine[AHEAD][LANE_PAIRS];
    const auto load = [&](int tile, int slot) {
#pragma unroll
        for (int p = 0; p < LANE_PAIRS; p++) {
            const i64 token = piece.first + min(tile, piece.end - 1) * TILE, at = token * HALF + lane + 32 * p;
            cosine[slot][p] = ROTATED ? cosines[at] : 1.0f, sine[slot][p] = ROTATED ? sines[at] : 0.0f;
        }
    };
    u32 own_scales[LANE_TOKENS][SCALES], largest_scales[UNITS] = {};
    if constexpr (SCALED) load_scales(own_scales, scales, piece, piece.begin, member, lane);
    const auto rotate = [&](int tile, int slot) {
        const u32 number = piece.sequence + (tile - piece.begin), buffer = number % QUERY_RING;
        if (number >= QUERY_RING) {  // the tile before in this buffer has been scored
            const u32 before = number - QUERY_RING;
            wait(base + SCORED_AT + 8 * (before % STAGES), before / STAGES & 1);
        }
        float* const rotated = reinterpret_cast<float*>(memory + ROTATED_QUERY_AT) + buffer * KEY_COLUMNS;
        for (int h = 0; h < OWN; h++) {
#pragma unroll
            for (int p = 0; p < LANE_PAIRS; p++) {
                const int pair = lane + 32 * p;
                const float low = own_query[h * HEAD_DIM + pair], high = own_query[h * HEAD_DIM + pair + HALF];
                rotated[h * HEAD_DIM + pair_place(pair)] = low * cosine[slot][p] + high * sine[slot][p];
                rotated[h * HEAD_DIM + pair_place(pair + HALF)] = high * cosine[slot][p] - low * sine[slot][p];
            }
        }
        if constexpr (SCALED) {
            store_scales(memory, own_scales, largest_scales, number, lane);
            load_scales(own_scales, scales, piece, tile + 1, member, lane);
        }
        __syncwarp();
        if (lane == 0) arrive(base + ROTATED_AT + 8 * buffer);
    };
#pragma unroll
    for (int slot = 0; slot < AHEAD; slot++) load(piece.begin + slot, slot);
    for (int first = piece.begin; first < piece.end; first += AHEAD) {
#pragma unroll
        for (int slot = 0; slot < AHEAD; slot++) {
            if (first + slot < piece.end) {
                rotate(first + slot, slot);
                load(first + slot + AHEAD, slot);
            }
        }
    }
}

// Stores 8 numbers, as `to_halves` makes them, times a scale over its unit, in a tile.
__device__ __forceinline__ void store_scaled(u32 address, const u32 (&halves)[4], float scale) {
    const u32 twice = pack(scale, scale);  // exact, as scales have 8 bits
    store_shared(address, multiply_halves(halves[0], twice), multiply_halves(halves[1], twice),
                 multiply_halves(halves[2], twice), multiply_halves(halves[3], twice));
}

// Dequantises a warp's tokens of the block's V-coordinates into a tile.
__device__ __forceinline__ void dequantise_coordinates(u32 tile_at, u32 copy_at, const float* scales, int member,
                                                       int warp, int lane) {
    constexpr int CHUNKS = RANK ? RANK_COLUMNS / 8 : 1;  // per token
    const int first = member * RANK_COLUMNS;
    for (int i = lane; i < WARP_TOKENS * CHUNKS; i += 32) {
        const int t = warp * WARP_TOKENS + i / CHUNKS, column = i % CHUNKS * 8;
        u32 numbers[2], halves[4];
        load_shared(numbers, copy_at + KEY_COPY_BOXES * BOX_BYTES + tile_byte(t, column / 2));
        to_halves(halves, numbers);
        const int group = (first + column) / HEAD_DIM - first / HEAD_DIM;
        store_scaled(tile_at + tile_byte(t, KEY_COLUMNS + column), halves, scales[(OWN + group) * TILE + t]);
    }
}

// The scoring warps' part.
__device__ __forceinline__ void score(char* memory, const float* turns, const Piece& piece, int member, int warp,
                                      int lane) {
    const u32 base = shared_address(memory);
    const float* const own_offset = reinterpret_cast<const float*>(memory + OFFSET_AT);
    const int lane_in_token = lane % LANES;
    // The lane's first token in a tile. Where 8 lanes read 64 bytes of two tokens at once, those are 4 apart, and so
    // have different banks.
    const int of_warp = LANES == 4 ? lane / 8 + (lane & 4) : lane / LANES;
    const int lane_token = warp * WARP_TOKENS + of_warp % AT_ONCE * TOKENS, lane_head = of_warp / AT_ONCE * LANE_HEADS;
    // Where 16 lanes read 64 bytes of two tokens in 8 bits at once, those are of different halves of the columns, and so
    // have different banks. The lanes of one exchange the roles of the halves, which only changes the sign of sines.
    const int low_half = SCALED && LANES == 8 ? of_warp % 2 : 0, high_half = 1 - low_half;
    float cosine[TOKENS][PAIRS], sine[TOKENS][PAIRS];  // of positions from the tile's first token on
    if constexpr (ROTATED) {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
#pragma unroll
            for (int p = 0; p < PAIRS; p++) {
                const int at = (lane_token + t) * HEAD_DIM + lane_in_token * PAIRS + p;
                cosine[t][p] = turns[at], sine[t][p] = low_half ? -turns[at + HALF] : turns[at + HALF];
            }
        }
    }
    for (int tile = piece.begin; tile < piece.end; tile++) {
        const u32 number = piece.sequence + (tile - piece.begin), stage = number % STAGES, place = number % PLACES;
        const u32 tile_at = base + stage * STAGE_BYTES, copy_at = base + COPIES_AT + place * COPY_BYTES;
        const float* const query =
            reinterpret_cast<const float*>(memory + ROTATED_QUERY_AT) + number % QUERY_RING * KEY_COLUMNS;
        const float* const scales =
            reinterpret_cast<const float*>(memory + SCALES_AT) + number % QUERY_RING * SCALES * TILE;
        wait(base + ROTATED_AT + 8 * (number % QUERY_RING), number / QUERY_RING & 1);
        wait(base + FULL_AT + 8 * place, number / PLACES & 1);
        const int tokens = piece.length - (piece.first + tile * TILE);
        if (tokens < TILE) {  // what was copied of later ones may be anything, even NaN
            for (int i = lane; i < WARP_TOKENS * COPY_BOXES * 8; i += 32) {
                const int t = warp * WARP_TOKENS + i / (COPY_BOXES * 8), column = i % (COPY_BOXES * 8) * 8;
                const int at = COPIES_AT + place * COPY_BYTES + tile_byte(t, column);
                if (t >= tokens) *reinterpret_cast<float4*>(memory + at) = {};
            }
            async_fence();  // before matrix products, and later copies
            __syncwarp();
        }
        if constexpr (SCALED) {
            if (number >= STAGES) wait(base + EMPTY_AT + 8 * stage, (number / STAGES - 1) & 1);
            if constexpr (RANK > 0) dequantise_coordinates(tile_at, copy_at, scales, member, warp, lane);
        }
        float products[VALUES];
#pragma unroll
        for (int h = 0; h < LANE_HEADS; h++) {
            const int head = (lane_head + h) * HEAD_DIM;
            float query_low[PAIRS], query_high[PAIRS], offset_low[PAIRS] = {}, offset_high[PAIRS] = {};
            load_pairs(query_low, query + head, low_half, lane_in_token);
            load_pairs(query_high, query + head, high_half, lane_in_token);
            if constexpr (OFFSET) {
                load_pairs(offset_low, own_offset + head, low_half, lane_in_token);
                load_pairs(offset_high, own_offset + head, high_half, lane_in_token);
            }
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                const int column = head + lane_in_token * PAIRS;
                const int low_column = column + low_half * HALF, high_column = column + high_half * HALF;
                const u32 low_at = tile_byte(lane_token + t, low_column);
                const u32 high_at = tile_byte(lane_token + t, high_column);
                u32 low_words[4], high_words[4];
                float scale = 1.0f;
                if constexpr (SCALED) {
                    u32 low_numbers[2], high_numbers[2];
                    load_shared(low_numbers, copy_at + tile_byte(lane_token + t, low_column / 2));
                    load_shared(high_numbers, copy_at + tile_byte(lane_token + t, high_column / 2));
                    to_halves(low_words, low_numbers), to_halves(high_words, high_numbers);
                    scale = scales[(lane_head + h) * TILE + lane_token + t];
                    store_scaled(tile_at + low_at, low_words, scale);
                    store_scaled(tile_at + high_at, high_words, scale);
                    scale *= units_of(memory, number)[lane_head + h].x;
                } else {
                    load_shared(low_words, tile_at + low_at);
                    load_shared(high_words, tile_at + high_at);
                }
                float along = 0.0f, across = 0.0f;
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    float low[2], high[2];
                    unpack(low_words[p / 2], low[0], low[1]);
                    unpack(high_words[p / 2], high[0], high[1]);
                    const float k1 = OFFSET ? fmaf(low[p % 2], scale, offset_low[p]) : low[p % 2];
                    const float k2 = OFFSET ? fmaf(high[p % 2], scale, offset_high[p]) : high[p % 2];
                    const float q1 = query_low[p], q2 = query_high[p];
                    if constexpr (ROTATED) {
                        along = fmaf(cosine[t][p], fmaf(q2, k2, q1 * k1), along);
                        across = fmaf(sine[t][p], fmaf(q2, k1, -q1 * k2), across);
                    } else {
                        along = fmaf(q1, k1, along), across = fmaf(q2, k2, across);
                    }
                }
                products[t * LANE_HEADS + h] = OFFSET ? along + across : (along + across) * scale;
            }
        }
        float* const scores = reinterpret_cast<float*>(memory + SCORES_AT) + (stage * OWN + lane_head) * TILE;
        store_scores(products, scores, lane_token, lane);
        if constexpr (SCALED) async_fence();  // what was dequantised is for matrix products to read
        __syncwarp();
        if (lane == 0) arrive(base + SCORED_AT + 8 * stage);
    }
}

using Sums = float[ADDER_BOXES][HEAD_BLOCKS][4];
using Factors = float[HEAD_BLOCKS][2];

// Loads a lane's factors: of the averages of earlier tiles, and sums of weights.
__device__ __forceinline__ void load_factors(const char* from, Factors& factors, Factors& row_sum) {
#pragma unroll
    for (int n = 0; n < HEAD_BLOCKS; n++) {
        const float4 found = *reinterpret_cast<const float4*>(from + n * 64);
        factors[n][0] = found.x, row_sum[n][0] = found.y, factors[n][1] = found.z, row_sum[n][1] = found.w;
    }
}

// Whether a group of adding warps has so many boxes and one more.
__device__ __forceinline__ bool has_box(int b, int group) { return BOXES % ADDERS == 0 || b * ADDERS + group < BOXES; }

// Begins the product of a box of a tile.
__device__ __forceinline__ void multiply_box(float* sums, u64 columns, u64 weights, int b, bool more) {
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        const u64 of_box = further(columns, b * ADDERS * BOX_BYTES + k * 2048);
        multiply_all<HEAD_BLOCKS>(sums, of_box, further(weights, k * 32), more || k > 0);
    }
}

// Adds the product of a tile of 16 bits in fp32, outside the matrix unit, whose sums truncate: errors of a column grow
// by the matrix from keys to values, unlike errors of a weight, which all share. Where registers suffice, products of
// one box are added while those of the next are computed.
__device__ __forceinline__ void add_in_fp32(Sums& sums, Factors& row_sum, const char* factors_at, u64 columns,
                                            u64 weights, int group) {
    constexpr int PARTS = ADDERS == 1 && SUMS <= 144 ? 2 : 1;
    float parts[PARTS][HEAD_BLOCKS * 4];
    const auto begin = [&](int b) {
        matrix_fence();
        multiply_box(parts[b % PARTS], columns, weights, b, false);
        matrix_commit();
    };
#pragma unroll
    for (int b = 0; b < PARTS - 1; b++) begin(b);
    Factors factors;
    load_factors(factors_at, factors, row_sum);
#pragma unroll
    for (int b = 0; b < ADDER_BOXES; b++) {
        if (!has_box(b, group)) continue;
        if (b + PARTS - 1 < ADDER_BOXES) {
            begin(b + PARTS - 1);
            matrix_wait<PARTS - 1>();
        } else {
            matrix_wait<0>();
        }
#pragma unroll
        for (int n = 0; n < HEAD_BLOCKS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& part = parts[b % PARTS][4 * n + i];
                asm volatile("" : "+f"(part)::"memory");  // not read before it has been waited for
                sums[b][n][i] = fmaf(sums[b][n][i], factors[n][i % 2], part);
            }
        }
    }
}

// Multiplies sums by their heads' factors, and by the units of the tiles before over this tile's; most are 1.
__device__ __forceinline__ void rescale(Sums& sums, const Factors& factors, const float2* units, int group) {
    float over_units[ADDER_BOXES];
    bool changes = false;
#pragma unroll
    for (int b = 0; b < ADDER_BOXES; b++) {
        over_units[b] = units[min((b * ADDERS + group) * 64 / HEAD_DIM, UNITS - 1)].y;
        changes |= over_units[b] != 1.0f;
    }
#pragma unroll
    for (int n = 0; n < HEAD_BLOCKS; n++) changes |= factors[n][0] != 1.0f || factors[n][1] != 1.0f;
    if (!__any_sync(~0u, changes)) return;  // all lanes or none, which then multiply together
#pragma unroll
    for (int b = 0; b < ADDER_BOXES; b++)
#pragma unroll
        for (int n = 0; n < HEAD_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[b][n][i] *= factors[n][i % 2] * over_units[b];
}

// Adds the product of a dequantised tile, whose numbers err by more than sums that truncate.
__device__ __forceinline__ void add_in_matrix_unit(Sums& sums, u64 columns, u64 weights, int group) {
    matrix_fence();
#pragma unroll
    for (int b = 0; b < ADDER_BOXES; b++) {
        if (has_box(b, group)) multiply_box(&sums[b][0][0], columns, weights, b, true);
    }
    matrix_commit();
    matrix_wait<0>();
#pragma unroll
    for (int b = 0; b < ADDER_BOXES; b++)
#pragma unroll
        for (int n = 0; n < HEAD_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) asm volatile("" : "+f"(sums[b][n][i])::"memory");  // not read before
}

// The adding warps' part: those of a group have 16 columns each of every 64, and their sums in registers.
__device__ __forceinline__ void add(char* memory, float* part_out, const Piece& piece, int member, int warp, int lane) {
    const u32 base = shared_address(memory);
    const int group = warp / 4;
    Sums sums;
    Factors row_sum;
#pragma unroll
    for (int b = 0; b < ADDER_BOXES; b++)
#pragma unroll
        for (int n = 0; n < HEAD_BLOCKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[b][n][i] = 0.0f;

    for (int tile = piece.begin; tile < piece.end; tile++) {
        const u32 number = piece.sequence + (tile - piece.begin), stage = number % STAGES, buffer = number % RING;
        if constexpr (!SCALED) wait(base + FULL_AT + 8 * stage, number / STAGES & 1);
        wait(base + WEIGHED_AT + 8 * buffer, number / RING & 1);  // and so what this block's scoring warps have stored
        async_fence();  // weights were stored for matrix products to read
        const u64 columns = columns_descriptor(base + stage * STAGE_BYTES + group * BOX_BYTES);
        const u64 weights = weights_descriptor(base + WEIGHTS_AT + buffer * WEIGHT_BYTES);
        const char* const factors_at = memory + FACTORS_AT + (buffer * PADDED_HEADS + 2 * (lane & 3)) * 8;
        if constexpr (SCALED) {
            Factors factors;
            load_factors(factors_at, factors, row_sum);
            rescale(sums, factors, units_of(memory, number), group);
            add_in_matrix_unit(sums, columns, weights, group);
        } else {
            add_in_fp32(sums, row_sum, factors_at, columns, weights, group);
        }
        __syncwarp();
        if (lane == 0) arrive(base + EMPTY_AT + 8 * stage);
    }

    float* const out = part_out + static_cast<i64>(piece.number) * HEADS * WIDTH;
#pragma unroll
    for (int n = 0; n < HEAD_BLOCKS; n++) row_sum[n][0] = 1.0f / row_sum[n][0], row_sum[n][1] = 1.0f / row_sum[n][1];
#pragma unroll
    for (int b = 0; b < ADDER_BOXES; b++) {
        const int box = b * ADDERS + group;
        float unit = 1.0f;
        if constexpr (SCALED) unit = units_of(memory, piece.sequence + (piece.end - 1 - piece.begin))[min(box * 64 / HEAD_DIM, UNITS - 1)].x;
#pragma unroll
        for (int n = 0; n < HEAD_BLOCKS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int head = 8 * n + 2 * (lane & 3) + i % 2;
                const int own = 64 * box + 16 * (warp % 4) + lane / 4 + i / 2 * 8;
                const int of_rank = own - KEY_COLUMNS;  // among the block's
                const int column =
                    own < KEY_COLUMNS ? member * KEY_COLUMNS + own : KEYS + member * RANK_COLUMNS + of_rank;
                if (box < BOXES && head < HEADS && of_rank < RANK_COLUMNS && column < WIDTH) {
                    out[static_cast<i64>(head) * WIDTH + column] = SCALED ? sums[b][n][i] * row_sum[n][i % 2] * unit : sums[b][n][i] * row_sum[n][i % 2];
                }
            }
        }
    }
}

extern "C" __global__ void __cluster_dims__(MEMBERS, 1, 1) __launch_bounds__(THREADS, 1)
    slim_cluster(const float* __restrict__ query,                // [rows, heads, head_dim]
                 const __grid_constant__ TensorMap keys,         // [rows, slots, heads * head_dim], of 16 bits or 8
                 const __grid_constant__ TensorMap coordinates,  // [rows, slots, r]
                 const unsigned short* __restrict__ key_scales,         // [rows, slots, heads] bf16, with SCALED
                 const unsigned short* __restrict__ coordinate_scales,  // [rows, slots, groups of r], likewise
                 const float* __restrict__ key_offset,           // [heads * head_dim], with OFFSET
                 const float* __restrict__ cosines,              // [rows or 1, slots, head_dim / 2], with ROTATED
                 const float* __restrict__ sines,                // likewise
                 const float* __restrict__ turns,                // [TILE or more, 2, head_dim / 2]: RoPE's tables
                 const int* __restrict__ starts,                 // [rows], with STARTS
                 const int* __restrict__ lengths,                // [rows]
                 float* __restrict__ part_out,                   // [groups + rows - 1, heads, heads * head_dim + r]
                 float* __restrict__ part_lse,                   // [groups + rows - 1, heads], base 2
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
            const Scales scales{key_scales, coordinate_scales, key_row_stride,
                                key_stride, coordinate_row_stride, coordinate_stride};
            for_each_piece([&](const Piece& piece) {
                const i64 tables = piece.row * table_row_stride;
                rotate_queries(memory, query + piece.row * query_row_stride, query_head_stride, cosines + tables,
                             sines + tables, scales, piece, scale_log2, member, lane);
            });
        } else if (role == 2 && lane == 0) {
            for_each_piece([&](const Piece& piece) { copy_tiles(memory, keys, coordinates, piece, member); });
        }
        __syncwarp();
    }
    cluster_sync();  // no block leaves while another may write to its shared memory
}
