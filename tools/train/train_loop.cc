#include "train/train_loop.h"

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "megamoe/communicator.h"
#include "megamoe/error.h"
#include "train/backend.h"
#include "train/checkpoint.h"
#include "train/dense_ops.h"
#include "train/model.h"
#include "train/optimizer.h"
#include "train/sampler.h"
#include "train/sharding.h"
#include "train/text_data.h"
#include "train/training_state.h"

namespace megamoe::trainer {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// What all ranks share and none changes.
struct Run {
  const TrainOptions& options;
  const TextData& text;
  std::string description;
  const std::optional<Checkpoint>& resumed;
};

/// One rank's part of a run.
class RankTrainer {
 public:
  RankTrainer(const Run& run, TrainBackend& backend)
      : run_(run),
        backend_(backend),
        model_(run.options, backend),
        gradient_norm_(run.options.model.num_experts, backend) {
    contexts_.resize(model_.max_tokens() * model_.context());
    targets_.resize(model_.max_tokens());
    if (!run.options.checkpoint_path.empty()) gatherer_ = std::make_unique<StateGatherer>(model_);
    if (run.resumed) {
      restore_state(model_, *run.resumed, run.options.resume_path);
      step_ = run.resumed->step;
    }
  }

  /// Steps until `num_steps`, then writes the last checkpoint.
  void run_steps(const std::function<void(const StepRecord&)>& on_step) {
    const TrainOptions& options = run_.options;
    while (step_ < options.num_steps) {
      const StepRecord record = take_step_or_name_it();
      if (on_step) on_step(record);
      const bool is_due = options.checkpoint_every > 0 && step_ % options.checkpoint_every == 0;
      if (is_due || step_ == options.num_steps) save_checkpoint();
    }
  }

  /// Mean cross entropy of the held-out part.
  double held_out_loss() {
    const std::int64_t count = run_.text.num_held_out_bytes();
    const std::int64_t batch = run_.options.batch;
    double total = 0;
    for (std::int64_t first = 0; first < count; first += batch) {
      const std::int64_t size = std::min(batch, count - first);
      const Share share = my_share(size);
      run_.text.held_out_samples(first + share.first, contexts(share), targets(share));
      model_.forward(size, contexts(share));
      total += model_.loss(targets(share)) * static_cast<double>(size);
    }
    return total / static_cast<double>(count);
  }

  std::string sample() {
    const TrainOptions& options = run_.options;
    return generate(model_, run_.text.prompt(), options.sample_bytes, options.temperature,
                    options.seed);
  }

 private:
  StepRecord take_step_or_name_it() {
    const std::int64_t step = step_ + 1;
    try {
      return take_step();
    } catch (const Error& error) {
      throw Error(error.code(), "step " + std::to_string(step) + ": " + error.what());
    }
  }

  StepRecord take_step() {
    const TrainOptions& options = run_.options;
    const Clock::time_point start = Clock::now();
    const Share share = my_share(options.batch);
    const auto first_sample = static_cast<std::uint64_t>(step_ * options.batch + share.first);
    run_.text.training_samples(options.seed, first_sample, contexts(share), targets(share));

    model_.forward(options.batch, contexts(share));
    const double loss = model_.loss_for_backward(targets(share));
    if (!std::isfinite(loss)) {
      throw Error(ErrorCode::internal, "the loss is not a finite number; try a lower --lr");
    }
    model_.backward();
    ++step_;

    const double norm = gradient_norm_(model_.shared(), model_.experts());
    const double scale = clip_factor(norm, options.optimizer.clip_norm);
    Operations& operations = backend_.operations();
    adamw_step(operations, model_.shared(), options.optimizer, step_, scale);
    adamw_step(operations, model_.experts(), options.optimizer, step_, scale);
    model_.parameters_changed();
    model_.update_selection_biases(options.model.bias_rate);
    return {
        .step = step_,
        .loss = loss,
        .aux_loss = model_.aux_loss(),
        .tokens_per_s = static_cast<double>(options.batch) / seconds_since(start),
        .load_max_over_mean = model_.load_max_over_mean(),
        .learning_rate = learning_rate(options.optimizer, step_),
        .gradient_norm = norm,
    };
  }

