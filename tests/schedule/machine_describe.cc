// What a machine looks like: to a search, which must know states again, and to people.
#include <string>

#include "schedule/machine.h"

namespace megamoe::checker {
namespace {

class Mixer {
 public:
  void operator()(std::uint64_t word) {
    first_ = (first_ ^ word) * 0x9e3779b97f4a7c15ULL;
    first_ ^= first_ >> 29;
    second_ = (second_ + word) * 0xbf58476d1ce4e5b9ULL;
    second_ ^= second_ >> 31;
  }
  [[nodiscard]] Machine::Fingerprint result() const { return {first_, second_}; }

 private:
  std::uint64_t first_ = 1;
  std::uint64_t second_ = 2;
};

const char* verb(OpKind kind) {
  switch (kind) {
    case OpKind::read:
      return "reads";
    case OpKind::write:
      return "writes";
    case OpKind::fence:
      return "fences";
    case OpKind::fence_shared:
      return "fences shared memory";
    case OpKind::load_read:
      return "loads from";
    case OpKind::load_write:
      return "loads into";
    case OpKind::store:
      return "stores in bulk from";
    case OpKind::group_read:
      return "multiplies";
    case OpKind::commit:
      return "commits its group";
    case OpKind::wait_complete:
      return "waits until so many groups are incomplete:";
    case OpKind::wait_read:
      return "waits until so many groups still read:";
    case OpKind::arrive:
      return "arrives on barrier";
    case OpKind::arrive_expecting:
      return "arrives, expecting loads, on barrier";
    case OpKind::await_barrier:
      return "awaits barrier";
    case OpKind::start_counter:
      return "starts counter";
    case OpKind::add:
      return "adds to counter";
    case OpKind::await_counter:
      return "awaits counter";
    case OpKind::look:
      return "looks at counter";
    case OpKind::look_at_all:
      return "looks at the counter of all";
    case OpKind::fence_looks:
      return "fences what it saw arrive";
    case OpKind::take:
      return "takes from counter";
    case OpKind::take_or_leave:
      return "takes, unless its CTA is done, from counter";
    case OpKind::read_counter:
      return "reads counter";
    case OpKind::poll_later:
      return "will look for all ranks' signals from";
    case OpKind::poll_signals:
      return "looks for all ranks' signals from";
    case OpKind::begin_call:
      return "begins call";
    case OpKind::send_signal:
      return "sends signal";
    case OpKind::await_signal:
      return "awaits signal";
    case OpKind::judge_header:
      return "judges";
    case OpKind::end_if_failed:
      return "ends if the call has failed";
    case OpKind::expand:
      return "goes on";
  }
  return "";
}

}  // namespace

Machine::Fingerprint Machine::fingerprint() const {
  Mixer mix;
  const auto mix_stamp = [&](const Stamp& stamp) {
    mix(static_cast<std::uint64_t>(stamp.rank) << 32 | stamp.kernel);
    // How far within a kernel that has ended makes no difference.
    if (stamp.kernel < ranks_[stamp.rank].first_unknown) return;
    mix(static_cast<std::uint64_t>(stamp.timeline) << 32 | stamp.time);
  };
  const auto mix_clock = [&](const Clock& clock) {
    mix(clock.is_unset() ? 3 : 4);
    clock.visit([&](std::uint64_t word) { mix(word); });
  };
  for (const Rank& rank : ranks_) {
    mix(rank.kernel_idx);
    mix(static_cast<std::uint64_t>(rank.control.epoch) * 4 + (rank.control.call_failed ? 2 : 0) +
        (rank.control.failed_for_good ? 1 : 0));
    mix(rank.beside ? 1 : 0);
    for (const bool is_admitted : rank.is_admitted) mix(is_admitted ? 1 : 0);
    mix_clock(rank.stream);
    for (const Agent& agent : rank.agents) {
      mix(static_cast<std::uint64_t>(agent.next) << 32 | agent.next_more);
      mix((agent.has_ended ? 1U : 0U) + (agent.stays ? 2U : 0U) + (agent.stays_to_poll ? 4U : 0U) +
          (agent.leaves_poll ? 8U : 0U) + (agent.looked_in_vain ? 16U : 0U));
      const Registers& r = agent.registers;
      mix(static_cast<std::uint64_t>(r.taken) << 32 | static_cast<std::uint32_t>(r.ahead));
      mix(static_cast<std::uint64_t>(r.num_taken) << 32 | r.num_chunks);
      mix(static_cast<std::uint64_t>(r.pending_chunk) << 32 ^
          static_cast<std::uint64_t>(r.stored_chunk));
      mix(static_cast<std::uint64_t>(agent.shared_fence_time) << 32 | r.num_parts);
      mix(r.looks * 4U + (r.saw_all ? 2U : 0U) + (r.fenced_all ? 1U : 0U));
      mix_clock(agent.seen);
      mix_clock(agent.fenced);
    }
  }
  for (const Barrier& barrier : hardware_.barriers) {
    mix(static_cast<std::uint64_t>(barrier.phase) << 32 | barrier.num_arrived << 16 |
        static_cast<std::uint16_t>(barrier.num_loads));
    mix_clock(barrier.arriving);
    mix_clock(barrier.completed);
  }
  for (const Counter& counter : hardware_.counters) {
    mix(counter.value);
    mix_stamp(counter.started);
    // Who still looks at it knows the kernels that have ended.
    if (counter.kernel >= ranks_[counter.rank].first_unknown) mix_clock(counter.released);
  }
  for (const SignalWord& signal : hardware_.signals) {
    mix(signal.epoch * 2U + (signal.sender_failed ? 1U : 0U));
    mix_clock(signal.released);
  }
  for (const Datum& datum : hardware_.memory.data()) {
    mix(datum.tag);
    mix_stamp(datum.write);
    mix(datum.fence_time != 0 ? 1 : 0);
    // In any order; any number of reads by a kernel that has ended is like one.
    std::uint64_t sum = 0;
    std::uint64_t last = 0;
    for (const Stamp& read : datum.reads) {
      Mixer of_read;
      of_read(static_cast<std::uint64_t>(read.rank) << 32 | read.kernel);
      const bool has_ended = read.kernel < ranks_[read.rank].first_unknown;
      if (!has_ended) of_read(static_cast<std::uint64_t>(read.timeline) << 32 | read.time);
      const std::uint64_t word = of_read.result().first;
      if (!has_ended || word != last) sum += word;
      if (has_ended) last = word;
    }
    mix(sum);
  }
  return mix.result();
}

std::string Machine::name_of(AgentId id) const {
  const Rank& rank = ranks_[id.rank];
  const Agent& agent = rank.agents[id.agent];
  const Kernel& kernel = agent.kernel == rank.kernel_idx ? *rank.kernel : *rank.beside;
  return "rank " + std::to_string(id.rank) + " " + kernel.name + " (" +
         std::to_string(agent.kernel) + ") cta " + std::to_string(agent.cta) + " " +
         agent.program->role;
}

std::string Machine::describe(const Op& op) const {
  std::string text = verb(op.kind);
  const Memory& memory = hardware_.memory;
  switch (op.kind) {
    case OpKind::read:
    case OpKind::write:
    case OpKind::load_read:
    case OpKind::load_write:
    case OpKind::group_read:
    case OpKind::judge_header:
      return text + " " + memory.describe(op.object);
    case OpKind::store:
      return text + " " + memory.describe(op.object) + " to " + memory.describe(op.other);
    case OpKind::wait_complete:
    case OpKind::wait_read:
    case OpKind::begin_call:
      return text + " " + std::to_string(op.amount);
    case OpKind::await_barrier:
      return text + " " + std::to_string(op.object) + ", phase " + std::to_string(op.amount) +
             ", now in " + std::to_string(hardware_.barriers[op.object].phase);
    case OpKind::await_counter:
      return text + " " + std::to_string(op.object) + " of rank " +
             std::to_string(hardware_.counters[op.object].rank) + " to be " +
             std::to_string(op.amount) + ", now " +
             std::to_string(hardware_.counters[op.object].value);
    case OpKind::await_signal:
      return text + " " + std::to_string(op.object) + " of epoch " + std::to_string(op.amount) +
             ", now " + std::to_string(hardware_.signals[op.object].epoch);
    case OpKind::poll_later:
    case OpKind::poll_signals:
      return text + " " + std::to_string(op.object) + " on, of epoch " + std::to_string(op.amount);
    case OpKind::arrive:
    case OpKind::arrive_expecting:
    case OpKind::start_counter:
    case OpKind::add:
    case OpKind::look:
    case OpKind::look_at_all:
    case OpKind::take:
    case OpKind::take_or_leave:
    case OpKind::read_counter:
    case OpKind::send_signal:
      return text + " " + std::to_string(op.object);
    default:
      return text;
  }
}

std::string Machine::describe_step(AgentId id) const {
  const Op* op = next_op(ranks_[id.rank].agents[id.agent]);
  return name_of(id) + " " + (op == nullptr ? "ends" : describe(*op));
}

std::string Machine::describe_waits() const {
  constexpr int kMost = 24;
  std::string text;
  int count = 0;
  for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    for (std::uint32_t i = 0; i < ranks_[rank].agents.size(); ++i) {
      if (ranks_[rank].agents[i].has_ended || ++count > kMost) continue;
      text += "  " + describe_step({rank, i}) + "\n";
    }
  }
  return text;
}

}  // namespace megamoe::checker
