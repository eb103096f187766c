"""Times the training step of examples/train_qwen3_moe.py with megamoe's experts and with TorchTitan's order, compiled.

    torchrun --standalone --nproc-per-node 2 bench/train_step.py [--shapes qwen3-30b:20,qwen3-235b:8] [--json out.json]

A shape is that of a layer, and how many layers; `qwen3-30b:fit` is as many as fit with each of --experts, told from what
a step of few layers takes. Parameters and optimizer
states are bf16; attention, norms and routers are compiled. A step is forward, backward, the sum of gradients that are
not experts' over the ranks, and AdamW, on --sequences sequences of --sequence bytes a rank. Figures are medians over
the steps after the first two. With --routing uniform tokens go to random experts, as in the other benchmarks; with
--routing model where the router sends them, which on a new model that reads bytes is mostly a few experts of one rank.
`moe_share` is the part of the step between the events before and after the experts,
forward and backward: the step of a model whose experts took no time would be 1 / (1 - moe_share) times as fast, which
bounds what experts can give.
"""

import argparse
import gc
import importlib.util
import json
import pathlib
import statistics
import sys

import megamoe
import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
from compare import circumstances  # noqa: E402

NUM_WARMUPS = 2
#: Layers of the models that tell what a layer takes.
PROBES = (1, 3)
#: Of a device's memory, kept free of what the probes foretell: allocations of many layers leave more gaps.
SPARE_SHARE = 0.05
EXPERTS = ["torchtitan", "megamoe", "grouped_mm"]


