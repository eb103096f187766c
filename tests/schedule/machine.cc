#include "schedule/machine.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace megamoe::checker {

Machine::Machine(Hardware hardware, std::shared_ptr<const KernelSource> source)
    : hardware_(std::move(hardware)), source_(std::move(source)), ranks_(hardware_.num_ranks) {
  for (std::uint32_t rank = 0; rank < hardware_.num_ranks; ++rank) {
    ranks_[rank].stream = Clock(hardware_.num_ranks);
    start_kernel(rank);
  }
}

bool Machine::has_ended() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return !rank.kernel; });
}

/// Kernels without agents end at once.
void Machine::start_kernel(std::uint32_t rank_idx) {
  Rank& rank = ranks_[rank_idx];
  for (;; ++rank.kernel_idx) {
    rank.stream.learn_kernels(rank_idx, rank.kernel_idx);
    if (rank.beside && rank.kernel_idx == rank.beside_idx) {
      rank.kernel = std::exchange(rank.beside, nullptr);
      rank.num_running = std::exchange(rank.num_running_beside, 0);
      if (rank.num_running > 0) return;  // its agents go on as those of the stream's kernel
      for (const Agent& agent : rank.agents) rank.stream.join(agent.seen);
      rank.agents.clear();
      continue;
    }
    rank.kernel = source_->kernel(rank_idx, rank.kernel_idx, rank.control);
    if (!rank.beside) rank.first_unknown = rank.kernel_idx;
    if (!rank.kernel) return;
    if (rank.kernel->forks) start_beside(rank_idx, *rank.kernel->forks);
    if (!rank.kernel->agents.empty()) break;
  }
  std::vector<Agent> agents = new_agents(rank_idx, rank.kernel_idx, *rank.kernel);
  rank.num_running = static_cast<std::uint32_t>(agents.size());
  std::move(rank.agents.begin(), rank.agents.end(), std::back_inserter(agents));
  rank.agents = std::move(agents);
  admit(rank);
}

/// Its CTAs come after those of the kernel with which it starts.
void Machine::start_beside(std::uint32_t rank_idx, std::uint32_t kernel_idx) {
  Rank& rank = ranks_[rank_idx];
  rank.beside = source_->kernel(rank_idx, kernel_idx, rank.control);
  rank.beside_idx = kernel_idx;
  rank.agents = new_agents(rank_idx, kernel_idx, *rank.beside);
  rank.num_running_beside = static_cast<std::uint32_t>(rank.agents.size());
}

/// The kernel's agents, on CTAs that are as new.
std::vector<Machine::Agent> Machine::new_agents(std::uint32_t rank_idx, std::uint32_t kernel_idx,
                                                const Kernel& kernel) {
  Rank& rank = ranks_[rank_idx];
  const std::uint32_t num_clusters = (hardware_.ctas_per_rank + kClusterSize - 1) / kClusterSize;
  rank.agents_of_cluster.resize(num_clusters, 0);
  rank.is_admitted.resize(num_clusters, false);
  for (std::uint32_t cta = 0; cta < hardware_.ctas_per_rank; ++cta) {
    if (rank.agents_of_cluster[cta / kClusterSize] > 0) continue;
    hardware_.memory.forget(hardware_.shared_R[rank_idx] + cta * hardware_.shared_per_cta,
                            hardware_.shared_per_cta);
    const std::size_t first =
        (std::size_t{rank_idx} * hardware_.ctas_per_rank + cta) * hardware_.barriers_per_cta;
    for (std::uint32_t i = 0; i < hardware_.barriers_per_cta; ++i) {
      hardware_.barriers[first + i] = Barrier{};
      if (i < kernel.arrivals.size()) {
        hardware_.barriers[first + i].num_arrivals = kernel.arrivals[i];
      }
    }
  }
  Clock fenced(hardware_.num_ranks);
  fenced.learn_kernels(rank_idx, rank.kernel_idx);
  std::vector<Agent> agents(kernel.agents.size());
  for (std::uint32_t i = 0; i < agents.size(); ++i) {
    Agent& agent = agents[i];
    agent.kernel = kernel_idx;
    agent.number = i;
    agent.program = &kernel.agents[i];
    agent.cta = agent.program->cta;
    agent.seen = rank.stream;
    agent.fenced = fenced;
    ++rank.agents_of_cluster[agent.cta / kClusterSize];
  }
  return agents;
}

