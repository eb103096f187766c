// Runs the library on a problem, with ranks as threads: the one harness of `megamoe verify`, the
// tests and every backend. Outputs are filled with NaN before each call, workspaces when they are
// made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megamoe/communicator.h"
#include "megamoe/cuda.h"
#include "megamoe/layer.h"
#include "megamoe/network.h"
#include "verify/compare.h"
#include "verify/device_copies.h"
#include "verify/problem.h"

namespace megamoe::verify {

/// A dense tensor as the backend stored it, bit by bit.
struct RawTensor {
  DType dtype = DType::bf16;
  std::vector<std::int64_t> shape;  ///< empty: the tensor is absent
  std::vector<std::byte> bytes;

  RawTensor() = default;
  RawTensor(DType element_type, std::vector<std::int64_t> sizes);
  [[nodiscard]] std::int64_t num_elements() const;
  [[nodiscard]] TensorView view();  ///< absent for an absent tensor
  /// Every byte 0xff: NaN in all floating-point types.
  void fill_with_nan();
  /// Of an fp32 tensor.
  void fill(float value);
  /// Adds the rows of `next` (along the first dimension) after those of this tensor.
  void append(const RawTensor& next);
  /// bf16, fp32 or int32 values as fp64.
  [[nodiscard]] HostTensor to_host() const;
  bool operator==(const RawTensor&) const = default;
};

/// The backend that RunOptions start with: cpu unless a test program has set another one for all of
/// its tests. Not to be changed while ranks run.
Backend default_backend();
void set_default_backend(Backend backend);
/// The same for the number of hosts of problems whose ranks divide among them; others run on one.
int default_num_hosts();
void set_default_num_hosts(int num_hosts);
/// The same for how the CUDA backend runs over several hosts.
const CudaHostsOptions& default_cuda_hosts();
void set_default_cuda_hosts(const CudaHostsOptions& options);
/// How many groups over several hosts have been given to a BackendGroup, once a rank, since the
/// program began.
int num_groups_over_hosts();

struct RunOptions {
  Backend backend = default_backend();
  MemoryMode memory_mode = MemoryMode::saved;
  Overlap overlap = Overlap::on;
  WeightGradientMode weight_gradient_mode = WeightGradientMode::store_bf16;
  int num_hosts = 0;              ///< stand-ins on this machine; 0: as set_default_num_hosts()
  Communicator* group = nullptr;  ///< that this process is a rank of; null: ranks are threads
  CudaHostsOptions cuda_hosts = default_cuda_hosts();  ///< how it runs over several hosts
  int num_threads = 1;                                 ///< a rank
  double deadline_s = 60.0;                            ///< of entry and inner waits
  float initial_gradient = 0.0F;  ///< what main_grad holds before accumulate_fp32
  std::int64_t row_capacity = 0;  ///< 0: what no routing can exceed, R * max T * K
  std::int64_t saved_row_capacity = 0;
};

/// The hosts on which `options` run a problem: equally many ranks on each.
Topology topology_of(const ProblemSpec& spec, const RunOptions& options);

/// The configuration with which `options` run a problem.
LayerConfig layer_config(const ProblemSpec& spec, const RunOptions& options);

/// What forward and backward wrote: of one rank, or of all with tokens and experts concatenated in
/// rank order.
struct LayerTensors {
  RawTensor y;
  RawTensor dx;
  RawTensor dweights;
  RawTensor dgate;  ///< absent for ungated activations
  RawTensor dup;
  RawTensor ddown;
  bool operator==(const LayerTensors&) const = default;
};

/// All ranks' tensors, in rank order.
LayerTensors concatenate(const std::vector<LayerTensors>& tensors_R);

/// The names of the tensors whose bits differ, "" if none do.
std::string differing_tensors(const LayerTensors& left, const LayerTensors& right);

/// One rank's inputs (views of the problem, which must outlive them) and its own outputs, in host
/// memory. On the cuda backend calls work on copies, and end with MoeLayer::check().
class RankData {
 public:
  RankData(const Problem& problem, const RunOptions& options, int rank);

  [[nodiscard]] ForwardInput forward_input() const;
  [[nodiscard]] BackwardInput backward_input() const;
  [[nodiscard]] ForwardOutput forward_output();
  [[nodiscard]] BackwardOutput backward_output();

  /// From now on calls read x, or dy, from rows that are `stride` elements apart and begin `offset`
  /// elements into memory that is NaN between them. With a stride of 0, as torch's expand() gives
  /// it, all rows are the last one.
  void spread_x(std::int64_t stride, std::int64_t offset);
  void spread_dy(std::int64_t stride, std::int64_t offset);

  /// Fills y with NaN, then runs. Collective.
  CallContext forward(MoeLayer& layer);
  /// Fills dx, dweights and stored weight gradients with NaN, then runs. Gradients that are
  /// accumulated keep what they hold. Collective.
  void backward(MoeLayer& layer, const CallContext& context);

  [[nodiscard]] const LayerTensors& tensors() const { return tensors_; }

 private:
  struct SpreadRows {
    std::vector<bf16> memory;
    std::int64_t stride;
    std::int64_t offset;
    void read_by(ConstTensorView& rows) const;
  };
  static SpreadRows spread(const ConstTensorView& rows, std::int64_t stride, std::int64_t offset);
  ExpertWeights upload(const ExpertWeights& experts);
  void check_and_download(MoeLayer& layer,
                          std::initializer_list<RawTensor LayerTensors::*> tensors);

  const Problem& problem_;
  int rank_;
  WeightGradientMode weight_gradient_mode_;
  LayerTensors tensors_;
  std::optional<SpreadRows> x_rows_;  ///< in place of the problem's
  std::optional<SpreadRows> dy_rows_;
  std::unique_ptr<DeviceCopies> copies_;  ///< null on the cpu backend
};

/// `group` itself, or a CUDA communicator over it where the options' backend is cuda.
class BackendGroup {
 public:
  BackendGroup(Communicator& group, const RunOptions& options);
  [[nodiscard]] Communicator& get() const { return owned_ == nullptr ? group_ : *owned_; }

 private:
  Communicator& group_;
  std::unique_ptr<Communicator> owned_;
};

/// One rank's layer with a workspace of its own, full of NaN, and the data of one problem.
/// Construction is collective; the problem and the communicator must outlive it.
class RankSession {
 public:
  RankSession(const Problem& problem, const RunOptions& options, Communicator& communicator);

  CallContext forward() { return data_.forward(layer_); }
  void backward(const CallContext& context) { data_.backward(layer_, context); }

  [[nodiscard]] RankData& data() { return data_; }
  [[nodiscard]] MoeLayer& layer() { return layer_; }
  [[nodiscard]] Workspace& workspace() { return workspace_; }
  [[nodiscard]] const LayerTensors& tensors() const { return data_.tensors(); }

 private:
  RankData data_;
  BackendGroup group_;
  Workspace workspace_;
  MoeLayer layer_;
};

/// One forward and one backward; all ranks' results concatenated. With options.group collective,
/// and the same on every rank. Throws what the library throws.
LayerTensors run_layer(const Problem& problem, const RunOptions& options);

}  // namespace megamoe::verify
