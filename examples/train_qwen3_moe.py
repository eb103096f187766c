#!/usr/bin/env python3
"""Trains a Qwen3-MoE model of transformers on the bytes of a text, in one process or several.

    scripts/python examples/train_qwen3_moe.py
    scripts/python -m torch.distributed.run --nproc-per-node 2 examples/train_qwen3_moe.py

On a GPU where the CUDA backend has one (a rank each), else on the CPU. Every rank trains on sequences of its own. With
--experts megamoe the experts are spread over the ranks; with torchtitan too, and a layer of bench/baseline runs them in
TorchTitan's order (all-to-all, permute, grouped_mm, unpermute; compiled); with grouped_mm every rank holds all of them.
Products run in bf16; parameters are fp32 (autocast), or bf16 with --parameters bf16.

A checkpoint is a file a rank and step. A rank's older ones go once all ranks have written theirs, and --resume takes
the newest step that all ranks have: a run that ends between two ranks' files resumes from the step before. Of the log
it keeps the steps up to that one. With --deterministic a resumed run takes the steps of an unbroken one, bit for bit, also
on GPUs, where attention's backward pass else adds in any order.
"""

import argparse
import json
import os
import pathlib
import re
import sys
import time

import megamoe
import megamoe.huggingface
import torch
import torch.distributed as dist
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

SHAPES = {
    # The last two are the shapes of a layer of the published models; --layers says how many of them.
    "small": dict(
        hidden_size=128,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    ),
    "qwen3-30b": dict(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
    ),
    "qwen3-235b": dict(
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
    ),
}


