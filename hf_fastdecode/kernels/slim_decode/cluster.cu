// Slim decode on thread block clusters: scores and averages of the cached keys, each key read from device memory once.
//
// Averages P K have all columns of the cached keys for each head, more sums than one multiprocessor holds. A cluster of
// MEMBERS blocks shares the columns: a block owns OWN heads and their columns, and some columns of the V-coordinates.
// For each tile of TILE tokens a block computes the scores of its heads from its columns, in shared memory, and their
// weights; it sends the weights to all blocks of its cluster through distributed shared memory, and adds the tile,
// which is still in its shared memory, to the averages of all heads over its own columns. Half of a block's warps load
// tiles and compute scores; the other half computes weights and averages, of tiles before.
//
// Clusters take equal shares of the tiles of all rows (LeanAttention, section 4), computed here from the lengths. A
// piece is what a cluster has of one row; it writes an fp32 partial, which `merge_pieces` merges.
//
// Defined by the compiler's caller: HEADS, HEAD_DIM, RANK, ROTATED, OFFSET, STARTS, BF16, MEMBERS, TILE, STAGES, WARPS.

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int THREADS = 32 * WARPS;           // of each of the two halves of a block
constexpr bool MOVES_REGISTERS = WARPS == 8;  // averages take more than half of a multiprocessor's registers
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
// Tiles after which a tile has been added: what is longer than a tile's scores, where shared memory has room.
constexpr int LAG = STAGES > 3 ? 3 : 2;
constexpr int AHEAD = STAGES - LAG;  // tiles whose copies are under way
// With little room, add a tile before the weights of the next are computed, so that its memory is free earlier.
constexpr bool ADD_FIRST = STAGES == 3;
// Buffers of scores, of weights, and of their sums. Before a block sends the weights of a tile, it has received those
// of two tiles before, whose senders had waited until the tile of LAG tiles more before was added. So no message says
// that a buffer is free.
constexpr int RING = 5;
constexpr int WEIGHT_BYTES = PADDED_HEADS * TILE * 2;
constexpr float SHIFT = BF16 ? 0.0f : 14.0f;  // weights are scaled by 2^SHIFT, away from fp16's subnormal numbers
constexpr float LOWEST = -1e30f;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

// Scores: pairs of columns per lane, which are 16 bytes of each half of a head; lanes per token, tokens at once in a
// warp, and tokens per lane, one after the other.
constexpr int PAIRS = 8;
constexpr int LANES = HALF / PAIRS;
constexpr int AT_ONCE = 32 / LANES;
constexpr int WARP_TOKENS = TILE / WARPS;
constexpr int TOKENS = WARP_TOKENS / AT_ONCE;

static_assert(HEADS % MEMBERS == 0 && HEAD_DIM % 64 == 0 && RANK % 8 == 0 && STAGES >= 3 && TILE % 16 == 0);
static_assert(TOKENS >= 1 && TOKENS * AT_ONCE == WARP_TOKENS && TILE <= 64 && LANES <= 32);

constexpr int WEIGHTS_AT = STAGES * STAGE_BYTES;
constexpr int SCORES_AT = WEIGHTS_AT + RING * WEIGHT_BYTES;
constexpr int FACTORS_AT = SCORES_AT + RING * OWN * TILE * 4;
constexpr int SUMS_AT = FACTORS_AT + RING * PADDED_HEADS * 4;
constexpr int QUERY_AT = SUMS_AT + RING * PADDED_HEADS * 4;
constexpr int OFFSET_AT = QUERY_AT + OWN * HEAD_DIM * 4;
constexpr int TURNS_AT = OFFSET_AT + (OFFSET ? OWN * HEAD_DIM * 4 : 0);
constexpr int WEIGHTS_BARRIER = TURNS_AT + (ROTATED ? WARP_TOKENS * HEAD_DIM * 4 : 0);  // weights have been received
constexpr int SUMS_BARRIER = WEIGHTS_BARRIER + RING * 8;
constexpr int LOADED_BARRIER = SUMS_BARRIER + RING * 8;     // a tile is in shared memory
constexpr int ADDED_BARRIER = LOADED_BARRIER + STAGES * 8;  // and is no longer needed
constexpr int SCORED_BARRIER = ADDED_BARRIER + STAGES * 8;
constexpr int BARRIERS = 3 * RING + 2 * STAGES;
static_assert(WEIGHTS_BARRIER + BARRIERS * 8 == SHARED_BYTES);

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Address of the same place in another block's shared memory.
__device__ __forceinline__ u32 remote(u32 address, int member) {
    u32 result;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(member));
    return result;
}

