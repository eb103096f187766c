// When ranks of a PyTorch group talk to each other about a call on a device: in the first call of a
// layer and never again. The "device" is the host here, so that the CPU backend runs the layers.
// Legend: R ranks, T tokens, H hidden, I intermediate, E experts, K slots.
#include <gtest/gtest.h>

#include <thread>

#include "group.h"
#include "layer_fixture.h"

namespace megamoe::torch_ops {
namespace {

using verify::expect_error;

constexpr std::int64_t kHidden = 8;
constexpr std::int64_t kIntermediate = 4;
constexpr DevicePlace kPlace{3, {}};

/// The communicator of a device, as far as the group can see.
class OnDevice final : public Communicator {
 public:
  explicit OnDevice(Communicator& host) : host_(host) {}
  [[nodiscard]] int rank() const override { return host_.rank(); }
  [[nodiscard]] int size() const override { return host_.size(); }
  void barrier(const char* what, double deadline_s) override { host_.barrier(what, deadline_s); }
  void all_gather(const void* mine, void* all, std::size_t bytes, const char* what,
                  double deadline_s) override {
    host_.all_gather(mine, all, bytes, what, deadline_s);
  }
  void all_reduce_sum(float* values, std::size_t count, const char* what,
                      double deadline_s) override {
    host_.all_reduce_sum(values, count, what, deadline_s);
  }
  std::unique_ptr<SymmetricHeap> allocate_symmetric(std::size_t bytes, double deadline_s) override {
    return host_.allocate_symmetric(bytes, deadline_s);
  }
  void abort(const std::string& reason) noexcept override { host_.abort(reason); }

