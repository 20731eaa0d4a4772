// Thin wrappers over the PTX that the kernels need beside the vendored ones: memory ordering, wide loads, stmatrix.
#pragma once

#include <cuda/std/cstdint>

namespace prime_kernels::ptx {

// --- Flags and counters -------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_sys(uint64_t* address, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void add_release_gpu(uint32_t* address, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// To the same place in the shared memory of CTA `cta` of the cluster; a cluster barrier must follow.
__device__ __forceinline__ void store_cluster(uint32_t* address, uint32_t value, uint32_t cta) {
    uint32_t to;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))), "r"(cta));
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// `count` arrivals at the same barrier of CTA `cta` of the cluster.
__device__ __forceinline__ void arrive_cluster(uint64_t* barrier, uint32_t cta, uint32_t count) {
    uint32_t at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "r"(cta));
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

// To the same place in the shared memory of CTA `cta` of the cluster, completing 4 bytes on its barrier.
__device__ __forceinline__ void store_async_cluster(uint32_t* address, uint32_t value, uint64_t* barrier, uint32_t cta) {
    uint32_t to, at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))), "r"(cta));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "r"(cta));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(value), "r"(at) : "memory");
}

// --- Fences -------------------------------------------------------------------------------------------------------

// Orders this thread's ordinary (generic proxy) accesses against the copy engine's (async proxy) ones, both ways, in
// global and shared memory.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// What another SM wrote during this kernel, past the L1.
__device__ __forceinline__ uint2 load_fresh(const void* address) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ float load_fresh_float(const float* address) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
    return v;
}

// --- Data ---------------------------------------------------------------------------------------------------------

// Rows pass through once: they must not displace what the L1 holds.
__device__ __forceinline__ uint4 load_streaming(const void* address) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_global(void* address, const uint4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_float2(float* address, float x, float y) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void add_float2(float* address, float x, float y) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

// Four 8x8 b16 matrices; lane l gives the 16-byte row address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
    asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(m0), "r"(m1), "r"(m2), "r"(m3) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t& m0, uint32_t& m1, uint32_t& m2, uint32_t& m3) {
    asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3) : "r"(address) : "memory");
}

// Two fp32 to packed bf16, round to nearest even; `low` is the lower address.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float bf16_low(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float bf16_high(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ void named_barrier_sync(uint32_t barrier, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace prime_kernels::ptx
