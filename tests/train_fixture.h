// A model small enough to be trained many times in a test, and what a run of it reported.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "temporary_directory.h"
#include "train/train_loop.h"

namespace megamoe::trainer {

/// Options of a tiny run on a text that is written to `directory`.
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
  options.model.hidden_dim = 16;
  options.model.intermediate_dim = 24;
  options.model.num_experts = 4;
  options.model.bias_rate = 0.001;
  options.optimizer.warmup_steps = 2;
  options.optimizer.learning_rate = 0.01;
  return options;
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
