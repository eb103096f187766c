// A group on several hosts: the ranks of this host share memory through a group of their own, all
// ranks talk through the mesh.
#pragma once

#include <memory>
#include <vector>

#include "comm/network/mesh.h"
#include "comm/network/network.h"
#include "megamoe/communicator.h"

namespace megamoe::network {

class NetworkCommunicator final : public Communicator, private Network {
 public:
  /// `host_group` holds the ranks of this host, in order.
  NetworkCommunicator(Topology topology, std::unique_ptr<Mesh> mesh,
                      std::unique_ptr<Communicator> host_group);

  [[nodiscard]] int rank() const override { return mesh_->rank(); }
  [[nodiscard]] int size() const override { return mesh_->size(); }
  [[nodiscard]] Topology topology() const override { return topology_; }
  [[nodiscard]] Network* network() override { return topology_.num_hosts() > 1 ? this : nullptr; }

  void barrier(const char* what, double deadline_s) override;
  void all_gather(const void* mine, void* all, std::size_t bytes, const char* what,
                  double deadline_s) override;
  void all_reduce_sum(float* values, std::size_t count, const char* what,
                      double deadline_s) override;
  std::unique_ptr<SymmetricHeap> allocate_symmetric(std::size_t bytes, double deadline_s) override;
  [[nodiscard]] std::vector<megamoe::Departure> departures() const override {
    return mesh_->departures();
  }
  void abort(const std::string& reason) noexcept override;

 private:
  void transfer(std::span<const Message> sends, std::span<const Message> receives, const char* what,
                double deadline_s) override;
  /// One message to and from every peer, all for `purpose`; throws config_mismatch where a peer
  /// came for something else. Element r of the segments is for rank r, and not used for this one.
  void meet(const MeetingPurpose& purpose, std::span<const RowSegment> sent_R,
            std::span<const RowSegment> received_R, double deadline_s);

  Topology topology_;
  std::unique_ptr<Mesh> mesh_;
  std::unique_ptr<Communicator> host_group_;
  // Reused, so that calls do not allocate.
  std::vector<RowSegment> sent_R_;
  std::vector<RowSegment> received_R_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::vector<float> shares_;  ///< of sums: this rank's share of everybody's values
};

}  // namespace megamoe::network
