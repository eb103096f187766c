// What the contract's roundings can do to each slice of each tensor: oracle.h says which number it
// is, compare.h what follows from it. To first order, from the exact values: each rounding by half
// a step, through the slope of what lies behind it.
#pragma once

#include <cstdint>
#include <vector>

#include "verify/oracle.h"

namespace megamoe::verify {

/// The exact values of slot (t, k) and of its expert's products.
struct SlotValues {
  std::int64_t token;
  std::int64_t slot;  ///< t * K + k
  const std::vector<double>& g_I;
  const std::vector<double>& u_I;
  const std::vector<double>& p_I;
  const double* o_H;
  const double* dx_H;
};

/// Slots of a token that name this expert: they are rounded alike, so that what each does adds up.
double num_twins(const std::int32_t* ids_K, std::int64_t top_k, std::int32_t expert);

class RoundingTally {
 public:
  RoundingTally(const OracleInput& input, GradientStorage storage);

  /// All slots of one expert. Experts may come from several threads, each from one.
  class Expert {
   public:
    Expert(RoundingTally& tally, std::int64_t expert);
    void add(const SlotValues& values);

   private:
    struct Changes {
      double a = 0.0;
      double dg = 0.0;
      double du = 0.0;
    };
    struct OfSlot;
    void add_channel(const SlotValues& values, std::int64_t channel, OfSlot& effects) const;

    RoundingTally& tally_;
    std::int64_t expert_;
    std::vector<double> gate_I_;  ///< norms of the expert's rows over H
    std::vector<double> up_I_;
    std::vector<double> down_I_;  ///< norms of its columns over H
  };

  /// After all experts, from the exact results.
  RoundingEffects effects(const OracleResult& exact) &&;

 private:
  const OracleInput& in_;
  GradientStorage storage_;
  std::vector<RoundingEffect> y_S_;  ///< S = T * K slots
  std::vector<RoundingEffect> dx_S_;
  RoundingEffects effects_;
};

}  // namespace megamoe::verify