// Writes to a block of the cluster, which its barrier counts: unlike an arrival that releases, this waits for nothing.
__device__ __forceinline__ void send(u32 address, const u32 (&value)[4], u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            address),
        "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3]), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void send(u32 address, float value, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address),
                 "f"(value), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrival of a warp.
__device__ __forceinline__ void arrive(u32 barrier, int lane) {
    __syncwarp();
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void copy16(u32 address, const void* source, bool valid) {  // else zeros
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(source),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ float exp2_of(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 result;
    if constexpr (BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    }
    return result;
}

__device__ __forceinline__ void unpack(u32 word, float& low, float& high) {
    if constexpr (BF16) {
        low = __uint_as_float(word << 16);
        high = __uint_as_float(word & 0xffff0000u);
    } else {
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
            : "=f"(low), "=f"(high)
            : "r"(word));
    }
}

// Place of a number of a head, or of a table's row, so that lanes' quads follow one another.
__device__ __forceinline__ int pair_place(int column) {
    const int half = column / HALF, pair = column % HALF;
    return ((half * 2 + pair % PAIRS / 4) * LANES + pair / PAIRS) * 4 + pair % 4;
}

// The PAIRS numbers of a lane in one half.
__device__ __forceinline__ void load_pairs(float (&to)[PAIRS], const float* row, int half, int lane) {
#pragma unroll
    for (int quad = 0; quad < 2; quad++) {
        const float4 found = reinterpret_cast<const float4*>(row)[(half * 2 + quad) * LANES + lane];
        to[4 * quad] = found.x, to[4 * quad + 1] = found.y, to[4 * quad + 2] = found.z, to[4 * quad + 3] = found.w;
    }
}

__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
}

__device__ __forceinline__ void load_transposed(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

// Byte of a column in a tile. Chunks of 16 bytes are permuted within 128, so that reads of 8 tokens meet all banks.
__device__ __forceinline__ u32 tile_byte(int token, int column) {
    const u32 byte = 2 * column;
    return token * ROW_BYTES + (byte & ~127u) + ((byte & 127u) ^ ((token & 7) << 4));
}

// Byte of a weight: rows of heads, permuted likewise.
__device__ __forceinline__ u32 weight_byte(int head, int token) {
    const int turned = TILE == 64 ? head & 7 : TILE == 32 ? (head >> 1) & 3 : (head >> 2) & 1;
    return head * (TILE * 2) + ((2 * token) ^ (turned << 4));
}

// Sums of each of COUNT values over lanes; the lanes get COUNT sums, in order.
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

// What a cluster has of a row.
struct Piece {
    int row, begin, end;  // tiles of the row
    int first, length;    // tokens
};

__device__ __forceinline__ int first_token(const int* starts, int row) { return STARTS ? starts[row] : 0; }

__device__ __forceinline__ int tiles_of(const int* starts, const int* lengths, int row) {
    const int tokens = lengths[row] - first_token(starts, row);
    return tokens > 0 ? (tokens + TILE - 1) / TILE : 0;
}

// Calls a function with each piece of a share.
template <typename Function>
__device__ __forceinline__ void for_pieces(const Share& share, i64 rows, const int* starts, const int* lengths,
                                           const Function& function) {
    int row_begin = 0;
    for (int row = 0; row < rows && row_begin < share.end; row++) {
        const int tiles = tiles_of(starts, lengths, row);
        const int begin = max(share.begin - row_begin, 0), end = min(share.end - row_begin, tiles);
        row_begin += tiles;
        if (begin < end) function(Piece{row, begin, end, first_token(starts, row), lengths[row]});
    }
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
#pragma unroll 4
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
        constexpr int RANK_CHUNKS = RANK_COLUMNS / 8;
        for (int index = thread; index < TILE * RANK_CHUNKS; index += THREADS) {
            const int t = index / RANK_CHUNKS, column = index % RANK_CHUNKS * 8;
            const int of_rank = member * RANK_COLUMNS + column;
            const bool valid = (WHOLE || token + t < length) && of_rank < RANK;
            const char* source = coordinates + (valid ? (token + t) * coordinate_stride + 2 * of_rank : 0);
            copy16(stage + tile_byte(t, KEY_COLUMNS + column), source, valid);
        }
    }
}

