// Which of the states that no context holds a call gets.
#include "layer/call_context.h"

#include <gtest/gtest.h>

#include <memory>

namespace megamoe {
namespace {

struct TestState final : CallState {
  [[nodiscard]] const std::int64_t* rows_per_expert() const override { return nullptr; }
  [[nodiscard]] std::int64_t num_rows() const override { return 0; }
};

std::unique_ptr<CallState> state_in(const std::shared_ptr<CapturingGraph>& graph) {
  auto state = std::make_unique<TestState>();
  state->graph = graph;
  return state;
}

TEST(CallStatePool, GivesTheLatestStateFirst) {
  CallStatePool pool;
  EXPECT_EQ(pool.take(0), nullptr);
  auto first = state_in(nullptr), second = state_in(nullptr);
  const CallState* const latest = second.get();
  pool.give_back(std::move(first));
  pool.give_back(std::move(second));
  EXPECT_EQ(pool.take(0).get(), latest);
  EXPECT_NE(pool.take(0), nullptr);
  EXPECT_EQ(pool.take(0), nullptr);
}

TEST(CallStatePool, StatesOfAGraphGoToItsCaptureAloneAsLongAsItExists) {
  CallStatePool pool;
  const auto graph = std::make_shared<CapturingGraph>(7);
  pool.give_back(state_in(graph));
  EXPECT_EQ(pool.take(0), nullptr);
  EXPECT_EQ(pool.take(8), nullptr);
  auto state = pool.take(7);
  ASSERT_NE(state, nullptr);
  pool.give_back(std::move(state));
  graph->exists = false;
  EXPECT_NE(pool.take(0), nullptr);
}

TEST(CallStatePool, ACaptureTakesItsOwnStatesBeforeThoseOfNoGraph) {
  CallStatePool pool;
  const auto graph = std::make_shared<CapturingGraph>(7);
  auto own = state_in(graph);
  const CallState* const its_own = own.get();
  pool.give_back(std::move(own));
  pool.give_back(state_in(nullptr));
  EXPECT_EQ(pool.take(7).get(), its_own);
  EXPECT_NE(pool.take(7), nullptr);
}

TEST(CallStatePool, KnowsWhetherAGraphExists) {
  CallStatePool pool;
  EXPECT_FALSE(pool.has_graph());
  const auto first = std::make_shared<CapturingGraph>(1),
             second = std::make_shared<CapturingGraph>(2);
  pool.add_graph(first);
  pool.add_graph(second);
  first->exists = false;
  EXPECT_TRUE(pool.has_graph());
  second->exists = false;
  EXPECT_FALSE(pool.has_graph());
}

}  // namespace
}  // namespace megamoe
