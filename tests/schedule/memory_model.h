// What the checker knows about memory: who wrote and read each datum last, and who may know of it.
//
// Legend: R ranks.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace megamoe::checker {

/// Something went wrong; `what()` says it in one line.
class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An agent's timelines. Its copies have timelines of their own, because they are complete only once
// the agent, or who waits on their barrier, has waited for them.
//
// Of the agent's ordinary accesses and fences,
inline constexpr std::uint32_t kOwn = 0;
// of bulk groups, complete in memory,
inline constexpr std::uint32_t kStores = 1;
// of bulk groups and of wgmma's, done with what they read,
inline constexpr std::uint32_t kGroupReads = 2;
// of loads, one timeline for each barrier that they complete on.
inline constexpr std::uint32_t kLoads = 3;
inline constexpr std::uint32_t kTimelinesAnAgent = 20;

/// A point on a timeline of an agent of a kernel.
struct Stamp {
  std::uint32_t rank = 0;
  std::uint32_t kernel = 0;  ///< of the rank's stream, from 0
  std::uint32_t timeline = 0;
  std::uint32_t time = 0;  ///< from 1; 0: before everything
  bool operator==(const Stamp&) const = default;
};

/// Which points somebody knows to be past: a vector clock. Kernels that have ended are known whole.
class Clock {
 public:
  Clock() = default;
  explicit Clock(std::uint32_t num_ranks) : ended_R_(num_ranks, 0) {}

  [[nodiscard]] bool knows(const Stamp& stamp) const;
  [[nodiscard]] bool knows_end(std::uint32_t rank, std::uint32_t kernel) const {
    return kernel < ended_R_[rank];
  }
  /// Whether it knows anything of the kernel.
  [[nodiscard]] bool knows_of(std::uint32_t rank, std::uint32_t kernel) const;
  void learn(const Stamp& stamp);
  void learn_kernels(std::uint32_t rank, std::uint32_t num_ended);
  void join(const Clock& other);
  [[nodiscard]] bool is_unset() const { return ended_R_.empty(); }
  void clear_points() { points_.clear(); }

  /// Calls visit(word) for everything that distinguishes this clock.
  template <class Visit>
  void visit(const Visit& visit) const {
    for (const std::uint32_t ended : ended_R_) visit(ended);
    for (const auto& [key, time] : points_) {
      visit(key);
      visit(time);
    }
  }

 private:
  static std::uint64_t key_of(const Stamp& stamp) {
    return static_cast<std::uint64_t>(stamp.rank) << 48 |
           static_cast<std::uint64_t>(stamp.kernel) << 24 | stamp.timeline;
  }
  void forget_ended();

  std::vector<std::uint32_t> ended_R_;  ///< how many kernels of each rank have ended
  /// Points in kernels that may still run, by key.
  std::vector<std::pair<std::uint64_t, std::uint32_t>> points_;
};

enum class Proxy : std::uint8_t { generic, async };
enum class Space : std::uint8_t { global, shared };
/// Who fences between an ordinary store and a copy that reads it.
enum class Fences : std::uint8_t { writer_and_reader, reader };

using DatumId = std::uint32_t;

/// A reader that takes what it finds.
inline constexpr std::uint64_t kAnyTag = ~std::uint64_t{0};

/// Who accesses, and what it knows.
struct Access {
  std::uint32_t cta = 0;  ///< unique over all ranks
  std::uint32_t rank = 0;
  const Clock* seen = nullptr;          ///< what happened before
  const Clock* fenced = nullptr;        ///< and what of it the agent's copies may read
  std::uint32_t shared_fence_time = 0;  ///< of the agent's last fence of shared memory
};

/// One unit of memory, as large as what one store writes and no larger.
struct Datum {
  std::uint64_t tag = 0;  ///< what it holds; 0: nothing yet
  Stamp write;
  std::uint32_t write_cta = 0;
  std::uint32_t fence_time = 0;  ///< when the writer's proxy fence followed; 0: not yet
  Proxy proxy = Proxy::generic;
  std::vector<Stamp> reads;  ///< since the write
};

/// Every datum of every rank, in named arrays.
class Memory {
 public:
  /// An array of `count` data; returns the first.
  DatumId add_array(std::string name, Space space, std::uint32_t rank, std::uint32_t count,
                    Fences fences = Fences::writer_and_reader);

  /// Checks that `access` may read `tag` there, and notes the read at `stamp`.
  void read(DatumId id, const Access& access, Proxy proxy, std::uint64_t tag, const Stamp& stamp);
  /// Checks that nobody else still writes or reads it, and that the tag is new.
  void write(DatumId id, const Access& access, Proxy proxy, std::uint64_t tag, const Stamp& stamp);
  /// Nothing is known of what `count` data from `first` on hold.
  void forget(DatumId first, std::uint32_t count);
  /// The writer has fenced at `time`.
  void fence(DatumId id, const Stamp& writer, std::uint32_t time);

  [[nodiscard]] std::uint64_t tag(DatumId id) const { return data_[id].tag; }
  [[nodiscard]] const std::vector<Datum>& data() const { return data_; }
  [[nodiscard]] std::string describe(DatumId id) const;

 private:
  struct Array {
    std::string name;
    std::uint32_t rank;
    DatumId first;
  };
  [[nodiscard]] const Array& array_of(DatumId id) const;
  void check_visible(DatumId id, const Access& access, Proxy proxy) const;
  void check_read(DatumId id, const Stamp& read, const Access& access, Proxy proxy,
                  const Stamp& write) const;

  std::vector<Array> arrays_;
  std::vector<Datum> data_;
  std::vector<Space> space_;
  std::vector<Fences> fences_;
};

}  // namespace megamoe::checker