/// Clusters start in their order, as many as have room.
void Machine::admit(Rank& rank) const {
  const std::uint32_t most = std::max(1U, hardware_.resident_ctas / kClusterSize);
  for (std::size_t i = 0; i < rank.agents_of_cluster.size() && rank.num_resident < most; ++i) {
    if (rank.is_admitted[i] || rank.agents_of_cluster[i] == 0) continue;
    rank.is_admitted[i] = true;
    ++rank.num_resident;
  }
}

void Machine::end_kernel(std::uint32_t rank_idx) {
  Rank& rank = ranks_[rank_idx];
  const auto is_of_stream = [&](const Agent& agent) { return agent.kernel == rank.kernel_idx; };
  for (const Agent& agent : rank.agents) {
    if (is_of_stream(agent)) rank.stream.join(agent.seen);
  }
  std::erase_if(rank.agents, is_of_stream);
  ++rank.kernel_idx;
  start_kernel(rank_idx);
}

void Machine::end_agent(AgentId id) {
  Rank& rank = ranks_[id.rank];
  Agent& agent = rank.agents[id.agent];
  if (agent.last_store_group > agent.num_complete || agent.num_stores != 0) {
    throw Violation("the agent ends before its bulk stores are complete");
  }
  agent.has_ended = true;
  const bool is_of_stream = agent.kernel == rank.kernel_idx;
  --(is_of_stream ? rank.num_running : rank.num_running_beside);
  const std::uint32_t cluster = agent.cta / kClusterSize;
  if (--rank.agents_of_cluster[cluster] == 0) {
    rank.is_admitted[cluster] = false;
    --rank.num_resident;
    admit(rank);
  }
  if (is_of_stream && rank.num_running == 0) end_kernel(id.rank);
}

const Op* Machine::next_op(const Agent& agent) const {
  if (agent.next_more < agent.more.size()) return &agent.more[agent.next_more];
  if (agent.next < agent.program->steps.size()) return &agent.program->steps[agent.next];
  return nullptr;
}

Stamp Machine::stamp(AgentId id, const Agent& agent, std::uint32_t timeline, std::uint32_t time) {
  return {id.rank, agent.kernel, agent.number * kTimelinesAnAgent + timeline, time};
}

Access Machine::access(std::uint32_t rank, const Agent& agent) const {
  return {rank * hardware_.ctas_per_rank + agent.cta, rank, &agent.seen, &agent.fenced,
          agent.shared_fence_time};
}

void Machine::go_on(Agent& agent) {
  agent.stays = false;
  agent.looked_in_vain = false;
  if (agent.next_more < agent.more.size()) {
    ++agent.next_more;
  } else {
    ++agent.next;
  }
}

void Machine::step(AgentId id) {
  Agent& agent = ranks_[id.rank].agents[id.agent];
  const Op* next = next_op(agent);
  if (next == nullptr) {
    end_agent(id);
    return;
  }
  const Op op = *next;
  go_on(agent);
  if (op.kind == OpKind::expand) {
    agent.more.clear();
    agent.next_more = 0;
    source_->expand(id.rank, agent.kernel, agent.cta, static_cast<Does>(op.amount), agent.registers,
                    agent.more);
    return;
  }
  check_waits(id, agent, op);
  execute(id, agent, op);
}

/// What leaves the agent comes after everything that it knows of.
void Machine::check_waits(AgentId id, const Agent& agent, const Op& op) const {
  const Rank& rank = ranks_[id.rank];
  if (agent.kernel != rank.kernel_idx || rank.kernel->must_not_await.empty()) return;
  const bool leaves = op.kind == OpKind::send_signal || (op.kind == OpKind::write && op.other == 0);
  if (!leaves) return;
  for (const std::uint32_t kernel : rank.kernel->must_not_await) {
    for (std::uint32_t other = 0; other < hardware_.num_ranks; ++other) {
      if (!agent.seen.knows_of(other, kernel)) continue;
      throw Violation(describe(op) + " waits for kernel " + std::to_string(kernel) + " of rank " +
                      std::to_string(other) + ", for which it must not wait");
    }
  }
}

