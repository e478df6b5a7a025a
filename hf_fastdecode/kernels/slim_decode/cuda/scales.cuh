// Keys and V-coordinates in 8 bits: their scales, and what scoring warps dequantise.
#pragma once

#include "layout.cuh"

// Scales of a cache in 8 bits, in bf16; strides in numbers.
struct Scales {
    const unsigned short *keys, *coordinates;  // [rows, slots, heads] and [rows, slots, groups of r]
    i64 key_row_stride, key_stride, coordinate_row_stride, coordinate_stride;
};

// A power of 2 near a scale: numbers over it are below 1,024, and so fit in fp16, as scales may not.
__device__ __forceinline__ float unit_of(u32 scale) {
    return __uint_as_float(min(max(scale >> 7, 1u), 253u) << 23);  // whose inverse is a normal number too
}

__device__ __forceinline__ float inverse_of(float unit) {
    return __uint_as_float((254u << 23) - __float_as_uint(unit));
}

// A tile's units, and those of the tile before over them.
__device__ __forceinline__ float2* units_of(char* memory, u32 number) {
    return reinterpret_cast<float2*>(memory + UNITS_AT) + number % UNIT_RING * UNITS;
}

constexpr int LANE_TOKENS = TILE / 32;  // of which a lane of the warp of scales has those

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
        for (int h = 0; h < OWN; h += OWN % 2 ? 1 : 2) {
            if constexpr (OWN % 2) {
                to[t][h] = valid ? of_keys[h] : 0;
            } else {
                const u32 two = valid ? *reinterpret_cast<const u32*>(of_keys + h) : 0;
                to[t][h] = two & 0xffff, to[t][h + 1] = two >> 16;
            }
        }
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

// The part of the warp of scales: hands them on to the scoring warps, and units to the adding ones too.
__device__ __forceinline__ void hand_on_scales(char* memory, const Scales& scales, const Piece& piece, int member,
                                               int lane) {
    const u32 base = shared_address(memory);
    constexpr int AHEAD = SCALES * LANE_TOKENS <= 8 ? 4 : 2;  // tiles whose scales are on their way
    u32 own[AHEAD][LANE_TOKENS][SCALES], largest[UNITS] = {};
#pragma unroll
    for (int slot = 0; slot < AHEAD; slot++) load_scales(own[slot], scales, piece, piece.begin + slot, member, lane);
    for (int first = piece.begin; first < piece.end; first += AHEAD) {
#pragma unroll
        for (int slot = 0; slot < AHEAD; slot++) {
            const int tile = first + slot;
            if (tile >= piece.end) continue;
            const u32 number = piece.sequence + (tile - piece.begin), buffer = number % QUERY_RING;
            if (number >= QUERY_RING) {  // the tile before in this buffer has been scored
                const u32 before = number - QUERY_RING;
                wait(base + SCORED_AT + 8 * (before % STAGES), before / STAGES & 1);
            }
            store_scales(memory, own[slot], largest, number, lane);
            load_scales(own[slot], scales, piece, tile + AHEAD, member, lane);
            __syncwarp();
            if (lane == 0) arrive(base + ROTATED_AT + 8 * buffer);
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
