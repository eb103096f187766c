// The `megamoe` command as its users meet it: exit codes, messages, help and JSON.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <string>

#include "command_fixture.h"
#include "megamoe/cuda.h"

namespace megamoe {
namespace {

TEST_F(Command, NeedsASubcommand) {
  const Outcome outcome = run("");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.err.find("subcommand"), std::string::npos) << outcome.err;
}

TEST_F(Command, RefusesWhatItDoesNotKnow) {
  const Outcome command = run("fly");
  EXPECT_EQ(command.exit_code, 2);
  EXPECT_NE(command.err.find("fly"), std::string::npos) << command.err;
  const Outcome outcome = run("info --sideways");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.err.find("--sideways"), std::string::npos) << outcome.err;
}

TEST_F(Command, HelpListsSubcommandsAndTheirOptions) {
  const Outcome outcome = run("--help");
  EXPECT_EQ(outcome.exit_code, 0);
  for (const char* name : {"info", "bench", "verify"}) {
    EXPECT_NE(outcome.out.find(name), std::string::npos) << name;
    const Outcome help = run(std::string(name) + " --help");
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_NE(help.out.find("--json"), std::string::npos) << name;
  }
}

TEST_F(Command, InfoSaysWhatTheCpuRuns) {
  const Outcome text = run("info");
  EXPECT_EQ(text.exit_code, 0);
  EXPECT_NE(text.out.find("cpu"), std::string::npos) << text.out;

  const auto info = nlohmann::json::parse(run("info --json").out);
  EXPECT_EQ(info.at("devices").at(0).at("backend"), "cpu");
  EXPECT_EQ(info.at("devices").at(0).at("can_run"), true);
  EXPECT_FALSE(info.at("commit").get<std::string>().empty());
  EXPECT_FALSE(info.at("simd").get<std::string>().empty());
}

TEST_F(Command, BenchWritesARecordForEachShape) {
  const auto path = directory_ / "records.json";
  const Outcome outcome =
      run("bench --shape qwen3-30b/16 qwen3-235b/16 --tokens 3 --ranks 2 --threads 1 --repeats 1 "
          "--mode recompute --json " +
          path.string());
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto records = nlohmann::json::parse(read_file(path));
  ASSERT_EQ(records.size(), 2U);
  const auto& record = records.at(1);
  EXPECT_EQ(record.at("shape"), "qwen3-235b/16");
  EXPECT_EQ(record.at("layer"), "megamoe");
  EXPECT_EQ(record.at("mode"), "recompute");
  EXPECT_EQ(record.at("ranks"), 2);
  EXPECT_EQ(record.at("tokens_per_rank"), 3);
  EXPECT_GT(record.at("forward_ms"), 0.0);
  EXPECT_GT(record.at("backward_tflops"), 0.0);
  EXPECT_EQ(record.at("run"), records.at(0).at("run"));
  // K = 8 of 8 experts on 2 ranks: each of 3 tokens of 2 ranks crosses once, for 4 slots.
  const std::int64_t hidden = record.at("hidden_dim");
  const std::int64_t lists = 6 * 16 + 24 * 16;
  EXPECT_EQ(record.at("bytes_between_ranks").at("forward"), (6 + 24) * hidden * 2 + lists);
  EXPECT_EQ(record.at("bytes_between_ranks").at("backward"),
            (2 * 6 + 24) * hidden * 2 + lists + 24 * 8);
  EXPECT_EQ(record.at("bytes_between_ranks_per_slot").at("forward"),
            (24 + 24) * hidden * 2 + 24 * 32);
}

