// Sizes, shared memory and pieces of the slim decode kernel on clusters, from the macros that cluster.cu names.
#pragma once

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
constexpr int SCALES = OWN + RANK_GROUPS;                                                  // per token
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
constexpr int PAIRS = 8;                     // per lane: 16 bytes of each half of a head
constexpr int LANES = HALF / PAIRS;          // per token
constexpr int WARP_TOKENS = TILE / SCORING;  // of each tile
constexpr int HEAD_GROUPS = HEAD_DIM == 128 && OWN % 2 == 0 && !SCALED ? 2 : 1;  // of which lanes have one each
constexpr int AT_ONCE = 32 / LANES / HEAD_GROUPS;                                // tokens, of each group of heads
constexpr int TOKENS = WARP_TOKENS / AT_ONCE;                                    // per lane
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
constexpr int SCALES_AT =
    OFFSET_AT + (OFFSET ? KEY_COLUMNS * 4 : 0);  // over their units, in as many buffers as queries
constexpr int UNITS_AT = SCALES_AT + (SCALED ? QUERY_RING * SCALES * TILE * 4 : 0);
// Barriers: a copy has come, a stage is empty; a tile's queries and scales, its scores are there, its weights have
// come.
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

// Byte of a column in a tile, or of two columns in a copy of 8 bits. The copies permute chunks of 16 bytes, so that
// reads of 8 tokens meet all banks.
__device__ __forceinline__ u32 tile_byte(int token, int column) {
    return column / 64 * BOX_BYTES + token * 128 + ((2 * (column % 64)) ^ ((token & 7) << 4));
}

// Byte of a weight: a row per head, whose chunks are permuted, so that reads of 8 heads meet all banks.
__device__ __forceinline__ u32 weight_byte(int head, int token) {
    const int permuted = TILE == 64 ? head & 7 : (head >> 1) & 3;
    return head * (TILE * 2) + ((2 * token) ^ (permuted << 4));
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
