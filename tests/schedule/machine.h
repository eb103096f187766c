// Runs the agents of all ranks, one step of one agent at a time, in the order that somebody else
// chooses (explore.h), and checks every access (memory_model.h).
//
// Copyable, so that an exhaustive search can go back.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "schedule/memory_model.h"
#include "schedule/program.h"

namespace megamoe::checker {

/// An mbarrier of a CTA.
struct Barrier {
  std::uint32_t num_arrivals = 1;  ///< of a phase
  std::uint32_t num_arrived = 0;
  std::int32_t num_loads = 0;  ///< announced and not yet complete; below 0: the other way round
  std::uint32_t phase = 0;     ///< how many are complete
  Clock arriving;              ///< of the phase under way
  Clock completed;
};

/// A counter in global memory; the rank's own.
struct Counter {
  std::uint32_t rank = 0;
  std::uint32_t value = 0;
  Stamp started;
  Clock released;
  std::uint32_t kernel = 0;  ///< that added or took last
};

/// A word by which one rank tells another something, written again in each call.
struct SignalWord {
  std::uint32_t reader = 0;
  std::uint32_t epoch = 0;
  bool sender_failed = false;
  Clock released;
};

/// When a rank that waits for a signal takes its sender for one that has failed, other than by the
/// signal itself.
enum class TakenForGone {
  /// The host's word that the sender has left, which comes after all that it had sent, and then one
  /// more look at the signal in vain.
  after_last_look,
  by_the_word,        ///< without that look
  before_it_had_left  ///< the word comes when the sender has begun its last call
};

/// Everything that exists before the first kernel.
struct Hardware {
  std::uint32_t num_ranks = 1;
  std::uint32_t ctas_per_rank = 2;
  /// CTAs of a kernel that fit the rank's SMs at once; those of a cluster come together.
  std::uint32_t resident_ctas = 2;
  Memory memory;
  std::vector<Barrier> barriers;  ///< as new at each kernel's start, as shared memory is
  std::uint32_t barriers_per_cta = 0;
  std::vector<DatumId> shared_R;  ///< each rank's shared memory
  std::uint32_t shared_per_cta = 0;
  std::vector<Counter> counters;
  std::vector<SignalWord> signals;
  bool deadlines_may_expire = false;  ///< any wait for a peer may give up
  TakenForGone taken_for_gone = TakenForGone::after_last_look;
  std::uint32_t num_calls = 0;
};

struct AgentId {
  std::uint32_t rank = 0;
  std::uint32_t agent = 0;
};

class Machine {
 public:
  static constexpr std::uint32_t kClusterSize = 2;
  Machine(Hardware hardware, std::shared_ptr<const KernelSource> source);

  /// How the next step of an agent relates to the others'.
  enum class Step {
    none,     ///< it has ended, waits, or its CTA has not started
    free,     ///< its outcome and everybody else's are the same whenever it is taken
    of_rank,  ///< order matters among agents of the rank
    of_all,   ///< order matters among agents of all ranks
  };
  [[nodiscard]] Step next_step(AgentId id) const;
  /// Takes the next step, which must not be `none`.
  void step(AgentId id);
  /// The agent's wait for a peer ends without it.
  [[nodiscard]] bool may_give_up(AgentId id) const;
  void give_up(AgentId id);
  /// The agent, which waits for a signal, may find that its sender has left without sending it.
  [[nodiscard]] bool may_find_gone(AgentId id) const;
  void find_gone(AgentId id);
  /// The agent may leave what it is about to do to a later kernel: now, or later unless it has been
  /// told to stay. That says nothing to anybody else, so it makes no difference when it is decided.
  [[nodiscard]] bool may_leave(AgentId id) const;
  [[nodiscard]] bool stays(AgentId id) const;
  void leave(AgentId id);
  void stay(AgentId id);
  /// The rank cannot leave the kernel of its stream before peers have sent signals.
  [[nodiscard]] bool is_held(std::uint32_t rank) const;

  [[nodiscard]] std::uint32_t num_ranks() const { return hardware_.num_ranks; }
  [[nodiscard]] std::uint32_t num_agents(std::uint32_t rank) const {
    return static_cast<std::uint32_t>(ranks_[rank].agents.size());
  }
  [[nodiscard]] bool rank_has_ended(std::uint32_t rank) const { return !ranks_[rank].kernel; }
  [[nodiscard]] bool has_ended() const;
  [[nodiscard]] const RankControl& control(std::uint32_t rank) const {
    return ranks_[rank].control;
  }
  [[nodiscard]] const Memory& memory() const { return hardware_.memory; }

