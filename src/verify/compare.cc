#include "verify/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <numeric>

#include "verify/oracle.h"

namespace megamoe::verify {
namespace {

constexpr double kBaselineFactor = 2.0;
constexpr double kEffectFactor = 4.0;  ///< two steps, of which an effect is half of one

std::string format(const char* pattern, double first, double second) {
  char text[96];
  std::snprintf(text, sizeof text, pattern, first, second);
  return text;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    text += (dim > 0 ? ", " : "") + std::to_string(shape[dim]);
  }
  return text + "]";
}

std::int64_t product(std::vector<std::int64_t>::const_iterator first,
                     std::vector<std::int64_t>::const_iterator last) {
  return std::accumulate(first, last, std::int64_t{1}, std::multiplies<>());
}

/// Squared norms of a range of elements, of its errors and of the effects of roundings, and its
/// smallest allowance.
struct Norms {
  double reference_squared = 0.0;
  double error_squared = 0.0;
  double baseline_error_squared = 0.0;
  double effects_squared = 0.0;
  double floor = 0.0;

  void add(const Norms& other) {
    reference_squared += other.reference_squared;
    error_squared += other.error_squared;
    baseline_error_squared += other.baseline_error_squared;
    effects_squared += other.effects_squared;
    floor = std::max(floor, other.floor);
  }
};

Norms norms_of(const HostTensor& actual, const HostTensor& reference, const HostTensor& baseline,
               std::int64_t first, std::int64_t last) {
  Norms norms;
  double largest = 0.0;
  for (std::int64_t i = first; i < last; ++i) {
    const double wanted = reference.values[i];
    const double error = actual.values[i] - wanted;
    const double baseline_error = baseline.values[i] - wanted;
    norms.reference_squared += wanted * wanted;
    norms.error_squared += error * error;
    norms.baseline_error_squared += baseline_error * baseline_error;
    largest = std::max(largest, std::abs(wanted));
  }
  norms.floor = bf16_step(largest);
  return norms;
}

/// The index of the first element that is not finite, or -1.
std::int64_t first_not_finite(const HostTensor& tensor) {
  const auto found = std::find_if(tensor.values.begin(), tensor.values.end(),
                                  [](double value) { return !std::isfinite(value); });
  return found == tensor.values.end() ? -1 : found - tensor.values.begin();
}

std::string index_text(std::int64_t flat, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> indices(shape.size());
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    indices[dim] = flat % shape[dim];
    flat /= shape[dim];
  }
  return shape_text(indices);
}

/// What makes the tensors incomparable; empty if nothing does.
std::string unusable(const HostTensor& actual, const HostTensor& reference,
                     const HostTensor& baseline, const CompareOptions& options) {
  const std::int64_t count = product(reference.shape.begin(), reference.shape.end());
  const auto wrong_size = [&](const HostTensor& tensor) {
    return tensor.shape != reference.shape ||
           static_cast<std::int64_t>(tensor.values.size()) != count;
  };
  if (wrong_size(reference) || wrong_size(baseline)) return "the oracle's tensors do not match";
  if (options.slice_dims < 0 || options.slice_dims > static_cast<int>(reference.shape.size())) {
    return "the reference has too few dimensions for its slices";
  }
  const std::int64_t num_slices =
      product(reference.shape.begin(), reference.shape.begin() + options.slice_dims);
  const auto fits = [&](const auto& of_slices) {
    return of_slices.empty() || static_cast<std::int64_t>(of_slices.size()) == num_slices;
  };
  if (!fits(options.slice_norms) || !fits(options.slice_effects) || !fits(options.slice_floors)) {
    return "the slice norms, effects or floors do not match the reference";
  }
  if (actual.values.empty() && count > 0) return "missing";
  if (wrong_size(actual)) {
    return "shape " + shape_text(actual.shape) + " (" + std::to_string(actual.values.size()) +
           " elements) instead of " + shape_text(reference.shape);
  }
  if (first_not_finite(reference) >= 0 || first_not_finite(baseline) >= 0) {
    return "the oracle's tensors are not finite";
  }
  const std::int64_t bad = first_not_finite(actual);
  if (bad >= 0) {
    return "element " + index_text(bad, reference.shape) + " is " +
           std::to_string(actual.values[bad]);
  }
  return "";
}

