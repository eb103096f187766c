// The exchange of a whole group on the CPU, with the CPU backend's own functions: what the GPU's
// memory must hold afterwards, byte for byte.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "comm/gpu_workspace_layout.h"
#include "cpu/exchange.h"
#include "cpu/reference.h"
#include "gpu/routing_cases.h"
#include "routing/plan.h"

namespace megamoe::testing {

inline WorkspaceDims with_padded_capacity(WorkspaceDims dims) {
  dims.row_capacity = padded_row_capacity(dims);
  return dims;
}

/// Results of the experts of one rank: random, given to both sides.
struct ExpertResults {
  std::vector<bf16> rows_CH;
  std::vector<float> dweight_segments;  ///< [segments, C]
};

class HostRanks {
 public:
  explicit HostRanks(const WorkspaceDims& dims)
      : dims_(with_padded_capacity(dims)), heap_(symmetric_layout(dims_).bytes, num_ranks()) {
    for (int rank = 0; rank < num_ranks(); ++rank) {
      ranks_.push_back(std::make_unique<Rank>(dims_, heap_, rank));
    }
  }

  /// Every byte of all buffers becomes 0xff.
  void poison() {
    heap_.poison();
    for (auto& rank : ranks_) rank->poison();
  }

  void forward(const std::vector<RankInput>& inputs, const std::vector<ExpertResults>& results) {
    for (int r = 0; r < num_ranks(); ++r) ranks_[r]->read_routing(dims_, inputs[r]);
    exchange_counts();
    for (int r = 0; r < num_ranks(); ++r) {
      Rank& rank = *ranks_[r];
      stage_rows(rank.stage(), rows_view(inputs[r].x, inputs[r].num_tokens),
                 mine(r).staged_rows_TH);
      rank.stage_lists();
    }
    for (auto& rank : ranks_) {
      cpu::fetch_forward(rank->stage());
      rank->clear_pads();
    }
    push(results);
    for (auto& rank : ranks_) reduce_outputs(rank->stage(), rank->state, rank->out_view());
  }

  void backward(const std::vector<RankInput>& inputs, const std::vector<ExpertResults>& results) {
    for (int r = 0; r < num_ranks(); ++r) {
      Rank& rank = *ranks_[r];
      stage_rows(rank.stage(), rows_view(inputs[r].x, inputs[r].num_tokens),
                 mine(r).staged_rows_TH);
      stage_rows(rank.stage(), rows_view(inputs[r].dy, inputs[r].num_tokens), mine(r).staged_dy_TH);
      stage_weights(rank.stage(), rank.state);
      rank.stage_lists();
    }
    for (auto& rank : ranks_) {
      cpu::fetch_backward(rank->stage());
      rank->clear_pads();
      rank->clear_backward_pads();
    }
    push(results);
    push_dweights(results);
    for (auto& rank : ranks_) {
      reduce_gradients(rank->stage(), rank->state, rank->out_view(), rank->dweights_view());
    }
  }

  struct Rank {
    Rank(const WorkspaceDims& workspace, const SymmetricHeap& heap, int rank_idx)
        : dims(workspace),
          local(local_layout(workspace).bytes),
          buffers(cpu::make_buffers(workspace, Topology(workspace.routing.num_ranks), heap,
                                    local.data(), rank_idx)),
          state(workspace, /*num_hosts=*/1, 0, false),
          threads(1),
          scratch(1),
          out(workspace.max_tokens * row_stride(workspace)),
          dweights(workspace.max_tokens * id_stride(workspace)) {}

    [[nodiscard]] cpu::StageContext stage() {
      return {dims, activation, buffers, threads, scratch};
    }
    [[nodiscard]] TensorView out_view() {
      TensorView view = tensor_view(out.data(), {dims.max_tokens, row_stride(dims)});
      return view;
    }
    [[nodiscard]] TensorView dweights_view() {
      return tensor_view(dweights.data(), {dims.max_tokens, id_stride(dims)});
    }

    void poison() {
      std::memset(local.data(), 0xff, local.size());
      std::memset(out.data(), 0xff, out.size() * sizeof(bf16));
      std::memset(dweights.data(), 0xff, dweights.size() * sizeof(float));
    }

    void read_routing(const WorkspaceDims& workspace, const RankInput& input) {
      state.num_tokens = input.num_tokens;
      const std::int64_t top_k = workspace.routing.top_k;
      for (std::int64_t token = 0; token < input.num_tokens; ++token) {
        std::copy_n(input.ids.data() + token * id_stride(workspace), top_k,
                    state.ids_TK.data() + token * top_k);
        std::copy_n(input.weights.data() + token * weight_stride(workspace), top_k,
                    state.weights_TK.data() + token * top_k);
      }
      counts_E.resize(workspace.routing.num_experts);
      fault = count_slots(workspace.routing, input.ids.data(), input.num_tokens,
                          id_stride(workspace), counts_E.data());
    }

    void stage_lists() {
      const std::span<const std::int32_t> ids(state.ids_TK.data(),
                                              state.num_tokens * dims.routing.top_k);
      build_pull_lists(dims.routing, state.counts_RE.data(), buffers.rank, ids, kGpuRowAlignment,
                       plan_scratch, buffers.mine().pull_lists);
    }

