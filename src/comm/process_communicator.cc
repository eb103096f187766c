// Ranks as processes of one host: one shared control segment with arrival counters and mailboxes,
// and a segment a rank for each symmetric heap. Nothing in shared memory is a lock, so a process
// that dies cannot leave one held.
#include "comm/process_communicator.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/longest_wait.h"
#include "comm/departure.h"
#include "comm/futex.h"
#include "comm/meeting.h"
#include "comm/shared_memory.h"
#include "layer/agreement.h"
#include "megamoe/communicator.h"
#include "megamoe/error.h"

namespace megamoe {
namespace {

constexpr int kMaxRanks = 256;
constexpr std::size_t kMaxNameLength = 200;
/// Half of a rank's mailbox; larger data travels in pieces.
constexpr std::size_t kPieceBytes = std::size_t{256} << 10;

/// A rank's part of the control segment. All zero before it joins.
struct alignas(64) RankRecord {
  std::atomic<std::int32_t> process_id;
  std::atomic<std::uint64_t> num_arrivals;  ///< meetings that the rank has come to
  /// Of the last two meetings, in turn: a slow rank still reads this one's while a fast one is at
  /// the next. Written before `num_arrivals`.
  std::array<MeetingPurpose, 2> purposes;
  std::atomic<std::int32_t> departure;  ///< lowest for the first that left, 0 while it takes part
  std::array<char, 256> departure_reason;  ///< written before `departure`; empty for a death
};

struct Control {
  std::atomic<std::int32_t> num_ranks;
  std::atomic<std::int32_t> num_departures;
  std::atomic<std::uint32_t> news;     ///< futex word: grows with every arrival and departure
  std::atomic<std::int32_t> breaking;  ///< claimed by the first rank that missed a deadline
  std::atomic<std::int32_t> broken;    ///< set once `broken_reason` is written
  std::array<char, 512> broken_reason;
  std::array<RankRecord, kMaxRanks> ranks;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

void copy_text(const std::string& text, char* out, std::size_t size) {
  const std::size_t length = std::min(text.size(), size - 1);
  std::memcpy(out, text.data(), length);
  out[length] = '\0';
}

/// Tells whether a process still runs; a zombie does not.
class ProcessWatch {
 public:
  explicit ProcessWatch(pid_t process)
      : descriptor_(static_cast<int>(syscall(SYS_pidfd_open, process, 0))) {}
  ProcessWatch(ProcessWatch&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  ProcessWatch& operator=(ProcessWatch&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~ProcessWatch() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  [[nodiscard]] bool has_ended() const {
    if (descriptor_ < 0) return true;  // it was gone before we looked
    pollfd poll_descriptor{descriptor_, POLLIN, 0};
    return poll(&poll_descriptor, 1, 0) > 0;
  }

 private:
  int descriptor_;
};

class ProcessHeap final : public SymmetricHeap {
 public:
  ProcessHeap(std::vector<SharedMemory> blocks, std::size_t bytes)
      : blocks_(std::move(blocks)), bytes_(bytes) {}
  [[nodiscard]] std::byte* peer(int rank) const override { return blocks_[rank].data(); }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }

 private:
  std::vector<SharedMemory> blocks_;
  std::size_t bytes_;
};

class ProcessCommunicator final : public Communicator {
 public:
  ProcessCommunicator(const std::string& name, int rank, int num_ranks, double deadline_s,
                      const std::function<void()>& check_peers)
      : prefix_("/megamoe." + name),
        rank_(rank),
        num_ranks_(num_ranks),
        memory_(
            SharedMemory::open_or_create(prefix_, sizeof(Control) + num_ranks * 2 * kPieceBytes)),
        control_(*reinterpret_cast<Control*>(memory_.data())) {
    join();
    try {
      meet(meeting_purpose(Kind::barrier, 0, "the other processes of the group"), deadline_s,
           check_peers);
    } catch (const Error& error) {
      depart(error.what());
      SharedMemory::unlink(prefix_);
      throw;
    }
    // Only now: a late process must still find the name.
    if (rank_ == 0) SharedMemory::unlink(prefix_);
    for (int peer = 0; peer < num_ranks_; ++peer) {
      watches_.emplace_back(control_.ranks[peer].process_id.load());
    }
  }

