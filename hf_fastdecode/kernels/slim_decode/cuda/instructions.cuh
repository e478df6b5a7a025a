// Instructions of the GPU that CUDA C++ has no names for, and types. BF16 says what 16 bits are: bf16, or else fp16.
#pragma once

using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Address of the same place in another block's shared memory.
__device__ __forceinline__ u32 remote(u32 address, int member) {
    u32 result;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(member));
    return result;
}

// Writes to a block of the cluster, whose barrier counts the bytes. Unlike an ordinary write and an arrival that
// releases it, this waits for nothing.
__device__ __forceinline__ void send(u32 address, u32 first, u32 second, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(address),
        "r"(first), "r"(second), "r"(barrier)
        : "memory");
}

// Copies to another block of the cluster, whose barrier counts the bytes: multiples of 16, at multiples of 16.
__device__ __forceinline__ void copy_to_member(u32 address, u32 from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address),
        "r"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
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

// What the driver makes of a tensor's address, shape and strides.
struct alignas(64) TensorMap {
    char bytes[128];
};

__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies a box of a tensor of four dimensions; the barrier counts the bytes, with zeros outside the tensor.
__device__ __forceinline__ void copy(u32 address, const TensorMap& map, int column, int token, int box, int row,
                                     u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
        "%5}], "
        "[%6];" ::"r"(address),
        "l"(&map), "r"(column), "r"(token), "r"(box), "r"(row), "r"(barrier)
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

__device__ __forceinline__ void load_shared(u32 (&to)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
}

__device__ __forceinline__ void load_shared(u32 (&to)[2], u32 address) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address));
}

__device__ __forceinline__ void store_shared(u32 address, u32 first, u32 second, u32 third, u32 fourth) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(first), "r"(second), "r"(third),
                 "r"(fourth)
                 : "memory");
}

// Two products of fp16.
__device__ __forceinline__ u32 multiply_halves(u32 first, u32 second) {
    u32 result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(first), "r"(second));
    return result;
}

// Converts 8 numbers of 8 bits to fp16, which holds each of them exactly.
__device__ __forceinline__ void to_halves(u32 (&to)[4], const u32 (&numbers)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if FP8
        const unsigned short two = static_cast<unsigned short>(numbers[i / 2] >> (16 * (i % 2)));
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(to[i]) : "h"(two));
#else
        // 1,024 + 128 + n has the bits of n + 128 at the end of its significand.
        const u32 biased = numbers[i / 2] ^ 0x80808080u;
        const u32 above = __byte_perm(biased, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(to[i]) : "r"(above), "r"(0x64806480u));
#endif
    }
}

// Orders ordinary accesses to shared memory before those of copies and matrix products.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Sets the registers per thread of four warps. A kernel of 512 threads begins with 128, the most of that many threads;
// the instruction that raises their number is another than the one that lowers it, and neither does the other's work.
template <int COUNT>
__device__ __forceinline__ void set_registers() {
    if constexpr (COUNT > 128) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
    }
}

// Matrix products of four warps, which compute while the warps go on: a product's registers are its own from
// `matrix_fence` until it has been waited for.
__device__ __forceinline__ void matrix_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void matrix_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Describes 16 tokens of 64 columns as the transposed left factor: a row of 128 bytes per token, with permuted chunks.
__device__ __forceinline__ u64 columns_descriptor(u32 address) {
    return (address & 0x3ffff) >> 4 | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// Describes weights of 8 or more heads and 16 tokens as the right factor: a row of TILE tokens per head.
__device__ __forceinline__ u64 weights_descriptor(u32 address) {
    return (address & 0x3ffff) >> 4 | u64(1) << 16 | u64(8 * TILE * 2 >> 4) << 32 | u64(TILE == 64 ? 1 : 2) << 62;
}

// Describes what lies so many bytes further.
__device__ __forceinline__ u64 further(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

#if BF16
#define HALVES ".bf16.bf16"
#else
#define HALVES ".f16.f16"
#endif

// sums = columns^T weights^T, of 64 columns and 8 * BLOCKS heads; added to `sums` if `more`.
template <int BLOCKS>
__device__ __forceinline__ void multiply_async(float* sums, u64 columns, u64 weights, int more) {
    if constexpr (BLOCKS == 4) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32" HALVES
            " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 1, 0;\n}"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
              "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]),
              "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15])
            : "l"(columns), "l"(weights), "r"(more));
    } else if constexpr (BLOCKS == 2) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32" HALVES
            " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 1, 0;\n}"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
              "+f"(sums[7])
            : "l"(columns), "l"(weights), "r"(more));
    } else {
        static_assert(BLOCKS == 1);
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n8k16.f32" HALVES " {%0, %1, %2, %3}, %4, %5, p, 1, 1, 1, 0;\n}"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "l"(columns), "l"(weights), "r"(more));
    }
}

// The same of any number of blocks of heads.
template <int BLOCKS>
__device__ __forceinline__ void multiply_all(float* sums, u64 columns, u64 weights, int more) {
    constexpr int FIRST = BLOCKS >= 4 ? 4 : BLOCKS >= 2 ? 2 : 1;
    multiply_async<FIRST>(sums, columns, weights, more);
    if constexpr (BLOCKS > FIRST) {
        multiply_all<BLOCKS - FIRST>(sums + 4 * FIRST, columns, further(weights, FIRST * 8 * TILE * 2), more);
    }
}
