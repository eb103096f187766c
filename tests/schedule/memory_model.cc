#include "schedule/memory_model.h"

#include <algorithm>

namespace megamoe::checker {
namespace {

constexpr std::uint64_t kTimelineBits = 24;

bool same_agent(const Stamp& a, const Stamp& b) {
  return a.rank == b.rank && a.kernel == b.kernel &&
         a.timeline / kTimelinesAnAgent == b.timeline / kTimelinesAnAgent;
}

std::string at(const Stamp& stamp) {
  return "rank " + std::to_string(stamp.rank) + " kernel " + std::to_string(stamp.kernel) +
         " agent " + std::to_string(stamp.timeline / kTimelinesAnAgent);
}

}  // namespace

bool Clock::knows(const Stamp& stamp) const {
  if (stamp.time == 0) return true;
  if (stamp.kernel < ended_R_[stamp.rank]) return true;
  const std::uint64_t key = key_of(stamp);
  const auto place = std::lower_bound(points_.begin(), points_.end(), key,
                                      [](const auto& point, auto k) { return point.first < k; });
  return place != points_.end() && place->first == key && place->second >= stamp.time;
}

bool Clock::knows_of(std::uint32_t rank, std::uint32_t kernel) const {
  if (knows_end(rank, kernel)) return true;
  const std::uint64_t key = key_of({rank, kernel, 0, 0});
  const auto place = std::lower_bound(points_.begin(), points_.end(), key,
                                      [](const auto& point, auto k) { return point.first < k; });
  return place != points_.end() && place->first >> kTimelineBits == key >> kTimelineBits;
}

void Clock::learn(const Stamp& stamp) {
  if (stamp.time == 0 || stamp.kernel < ended_R_[stamp.rank]) return;
  const std::uint64_t key = key_of(stamp);
  const auto place = std::lower_bound(points_.begin(), points_.end(), key,
                                      [](const auto& point, auto k) { return point.first < k; });
  if (place != points_.end() && place->first == key) {
    place->second = std::max(place->second, stamp.time);
  } else {
    points_.insert(place, {key, stamp.time});
  }
}

void Clock::learn_kernels(std::uint32_t rank, std::uint32_t num_ended) {
  if (ended_R_[rank] >= num_ended) return;
  ended_R_[rank] = num_ended;
  forget_ended();
}

void Clock::join(const Clock& other) {
  if (other.is_unset()) return;
  if (is_unset()) {
    *this = other;
    return;
  }
  bool grew = false;
  for (std::size_t rank = 0; rank < ended_R_.size(); ++rank) {
    if (other.ended_R_[rank] <= ended_R_[rank]) continue;
    ended_R_[rank] = other.ended_R_[rank];
    grew = true;
  }
  if (!other.points_.empty()) {
    std::vector<std::pair<std::uint64_t, std::uint32_t>> merged;
    merged.reserve(points_.size() + other.points_.size());
    auto a = points_.begin();
    auto b = other.points_.begin();
    while (a != points_.end() || b != other.points_.end()) {
      if (b == other.points_.end() || (a != points_.end() && a->first < b->first)) {
        merged.push_back(*a++);
      } else if (a == points_.end() || b->first < a->first) {
        merged.push_back(*b++);
      } else {
        merged.emplace_back(a->first, std::max(a->second, b->second));
        ++a;
        ++b;
      }
    }
    points_ = std::move(merged);
    grew = true;
  }
  if (grew) forget_ended();
}

void Clock::forget_ended() {
  std::erase_if(points_, [&](const auto& point) {
    const auto rank = static_cast<std::size_t>(point.first >> 48);
    const auto kernel = static_cast<std::uint32_t>(point.first >> kTimelineBits & 0xffffffU);
    return kernel < ended_R_[rank];
  });
}

DatumId Memory::add_array(std::string name, Space space, std::uint32_t rank, std::uint32_t count,
                          Fences fences) {
  const auto first = static_cast<DatumId>(data_.size());
  arrays_.push_back({std::move(name), rank, first});
  data_.resize(data_.size() + count);
  space_.resize(data_.size(), space);
  fences_.resize(data_.size(), fences);
  return first;
}

const Memory::Array& Memory::array_of(DatumId id) const {
  const auto next = std::upper_bound(arrays_.begin(), arrays_.end(), id,
                                     [](DatumId i, const Array& array) { return i < array.first; });
  return *std::prev(next);
}

std::string Memory::describe(DatumId id) const {
  const Array& array = array_of(id);
  return array.name + "[" + std::to_string(id - array.first) + "] of rank " +
         std::to_string(array.rank);
}

void Memory::check_visible(DatumId id, const Access& access, Proxy proxy) const {
  const Datum& datum = data_[id];
  if (!access.seen->knows(datum.write)) {
    throw Violation(describe(id) + " is read before its write by " + at(datum.write) +
                    " is visible");
  }
  if (proxy == Proxy::generic) return;
  if (datum.proxy == Proxy::generic && fences_[id] == Fences::writer_and_reader) {
    Stamp fence = datum.write;
    fence.time = datum.fence_time;
    if (datum.fence_time == 0 || !access.seen->knows(fence)) {
      throw Violation(describe(id) + " is read by a copy, but its writer, " + at(datum.write) +
                      ", has published it without a proxy fence");
    }
  }
  if (space_[id] == Space::shared) return;
  if (datum.proxy == Proxy::async && datum.write_cta == access.cta) return;
  if (!access.fenced->knows(datum.write)) {
    throw Violation(describe(id) + " is read by a copy without a proxy fence since the write by " +
                    at(datum.write) + " became known");
  }
}

void Memory::read(DatumId id, const Access& access, Proxy proxy, std::uint64_t tag,
                  const Stamp& stamp) {
  Datum& datum = data_[id];
  if (datum.tag == 0) throw Violation(describe(id) + " is read but was never written");
  check_visible(id, access, proxy);
  if (tag != kAnyTag && datum.tag != tag) {
    throw Violation(describe(id) + " holds something else than its reader expects (stale, or of " +
                    "another call)");
  }
  // Who knows of this read knows the kernels that the reader knows to have ended. Of the many
  // readers of a large problem their reads are dropped when there is no place for more; a search,
  // which compares states, has few.
  constexpr std::size_t kFewReads = 64;
  if (datum.reads.size() < kFewReads || datum.reads.size() == datum.reads.capacity()) {
    std::erase_if(datum.reads, [&](const Stamp& read) {
      if (read.rank != stamp.rank) return false;
      return access.seen->knows_end(read.rank, read.kernel) ||
             (read.kernel == stamp.kernel && read.timeline == stamp.timeline);
    });
  }
  datum.reads.push_back(stamp);
}

/// Whether what was read at `read` may be overwritten at `write`.
void Memory::check_read(DatumId id, const Stamp& read, const Access& access, Proxy proxy,
                        const Stamp& write) const {
  if (!access.seen->knows(read)) {
    throw Violation(describe(id) + " is overwritten while " + at(read) + " may still read it");
  }
  const bool is_ordinary = read.timeline % kTimelinesAnAgent == kOwn;
  if (space_[id] == Space::global || proxy == Proxy::generic || !is_ordinary) return;
  if (same_agent(read, write) && read.time < access.shared_fence_time) return;
  throw Violation(describe(id) + " is overwritten by a copy without a proxy fence since " +
                  at(read) + " read it");
}

void Memory::write(DatumId id, const Access& access, Proxy proxy, std::uint64_t tag,
                   const Stamp& stamp) {
  Datum& datum = data_[id];
  if (datum.tag == tag && space_[id] == Space::global) {
    throw Violation(describe(id) + " is written twice");
  }
  if (datum.tag != 0 && !access.seen->knows(datum.write)) {
    throw Violation(describe(id) + " is overwritten while the write by " + at(datum.write) +
                    " may still be under way");
  }
  for (const Stamp& read : datum.reads) check_read(id, read, access, proxy, stamp);
  datum.tag = tag;
  datum.write = stamp;
  datum.write_cta = access.cta;
  datum.fence_time = 0;
  datum.proxy = proxy;
  datum.reads.clear();
}

void Memory::forget(DatumId first, std::uint32_t count) {
  std::fill_n(data_.begin() + first, count, Datum{});
}

void Memory::fence(DatumId id, const Stamp& writer, std::uint32_t time) {
  Datum& datum = data_[id];
  if (same_agent(datum.write, writer) && datum.fence_time == 0) datum.fence_time = time;
}

}  // namespace megamoe::checker