void Machine::execute(AgentId id, Agent& agent, const Op& op) {
  const auto own_stamp = [&] {
    const Stamp now = stamp(id, agent, kOwn, ++agent.time);
    agent.seen.learn(now);
    return now;
  };
  Memory& memory = hardware_.memory;
  switch (op.kind) {
    case OpKind::read:
    case OpKind::judge_header: {
      const bool is_bad =
          op.kind == OpKind::judge_header && (memory.tag(op.object) & kBadCall) != 0;
      memory.read(op.object, access(id.rank, agent), Proxy::generic, op.tag, own_stamp());
      if (is_bad) ranks_[id.rank].control.call_failed = true;
      break;
    }
    case OpKind::write:
      memory.write(op.object, access(id.rank, agent), Proxy::generic, op.tag, own_stamp());
      (op.other != 0 ? agent.unfenced_shared : agent.unfenced).push_back(op.object);
      break;
    case OpKind::fence:
      fence(id, agent, false);
      break;
    case OpKind::fence_shared:
      fence(id, agent, true);
      break;
    case OpKind::load_read:
    case OpKind::load_write:
      load(id, agent, op);
      break;
    case OpKind::arrive:
      arrive(hardware_.barriers[op.object], agent.seen);
      break;
    case OpKind::arrive_expecting:
      hardware_.barriers[op.object].num_loads += static_cast<std::int32_t>(op.amount);
      arrive(hardware_.barriers[op.object], agent.seen);
      break;
    case OpKind::await_barrier: {
      const Barrier& barrier = hardware_.barriers[op.object];
      if (barrier.phase != op.amount) {
        throw Violation("a wait for phase " + std::to_string(op.amount) + " of barrier " +
                        std::to_string(op.object) + " ends in phase " +
                        std::to_string(barrier.phase));
      }
      agent.seen.join(barrier.completed);
      break;
    }
    case OpKind::store:
    case OpKind::group_read:
    case OpKind::commit:
    case OpKind::wait_complete:
    case OpKind::wait_read:
      execute_group(id, agent, op);
      break;
    case OpKind::begin_call:
    case OpKind::send_signal:
    case OpKind::await_signal:
    case OpKind::poll_signals:
      execute_signal(id, agent, op);
      break;
    case OpKind::end_if_failed:
      if (ranks_[id.rank].control.call_failed) end_steps(agent);
      break;
    case OpKind::poll_later:
      break;
    default:
      execute_counter(id, agent, op);
      break;
  }
}

/// Everything known so far may be read by this agent's copies; its own writes by anybody's.
void Machine::fence(AgentId id, Agent& agent, bool shared) {
  const Stamp now = stamp(id, agent, kOwn, ++agent.time);
  agent.seen.learn(now);
  std::vector<DatumId>& unfenced = shared ? agent.unfenced_shared : agent.unfenced;
  for (const DatumId datum : unfenced) hardware_.memory.fence(datum, now, now.time);
  unfenced.clear();
  if (shared) {
    agent.shared_fence_time = now.time;
  } else {
    agent.fenced = agent.seen;
  }
}

void Machine::load(AgentId id, Agent& agent, const Op& op) {
  if (op.kind == OpKind::load_read) {
    agent.reads_of_copy.push_back(op.object);
    agent.tags_of_copy.push_back(op.tag);
    return;
  }
  // Copies that complete on different barriers know nothing of each other.
  const std::uint32_t barriers_per_cta = hardware_.barriers_per_cta;
  const std::uint32_t of_barrier =
      op.other % barriers_per_cta * kClusterSize + op.other / barriers_per_cta % kClusterSize;
  const std::uint32_t timeline = kLoads + of_barrier;
  if (timeline >= kTimelinesAnAgent) throw Violation("model: too many barriers with loads");
  const Stamp now = stamp(id, agent, timeline, ++agent.load_time[timeline]);
  Memory& memory = hardware_.memory;
  for (std::size_t i = 0; i < agent.reads_of_copy.size(); ++i) {
    memory.read(agent.reads_of_copy[i], access(id.rank, agent), Proxy::async, agent.tags_of_copy[i],
                now);
  }
  agent.reads_of_copy.clear();
  agent.tags_of_copy.clear();
  memory.write(op.object, access(id.rank, agent), Proxy::async, op.tag, now);
  Barrier& barrier = hardware_.barriers[op.other];
  --barrier.num_loads;
  if (barrier.arriving.is_unset()) barrier.arriving = Clock(hardware_.num_ranks);
  barrier.arriving.learn(now);
  complete_phase(barrier);
}

void Machine::arrive(Barrier& barrier, const Clock& clock) {
  ++barrier.num_arrived;
  if (barrier.num_arrived > barrier.num_arrivals) {
    throw Violation("a barrier takes more arrivals than its phase has");
  }
  barrier.arriving.join(clock);
  complete_phase(barrier);
}

void Machine::complete_phase(Barrier& barrier) {
  if (barrier.num_arrived != barrier.num_arrivals || barrier.num_loads != 0) return;
  barrier.completed = std::exchange(barrier.arriving, Clock());
  barrier.num_arrived = 0;
  ++barrier.phase;
}