  ~ProcessCommunicator() override { depart("its communicator was destroyed"); }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return num_ranks_; }

  void barrier(const char* what, double deadline_s) override {
    meet(meeting_purpose(Kind::barrier, 0, what), deadline_s);
  }

  void all_gather(const void* mine, void* all, std::size_t bytes, const char* what,
                  double deadline_s) override {
    const MeetingPurpose purpose = meeting_purpose(Kind::all_gather, bytes, what);
    std::size_t offset = 0;
    do {
      const std::size_t piece = std::min(kPieceBytes, bytes - offset);
      exchange(static_cast<const std::byte*>(mine) + offset, piece, purpose, deadline_s);
      for (int peer = 0; peer < num_ranks_; ++peer) {
        if (piece == 0) continue;
        std::memcpy(static_cast<std::byte*>(all) + peer * bytes + offset,
                    mailbox(peer, num_meetings_), piece);
      }
      offset += piece;
    } while (offset < bytes);
  }

  void all_reduce_sum(float* values, std::size_t count, const char* what,
                      double deadline_s) override {
    const MeetingPurpose purpose = meeting_purpose(Kind::all_reduce, count * sizeof(float), what);
    constexpr std::size_t kPieceFloats = kPieceBytes / sizeof(float);
    for (std::size_t begin = 0; begin < count; begin += kPieceFloats) {
      const std::size_t piece = std::min(kPieceFloats, count - begin);
      exchange(values + begin, piece * sizeof(float), purpose, deadline_s);
      for (std::size_t i = 0; i < piece; ++i) {
        float sum = reinterpret_cast<const float*>(mailbox(0, num_meetings_))[i];
        for (int peer = 1; peer < num_ranks_; ++peer) {
          sum += reinterpret_cast<const float*>(mailbox(peer, num_meetings_))[i];
        }
        values[begin + i] = sum;
      }
    }
  }

  std::unique_ptr<SymmetricHeap> allocate_symmetric(std::size_t bytes, double deadline_s) override {
    constexpr const char* kWhat = "the allocation of a symmetric heap";
    meet(meeting_purpose(Kind::allocation, bytes, kWhat),
         deadline_s);  // before the heap is counted
    const std::string heap = prefix_ + ".heap" + std::to_string(num_heaps_++) + ".";
    std::vector<SharedMemory> blocks(num_ranks_);
    const std::size_t mapped_bytes = std::max<std::size_t>(bytes, 1);
    const auto name_of = [&](int peer) { return heap + std::to_string(peer); };
    const auto agree = [&](const LocalOutcome& mine) {
      std::vector<LocalOutcome> outcomes(num_ranks_);
      all_gather(&mine, outcomes.data(), sizeof(mine), kWhat, deadline_s);
      for (int peer = 0; peer < num_ranks_; ++peer) throw_if_failed(outcomes[peer], peer, -1);
    };
    try {
      agree(outcome_of(
          [&] { blocks[rank_] = SharedMemory::open_or_create(name_of(rank_), mapped_bytes); }));
      agree(outcome_of([&] {
        for (int peer = 0; peer < num_ranks_; ++peer) {
          if (peer != rank_) blocks[peer] = SharedMemory::open(name_of(peer), mapped_bytes);
        }
      }));
    } catch (...) {
      SharedMemory::unlink(name_of(rank_));
      throw;
    }
    SharedMemory::unlink(name_of(rank_));  // mapped by all: nothing stays behind when processes die
    return std::make_unique<ProcessHeap>(std::move(blocks), bytes);
  }

  [[nodiscard]] std::vector<Departure> departures() const override {
    const std::string broken =
        control_.broken.load() != 0 ? control_.broken_reason.data() : std::string();
    return departures_of_peers(
        rank_, num_ranks_, broken, [&](int peer) { return departure_of(peer); },
        [&](int peer) { return departure_text(peer); });
  }
  void abort(const std::string& reason) noexcept override { depart(reason); }

