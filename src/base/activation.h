// Activations as policy types, shared by the CPU and the CUDA backend: `value` gives a from the
// rounded g and u, `gradient` gives dg and du from them and da. Ungated policies ignore g.
// Everything is fp32.
#pragma once

#include <cmath>

#include "megamoe/bf16.h"
#include "megamoe/config.h"

namespace megamoe {

struct GateUpGradient {
  float dg;
  float du;
};

struct SwiGlu {
  static constexpr bool kGated = true;

  MEGAMOE_HOST_DEVICE float value(float g, float u) const { return value(g, u, sigmoid(g)); }
  MEGAMOE_HOST_DEVICE GateUpGradient gradient(float g, float u, float da) const {
    return gradient(g, u, da, sigmoid(g));
  }

  /// The same from s = sigmoid(g), for callers that start on it early.
  MEGAMOE_HOST_DEVICE float value(float g, float u, float s) const { return g * s * u; }
  MEGAMOE_HOST_DEVICE GateUpGradient gradient(float g, float u, float da, float s) const {
    const float act = g * s;
    const float derivative = s + act * (1.0F - s);
    return {da * u * derivative, da * act};
  }
  MEGAMOE_HOST_DEVICE static float sigmoid(float g) {
#if defined(__CUDA_ARCH__)
    // Special function unit: relative error about 2^-21 against bf16's 2^-9, in four instructions
    // instead of about thirty.
    float exponential;
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(-1.44269504088896340736F * g));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0F + exponential));
    return result;
#else
    return 1.0F / (1.0F + expf(-g));
#endif
  }
};

/// The clamp passes the gradient at the limit itself, as torch.clamp does.
struct ClampedSwiGlu {
  static constexpr bool kGated = true;
  float limit;

  MEGAMOE_HOST_DEVICE float value(float g, float u) const {
    return SwiGlu{}.value(clamp_gate(g), clamp_up(u));
  }
  MEGAMOE_HOST_DEVICE GateUpGradient gradient(float g, float u, float da) const {
    const GateUpGradient inner = SwiGlu{}.gradient(clamp_gate(g), clamp_up(u), da);
    // `!(g > limit)` keeps a NaN visible in the gradient.
    return {!(g > limit) ? inner.dg : 0.0F, !(u > limit || u < -limit) ? inner.du : 0.0F};
  }

 private:
  MEGAMOE_HOST_DEVICE float clamp_gate(float g) const { return g > limit ? limit : g; }
  MEGAMOE_HOST_DEVICE float clamp_up(float u) const {
    return u > limit ? limit : (u < -limit ? -limit : u);
  }
};

struct GeluErf {
  static constexpr bool kGated = true;

  MEGAMOE_HOST_DEVICE float value(float g, float u) const { return g * cdf(g) * u; }
  MEGAMOE_HOST_DEVICE GateUpGradient gradient(float g, float u, float da) const {
    constexpr float kInverseSqrtTwoPi = 0.398942280401432677939946F;
    const float density = kInverseSqrtTwoPi * expf(-0.5F * g * g);
    return {da * u * (cdf(g) + g * density), da * (g * cdf(g))};
  }

 private:
  MEGAMOE_HOST_DEVICE static float cdf(float g) {
    constexpr float kInverseSqrtTwo = 0.707106781186547524400844F;
    return 0.5F * (1.0F + erff(g * kInverseSqrtTwo));
  }
};

struct GeluTanh {
  static constexpr bool kGated = true;

  MEGAMOE_HOST_DEVICE float value(float g, float u) const {
    return 0.5F * g * (1.0F + tanhf(inner(g))) * u;
  }
  MEGAMOE_HOST_DEVICE GateUpGradient gradient(float g, float u, float da) const {
    const float t = tanhf(inner(g));
    const float inner_derivative = kSqrtTwoOverPi * (1.0F + 3.0F * kCubic * g * g);
    const float derivative = 0.5F * (1.0F + t) + 0.5F * g * (1.0F - t * t) * inner_derivative;
    return {da * u * derivative, da * (0.5F * g * (1.0F + t))};
  }

 private:
  static constexpr float kSqrtTwoOverPi = 0.797884560802865355879892F;
  static constexpr float kCubic = 0.044715F;
  MEGAMOE_HOST_DEVICE static float inner(float g) {
    return kSqrtTwoOverPi * (g + kCubic * g * g * g);
  }
};

struct Relu2 {
  static constexpr bool kGated = false;

  MEGAMOE_HOST_DEVICE float value(float /*g*/, float u) const { return u < 0.0F ? 0.0F : u * u; }
  MEGAMOE_HOST_DEVICE GateUpGradient gradient(float /*g*/, float u, float da) const {
    return {0.0F, u < 0.0F ? 0.0F : da * (2.0F * u)};
  }
};

struct Identity {
  static constexpr bool kGated = false;

  MEGAMOE_HOST_DEVICE float value(float /*g*/, float u) const { return u; }
  MEGAMOE_HOST_DEVICE GateUpGradient gradient(float /*g*/, float /*u*/, float da) const {
    return {0.0F, da};
  }
};

/// Calls `function(policy)` with the policy object of `activation`.
template <class Function>
decltype(auto) with_activation(const Activation& activation, Function&& function) {
  switch (activation.kind) {
    case ActivationKind::clamped_swiglu:
      return function(ClampedSwiGlu{activation.limit});
    case ActivationKind::gelu_erf:
      return function(GeluErf{});
    case ActivationKind::gelu_tanh:
      return function(GeluTanh{});
    case ActivationKind::relu2:
      return function(Relu2{});
    case ActivationKind::identity:
      return function(Identity{});
    case ActivationKind::swiglu:
      break;
  }
  return function(SwiGlu{});
}

}  // namespace megamoe
