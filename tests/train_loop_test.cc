// Whole runs of the trainer: it learns, the number of ranks does not matter, a resumed run is the
// run without a break, and what cannot work is said before training.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "megamoe/error.h"
#include "train_fixture.h"

namespace megamoe::trainer {
namespace {

/// The state after a run, as the bytes of its checkpoint: equal bytes are equal weights, moments,
/// biases and step.
std::string state_after(TrainOptions options, const TemporaryDirectory& directory) {
  options.checkpoint_path = directory.file("state_after.ckpt");
  train(options, {});
  return read_whole_file(options.checkpoint_path);
}

void expect_equal_losses(const std::vector<StepRecord>& a, const std::vector<StepRecord>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].step, b[i].step);
    EXPECT_EQ(a[i].loss, b[i].loss) << "step " << a[i].step;
    EXPECT_EQ(a[i].gradient_norm, b[i].gradient_norm) << "step " << a[i].step;
  }
}

TEST(TrainLoop, LearnsATinyText) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.num_steps = 60;
  options.num_ranks = 2;
  const Report report = train_and_report(options);
  ASSERT_EQ(report.steps.size(), 60U);
  EXPECT_LT(report.steps.back().loss, 0.5 * report.steps.front().loss);
  EXPECT_LT(report.final_record.held_out_loss, report.final_record.unigram_loss);
  EXPECT_DOUBLE_EQ(report.final_record.uniform_loss, std::log(256.0));
  EXPECT_EQ(report.final_record.sample.size(), 5U);
  for (const StepRecord& step : report.steps) {
    EXPECT_GE(step.load_max_over_mean, 1.0);
    EXPECT_LE(step.load_max_over_mean, options.model.num_experts);
    EXPECT_GT(step.tokens_per_s, 0.0);
  }
}

// The promise to users is 1e-3; the same bits are what keeps it for any number of steps.
TEST(TrainLoop, TheNumberOfRanksChangesNoBit) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.num_steps = 20;
  options.model.num_experts = 12;
  const Report one = train_and_report(options);
  const std::string state = state_after(options, directory);
  for (const int num_ranks : {2, 3, 4}) {
    options.num_ranks = num_ranks;
    const Report many = train_and_report(options);
    expect_equal_losses(one.steps, many.steps);
    EXPECT_EQ(one.final_record.held_out_loss, many.final_record.held_out_loss);
    EXPECT_EQ(one.final_record.sample, many.final_record.sample);
    EXPECT_EQ(state_after(options, directory), state) << num_ranks << " ranks";
  }
}

TEST(TrainLoop, RanksWithoutTokensTakePart) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.batch = 3;
  const Report one = train_and_report(options);
  options.num_ranks = 4;
  expect_equal_losses(one.steps, train_and_report(options).steps);
}

TEST(TrainLoop, AResumedRunIsTheRunWithoutABreak) {
  const TemporaryDirectory directory;
  for (const int num_ranks : {1, 2}) {
    TrainOptions options = tiny_options(directory);
    options.num_ranks = num_ranks;
    const Report whole = train_and_report(options);
    const std::string whole_state = state_after(options, directory);

    TrainOptions first_part = options;
    first_part.num_steps = 4;
    first_part.checkpoint_path = directory.file("break.ckpt");
    train(first_part, {});
    TrainOptions second_part = options;
    second_part.resume_path = first_part.checkpoint_path;
    const Report resumed = train_and_report(second_part);
    ASSERT_EQ(resumed.steps.size(), 2U);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(resumed.steps[i].step, whole.steps[4 + i].step);
      EXPECT_EQ(resumed.steps[i].loss, whole.steps[4 + i].loss);
    }
    EXPECT_EQ(resumed.final_record.held_out_loss, whole.final_record.held_out_loss);
    EXPECT_EQ(resumed.final_record.sample, whole.final_record.sample);
    EXPECT_EQ(state_after(second_part, directory), whole_state) << num_ranks << " ranks";
  }
}

TEST(TrainLoop, ACheckpointFitsAnyNumberOfRanks) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  const Report whole = train_and_report(options);
  options.num_steps = 3;
  options.num_ranks = 4;
  options.checkpoint_path = directory.file("four.ckpt");
  const Report first = train_and_report(options);
  options.num_steps = 6;
  options.num_ranks = 2;
  options.resume_path = options.checkpoint_path;
  const Report second = train_and_report(options);
  std::vector<StepRecord> both = first.steps;
  both.insert(both.end(), second.steps.begin(), second.steps.end());
  expect_equal_losses(whole.steps, both);
}

TEST(TrainLoop, WhatSavesMemoryOrTimeChangesNoBit) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.num_ranks = 2;
  const std::string plain = state_after(options, directory);
  EXPECT_EQ(state_after(options, directory), plain) << "the same again";
  options.memory_mode = MemoryMode::recompute;
  EXPECT_EQ(state_after(options, directory), plain) << "recompute";
  options.overlap = Overlap::off;
  options.num_threads = 2;
  EXPECT_EQ(state_after(options, directory), plain) << "no overlap, two threads";
  options.seed = 2;
  EXPECT_NE(state_after(options, directory), plain) << "another seed";
}

