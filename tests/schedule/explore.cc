#include "schedule/explore.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <random>
#include <unordered_set>

namespace megamoe::checker {
namespace {

constexpr std::size_t kHistoryLines = 60;

/// The last steps, in words.
class History {
 public:
  void add(std::string line) {
    lines_.push_back(std::move(line));
    if (lines_.size() > kHistoryLines) lines_.pop_front();
  }
  [[nodiscard]] std::string text() const {
    std::string text;
    for (const std::string& line : lines_) text += "  " + line + "\n";
    return text;
  }

 private:
  std::deque<std::string> lines_;
};

std::string deadlock(const Machine& machine) {
  return machine.has_ended() ? std::string() : "nobody can go on";
}

/// A run whose agents have speeds of their own.
class RandomRun {
 public:
  RandomRun(const std::shared_ptr<const LayerModel>& model, std::uint32_t seed)
      : model_(*model), machine_(LayerModel::start(model)), random_(seed) {
    longest_burst_ = 1U << (random_() % 7);
    slow_one_in_ = 1 + random_() % 6;
    // From hardly anybody who stays to hardly anybody who leaves.
    leaves_one_in_ = 1U << (1 + random_() % 12);
  }

  Finding run(bool with_history) {
    Finding finding;
    History history;
    try {
      while (take_turn(finding, with_history ? &history : nullptr)) {
      }
      finding.what = deadlock(machine_);
      if (finding.ok()) model_.check_outputs(machine_);
    } catch (const Violation& violation) {
      finding.what = violation.what();
    }
    if (!finding.ok()) finding.history = history.text() + "waiting:\n" + machine_.describe_waits();
    return finding;
  }

 private:
  /// Some steps of one agent; false once nobody can go on.
  bool take_turn(Finding& finding, History* history) {
    constexpr int kTries = 64;
    for (int i = 0; i < kTries; ++i) {
      const auto rank = static_cast<std::uint32_t>(random_() % machine_.num_ranks());
      if (machine_.rank_has_ended(rank)) continue;
      const AgentId id{rank, static_cast<std::uint32_t>(random_() % machine_.num_agents(rank))};
      // Agents differ in speed by a factor of 16.
      if (is_slow(id) && random_() % 16 != 0) continue;
      if (burst(id, finding, history)) return true;
    }
    for (std::uint32_t rank = 0; rank < machine_.num_ranks(); ++rank) {
      for (std::uint32_t agent = 0; agent < machine_.num_agents(rank); ++agent) {
        if (machine_.rank_has_ended(rank)) break;
        if (burst({rank, agent}, finding, history)) return true;
      }
    }
    return leave_any(history);
  }

  [[nodiscard]] bool is_slow(AgentId id) const {
    return ((id.agent + 1) * 2654435761U + id.rank * 40503U) / 64U % slow_one_in_ == 1;
  }

  bool burst(AgentId id, Finding& finding, History* history) {
    if (machine_.may_give_up(id) && random_() % 16 == 0) {
      if (history != nullptr) history->add(machine_.describe_step(id) + ": gives up");
      machine_.give_up(id);
      return true;
    }
    if (machine_.may_find_gone(id) && random_() % 4 == 0) {
      if (history != nullptr) history->add(machine_.describe_step(id) + ": finds it gone");
      machine_.find_gone(id);
      return true;
    }
    if (machine_.may_leave(id) && random_() % leaves_one_in_ == 0) {
      leave(id, history);
      return true;
    }
    const std::uint64_t length = 1 + random_() % longest_burst_;
    const std::uint64_t first = finding.num_steps;
    for (std::uint64_t i = 0; i < length; ++i) {
      if (machine_.rank_has_ended(id.rank) || id.agent >= machine_.num_agents(id.rank)) break;
      if (machine_.next_step(id) == Machine::Step::none) break;
      if (history != nullptr) history->add(machine_.describe_step(id));
      ++finding.num_steps;
      machine_.step(id);
    }
    return finding.num_steps > first;
  }

