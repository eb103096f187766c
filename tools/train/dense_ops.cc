#include "train/dense_ops.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace megamoe::trainer {
namespace {

// A tile of c that fits the registers of the narrowest vector unit we build for (SSE2), and how
// much of b beside it is copied together: read in place, its rows would share a few sets of the
// cache.
constexpr std::int64_t kTileRows = 4;
constexpr std::int64_t kLaneBytes = 32;
constexpr std::int64_t kPanelDepth = 128;

/// One row of a tile. A vector type, because g++ 12 vectorises the same loops over an array along
/// the wrong dimension, which makes the product almost three times as slow.
template <class Real>
struct Lanes {
  static constexpr std::int64_t kCount = kLaneBytes / sizeof(Real);
  using Type [[gnu::vector_size(kLaneBytes)]] = Real;
};

/// kPanelDepth rows of b, of a tile's width; columns that b does not have are 0.
template <class Real>
using Panel = std::array<typename Lanes<Real>::Type, kPanelDepth>;

/// kRows rows of a, k apart, times the first `depth` rows of a panel; added to the first `columns`
/// columns of c, whose rows are n apart.
template <std::int64_t kRows, class Real>
void add_tile(const Real* a, std::int64_t k, const Panel<Real>& panel, std::int64_t depth, Real* c,
              std::int64_t n, std::int64_t columns) {
  std::array<typename Lanes<Real>::Type, kRows> sums{};
  for (std::int64_t i = 0; i < depth; ++i) {
    for (std::int64_t row = 0; row < kRows; ++row) sums[row] += a[row * k + i] * panel[i];
  }
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      c[row * n + column] += sums[row][column];
    }
  }
}

/// Calls use(log of the sum of exponentials) for every token, in order.
template <class Real, class Use>
void for_each_log_sum(std::int64_t num_tokens, const Real* logits_TV, Use use) {
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const Real* logits = logits_TV + token * kVocabulary;
    const Real highest = *std::max_element(logits, logits + kVocabulary);
    double sum = 0;
    for (std::int64_t v = 0; v < kVocabulary; ++v) sum += std::exp(logits[v] - highest);
    use(token, static_cast<double>(highest) + std::log(sum));
  }
}

}  // namespace

template <class Real>
void add_product(const Real* a_MK, const Real* b_KN, Real* c_MN, std::int64_t m, std::int64_t n,
                 std::int64_t k) {
  constexpr std::int64_t kTileColumns = Lanes<Real>::kCount;
  for (std::int64_t column = 0; column < n; column += kTileColumns) {
    const std::int64_t columns = std::min(kTileColumns, n - column);
    for (std::int64_t first = 0; first < k; first += kPanelDepth) {
      const std::int64_t depth = std::min(kPanelDepth, k - first);
      Panel<Real> panel;
      for (std::int64_t i = 0; i < depth; ++i) {
        panel[i] = typename Lanes<Real>::Type{};
        for (std::int64_t j = 0; j < columns; ++j) panel[i][j] = b_KN[(first + i) * n + column + j];
      }
      std::int64_t row = 0;
      for (; row + kTileRows <= m; row += kTileRows) {
        add_tile<kTileRows>(a_MK + row * k + first, k, panel, depth, c_MN + row * n + column, n,
                            columns);
      }
      for (; row < m; ++row) {
        add_tile<1>(a_MK + row * k + first, k, panel, depth, c_MN + row * n + column, n, columns);
      }
    }
  }
}

template <class Real>
void transpose(const Real* in_MN, Real* out_NM, std::int64_t m, std::int64_t n) {
  for (std::int64_t row = 0; row < m; ++row) {
    for (std::int64_t column = 0; column < n; ++column) {
      out_NM[column * m + row] = in_MN[row * n + column];
    }
  }
}

template <class Real>
void embed(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn, const Real* embedding_VH,
           const Real* position_nH, Real* x_TH) {
  const auto [num_tokens, context, hidden_dim] = shape;
  const Real scale = std::sqrt(static_cast<Real>(hidden_dim));
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    Real* x = x_TH + token * hidden_dim;
    std::fill_n(x, hidden_dim, Real{0});
    for (std::int64_t i = 0; i < context; ++i) {
      const Real* position = position_nH + i * hidden_dim;
      const Real* embedding = embedding_VH + contexts_Tn[token * context + i] * hidden_dim;
      for (std::int64_t h = 0; h < hidden_dim; ++h) x[h] += position[h] * embedding[h];
    }
    for (std::int64_t h = 0; h < hidden_dim; ++h) x[h] *= scale;
  }
}

template <class Real>
void add_embed_gradients(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn,
                         const Real* embedding_VH, const Real* position_nH, const Real* dx_TH,
                         Real* d_embedding_VH, Real* d_position_nH) {
  const auto [num_tokens, context, hidden_dim] = shape;
  const Real scale = std::sqrt(static_cast<Real>(hidden_dim));
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const Real* dx = dx_TH + token * hidden_dim;
    for (std::int64_t i = 0; i < context; ++i) {
      const std::int64_t byte_offset = contexts_Tn[token * context + i] * hidden_dim;
      const Real* position = position_nH + i * hidden_dim;
      const Real* embedding = embedding_VH + byte_offset;
      Real* d_position = d_position_nH + i * hidden_dim;
      Real* d_embedding = d_embedding_VH + byte_offset;
      for (std::int64_t h = 0; h < hidden_dim; ++h) {
        const Real d_term = scale * dx[h];
        d_position[h] += d_term * embedding[h];
        d_embedding[h] += d_term * position[h];
      }
    }
  }
}

