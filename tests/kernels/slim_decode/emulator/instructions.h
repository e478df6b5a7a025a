// What `cluster.cu` uses of a GPU, on a CPU, in the place of `instructions.cuh`.
//
// Threads are fibers that run until they wait. Copies, messages and matrix products happen later, in any order that
// barriers allow, and threads may stop when they have arrived at a barrier, so that a kernel that reads too early or
// overwrites too early computes something else.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

using std::max;
using std::min;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __grid_constant__
#define __cluster_dims__(...)
#define __launch_bounds__(...)

struct float4 {
    float x, y, z, w;
};
struct float2 {
    float x, y;
};
struct uint2 {
    u32 x, y;
};
struct Index {
    int x;
};

constexpr int BLOCK_THREADS = 512;

struct Barrier {
    int arrivals, pending;
    i64 bytes;
    u32 phase;
};

struct Warp {
    u32 exchanged[32];
    int arrived = 0;
    u32 phase = 0;
};

struct Block {
    char* memory;
    std::map<u32, Barrier> barriers;
    std::vector<Warp> warps;
};

using Work = std::function<void()>;

struct Thread {
    ucontext_t beginning;
    jmp_buf place;
    int block, index;
    bool begun = false, done = false;
    std::vector<Work> products;              // of the group that is being made
    std::vector<std::vector<Work>> pending;  // groups that were committed
};

inline std::vector<Block> blocks;
inline std::vector<Work> in_flight;  // copies and messages
inline Thread* current;
inline jmp_buf scheduler;
inline u64 progress;
inline int cluster_size;
inline Index threadIdx, blockIdx, gridDim;
struct ClusterBarrier {
    int arrived = 0;
    u32 phase = 0;
};
inline std::map<int, ClusterBarrier> cluster_barriers;

[[noreturn]] inline void fail(const char* message) {
    std::fprintf(stderr, "emulator: %s\n", message);
    std::abort();
}

// Threads are switched by jumps: `swapcontext` makes two system calls, which took most of the time.
inline void let_others_run() {
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}
__attribute__((noinline)) inline void run_until_it_waits(Thread& thread) {
    current = &thread, threadIdx.x = thread.index, blockIdx.x = thread.block;
    if (_setjmp(scheduler)) return;
    if (thread.begun) _longjmp(thread.place, 1);
    thread.begun = true;
    setcontext(&thread.beginning);
}

// Addresses of shared memory are those of a cluster: the block stands in the upper bits.
inline char* at(u32 address) { return blocks[address >> 20].memory + (address & 0xfffff); }

inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(static_cast<const char*>(pointer) - blocks[current->block].memory) + (current->block << 20);
}

inline u32 remote(u32 address, int member) {
    const int first = current->block / cluster_size * cluster_size;
    return (address & 0xfffff) | static_cast<u32>(first + member) << 20;
}

inline char* aligned(u32 address, u32 bytes) {
    if (address % bytes) fail("an access is not aligned");
    return at(address);
}

inline Barrier& barrier_at(u32 address) {
    auto& barriers = blocks[address >> 20].barriers;
    const auto found = barriers.find(address & 0xfffff);
    if (found == barriers.end()) fail("there is no such barrier");
    return found->second;
}

inline void update(u32 address, int arrivals, i64 bytes) {
    Barrier& barrier = barrier_at(address);
    barrier.pending -= arrivals, barrier.bytes += bytes;
    if (barrier.pending < 0) fail("more threads arrive at a barrier than it counts");
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase++, barrier.pending = barrier.arrivals;
    progress++;
}

inline void make_barrier(u32 address, int arrivals) {
    blocks[address >> 20].barriers[address & 0xfffff] = {arrivals, arrivals, 0, 0};
}
inline void expect(u32 barrier, u32 bytes) { update(barrier, 1, bytes); }
inline void arrive(u32 barrier) { update(barrier, 1, 0), let_others_run(); }  // who may then overwrite
inline void wait(u32 barrier, u32 parity) {
    while ((barrier_at(barrier).phase & 1) == parity) let_others_run();
}

