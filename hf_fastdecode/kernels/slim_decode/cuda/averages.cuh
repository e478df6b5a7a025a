// Averages of all heads over a block's columns, in registers of the adding warps.
#pragma once

#include "scales.cuh"

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
        async_fence();                                            // weights were stored for matrix products to read
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
        if (tile == piece.end - 1) break;  // the piece's units are read before its last tile is given up
        __syncwarp();
        if (lane == 0) arrive(base + EMPTY_AT + 8 * stage);
    }

    const u32 last = piece.sequence + (piece.end - 1 - piece.begin);
    float unit[ADDER_BOXES];
    if constexpr (SCALED) {
#pragma unroll
        for (int b = 0; b < ADDER_BOXES; b++)
            unit[b] = units_of(memory, last)[min((b * ADDERS + group) * 64 / HEAD_DIM, UNITS - 1)].x;
    }
    __syncwarp();
    if (lane == 0) arrive(base + EMPTY_AT + 8 * (last % STAGES));

    float* const out = part_out + static_cast<i64>(piece.number) * HEADS * WIDTH;
#pragma unroll
    for (int n = 0; n < HEAD_BLOCKS; n++) row_sum[n][0] = 1.0f / row_sum[n][0], row_sum[n][1] = 1.0f / row_sum[n][1];
#pragma unroll
    for (int b = 0; b < ADDER_BOXES; b++) {
        const int box = b * ADDERS + group;
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
                    out[static_cast<i64>(head) * WIDTH + column] =
                        SCALED ? sums[b][n][i] * row_sum[n][i % 2] * unit[b] : sums[b][n][i] * row_sum[n][i % 2];
                }
            }
        }
    }
}
