// The trainer's files: texts that cannot be used, checkpoints that are cut or altered, logs.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "megamoe/error.h"
#include "temporary_directory.h"
#include "train/checkpoint.h"
#include "train/log.h"
#include "train/options.h"
#include "train/text_data.h"

namespace megamoe::trainer {
namespace {

/// The message of the Error that `action` must throw.
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

TEST(TrainText, UnusableFilesAreRefusedByName) {
  const TemporaryDirectory directory;
  const auto expect_refusal = [&](const std::string& name, const std::string& why) {
    const std::string path = directory.file(name);
    const std::string message = message_of([&] { TextData::load(path, 8); });
    EXPECT_NE(message.find(path), std::string::npos) << message;
    EXPECT_NE(message.find(why), std::string::npos) << message;
  };
  expect_refusal("missing", "No such file");
  write_whole_file(directory.file("empty"), "");
  expect_refusal("empty", "is empty");
  write_whole_file(directory.file("one"), "x");
  expect_refusal("one", "needs at least 10");
  write_whole_file(directory.file("nine"), "123456789");
  expect_refusal("nine", "has 9 bytes");
  EXPECT_NE(message_of([&] { TextData::load(directory.path().string(), 8); }).find("directory"),
            std::string::npos);
  write_whole_file(directory.file("ten"), "1234567890");
  EXPECT_EQ(TextData::load(directory.file("ten"), 8).num_train_bytes(), 9);
}

TEST(TrainText, TheNumberOfBytesNeededIsTheLeastThatWorks) {
  for (const std::int64_t context : {1, 8, 17, 18, 19, 40, 100, 1000}) {
    const std::string message = message_of([&] { TextData(bytes_of("x"), context, "t"); });
    const std::int64_t needed = std::stoll(message.substr(message.rfind(' ') + 1));
    EXPECT_NO_THROW(TextData(std::vector<std::uint8_t>(needed), context, "t"));
    EXPECT_THROW(TextData(std::vector<std::uint8_t>(needed - 1), context, "t"), Error);
  }
}

TEST(TrainText, TrainingSamplesNeverShowTheHeldOutTail) {
  std::vector<std::uint8_t> bytes(200);
  std::iota(bytes.begin(), bytes.end(), std::uint8_t{0});
  const TextData text(bytes, 4, "t");
  ASSERT_EQ(text.num_train_bytes(), 180);
  std::vector<std::uint8_t> contexts(4 * 2000);
  std::vector<std::uint8_t> targets(2000);
  text.training_samples(1, 0, contexts, targets);
  std::vector<int> seen(200);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    for (std::uint8_t j = 0; j < 4; ++j) {
      EXPECT_EQ(contexts[4 * i + j], targets[i] - 4 + j);  // oldest first
    }
    ++seen[targets[i]];
  }
  for (int value = 0; value < 200; ++value) EXPECT_EQ(seen[value] > 0, value >= 4 && value < 180);
}

TEST(TrainText, ASampleIsTheSameWhoeverAsks) {
  const TextData text(bytes_of(std::string("the quick brown fox jumps over the lazy dog")), 3, "t");
  std::vector<std::uint8_t> contexts(3 * 16);
  std::vector<std::uint8_t> targets(16);
  text.training_samples(7, 100, contexts, targets);
  std::vector<std::uint8_t> context(3);
  std::vector<std::uint8_t> target(1);
  for (std::size_t i = 0; i < 16; ++i) {
    text.training_samples(7, 100 + i, context, target);
    EXPECT_EQ(target[0], targets[i]);
    EXPECT_TRUE(std::equal(context.begin(), context.end(), contexts.begin() + 3 * i));
  }
}

TEST(TrainText, HeldOutSamplesAndUnigramLoss) {
  const TextData text(bytes_of("aaaaaaaabbbbbbbbcc"
                               "ab"),
                      2, "t");
  ASSERT_EQ(text.num_held_out_bytes(), 2);
  std::vector<std::uint8_t> contexts(4);
  std::vector<std::uint8_t> targets(2);
  text.held_out_samples(0, contexts, targets);
  EXPECT_EQ(targets, bytes_of("ab"));
  EXPECT_EQ(contexts, bytes_of("ccca"));
  // 'a' and 'b' each 8 of 18 bytes; add-one smoothing over 256 values.
  EXPECT_NEAR(text.unigram_loss(), -std::log(9.0 / (18.0 + 256.0)), 1e-12);
}

Checkpoint small_checkpoint() {
  Checkpoint checkpoint;
  checkpoint.description = R"({"hidden":8,"seed":1})";
  checkpoint.step = 12345678901;
  checkpoint.shared = {{1.5F, -2.0F}, {0.25F, 3.0F}, {1e-30F, 4.0F}};
  checkpoint.experts = {{5.0F}, {6.0F}, {7.0F}};
  checkpoint.selection_bias = {0.125F, -0.125F};
  return checkpoint;
}

TEST(TrainCheckpoint, SurvivesTheRoundTripAndLeavesNoOtherFile) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("a.ckpt");
  const Checkpoint written = small_checkpoint();
  check_checkpoint_path(path);
  EXPECT_EQ(directory.num_files(), 0U);
  write_checkpoint(path, written);
  write_checkpoint(path, written);  // over an old one
  EXPECT_EQ(directory.num_files(), 1U);
  const Checkpoint read = read_checkpoint(path, written.description);
  EXPECT_EQ(read.step, written.step);
  EXPECT_EQ(read.shared.values, written.shared.values);
  EXPECT_EQ(read.shared.first_moments, written.shared.first_moments);
  EXPECT_EQ(read.shared.second_moments, written.shared.second_moments);
  EXPECT_EQ(read.experts.values, written.experts.values);
  EXPECT_EQ(read.experts.first_moments, written.experts.first_moments);
  EXPECT_EQ(read.experts.second_moments, written.experts.second_moments);
  EXPECT_EQ(read.selection_bias, written.selection_bias);
}