TEST_F(Command, BenchNamesTheOptionThatIsWrong) {
  const auto expect_usage_error = [&](const std::string& arguments, const std::string& option) {
    const Outcome outcome = run("bench " + arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_NE(outcome.err.find(option), std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.out, "") << "refused before the first measurement";
  };
  expect_usage_error("--shape no-such-model", "--shape");
  expect_usage_error("--shape qwen3-30b/3", "--shape");
  expect_usage_error("--shape qwen3-30b/", "--shape");
  expect_usage_error("--ranks 3", "--ranks");
  expect_usage_error("--ranks 0", "--ranks");
  expect_usage_error("--tokens -1", "--tokens");
  expect_usage_error("--mode forgetful", "--mode");
  expect_usage_error("--routing fair", "--routing");
  expect_usage_error("--repeats many", "--repeats");
  expect_usage_error("--layers 2", "--step");
}

TEST_F(Command, BenchTimesAStepThroughAStackOfLayers) {
  const auto path = directory_ / "records.json";
  const Outcome outcome = run(
      "bench --step --layers 3 --shape qwen3-30b/16 --tokens 5 --ranks 2 --threads 1 --repeats 2 "
      "--weight-gradients accumulate-fp32 --json " +
      path.string());
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto records = nlohmann::json::parse(read_file(path));
  ASSERT_EQ(records.size(), 1U) << "the CPU has one order of a call";
  const auto& record = records.at(0);
  EXPECT_EQ(record.at("benchmark"), "step");
  EXPECT_EQ(record.at("layers"), 3);
  EXPECT_EQ(record.at("weight_gradients"), "accumulate_fp32");
  const double step_ms = record.at("step_ms");
  const double one_layer_ms = record.at("one_layer_ms");
  EXPECT_GT(one_layer_ms, 0.0);
  EXPECT_DOUBLE_EQ(record.at("layer_ms"), step_ms / 3);
  EXPECT_DOUBLE_EQ(record.at("step_over_layers_alone"), step_ms / (3 * one_layer_ms));
  // H = 128, I = 48, four of eight experts a rank, three matrices, three layers.
  const std::int64_t weights = 3 * 3 * 4 * 128 * 48;
  EXPECT_EQ(record.at("state_bytes").at("weights"), weights * 2);
  EXPECT_EQ(record.at("state_bytes").at("weight_gradients"), weights * 4);
  EXPECT_EQ(record.at("state_bytes").at("activations"), (3 + 4) * 5 * 128 * 2);
}

TEST_F(Command, BenchRefusesAStepThatDoesNotFit) {
  const Outcome outcome =
      run("bench --step --layers 1000 --shape deepseek-v3 --tokens 8192 --ranks 2 --repeats 1");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("GB a rank (weights"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("--layers"), std::string::npos) << outcome.err;
}

TEST_F(Command, BenchSaysHowUnevenTheRoutingIs) {
  const auto record_of = [&](const std::string& routing) {
    const auto path = directory_ / "routing.json";
    const Outcome outcome =
        run("bench --shape qwen3-30b/16 --tokens 40 --ranks 4 --threads 1 --repeats 1 --routing " +
            routing + " --json " + path.string());
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_NE(outcome.out.find("routing " + routing + ": busiest rank"), std::string::npos);
    const auto record = nlohmann::json::parse(read_file(path)).at(0);
    EXPECT_EQ(record.at("routing"), routing);
    const double rows = record.at("busiest_rank_rows");
    const double flops = 6.0 * rows * record.at("hidden_dim").get<double>() *
                         record.at("intermediate_dim").get<double>();
    const double rank_gflops = record.at("fma_peak_gflops").get<double>() / 4;
    EXPECT_NEAR(record.at("busiest_rank_floor_ms").at("forward").get<double>(),
                flops / rank_gflops * 1e-6, 1e-9 + flops / rank_gflops * 1e-12);
    return record;
  };
  // K = 8 of 8 experts, two a rank: every token goes everywhere.
  EXPECT_EQ(record_of("uniform").at("busiest_rank_rows"), 4 * 40 * 2);
  EXPECT_EQ(record_of("zipf").at("busiest_expert_rows"), 4 * 40);
  const auto one_expert = record_of("one-expert");
  EXPECT_EQ(one_expert.at("busiest_rank_rows"), 4 * 40 * 8);
  EXPECT_EQ(one_expert.at("busiest_expert_rows"), 4 * 40 * 8);
}

TEST_F(Command, TraceNamesTheOptionThatIsWrong) {
  const std::string out = " --out " + (directory_ / "trace.json").string();
  const auto expect_usage_error = [&](const std::string& arguments, const std::string& option) {
    const Outcome outcome = run("trace " + arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_NE(outcome.err.find(option), std::string::npos) << outcome.err;
  };
  expect_usage_error("", "--out");
  expect_usage_error("--pass sideways" + out, "--pass");
  expect_usage_error("--shape no-such-model" + out, "--shape");
  expect_usage_error("--ranks 3" + out, "--ranks");
  expect_usage_error("--sms -1" + out, "--sms");
  expect_usage_error("--weight-gradients fp64" + out, "--weight-gradients");
}

TEST_F(Command, TraceOfABuildThatDoesNotRecordSaysHowToBuildOneThatDoes) {
  const auto path = directory_ / "trace.json";
  const Outcome outcome = run("trace --out " + path.string());
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("-DMEGAMOE_TRACE=ON"), std::string::npos) << outcome.err;
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(Command, BenchRefusesAnUnwritableFileBeforeItMeasures) {
  const std::string path = (directory_ / "no_such_folder" / "records.json").string();
  const Outcome outcome = run("bench --json " + path);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find(path), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.out, "");
}

TEST_F(Command, OutputThatCannotBeWrittenIsAFailure) {
  for (const char* arguments : {"info", "info --json", "--help", "verify --help"}) {
    const Outcome outcome = run(std::string("2>&1 ") + arguments + " >/dev/full; echo code $?");
    EXPECT_NE(outcome.out.find("code 1"), std::string::npos) << arguments << outcome.out;
  }
}

TEST_F(Command, WhatIsNotAFileIsNotReplacedByOne) {
  const auto fifo = directory_ / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const auto& path : {fifo, directory_}) {
    for (const char* arguments :
         {"verify --json ", "bench --json ", "train --text /etc/passwd --checkpoint "}) {
      const Outcome outcome = run(arguments + path.string());
      EXPECT_EQ(outcome.exit_code, 1) << arguments << path;
      EXPECT_NE(outcome.err.find(path.string() + ": "), std::string::npos) << outcome.err;
      EXPECT_EQ(outcome.out, "") << "refused before the work";
    }
  }
  EXPECT_TRUE(std::filesystem::is_fifo(fifo));
}