 private:
  using SteadyClock = std::chrono::steady_clock;
  using Kind = MeetingPurpose::Kind;

  void join() {
    std::int32_t expected = 0;
    if (!control_.num_ranks.compare_exchange_strong(expected, num_ranks_) &&
        expected != num_ranks_) {
      throw Error(ErrorCode::config_mismatch,
                  "group " + prefix_ + " has " + std::to_string(expected) +
                      " ranks, this process was told " + std::to_string(num_ranks_));
    }
    std::int32_t nobody = 0;
    if (!control_.ranks[rank_].process_id.compare_exchange_strong(nobody, getpid())) {
      throw Error(ErrorCode::invalid_argument, "rank " + std::to_string(rank_) + " of group " +
                                                   prefix_ + " has joined already, as process " +
                                                   std::to_string(nobody) +
                                                   "; give every group a name of its own");
    }
  }

  /// Two halves in turn. A piece is overwritten two meetings later, and everybody comes to the
  /// meeting between only after having read it: one meeting a piece is enough.
  std::byte* mailbox(int rank, std::uint64_t meeting) const {
    return memory_.data() + sizeof(Control) + (2 * rank + meeting % 2) * kPieceBytes;
  }

  void exchange(const void* piece, std::size_t bytes, const MeetingPurpose& purpose,
                double deadline_s) {
    if (bytes > 0) std::memcpy(mailbox(rank_, num_meetings_ + 1), piece, bytes);
    meet(purpose, deadline_s);
  }

  /// `check_peers` may throw.
  void meet(
      const MeetingPurpose& purpose, double deadline_s,
      const std::function<void()>& check_peers = [] {}) {
    throw_if_broken();
    const auto limit = std::chrono::duration<double>(std::min(deadline_s, kLongestWaitS));
    const auto deadline =
        SteadyClock::now() + std::chrono::duration_cast<SteadyClock::duration>(limit);
    const std::uint64_t meeting = ++num_meetings_;
    RankRecord& own = control_.ranks[rank_];
    own.purposes[meeting % 2] = purpose;
    own.num_arrivals.store(meeting);
    const char* what = purpose.what.data();
    add_and_wake(control_.news);
    for (;;) {
      const std::uint32_t seen = control_.news.load();
      if (all_have_arrived(meeting)) break;
      throw_if_departed(meeting, what);
      throw_if_broken();
      check_peers();
      if (SteadyClock::now() >= deadline) break_group(meeting, what, deadline_s);
      wait_while(control_.news, seen, kPollInterval);
    }
    throw_if_purposes_differ(num_ranks_, [&](int peer) -> const MeetingPurpose& {
      return control_.ranks[peer].purposes[meeting % 2];
    });
  }

  [[nodiscard]] bool is_missing(int peer, std::uint64_t meeting) const {
    return control_.ranks[peer].num_arrivals.load() < meeting;
  }

  [[nodiscard]] bool all_have_arrived(std::uint64_t meeting) const {
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (is_missing(peer, meeting)) return false;
    }
    return true;
  }

  void throw_if_broken() const {
    if (control_.broken.load() != 0) {
      throw Error(ErrorCode::deadline_exceeded, control_.broken_reason.data());
    }
  }

  /// Of the ranks that will not come, names the one that left first: others may have left because
  /// of it.
  void throw_if_departed(std::uint64_t meeting, const char* what) const {
    int first = -1;
    std::int32_t first_order = std::numeric_limits<std::int32_t>::max();
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (!is_missing(peer, meeting)) continue;
      const std::int32_t order = departure_of(peer);
      if (order > 0 && order < first_order) {
        first = peer;
        first_order = order;
      }
    }
    // A peer may have arrived and left while we looked: what it did not come to is what counts.
    if (first < 0 || !is_missing(first, meeting)) return;
    throw_if_broken();  // ranks leave because of a missed deadline: that is the cause to name
    throw Error(ErrorCode::peer_failed, departure_text(first) + " while rank " +
                                            std::to_string(rank_) + " waited for " + what);
  }

