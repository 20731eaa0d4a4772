// SwiGLU on pairs of columns. Gate and up are rounded to bf16 first; a limit binds the gate from above and the linear part on
// both sides. `kClamped` is compiled in: most models have no limit, and the epilogues are bound by instructions.
#pragma once

#include <prime_kernels/ptx.cuh>

namespace prime_kernels {

// sigmoid(x) = (1 + tanh(x / 2)) / 2: one special-function instruction. Its error (2^-11 of tanh at most, PTX ISA) is a
// quarter of the rounding of a bf16 result.
__device__ __forceinline__ float sigmoid(float x) {
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(0.5f * x));
    return fmaf(0.5f, t, 0.5f);
}

template <bool kClamped>
__device__ __forceinline__ float clamp_gate(float gate, float limit) { return kClamped ? fminf(gate, limit) : gate; }

template <bool kClamped>
__device__ __forceinline__ float clamp_up(float up, float limit) { return kClamped ? fmaxf(fminf(up, limit), -limit) : up; }

// a = silu(min(g, c)) * clamp(u, -c, c) for two columns, packed to bf16.
template <bool kClamped>
__device__ __forceinline__ uint32_t swiglu_pair(float g0, float g1, float u0, float u1, float limit) {
    const uint32_t g = ptx::pack_bf16(g0, g1), u = ptx::pack_bf16(u0, u1);
    const float gate0 = clamp_gate<kClamped>(ptx::bf16_low(g), limit), gate1 = clamp_gate<kClamped>(ptx::bf16_high(g), limit);
    const float up0 = clamp_up<kClamped>(ptx::bf16_low(u), limit), up1 = clamp_up<kClamped>(ptx::bf16_high(u), limit);
    return ptx::pack_bf16(gate0 * sigmoid(gate0) * up0, gate1 * sigmoid(gate1) * up1);
}

// bf16 of a kept gate or up value that stays on its side of the limit, so that the backward can tell from it whether the limit
// bound: the nearest bf16, or its neighbour where rounding went across. `limit` is positive.
__device__ __forceinline__ float keep_side(float exact, float limit) {
    const float rounded = ptx::bf16_low(ptx::pack_bf16(exact, 0.0f));
    const bool outside = fabsf(exact) > limit;
    if ((fabsf(rounded) > limit) == outside) return rounded;
    const uint32_t step = 0x10000u, bits = __float_as_uint(rounded);  // one bf16 away from zero or towards it
    return __uint_as_float(outside ? bits + step : bits - step);
}

template <bool kClamped>
__device__ __forceinline__ uint32_t pack_gate(float g0, float g1, float limit) {
    if (not kClamped) return ptx::pack_bf16(g0, g1);
    // The gate is bound from above only.
    return ptx::pack_bf16(g0 > 0.0f ? keep_side(g0, limit) : g0, g1 > 0.0f ? keep_side(g1, limit) : g1);
}

template <bool kClamped>
__device__ __forceinline__ uint32_t pack_up(float u0, float u1, float limit) {
    return kClamped ? ptx::pack_bf16(keep_side(u0, limit), keep_side(u1, limit)) : ptx::pack_bf16(u0, u1);
}

struct SwigluGrads {
    float dgate, dup, weighted;  // weighted: w a
};

// For one column of one row, from gate and up (rounded to bf16) and da' = dy W2 (unweighted):
//   a = silu(g) u      dtopk += da' a      dup = w da' silu(g)      dgate = w da' u sigmoid(g) (1 + g (1 - sigmoid(g)))
// and zero where the limit binds. That is decided on the unrounded values: rounding would move values across the limit.
template <bool kClamped>
__device__ __forceinline__ SwigluGrads swiglu_backward(float gate, float up, float exact_gate, float exact_up, float grad, float weight,
                                                       float limit, float& dtopk) {
    const float g = clamp_gate<kClamped>(gate, limit), u = clamp_up<kClamped>(up, limit);
    const float s = sigmoid(g);
    const float silu = g * s;
    const float a = silu * u;
    dtopk = fmaf(grad, a, dtopk);
    const float weighted_grad = weight * grad;
    SwigluGrads out = {weighted_grad * u * fmaf(silu, 1.0f - s, s), weighted_grad * silu, weight * a};
    if (kClamped and exact_gate > limit) out.dgate = 0.0f;
    if (kClamped and fabsf(exact_up) > limit) out.dup = 0.0f;
    return out;
}

}  // namespace prime_kernels