  void leave(AgentId id, History* history) {
    if (history != nullptr) history->add(machine_.describe_step(id) + ": leaves it");
    machine_.leave(id);
  }

  /// Where nobody else can go on.
  bool leave_any(History* history) {
    for (std::uint32_t rank = 0; rank < machine_.num_ranks(); ++rank) {
      if (machine_.rank_has_ended(rank)) continue;
      for (std::uint32_t agent = 0; agent < machine_.num_agents(rank); ++agent) {
        if (!machine_.may_leave({rank, agent})) continue;
        leave({rank, agent}, history);
        return true;
      }
    }
    return false;
  }

  const LayerModel& model_;
  Machine machine_;
  std::mt19937 random_;
  std::uint64_t longest_burst_ = 1;
  std::uint32_t slow_one_in_ = 1;
  std::uint32_t leaves_one_in_ = 1;
};

struct FingerprintHash {
  std::size_t operator()(const Machine::Fingerprint& fingerprint) const {
    return fingerprint.first ^ fingerprint.second;
  }
};

/// Depth first over the states in which more than one step could come next.
class Search {
 public:
  Search(const std::shared_ptr<const LayerModel>& model, Reduction reduction,
         std::uint64_t max_states)
      : model_(model), reduction_(reduction), max_states_(max_states) {}

  Finding run() {
    try {
      visit(LayerModel::start(model_));
    } catch (const Violation& violation) {
      finding_.what = violation.what();
      replay();
    }
    finding_.num_states = seen_.size();
    return finding_;
  }

 private:
  enum class Way { steps, gives_up, finds_gone, leaves, stays };
  struct Choice {
    AgentId id;
    Way way = Way::steps;
  };

  static const char* describe(Way way) {
    switch (way) {
      case Way::gives_up:
        return ": gives up";
      case Way::finds_gone:
        return ": finds it gone";
      case Way::leaves:
        return ": leaves it";
      case Way::stays:
        return ": stays";
      default:
        return "";
    }
  }

  void visit(Machine machine) {
    go_on_freely(machine, nullptr);
    if (!seen_.insert(machine.fingerprint()).second) return;
    if (seen_.size() > max_states_) throw Violation(kTooManyStates);
    const std::vector<Choice> choices = choices_of(machine);
    if (choices.empty()) {
      if (!machine.has_ended()) throw Violation(deadlock(machine));
      model_->check_outputs(machine);
      return;
    }
    for (const Choice& choice : choices) {
      path_.push_back(choice);
      Machine next = machine;
      take(next, choice);
      visit(std::move(next));
      path_.pop_back();
    }
  }

  void take(Machine& machine, const Choice& choice) {
    ++finding_.num_steps;
    switch (choice.way) {
      case Way::steps:
        machine.step(choice.id);
        break;
      case Way::gives_up:
        machine.give_up(choice.id);
        break;
      case Way::finds_gone:
        machine.find_gone(choice.id);
        break;
      case Way::leaves:
        machine.leave(choice.id);
        break;
      case Way::stays:
        machine.stay(choice.id);
        break;
    }
  }

  /// Steps whose time makes no difference are taken at once.
  void go_on_freely(Machine& machine, History* history) {
    if (reduction_ == Reduction::none) return;
    bool moved = true;
    while (moved) {
      moved = false;
      for (std::uint32_t rank = 0; rank < machine.num_ranks(); ++rank) {
        for (std::uint32_t agent = 0; agent < machine.num_agents(rank); ++agent) {
          while (agent < machine.num_agents(rank) && !machine.rank_has_ended(rank) &&
                 machine.next_step({rank, agent}) == Machine::Step::free) {
            if (history != nullptr) history->add(machine.describe_step({rank, agent}));
            machine.step({rank, agent});
            moved = true;
          }
        }
      }
    }
  }