inline void send(u32 address, u32 first, u32 second, u32 barrier) {
    in_flight.push_back([=] {
        const u32 both[2] = {first, second};
        std::memcpy(aligned(address, 8), both, 8);
        update(barrier, 0, -8);
    });
}

inline void copy_to_member(u32 address, u32 from, u32 bytes, u32 barrier) {
    if (bytes % 16) fail("a copy is of other than multiples of 16 bytes");
    in_flight.push_back([=] {
        std::memcpy(aligned(address, 16), aligned(from, 16), bytes);
        update(barrier, 0, -static_cast<i64>(bytes));
    });
}

// Columns of 16 bits, tokens, boxes and rows of a tensor.
struct alignas(64) TensorMap {
    const char* address;
    i64 sizes[4], strides[4];  // in numbers, in bytes
    int box[4];
};

inline void prefetch(const TensorMap&) {}

inline void copy(u32 address, const TensorMap& from, int column, int token, int box, int row, u32 barrier) {
    aligned(address, 1024);
    in_flight.push_back([=, map = from] {
        for (int b = 0; b < map.box[2]; b++) {
            for (int t = 0; t < map.box[1]; t++) {
                for (int c = 0; c < map.box[0]; c++) {
                    char* const to = at(address) + (b * map.box[1] + t) * 128 + (2 * c ^ (t & 7) << 4);
                    const bool inside = column + c < map.sizes[0] && token + t < map.sizes[1] && box + b < map.sizes[2];
                    const char* const source = map.address + (column + c) * 2 + (token + t) * map.strides[1] +
                                               (box + b) * map.strides[2] + row * map.strides[3];
                    inside ? std::memcpy(to, source, 2) : std::memset(to, 0, 2);
                }
            }
        }
        update(barrier, 0, -128ll * map.box[1] * map.box[2]);
    });
}

inline Warp& own_warp() { return blocks[current->block].warps[current->index / 32]; }

inline void __syncwarp() {
    Warp& warp = own_warp();
    const u32 phase = warp.phase;
    if (++warp.arrived == 32) {
        warp.arrived = 0, warp.phase++, progress++;
    } else {
        while (warp.phase == phase) let_others_run();
    }
}

inline u32 exchange_bits(u32 own, int distance) {
    Warp& warp = own_warp();
    warp.exchanged[current->index % 32] = own;
    __syncwarp();
    const u32 found = warp.exchanged[current->index % 32 ^ distance];
    __syncwarp();
    return found;
}

inline u32 bits(float x) {
    u32 result;
    std::memcpy(&result, &x, 4);
    return result;
}
inline float from_bits(u32 x) {
    float result;
    std::memcpy(&result, &x, 4);
    return result;
}
inline u32 __float_as_uint(float x) { return bits(x); }
inline float __uint_as_float(u32 x) { return from_bits(x); }
inline float __int_as_float(u32 x) { return from_bits(x); }

inline float __shfl_xor_sync(u32, float x, int distance) { return from_bits(exchange_bits(bits(x), distance)); }
inline i64 __shfl_xor_sync(u32, i64 x, int distance) {
    const u64 low = exchange_bits(static_cast<u32>(x), distance), high = exchange_bits(x >> 32, distance);
    return static_cast<i64>(high << 32 | low);
}
inline u32 __reduce_max_sync(u32, u32 x) {
    for (int distance = 16; distance > 0; distance /= 2) x = max(x, exchange_bits(x, distance));
    return x;
}

inline bool __any_sync(u32, bool x) {
    u32 any = x;
    for (int distance = 16; distance > 0; distance /= 2) any |= exchange_bits(any, distance);
    return any;
}

inline void cluster_sync() {
    ClusterBarrier& barrier = cluster_barriers[current->block / cluster_size];
    const u32 phase = barrier.phase;
    if (++barrier.arrived == cluster_size * BLOCK_THREADS) {
        barrier.arrived = 0, barrier.phase++, progress++;
    } else {
        while (barrier.phase == phase) let_others_run();
    }
}

