// Ranks as threads of one process: a shared state with one rendezvous, and heaps in plain memory.
#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/longest_wait.h"
#include "comm/departure.h"
#include "comm/meeting.h"
#include "megamoe/communicator.h"
#include "megamoe/error.h"

namespace megamoe {
namespace {

using SteadyClock = std::chrono::steady_clock;

/// What a rank brings to a meeting.
struct Arrival {
  void* pointer;
  MeetingPurpose purpose;
};

/// The rendezvous of a group. Every collective is one or two of its meetings: each rank leaves a
/// pointer and waits until all have; the pointers stay valid until the next meeting begins.
class ThreadGroup {
 public:
  explicit ThreadGroup(int num_ranks)
      : arrivals_{std::vector<Arrival>(num_ranks), std::vector<Arrival>(num_ranks)},
        arrived_(num_ranks, 0),
        departure_(num_ranks) {}

  [[nodiscard]] int size() const { return static_cast<int>(arrived_.size()); }

  /// Returns what the ranks brought, valid until this rank has been to the next meeting. Throws
  /// config_mismatch where they came for different things.
  const std::vector<Arrival>& meet(int rank, void* pointer, const MeetingPurpose& purpose,
                                   double deadline_s) {
    std::unique_lock lock(mutex_);
    if (!broken_.empty()) throw Error(ErrorCode::deadline_exceeded, broken_);
    const std::uint64_t meeting = meeting_;
    // Two sets in turn: a fast rank enters the next meeting while a slow one still reads this one's
    // arrivals.
    std::vector<Arrival>& arrivals = arrivals_[meeting % 2];
    arrivals[rank] = {pointer, purpose};
    arrived_[rank] = 1;
    if (++num_arrived_ == size()) {
      num_arrived_ = 0;
      std::fill(arrived_.begin(), arrived_.end(), 0);
      ++meeting_;
      all_arrived_.notify_all();
    } else {
      wait(lock, rank, meeting, purpose.what.data(), deadline_s);
    }
    throw_if_purposes_differ(
        size(), [&](int peer) -> const MeetingPurpose& { return arrivals[peer].purpose; });
    return arrivals;
  }

  /// Rank `rank` takes no further part. The first reason given stays.
  void depart(int rank, const std::string& reason) noexcept {
    const std::lock_guard lock(mutex_);
    if (departure_[rank].order == 0) departure_[rank] = {++num_departures_, reason};
    all_arrived_.notify_all();
  }

  /// As Communicator::departures() of `rank`.
  std::vector<Departure> departures(int rank) {
    const std::lock_guard lock(mutex_);
    return departures_of_peers(
        rank, size(), broken_, [&](int peer) { return departure_[peer].order; },
        [&](int peer) { return departure_text(peer); });
  }

 private:
  /// How a rank left.
  struct Leave {
    int order = 0;  // 1 for the first rank that left; 0 while it takes part
    std::string reason;
  };

  void wait(std::unique_lock<std::mutex>& lock, int rank, std::uint64_t meeting, const char* what,
            double deadline_s) {
    const auto limit = std::chrono::duration<double>(std::min(deadline_s, kLongestWaitS));
    const auto deadline =
        SteadyClock::now() + std::chrono::duration_cast<SteadyClock::duration>(limit);
    while (meeting_ == meeting) {
      // First: ranks leave because of a missed deadline.
      if (!broken_.empty()) throw Error(ErrorCode::deadline_exceeded, broken_);
      if (const int peer = first_departed_of_missing(); peer >= 0) {
        withdraw(rank);
        throw Error(ErrorCode::peer_failed, departure_text(peer) + " while rank " +
                                                std::to_string(rank) + " waited for " + what);
      }
      if (SteadyClock::now() >= deadline) {
        break_group(rank, what, deadline_s);
        throw Error(ErrorCode::deadline_exceeded, broken_);
      }
      // The system clock, because ThreadSanitizer of GCC 12 does not know waits on the steady one;
      // short waits, so that a change of the system time cannot move the deadline.
      all_arrived_.wait_until(lock, std::chrono::system_clock::now() + kPollInterval);
    }
  }

  [[nodiscard]] std::string departure_text(int peer) const {
    return first_cause_text(peer, departure_[peer].reason);
  }

  /// The first to leave is the cause; others may have left because of it. -1 if all that are
  /// missing may still come.
  [[nodiscard]] int first_departed_of_missing() const {
    int first = -1;
    for (int peer = 0; peer < size(); ++peer) {
      const int order = departure_[peer].order;
      if (arrived_[peer] == 0 && order > 0 && (first < 0 || order < departure_[first].order)) {
        first = peer;
      }
    }
    return first;
  }

  void withdraw(int rank) {
    arrived_[rank] = 0;
    --num_arrived_;
  }

  void break_group(int rank, const char* what, double deadline_s) {
    std::string missing;
    for (int peer = 0; peer < size(); ++peer) {
      if (arrived_[peer] == 0) missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
    }
    broken_ = "rank " + std::to_string(rank) + " waited " + std::to_string(deadline_s) + " s for " +
              what + "; missing: rank " + missing;
    all_arrived_.notify_all();
  }

  static constexpr std::chrono::milliseconds kPollInterval{100};

