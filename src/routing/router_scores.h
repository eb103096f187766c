// Scores of one token: logits -> scores and back. Templates on the real type, so that gradients
// can be checked in fp64; all sums run by rising expert id.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "megamoe/router.h"

namespace megamoe::detail {

/// Keeps a sum of sigmoid scores off zero.
inline constexpr double kScoreSumGuard = 1e-20;

template <class Real>
void softmax(std::span<const Real> logits, std::span<Real> scores) {
  const Real highest = *std::max_element(logits.begin(), logits.end());
  Real sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    scores[i] = std::exp(logits[i] - highest);
    sum += scores[i];
  }
  for (Real& score : scores) score /= sum;
}

/// Never overflows: exp is taken of negative numbers only.
template <class Real>
Real sigmoid(Real logit) {
  const Real tail = std::exp(-std::abs(logit));
  return (logit >= 0 ? Real(1) : tail) / (1 + tail);
}

template <class Real>
void compute_scores(ScoreFunction function, std::span<const Real> logits, std::span<Real> scores) {
  switch (function) {
    case ScoreFunction::softmax:
      softmax(logits, scores);
      return;
    case ScoreFunction::sigmoid:
      std::transform(logits.begin(), logits.end(), scores.begin(), sigmoid<Real>);
      return;
  }
}

/// In place: the gradient by the scores becomes the gradient by the logits.
template <class Real>
void scores_backward(ScoreFunction function, std::span<const Real> scores, std::span<Real> grad) {
  switch (function) {
    case ScoreFunction::softmax: {
      Real mean = 0;
      for (std::size_t j = 0; j < scores.size(); ++j) mean += grad[j] * scores[j];
      for (std::size_t j = 0; j < scores.size(); ++j) grad[j] = scores[j] * (grad[j] - mean);
      return;
    }
    case ScoreFunction::sigmoid:
      for (std::size_t j = 0; j < scores.size(); ++j) grad[j] *= scores[j] * (1 - scores[j]);
      return;
  }
}

}  // namespace megamoe::detail
