// Combine: y[t] = sum over slots in slot order of weight[t, k] * slots[t, k], in fp32. Slots without an expert are skipped,
// whatever their memory holds.
#pragma once

#include <prime_kernels/params.cuh>
#include <prime_kernels/ptx.cuh>

namespace prime_kernels {

__device__ __forceinline__ void add_scaled(float (&sum)[8], float weight, const uint4& v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        sum[2 * i] = fmaf(weight, ptx::bf16_low(words[i]), sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight, ptx::bf16_high(words[i]), sum[2 * i + 1]);
    }
}

// One token by one warp. `kWeighted`: forward. Otherwise (dx) the slots already carry their weights, and dtopk is copied from
// its slots, exactly 0 where there is no expert. `kUnroll` slots are in flight.
template <uint32_t kHidden, bool kWeighted, uint32_t kUnroll>
__device__ __forceinline__ void combine_token(const Communicator& comm, uint32_t topk, uint8_t* y, float* dtopk, uint32_t token, uint32_t lane) {
    constexpr uint32_t kRowBytes = kHidden * 2;
    constexpr uint32_t kColumnBytes = 32 * 16;  // what a warp covers at once
    bool routed = false;  // one lane holds one slot's routing: K is at most 32
    float weight = 0.0f;
    if (lane < topk) {
        const uint64_t entry = static_cast<uint64_t>(token) * topk + lane;
        routed = comm.own<int64_t>(comm.at.topk_idx)[entry] >= 0;
        weight = kWeighted ? comm.own<float>(comm.at.topk_weights)[entry] : 1.0f;
        if (not kWeighted and dtopk != nullptr) dtopk[entry] = routed ? comm.own<float>(comm.at.dtopk_slots)[entry] : 0.0f;
    }
    const uint32_t mask = __ballot_sync(0xffffffff, routed);
    const uint8_t* slots = comm.own<uint8_t>(comm.at.slots) + static_cast<uint64_t>(token) * topk * kRowBytes + lane * 16;
    #pragma unroll 1
    for (uint32_t column = 0; column < kRowBytes; column += kColumnBytes) {
        const bool inside = kRowBytes % kColumnBytes == 0 or column + lane * 16 < kRowBytes;
        float sum[8] = {};
        #pragma unroll 1
        for (uint32_t first = 0; first < topk; first += kUnroll) {
            uint4 held[kUnroll];
            #pragma unroll
            for (uint32_t i = 0; i < kUnroll; ++i)
                if (inside and mask >> (first + i) & 1u) held[i] = ptx::load_streaming(slots + static_cast<uint64_t>(first + i) * kRowBytes + column);
            #pragma unroll
            for (uint32_t i = 0; i < kUnroll; ++i) {
                const float w = __shfl_sync(0xffffffff, weight, (first + i) % 32);
                if (mask >> (first + i) & 1u) add_scaled(sum, w, held[i]);
            }
        }
        const uint4 packed = {ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]),
                              ptx::pack_bf16(sum[4], sum[5]), ptx::pack_bf16(sum[6], sum[7])};
        if (inside) ptx::store_global(y + static_cast<uint64_t>(token) * kRowBytes + column + lane * 16, packed);
    }
}

}  // namespace prime_kernels
