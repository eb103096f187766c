#include "megamoe/topology.h"

#include <algorithm>

#include "megamoe/error.h"

namespace megamoe {
namespace {

std::string rank_range(int first, int count) {
  if (count == 1) return "rank " + std::to_string(first);
  return "ranks " + std::to_string(first) + "-" + std::to_string(first + count - 1);
}

/// Consecutive ranks that name the same host.
struct Run {
  std::string host;
  int first_rank;
  int num_ranks;
};

std::vector<Run> runs_of(const std::vector<std::string>& host_names_R) {
  std::vector<Run> runs;
  for (std::size_t rank = 0; rank < host_names_R.size(); ++rank) {
    const std::string& host = host_names_R[rank];
    if (host.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  "rank " + std::to_string(rank) + " names no host (the name is empty)");
    }
    if (runs.empty() || runs.back().host != host) {
      runs.push_back({host, static_cast<int>(rank), 0});
    }
    ++runs.back().num_ranks;
  }
  return runs;
}

void require_one_run_a_host(const std::vector<Run>& runs) {
  for (std::size_t i = 0; i < runs.size(); ++i) {
    for (std::size_t j = i + 1; j < runs.size(); ++j) {
      if (runs[j].host != runs[i].host) continue;
      throw Error(ErrorCode::unsupported,
                  "the ranks of a host must be contiguous: " + runs[i].host + " has " +
                      rank_range(runs[i].first_rank, runs[i].num_ranks) + " and " +
                      rank_range(runs[j].first_rank, runs[j].num_ranks) + ", but not " +
                      rank_range(runs[i + 1].first_rank, runs[i + 1].num_ranks) + ", on " +
                      runs[i + 1].host + " (number the ranks host by host)");
    }
  }
}

void require_equal_hosts(const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    if (run.num_ranks == runs[0].num_ranks) continue;
    throw Error(ErrorCode::unsupported,
                "all hosts must hold equally many ranks: " + runs[0].host + " holds " +
                    rank_range(runs[0].first_rank, runs[0].num_ranks) + ", " + run.host +
                    " holds " + rank_range(run.first_rank, run.num_ranks));
  }
}

}  // namespace

const char* to_string(Reach reach) {
  switch (reach) {
    case Reach::own:
      return "own";
    case Reach::load_store:
      return "load/store";
    case Reach::network:
      return "network";
  }
  return "unknown";
}

Topology::Topology(int num_ranks) : ranks_per_host_(num_ranks), host_names_{"this host"} {
  if (num_ranks < 1) {
    throw Error(ErrorCode::invalid_argument,
                "num_ranks is " + std::to_string(num_ranks) + ", must be at least 1");
  }
}

Topology::Topology(const std::vector<std::string>& host_names_R) {
  if (host_names_R.empty()) {
    throw Error(ErrorCode::invalid_argument, "a topology needs at least one rank");
  }
  const std::vector<Run> runs = runs_of(host_names_R);
  require_one_run_a_host(runs);
  require_equal_hosts(runs);
  ranks_per_host_ = runs[0].num_ranks;
  for (const Run& run : runs) host_names_.push_back(run.host);
}

Reach Topology::reach(int from, int to) const {
  if (from == to) return Reach::own;
  return host_of(from) == host_of(to) ? Reach::load_store : Reach::network;
}

std::string Topology::describe() const {
  std::string text = std::to_string(num_ranks()) + (num_ranks() == 1 ? " rank on " : " ranks on ") +
                     std::to_string(num_hosts()) + (num_hosts() == 1 ? " host: " : " hosts: ");
  for (int host = 0; host < num_hosts(); ++host) {
    text += (host == 0 ? "" : "; ") + rank_range(rank_of(host, 0), ranks_per_host_) + " on " +
            host_names_[host];
  }
  if (ranks_per_host_ > 1) text += "; by load/store inside a host";
  if (num_hosts() > 1) text += "; by network between hosts";
  return text;
}

Topology even_topology(int num_hosts, int ranks_per_host) {
  std::vector<std::string> names;
  for (int host = 0; host < num_hosts; ++host) {
    for (int local = 0; local < ranks_per_host; ++local) {
      names.push_back("host " + std::to_string(host));
    }
  }
  return Topology(names);
}

}  // namespace megamoe