  /// What a rank could do next.
  struct OfRank {
    std::vector<Choice> all;
    std::vector<Choice> inner;    ///< what matters to the rank alone
    std::vector<Choice> leavers;  ///< who stays, and could still leave
    std::vector<Choice> decision;
  };
  [[nodiscard]] static OfRank choices_of(const Machine& machine, std::uint32_t rank) {
    OfRank choices;
    for (std::uint32_t agent = 0; agent < machine.num_agents(rank); ++agent) {
      const AgentId id{rank, agent};
      const Machine::Step step = machine.next_step(id);
      if (machine.may_give_up(id)) choices.all.push_back({id, Way::gives_up});
      if (machine.may_find_gone(id)) choices.all.push_back({id, Way::finds_gone});
      if (machine.may_leave(id)) {
        if (!machine.stays(id)) {
          choices.decision = {{id, Way::leaves}, {id, Way::stays}};
          return choices;
        }
        choices.leavers.push_back({id, Way::leaves});
      }
      if (step == Machine::Step::none) continue;
      choices.all.push_back({id, Way::steps});
      if (step == Machine::Step::of_rank) choices.inner.push_back({id, Way::steps});
    }
    return choices;
  }

  /// With reduction: the steps of one rank, if they matter to that rank alone; else everybody's. A
  /// rank that is held can do nothing that matters to others, so it comes last. Before anything
  /// else, whether an agent leaves what it may leave.
  [[nodiscard]] std::vector<Choice> choices_of(const Machine& machine) const {
    std::vector<Choice> all;
    std::vector<Choice> of_held;
    std::vector<Choice> leavers;
    bool anybody_steps = false;
    for (std::uint32_t rank = 0; rank < machine.num_ranks(); ++rank) {
      if (machine.rank_has_ended(rank)) continue;
      const OfRank choices = choices_of(machine, rank);
      if (!choices.decision.empty()) return choices.decision;
      const bool is_held = reduction_ == Reduction::by_order && machine.is_held(rank);
      if (reduction_ == Reduction::by_order && !is_held && !choices.inner.empty()) {
        return choices.inner;
      }
      leavers.insert(leavers.end(), choices.leavers.begin(), choices.leavers.end());
      if (is_held) {
        if (of_held.empty()) of_held = choices.inner;
        continue;
      }
      for (const Choice& choice : choices.all) {
        anybody_steps = anybody_steps || choice.way == Way::steps;
        all.push_back(choice);
      }
    }
    if (anybody_steps) return all;
    if (!of_held.empty()) {
      all.insert(all.end(), of_held.begin(), of_held.end());
      return all;
    }
    // What they stay for may never come.
    all.insert(all.end(), leavers.begin(), leavers.end());
    return all;
  }

  /// The path to the violation once more, in words.
  void replay() {
    History history;
    Machine machine = LayerModel::start(model_);
    try {
      for (const Choice& choice : path_) {
        go_on_freely(machine, &history);
        history.add(machine.describe_step(choice.id) + describe(choice.way));
        take(machine, choice);
      }
      go_on_freely(machine, &history);
    } catch (const Violation&) {
    }
    finding_.history = history.text() + "waiting:\n" + machine.describe_waits();
  }

  std::shared_ptr<const LayerModel> model_;
  Reduction reduction_;
  std::uint64_t max_states_;
  std::unordered_set<Machine::Fingerprint, FingerprintHash> seen_;
  std::vector<Choice> path_;
  Finding finding_;
};

}  // namespace

Finding run_at_random(const std::shared_ptr<const LayerModel>& model, std::uint32_t seed) {
  Finding finding = RandomRun(model, seed).run(false);
  if (finding.ok()) return finding;
  return RandomRun(model, seed).run(true);
}

Finding search_all(const std::shared_ptr<const LayerModel>& model, Reduction reduction,
                   std::uint64_t max_states) {
  return Search(model, reduction, max_states).run();
}

}  // namespace megamoe::checker
