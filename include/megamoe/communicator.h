// The group of ranks that shares the experts of a layer.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megamoe/error.h"
#include "megamoe/topology.h"

namespace megamoe {

class Network;  // internal

/// Memory of equal size on every rank, readable and writable by all ranks of a host. The pointer of
/// a peer is valid on this rank only; null for a peer on another host. Destroyed by each rank on
/// its own; a peer must not be using it any more.
class SymmetricHeap {
 public:
  virtual ~SymmetricHeap() = default;
  [[nodiscard]] virtual std::byte* peer(int rank) const = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
};

/// A rank that takes no further part, and why: peer_failed naming it, or deadline_exceeded where
/// the group is broken.
struct Departure {
  int rank;
  Error error;
};

/// One rank's handle of its group. All members that move data are collective: every rank calls
/// them, in the same order, with the same sizes. They throw Error with
///   - peer_failed when a rank that they wait for has failed or left (the message names it and
///   why),
///   - config_mismatch when they are in different calls (the message says where each is); the group
///     stays usable,
///   - deadline_exceeded after `deadline_s` seconds, naming the ranks that are missing and `what`.
/// After a missed deadline the communicator is broken: every later call throws. One thread at a
/// time, but for departures() and throw_if_peer_left().
class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  /// The CUDA device whose memory allocate_symmetric() gives; kHostMemory where it gives the
  /// host's.
  [[nodiscard]] virtual int device() const { return kHostMemory; }
  static constexpr int kHostMemory = -1;
  /// Which ranks share a host, and with it symmetric memory. All of them, unless overridden.
  [[nodiscard]] virtual Topology topology() const { return Topology(size()); }
  /// What joins the hosts; null where there is one. Valid as long as the communicator.
  [[nodiscard]] virtual Network* network() { return nullptr; }

  virtual void barrier(const char* what, double deadline_s) = 0;
  /// Gathers `bytes` of every rank into `all` (size() * bytes), in rank order. `mine` must not
  /// overlap `all`, not even as this rank's part of it. For small data.
  virtual void all_gather(const void* mine, void* all, std::size_t bytes, const char* what,
                          double deadline_s) = 0;
  /// values[i] becomes the fp32 sum over ranks 0, 1, ... in that order; the same bits on every
  /// rank.
  virtual void all_reduce_sum(float* values, std::size_t count, const char* what,
                              double deadline_s) = 0;
  /// Allocates zeroed memory on every rank. Throws out_of_memory with the size on every rank if one
  /// fails.
  virtual std::unique_ptr<SymmetricHeap> allocate_symmetric(std::size_t bytes,
                                                            double deadline_s) = 0;
  /// The other ranks that have failed or left, in the order in which this rank could see it; all of
  /// them where the group is broken. What they had sent before can still be received. Waits for
  /// nobody, and may be called while peers are elsewhere, by any thread.
  [[nodiscard]] virtual std::vector<Departure> departures() const { return {}; }
  /// Throws the error of the first of departures().
  void throw_if_peer_left() const {
    const std::vector<Departure> departed = departures();
    if (!departed.empty()) throw Error(departed.front().error);
  }
  /// Tells the peers that this rank cannot go on; what they wait for fails with `reason`.
  virtual void abort(const std::string& reason) noexcept = 0;
};

/// The communicators of a group whose ranks are threads of this process; element r is rank r's, to
/// be used by one thread. A rank leaves the group when its communicator is destroyed.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int num_ranks);

/// This process's communicator in a group whose ranks are processes of one host (and one user),
/// over POSIX shared memory. Collective: every process calls it with the same `name`, which no
/// other live group of the host uses (1 to 200 letters, digits, '.', '_', '-'), and waits for the
/// others up to `deadline_s`. A process that ends, however it ends, fails its peers with
/// peer_failed. Throws also out_of_memory where /dev/shm is full.
std::unique_ptr<Communicator> make_process_communicator(const std::string& name, int rank,
                                                        int num_ranks, double deadline_s);

/// Runs `rank_main` on `num_ranks` threads, each with its communicator, and joins them. A rank that
/// throws makes its peers fail at once with peer_failed; the error of the rank that failed first is
/// rethrown.
void run_ranks(int num_ranks, const std::function<void(Communicator&)>& rank_main);

}  // namespace megamoe