  void save_checkpoint() {
    if (gatherer_ == nullptr) return;
    const Checkpoint checkpoint = gatherer_->gather(step_, run_.description);
    Communicator& ranks = backend_.host_group();
    if (ranks.rank() == 0) write_checkpoint(run_.options.checkpoint_path, checkpoint);
    // No rank goes on, or reports success, before the file is there.
    ranks.barrier("rank 0 to write a checkpoint", kDeadlineS);
  }

  [[nodiscard]] Share my_share(std::int64_t count) const {
    return items_of_rank(count, backend_.host_group().rank(), backend_.host_group().size());
  }
  std::span<std::uint8_t> contexts(const Share& share) {
    return std::span(contexts_).first(share.count * model_.context());
  }
  std::span<std::uint8_t> targets(const Share& share) {
    return std::span(targets_).first(share.count);
  }

  const Run& run_;
  TrainBackend& backend_;
  Model model_;
  GradientNorm gradient_norm_;
  std::unique_ptr<StateGatherer> gatherer_;
  std::int64_t step_ = 0;  // taken so far
  std::vector<std::uint8_t> contexts_;
  std::vector<std::uint8_t> targets_;
};

std::optional<Checkpoint> load_resumed(const TrainOptions& options,
                                       const std::string& description) {
  if (options.resume_path.empty()) return std::nullopt;
  Checkpoint checkpoint = read_checkpoint(options.resume_path, description);
  if (checkpoint.step > options.num_steps) {
    throw OptionError("--steps", "counts from the first step of all: checkpoint " +
                                     options.resume_path + " is already at step " +
                                     std::to_string(checkpoint.step));
  }
  return checkpoint;
}

void run_rank(const Run& run, Communicator& communicator, const TrainCallbacks& callbacks) {
  const bool reports = communicator.rank() == 0;
  const std::unique_ptr<TrainBackend> backend = make_backend(run.options.backend, communicator);
  RankTrainer trainer(run, *backend);
  // A rank that still allocates may wait for the device, and so for a call of a peer on it that
  // waits for this rank.
  backend->wait();
  communicator.barrier("all ranks to have built the model", kDeadlineS);
  const Clock::time_point start = Clock::now();
  trainer.run_steps(reports ? callbacks.on_step : nullptr);
  FinalRecord record;
  record.train_s = seconds_since(start);
  record.step = run.options.num_steps;
  record.held_out_loss = trainer.held_out_loss();
  record.unigram_loss = run.text.unigram_loss();
  record.uniform_loss = std::log(static_cast<double>(kVocabulary));
  record.prompt.assign(run.text.prompt().begin(), run.text.prompt().end());
  record.sample = trainer.sample();
  if (reports && callbacks.on_end) callbacks.on_end(record);
}

}  // namespace

void train(const TrainOptions& options, const TrainCallbacks& callbacks) {
  validate(options);
  require_backend(options.backend);
  const TextData text = TextData::load(options.text_path, options.model.context);
  const std::string description = describe_run(options, text);
  const std::optional<Checkpoint> resumed = load_resumed(options, description);
  if (!options.checkpoint_path.empty()) check_checkpoint_path(options.checkpoint_path);
  std::optional<JsonLog> log;
  if (!options.log_path.empty()) {
    log.emplace(options.log_path, resumed ? LogStart::append : LogStart::replace);
  }

  const auto report = [&log](const auto& record, const auto& callback) {
    if (log) log->write(to_json(record));
    if (callback) callback(record);
  };
  const TrainCallbacks logged = {
      .on_step = [&](const StepRecord& record) { report(record, callbacks.on_step); },
      .on_end = [&](const FinalRecord& record) { report(record, callbacks.on_end); },
  };
  const Run run = {options, text, description, resumed};
  run_ranks(options.num_ranks,
            [&](Communicator& communicator) { run_rank(run, communicator, logged); });
}

}  // namespace megamoe::trainer
