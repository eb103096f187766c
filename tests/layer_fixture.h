// What tests of the whole layer share: problems with a given routing, sessions on every rank,
// judgement by the oracle, and errors as values.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/workspace_layout.h"
#include "megamoe/error.h"
#include "verify/judge.h"
#include "verify/problem.h"
#include "verify/run.h"

namespace megamoe::verify {

/// Ends a test that gives the layer host memory, or asks for what the CPU backend alone does.
#define MEGAMOE_ON_CPU_ONLY(reason)                           \
  if (::megamoe::verify::default_backend() != Backend::cpu) { \
    GTEST_SKIP() << "on the CPU backend only: " << (reason);  \
  }

/// `wanted` channels where the backend under test takes any number, else the next one that it
/// takes.
inline std::int64_t channels(std::int64_t wanted) {
  return default_backend() == Backend::cpu ? wanted : round_up(wanted, 64);
}

/// H = I = 64, E = 8, K = 2 with these tokens on the ranks.
inline ProblemSpec spec_with_tokens(std::vector<std::int64_t> tokens_per_rank) {
  ProblemSpec spec;
  spec.tokens_per_rank = std::move(tokens_per_rank);
  spec.seed = 3;
  return spec;
}

/// Replaces the problem's routing. Weights are different numbers in (0, 1), NaN in empty slots.
inline void set_routing(Problem& problem, std::vector<std::int32_t> expert_ids_TK) {
  ASSERT_EQ(expert_ids_TK.size(), problem.expert_ids_TK.size());
  problem.expert_ids_TK = std::move(expert_ids_TK);
  for (std::size_t slot = 0; slot < problem.weights_TK.size(); ++slot) {
    problem.weights_TK[slot] = problem.expert_ids_TK[slot] < 0
                                   ? std::numeric_limits<float>::quiet_NaN()
                                   : static_cast<float>(slot * 37 % 101 + 10) / 113.0F;
  }
}

/// One id for each of the problem's slots: counts_E[0] times expert 0, then expert 1, ...
inline std::vector<std::int32_t> ids_from_counts(const std::vector<std::int64_t>& counts_E) {
  std::vector<std::int32_t> ids;
  for (std::size_t expert = 0; expert < counts_E.size(); ++expert) {
    ids.insert(ids.end(), counts_E[expert], static_cast<std::int32_t>(expert));
  }
  return ids;
}

inline void expect_right(const Problem& problem, const LayerTensors& tensors,
                         const RunOptions& options) {
  const auto comparisons = judge_layer(problem, tensors, options);
  EXPECT_TRUE(all_passed(comparisons)) << failures(comparisons);
}

inline void expect_right(const Problem& problem, const RunOptions& options) {
  expect_right(problem, run_layer(problem, options), options);
}

/// Runs `body(session, communicator)` on every rank; returns what their sessions hold at the end.
template <class Body>
LayerTensors run_sessions(const Problem& problem, const RunOptions& options, const Body& body) {
  std::vector<LayerTensors> tensors_R(problem.spec.num_ranks());
  run_ranks(topology_of(problem.spec, options), [&](Communicator& communicator) {
    RankSession session(problem, options, communicator);
    body(session, communicator);
    tensors_R[communicator.rank()] = session.tensors();
  });
  return concatenate(tensors_R);
}

/// The error that `work` throws; none if it returns.
template <class Work>
std::optional<Error> error_of(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

/// `work` must throw an Error with this code whose message contains every one of `texts`.
template <class Work>
void expect_error(ErrorCode code, const std::vector<std::string>& texts, const Work& work) {
  const std::optional<Error> error = error_of(work);
  if (!error) {
    ADD_FAILURE() << "no error; expected " << to_string(code) << " about " << texts.front();
    return;
  }
  EXPECT_STREQ(to_string(error->code()), to_string(code)) << error->what();
  for (const std::string& text : texts) {
    EXPECT_NE(std::string(error->what()).find(text), std::string::npos)
        << "'" << text << "' is not in: " << error->what();
  }
}

/// Elements [first, first + count) of the tensor are all exactly 0.
inline bool all_zero(const RawTensor& tensor, std::int64_t first, std::int64_t count) {
  const HostTensor host = tensor.to_host();
  for (std::int64_t i = first; i < first + count; ++i) {
    if (host.values[i] != 0.0) return false;
  }
  return true;
}

}  // namespace megamoe::verify