template <class Real>
void rms_norm(std::int64_t num_tokens, std::int64_t hidden_dim, const Real* x_TH,
              const Real* weight_H, Real* y_TH, Real* inverse_rms_T) {
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const Real* x = x_TH + token * hidden_dim;
    Real* y = y_TH + token * hidden_dim;
    double square_sum = 0;
    for (std::int64_t h = 0; h < hidden_dim; ++h) {
      square_sum += static_cast<double>(x[h]) * static_cast<double>(x[h]);
    }
    const double mean_square = square_sum / static_cast<double>(hidden_dim);
    const Real inverse_rms = static_cast<Real>(1.0 / std::sqrt(mean_square + kNormEpsilon));
    for (std::int64_t h = 0; h < hidden_dim; ++h) y[h] = weight_H[h] * (x[h] * inverse_rms);
    inverse_rms_T[token] = inverse_rms;
  }
}

// With n = x / rms and q = dy * weight: dx = (q - n * mean(q * n)) / rms, d_weight = sum of dy * n.
template <class Real>
void add_rms_norm_gradients(std::int64_t num_tokens, std::int64_t hidden_dim, const Real* x_TH,
                            const Real* weight_H, const Real* inverse_rms_T, const Real* dy_TH,
                            Real* dx_TH, Real* d_weight_H) {
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const Real* x = x_TH + token * hidden_dim;
    const Real* dy = dy_TH + token * hidden_dim;
    Real* dx = dx_TH + token * hidden_dim;
    const Real inverse_rms = inverse_rms_T[token];
    double projection = 0;
    for (std::int64_t h = 0; h < hidden_dim; ++h) {
      projection += static_cast<double>(dy[h] * weight_H[h]) * static_cast<double>(x[h]);
    }
    const Real mean_projection =
        static_cast<Real>(projection / static_cast<double>(hidden_dim)) * inverse_rms;
    for (std::int64_t h = 0; h < hidden_dim; ++h) {
      const Real normed = x[h] * inverse_rms;
      dx[h] += inverse_rms * (dy[h] * weight_H[h] - normed * mean_projection);
      d_weight_H[h] += dy[h] * normed;
    }
  }
}

template <class Real>
double cross_entropy_gradient(std::int64_t num_tokens, const std::uint8_t* targets_T, Real scale,
                              Real* logits_TV) {
  double total = 0;
  for_each_log_sum(num_tokens, logits_TV, [&](std::int64_t token, double log_sum) {
    Real* logits = logits_TV + token * kVocabulary;
    total += log_sum - static_cast<double>(logits[targets_T[token]]);
    for (std::int64_t v = 0; v < kVocabulary; ++v) {
      logits[v] = scale * std::exp(logits[v] - static_cast<Real>(log_sum));
    }
    logits[targets_T[token]] -= scale;
  });
  return total;
}

template <class Real>
double cross_entropy(std::int64_t num_tokens, const std::uint8_t* targets_T,
                     const Real* logits_TV) {
  double total = 0;
  for_each_log_sum(num_tokens, logits_TV, [&](std::int64_t token, double log_sum) {
    total += log_sum - static_cast<double>(logits_TV[token * kVocabulary + targets_T[token]]);
  });
  return total;
}

// The two instances that exist: the model's and the tests'.
// NOLINTBEGIN(bugprone-macro-parentheses): the argument is a type.
#define MEGAMOE_TRAINER_INSTANTIATE(Real)                                                     \
  template void add_product(const Real*, const Real*, Real*, std::int64_t, std::int64_t,      \
                            std::int64_t);                                                    \
  template void transpose(const Real*, Real*, std::int64_t, std::int64_t);                    \
  template void embed(const EmbeddingShape&, const std::uint8_t*, const Real*, const Real*,   \
                      Real*);                                                                 \
  template void add_embed_gradients(const EmbeddingShape&, const std::uint8_t*, const Real*,  \
                                    const Real*, const Real*, Real*, Real*);                  \
  template void rms_norm(std::int64_t, std::int64_t, const Real*, const Real*, Real*, Real*); \
  template void add_rms_norm_gradients(std::int64_t, std::int64_t, const Real*, const Real*,  \
                                       const Real*, const Real*, Real*, Real*);               \
  template double cross_entropy_gradient(std::int64_t, const std::uint8_t*, Real, Real*);     \
  template double cross_entropy(std::int64_t, const std::uint8_t*, const Real*);
MEGAMOE_TRAINER_INSTANTIATE(float)
MEGAMOE_TRAINER_INSTANTIATE(double)
#undef MEGAMOE_TRAINER_INSTANTIATE
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace megamoe::trainer