  /// Two machines with equal fingerprints go on equally.
  struct Fingerprint {
    std::uint64_t first = 0;
    std::uint64_t second = 0;
    bool operator==(const Fingerprint&) const = default;
  };
  [[nodiscard]] Fingerprint fingerprint() const;

  [[nodiscard]] std::string describe_step(AgentId id) const;
  /// Who waits for what.
  [[nodiscard]] std::string describe_waits() const;

 private:
  struct Agent {
    std::uint32_t kernel = 0;
    std::uint32_t number = 0;  ///< in the kernel
    std::uint32_t cta = 0;
    const AgentProgram* program = nullptr;
    std::uint32_t next = 0;
    Program more;  ///< steps of the last expand
    std::uint32_t next_more = 0;
    Registers registers;
    Clock seen;
    Clock fenced;
    std::uint32_t time = 0;
    std::uint32_t shared_fence_time = 0;
    std::uint32_t num_committed = 0;
    std::uint32_t num_complete = 0;  ///< groups waited for in full
    std::uint32_t num_stores = 0;    ///< in the group under way
    std::uint32_t last_store_group = 0;
    std::uint32_t load_time[kTimelinesAnAgent] = {};
    std::vector<DatumId> reads_of_copy;
    std::vector<std::uint64_t> tags_of_copy;
    std::vector<DatumId> unfenced;
    std::vector<DatumId> unfenced_shared;
    bool stays = false;  ///< for its next step
    bool stays_to_poll = false;
    bool leaves_poll = false;
    bool looked_in_vain = false;  ///< at the signal that it awaits; noted where it matters
    bool has_ended = false;
  };
  struct Rank {
    std::uint32_t kernel_idx = 0;
    std::shared_ptr<const Kernel> kernel;
    /// That runs beside those of the stream, from the fork on; null: none does.
    std::shared_ptr<const Kernel> beside;
    std::uint32_t beside_idx = 0;
    std::uint32_t first_unknown = 0;  ///< all agents know that kernels before it have ended
    std::vector<Agent> agents;        ///< of the stream's kernel, then of that beside
    std::vector<std::uint32_t> agents_of_cluster;  ///< that have not ended
    std::vector<bool> is_admitted;                 ///< clusters that have started
    std::uint32_t num_resident = 0;                ///< clusters that have started and not ended
    std::uint32_t num_running = 0;         ///< agents that have not ended, of the stream's kernel
    std::uint32_t num_running_beside = 0;  ///< of the kernel beside
    Clock stream;
    RankControl control;
  };

  [[nodiscard]] const Op* next_op(const Agent& agent) const;
  [[nodiscard]] bool can_go_on(const Rank& rank, const Agent& agent, const Op& op) const;
  [[nodiscard]] std::string describe(const Op& op) const;
  [[nodiscard]] std::string name_of(AgentId id) const;
  [[nodiscard]] static Stamp stamp(AgentId id, const Agent& agent, std::uint32_t timeline,
                                   std::uint32_t time);
  [[nodiscard]] static bool has_started(const Rank& rank, const Agent& agent) {
    return rank.is_admitted[agent.cta / kClusterSize];
  }
  void check_waits(AgentId id, const Agent& agent, const Op& op) const;
  [[nodiscard]] Access access(std::uint32_t rank, const Agent& agent) const;
  [[nodiscard]] std::uint32_t sender_of(const Op& op) const {
    return op.object % hardware_.num_ranks;
  }
  void note_vain_looks(const Op& sent);
  [[nodiscard]] bool has_seen(const Agent& agent, std::uint32_t look) const;
  [[nodiscard]] bool have_arrived(const Op& poll) const;
  [[nodiscard]] bool is_held(const Agent& agent) const;

  static void go_on(Agent& agent);
  static void end_steps(Agent& agent);
  void execute(AgentId id, Agent& agent, const Op& op);
  void execute_group(AgentId id, Agent& agent, const Op& op);
  void execute_counter(AgentId id, Agent& agent, const Op& op);
  void execute_signal(AgentId id, Agent& agent, const Op& op);
  void fence(AgentId id, Agent& agent, bool shared);
  void load(AgentId id, Agent& agent, const Op& op);
  void arrive(Barrier& barrier, const Clock& clock);
  void complete_phase(Barrier& barrier);
  void end_agent(AgentId id);
  void start_kernel(std::uint32_t rank);
  void start_beside(std::uint32_t rank, std::uint32_t kernel_idx);
  [[nodiscard]] std::vector<Agent> new_agents(std::uint32_t rank, std::uint32_t kernel_idx,
                                              const Kernel& kernel);
  void admit(Rank& rank) const;
  void end_kernel(std::uint32_t rank);

  Hardware hardware_;
  std::shared_ptr<const KernelSource> source_;
  std::vector<Rank> ranks_;
};

}  // namespace megamoe::checker