  [[nodiscard]] std::string departure_text(int peer) const {
    const char* reason = control_.ranks[peer].departure_reason.data();
    if (*reason == '\0') reason = "its process has ended without a word";
    return first_cause_text(peer, reason);
  }

  /// The order in which a rank left; 0 while it takes part. Who first sees that a process has died
  /// gives it its place, before all that leave because of it.
  [[nodiscard]] std::int32_t departure_of(int peer) const {
    RankRecord& record = control_.ranks[peer];
    const bool died = peer < static_cast<int>(watches_.size()) && watches_[peer].has_ended();
    std::int32_t order = record.departure.load();
    if (order > 0 || !died) return order;
    const std::int32_t next = control_.num_departures.fetch_add(1) + 1;
    return record.departure.compare_exchange_strong(order, next) ? next : order;
  }

  [[noreturn]] void break_group(std::uint64_t meeting, const char* what, double deadline_s) {
    std::string missing;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (is_missing(peer, meeting))
        missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
    }
    const std::string reason = "rank " + std::to_string(rank_) + " waited " +
                               std::to_string(deadline_s) + " s for " + what + "; missing: rank " +
                               missing;
    if (control_.breaking.exchange(1) == 0) {
      copy_text(reason, control_.broken_reason.data(), control_.broken_reason.size());
      control_.broken.store(1);
      add_and_wake(control_.news);
    }
    throw Error(ErrorCode::deadline_exceeded, reason);
  }

  void depart(const std::string& reason) noexcept {
    RankRecord& record = control_.ranks[rank_];
    if (record.departure.load() > 0) return;
    if (record.process_id.load() != getpid()) return;  // a forked child's copy: the rank is here
    copy_text(reason, record.departure_reason.data(), record.departure_reason.size());
    record.departure.store(control_.num_departures.fetch_add(1) + 1);
    add_and_wake(control_.news);
  }

  static constexpr std::chrono::milliseconds kPollInterval{50};

  std::string prefix_;
  int rank_;
  int num_ranks_;
  SharedMemory memory_;
  Control& control_;
  std::vector<ProcessWatch> watches_;
  std::uint64_t num_meetings_ = 0;  ///< that this rank has come to; equal on all ranks
  std::uint64_t num_heaps_ = 0;
};

void check_arguments(const std::string& name, int rank, int num_ranks) {
  const bool plain = std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
  });
  if (name.empty() || name.size() > kMaxNameLength || !plain) {
    throw Error(ErrorCode::invalid_argument, "name must be 1 to " + std::to_string(kMaxNameLength) +
                                                 " letters, digits, '.', '_' or '-', is \"" + name +
                                                 "\"");
  }
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw Error(ErrorCode::invalid_argument, "num_ranks is " + std::to_string(num_ranks) +
                                                 ", must be from 1 to " +
                                                 std::to_string(kMaxRanks));
  }
  if (rank < 0 || rank >= num_ranks) {
    throw Error(
        ErrorCode::invalid_argument,
        "rank is " + std::to_string(rank) + ", must be from 0 to " + std::to_string(num_ranks - 1));
  }
}

}  // namespace

std::unique_ptr<Communicator> make_process_communicator(const std::string& name, int rank,
                                                        int num_ranks, double deadline_s) {
  return make_process_communicator(name, rank, num_ranks, deadline_s, [] {});
}

std::unique_ptr<Communicator> make_process_communicator(const std::string& name, int rank,
                                                        int num_ranks, double deadline_s,
                                                        const std::function<void()>& check_peers) {
  check_arguments(name, rank, num_ranks);
  require_deadline("deadline_s", deadline_s);
  return std::make_unique<ProcessCommunicator>(name, rank, num_ranks, deadline_s, check_peers);
}

}  // namespace megamoe