TEST(TrainLoop, WritesCheckpointsOnTheWay) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.checkpoint_path = directory.file("a.ckpt");
  options.checkpoint_every = 2;
  std::vector<bool> exists;
  train(options, {.on_step =
                      [&](const StepRecord& step) {
                        exists.push_back(std::filesystem::exists(options.checkpoint_path));
                        if (step.step == 5) std::filesystem::remove(options.checkpoint_path);
                      },
                  .on_end = {}});
  EXPECT_EQ(exists, (std::vector<bool>{false, false, true, true, true, false}));
  EXPECT_TRUE(std::filesystem::exists(options.checkpoint_path));
}

TEST(TrainLoop, LogHasALineAStepAndAFinalOneAndGrowsWhenResuming) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.num_steps = 2;
  options.num_ranks = 2;
  options.log_path = directory.file("log.jsonl");
  options.checkpoint_path = directory.file("a.ckpt");
  train(options, {});
  options.num_steps = 3;
  options.resume_path = options.checkpoint_path;
  train(options, {});
  std::istringstream lines(read_whole_file(options.log_path));
  std::vector<nlohmann::json> records;
  for (std::string line; std::getline(lines, line);) records.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(records.size(), 5U);
  std::vector<int> steps_with_loss;
  for (const auto& record : records) {
    if (record.contains("loss")) {
      steps_with_loss.push_back(record.at("step"));
      EXPECT_GT(record.at("tokens_per_s"), 0);
      EXPECT_GE(record.at("load_max_over_mean"), 1);
    } else {
      for (const char* key : {"held_out_loss", "unigram_loss", "uniform_loss", "sample"}) {
        EXPECT_TRUE(record.contains(key)) << key;
      }
    }
  }
  EXPECT_EQ(steps_with_loss, (std::vector<int>{1, 2, 3}));
  EXPECT_FALSE(records[2].contains("loss"));
  EXPECT_FALSE(records[4].contains("loss"));
}

TEST(TrainLoop, AModelWithoutStepsLeftIsOnlySampled) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.checkpoint_path = directory.file("a.ckpt");
  const Report trained = train_and_report(options);
  options.resume_path = options.checkpoint_path;
  options.checkpoint_path.clear();
  const Report sampled = train_and_report(options);
  EXPECT_TRUE(sampled.steps.empty());
  EXPECT_EQ(sampled.final_record.held_out_loss, trained.final_record.held_out_loss);
  EXPECT_EQ(sampled.final_record.sample, trained.final_record.sample);
}

TEST(TrainLoop, ARestoredStateIsSavedAgainAsTheSameBytes) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.checkpoint_path = directory.file("a.ckpt");
  train(options, {});
  const std::string saved_again = directory.file("b.ckpt");
  save_again(options, options.checkpoint_path, saved_again, 2);
  EXPECT_EQ(read_whole_file(saved_again), read_whole_file(options.checkpoint_path));
}

/// Runs what must fail before its first step, and returns the message.
template <class Exception>
std::string refusal(const TrainOptions& options) {
  try {
    train(options, {.on_step = [](const StepRecord&) { ADD_FAILURE() << "a step was taken"; },
                    .on_end = {}});
  } catch (const Exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(TrainLoop, FilesThatCannotBeUsedAreNamedBeforeTraining) {
  const TemporaryDirectory directory;
  const TrainOptions good = tiny_options(directory);
  const std::string bad = directory.file("no/file");
  for (std::string TrainOptions::*path :
       {&TrainOptions::text_path, &TrainOptions::log_path, &TrainOptions::checkpoint_path,
        &TrainOptions::resume_path}) {
    TrainOptions options = good;
    options.*path = bad;
    EXPECT_NE(refusal<Error>(options).find(bad), std::string::npos);
  }
  EXPECT_EQ(directory.num_files(), 1U);  // the text
}

TEST(TrainLoop, ACheckpointOfAnotherRunIsRefused) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.checkpoint_path = directory.file("a.ckpt");
  train(options, {});
  const std::string before = read_whole_file(options.checkpoint_path);
  options.resume_path = options.checkpoint_path;
  TrainOptions wider = options;
  wider.model.hidden_dim *= 2;
  const std::string message = refusal<Error>(wider);
  EXPECT_NE(message.find(options.resume_path), std::string::npos) << message;
  EXPECT_NE(message.find("--hidden"), std::string::npos) << message;
  TrainOptions shorter = options;
  shorter.num_steps = 5;
  EXPECT_NE(refusal<OptionError>(shorter).find("already at step 6"), std::string::npos);
  write_whole_file(options.text_path, read_whole_file(options.text_path) + "more");
  EXPECT_NE(refusal<Error>(options).find("--text"), std::string::npos);
  EXPECT_EQ(read_whole_file(options.checkpoint_path), before);
}

}  // namespace
}  // namespace megamoe::trainer