    template <class Visit>
    void for_each_pad(Visit visit) {
      for (std::size_t expert = 0; expert < state.rows_e.size(); ++expert) {
        for (std::int64_t row = state.expert_begin[expert] + state.rows_e[expert];
             row < state.expert_begin[expert + 1]; ++row) {
          visit(row);
        }
      }
    }
    void clear_pads() {
      for_each_pad([&](std::int64_t row) {
        std::memset(buffers.x_CH + row * dims.hidden_dim, 0, dims.hidden_dim * sizeof(bf16));
        buffers.origin_C[row] = {-1, 0, 0};
      });
    }
    void clear_backward_pads() {
      for_each_pad([&](std::int64_t row) {
        std::memset(buffers.dy_CH + row * dims.hidden_dim, 0, dims.hidden_dim * sizeof(bf16));
        buffers.weight_C[row] = 0.0F;
      });
    }

    WorkspaceDims dims;
    Activation activation;
    std::vector<std::byte> local;
    cpu::Buffers buffers;
    cpu::CpuCallState state;
    cpu::ThreadPool threads;
    std::vector<cpu::ThreadScratch> scratch;
    PlanScratch plan_scratch;
    std::vector<std::int32_t> counts_E;
    IdFault fault;
    std::vector<bf16> out;  ///< y or dx
    std::vector<float> dweights;
  };

  [[nodiscard]] Rank& rank(int r) { return *ranks_[r]; }
  [[nodiscard]] const std::byte* symmetric(int r) const { return heap_.peer(r); }
  [[nodiscard]] const WorkspaceDims& dims() const { return dims_; }
  [[nodiscard]] int num_ranks() const { return dims_.routing.num_ranks; }

 private:
  class Heap final : public SymmetricHeap {
   public:
    Heap(std::int64_t bytes, int num_ranks) : memory_(num_ranks, std::vector<std::byte>(bytes)) {}
    [[nodiscard]] std::byte* peer(int rank) const override {
      return const_cast<std::byte*>(memory_[rank].data());
    }
    [[nodiscard]] std::size_t bytes() const override { return memory_[0].size(); }
    void poison() {
      for (auto& memory : memory_) std::memset(memory.data(), 0xff, memory.size());
    }

   private:
    std::vector<std::vector<std::byte>> memory_;
  };

  [[nodiscard]] const cpu::SymmetricBuffers& mine(int r) const { return ranks_[r]->buffers.mine(); }
  [[nodiscard]] ConstTensorView rows_view(const std::vector<bf16>& rows,
                                          std::int64_t num_rows) const {
    return tensor_view(rows.data(), {num_rows, row_stride(dims_)});
  }

  void exchange_counts() {
    const std::int32_t num_experts = dims_.routing.num_experts;
    for (auto& rank : ranks_) {
      for (int r = 0; r < num_ranks(); ++r) {
        std::copy(ranks_[r]->counts_E.begin(), ranks_[r]->counts_E.end(),
                  rank->state.counts_RE.begin() + std::int64_t{r} * num_experts);
      }
      const std::int32_t* counts_RE = rank->state.counts_RE.data();
      expert_offsets(dims_.routing, counts_RE, rank->buffers.rank, kGpuRowAlignment,
                     rank->state.expert_begin.data());
      const std::int32_t first = dims_.routing.first_expert_of(rank->buffers.rank);
      for (std::int32_t i = 0; i < dims_.routing.experts_per_rank(); ++i) {
        rank->state.rows_e[i] = rows_of_expert(dims_.routing, counts_RE, first + i);
      }
    }
  }

  template <class Visit>
  void for_each_row(Visit visit) {
    for (int r = 0; r < num_ranks(); ++r) {
      const Rank& rank = *ranks_[r];
      for (std::int64_t row = 0; row < rank.state.num_rows(); ++row) {
        const RowOrigin& origin = rank.buffers.origin_C[row];
        if (origin.rank < 0) continue;
        const std::int64_t slot = std::int64_t{origin.token} * dims_.routing.top_k + origin.slot;
        visit(r, row, origin.rank, slot);
      }
    }
  }

  void push(const std::vector<ExpertResults>& results) {
    const std::int64_t hidden = dims_.hidden_dim;
    for_each_row([&](int r, std::int64_t row, int source, std::int64_t slot) {
      std::copy_n(results[r].rows_CH.data() + row * hidden, hidden,
                  mine(source).slot_rows_TKH + slot * hidden);
    });
  }
  void push_dweights(const std::vector<ExpertResults>& results) {
    const std::int64_t num_segments = num_dweight_segments(dims_.intermediate_dim);
    for_each_row([&](int r, std::int64_t row, int source, std::int64_t slot) {
      const float* segments = results[r].dweight_segments.data();
      float sum = segments[row];
      for (std::int64_t i = 1; i < num_segments; ++i) sum += segments[i * dims_.row_capacity + row];
      mine(source).slot_dweights_TK[slot] = sum;
    });
  }

  WorkspaceDims dims_;
  Heap heap_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace megamoe::testing
