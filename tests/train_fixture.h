// A model small enough to be trained many times in a test, and what a run of it reported.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "temporary_directory.h"
#include "train/checkpoint.h"
#include "train/text_data.h"
#include "train/train_loop.h"
#include "train/training_state.h"
#include "verify/run.h"

namespace megamoe::trainer {

/// Options of a tiny run, on the default backend, on a text that is written to `directory`.
inline TrainOptions tiny_options(const TemporaryDirectory& directory) {
  const std::string path = directory.file("text");
  std::string text;
  for (int i = 0; i < 40; ++i) text += "the cat sat on the mat; the rat sat on the cat. ";
  write_whole_file(path, text);
  TrainOptions options;
  options.text_path = path;
  options.num_steps = 6;
  options.batch = 32;
  options.num_threads = 1;
  options.sample_bytes = 5;
  options.model.context = 4;
  options.backend = verify::default_backend();
  const bool is_cpu = options.backend == Backend::cpu;  // GPUs need multiples of 64
  options.model.hidden_dim = is_cpu ? 16 : 64;
  options.model.intermediate_dim = is_cpu ? 24 : 64;
  options.model.num_experts = 4;
  options.model.bias_rate = 0.001;
  options.optimizer.warmup_steps = 2;
  options.optimizer.learning_rate = 0.01;
  return options;
}

/// Puts a checkpoint of a run with these options into a model on the options' backend, and writes
/// that model's state to another file.
inline void save_again(const TrainOptions& options, const std::string& from, const std::string& to,
                       int num_ranks) {
  const TextData text = TextData::load(options.text_path, options.model.context);
  const std::string description = describe_run(options, text);
  const Checkpoint checkpoint = read_checkpoint(from, description);
  run_ranks(num_ranks, [&](Communicator& communicator) {
    const auto backend = make_backend(options.backend, communicator);
    Model model(options, *backend);
    StateGatherer gatherer(model);
    restore_state(model, checkpoint, from);
    const Checkpoint gathered = gatherer.gather(checkpoint.step, description);
    if (communicator.rank() == 0) write_checkpoint(to, gathered);
  });
}

struct Report {
  std::vector<StepRecord> steps;
  FinalRecord final_record;
};

inline Report train_and_report(const TrainOptions& options) {
  Report report;
  train(options, {.on_step = [&](const StepRecord& step) { report.steps.push_back(step); },
                  .on_end = [&](const FinalRecord& record) { report.final_record = record; }});
  return report;
}

}  // namespace megamoe::trainer
