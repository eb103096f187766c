// `megamoe train`: trains a small byte-level Mixture-of-Experts language model on a text.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "commands/commands.h"
#include "train/train_loop.h"

namespace megamoe::tools {
namespace {

using trainer::FinalRecord;
using trainer::readable;
using trainer::StepRecord;
using trainer::TrainOptions;

struct TrainArguments {
  TrainOptions options;
  std::string mode = "saved";
  std::string overlap = "on";
  std::string backend = "cpu";
  bool prints_json = false;
};

constexpr const char* kDescription =
    R"(Train a small byte-level Mixture-of-Experts language model on a text file.

The model predicts each byte from the bytes before it. Its experts are spread over the ranks, which
are threads of this process (with --backend cuda each with a GPU, or all with the first where there
are too few); the rest of the model is on every rank, and each rank works on its part of every batch. The last tenth of the text (at most 64 KiB) is never trained on; the loss on it is
printed at the end beside that of guessing by the frequency of bytes (unigram). All losses are in
nats a byte: ln 256 = 5.55 is what a model that knows nothing has.)";

constexpr const char* kExamples = R"(Examples:
  Train for some seconds, on two ranks:
    megamoe train --text /usr/share/common-licenses/GPL-3 --ranks 2
  Train for longer, keep a log and a checkpoint, then go on from the checkpoint:
    megamoe train --text book.txt --steps 600 --log book.jsonl --checkpoint book.ckpt
    megamoe train --text book.txt --steps 900 --log book.jsonl --resume book.ckpt
  On two GPUs; checkpoints are the same as the CPU's:
    megamoe train --text book.txt --steps 600 --backend cuda --ranks 2
  Write more text with a trained model (no step is left to take):
    megamoe train --text book.txt --steps 600 --resume book.ckpt --sample-bytes 2000

Exit codes: 0 success, 1 failure (a file that is missing, too short or damaged), 2 wrong usage.)";

void add_run_options(CLI::App& command, TrainOptions& options) {
  command.add_option("--text", options.text_path, "Text to learn; any file of bytes")
      ->required()
      ->type_name("FILE");
  command.add_option("--steps", options.num_steps,
                     "Steps, counted from the start of training also when resuming");
  command.add_option("--ranks", options.num_ranks,
                     "Ranks (threads) that share the experts; must divide --experts");
  command.add_option("--batch", options.batch,
                     "Samples (one predicted byte each) a step, over all ranks");
  command.add_option("--seed", options.seed, "Seed of weights, order of samples and sampling")
      ->check(seed_number());
  command
      .add_option("--log", options.log_path,
                  "Write a JSON record a step and a final one; appended to when resuming")
      ->type_name("FILE.jsonl");
  command
      .add_option("--checkpoint", options.checkpoint_path,
                  "Save the training state here after the last step")
      ->type_name("FILE");
  command.add_option("--checkpoint-every", options.checkpoint_every,
                     "Save it every so many steps as well; 0: not");
  command
      .add_option("--resume", options.resume_path,
                  "Go on from this checkpoint; the same bits as a run without a break")
      ->type_name("FILE");
  command.add_option("--sample-bytes", options.sample_bytes, "Bytes of text to write at the end");
  command.add_option("--temperature", options.temperature,
                     "Of the sample; 0 takes the likeliest byte");
}

void add_model_options(CLI::App& command, TrainOptions& options) {
  const std::string group = "Model";
  command.add_option("--context", options.model.context, "Bytes that the next is predicted from")
      ->group(group);
  command.add_option("--hidden", options.model.hidden_dim, "Width of the model")->group(group);
  command.add_option("--intermediate", options.model.intermediate_dim, "Width of an expert")
      ->group(group);
  command.add_option("--experts", options.model.num_experts, "Experts in each block")->group(group);
  command.add_option("--top-k", options.model.top_k, "Experts that a token goes to")->group(group);
  command.add_option("--layers", options.model.num_layers, "Blocks")->group(group);
}

