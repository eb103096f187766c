// The contract of numbers, bit by bit: a naive fp32 evaluation with the rounding points and orders
// of summation that docs/numerics.md demands gives the bits of the CPU backend. Only the
// activations are shared with the library: their exp and tanh are the machine's.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "base/activation.h"
#include "layer_fixture.h"

namespace megamoe::verify {
namespace {

/// sum + left[0] * right[0] + ..., one fused chain in increasing order.
float chain(const std::vector<float>& left, const std::vector<float>& right, float sum = 0.0F) {
  for (std::size_t i = 0; i < left.size(); ++i) sum = std::fma(left[i], right[i], sum);
  return sum;
}

float rounded(float value) { return to_float(to_bf16(value)); }

/// p * a in segments of 64 with a tree of halves each, then the segments in order.
float segmented_sum(const std::vector<float>& p, const std::vector<float>& a) {
  float sum = 0.0F;
  for (std::size_t begin = 0; begin < p.size(); begin += 64) {
    std::array<float, 64> terms{};
    for (std::size_t i = begin; i < std::min(p.size(), begin + 64); ++i) {
      terms[i - begin] = p[i] * a[i];
    }
    for (std::size_t half = 32; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) terms[i] += terms[i + half];
    }
    sum = begin == 0 ? terms[0] : sum + terms[0];
  }
  return sum;
}

/// Row or column of a matrix as floats.
std::vector<float> strided(const std::vector<bf16>& values, std::int64_t first, std::int64_t count,
                           std::int64_t stride) {
  std::vector<float> result(count);
  for (std::int64_t i = 0; i < count; ++i) result[i] = to_float(values[first + i * stride]);
  return result;
}

/// What the backward pass needs of one slot, and what both passes give.
struct SlotResult {
  std::vector<float> o_H, dx_H, weighted_a_I, dg_I, du_I;
  float dweight = 0.0F;
};

template <class Policy>
SlotResult evaluate_slot(const Problem& problem, const Policy& policy, std::int64_t token,
                         std::int32_t expert, float weight) {
  const std::int64_t hidden = problem.spec.hidden_dim;
  const std::int64_t channels = problem.spec.intermediate_dim;
  const std::int64_t base = expert * hidden * channels;
  const std::vector<float> x = strided(problem.x_TH, token * hidden, hidden, 1);
  const std::vector<float> dy = strided(problem.dy_TH, token * hidden, hidden, 1);
  SlotResult slot;
  std::vector<float> a(channels);
  std::vector<float> p(channels);
  for (std::int64_t i = 0; i < channels; ++i) {
    const std::int64_t row = base + i * hidden;
    const float g =
        Policy::kGated ? rounded(chain(x, strided(problem.gate_EIH, row, hidden, 1))) : 0.0F;
    const float u = rounded(chain(x, strided(problem.up_EIH, row, hidden, 1)));
    a[i] = rounded(policy.value(g, u));
    p[i] = chain(dy, strided(problem.down_EHI, base + i, hidden, channels));
    const GateUpGradient gradient = policy.gradient(g, u, weight * p[i]);
    slot.dg_I.push_back(rounded(gradient.dg));
    slot.du_I.push_back(rounded(gradient.du));
    slot.weighted_a_I.push_back(rounded(weight * a[i]));
  }
  slot.dweight = segmented_sum(p, a);
  for (std::int64_t h = 0; h < hidden; ++h) {
    slot.o_H.push_back(
        rounded(chain(a, strided(problem.down_EHI, base + h * channels, channels, 1))));
    float dx = 0.0F;  // all of dg, then all of du
    if constexpr (Policy::kGated) {
      dx = chain(slot.dg_I, strided(problem.gate_EIH, base + h, channels, hidden));
    }
    dx = chain(slot.du_I, strided(problem.up_EIH, base + h, channels, hidden), dx);
    slot.dx_H.push_back(rounded(dx));
  }
  return slot;
}

struct ContractResult {
  std::vector<float> y_TH, dx_TH, dweights_TK, dgate_EIH, dup_EIH, ddown_EHI;
};

/// Slots come in the order of (token, slot): all sums over slots and rows are made in that order.
template <class Policy>
ContractResult evaluate_contract(const Problem& problem, const Policy& policy) {
  const ProblemSpec& spec = problem.spec;
  const std::int64_t hidden = spec.hidden_dim;
  const std::int64_t channels = spec.intermediate_dim;
  ContractResult result;
  result.y_TH.assign(problem.x_TH.size(), 0.0F);
  result.dx_TH.assign(problem.x_TH.size(), 0.0F);
  result.dweights_TK.assign(problem.weights_TK.size(), 0.0F);
  result.dgate_EIH.assign(problem.gate_EIH.size(), 0.0F);
  result.dup_EIH.assign(problem.up_EIH.size(), 0.0F);
  result.ddown_EHI.assign(problem.down_EHI.size(), 0.0F);
  for (std::size_t index = 0; index < problem.expert_ids_TK.size(); ++index) {
    const std::int32_t expert = problem.expert_ids_TK[index];
    if (expert < 0) continue;
    const std::int64_t token = static_cast<std::int64_t>(index) / spec.top_k;
    const float weight = problem.weights_TK[index];
    const SlotResult slot = evaluate_slot(problem, policy, token, expert, weight);
    result.dweights_TK[index] = slot.dweight;
    const std::int64_t base = expert * hidden * channels;
    for (std::int64_t h = 0; h < hidden; ++h) {
      float& y = result.y_TH[token * hidden + h];
      y = std::fma(weight, slot.o_H[h], y);
      result.dx_TH[token * hidden + h] += slot.dx_H[h];
      const float x = to_float(problem.x_TH[token * hidden + h]);
      const float dy = to_float(problem.dy_TH[token * hidden + h]);
      for (std::int64_t i = 0; i < channels; ++i) {
        const std::int64_t up = base + i * hidden + h;
        if constexpr (Policy::kGated) {
          result.dgate_EIH[up] = std::fma(slot.dg_I[i], x, result.dgate_EIH[up]);
        }
        result.dup_EIH[up] = std::fma(slot.du_I[i], x, result.dup_EIH[up]);
        float& ddown = result.ddown_EHI[base + h * channels + i];
        ddown = std::fma(dy, slot.weighted_a_I[i], ddown);
      }
    }
  }
  return result;
}

std::int64_t num_differences(const RawTensor& tensor, const std::vector<float>& wanted) {
  const HostTensor host = tensor.to_host();
  std::int64_t count = tensor.num_elements() == static_cast<std::int64_t>(wanted.size()) ? 0 : -1;
  for (std::size_t i = 0; i < host.values.size(); ++i) {
    const float value = tensor.dtype == DType::bf16 ? rounded(wanted[i]) : wanted[i];
    if (host.values[i] != static_cast<double>(value)) ++count;
  }
  return count;
}

class Contract : public testing::TestWithParam<ActivationKind> {};

TEST_P(Contract, HoldsBitByBit) {
  for (const WeightGradientMode mode :
       {WeightGradientMode::store_bf16, WeightGradientMode::store_fp32}) {
    ProblemSpec spec = spec_with_tokens({40, 27});
    spec.hidden_dim = 40;
    spec.intermediate_dim = 136;
    spec.num_experts = 4;
    spec.top_k = 3;
    spec.routing = RoutingPattern::holes;
    spec.activation = {GetParam(), 1.0F};
    const Problem problem = make_problem(spec);
    RunOptions options;
    options.weight_gradient_mode = mode;
    const LayerTensors tensors = run_layer(problem, options);
    const ContractResult wanted = with_activation(
        spec.activation, [&](const auto& policy) { return evaluate_contract(problem, policy); });
    EXPECT_EQ(num_differences(tensors.y, wanted.y_TH), 0);
    EXPECT_EQ(num_differences(tensors.dx, wanted.dx_TH), 0);
    EXPECT_EQ(num_differences(tensors.dweights, wanted.dweights_TK), 0);
    EXPECT_EQ(num_differences(tensors.dgate, wanted.dgate_EIH), 0);
    EXPECT_EQ(num_differences(tensors.dup, wanted.dup_EIH), 0);
    EXPECT_EQ(num_differences(tensors.ddown, wanted.ddown_EHI), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, Contract,
                         testing::Values(ActivationKind::swiglu, ActivationKind::clamped_swiglu,
                                         ActivationKind::gelu_erf, ActivationKind::gelu_tanh,
                                         ActivationKind::relu2, ActivationKind::identity),
                         [](const auto& test) { return to_string(test.param); });

}  // namespace
}  // namespace megamoe::verify
