// What the agents of a machine could do next: steps, giving up a wait for a peer, leaving what a
// later kernel can do.
#include <algorithm>

#include "schedule/machine.h"

namespace megamoe::checker {

bool Machine::has_seen(const Agent& agent, std::uint32_t look) const {
  return agent.registers.saw_all || (agent.registers.looks >> look & 1U) != 0;
}

bool Machine::can_go_on(const Rank& rank, const Agent& agent, const Op& op) const {
  switch (op.kind) {
    case OpKind::await_barrier:
      // As the parity does: the phase under way and the one after it look alike.
      return (hardware_.barriers[op.object].phase + op.amount) % 2 == 0;
    case OpKind::await_counter:
      return has_seen(agent, op.other) || hardware_.counters[op.object].value >= op.amount ||
             rank.control.call_failed;
    case OpKind::await_signal:
      return hardware_.signals[op.object].epoch >= op.amount || rank.control.call_failed;
    case OpKind::poll_signals:
      return agent.leaves_poll || have_arrived(op);
    default:
      return true;
  }
}

Machine::Step Machine::next_step(AgentId id) const {
  const Rank& rank = ranks_[id.rank];
  const Agent& agent = rank.agents[id.agent];
  if (agent.has_ended || !has_started(rank, agent)) return Step::none;
  const Op* op = next_op(agent);
  if (op == nullptr) return Step::free;
  if (!can_go_on(rank, agent, *op)) return Step::none;
  switch (op->kind) {
    case OpKind::add:
    case OpKind::look:
    case OpKind::look_at_all:
    case OpKind::take:
    case OpKind::take_or_leave:
    case OpKind::poll_later:
      return Step::of_rank;
    case OpKind::poll_signals:  // what has arrived stays so for the rest of the call
      return agent.stays_to_poll || agent.leaves_poll ? Step::free : Step::of_rank;
    case OpKind::send_signal:
    case OpKind::await_signal:
      return Step::of_all;
    default:
      return Step::free;
  }
}

bool Machine::may_give_up(AgentId id) const {
  if (!hardware_.deadlines_may_expire) return false;
  const Agent& agent = ranks_[id.rank].agents[id.agent];
  if (agent.has_ended) return false;
  const Op* op = next_op(agent);
  return op != nullptr && op->kind == OpKind::await_signal &&
         !ranks_[id.rank].control.call_failed && hardware_.signals[op->object].epoch < op->amount;
}

void Machine::give_up(AgentId id) {
  ranks_[id.rank].control.call_failed = true;
  ranks_[id.rank].control.failed_for_good = true;
}

bool Machine::may_find_gone(AgentId id) const {
  const Agent& agent = ranks_[id.rank].agents[id.agent];
  if (agent.has_ended || !has_started(ranks_[id.rank], agent)) return false;
  const Op* op = next_op(agent);
  if (op == nullptr || op->kind != OpKind::await_signal) return false;
  const std::uint32_t sender = sender_of(*op);
  const bool is_missing = hardware_.signals[op->object].epoch < op->amount;
  switch (hardware_.taken_for_gone) {
    case TakenForGone::by_the_word:
      return rank_has_ended(sender) && (is_missing || agent.looked_in_vain);
    case TakenForGone::before_it_had_left:
      return ranks_[sender].control.epoch == hardware_.num_calls && is_missing;
    default:
      return rank_has_ended(sender) && is_missing;
  }
}

/// All ranks make all calls here, so none leaves before it has done its part.
void Machine::find_gone(AgentId id) {
  const std::uint32_t sender = sender_of(*next_op(ranks_[id.rank].agents[id.agent]));
  if (!ranks_[sender].control.failed_for_good) {
    throw Violation("rank " + std::to_string(sender) +
                    ", which does its part, is taken for one that has failed");
  }
  give_up(id);
}

/// Who has waited for the signal before it is sent.
void Machine::note_vain_looks(const Op& sent) {
  if (hardware_.taken_for_gone != TakenForGone::by_the_word) return;
  Rank& reader = ranks_[sent.object / hardware_.num_ranks % hardware_.num_ranks];
  for (Agent& agent : reader.agents) {
    const Op* op = agent.has_ended ? nullptr : next_op(agent);
    if (op == nullptr || op->kind != OpKind::await_signal || op->object != sent.object) continue;
    agent.looked_in_vain = true;
  }
}

bool Machine::may_leave(AgentId id) const {
  const Rank& rank = ranks_[id.rank];
  const Agent& agent = rank.agents[id.agent];
  if (agent.has_ended || !has_started(rank, agent)) return false;
  const Op* op = next_op(agent);
  if (op == nullptr || agent.leaves_poll) return false;
  return op->kind == OpKind::poll_later || op->kind == OpKind::poll_signals ||
         op->kind == OpKind::take_or_leave;
}

bool Machine::stays(AgentId id) const {
  const Agent& agent = ranks_[id.rank].agents[id.agent];
  return next_op(agent)->kind == OpKind::poll_signals ? agent.stays_to_poll : agent.stays;
}

void Machine::stay(AgentId id) {
  Agent& agent = ranks_[id.rank].agents[id.agent];
  if (next_op(agent)->kind == OpKind::poll_later) {
    agent.stays_to_poll = true;
    go_on(agent);
  } else {
    agent.stays = true;
  }
}

void Machine::leave(AgentId id) {
  Agent& agent = ranks_[id.rank].agents[id.agent];
  switch (next_op(agent)->kind) {
    case OpKind::poll_later:
      agent.leaves_poll = true;
      go_on(agent);
      break;
    case OpKind::take_or_leave:
      agent.registers.taken = kNothingTaken;
      go_on(agent);
      break;
    default:
      end_steps(agent);
      break;
  }
}

void Machine::end_steps(Agent& agent) {
  agent.next_more = static_cast<std::uint32_t>(agent.more.size());
  agent.next = static_cast<std::uint32_t>(agent.program->steps.size());
}

bool Machine::is_held(std::uint32_t rank) const {
  const std::uint32_t kernel = ranks_[rank].kernel_idx;
  return std::any_of(ranks_[rank].agents.begin(), ranks_[rank].agents.end(),
                     [&](const Agent& agent) { return agent.kernel == kernel && is_held(agent); });
}

/// Its poll, of which it has decided at its first step, has not arrived.
bool Machine::is_held(const Agent& agent) const {
  if (agent.has_ended || !agent.stays_to_poll) return false;
  return !have_arrived(agent.program->steps.front());
}

bool Machine::have_arrived(const Op& poll) const {
  const auto first = hardware_.signals.begin() + poll.object;
  return std::all_of(first, first + hardware_.num_ranks, [&](const SignalWord& word) {
    return word.epoch >= poll.amount && !word.sender_failed;
  });
}

}  // namespace megamoe::checker