TEST_F(Command, TrainRefusesFilesThatWouldOverwriteEachOther) {
  const auto text = directory_ / "text";
  std::ofstream(text) << "The text of the user, which must not be lost to a log file.\n";
  std::filesystem::create_symlink(text, directory_ / "link");
  const std::string before = read_file(text);
  const auto expect_usage_error = [&](const std::string& arguments, const std::string& option) {
    const Outcome outcome = run("train --text " + text.string() + " " + arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_NE(outcome.err.find(option + ": must not be"), std::string::npos) << outcome.err;
    EXPECT_EQ(read_file(text), before);
  };
  const std::string folder = directory_.string() + "/";
  expect_usage_error("--log " + text.string(), "--log");
  expect_usage_error("--log " + folder + "link", "--log");
  expect_usage_error("--checkpoint " + folder + "./text", "--checkpoint");
  expect_usage_error("--checkpoint " + folder + "new --log " + folder + "./new", "--checkpoint");
  expect_usage_error("--resume " + folder + "a --log " + folder + "a", "--log");
}

TEST_F(Command, NumbersAreNotTakenForOthers) {
  for (const char* command : {"verify", "bench", "train --text /etc/passwd"}) {
    for (const char* seed : {"-1", "18446744073709551616", "1e3", "one", "''"}) {
      const Outcome outcome = run(std::string(command) + " --seed " + seed);
      EXPECT_EQ(outcome.exit_code, 2) << command << " " << seed;
      EXPECT_NE(outcome.err.find("--seed"), std::string::npos) << outcome.err;
    }
  }
  const Outcome outcome = run("train --text /etc/passwd --lr nan");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.err.find("is nan"), std::string::npos) << outcome.err;
  EXPECT_EQ(run("verify --hidden 8 --intermediate 8 --seed 18446744073709551615").exit_code, 0);
}

TEST_F(Command, SaysItsVersion) {
  const Outcome outcome = run("--version");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.out.rfind("megamoe ", 0), 0U) << outcome.out;
}

// Whatever is missing (CUDA in the build, a device, cuBLAS) is said before anything is read.
TEST_F(Command, TrainSaysWhyItCannotRunOnGpus) {
  if (num_cuda_devices() > 0) GTEST_SKIP() << "there is a CUDA device";
  const auto text = directory_ / "text";
  std::ofstream(text) << "A text that is long enough to be trained on.\n";
  const Outcome outcome = run("train --backend cuda --text " + text.string());
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("backend cuda: "), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("use the cpu backend"), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.out, "");
}

TEST_F(Command, VerifyAndBenchSayWhyTheyCannotRunOnGpus) {
  if (num_cuda_devices() > 0) GTEST_SKIP() << "there is a CUDA device";
  for (const char* command :
       {"verify --backend cuda", "bench --backend cuda", "bench --backend cuda --step"}) {
    const Outcome outcome = run(command);
    EXPECT_EQ(outcome.exit_code, 1) << command;
    EXPECT_NE(outcome.err.find("backend cuda: "), std::string::npos) << outcome.err;
    EXPECT_NE(outcome.err.find("use the cpu backend"), std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.out, "") << command;
  }
}

TEST_F(Command, TrainNamesTheOptionsThatGpusRefuse) {
  const auto expect_usage_error = [&](const std::string& arguments, const std::string& option) {
    const Outcome outcome = run("train --backend cuda --text /etc/passwd " + arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_NE(outcome.err.find(option + ": must be"), std::string::npos) << outcome.err;
  };
  expect_usage_error("--hidden 96", "--hidden");
  expect_usage_error("--intermediate 8", "--intermediate");
  expect_usage_error("--experts 1024", "--experts");
  expect_usage_error("--experts 32 --top-k 17", "--top-k");
  expect_usage_error("--ranks 3", "--experts");
  EXPECT_EQ(run("train --backend gpu --text /etc/passwd").exit_code, 2);
}

TEST_F(Command, TrainRefusesATextWithoutAnEnd) {
  const Outcome outcome = run("train --text /dev/zero");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("/dev/zero: is a device"), std::string::npos) << outcome.err;
  EXPECT_NE(run("train --text /etc/passwd --resume /dev/zero").err.find("/dev/zero: is a device"),
            std::string::npos);
}

}  // namespace
}  // namespace megamoe
