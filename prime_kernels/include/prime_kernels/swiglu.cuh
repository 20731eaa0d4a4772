// SwiGLU on pairs of columns. Gate and up are rounded to bf16 first; the limit binds the gate from above and the linear
// part on both sides (+inf: no limit).
#pragma once

#include <prime_kernels/ptx.cuh>

namespace prime_kernels {

// Two sigmoids for one reciprocal: 1 / p0 = p1 / (p0 p1). The exponent is held at 2^57, so that the product of two stays
// finite: below -40 the sigmoid is taken as 7e-18, where silu is zero to every digit of a bf16 output of order one.
__device__ __forceinline__ void sigmoid_pair(float x0, float x1, float& s0, float& s1) {
    constexpr float kMinusLog2E = -1.4426950408889634f;
    constexpr float kLargestExponent = 57.0f;
    float e0, e1, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e0) : "f"(fminf(x0 * kMinusLog2E, kLargestExponent)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e1) : "f"(fminf(x1 * kMinusLog2E, kLargestExponent)));
    const float p0 = 1.0f + e0, p1 = 1.0f + e1;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(p0 * p1));
    s0 = r * p1;
    s1 = r * p0;
}

__device__ __forceinline__ float clamp_up(float up, float limit) { return fmaxf(fminf(up, limit), -limit); }

// a = silu(min(g, c)) * clamp(u, -c, c) for two columns, packed to bf16.
__device__ __forceinline__ uint32_t swiglu_pair(float g0, float g1, float u0, float u1, float limit) {
    const uint32_t g = ptx::pack_bf16(g0, g1), u = ptx::pack_bf16(u0, u1);
    const float gate0 = fminf(ptx::bf16_low(g), limit), gate1 = fminf(ptx::bf16_high(g), limit);
    const float up0 = clamp_up(ptx::bf16_low(u), limit), up1 = clamp_up(ptx::bf16_high(u), limit);
    float s0, s1;
    sigmoid_pair(gate0, gate1, s0, s1);
    return ptx::pack_bf16(gate0 * s0 * up0, gate1 * s1 * up1);
}

// In place, for one column of one row: from gate, up and da' = dy W2 (unweighted) to dgate, dup and w * a.
//   a = silu(g) u      dtopk += da' a      dup = w da' silu(g)      dgate = w da' u sigmoid(g) (1 + g (1 - sigmoid(g)))
// and zero where the limit binds.
__device__ __forceinline__ void swiglu_backward(float& gate, float& up, float& grad, float sigmoid, float weight, float limit, float& dtopk) {
    const float g = fminf(gate, limit), u = clamp_up(up, limit);
    const float silu = g * sigmoid;
    const float a = silu * u;
    dtopk = fmaf(grad, a, dtopk);
    const float weighted = weight * grad;
    const float dup = fabsf(up) > limit ? 0.0f : weighted * silu;
    const float dgate = gate > limit ? 0.0f : weighted * u * fmaf(silu, 1.0f - sigmoid, sigmoid);
    gate = dgate;
    up = dup;
    grad = weight * a;
}

}  // namespace prime_kernels
