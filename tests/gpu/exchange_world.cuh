// A group on the CPU and on the GPU side by side, and the comparison of every byte.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "gpu/gpu_ranks.cuh"

namespace megamoe::testing {

inline bool no_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) != cudaSuccess || count == 0;
}
#define MEGAMOE_SKIP_WITHOUT_DEVICE() \
  if (::megamoe::testing::no_device()) GTEST_SKIP() << "no CUDA device"

inline WorkspaceDims exchange_dims(int num_ranks, int num_experts, int top_k,
                                   std::int64_t max_tokens, std::int64_t hidden) {
  WorkspaceDims dims;
  dims.routing = {num_ranks, num_experts, top_k};
  dims.max_tokens = max_tokens;
  dims.hidden_dim = hidden;
  dims.intermediate_dim = 192;
  dims.row_capacity = num_ranks * max_tokens * top_k;
  return dims;
}

/// The first byte at which the two differ, or -1.
template <class T, class U>
std::int64_t first_difference(const T* expected, const std::vector<U>& actual, std::int64_t count) {
  static_assert(sizeof(T) == sizeof(U));
  const auto* left = reinterpret_cast<const unsigned char*>(expected);
  const auto* right = reinterpret_cast<const unsigned char*>(actual.data());
  const std::int64_t size = count * static_cast<std::int64_t>(sizeof(T));
  const auto* at = std::mismatch(left, left + size, right).first;
  return at == left + size ? -1 : at - left;
}

class ExchangeWorld {
 public:
  explicit ExchangeWorld(const WorkspaceDims& dims) : dims_(dims), host_(dims), gpu_(dims) {}

  /// Runs one forward and one backward call on both sides and compares.
  void run_and_compare(CaseMaker& cases, const std::vector<RankInput>& inputs, Pull how) {
    prepare(cases, inputs);
    gpu_.forward(how);
    host_.forward(inputs, results_);
    compare_all(Direction::forward);
    if (::testing::Test::HasFailure()) return;
    poison();
    gpu_.backward(how);
    host_.backward(inputs, results_);
    compare_all(Direction::backward);
  }

  void prepare(CaseMaker& cases, const std::vector<RankInput>& inputs) {
    results_.clear();
    const std::int64_t capacity = host_.dims().row_capacity;
    for (int r = 0; r < gpu_.num_ranks(); ++r) {
      results_.push_back({cases.rows(capacity, dims_.hidden_dim),
                          cases.floats(capacity * num_dweight_segments(dims_.intermediate_dim))});
    }
    gpu_.upload(inputs, results_);
    poison();
  }
  void poison() {
    host_.poison();
    gpu_.poison();
  }

  enum class Direction { forward, backward };

  void compare_all(Direction direction) {
    for (int r = 0; r < gpu_.num_ranks(); ++r) compare(r, direction);
  }

  [[nodiscard]] GpuRanks& gpu() { return gpu_; }
  [[nodiscard]] HostRanks& host() { return host_; }
  [[nodiscard]] const std::vector<ExpertResults>& results() const { return results_; }

 private:
  void compare(int r, Direction direction) {
    SCOPED_TRACE("rank " + std::to_string(r));
    GpuRank& gpu = gpu_.rank(r);
    HostRanks::Rank& host = host_.rank(r);
    EXPECT_EQ(gpu.view.failure->is_set, 0U);
    compare_plan(gpu, host);
    const SymmetricLayout layout = symmetric_layout(host_.dims());
    const std::vector<std::byte> whole = gpu.symmetric.download();
    const std::int64_t begin = gpu.view.symmetric.exchange.staged_rows_TH.offset;
    const std::int64_t at =
        first_difference(host_.symmetric(r),
                         std::vector<std::byte>(whole.begin() + begin, whole.end()), layout.bytes);
    EXPECT_EQ(at, -1) << "symmetric memory: destination_begin at "
                      << layout.destination_begin.offset << ", tokens " << layout.pull_tokens.offset
                      << ", slots " << layout.pull_slots.offset << ", rows "
                      << layout.slot_rows_TKH.offset << ", dweights "
                      << layout.slot_dweights_TK.offset;
    const std::int64_t rows = host_.dims().row_capacity;
    EXPECT_EQ(first_difference(host.buffers.x_CH, gpu.x_CH.download(), rows * dims_.hidden_dim),
              -1);
    EXPECT_EQ(first_difference(host.buffers.origin_C, gpu.origin_C.download(), rows), -1);
    EXPECT_EQ(first_difference(host.buffers.dy_CH, gpu.dy_CH.download(), rows * dims_.hidden_dim),
              -1);
    EXPECT_EQ(first_difference(host.buffers.weight_C, gpu.weight_C.download(), rows), -1);
    EXPECT_EQ(first_difference(host.out.data(), gpu.out.download(), gpu.out.size()), -1);
    if (direction == Direction::backward) {
      EXPECT_EQ(
          first_difference(host.dweights.data(), gpu.dweights.download(), gpu.dweights.size()), -1);
    }
  }

  static void compare_plan(const GpuRank& gpu, const HostRanks::Rank& host) {
    const CallPlanLayout& layout = gpu.view.plan_layout;
    EXPECT_EQ(gpu.download(layout.counts_RE), host.state.counts_RE);
    EXPECT_EQ(gpu.download(layout.expert_begin), host.state.expert_begin);
    const std::vector<std::int32_t> begin = gpu.download(layout.group_begin_e);
    const std::vector<std::int32_t> count = gpu.download(layout.group_count_e);
    for (std::size_t expert = 0; expert < begin.size(); ++expert) {
      EXPECT_EQ(begin[expert], host.state.expert_begin[expert]);
      EXPECT_EQ(count[expert], host.state.rows_e[expert]);
    }
  }

  WorkspaceDims dims_;
  HostRanks host_;
  GpuRanks gpu_;
  std::vector<ExpertResults> results_;
};

}  // namespace megamoe::testing