def load_example():
    spec = importlib.util.spec_from_file_location("train_qwen3_moe", ROOT / "examples" / "train_qwen3_moe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def route_uniformly(model, num_tokens):
    """The same random experts for a block in every step; the weights stay the router's."""
    generator = torch.Generator(device=model.device).manual_seed(dist.get_rank())
    for block in [module for module in model.modules() if hasattr(module, "is_concatenated")]:
        keys = torch.rand(num_tokens, model.config.num_experts, device=model.device, generator=generator)
        ids = keys.topk(model.config.num_experts_per_tok, dim=1).indices
        block.register_forward_pre_hook(lambda _, inputs, ids=ids: (inputs[0], ids, inputs[2]), prepend=True)


def used_bytes():
    """Of the device, by whatever uses it; of this process what was ever used since the allocator's cache was emptied."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def layers_that_fit(bytes_of_probes, total_bytes):
    """The memory of a model grows by the same for every layer."""
    few, more = PROBES
    bytes_of_few, bytes_of_more = bytes_of_probes
    bytes_of_layer = (bytes_of_more - bytes_of_few) / (more - few)
    return few + max(0, int(((1 - SPARE_SHARE) * total_bytes - bytes_of_few) / bytes_of_layer))


def most_layers(example, shape, arguments):
    """As many as fit on every rank's device with each of the experts."""
    briefly = argparse.Namespace(**{**vars(arguments), "steps": 1})
    _, total_bytes = torch.cuda.mem_get_info()
    numbers = []
    for experts in arguments.experts:
        bytes_of_probes = []
        for num_layers in PROBES:
            measure(example, shape, num_layers, experts, briefly)
            bytes_of_probes.append(used_bytes())
            free_memory(arguments)
        numbers.append(layers_that_fit(bytes_of_probes, total_bytes))
    most = torch.tensor(min(numbers), device=arguments.device)
    dist.all_reduce(most, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print(f"{shape}: layers that fit: {dict(zip(arguments.experts, numbers))} on rank 0, {most} are taken", flush=True)
    return int(most)


def free_memory(arguments):
    gc.collect()
    megamoe.shutdown()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()


def measure(example, shape, num_layers, experts, arguments):
    batch = arguments.sequences * dist.get_world_size()
    options = example.parse(
        f"--shape {shape} --layers {num_layers} --experts {experts} --steps {NUM_WARMUPS + arguments.steps} "
        f"--batch {batch} --sequence {arguments.sequence} --device {arguments.device} --parameters bf16 "
        f"--learning-rate 1e-4 --text {arguments.text}".split()
        + ["--compile"] * arguments.compile
    )
    trainer = example.Trainer(options)
    if arguments.routing == "uniform":
        route_uniformly(trainer.model, arguments.sequences * arguments.sequence)
    steps = example.train(options, trainer)[NUM_WARMUPS:]
    step_ms = [1e3 * batch * arguments.sequence / step["tokens_per_s"] for step in steps]
    median = statistics.median(step_ms)
    return {
        "layer": experts,
        "shape": shape,
        "layers": num_layers,
        "routing": arguments.routing,
        "tokens_per_rank": arguments.sequences * arguments.sequence,
        "ranks": dist.get_world_size(),
        "compiled": arguments.compile,
        "step_ms": round(median, 2),
        "step_ms_range": [round(min(step_ms), 2), round(max(step_ms), 2)],
        "tokens_per_s": round(1e3 * batch * arguments.sequence / median),
        "moe_share": round(statistics.median(step["moe_share"] for step in steps), 3),
        "loss": round(steps[-1]["loss"], 4),
    }


def table(records):
    lines = [
        f"{'shape':12} {'layers':>6} {'experts':12} {'step ms':>8} {'tokens/s':>9} {'MoE':>5} {'ratio':>6} {'loss':>7}"
    ]
    for record in records:
        others = [other for other in records if other["layer"] == "torchtitan" and other["shape"] == record["shape"]]
        ratio = f"{others[0]['step_ms'] / record['step_ms']:.2f}" if others else ""
        lines.append(
            f"{record['shape']:12} {record['layers']:6} {record['layer']:12} {record['step_ms']:8.1f} "
            f"{record['tokens_per_s']:9,} {record['moe_share']:5.0%} {ratio:>6} {record['loss']:7.3f}"
        )
    return "\n".join(lines)


def layers_of_shapes(shapes):
    """Reads SHAPE:LAYERS,... as [(shape, layers)]; layers of SHAPE:fit are "fit"."""

    def read(text):
        entries = []
        for entry in text.split(","):
            shape, _, layers = entry.partition(":")
            if layers != "fit" and not layers.isdecimal():
                raise argparse.ArgumentTypeError(f"'{entry}' is not SHAPE:LAYERS")
            if shape not in shapes:
                raise argparse.ArgumentTypeError(f"{shape} is not one of {', '.join(shapes)}")
            if layers != "fit" and int(layers) < 1:
                raise argparse.ArgumentTypeError(f"'{entry}' has less than one layer")
            entries.append((shape, layers if layers == "fit" else int(layers)))
        return entries

    return read


def experts_of(text):
    names = text.split(",")
    for name in names:
        if name not in EXPERTS:
            raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(EXPERTS)}")
    return names


def refusal_of(options):
    """Why an option cannot be used, before any work; None where all can."""
    if not options.text.is_file():
        return f"argument --text: {options.text} is not a file"
    if options.json and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        return f"argument --json: {options.json} is a folder, or in none"
    if options.device == "cuda" and not torch.cuda.is_available():
        return "argument --device: PyTorch finds no CUDA device"
    if options.device == "cpu" and any(layers == "fit" for _, layers in options.shapes):
        return "argument --shapes: what fits is told on CUDA devices alone"
    return None


def parse(arguments):
    example = load_example()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=layers_of_shapes(example.SHAPES), default="qwen3-30b:20,qwen3-235b:8")
    parser.add_argument("--experts", type=experts_of, default="torchtitan,megamoe")
    parser.add_argument("--routing", choices=["uniform", "model"], default="uniform")
    parser.add_argument("--sequence", type=example.at_least(2), default=4096)
    parser.add_argument("--sequences", type=example.at_least(1), default=2, help="of each rank")
    parser.add_argument("--steps", type=example.at_least(1), default=6, help="that are timed")
    parser.add_argument("--text", type=pathlib.Path, default="/usr/share/common-licenses/GPL-3")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--commit", help="of the measured source, where this is not a checkout of it")
    options = parser.parse_args(arguments)
    if refusal := refusal_of(options):
        parser.error(refusal)
    return options


def compare(arguments):
    """The records, the same on every rank but for their times."""
    example = load_example()
    records = []
    for shape, num_layers in arguments.shapes:
        if num_layers == "fit":
            num_layers = most_layers(example, shape, arguments)
        for experts in arguments.experts:
            records.append(measure(example, shape, num_layers, experts, arguments))
            if arguments.device == "cuda":
                records[-1]["device_gib"] = round(used_bytes() / 2**30, 1)
            records[-1] |= circumstances(arguments, torch.device(arguments.device), "bench/train_step.py")
            if dist.get_rank() == 0:
                print(table(records[-1:]), flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(records, indent=1) + "\n")
            free_memory(arguments)
    return records


def main(arguments=None):
    options = parse(arguments)
    example = load_example()
    example.join_ranks(argparse.Namespace(device=options.device, experts="torchtitan"))
    records = compare(options)
    if dist.get_rank() == 0:
        print(table(records))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
