#include "verify/verify.h"

#include <iterator>
#include <utility>

#include "verify/library_router.h"

namespace megamoe::verify {

std::vector<Comparison> verify_backend(const Problem& problem, const RunOptions& options,
                                       std::optional<ExpertWeight> perturbed) {
  LibraryRouter router(problem);
  std::vector<Comparison> comparisons = judge_routing(problem, router.routed());
  if (!all_passed(comparisons)) return comparisons;
  const LayerTensors tensors =
      perturbed ? run_layer(with_perturbed_weight(router.routed(), *perturbed), options)
                : run_layer(router.routed(), options);
  const RawTensor drouter = router.weight_gradient(tensors.dweights);
  std::vector<Comparison> of_layer = judge_layer(router.routed(), tensors, options, &drouter);
  comparisons.insert(comparisons.end(), std::make_move_iterator(of_layer.begin()),
                     std::make_move_iterator(of_layer.end()));
  return comparisons;
}

}  // namespace megamoe::verify