extern "C" __global__ void __cluster_dims__(MEMBERS, 1, 1) __launch_bounds__(2 * THREADS, 1)
    slim_cluster(const float* __restrict__ query,       // [rows, heads, head_dim]
                 const char* __restrict__ keys,         // [rows, slots, heads * head_dim]
                 const char* __restrict__ coordinates,  // [rows, slots, r]
                 const float* __restrict__ key_offset,  // [heads * head_dim], with OFFSET
                 const float* __restrict__ cosines,     // [rows or 1, slots, head_dim / 2], with ROTATED
                 const float* __restrict__ sines,       // likewise
                 const float* __restrict__ turns,       // [8, 2, head_dim / 2]: cosines and sines of 0 to 7 positions
                 const int* __restrict__ starts,        // [rows], with STARTS
                 const int* __restrict__ lengths,       // [rows]
                 float* __restrict__ part_out,          // [groups + rows - 1, heads, heads * head_dim + r]
                 float* __restrict__ part_lse,          // [groups + rows - 1, heads], base 2
                 i64 rows, i64 slots, float scale_log2, i64 query_row_stride, i64 query_head_stride, i64 key_row_stride,
                 i64 key_stride, i64 coordinate_row_stride, i64 coordinate_stride,  // bytes
                 i64 table_row_stride) {
    extern __shared__ __align__(1024) char memory[];
    const u32 base = shared_address(memory);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int member = blockIdx.x % MEMBERS, group = blockIdx.x / MEMBERS, groups = gridDim.x / MEMBERS;
    float* const own_query = reinterpret_cast<float*>(memory + QUERY_AT);
    float* const own_offset = reinterpret_cast<float*>(memory + OFFSET_AT);

    if (thread < BARRIERS) {  // one arrival, that of `expect`, or those of the warps of a half
        const u32 barrier = WEIGHTS_BARRIER + 8 * thread;
        const u32 arrivals = barrier < LOADED_BARRIER ? 1 : WARPS;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(base + barrier), "r"(arrivals));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = thread; i < RING * WEIGHT_BYTES / 4; i += 2 * THREADS) {  // heads that are padding have weights of 0
        reinterpret_cast<u32*>(memory + WEIGHTS_AT)[i] = 0;
    }
    for (int i = thread; i < 2 * RING * PADDED_HEADS; i += 2 * THREADS) {
        reinterpret_cast<float*>(memory + FACTORS_AT)[i] = 1.0f;
    }
    if constexpr (ROTATED) {
        for (int i = thread; i < WARP_TOKENS * HEAD_DIM; i += 2 * THREADS) {
            reinterpret_cast<float*>(memory + TURNS_AT)[i / HEAD_DIM * HEAD_DIM + pair_place(i % HEAD_DIM)] = turns[i];
        }
    }
    cluster_sync();

    i64 total = 0;
    for (int row = lane; row < rows; row += 32) total += tiles_of(starts, lengths, row);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
    const Share share{static_cast<int>(group * total / groups), static_cast<int>((group + 1) * total / groups)};

    if (warp < WARPS) {
        // Loads and scores.
        if constexpr (MOVES_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 112;");
        const int lane_in_token = lane % LANES;
        // Tokens of neighbouring lanes are 4 apart where two share 128 bytes of banks.
        const int lane_token = (LANES == 4 ? lane / 8 + (lane & 4) : lane / LANES) * TOKENS;  // the first, in its warp
        const int warp_token = warp * WARP_TOKENS;
        u32 turn = 0;  // tiles that this cluster has begun
        for_pieces(share, rows, starts, lengths, [&](const Piece& piece) {
            const int row = piece.row, begin = piece.begin, end = piece.end, first = piece.first, length = piece.length;
            const char* const row_keys = keys + row * key_row_stride;
            const char* const row_coordinates = coordinates + row * coordinate_row_stride;
            const float* const row_cosines = cosines + row * table_row_stride;
            const float* const row_sines = sines + row * table_row_stride;
            const auto load = [&](int tile, u32 of_turn) {
                const u32 stage = base + of_turn % STAGES * STAGE_BYTES;
                const int token = first + tile * TILE;
                if (tile < end && token + TILE <= length) {
                    copy_tile<true>(stage, row_keys, row_coordinates, token, length, key_stride, coordinate_stride,
                                    member, thread);
                } else if (tile < end) {
                    copy_tile<false>(stage, row_keys, row_coordinates, token, length, key_stride, coordinate_stride,
                                     member, thread);
                }
                asm volatile("cp.async.commit_group;" ::: "memory");
            };

            // Slots of these tiles are free: the loop has waited for the tiles that had them.
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ahead++) load(begin + ahead, turn + ahead);
            asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");  // all have read the query of the row before
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

            float first_cos[PAIRS], first_sin[PAIRS];  // of this warp's first token in the next tile
            const auto load_tables = [&](int tile) {
                if constexpr (ROTATED) {
                    const i64 token = min(static_cast<i64>(first + tile * TILE + warp_token), slots - 1);
                    const i64 at = token * HALF + lane_in_token * PAIRS;
#pragma unroll
                    for (int p = 0; p < PAIRS; p++) {
                        first_cos[p] = row_cosines[at + p], first_sin[p] = row_sines[at + p];
                    }
                }
            };
            load_tables(begin);
            asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");

            for (int tile = begin; tile < end; tile++, turn++) {
                asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
                arrive(base + LOADED_BARRIER + 8 * (turn % STAGES), lane);
                wait(base + LOADED_BARRIER + 8 * (turn % STAGES), turn / STAGES & 1);

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
                            rotation_cos[t][p] = first_cos[p] * turn_cos[p] - first_sin[p] * turn_sin[p];
                            rotation_sin[t][p] = first_sin[p] * turn_cos[p] + first_cos[p] * turn_sin[p];
                        }
                    }
                    load_tables(tile + 1);
                }
                const char* const stage = memory + turn % STAGES * STAGE_BYTES;
                float* const scores = reinterpret_cast<float*>(memory + SCORES_AT) + turn % RING * (OWN * TILE);
#pragma unroll
                for (int h = 0; h < OWN; h++) {
                    if (h == OWN / 2) {  // the tile of LAG tiles before has been added by now
                        if (turn >= LAG)
                            wait(base + ADDED_BARRIER + 8 * ((turn - LAG) % STAGES), (turn - LAG) / STAGES & 1);
                        load(tile + AHEAD, turn + AHEAD);
                    }
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
                        const uint4 lows = *reinterpret_cast<const uint4*>(stage + tile_byte(token, column));
                        const uint4 highs = *reinterpret_cast<const uint4*>(stage + tile_byte(token, column + HALF));
                        const u32 low_words[4] = {lows.x, lows.y, lows.z, lows.w};
                        const u32 high_words[4] = {highs.x, highs.y, highs.z, highs.w};
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
                arrive(base + SCORED_BARRIER + 8 * (turn % RING), lane);
            }
        });
    } else {
        // Weights and averages.
        if constexpr (MOVES_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 144;");
        const int of_half = warp - WARPS;
        const int pair_of_lane = lane % 4 * 2, row_of_lane = lane / 4;  // of matrix units' results
        u32 turn = 0, pieces = 0;
        for_pieces(share, rows, starts, lengths, [&](const Piece& share_of_row) {
            const int row = share_of_row.row, begin = share_of_row.begin, end = share_of_row.end;
            const int first = share_of_row.first, length = share_of_row.length;
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

            const auto add_tile = [&](u32 of_turn) {  // sums = sums * rescale + weights tile
                const u32 slot = of_turn % RING;
                wait(base + WEIGHTS_BARRIER + 8 * slot, of_turn / RING & 1);
                u32 weights[STEPS][HEAD_BLOCKS][2];
                const u32 buffer = base + WEIGHTS_AT + slot * WEIGHT_BYTES;
#pragma unroll
                for (int k = 0; k < STEPS; k++) {
#pragma unroll
                    for (int n = 0; n < HEAD_BLOCKS; n += 2) {
                        const int head = min(8 * n + (lane & 7) + (lane & 16) / 2, PADDED_HEADS - 1);
                        u32 found[4];
                        load_matrices(found, buffer + weight_byte(head, 16 * k + (lane & 8)));
                        weights[k][n][0] = found[0], weights[k][n][1] = found[1];
                        if (n + 1 < HEAD_BLOCKS) weights[k][n + 1][0] = found[2], weights[k][n + 1][1] = found[3];
                    }
                }
                const float* const factors = reinterpret_cast<const float*>(memory + FACTORS_AT) + slot * PADDED_HEADS;
                const u32 stage = base + of_turn % STAGES * STAGE_BYTES;
#pragma unroll
                for (int b = 0; b < WARP_BLOCKS; b++) {
                    const int block = of_half + b * WARPS;
                    if (block < BLOCKS) {
                        // The product of a tile is added in fp32, outside the matrix unit, whose sums truncate: errors
                        // of a column grow by the matrix from keys to values, unlike errors of a weight, which all
                        // share.
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
                            const float2 rescale = *reinterpret_cast<const float2*>(factors + 8 * n + pair_of_lane);
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                sums[b][n][i] = fmaf(sums[b][n][i], i % 2 ? rescale.y : rescale.x, part[n][i]);
                            }
                        }
                    }
                }
                arrive(base + ADDED_BARRIER + 8 * (of_turn % STAGES), lane);
            };

            for (int tile = begin; tile < end; tile++, turn++) {
                if (of_half == 0 && lane == 0) {
                    expect(base + WEIGHTS_BARRIER + 8 * (turn % RING), HEADS * (2 * TILE + 4));
                }
                if (ADD_FIRST && tile > begin) add_tile(turn - 1);
                wait(base + SCORED_BARRIER + 8 * (turn % RING), turn / RING & 1);
                const float* const scores =
                    reinterpret_cast<const float*>(memory + SCORES_AT) + turn % RING * (OWN * TILE);
                const int known = length - (first + tile * TILE);  // tokens of the tile
                                                                   // A warp has all tokens of a head.
#pragma unroll
                for (int i = 0; i < WARP_HEADS; i++) {
                    const int h = of_half + i * WARPS;
                    if (h < OWN) {
                        const int token = 2 * lane;
                        float low = NEGATIVE_INFINITY, high = NEGATIVE_INFINITY;
                        if (token < TILE) {
                            const float2 found = *reinterpret_cast<const float2*>(scores + h * TILE + token);
                            low = token < known ? found.x : NEGATIVE_INFINITY;
                            high = token + 1 < known ? found.y : NEGATIVE_INFINITY;
                        }
                        float largest = fmaxf(low, high);
#pragma unroll
                        for (int distance = 16; distance > 0; distance /= 2) {
                            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
                        }
                        const float new_row_max = fmaxf(row_max[i], largest);
                        low = exp2_of(low - new_row_max + SHIFT), high = exp2_of(high - new_row_max + SHIFT);
                        const float rescale = exp2_of(row_max[i] - new_row_max);
                        row_sum[i] = row_sum[i] * rescale + (low + high);  // of this lane's tokens
                        row_max[i] = new_row_max;
                        const u32 packed = pack(low, high);
                        u32 chunk[4];  // of 8 tokens
#pragma unroll
                        for (int word = 0; word < 4; word++) {
                            chunk[word] = __shfl_sync(~0u, packed, lane % (TILE / 8) * 4 + word);
                        }
                        const int head = member * OWN + h;
                        const u32 slot = turn % RING, barrier = base + WEIGHTS_BARRIER + 8 * slot;
                        const u32 weight_at =
                            base + WEIGHTS_AT + slot * WEIGHT_BYTES + weight_byte(head, lane % (TILE / 8) * 8);
                        constexpr int CHUNKS = TILE / 8, AT_ONCE = 32 / CHUNKS;  // blocks of the cluster
                        if (lane < AT_ONCE * CHUNKS) {
#pragma unroll
                            for (int to = lane / CHUNKS; to < MEMBERS; to += AT_ONCE) {
                                send(remote(weight_at, to), chunk, remote(barrier, to));
                            }
                        }
                        if (lane < MEMBERS) {
                            const u32 factor_at = base + FACTORS_AT + (slot * PADDED_HEADS + head) * 4;
                            send(remote(factor_at, lane), rescale, remote(barrier, lane));
                        }
                    }
                }
                if (!ADD_FIRST && tile > begin) add_tile(turn - 1);
            }
            add_tile(turn - 1);

            const u32 sums_slot = pieces % RING, sums_barrier = base + SUMS_BARRIER + 8 * sums_slot;
            if (of_half == 0 && lane == 0) expect(sums_barrier, HEADS * 4);
#pragma unroll
            for (int i = 0; i < WARP_HEADS; i++) {
                const int h = of_half + i * WARPS;
                if (h < OWN) {
#pragma unroll
                    for (int distance = 16; distance > 0; distance /= 2) {
                        row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], distance);
                    }
                    if (lane < MEMBERS) {
                        const u32 sum_at = base + SUMS_AT + (sums_slot * PADDED_HEADS + member * OWN + h) * 4;
                        send(remote(sum_at, lane), row_sum[i], remote(sums_barrier, lane));
                    }
                }
            }
            wait(sums_barrier, pieces / RING & 1);

            const i64 piece = group + row;
            float* const out = part_out + piece * HEADS * WIDTH;
            const float* const row_sums =
                reinterpret_cast<const float*>(memory + SUMS_AT) + pieces % RING * PADDED_HEADS;
#pragma unroll
            for (int b = 0; b < WARP_BLOCKS; b++) {
                const int block = of_half + b * WARPS;
#pragma unroll
                for (int n = 0; n < HEAD_BLOCKS; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int head = 8 * n + pair_of_lane + i % 2;
                        const int own = 16 * block + row_of_lane + i / 2 * 8;
                        const int of_rank = member * RANK_COLUMNS + own - KEY_COLUMNS;
                        const int column = own < KEY_COLUMNS ? member * KEY_COLUMNS + own : KEYS + of_rank;
                        if (block < BLOCKS && head < HEADS && column < WIDTH) {
                            out[static_cast<i64>(head) * WIDTH + column] = sums[b][n][i] / row_sums[head];
                        }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < WARP_HEADS; i++) {
                const int h = of_half + i * WARPS;
                if (h < OWN && lane == 0) {
                    part_lse[piece * HEADS + member * OWN + h] = row_max[i] + log2f(row_sum[i]) - SHIFT;
                }
            }
            pieces++;
        });
    }
    cluster_sync();  // no block leaves while another may write to its shared memory
}