 private:
  Communicator& host_;
};

LayerConfig config_of(std::int64_t max_tokens = 0) {
  LayerConfig config;
  config.shape = {max_tokens, kHidden, kIntermediate, 4, 2};
  config.num_threads = 1;
  return config;
}

LocalOutcome failure(const char* message) {
  return outcome_of([&] { throw Error(ErrorCode::invalid_argument, message); });
}

/// Runs `rank_main` on a thread for each of two ranks, with a group whose deadlines are short.
void on_two_ranks(const std::function<void(Group&)>& rank_main) {
  auto communicators = make_thread_communicators(2);
  std::vector<std::thread> threads;
  for (auto& communicator : communicators) {
    threads.emplace_back([&rank_main, &communicator] {
      Group group(std::move(communicator), /*entry_deadline_s=*/20, /*inner_deadline_s=*/20,
                  [](Communicator& host, int) { return std::make_unique<OnDevice>(host); });
      EXPECT_NO_THROW(rank_main(group));
      group.any_rank(false, {});  // nobody leaves before the others are done
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::int64_t capacity(const std::shared_ptr<BuiltLayer>& built) {
  return built->layer.config().shape.max_tokens;
}

/// A call without tokens on a layer with `num_experts` experts on this rank.
void call_without_tokens(MoeLayer& layer, std::int64_t num_experts = 2) {
  const std::vector<bf16> experts(num_experts * kHidden * kIntermediate);
  const ConstTensorView up = tensor_view(experts.data(), {num_experts, kIntermediate, kHidden});
  const ConstTensorView down = tensor_view(experts.data(), {num_experts, kHidden, kIntermediate});
  const bf16* no_rows = nullptr;
  const std::int32_t* no_ids = nullptr;
  const float* no_weights = nullptr;
  bf16* no_output = nullptr;
  layer.forward({tensor_view(no_rows, {0, kHidden}),
                 tensor_view(no_ids, {0, 2}),
                 tensor_view(no_weights, {0, 2}),
                 {up, up, down}},
                {tensor_view(no_output, {0, kHidden})});
}

TEST(TorchGroup, ALayerIsAgreedOnInItsFirstCallAndFoundAloneAfterwards) {
  on_two_ranks([](Group& group) {
    const auto first = group.device_layer_for(config_of(), group.rank() == 0 ? 5 : 70, {}, kPlace);
    EXPECT_EQ(capacity(first), 128);
    if (group.rank() == 0) return;
    // The other rank does not take part.
    EXPECT_EQ(group.device_layer_for(config_of(), 128, {}, kPlace), first);
    EXPECT_EQ(group.device_layer_for(config_of(), 0, {}, kPlace), first);
  });
}

TEST(TorchGroup, MoreTokensThanAgreedAreRefusedAndThePeersLearnIt) {
  on_two_ranks([](Group& group) {
    const auto built = group.device_layer_for(config_of(), 5, {}, kPlace);
    if (group.rank() == 0) {
      expect_error(ErrorCode::invalid_argument, {"rank 1"},
                   [&] { call_without_tokens(built->layer); });
    } else {
      expect_error(ErrorCode::invalid_argument, {"x has 65 tokens", "64", "megamoe.reserve"},
                   [&] { group.device_layer_for(config_of(), 65, {}, kPlace); });
    }
    call_without_tokens(built->layer);  // usable
    const auto chosen = group.device_layer_for(config_of(40), 5, {}, kPlace);
    EXPECT_EQ(capacity(chosen), 40);
    if (group.rank() == 0) {
      expect_error(ErrorCode::invalid_argument, {"rank 1"},
                   [&] { call_without_tokens(chosen->layer); });
    } else {
      expect_error(ErrorCode::invalid_argument, {"x has 41 tokens; shape.max_tokens is 40"},
                   [&] { group.device_layer_for(config_of(40), 41, {}, kPlace); });
    }
  });
}

TEST(TorchGroup, ReservedTokensAreTakenByTheNextCallOfEveryRank) {
  on_two_ranks([](Group& group) {
    const auto small = group.device_layer_for(config_of(), 5, {}, kPlace);
    group.reserve(group.rank() == 0 ? 200 : 1);
    const auto large = group.device_layer_for(config_of(), 5, {}, kPlace);
    EXPECT_EQ(capacity(large), 200);
    call_without_tokens(large->layer);
    group.reserve(150);  // less than before
    EXPECT_EQ(group.device_layer_for(config_of(), 200, {}, kPlace), large);
    EXPECT_EQ(capacity(group.device_layer_for(config_of(64), 5, {}, kPlace)), 64);
  });
}

TEST(TorchGroup, AFailedFirstCallFailsOnAllRanksAndMayBeRepeated) {
  on_two_ranks([](Group& group) {
    const LocalOutcome mine = group.rank() == 1 ? failure("x is wrong") : LocalOutcome{};
    expect_error(ErrorCode::invalid_argument, {group.rank() == 1 ? "x is wrong" : "rank 1: x is"},
                 [&] { group.device_layer_for(config_of(), 5, mine, kPlace); });
    call_without_tokens(group.device_layer_for(config_of(), 5, {}, kPlace)->layer);
  });
}

TEST(TorchGroup, AFailureBeforeALaterCallReachesPeersThatAreInTheLibrary) {
  on_two_ranks([](Group& group) {
    const auto built = group.device_layer_for(config_of(), 5, {}, kPlace);
    for (const bool backward : {false, true}) {
      if (group.rank() == 0) {
        expect_error(ErrorCode::invalid_argument, {"rank 1"},
                     [&] { call_without_tokens(built->layer); });
        continue;
      }
      expect_error(ErrorCode::invalid_argument, {"x is wrong"}, [&] {
        if (backward) {
          group.throw_after_refusal(failure("x is wrong"), {});
        } else {
          group.device_layer_for(config_of(), 5, failure("x is wrong"), kPlace);
        }
      });
    }
    call_without_tokens(built->layer);
  });
}

TEST(TorchGroup, RanksThatDifferAndOtherDevicesAreRefused) {
  on_two_ranks([](Group& group) {
    LayerConfig config = config_of();
    config.memory_mode = group.rank() == 0 ? MemoryMode::saved : MemoryMode::recompute;
    expect_error(ErrorCode::config_mismatch, {"ranks differ in memory_mode"},
                 [&] { group.device_layer_for(config, 5, {}, kPlace); });
    const auto built = group.device_layer_for(config_of(), 5, {}, kPlace);
    if (group.rank() == 0) {
      expect_error(ErrorCode::invalid_argument, {"rank 1"},
                   [&] { call_without_tokens(built->layer); });
    } else {
      expect_error(ErrorCode::invalid_argument, {"CUDA device 7", "runs on device 3"}, [&] {
        group.device_layer_for(config_of(), 5, {}, {7, {}});
      });
    }
  });
}

TEST(TorchGroup, OneRankGrowsByNeedAndUsesSeveralDevices) {
  Group group(std::move(make_thread_communicators(1).front()), 20, 20,
              [](Communicator& host, int) { return std::make_unique<OnDevice>(host); });
  const auto small = group.device_layer_for(config_of(), 5, {}, kPlace);
  EXPECT_EQ(capacity(small), 64);
  EXPECT_EQ(capacity(group.device_layer_for(config_of(), 65, {}, kPlace)), 128);
  EXPECT_EQ(capacity(group.device_layer_for(config_of(), 5, {}, kPlace)), 128);
  group.reserve(300);
  EXPECT_EQ(capacity(group.device_layer_for(config_of(), 5, {}, kPlace)), 300);
  EXPECT_EQ(capacity(group.device_layer_for(config_of(), 5, {}, {7, {}})), 300);
  expect_error(ErrorCode::invalid_argument, {"x is wrong"},
               [&] { group.device_layer_for(config_of(), 5, failure("x is wrong"), kPlace); });
  int num_devices = 0;
  group.check([&](int) {
    ++num_devices;
    return Stream{};
  });
  EXPECT_EQ(num_devices, 2);
  call_without_tokens(small->layer, 4);  // a call's context keeps what it was built on
}

}  // namespace
}  // namespace megamoe::torch_ops