TEST(TrainCheckpoint, EveryCutAndEveryAlteredByteIsRefusedByName) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("a.ckpt");
  const Checkpoint checkpoint = small_checkpoint();
  write_checkpoint(path, checkpoint);
  const std::string whole = read_whole_file(path);
  const auto expect_refusal = [&](const std::string& bytes, const std::string& what) {
    write_whole_file(path, bytes);
    const std::string message = message_of([&] { read_checkpoint(path, checkpoint.description); });
    EXPECT_NE(message.find(path), std::string::npos) << what << ": " << message;
  };
  for (std::size_t length = 0; length < whole.size(); ++length) {
    expect_refusal(whole.substr(0, length), "cut to " + std::to_string(length));
  }
  expect_refusal(whole + "x", "a byte too many");
  for (std::size_t i = 0; i < whole.size(); ++i) {
    for (const char flip : {'\x01', '\x80'}) {
      std::string altered = whole;
      altered[i] = static_cast<char>(altered[i] ^ flip);
      expect_refusal(altered, "altered at " + std::to_string(i));
    }
  }
}

TEST(TrainCheckpoint, AnotherConfigurationIsNamedByOption) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("a.ckpt");
  write_checkpoint(path, small_checkpoint());
  const std::string message =
      message_of([&] { read_checkpoint(path, R"({"hidden":16,"seed":1})"); });
  EXPECT_NE(message.find("--hidden is 8 there and 16 here"), std::string::npos) << message;
  EXPECT_EQ(message.find("--seed"), std::string::npos) << message;
}

TEST(TrainCheckpoint, UnusablePathsAreRefusedByName) {
  const TemporaryDirectory directory;
  const std::string inside_nothing = directory.file("no/such/a.ckpt");
  for (const auto& action : std::vector<std::function<void()>>{
           [&] { check_checkpoint_path(inside_nothing); },
           [&] { write_checkpoint(inside_nothing, small_checkpoint()); },
           [&] { read_checkpoint(inside_nothing, "{}"); }}) {
    EXPECT_NE(message_of(action).find(inside_nothing), std::string::npos);
  }
  EXPECT_NE(message_of([&] { check_checkpoint_path(directory.path().string()); }).find("directory"),
            std::string::npos);
}

