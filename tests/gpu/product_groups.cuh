// Ragged groups of rows for the tests of the products, and what every product must give on them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "product_cases.cuh"

namespace megamoe::testing {

/// Groups of the given sizes one after the other, each at a multiple of 64 rows.
struct Groups {
  std::vector<std::int32_t> begin;
  std::vector<std::int32_t> count;
  std::int64_t capacity = 0;

  explicit Groups(std::vector<std::int32_t> counts) : count(std::move(counts)) {
    for (const std::int32_t rows : count) {
      begin.push_back(static_cast<std::int32_t>(capacity));
      capacity += (rows + 63) / 64 * 64;
    }
    capacity = std::max<std::int64_t>(capacity, 64);
  }
};

inline ProductData make_data(int hidden, int intermediate, const Groups& groups) {
  return ProductData(hidden, intermediate, groups.begin, groups.count, groups.capacity);
}

inline bool is_weight_gradient(const ProductCase& product) {
  return product.name.starts_with("dw");
}

/// One product in all ways of sharing; the error may be at most twice that of the rounded fp64
/// result itself.
inline void expect_accurate(ProductData& data, const ProductCase& product) {
  for (const products::Sharing sharing : product.sharings) {
    products::LaunchOptions options;
    options.sharing = sharing;
    data.poison_outputs();
    product.launch(data, options);
    const double error = product.sampled_error(data);
    EXPECT_LT(error, product.tolerance)
        << product.name << ", sharing " << static_cast<int>(sharing);
  }
}

inline void expect_accurate(ProductData& data) {
  for (const ProductCase& product : product_cases()) expect_accurate(data, product);
}

}  // namespace megamoe::testing
