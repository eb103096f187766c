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
    return false;
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

  const LayerModel& model_;
  Machine machine_;
  std::mt19937 random_;
  std::uint64_t longest_burst_ = 1;
  std::uint32_t slow_one_in_ = 1;
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
  struct Choice {
    AgentId id;
    bool gives_up = false;
  };

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
    if (choice.gives_up) {
      machine.give_up(choice.id);
    } else {
      machine.step(choice.id);
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

  /// With reduction: the steps of one rank, if they matter to that rank alone; else everybody's.
  [[nodiscard]] std::vector<Choice> choices_of(const Machine& machine) const {
    std::vector<Choice> all;
    for (std::uint32_t rank = 0; rank < machine.num_ranks(); ++rank) {
      std::vector<Choice> of_rank;
      for (std::uint32_t agent = 0; agent < machine.num_agents(rank); ++agent) {
        const AgentId id{rank, agent};
        const Machine::Step step = machine.next_step(id);
        if (machine.may_give_up(id)) all.push_back({id, true});
        if (step == Machine::Step::none) continue;
        all.push_back({id, false});
        if (step == Machine::Step::of_rank) of_rank.push_back({id, false});
      }
      if (reduction_ == Reduction::by_order && !of_rank.empty()) return of_rank;
    }
    return all;
  }

  /// The path to the violation once more, in words.
  void replay() {
    History history;
    Machine machine = LayerModel::start(model_);
    try {
      for (const Choice& choice : path_) {
        go_on_freely(machine, &history);
        history.add(machine.describe_step(choice.id) + (choice.gives_up ? ": gives up" : ""));
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