TEST(TrainLog, RecordsAreJsonAndOnlyStepsHaveALoss) {
  StepRecord step;
  step.step = 3;
  step.loss = 2.5;
  step.tokens_per_s = 1000;
  step.load_max_over_mean = 1.25;
  const auto step_json = nlohmann::json::parse(to_json(step));
  EXPECT_EQ(step_json.at("step"), 3);
  EXPECT_EQ(step_json.at("loss"), 2.5);
  EXPECT_EQ(step_json.at("tokens_per_s"), 1000);
  EXPECT_EQ(step_json.at("load_max_over_mean"), 1.25);
  FinalRecord final_record;
  final_record.held_out_loss = 2.0;
  final_record.sample = std::string("\xff\"\\\n\x01\xc3\xa9", 7);
  const auto final_json = nlohmann::json::parse(to_json(final_record));
  EXPECT_FALSE(final_json.contains("loss"));
  EXPECT_EQ(final_json.at("held_out_loss"), 2.0);
  EXPECT_EQ(final_json.at("sample"), "\\xff\"\\\n\\x01\xc3\xa9");
}

TEST(TrainLog, ReadableKeepsUtf8AndEscapesTheRest) {
  EXPECT_EQ(readable("a\tb\n"), "a\tb\n");
  EXPECT_EQ(readable("\xe2\x82\xac \xf0\x9f\x98\x80"), "\xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(readable("\xe2\x82"), "\\xe2\\x82");                    // cut
  EXPECT_EQ(readable("\xc0\xaf"), "\\xc0\\xaf");                    // overlong
  EXPECT_EQ(readable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // surrogate
  EXPECT_EQ(readable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // above U+10FFFF
  EXPECT_EQ(readable(std::string("\x00\x1b\x7f", 3)), "\\x00\\x1b\\x7f");
  std::string every_byte;
  for (int byte = 0; byte < 256; ++byte) every_byte.push_back(static_cast<char>(byte));
  FinalRecord record;
  record.sample = every_byte;
  EXPECT_TRUE(nlohmann::json::accept(to_json(record)));
}

TEST(TrainLog, ReplacesOrAppendsAndRefusesByName) {
  const TemporaryDirectory directory;
  const std::string path = directory.file("log.jsonl");
  JsonLog(path, LogStart::replace).write("{}");
  JsonLog(path, LogStart::append).write("[]");
  EXPECT_EQ(read_whole_file(path), "{}\n[]\n");
  JsonLog(path, LogStart::replace).write("1");
  EXPECT_EQ(read_whole_file(path), "1\n");
  const std::string bad = directory.file("no/log.jsonl");
  EXPECT_NE(message_of([&] { JsonLog(bad, LogStart::append); }).find(bad), std::string::npos);
}

TEST(TrainOptionsTest, OutOfRangeValuesNameTheOption) {
  const auto option_of = [](const std::function<void(TrainOptions&)>& change) -> std::string {
    TrainOptions options;
    options.text_path = "t";
    change(options);
    try {
      validate(options);
    } catch (const OptionError& error) {
      return error.option();
    }
    return "accepted";
  };
  EXPECT_EQ(option_of([](auto&) {}), "accepted");
  EXPECT_EQ(option_of([](auto& o) { o.num_steps = 0; }), "--steps");
  EXPECT_EQ(option_of([](auto& o) { o.num_ranks = 0; }), "--ranks");
  EXPECT_EQ(option_of([](auto& o) { o.num_ranks = 3; }), "--experts");
  EXPECT_EQ(option_of([](auto& o) { o.model.top_k = 9; }), "--top-k");
  EXPECT_EQ(option_of([](auto& o) { o.batch = -1; }), "--batch");
  EXPECT_EQ(option_of([](auto& o) { o.model.context = 0; }), "--context");
  EXPECT_EQ(option_of([](auto& o) { o.optimizer.learning_rate = 0; }), "--lr");
  EXPECT_EQ(option_of([](auto& o) { o.optimizer.weight_decay = -1; }), "--weight-decay");
  EXPECT_EQ(option_of([](auto& o) { o.optimizer.weight_decay = 1e9; }), "--weight-decay");
  EXPECT_EQ(option_of([](auto& o) { o.optimizer.beta2 = 1; }), "--beta2");
  EXPECT_EQ(option_of([](auto& o) { o.model.aux_loss = NAN; }), "--aux-loss");
  EXPECT_EQ(option_of([](auto& o) { o.temperature = -0.5; }), "--temperature");
  EXPECT_EQ(option_of([](auto& o) { o.checkpoint_every = 5; }), "--checkpoint-every");
}

}  // namespace
}  // namespace megamoe::trainer
