#include "verify/oracle.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "verify/oracle_activation.h"
#include "verify/rounding_effects.h"

namespace megamoe::verify {
namespace {

constexpr int kBf16SignificantBits = 8;

/// Eight partial sums let the compiler vectorise; in fp64 their order does not matter here.
double dot(const double* left, const double* right, std::int64_t count) {
  constexpr std::int64_t kLanes = 8;
  double lanes[kLanes] = {};
  std::int64_t index = 0;
  for (; index + kLanes <= count; index += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += left[index + lane] * right[index + lane];
    }
  }
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  for (; index < count; ++index) sum += left[index] * right[index];
  return sum;
}

void add_scaled(double* target, double factor, const double* source, std::int64_t count) {
  for (std::int64_t index = 0; index < count; ++index) target[index] += factor * source[index];
}

/// A slot (t, k) that names the expert at hand.
struct Slot {
  std::int64_t token;
  std::int64_t index;  // t * K + k
};

class Evaluation {
 public:
  Evaluation(const OracleInput& input, Rounding rounding, GradientStorage storage)
      : in_(input),
        rounding_(rounding),
        storage_(storage),
        gated_(is_gated(input.activation.kind)),
        tally_(input, storage) {
    check_sizes();
    const std::int64_t num_slots = in_.num_tokens * in_.top_k;
    o_SH_.assign(num_slots * in_.hidden_dim, 0.0);
    dx_SH_.assign(num_slots * in_.hidden_dim, 0.0);
    out_.y_TH.assign(in_.x_TH.size(), 0.0);
    out_.dx_TH.assign(in_.x_TH.size(), 0.0);
    out_.dweights_TK.assign(num_slots, 0.0);
    out_.dweights_scale_TK.assign(num_slots, 0.0);
    out_.dgate_EIH.assign(in_.gate_EIH.size(), 0.0);
    out_.dup_EIH.assign(in_.up_EIH.size(), 0.0);
    out_.ddown_EHI.assign(in_.down_EHI.size(), 0.0);
  }

  OracleResult run() {
    std::atomic<std::int64_t> next_expert{0};
    const auto work = [&] {
      for (std::int64_t expert = next_expert++; expert < in_.num_experts; expert = next_expert++) {
        evaluate_expert(expert);
      }
    };
    const std::int64_t num_threads =
        std::min<std::int64_t>(std::max(1U, std::thread::hardware_concurrency()), in_.num_experts);
    std::vector<std::thread> threads;
    for (std::int64_t thread = 1; thread < num_threads; ++thread) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    sum_slots();
    if (rounding_ == Rounding::none) out_.effects = std::move(tally_).effects(out_);
    return std::move(out_);
  }

 private:
  double rounded(double value) const {
    return rounding_ == Rounding::contract ? round_to_bf16(value) : value;
  }

  void evaluate_expert(std::int64_t expert) {
    std::vector<Slot> slots;
    for (std::int64_t token = 0; token < in_.num_tokens; ++token) {
      for (std::int64_t k = 0; k < in_.top_k; ++k) {
        const std::int64_t index = token * in_.top_k + k;
        if (in_.expert_ids_TK[index] == expert) slots.push_back({token, index});
      }
    }
    const std::int64_t offset = expert * in_.intermediate_dim * in_.hidden_dim;
    std::optional<RoundingTally::Expert> roundings;
    if (rounding_ == Rounding::none) roundings.emplace(tally_, expert);
    for (const Slot& slot : slots) {
      evaluate_slot(slot, offset, roundings ? &*roundings : nullptr);
    }
    if (rounding_ == Rounding::contract && storage_ == GradientStorage::bf16) {
      const std::int64_t count = in_.intermediate_dim * in_.hidden_dim;
      for (std::vector<double>* gradient : {&out_.dgate_EIH, &out_.dup_EIH, &out_.ddown_EHI}) {
        if (gradient->empty()) continue;
        for (std::int64_t i = offset; i < offset + count; ++i) {
          (*gradient)[i] = round_to_bf16((*gradient)[i]);
        }
      }
    }
  }

