// Scores of a block's heads: queries rotated by the first token of a tile, and their products with its keys.
#pragma once

#include "scales.cuh"

// Loads a lane's PAIRS numbers of one half of a head.
__device__ __forceinline__ void load_pairs(float (&to)[PAIRS], const float* head, int half, int lane_in_token) {
#pragma unroll
    for (int quad = 0; quad < 2; quad++) {
        const float4 found = reinterpret_cast<const float4*>(head)[(half * 2 + quad) * LANES + lane_in_token];
        to[4 * quad] = found.x, to[4 * quad + 1] = found.y, to[4 * quad + 2] = found.z, to[4 * quad + 3] = found.w;
    }
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

// The rotating warp's part: rotates the row's scaled queries back by the position of each tile's first token, as
// q R k = (R^T q) k. Scoring warps add the rotation within the tile.
__device__ __forceinline__ void rotate_queries(char* memory, const float* query, i64 query_head_stride,
                                               const float* cosines, const float* sines, const Piece& piece,
                                               float scale_log2, int member, int lane) {
    const u32 base = shared_address(memory);
    float* const own_query = reinterpret_cast<float*>(memory + QUERY_AT);
    constexpr int LANE_PAIRS = HALF / 32;
    __syncwarp();
    for (int i = lane; i < KEY_COLUMNS; i += 32) {
        own_query[i] = query[(member * OWN + i / HEAD_DIM) * query_head_stride + i % HEAD_DIM] * scale_log2;
    }
    __syncwarp();
    // Tables of the next tiles, on their way from device memory.
    constexpr int AHEAD = 8 / LANE_PAIRS < 4 ? 8 / LANE_PAIRS : 4;
    float cosine[AHEAD][LANE_PAIRS], sine[AHEAD][LANE_PAIRS];
    const auto load = [&](int tile, int slot) {
#pragma unroll
        for (int p = 0; p < LANE_PAIRS; p++) {
            const i64 token = piece.first + min(tile, piece.end - 1) * TILE, at = token * HALF + lane + 32 * p;
            cosine[slot][p] = ROTATED ? cosines[at] : 1.0f, sine[slot][p] = ROTATED ? sines[at] : 0.0f;
        }
    };
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
    // Where 16 lanes read 64 bytes of two tokens in 8 bits at once, those are of different halves of the columns, and
    // so have different banks. The lanes of one exchange the roles of the halves, which only changes the sign of sines.
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