inline u32 half_bits(float x) {
    const _Float16 half = static_cast<_Float16>(x);
    unsigned short result;
    std::memcpy(&result, &half, 2);
    return result;
}
inline float from_half(u32 x) {
    const unsigned short low = x;
    _Float16 half;
    std::memcpy(&half, &low, 2);
    return half;
}
// Of the 16 bits of cached numbers and weights.
inline u32 number_bits(float x) { return BF16 ? (bits(x) + 0x7fff + (bits(x) >> 16 & 1)) >> 16 : half_bits(x); }
inline float from_number(u32 x) { return BF16 ? from_bits(x << 16) : from_half(x); }

inline float exp2_of(float x) { return std::exp2(x); }
inline u32 pack(float low, float high) { return number_bits(low) | number_bits(high) << 16; }
inline void unpack(u32 word, float& low, float& high) {
    low = from_number(word & 0xffff), high = from_number(word >> 16);
}
inline u32 multiply_halves(u32 a, u32 b) {
    return half_bits(from_half(a & 0xffff) * from_half(b & 0xffff)) | half_bits(from_half(a >> 16) * from_half(b >> 16))
                                                                          << 16;
}
inline float from_8_bits(u32 x) {
    if (!FP8) return static_cast<signed char>(x);
    const int exponent = x >> 3 & 15, significand = x & 7;
    if (exponent == 15 && significand == 7) return NAN;
    const float size = exponent ? std::ldexp(8 + significand, exponent - 10) : std::ldexp(significand, -9);
    return x >> 7 ? -size : size;
}
inline void to_halves(u32 (&to)[4], const u32 (&numbers)[2]) {
    for (int i = 0; i < 4; i++) {
        const u32 two = numbers[i / 2] >> 16 * (i % 2);
        to[i] = half_bits(from_8_bits(two & 0xff)) | half_bits(from_8_bits(two >> 8 & 0xff)) << 16;
    }
}

template <int WORDS>
void load_shared(u32 (&to)[WORDS], u32 address) {
    std::memcpy(to, aligned(address, 4 * WORDS), 4 * WORDS);
}
inline void store_shared(u32 address, u32 first, u32 second, u32 third, u32 fourth) {
    const u32 words[4] = {first, second, third, fourth};
    std::memcpy(aligned(address, 16), words, 16);
}

inline void async_fence() {}
template <int COUNT>
void set_registers() {}

// Products are computed when they are waited for.
inline void matrix_fence() {}
inline void matrix_commit() { current->pending.push_back(std::move(current->products)), current->products.clear(); }
template <int PENDING>
void matrix_wait() {
    while (current->pending.size() > PENDING) {
        for (const Work& product : current->pending.front()) product();
        current->pending.erase(current->pending.begin());
    }
}
inline u64 columns_descriptor(u32 address) { return address & 0xfffff; }
inline u64 weights_descriptor(u32 address) { return address & 0xfffff; }
inline u64 further(u64 descriptor, u32 bytes) { return descriptor + bytes; }

// sums = columns^T weights^T, of 16 tokens, 64 columns and 8 * BLOCKS heads: what this thread has of them.
template <int BLOCKS>
void multiply_all(float* sums, u64 columns, u64 weights, int more) {
    const int lane = current->index % 32, warp = current->index / 32 % 4;
    const char* const memory = blocks[current->block].memory;
    current->products.push_back([=] {
        const auto number = [&](u64 address, int permuted) {
            unsigned short found;
            std::memcpy(&found, memory + (address ^ (address >> 7 & permuted) << 4), 2);
            return from_number(found);
        };
        for (int i = 0; i < 4 * BLOCKS; i++) {
            const int column = 16 * warp + lane / 4 + i % 4 / 2 * 8, head = i / 4 * 8 + 2 * (lane & 3) + i % 2;
            float sum = more ? sums[i] : 0.0f;
            for (int token = 0; token < 16; token++) {
                sum += number(columns + token * 128 + 2 * column, 7) *
                       number(weights + head * TILE * 2 + 2 * token, TILE == 64 ? 7 : 3);
            }
            sums[i] = sum;
        }
    });
}