/// How many times the rms error of its roundings a slice of `size` elements may have: twice, or
/// what four standard deviations of the rms of so few normal numbers come to (3.8 for one, 2 for
/// eight).
double slice_factor(std::int64_t size) {
  const auto count = static_cast<double>(std::max<std::int64_t>(1, size));
  return std::max(kBaselineFactor, 1.0 + 4.0 / std::sqrt(2.0 * count));
}

/// Allowed error, absolute, for a range of `size` elements with these norms.
double allowance(const Norms& norms, std::int64_t size, double norm, double from_whole,
                 const CompareOptions& options) {
  const double baseline = kBaselineFactor * std::sqrt(norms.baseline_error_squared);
  // An error that is anywhere within half a step has a third of its square as variance.
  const double roundings = slice_factor(size) * std::sqrt(norms.effects_squared / 3.0);
  if (norm == 0.0 && norms.effects_squared == 0.0) return 0.0;
  const double sums = fp32_sum_error(options.reduction_length) * norm;
  return std::max({baseline, roundings, from_whole * norm, sums, norms.floor});
}

/// 0 / 0 is agreement.
double ratio(double value, double unit) {
  if (value == 0.0) return 0.0;
  return unit == 0.0 ? std::numeric_limits<double>::infinity() : value / unit;
}

}  // namespace

Comparison compare(const std::string& name, const HostTensor& actual, const HostTensor& reference,
                   const HostTensor& baseline, const CompareOptions& options) {
  Comparison result;
  result.name = name;
  result.failure = unusable(actual, reference, baseline, options);
  if (!result.failure.empty()) {
    result.error = std::numeric_limits<double>::infinity();
    return result;
  }

  const auto slices_end = reference.shape.begin() + options.slice_dims;
  const std::int64_t num_slices = product(reference.shape.begin(), slices_end);
  const std::int64_t slice_size = product(slices_end, reference.shape.end());
  std::vector<Norms> slices(num_slices);
  std::vector<double> slice_norms(num_slices);
  Norms whole;
  double whole_norm_squared = 0.0;
  for (std::int64_t slice = 0; slice < num_slices; ++slice) {
    slices[slice] =
        norms_of(actual, reference, baseline, slice * slice_size, (slice + 1) * slice_size);
    slice_norms[slice] = options.slice_norms.empty() ? std::sqrt(slices[slice].reference_squared)
                                                     : options.slice_norms[slice];
    if (!options.slice_effects.empty()) {
      slices[slice].effects_squared = options.slice_effects[slice].squared;
      slices[slice].floor = kEffectFactor * options.slice_effects[slice].largest;
    }
    if (!options.slice_floors.empty()) slices[slice].floor = options.slice_floors[slice];
    whole.add(slices[slice]);
    whole_norm_squared += slice_norms[slice] * slice_norms[slice];
  }

  const double whole_norm = std::sqrt(whole_norm_squared);
  const double whole_error = std::sqrt(whole.error_squared);
  const double whole_allowed = allowance(whole, num_slices * slice_size, whole_norm, 0.0, options);
  result.error = ratio(whole_error, whole_norm);
  result.allowed = ratio(whole_allowed, whole_norm);
  if (whole_error > whole_allowed) result.failure = "the whole tensor";

  const double from_whole =
      whole_norm == 0.0
          ? 0.0
          : slice_factor(slice_size) * std::sqrt(whole.baseline_error_squared) / whole_norm;
  double worst_use = 0.0;
  for (std::int64_t slice = 0; slice < num_slices; ++slice) {
    const double error = std::sqrt(slices[slice].error_squared);
    const double allowed =
        allowance(slices[slice], slice_size, slice_norms[slice], from_whole, options);
    const double use = ratio(error, allowed);
    if (use <= worst_use) continue;
    worst_use = use;
    const std::vector<std::int64_t> slice_shape(reference.shape.begin(), slices_end);
    const std::string index =
        options.slice_dims == 1 ? std::to_string(slice) : index_text(slice, slice_shape);
    result.worst_slice = options.slice_name + " " + index + ": " +
                         format("%.2e of %.2e", ratio(error, slice_norms[slice]),
                                ratio(allowed, slice_norms[slice]));
  }
  if (worst_use > 1.0) {
    result.failure += (result.failure.empty() ? "" : "; ") + result.worst_slice;
  }
  result.passed = result.failure.empty();
  return result;
}

}  // namespace megamoe::verify
