// Every argument of forward and backward, wrong in every way that the host can see: refused by its
// name on every rank before anything is written, and the layer works afterwards.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/entry.h"
#include "layer_fixture.h"

namespace megamoe::verify {
namespace {

enum class Fault : std::uint8_t {
  absent,
  wrong_dtype,
  fp16,
  fewer_dims,
  longer_first_dim,
  longer_middle_dim,
  longer_last_dim,
  null_data,
  misaligned,
  spread_columns,
  transposed,
  negative_stride,
  overlapping_rows,
};
constexpr Fault kFaults[] = {
    Fault::absent,          Fault::wrong_dtype,      Fault::fp16,
    Fault::fewer_dims,      Fault::longer_first_dim, Fault::longer_middle_dim,
    Fault::longer_last_dim, Fault::null_data,        Fault::misaligned,
    Fault::spread_columns,  Fault::transposed,       Fault::negative_stride,
    Fault::overlapping_rows};

enum class Access : std::uint8_t { read, write };

/// Applies the fault; false where it makes no sense for the tensor.
template <class View>
bool apply(Fault fault, Access access, View& view) {
  const int last = view.num_dims - 1;
  switch (fault) {
    case Fault::absent:
      view = {};
      return true;
    case Fault::wrong_dtype:
      view.dtype = view.dtype == DType::fp32 ? DType::fp64 : DType::fp32;
      return true;
    case Fault::fp16:
      view.dtype = DType::fp16;
      return true;
    case Fault::fewer_dims:
      --view.num_dims;
      return true;
    case Fault::longer_first_dim:
      ++view.sizes[0];
      return true;
    case Fault::longer_middle_dim:
      ++view.sizes[1];
      return view.num_dims == 3;
    case Fault::longer_last_dim:
      ++view.sizes[last];
      return true;
    case Fault::null_data:
      view.data = nullptr;
      return true;
    case Fault::misaligned: {
      using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data)>>,
                                      const std::byte, std::byte>;
      view.data = static_cast<Byte*>(view.data) + 1;
      return true;
    }
    case Fault::spread_columns:
      view.strides[last] = 2;
      return true;
    case Fault::transposed:
      std::swap(view.strides[last], view.strides[last - 1]);
      return true;
    case Fault::negative_stride:
      view.strides[0] = -view.strides[0];
      return true;
    case Fault::overlapping_rows:
      view.strides[last - 1] = view.sizes[last] - 1;
      return access == Access::write;
  }
  return false;
}

struct Call {
  ForwardInput forward_input;
  ForwardOutput forward_output;
  BackwardInput backward_input;
  BackwardOutput backward_output;
};

/// An argument: its name in messages, and how a fault is put into it.
struct Argument {
  const char* name;
  bool (*spoil)(Call&, Fault);
};

#define MEGAMOE_ARGUMENT(name, access, member)                                      \
  Argument {                                                                        \
    name, [](Call& call, Fault fault) { return apply(fault, access, call.member); } \
  }

const Argument kForwardArguments[] = {
    MEGAMOE_ARGUMENT("x", Access::read, forward_input.x),
    MEGAMOE_ARGUMENT("expert_ids", Access::read, forward_input.expert_ids),
    MEGAMOE_ARGUMENT("weights", Access::read, forward_input.weights),
    MEGAMOE_ARGUMENT("experts.gate", Access::read, forward_input.experts.gate),
    MEGAMOE_ARGUMENT("experts.up", Access::read, forward_input.experts.up),
    MEGAMOE_ARGUMENT("experts.down", Access::read, forward_input.experts.down),
    MEGAMOE_ARGUMENT("y", Access::write, forward_output.y),
};

const Argument kBackwardArguments[] = {
    MEGAMOE_ARGUMENT("x", Access::read, backward_input.x),
    MEGAMOE_ARGUMENT("dy", Access::read, backward_input.dy),
    MEGAMOE_ARGUMENT("experts.gate", Access::read, backward_input.experts.gate),
    MEGAMOE_ARGUMENT("experts.up", Access::read, backward_input.experts.up),
    MEGAMOE_ARGUMENT("experts.down", Access::read, backward_input.experts.down),
    MEGAMOE_ARGUMENT("dx", Access::write, backward_output.dx),
    MEGAMOE_ARGUMENT("dweights", Access::write, backward_output.dweights),
    MEGAMOE_ARGUMENT("gradients of experts.gate", Access::write, backward_output.experts.gate),
    MEGAMOE_ARGUMENT("gradients of experts.up", Access::write, backward_output.experts.up),
    MEGAMOE_ARGUMENT("gradients of experts.down", Access::write, backward_output.experts.down),
};
#undef MEGAMOE_ARGUMENT

Call call_of(RankSession& session) {
  return {session.data().forward_input(), session.data().forward_output(),
          session.data().backward_input(), session.data().backward_output()};
}

/// x alone says how many tokens there are: a longer x makes the others too short.
bool names_another_argument(const Argument& argument, Fault fault) {
  return std::string(argument.name) == "x" && fault == Fault::longer_first_dim;
}

/// Calls `run(call, argument, fault)` on all ranks with a fault on the last one; it must be refused
/// by name on every rank.
template <class Arguments, class Run>
void expect_refusals(RankSession& session, const Communicator& group, const Arguments& arguments,
                     const Run& run) {
  const int last = group.size() - 1;
  for (const Argument& argument : arguments) {
    for (const Fault fault : kFaults) {
      SCOPED_TRACE(testing::Message() << argument.name << " fault " << static_cast<int>(fault));
      if (names_another_argument(argument, fault)) continue;
      Call call = call_of(session);
      Call spoilt = call;
      if (!argument.spoil(spoilt, fault)) continue;
      if (group.rank() == last) call = spoilt;
      const std::optional<Error> error = error_of([&] { run(call); });
      ASSERT_TRUE(error) << "not refused";
      EXPECT_TRUE(error->code() == ErrorCode::invalid_argument ||
                  error->code() == ErrorCode::unsupported)
          << error->what();
      const std::string prefix = group.rank() == last ? "" : "rank " + std::to_string(last) + ": ";
      EXPECT_EQ(std::string(error->what()).rfind(prefix + argument.name + " ", 0), 0U)
          << error->what();
    }
  }
}

class Arguments : public testing::TestWithParam<int> {
 protected:
  Arguments() : problem_(make_problem(spec())) {}
  static ProblemSpec spec() {
    ProblemSpec spec = spec_with_tokens(std::vector<std::int64_t>(GetParam(), 5));
    spec.hidden_dim = 24;
    spec.intermediate_dim = 40;
    return spec;
  }
  Problem problem_;
};

TEST_P(Arguments, OfForwardAreRefusedByName) {
  const LayerTensors clean = run_layer(problem_, {});
  const LayerTensors after =
      run_sessions(problem_, {}, [&](RankSession& session, Communicator& group) {
        const LayerTensors untouched = session.tensors();
        expect_refusals(session, group, kForwardArguments, [&](const Call& call) {
          session.layer().forward(call.forward_input, call.forward_output);
        });
        EXPECT_EQ(differing_tensors(session.tensors(), untouched), "");
        const CallContext context = session.forward();
        session.backward(context);
      });
  EXPECT_EQ(differing_tensors(after, clean), "");
}

TEST_P(Arguments, OfBackwardAreRefusedByName) {
  const LayerTensors clean = run_layer(problem_, {});
  const LayerTensors after =
      run_sessions(problem_, {}, [&](RankSession& session, Communicator& group) {
        const CallContext context = session.forward();
        const LayerTensors untouched = session.tensors();
        expect_refusals(session, group, kBackwardArguments, [&](const Call& call) {
          session.layer().backward(context, call.backward_input, call.backward_output);
        });
        EXPECT_EQ(differing_tensors(session.tensors(), untouched), "");
        session.backward(context);
      });
  EXPECT_EQ(differing_tensors(after, clean), "");
}

TEST_P(Arguments, ContextsOfOthersAreRefused) {
  run_sessions(problem_, {}, [&](RankSession& session, Communicator& group) {
    const CallContext empty;
    EXPECT_EQ(empty.num_rows(), 0);
    EXPECT_EQ(empty.rows_per_expert(), nullptr);
    expect_error(ErrorCode::invalid_argument, {"context"}, [&] { session.backward(empty); });
    MoeLayer other(layer_config(problem_.spec, {}), group, session.workspace());
    const CallContext foreign = session.data().forward(other);
    expect_error(ErrorCode::invalid_argument, {"context"}, [&] { session.backward(foreign); });
    CallContext moved = session.forward();
    const CallContext context = std::move(moved);
    session.backward(context);
  });
}

TEST_P(Arguments, UngatedLayersRefuseAGate) {
  ProblemSpec spec = problem_.spec;
  spec.activation.kind = ActivationKind::relu2;
  const Problem problem = make_problem(spec);
  run_sessions(problem, {}, [&](RankSession& session, Communicator&) {
    ForwardInput input = session.data().forward_input();
    input.experts.gate = input.experts.up;
    expect_error(ErrorCode::invalid_argument, {"experts.gate", "absent"},
                 [&] { session.layer().forward(input, session.data().forward_output()); });
    const CallContext context = session.forward();
    BackwardOutput output = session.data().backward_output();
    output.experts.gate = output.experts.up;
    expect_error(ErrorCode::invalid_argument, {"gradients of experts.gate", "absent"}, [&] {
      session.layer().backward(context, session.data().backward_input(), output);
    });
    session.backward(context);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Arguments, testing::Values(1, 2, 4));

TEST(Configuration, EveryMemberIsCheckedByName) {
  const LayerConfig good = layer_config(spec_with_tokens({5, 5}), {});
  const auto expect_refusal = [&](const char* member, auto change) {
    LayerConfig config = good;
    change(config);
    const ErrorCode code =
        config.backend == Backend::cuda ? ErrorCode::unsupported : ErrorCode::invalid_argument;
    expect_error(code, {member}, [&] { validate(config, 2); });
    expect_error(code, {member}, [&] { workspace_bytes(config, 2); });
    run_ranks(2, [&](Communicator& group) {
      std::vector<std::string> texts = {member};
      if (group.rank() == 0) texts.push_back("rank 1: ");
      expect_error(code, texts,
                   [&] { const Workspace workspace(group.rank() == 1 ? config : good, group); });
    });
  };
  for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-3}, std::int64_t{1} << 40}) {
    expect_refusal("hidden_dim", [&](LayerConfig& c) { c.shape.hidden_dim = bad; });
    expect_refusal("intermediate_dim", [&](LayerConfig& c) { c.shape.intermediate_dim = bad; });
  }
  for (const std::int32_t bad : {0, -1, 7, 1 << 30}) {
    expect_refusal("num_experts", [&](LayerConfig& c) { c.shape.num_experts = bad; });
  }
  for (const std::int32_t bad : {0, -1, 1 << 30}) {
    expect_refusal("top_k", [&](LayerConfig& c) { c.shape.top_k = bad; });
  }
  expect_refusal("max_tokens", [](LayerConfig& c) { c.shape.max_tokens = -1; });
  expect_refusal("max_tokens", [](LayerConfig& c) { c.shape.max_tokens = std::int64_t{1} << 31; });
  expect_refusal("row_capacity", [](LayerConfig& c) { c.row_capacity = -1; });
  expect_refusal("saved_row_capacity", [](LayerConfig& c) { c.saved_row_capacity = -1; });
  expect_refusal("num_threads", [](LayerConfig& c) { c.num_threads = -1; });
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity()}) {
    expect_refusal("entry_deadline_s", [&](LayerConfig& c) { c.entry_deadline_s = bad; });
    expect_refusal("inner_deadline_s", [&](LayerConfig& c) { c.inner_deadline_s = bad; });
  }
  for (const float bad : {0.0F, -7.0F, std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity()}) {
    expect_refusal("activation.limit", [&](LayerConfig& c) {
      c.activation = {ActivationKind::clamped_swiglu, bad};
    });
  }
  expect_refusal("activation.kind", [](LayerConfig& c) { c.activation.kind = ActivationKind{6}; });
  expect_refusal("memory_mode", [](LayerConfig& c) { c.memory_mode = MemoryMode{2}; });
  expect_refusal("overlap", [](LayerConfig& c) { c.overlap = Overlap{2}; });
  expect_refusal("weight_gradient_mode",
                 [](LayerConfig& c) { c.weight_gradient_mode = WeightGradientMode{3}; });
  expect_refusal("backend", [](LayerConfig& c) { c.backend = Backend{2}; });
  if (!cuda::is_built()) {
    expect_refusal("cuda", [](LayerConfig& c) { c.backend = Backend::cuda; });
    return;
  }
  const auto expect_limit = [&](const char* member, const auto& exceed) {
    expect_refusal(member, [&](LayerConfig& c) {
      c.backend = Backend::cuda;
      exceed(c);
    });
  };
  expect_limit("shape.hidden_dim", [](LayerConfig& c) { c.shape.hidden_dim = 65; });
  expect_limit("shape.intermediate_dim", [](LayerConfig& c) { c.shape.intermediate_dim = 96; });
  expect_limit("shape.num_experts", [](LayerConfig& c) { c.shape.num_experts = 514; });
  expect_limit("shape.top_k", [](LayerConfig& c) { c.shape.top_k = 17; });
  expect_limit("num_sms", [](LayerConfig& c) { c.num_sms = 1; });
}

TEST(Configuration, AWorkspaceThatIsTooSmallIsRefusedWithItsSizes) {
  const ProblemSpec spec = spec_with_tokens({5, 5});
  run_ranks(2, [&](Communicator& group) {
    const LayerConfig config = layer_config(spec, {});
    LayerConfig larger = config;
    larger.shape.hidden_dim *= 2;
    Workspace workspace(config, group);
    const WorkspaceBytes bytes = workspace_bytes(config, 2);
    EXPECT_EQ(workspace.bytes().symmetric, bytes.symmetric);
    EXPECT_EQ(workspace.bytes().local, bytes.local);
    expect_error(ErrorCode::invalid_argument,
                 {"workspace is too small", std::to_string(bytes.local),
                  std::to_string(workspace_bytes(larger, 2).local)},
                 [&] { const MoeLayer layer(larger, group, workspace); });
    const MoeLayer layer(config, group, workspace);
  });
}

}  // namespace
}  // namespace megamoe::verify