  void evaluate_slot(const Slot& slot, std::int64_t expert_offset,
                     RoundingTally::Expert* roundings) {
    const std::int64_t num_hidden = in_.hidden_dim;
    const std::int64_t num_channels = in_.intermediate_dim;
    const double* x = &in_.x_TH[slot.token * num_hidden];
    const double* dy = &in_.dy_TH[slot.token * num_hidden];
    const double weight = in_.weights_TK[slot.index];
    const double* gate = gated_ ? &in_.gate_EIH[expert_offset] : nullptr;
    const double* up = &in_.up_EIH[expert_offset];
    const double* down = &in_.down_EHI[expert_offset];

    std::vector<double> g(num_channels);
    std::vector<double> u(num_channels);
    std::vector<double> a(num_channels);
    std::vector<double> weighted_a(num_channels);
    std::vector<ActivationPoint> points(num_channels);
    for (std::int64_t i = 0; i < num_channels; ++i) {
      g[i] = gated_ ? rounded(dot(gate + i * num_hidden, x, num_hidden)) : 0.0;
      u[i] = rounded(dot(up + i * num_hidden, x, num_hidden));
      points[i] = activation_point(in_.activation, g[i], u[i]);
      a[i] = rounded(points[i].act * points[i].factor);
      weighted_a[i] = rounded(weight * a[i]);
    }

    double* o = &o_SH_[slot.index * num_hidden];
    std::vector<double> p(num_channels, 0.0);
    for (std::int64_t h = 0; h < num_hidden; ++h) {
      o[h] = rounded(dot(down + h * num_channels, a.data(), num_channels));
      add_scaled(p.data(), dy[h], down + h * num_channels, num_channels);
      add_scaled(&out_.ddown_EHI[expert_offset + h * num_channels], dy[h], weighted_a.data(),
                 num_channels);
    }
    out_.dweights_TK[slot.index] = dot(p.data(), a.data(), num_channels);
    out_.dweights_scale_TK[slot.index] =
        std::sqrt(dot(dy, dy, num_hidden)) * std::sqrt(dot(o, o, num_hidden));

    double* dx = &dx_SH_[slot.index * num_hidden];
    for (std::int64_t i = 0; i < num_channels; ++i) {
      const double da = weight * p[i];
      const std::int64_t row = i * num_hidden;
      if (gated_) {
        const double dg = rounded(da * points[i].factor * points[i].act_derivative);
        add_scaled(dx, dg, gate + row, num_hidden);
        add_scaled(&out_.dgate_EIH[expert_offset + row], dg, x, num_hidden);
      }
      const double du = rounded(da * points[i].act * points[i].factor_derivative);
      add_scaled(dx, du, up + row, num_hidden);
      add_scaled(&out_.dup_EIH[expert_offset + row], du, x, num_hidden);
    }
    if (roundings != nullptr) roundings->add({slot.token, slot.index, g, u, p, o, dx});
    for (std::int64_t h = 0; h < num_hidden; ++h) dx[h] = rounded(dx[h]);
  }

  void sum_slots() {
    for (std::int64_t token = 0; token < in_.num_tokens; ++token) {
      for (std::int64_t h = 0; h < in_.hidden_dim; ++h) {
        double y = 0.0;
        double dx = 0.0;
        for (std::int64_t k = 0; k < in_.top_k; ++k) {
          const std::int64_t slot = token * in_.top_k + k;
          if (in_.expert_ids_TK[slot] < 0) continue;
          y += in_.weights_TK[slot] * o_SH_[slot * in_.hidden_dim + h];
          dx += dx_SH_[slot * in_.hidden_dim + h];
        }
        out_.y_TH[token * in_.hidden_dim + h] = rounded(y);
        out_.dx_TH[token * in_.hidden_dim + h] = rounded(dx);
      }
    }
  }

  void check_sizes() const {
    const auto check = [](const char* name, std::size_t size, std::int64_t wanted) {
      if (size == static_cast<std::size_t>(wanted)) return;
      throw std::logic_error("oracle: " + std::string(name) + " has " + std::to_string(size) +
                             " elements instead of " + std::to_string(wanted));
    };
    const std::int64_t per_weight = in_.num_experts * in_.intermediate_dim * in_.hidden_dim;
    check("x", in_.x_TH.size(), in_.num_tokens * in_.hidden_dim);
    check("dy", in_.dy_TH.size(), in_.num_tokens * in_.hidden_dim);
    check("expert_ids", in_.expert_ids_TK.size(), in_.num_tokens * in_.top_k);
    check("weights", in_.weights_TK.size(), in_.num_tokens * in_.top_k);
    check("gate", in_.gate_EIH.size(), gated_ ? per_weight : 0);
    check("up", in_.up_EIH.size(), per_weight);
    check("down", in_.down_EHI.size(), per_weight);
    for (const std::int32_t id : in_.expert_ids_TK) {
      if (id < -1 || id >= in_.num_experts) {
        throw std::logic_error("oracle: expert id " + std::to_string(id) + " is out of range");
      }
    }
  }

  const OracleInput& in_;
  Rounding rounding_;
  GradientStorage storage_;
  bool gated_;
  RoundingTally tally_;        // of Rounding::none
  std::vector<double> o_SH_;   // S = T * K slots
  std::vector<double> dx_SH_;  // each slot's share of dx
  OracleResult out_;
};

}  // namespace

double round_to_bf16(double value) {
  if (value == 0.0 || !std::isfinite(value)) return value;
  int exponent = 0;
  const double significand = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(significand, kBf16SignificantBits)),
                    exponent - kBf16SignificantBits);
}

double bf16_step(double value) {
  if (value == 0.0 || !std::isfinite(value)) return 0.0;
  int exponent = 0;
  std::frexp(value, &exponent);
  return std::ldexp(1.0, exponent - kBf16SignificantBits);
}

double fp32_sum_error(std::int64_t length) {
  constexpr double kTruncationFactor = 4.0;
  constexpr double kTensorCoreDepth = 16.0;
  constexpr double kFp32HalfUlp = 0x1p-24;
  return kTruncationFactor * std::max(1.0, static_cast<double>(length) / kTensorCoreDepth) *
         kFp32HalfUlp;
}

OracleResult evaluate(const OracleInput& input, Rounding rounding, GradientStorage storage) {
  return Evaluation(input, rounding, storage).run();
}

}  // namespace megamoe::verify
