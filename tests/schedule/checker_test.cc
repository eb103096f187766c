// The protocol of the layer's calls holds in every interleaving of small problems and in many of
// large ones.
#include <gtest/gtest.h>

#include "schedule/explore.h"

namespace megamoe::checker {
namespace {

std::shared_ptr<const LayerModel> tiny(int num_ranks, bool overlap, schedule::Shared shared) {
  LayerShape shape;
  shape.dims = {num_ranks, num_ranks, 1};
  shape.shared = shared;
  shape.overlap = overlap;
  CallSpec call;
  for (int r = 0; r < num_ranks; ++r) call.ids.push_back({0, num_ranks - 1});
  CallSpec back;
  back.backward = true;
  return std::make_shared<LayerModel>(shape, std::vector<CallSpec>{call, back});
}

TEST(Checker, Tiny) {
  for (int ranks : {1, 2}) {
    for (bool overlap : {false, true}) {
      for (auto shared : {schedule::Shared::rows, schedule::Shared::channels}) {
        const auto model = tiny(ranks, overlap, shared);
        const Finding f = run_at_random(model, 1);
        EXPECT_TRUE(f.ok()) << f.what << "\n" << f.history;
        const Finding s = search_all(model, Reduction::by_order, 100000);
        EXPECT_TRUE(s.ok()) << s.what << "\n" << s.history;
        printf("%d %d: steps %lu states %lu\n", ranks, overlap, s.num_steps, s.num_states); fflush(stdout);
      }
    }
  }
}

}  // namespace
}  // namespace megamoe::checker
