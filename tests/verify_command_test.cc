// `megamoe verify`: exit codes, the table, JSON, and that the self-test fails.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "command_fixture.h"

namespace megamoe {
namespace {

constexpr const char* kSmall = "verify --hidden 32 --intermediate 32 ";

TEST_F(Command, VerifyPassesAndListsEveryTensor) {
  const Outcome outcome = run(kSmall + std::string("--routing duplicates --ranks 4"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  for (const char* tensor : {"\ny ", "\ndx ", "\ndgate ", "\ndup ", "\nddown ", "\ndweights ",
                             "\ndrouter ", "\nexpert_ids ", "\nweights "}) {
    EXPECT_NE(outcome.out.find(tensor), std::string::npos) << tensor << outcome.out;
  }
  EXPECT_EQ(outcome.out.find("FAIL"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("allowed"), std::string::npos) << outcome.out;
}

TEST_F(Command, VerifyTakesEveryChoice) {
  for (const char* arguments :
       {"--routing uniform --activation gelu-erf", "--routing skewed --activation gelu-tanh",
        "--routing one-expert --activation relu2 --top-k 9", "--routing holes --mode recompute",
        "--routing ties --activation identity --weight-gradients store-fp32",
        "--activation clamped-swiglu --weight-gradients accumulate-fp32", "--tokens 0",
        "--experts 1 --ranks 1 --top-k 1"}) {
    const Outcome outcome = run(kSmall + std::string(arguments));
    EXPECT_EQ(outcome.exit_code, 0) << arguments << outcome.out << outcome.err;
  }
}

TEST_F(Command, VerifyFailsWhenOneWeightIsPerturbed) {
  for (const char* weight : {"gate", "up", "down"}) {
    const auto path = directory_ / "result.json";
    const Outcome outcome = run(kSmall + std::string("--ranks 2 --json ") + path.string() +
                                " --perturb-weight " + weight);
    EXPECT_EQ(outcome.exit_code, 1) << outcome.out;
    EXPECT_NE(outcome.out.find("FAIL"), std::string::npos) << outcome.out;
    EXPECT_NE(outcome.err.find("dx"), std::string::npos) << outcome.err;
    const auto result = nlohmann::json::parse(read_file(path));
    EXPECT_EQ(result.at("passed"), false);
    EXPECT_EQ(result.at("perturbed_weight"), weight);
    EXPECT_EQ(result.at("tensors").size(), 9U);
    for (const auto& tensor : result.at("tensors")) {
      EXPECT_EQ(tensor.at("failure").get<std::string>().empty(), tensor.at("passed").get<bool>());
    }
  }
}

TEST_F(Command, VerifyNamesTheOptionThatIsWrong) {
  const auto expect_usage_error = [&](const std::string& arguments, const std::string& option) {
    const Outcome outcome = run("verify " + arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_NE(outcome.err.find(option), std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.out, "") << "refused before the run";
  };
  expect_usage_error("--experts 6 --ranks 4", "--experts");
  expect_usage_error("--top-k 9", "--top-k");
  expect_usage_error("--routing sideways", "--routing: 'sideways' is not one of duplicates, holes");
  expect_usage_error("--activation tanh", "--activation");
  expect_usage_error("--activation relu2 --perturb-weight gate", "--perturb-weight");
  expect_usage_error("--perturb-weight router", "--perturb-weight");
  expect_usage_error("--tokens 0 --perturb-weight up", "--perturb-weight");
  expect_usage_error("--hidden 0", "--hidden");
  expect_usage_error("--intermediate many", "--intermediate");
  expect_usage_error("--ranks 0", "--ranks");
  expect_usage_error("--tokens -1", "--tokens");
  expect_usage_error("--activation-limit 0 --activation clamped-swiglu", "--activation-limit");
  expect_usage_error("--mode forgetful", "--mode");
  expect_usage_error("--backend tpu", "--backend");
  expect_usage_error("--weight-gradients store-fp16", "--weight-gradients");
}

TEST_F(Command, VerifyFailsBeforeTheWorkWhereItCannotBeDone) {
  const std::string path = (directory_ / "no_such_folder" / "result.json").string();
  EXPECT_NE(run("verify --json " + path).err.find(path), std::string::npos);
  const Outcome huge = run("verify --hidden 60000 --intermediate 60000");
  EXPECT_EQ(huge.exit_code, 1);
  EXPECT_NE(huge.err.find("GB"), std::string::npos) << huge.err;
}

}  // namespace
}  // namespace megamoe
