// Which ranks of a group share a host.
#pragma once

#include <string>
#include <vector>

namespace megamoe {

/// How one rank reaches another's data.
enum class Reach {
  own,         ///< it is the same rank
  load_store,  ///< same host: memory that both map
  network,     ///< other host: messages
};
const char* to_string(Reach reach);

/// R ranks on S hosts, L = R / S each: rank h * L + l is the one with local index l of host h.
class Topology {
 public:
  /// All ranks on one host. Throws invalid_argument for fewer than one.
  explicit Topology(int num_ranks);
  /// `host_names_R[r]` names the host of rank r; ranks with equal names share it. Throws
  /// unsupported, naming hosts and ranks, where the ranks of a host are not contiguous or hosts
  /// hold different numbers; invalid_argument where there are none or a name is empty.
  explicit Topology(const std::vector<std::string>& host_names_R);

  [[nodiscard]] int num_ranks() const { return num_hosts() * ranks_per_host_; }
  [[nodiscard]] int num_hosts() const { return static_cast<int>(host_names_.size()); }
  [[nodiscard]] int ranks_per_host() const { return ranks_per_host_; }
  [[nodiscard]] int host_of(int rank) const { return rank / ranks_per_host_; }
  [[nodiscard]] int local_index_of(int rank) const { return rank % ranks_per_host_; }
  [[nodiscard]] int rank_of(int host, int local_index) const {
    return host * ranks_per_host_ + local_index;
  }
  [[nodiscard]] const std::string& host_name(int host) const { return host_names_[host]; }
  [[nodiscard]] Reach reach(int from, int to) const;
  /// One line: how many, which ranks are on which host, who reaches whom how.
  [[nodiscard]] std::string describe() const;

 private:
  int ranks_per_host_ = 1;
  std::vector<std::string> host_names_;
};

/// Topology of `num_hosts` hosts with `ranks_per_host` ranks each, named "host 0", "host 1", ...
Topology even_topology(int num_hosts, int ranks_per_host);

}  // namespace megamoe
