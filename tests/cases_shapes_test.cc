// Small inputs on which published MoE layers failed, about sizes, strides and capacities: cases 5,
// 7, 11, 13-15, 22-24 and 29. Legend: R ranks, T tokens, H hidden, I intermediate, E experts, K
// slots.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "comm/workspace_layout.h"
#include "layer/workspace.h"
#include "layer_fixture.h"
#include "sparse_memory.h"

namespace megamoe::verify {
namespace {

TEST(Case05TokenCounts, AroundTiles) {
  for (const int num_ranks : {1, 2}) {
    for (const std::int64_t num_tokens : {1, 2, 7, 8, 16, 32, 63, 64, 65, 127, 128, 129, 257}) {
      SCOPED_TRACE(testing::Message() << "R=" << num_ranks << " T=" << num_tokens);
      ProblemSpec spec = spec_with_tokens(std::vector<std::int64_t>(num_ranks, num_tokens));
      spec.hidden_dim = channels(72);
      spec.intermediate_dim = channels(40);
      expect_right(make_problem(spec), {});
    }
  }
}

TEST(Case07UnequalRanks, AreRight) {
  for (const std::vector<std::int64_t>& tokens :
       {std::vector<std::int64_t>{5, 12}, {1, 300}, {300, 1}, {3, 0, 17, 50}}) {
    SCOPED_TRACE(testing::PrintToString(tokens));
    expect_right(make_problem(spec_with_tokens(tokens)), {});
  }
}

TEST(Case07UnequalRanks, MoreThanMaxTokensIsRefusedOnEveryRank) {
  const Problem problem = make_problem(spec_with_tokens({5, 12}));
  Problem smaller = problem;
  smaller.spec.tokens_per_rank = {5, 8};  // the layers are built for 8 tokens
  run_sessions(smaller, {}, [&](RankSession& session, Communicator& group) {
    RankData data(problem, {}, group.rank());
    std::vector<std::string> texts = {"x has 12 tokens", "max_tokens is 8"};
    // A device learns of a peer's refusal, not of its words; over several hosts hosts agree.
    const bool devices_agree = default_backend() == Backend::cuda && default_num_hosts() == 1;
    if (devices_agree && group.rank() == 0) texts = {"rank 1 refused"};
    expect_error(ErrorCode::invalid_argument, texts, [&] { data.forward(session.layer()); });
    const CallContext context = session.forward();  // still usable
    session.backward(context);
  });
}

TEST(Case11ManyRows, OffsetsPassTwoToThe31) {
  // 300,000 rows of 7168 are 4.3 GB a buffer and are not allocated here: what is checked is the
  // address arithmetic of the workspace, and below, with rows far apart, of the caller's tensors.
  constexpr std::int64_t kRows = 300000;
  constexpr std::int64_t kHidden = 7168;
  static_assert(kRows * kHidden > std::int64_t{1} << 31);
  const WorkspaceDims dims{{1, 8, 1}, kRows, kHidden, 2048, kRows};
  const LocalLayout local = local_layout(dims);
  EXPECT_EQ(local.x_CH.count, kRows * kHidden);
  EXPECT_GE(local.dy_CH.offset, local.x_CH.offset + kRows * kHidden * 2);
  EXPECT_GE(local.a_CI.offset, local.dy_CH.offset + kRows * kHidden * 2);
  EXPECT_GE(local.bytes, 2 * kRows * kHidden * 2 + 3 * kRows * 2048 * 2);
  const SymmetricLayout symmetric = symmetric_layout(dims);
  EXPECT_GE(symmetric.slot_dweights_TK.offset,
            symmetric.slot_rows_TKH.offset + kRows * kHidden * 2);

  LayerConfig config;
  config.shape = {kRows, kHidden, 2048, 8, 1};
  EXPECT_EQ(workspace_bytes(config, 1).local, local.bytes);
  EXPECT_EQ(workspace_bytes(config, 1).symmetric, symmetric.bytes);
}

TEST(Case11ManyRows, RowsOfTheCallerLieBeyondTwoToThe31Elements) {
  MEGAMOE_ON_CPU_ONLY("it gives the layer host memory");
  const Problem problem = make_problem(spec_with_tokens({5}));
  const LayerTensors dense = run_layer(problem, {});
  constexpr std::int64_t kStride = std::int64_t{3} << 29;  // 4 * kStride = 1.5 * 2^32 elements
  const std::size_t bytes = (4 * kStride + 64) * sizeof(bf16);
  const SparseMemory inputs(bytes);
  const SparseMemory outputs(bytes);
  if (!inputs.usable() || !outputs.usable()) GTEST_SKIP() << "no 26 GB of address space";
  const auto spread = [](auto* data) {
    auto view = tensor_view(data, {5, 64});
    view.strides[0] = kStride;
    return view;
  };
  const auto fill = [&](const std::vector<bf16>& rows) {
    for (int row = 0; row < 5; ++row) {
      std::copy_n(&rows[row * 64], 64, inputs.as<bf16>() + row * kStride);
    }
  };
  const auto expect_rows = [&](const RawTensor& wanted) {
    for (int row = 0; row < 5; ++row) {
      EXPECT_EQ(std::memcmp(outputs.as<bf16>() + row * kStride, &wanted.bytes[row * 128], 128), 0);
    }
  };
  const auto* input_rows = const_cast<const bf16*>(inputs.as<bf16>());
  run_sessions(problem, {}, [&](RankSession& session, Communicator&) {
    ForwardInput input = session.data().forward_input();
    input.x = spread(input_rows);
    fill(problem.x_TH);
    const CallContext context = session.layer().forward(input, {spread(outputs.as<bf16>())});
    expect_rows(dense.y);
    BackwardInput backward_input = session.data().backward_input();
    backward_input.dy = spread(input_rows);
    fill(problem.dy_TH);
    BackwardOutput output = session.data().backward_output();
    output.dx = spread(outputs.as<bf16>());
    session.layer().backward(context, backward_input, output);
    expect_rows(dense.dx);
    EXPECT_TRUE(session.tensors().ddown == dense.ddown);
  });
}

TEST(Case13Capacity, ExactlyFullThenOneRowTooMany) {
  for (const int num_ranks : {1, 2}) {
    SCOPED_TRACE(num_ranks);
    ProblemSpec spec = spec_with_tokens(std::vector<std::int64_t>(num_ranks, 16));
    spec.num_experts = 4;
    spec.top_k = 1;
    Problem full = make_problem(spec);
    std::vector<std::int32_t> ids(16 * num_ranks, -1);
    std::fill_n(ids.begin(), 12, 3);  // 12 rows for the last rank
    set_routing(full, ids);
    Problem over = full;
    ids[15] = 3;
    set_routing(over, ids);
    RunOptions options;
    options.row_capacity = 12;
    const LayerTensors tensors =
        run_sessions(full, options, [&](RankSession& session, Communicator& group) {
          const CallContext context = session.forward();
          session.backward(context);
          RankData refused(over, options, group.rank());
          const RawTensor untouched = refused.tensors().y;
          expect_error(ErrorCode::capacity_exceeded,
                       {"13 rows", "capacity is 12", "row_capacity",
                        "rank " + std::to_string(num_ranks - 1)},
                       [&] { refused.forward(session.layer()); });
          EXPECT_TRUE(refused.tensors().y == untouched);
          const CallContext again = session.forward();
          session.backward(again);
        });
    expect_right(full, tensors, options);
  }
}

TEST(Case14DifferentConfigurations, AreRefusedAtConstructionByName) {
  const ProblemSpec spec = spec_with_tokens({8, 8});
  const LayerConfig base = layer_config(spec, {});
  const auto expect_refusal = [&](const std::string& member, auto change) {
    SCOPED_TRACE(member);
    run_ranks(topology_of(spec, {}), [&](Communicator& threads) {
      const BackendGroup backend_group(threads, {});
      Communicator& group = backend_group.get();
      LayerConfig config = base;
      if (group.rank() == 1) change(config);
      for (int attempt = 0; attempt < 2; ++attempt) {
        expect_error(ErrorCode::config_mismatch, {member, "rank 0", "rank 1"},
                     [&] { const Workspace workspace(config, group); });
      }
      Workspace workspace(base, group);  // the group has survived
      expect_error(ErrorCode::config_mismatch, {member, "rank 0", "rank 1"},
                   [&] { const MoeLayer layer(config, group, workspace); });
      const MoeLayer layer(base, group, workspace);
    });
  };
  expect_refusal("row_capacity", [](LayerConfig& config) { config.row_capacity = 9; });
  expect_refusal("top_k", [](LayerConfig& config) { config.shape.top_k = 1; });
  expect_refusal("hidden_dim", [](LayerConfig& config) { config.shape.hidden_dim = 128; });
  expect_refusal("intermediate_dim",
                 [](LayerConfig& config) { config.shape.intermediate_dim = 128; });
  expect_refusal("num_experts", [](LayerConfig& config) { config.shape.num_experts = 4; });
  expect_refusal("max_tokens", [](LayerConfig& config) { config.shape.max_tokens = 4; });
  expect_refusal("activation.kind",
                 [](LayerConfig& config) { config.activation.kind = ActivationKind::gelu_erf; });
  expect_refusal("memory_mode",
                 [](LayerConfig& config) { config.memory_mode = MemoryMode::recompute; });
  expect_refusal("weight_gradient_mode", [](LayerConfig& config) {
    config.weight_gradient_mode = WeightGradientMode::store_fp32;
  });
}

TEST(Case15MainGrad, TwoBackwardsAddToWhatIsThere) {
  for (const int num_ranks : {1, 2}) {
    SCOPED_TRACE(num_ranks);
    const Problem first = make_problem(spec_with_tokens(std::vector<std::int64_t>(num_ranks, 20)));
    Problem second = first;  // other tokens, the same weights
    std::reverse(second.x_TH.begin(), second.x_TH.end());
    RunOptions store;
    store.weight_gradient_mode = WeightGradientMode::store_fp32;
    const LayerTensors g1 = run_layer(first, store);
    const LayerTensors g2 = run_layer(second, store);

    RunOptions accumulate;
    accumulate.weight_gradient_mode = WeightGradientMode::accumulate_fp32;
    accumulate.initial_gradient = 3.0F;
    std::vector<LayerTensors> sums_R(num_ranks);
    run_ranks(topology_of(first.spec, accumulate), [&](Communicator& group) {
      Problem problem = first;
      RankSession session(problem, accumulate, group);
      const auto step = [&] {
        const CallContext context = session.forward();
        session.backward(context);
      };
      step();
      problem.x_TH = second.x_TH;
      step();
      sums_R[group.rank()] = session.tensors();
    });
    const LayerTensors sums = concatenate(sums_R);
    for (RawTensor LayerTensors::*tensor :
         {&LayerTensors::dgate, &LayerTensors::dup, &LayerTensors::ddown}) {
      const auto* sum = reinterpret_cast<const float*>((sums.*tensor).bytes.data());
      const auto* a = reinterpret_cast<const float*>((g1.*tensor).bytes.data());
      const auto* b = reinterpret_cast<const float*>((g2.*tensor).bytes.data());
      std::int64_t num_wrong = 0;
      for (std::int64_t i = 0; i < (sums.*tensor).num_elements(); ++i) {
        num_wrong += sum[i] != (3.0F + a[i]) + b[i] ? 1 : 0;
      }
      EXPECT_EQ(num_wrong, 0);
    }
  }
}

/// `values` as rows that are `stride` apart, from element `offset` on; gaps are NaN.
std::vector<bf16> spread_rows(const std::vector<bf16>& values, std::int64_t width,
                              std::int64_t stride, std::int64_t offset) {
  const auto num_rows = static_cast<std::int64_t>(values.size()) / width;
  std::vector<bf16> spread(offset + num_rows * stride, bf16{0xffff});
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(&values[row * width], width, &spread[offset + row * stride]);
  }
  return spread;
}

TEST(Case22Strides, OddRowStridesAndOffsetsAreRead) {
  MEGAMOE_ON_CPU_ONLY("it gives the layer host memory");
  const Problem problem = make_problem(spec_with_tokens({23}));
  const LayerTensors dense = run_layer(problem, {});
  constexpr std::int64_t kStride = 1025;
  const std::vector<bf16> x = spread_rows(problem.x_TH, 64, kStride, 1);  // off by 2 bytes
  const std::vector<bf16> dy = spread_rows(problem.dy_TH, 64, 71, 3);
  const std::vector<bf16> up = spread_rows(problem.up_EIH, 64, 67, 1);
  run_sessions(problem, {}, [&](RankSession& session, Communicator&) {
    const auto with_stride = [](const bf16* data, std::initializer_list<std::int64_t> sizes,
                                std::int64_t row_stride) {
      ConstTensorView view = tensor_view(data, sizes);
      view.strides[view.num_dims - 2] = row_stride;
      if (view.num_dims == 3) view.strides[0] = view.sizes[1] * row_stride;
      return view;
    };
    ForwardInput input = session.data().forward_input();
    input.x = with_stride(&x[1], {23, 64}, kStride);
    input.experts.up = with_stride(&up[1], {8, 64, 64}, 67);
    // Outputs with gaps, which must stay as they are.
    std::vector<bf16> y(23 * 70, bf16{0x1234});
    std::vector<bf16> dx(23 * 66, bf16{0x1234});
    const auto writable = [](bf16* data, std::int64_t stride) {
      TensorView view = tensor_view(data, {23, 64});
      view.strides[0] = stride;
      return view;
    };
    const CallContext context = session.layer().forward(input, {writable(y.data(), 70)});
    BackwardInput backward_input = session.data().backward_input();
    backward_input.x = input.x;
    backward_input.experts = input.experts;
    backward_input.dy = with_stride(&dy[3], {23, 64}, 71);
    BackwardOutput output = session.data().backward_output();
    output.dx = writable(dx.data(), 66);
    session.layer().backward(context, backward_input, output);
    const auto expect_rows = [](const std::vector<bf16>& rows, std::int64_t stride,
                                const RawTensor& wanted) {
      for (std::int64_t row = 0; row < 23; ++row) {
        EXPECT_EQ(std::memcmp(&rows[row * stride], &wanted.bytes[row * 128], 128), 0) << row;
        for (std::int64_t gap = 64; gap < stride; ++gap) {
          EXPECT_EQ(rows[row * stride + gap].bits, 0x1234) << row;
        }
      }
    };
    expect_rows(y, 70, dense.y);
    expect_rows(dx, 66, dense.dx);
    EXPECT_TRUE(session.tensors().dup == dense.dup);
  });
}

TEST(Case22Strides, ExpandedGradientsAreRead) {
  MEGAMOE_ON_CPU_ONLY("it gives the layer host memory");
  Problem problem = make_problem(spec_with_tokens({23}));
  for (std::size_t i = 64; i < problem.dy_TH.size(); ++i) problem.dy_TH[i] = problem.dy_TH[i % 64];
  const LayerTensors dense = run_layer(problem, {});
  const LayerTensors expanded = run_sessions(problem, {}, [&](RankSession& session, Communicator&) {
    const CallContext context = session.forward();
    BackwardInput input = session.data().backward_input();
    input.dy.strides[0] = 0;  // one row for all tokens, as torch's expand() gives it
    session.layer().backward(context, input, session.data().backward_output());
  });
  EXPECT_EQ(differing_tensors(expanded, dense), "");
}

TEST(Case23OddDimensions, AreRight) {
  const std::pair<std::int64_t, std::int64_t> dims_HI[] = {
      {2880, 176}, {7176, 24}, {64, 704}, {40, 1408}, {1, 1}, {3, 65}, {129, 7}};
  for (const auto& [hidden_dim, intermediate_dim] : dims_HI) {
    SCOPED_TRACE(testing::Message() << "H=" << hidden_dim << " I=" << intermediate_dim);
    ProblemSpec spec = spec_with_tokens({3, 2});
    spec.num_experts = 2;
    spec.hidden_dim = channels(hidden_dim);
    spec.intermediate_dim = channels(intermediate_dim);
    expect_right(make_problem(spec), {});
  }
}

TEST(Case24TwoLayersOnOneWorkspace, GiveTheBitsOfTwoWorkspaces) {
  const Problem first = make_problem(spec_with_tokens({12, 30}));
  ProblemSpec other_spec = spec_with_tokens({30, 12});
  other_spec.seed = 77;
  const Problem second = make_problem(other_spec);
  const LayerTensors alone1 = run_layer(first, {});
  const LayerTensors alone2 = run_layer(second, {});
  std::vector<LayerTensors> tensors1_R(2);
  std::vector<LayerTensors> tensors2_R(2);
  run_ranks(topology_of(first.spec, {}), [&](Communicator& threads) {
    const BackendGroup backend_group(threads, {});
    Communicator& group = backend_group.get();
    const LayerConfig config = layer_config(first.spec, {});
    Workspace workspace(config, group);
    MoeLayer layer1(config, group, workspace);
    MoeLayer layer2(config, group, workspace);
    RankData data1(first, {}, group.rank());
    RankData data2(second, {}, group.rank());
    const CallContext context1 = data1.forward(layer1);
    const CallContext context2 = data2.forward(layer2);
    data1.backward(layer1, context1);
    data2.backward(layer2, context2);
    tensors1_R[group.rank()] = data1.tensors();
    tensors2_R[group.rank()] = data2.tensors();
  });
  EXPECT_EQ(differing_tensors(concatenate(tensors1_R), alone1), "");
  EXPECT_EQ(differing_tensors(concatenate(tensors2_R), alone2), "");
}

TEST(Case24TwoLayersOnOneWorkspace, FromTwoThreadsAreRightOrRefused) {
  MEGAMOE_ON_CPU_ONLY("two calls would wait for each other on the device");
  const Problem problem = make_problem(spec_with_tokens({20}));
  const LayerTensors alone = run_layer(problem, {});
  run_ranks(1, [&](Communicator& group) {
    const LayerConfig config = layer_config(problem.spec, {});
    Workspace workspace(config, group);
    MoeLayer layer1(config, group, workspace);
    MoeLayer layer2(config, group, workspace);
    const auto hammer = [&](MoeLayer& layer) {
      RankData data(problem, {}, 0);
      for (int num_done = 0; num_done < 20;) {
        CallContext context;
        const auto attempt = [&](auto call) {
          const std::optional<Error> error = error_of(call);
          if (!error) return true;
          EXPECT_NE(std::string(error->what()).find("in use"), std::string::npos) << error->what();
          std::this_thread::yield();
          return false;
        };
        while (!attempt([&] { context = data.forward(layer); })) continue;
        while (!attempt([&] { data.backward(layer, context); })) continue;
        EXPECT_EQ(differing_tensors(data.tensors(), alone), "");
        ++num_done;
      }
    };
    std::thread other([&] { hammer(layer2); });
    hammer(layer1);
    other.join();
  });
}

TEST(Case24TwoLayersOnOneWorkspace, OverlappingUseIsRefused) {
  const Problem problem = make_problem(spec_with_tokens({4}));
  run_sessions(problem, {}, [&](RankSession& session, Communicator&) {
    session.workspace().impl().in_use.test_and_set();  // as if another call were running
    expect_error(ErrorCode::invalid_argument, {"workspace is in use"}, [&] { session.forward(); });
    session.workspace().impl().in_use.clear();
    const CallContext context = session.forward();
    session.workspace().impl().in_use.test_and_set();
    expect_error(ErrorCode::invalid_argument, {"workspace is in use"},
                 [&] { session.backward(context); });
    session.workspace().impl().in_use.clear();
    session.backward(context);
  });
}

TEST(Case29UnitScale, ErrorPerTensorAndPerExpertIsWithinTwiceTheBaselines) {
  for (const int num_ranks : {1, 2}) {
    ProblemSpec spec = spec_with_tokens(std::vector<std::int64_t>(num_ranks, 200 / num_ranks));
    spec.hidden_dim = spec.intermediate_dim = channels(128);
    spec.top_k = 3;
    const Problem problem = make_problem(spec);
    for (const WeightGradientMode mode :
         {WeightGradientMode::store_bf16, WeightGradientMode::store_fp32}) {
      RunOptions options;
      options.weight_gradient_mode = mode;
      const auto comparisons = judge_layer(problem, run_layer(problem, options), options);
      EXPECT_EQ(comparisons.size(), 6U);
      EXPECT_TRUE(all_passed(comparisons)) << failures(comparisons);
      for (const Comparison& comparison : comparisons) {
        EXPECT_LT(comparison.allowed, 0x1p-6) << comparison.name;  // not a loose tolerance
      }
    }
  }
}

}  // namespace
}  // namespace megamoe::verify