void add_optimizer_options(CLI::App& command, TrainOptions& options) {
  const std::string group = "Optimizer";
  auto& optimizer = options.optimizer;
  command.add_option("--lr", optimizer.learning_rate, "Highest learning rate")->group(group);
  command.add_option("--weight-decay", optimizer.weight_decay, "AdamW's weight decay")
      ->group(group);
  command.add_option("--beta1", optimizer.beta1, "AdamW's first beta")->group(group);
  command.add_option("--beta2", optimizer.beta2, "AdamW's second beta")->group(group);
  command.add_option("--epsilon", optimizer.epsilon, "AdamW's epsilon")->group(group);
  command.add_option("--clip-norm", optimizer.clip_norm, "Largest norm of the whole gradient")
      ->group(group);
  command
      .add_option("--warmup-steps", optimizer.warmup_steps,
                  "Steps over which the learning rate rises")
      ->group(group);
  command
      .add_option("--decay-steps", optimizer.decay_steps,
                  "Steps until it has fallen to a tenth; not --steps, so that a run can be made "
                  "longer")
      ->group(group);
  command
      .add_option("--aux-loss", options.model.aux_loss,
                  "Coefficient of the loss that balances the experts; 0: off")
      ->group(group);
  command
      .add_option("--bias-rate", options.model.bias_rate,
                  "Step of the routers' selection bias towards balance; 0: off")
      ->group(group);
}

void add_layer_options(CLI::App& command, TrainArguments& arguments) {
  const std::string group = "Layer (but for --backend these change speed and memory, not results)";
  command
      .add_option("--mode", arguments.mode,
                  "saved: keep products for the backward pass; recompute: do them again")
      ->check(CLI::IsMember({"saved", "recompute"}))
      ->group(group);
  command.add_option("--overlap", arguments.overlap, "Communication under computation")
      ->check(CLI::IsMember({"on", "off"}))
      ->group(group);
  command
      .add_option("--backend", arguments.backend,
                  "cpu, or cuda: every part of a step on GPUs; needs cuBLAS, and --hidden and "
                  "--intermediate that 64 divides. Losses are the CPU's but for rounding")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->group(group);
  command
      .add_option("--threads", arguments.options.num_threads,
                  "Threads of a rank's experts on the CPU; 0 divides the cores among the ranks")
      ->group(group);
}

/// Prints about `kLines` of the steps, evenly spaced, and always the first and the last.
void print_step(const TrainOptions& options, const StepRecord& record) {
  constexpr std::int64_t kLines = 40;
  const std::int64_t spacing = std::max<std::int64_t>(1, options.num_steps / kLines);
  if (record.step != 1 && record.step != options.num_steps && record.step % spacing != 0) return;
  std::printf("step %5lld/%lld  loss %.4f  %8.0f tokens/s  expert load max/mean %.2f\n",
              static_cast<long long>(record.step), static_cast<long long>(options.num_steps),
              record.loss, record.tokens_per_s, record.load_max_over_mean);
  std::fflush(stdout);
}

void print_end(const FinalRecord& record) {
  std::printf("\nheld-out loss %.4f nats a byte; unigram %.4f, uniform %.4f (%.1f s of training)\n",
              record.held_out_loss, record.unigram_loss, record.uniform_loss, record.train_s);
  if (!record.sample.empty()) {
    std::printf("\nThe model continues \"%s\":\n%s\n", readable(record.prompt).c_str(),
                readable(record.sample).c_str());
  }
}

void run(const TrainArguments& arguments) {
  TrainOptions options = arguments.options;
  options.memory_mode = arguments.mode == "saved" ? MemoryMode::saved : MemoryMode::recompute;
  options.overlap = arguments.overlap == "on" ? Overlap::on : Overlap::off;
  options.backend = arguments.backend == "cuda" ? Backend::cuda : Backend::cpu;
  trainer::TrainCallbacks callbacks;
  if (arguments.prints_json) {
    const auto print_json = [](const auto& record) {
      std::printf("%s\n", to_json(record).c_str());
      std::fflush(stdout);
    };
    callbacks = {print_json, print_json};
  } else {
    callbacks = {[&options](const StepRecord& record) { print_step(options, record); }, print_end};
  }
  try {
    trainer::train(options, callbacks);
  } catch (const trainer::OptionError& error) {
    throw CLI::ValidationError(error.option(), error.what());
  }
}

}  // namespace

void add_train_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("train", kDescription);
  command->option_defaults()->always_capture_default();
  command->footer(kExamples);
  const auto arguments = std::make_shared<TrainArguments>();
  add_run_options(*command, arguments->options);
  command->add_flag("--json", arguments->prints_json,
                    "Print the log's records in place of progress lines");
  add_model_options(*command, arguments->options);
  add_optimizer_options(*command, arguments->options);
  add_layer_options(*command, *arguments);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace megamoe::tools