def at_least(least):
    def number(text):
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def path_refusal(options):
    """Why a path of the command line cannot be used, before any work; None where all can."""
    if not options.text.is_file():
        return f"argument --text: {options.text} is not a file"
    if options.log_file and (options.log_file.is_dir() or not options.log_file.absolute().parent.is_dir()):
        return f"argument --log-file: {options.log_file} is a folder, or in none"
    if options.checkpoint and options.checkpoint.exists() and not options.checkpoint.is_dir():
        return f"argument --checkpoint: {options.checkpoint} is not a folder"
    for flag, given in {"--resume": options.resume, "--save-every": options.save_every}.items():
        if given and not options.checkpoint:
            return f"argument {flag}: needs --checkpoint"
    return None


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=pathlib.Path, default="/usr/share/common-licenses/GPL-3", help="a file to learn")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=at_least(1), default=2)
    parser.add_argument("--experts", choices=["megamoe", "grouped_mm", "torchtitan"], default="megamoe")
    parser.add_argument(
        "--overlap", choices=["on", "off"], default="on", help="communication under computation (megamoe)"
    )
    parser.add_argument("--parameters", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true", help="compile attention, norms and routers")
    parser.add_argument(
        "--deterministic", action="store_true", help="the same bits in every run (PyTorch's deterministic algorithms)"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--steps", type=at_least(0), default=60)
    parser.add_argument("--batch", type=at_least(1), default=8, help="sequences a step, over all ranks")
    parser.add_argument("--sequence", type=at_least(2), default=128, help="bytes of a sequence")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-file", type=pathlib.Path, help="JSON lines: step, loss, tokens_per_s, moe_share")
    parser.add_argument(
        "--checkpoint", type=pathlib.Path, help="folder to save to at the end, and every --save-every steps"
    )
    parser.add_argument("--save-every", type=at_least(0), default=0, help="steps; 0: at the end alone")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    options = parser.parse_args(arguments)
    if refusal := path_refusal(options):
        parser.error(refusal)
    refusal = torch.ops.megamoe.backend_refusal("cuda")
    if options.device == "auto":
        options.device = "cpu" if refusal else "cuda"
    elif options.device == "cuda" and options.experts != "megamoe":
        refusal = "" if torch.cuda.is_available() else "PyTorch finds no CUDA device"
    if options.device == "cuda" and refusal:
        parser.error(f"argument --device: {refusal}")
    return options


def torchtitan_forward(experts, hidden_states, top_k_index, top_k_weights):
    """The experts of a block that keep_torchtitan_experts has prepared."""
    device = hidden_states.device.type
    tensors = [hidden_states, *experts.torchtitan_weights]
    if torch.is_autocast_enabled(device):
        tensors = [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
    x, *weights = tensors
    return experts.torchtitan_layer(x, top_k_index, top_k_weights.float(), *weights).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register("torchtitan", torch.compiler.disable(torchtitan_forward))


def keep_torchtitan_experts(model):
    """What megamoe.parallelize_experts does, for the layer of bench/baseline; gate and up apart, as it takes them.
    Returns the names of the experts' parameters."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench" / "baseline"))
    from torchtitan_layer import Layer

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    names = set()
    for prefix, experts in list(model.named_modules()):
        if not hasattr(experts, "is_concatenated"):
            continue
        num_experts = experts.down_proj.shape[0]
        mine = slice(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks)
        gate, up = experts.gate_up_proj.detach()[mine].chunk(2, dim=1)
        down = experts.down_proj.detach()[mine]
        del experts.gate_up_proj, experts.down_proj
        for name, part in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
            parameter = torch.nn.Parameter(part.clone(memory_format=torch.contiguous_format))
            experts.register_parameter(name, parameter)
            names.add(f"{prefix}.{name}")
        experts.torchtitan_weights = [experts.gate_proj, experts.up_proj, experts.down_proj]
        experts.torchtitan_layer = Layer(dist.group.WORLD, num_experts, compiled=True)
    return names


def compile_around_experts(model):
    """The experts themselves are not: their times are taken between modules."""
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm, layer.mlp.gate):
            module.compile()


class ShareTimer:
    """Seconds spent in the experts of a model, forward and backward: between events on CUDA, else between moments of
    the program, for on the CPU operators return when they are done."""

    def __init__(self, model, device):
        self.on_cuda = device == "cuda"
        self._begun = None
        self._spans = []
        for module in model.modules():
            if hasattr(module, "is_concatenated"):
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end)
                module.register_full_backward_pre_hook(self._begin)
                module.register_full_backward_hook(self._end)

    def _mark(self):
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, *_):
        self._begun = self._mark()

    def _end(self, *_):
        self._spans.append((self._begun, self._mark()))

    def take_seconds(self):
        """Since the last time; the device must have finished."""
        spans, self._spans = self._spans, []
        return sum(begin.elapsed_time(end) / 1e3 if self.on_cuda else end - begin for begin, end in spans)


class Trainer:
    def __init__(self, options):
        self.options = options
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if options.batch % self.num_ranks:
            raise SystemExit(f"--batch {options.batch} must be divisible by the {self.num_ranks} ranks")
        self.text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
        if len(self.text) <= options.sequence:
            raise SystemExit(f"{options.text} has {len(self.text)} bytes; --sequence {options.sequence} needs more")
        self.device = options.device
        torch.manual_seed(options.seed)  # the same model on every rank
        config = transformers.Qwen3MoeConfig(
            vocab_size=256,
            num_hidden_layers=options.layers,
            intermediate_size=4,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            router_aux_loss_coef=0.01,
            output_router_logits=True,
            use_cache=False,
            **SHAPES[options.shape],
        )
        self.dtype = torch.bfloat16 if options.parameters == "bf16" else torch.float32
        with torch.device(self.device):
            self.model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=self.dtype, experts_implementation=options.experts
            )
        self.names_of_experts = set()  # parameters that no other rank has
        if options.experts == "megamoe":
            megamoe.parallelize_experts(self.model, overlap_comm=options.overlap == "on")
            self.names_of_experts = set(megamoe.expert_parameters(self.model))
        elif options.experts == "torchtitan":
            self.names_of_experts = keep_torchtitan_experts(self.model)
        if options.compile:
            compile_around_experts(self.model)
        self.timer = ShareTimer(self.model, self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.learning_rate, weight_decay=0.01, fused=self.device == "cuda"
        )
        self.step = 0

    def batch(self):
        """This rank's sequences: they depend on the seed and the step alone, so that a resumed run goes on alike."""
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.step)
        starts = torch.randint(len(self.text) - self.options.sequence, (self.options.batch,), generator=generator)
        mine = starts.chunk(self.num_ranks)[self.rank]
        return torch.stack([self.text[start : start + self.options.sequence] for start in mine]).to(self.device)

    def train_step(self):
        """Returns the mean loss over all ranks."""
        tokens = self.batch()
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.float32):
            loss = self.model(input_ids=tokens, labels=tokens).loss / self.num_ranks
        loss.backward()
        mean_loss = loss.detach().float()
        if self.num_ranks > 1:
            dist.all_reduce(mean_loss)
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None and name not in self.names_of_experts:
                    dist.all_reduce(parameter.grad)
        megamoe.check()  # the loss is read in every step anyway
        self.optimizer.step()
        self.step += 1
        return mean_loss.item()

    def gather(self, value):
        """The values of all ranks; none returns before all have come."""
        values = [value] * self.num_ranks
        if self.num_ranks > 1:
            dist.all_gather_object(values, value)
        return values

    def checkpoints(self):
        """This rank's, by step."""
        name = re.compile(rf"step(\d+)-rank{self.rank}of{self.num_ranks}\.pt")
        files = self.options.checkpoint.glob("step*.pt")
        return {int(match[1]): file for file in files if (match := name.fullmatch(file.name))}

    def save(self):
        folder = self.options.checkpoint
        folder.mkdir(parents=True, exist_ok=True)
        state = {"step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        unfinished = folder / f"rank{self.rank}of{self.num_ranks}.tmp"
        torch.save(state, unfinished)
        unfinished.replace(folder / f"step{self.step:08}-rank{self.rank}of{self.num_ranks}.pt")
        self.gather(self.step)  # from here on all ranks have this step
        for step, file in self.checkpoints().items():
            if step != self.step:
                file.unlink()

    def resume(self):
        mine = self.checkpoints()
        steps = self.gather(set(mine))
        common = set.intersection(*steps)
        if not common:
            held = "; ".join(
                f"rank {rank} of {self.num_ranks} has {sorted(s) or 'none'}" for rank, s in enumerate(steps)
            )
            raise SystemExit(f"--resume: {self.options.checkpoint} has no step that all ranks have: {held}")
        state = torch.load(mine[max(common)], map_location=self.device)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def keep_steps_of_log(file, last_step):
    """Of a run that ended behind its last checkpoint; a line that it had not written whole goes too."""

    def is_kept(line):
        try:
            return json.loads(line)["step"] <= last_step
        except ValueError:
            return False

    kept = [line for line in file.read_text().splitlines() if is_kept(line)]
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text("".join(line + "\n" for line in kept))
    unfinished.replace(file)


def train(options, trainer=None):
    """Returns the records of all steps."""
    trainer = trainer or Trainer(options)
    if options.resume:
        trainer.resume()
        if trainer.rank == 0 and options.log_file and options.log_file.exists():
            keep_steps_of_log(options.log_file, trainer.step)
    records = []
    while trainer.step < options.steps:
        start = time.perf_counter()
        loss = trainer.train_step()
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        records.append(
            {
                "step": trainer.step,
                "loss": loss,
                "tokens_per_s": options.batch * options.sequence / seconds,
                "moe_share": trainer.timer.take_seconds() / seconds,
            }
        )
        last = trainer.step == options.steps
        if trainer.rank == 0:
            if options.log_file:
                with options.log_file.open("a") as log:
                    print(json.dumps(records[-1]), file=log)
            if last or trainer.step % 10 == 0 or len(records) == 1:
                share = records[-1]["moe_share"]
                speed = records[-1]["tokens_per_s"]
                print(
                    f"step {trainer.step:5}  loss {loss:.3f}  {speed:,.0f} tokens/s  MoE {share:.0%} of the step",
                    flush=True,
                )
        if options.checkpoint and (last or (options.save_every and trainer.step % options.save_every == 0)):
            trainer.save()
    return records


def be_deterministic():
    """Before the first product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else PyTorch refuses products on CUDA
    torch.use_deterministic_algorithms(True)


def join_ranks(options):
    """The layer of TorchTitan needs a group of a single rank, too."""
    backend = "nccl" if options.device == "cuda" else "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(backend)
    elif options.experts == "torchtitan":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def main():
    options = parse(None)
    if options.deterministic:
        be_deterministic()
    join_ranks(options)
    train(options)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