  std::mutex mutex_;
  std::condition_variable all_arrived_;
  std::array<std::vector<Arrival>, 2> arrivals_;
  std::vector<char> arrived_;
  std::vector<Leave> departure_;
  int num_departures_ = 0;
  int num_arrived_ = 0;
  std::uint64_t meeting_ = 0;
  std::string broken_;  // why the group is unusable; empty while it is usable
};

/// The memory of all ranks of one allocation; freed when the last rank lets go.
struct HeapMemory {
  struct Free {
    void operator()(std::byte* block) const { std::free(block); }
  };
  using Block = std::unique_ptr<std::byte[], Free>;

  /// Zeroed lazily by the system; null where there is no memory.
  static Block allocate(std::size_t bytes) {
    return Block(static_cast<std::byte*>(std::calloc(std::max<std::size_t>(bytes, 1), 1)));
  }

  std::vector<Block> blocks;
};

class ThreadHeap final : public SymmetricHeap {
 public:
  ThreadHeap(std::shared_ptr<HeapMemory> memory, std::size_t bytes)
      : memory_(std::move(memory)), bytes_(bytes) {}
  [[nodiscard]] std::byte* peer(int rank) const override { return memory_->blocks[rank].get(); }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }

 private:
  std::shared_ptr<HeapMemory> memory_;
  std::size_t bytes_;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}
  ~ThreadCommunicator() override { group_->depart(rank_, "its communicator was destroyed"); }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return group_->size(); }

  void barrier(const char* what, double deadline_s) override {
    group_->meet(rank_, nullptr, meeting_purpose(Kind::barrier, 0, what), deadline_s);
  }

  void all_gather(const void* mine, void* all, std::size_t bytes, const char* what,
                  double deadline_s) override {
    const MeetingPurpose purpose = meeting_purpose(Kind::all_gather, bytes, what);
    const auto& arrivals = group_->meet(rank_, const_cast<void*>(mine), purpose, deadline_s);
    for (int peer = 0; peer < size(); ++peer) {
      if (bytes > 0) {
        std::memcpy(static_cast<std::byte*>(all) + peer * bytes, arrivals[peer].pointer, bytes);
      }
    }
    group_->meet(rank_, nullptr, purpose,
                 deadline_s);  // nobody reuses `mine` while a peer reads it
  }

  void all_reduce_sum(float* values, std::size_t count, const char* what,
                      double deadline_s) override {
    const MeetingPurpose purpose = meeting_purpose(Kind::all_reduce, count * sizeof(float), what);
    const auto& arrivals = group_->meet(rank_, values, purpose, deadline_s);
    // Each rank sums its share of the elements for everybody: only it touches them between the
    // meetings.
    const std::size_t begin = count * rank_ / size();
    const std::size_t end = count * (rank_ + 1) / size();
    for (std::size_t i = begin; i < end; ++i) {
      float sum = static_cast<const float*>(arrivals[0].pointer)[i];
      for (int peer = 1; peer < size(); ++peer) {
        sum += static_cast<const float*>(arrivals[peer].pointer)[i];
      }
      for (int peer = 0; peer < size(); ++peer)
        static_cast<float*>(arrivals[peer].pointer)[i] = sum;
    }
    group_->meet(rank_, nullptr, purpose, deadline_s);
  }

  std::unique_ptr<SymmetricHeap> allocate_symmetric(std::size_t bytes, double deadline_s) override {
    const MeetingPurpose purpose =
        meeting_purpose(Kind::allocation, bytes, "the allocation of a symmetric heap");
    HeapMemory::Block block = HeapMemory::allocate(bytes);
    std::shared_ptr<HeapMemory> memory;
    if (rank_ == 0) {
      memory = std::make_shared<HeapMemory>();
      memory->blocks.resize(size());
    }
    const auto& arrivals = group_->meet(rank_, &memory, purpose, deadline_s);
    if (rank_ != 0) memory = *static_cast<std::shared_ptr<HeapMemory>*>(arrivals[0].pointer);
    memory->blocks[rank_] = std::move(block);
    group_->meet(rank_, nullptr, purpose, deadline_s);
    for (int peer = 0; peer < size(); ++peer) {
      if (memory->blocks[peer] == nullptr) {
        throw Error(ErrorCode::out_of_memory, "rank " + std::to_string(peer) +
                                                  " could not allocate a symmetric heap of " +
                                                  std::to_string(bytes) + " bytes");
      }
    }
    return std::make_unique<ThreadHeap>(std::move(memory), bytes);
  }

  [[nodiscard]] std::vector<Departure> departures() const override {
    return group_->departures(rank_);
  }
  void abort(const std::string& reason) noexcept override { group_->depart(rank_, reason); }

 private:
  using Kind = MeetingPurpose::Kind;

  std::shared_ptr<ThreadGroup> group_;
  int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int num_ranks) {
  if (num_ranks < 1) {
    throw Error(ErrorCode::invalid_argument,
                "num_ranks is " + std::to_string(num_ranks) + ", must be at least 1");
  }
  const auto group = std::make_shared<ThreadGroup>(num_ranks);
  std::vector<std::unique_ptr<Communicator>> communicators;
  communicators.reserve(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    communicators.push_back(std::make_unique<ThreadCommunicator>(group, rank));
  }
  return communicators;
}

}  // namespace megamoe