void Machine::execute_group(AgentId id, Agent& agent, const Op& op) {
  const std::uint32_t group = agent.num_committed + 1;
  Memory& memory = hardware_.memory;
  switch (op.kind) {
    case OpKind::store:
      memory.read(op.object, access(id.rank, agent), Proxy::async, memory.tag(op.object),
                  stamp(id, agent, kGroupReads, group));
      memory.write(op.other, access(id.rank, agent), Proxy::async, op.tag,
                   stamp(id, agent, kStores, group));
      ++agent.num_stores;
      break;
    case OpKind::group_read:
      memory.read(op.object, access(id.rank, agent), Proxy::async, memory.tag(op.object),
                  stamp(id, agent, kGroupReads, group));
      break;
    case OpKind::commit:
      agent.num_committed = group;
      if (agent.num_stores != 0) agent.last_store_group = group;
      agent.num_stores = 0;
      break;
    default: {
      if (agent.num_committed <= op.amount) break;
      const std::uint32_t over = agent.num_committed - op.amount;
      agent.seen.learn(stamp(id, agent, kGroupReads, over));
      if (op.kind == OpKind::wait_read) break;
      agent.seen.learn(stamp(id, agent, kStores, over));
      agent.num_complete = std::max(agent.num_complete, over);
      break;
    }
  }
}

void Machine::execute_counter(AgentId id, Agent& agent, const Op& op) {
  if (op.kind == OpKind::fence_looks) {
    if (!agent.registers.fenced_all) fence(id, agent, false);
    agent.registers.looks = 0;
    agent.registers.fenced_all = agent.registers.saw_all;
    return;
  }
  if (op.kind == OpKind::await_counter && has_seen(agent, op.other)) return;
  if ((op.kind == OpKind::look || op.kind == OpKind::look_at_all) && agent.registers.saw_all)
    return;
  Counter& counter = hardware_.counters[op.object];
  if (op.kind != OpKind::start_counter && !agent.seen.knows(counter.started)) {
    throw Violation("counter " + std::to_string(op.object) +
                    " is used before its start is visible");
  }
  if (counter.rank != id.rank) throw Violation("a counter of another rank needs system scope");
  switch (op.kind) {
    case OpKind::start_counter: {
      counter.value = op.amount;
      counter.started = stamp(id, agent, kOwn, ++agent.time);
      counter.released = Clock();
      agent.seen.learn(counter.started);
      break;
    }
    case OpKind::add:
      counter.value += op.amount;
      counter.released.join(agent.seen);
      counter.kernel = agent.kernel;
      break;
    case OpKind::take:
    case OpKind::take_or_leave:
      agent.registers.taken = counter.value++;
      counter.kernel = agent.kernel;
      break;
    case OpKind::read_counter:
      if (!agent.seen.knows_end(id.rank, counter.kernel)) {
        throw Violation("counter " + std::to_string(op.object) +
                        " is read while it may still change");
      }
      agent.registers.taken = counter.value;
      break;
    case OpKind::await_counter:
      if (!ranks_[id.rank].control.call_failed && counter.value > op.amount) {
        throw Violation("counter " + std::to_string(op.object) + " is at " +
                        std::to_string(counter.value) + ", beyond " + std::to_string(op.amount));
      }
      agent.seen.join(counter.released);
      break;
    default:  // look, look_at_all
      agent.seen.join(counter.released);
      if (counter.value < op.amount) break;
      if (op.kind == OpKind::look_at_all) {
        agent.registers.saw_all = true;
      } else {
        agent.registers.looks |= 1U << op.other;
      }
      break;
  }
}

void Machine::execute_signal(AgentId id, Agent& agent, const Op& op) {
  RankControl& control = ranks_[id.rank].control;
  if (op.kind == OpKind::begin_call) {
    control.epoch = op.amount;
    control.call_failed = control.failed_for_good;
    return;
  }
  if (op.kind == OpKind::poll_signals) {
    if (agent.leaves_poll) {
      end_steps(agent);
      return;
    }
    for (std::uint32_t peer = 0; peer < hardware_.num_ranks; ++peer) {
      agent.seen.join(hardware_.signals[op.object + peer].released);
    }
    return;
  }
  SignalWord& word = hardware_.signals[op.object];
  if (op.kind == OpKind::send_signal) {
    if (control.epoch < word.epoch) throw Violation("a signal goes back");
    note_vain_looks(op);
    word.epoch = control.epoch;
    word.sender_failed = control.failed_for_good;
    word.released = agent.seen;
    return;
  }
  if (word.epoch < op.amount) return;  // the call has failed
  agent.seen.join(word.released);
  if (!word.sender_failed) return;
  control.call_failed = true;
  control.failed_for_good = true;
}

}  // namespace megamoe::checker
