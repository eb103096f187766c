"""Times megamoe's operator beside TorchTitan's order of operations, Hugging Face's grouped_mm and the dense ceiling.

    torchrun --standalone --nproc-per-node 2 bench/compare.py [--shapes qwen3-30b,qwen3-235b] [--json out.json]
    torchrun --standalone --nproc-per-node 2 bench/compare.py --cpp build/cuda/bin/megamoe
    python bench/compare.py --shapes qwen3-30b          # one rank

Every layer starts after the router, from the same tokens, uniform random routing (seed = rank) and weights. The first
results of all layers are compared before anything is timed. grouped_mm is transformers' implementation on each GPU
alone, with all experts there and nothing on the network. As `megamoe bench --backend cuda` does it, passes run in
bursts of about 40 ms, each after a pause of 200 ms and a pass that is not counted, because the chip's clock falls under
sustained load; figures are medians of the slowest rank's time between events of the current stream, over --runs passes
or, where the medians of the first and second half of the passes agree within 0.5%, over half as many.

Before every pass the devices meet. `forward_ms` and `backward_ms` are then taken behind a millisecond of other work on
the stream, as in the middle of a training step: the host has launched what it can. `forward_idle_ms` is the forward
pass of a device that has nothing else to do, host included, as `megamoe bench` measures it. TFLOP/s are those of one
rank: 6*N*H*I FLOPs forward, 12*N*H*I backward, N = tokens * K, also where more are done (recompute). P is a dense
8192^3 product, timed as the layers are. The idle share is that of the tensor cores in forward and backward
(baseline/idle_share.py), rank 0's.

With --cpp that program's `bench` runs first, on the same devices, for every path and mode that is timed here. Its
records join the others (`called_from`: C++), and a second table tells the difference: through PyTorch a pass may take
2% or 60 microseconds more.

Records go to --json as they come, and `python -m megamoe.plot` draws them; the last thing printed is a table, where a
ratio is the time of the last TorchTitan layer of the shape over the line's. --device cpu checks this program, on small
shapes.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import megamoe
import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "baseline")]
from huggingface_layer import Layer as GroupedMmLayer  # noqa: E402
from idle_share import idle_share  # noqa: E402
from run_info import run_info  # noqa: E402
from torchtitan_layer import Layer as TorchTitanLayer  # noqa: E402

#: H, I, E, K
SHAPES = {
    "tiny": (64, 64, 8, 2),
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "deepseek-v3": (7168, 2048, 256, 8),
}
LAYERS = ["megamoe", "grouped_mm", "grouped_mm-compiled", "torchtitan", "torchtitan-compiled"]
BURST_MS = 40.0
PAUSE_S = 0.2
#: Of a spinning kernel, about a millisecond.
WORK_AHEAD_CYCLES = 2_000_000
#: Layers may differ by roundings to bf16 at other places.
MOST_DIFFERENCE = 0.02
#: Between the medians of two halves of the passes, where no more are timed.
STEADY_SHARE = 0.005
#: What a pass may take more through PyTorch than from C++: whichever is larger.
MOST_OVER_CPP_SHARE, MOST_OVER_CPP_MS = 0.02, 0.060


class Clock:
    """Marks in the order of the device's work; on the CPU, of the program's."""

    def __init__(self, device):
        self.on_cuda = device.type == "cuda"
        self.nothing = torch.zeros(1, device=device)

    def meet(self, with_work_ahead):
        """All ranks' devices begin the next work together; with work ahead the host may enqueue some of it before."""
        self.wait()
        dist.barrier()
        self.wait()
        if with_work_ahead and self.on_cuda:
            torch.cuda._sleep(WORK_AHEAD_CYCLES)
            dist.all_reduce(self.nothing)

    def mark(self):
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start, end):
        return start.elapsed_time(end) if self.on_cuda else (end - start) * 1e3

    def wait(self):
        if self.on_cuda:
            torch.cuda.synchronize()


class Problem:
    """One rank's tensors. TorchTitan's layer has gate and up apart; values are the same."""

    def __init__(self, shape, tokens, device):
        hidden, intermediate, experts, top_k = SHAPES[shape]
        num_local = experts // dist.get_world_size()
        generator = torch.Generator(device=device).manual_seed(dist.get_rank())

        def normal(*size, scale=1.0):
            return torch.randn(*size, device=device, dtype=torch.bfloat16, generator=generator).mul_(scale)

        self.num_experts, self.top_k, self.tokens = experts, top_k, tokens
        self.of_all_ranks = []
        self.forward_flops = 6 * tokens * top_k * hidden * intermediate
        self.x = normal(tokens, hidden).requires_grad_()
        self.dy = normal(tokens, hidden)
        self.ids = torch.rand(tokens, experts, device=device, generator=generator).topk(top_k, dim=1).indices
        weights = torch.rand(tokens, top_k, device=device, generator=generator)
        self.weights = (weights / weights.sum(1, keepdim=True)).requires_grad_()
        self.gate_up = normal(num_local, 2 * intermediate, hidden, scale=hidden**-0.5).requires_grad_()
        self.down = normal(num_local, hidden, intermediate, scale=intermediate**-0.5).requires_grad_()
        gate, up = self.gate_up.detach().chunk(2, dim=1)
        self.gate, self.up = gate.contiguous().requires_grad_(), up.contiguous().requires_grad_()

    def all_experts(self):
        """gate_up and down of all ranks, made when first asked for."""
        if not self.of_all_ranks:
            for part in (self.gate_up, self.down):
                parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, part.detach())
                self.of_all_ranks.append(torch.cat(parts).requires_grad_())
        return self.of_all_ranks


def variants(problem, layers, paths, modes):
    """[(what the record says of the layer, its forward function, the leaves whose gradients it makes)]"""
    found = []
    if "megamoe" in layers:
        ids = problem.ids.int()
        for path in paths:
            for mode in modes:

                def forward(path=path, mode=mode):
                    return megamoe.moe(
                        problem.x,
                        ids,
                        problem.weights,
                        problem.gate_up,
                        problem.down,
                        overlap_comm=path == "fused",
                        recompute=mode == "recompute",
                        max_tokens=problem.tokens,
                    )

                leaves = [problem.x, problem.weights, problem.gate_up, problem.down]
                description = {"layer": "megamoe", "path": path, "mode": mode, "called_from": "PyTorch"}
                found.append((description, forward, leaves))
    ids, scores = problem.ids, problem.weights
    for compiled in (False, True):
        suffix = "-compiled" if compiled else ""
        if "grouped_mm" + suffix in layers:
            leaves = [problem.x, problem.weights, *problem.all_experts()]
            layer = GroupedMmLayer(*leaves[2:], compiled)
            description = {
                "layer": "grouped_mm",
                "path": "sequential",
                "mode": "saved",
                "compiled": compiled,
                "ranks": 1,
            }
            found.append((description, lambda layer=layer: layer(problem.x, ids, scores), leaves))
        if "torchtitan" + suffix in layers:
            experts = (problem.gate, problem.up, problem.down)
            layer = TorchTitanLayer(dist.group.WORLD, problem.num_experts, compiled)
            description = {"layer": "torchtitan", "path": "sequential", "mode": "saved", "compiled": compiled}
            leaves = [problem.x, problem.weights, *experts]
            found.append((description, lambda layer=layer, w=experts: layer(problem.x, ids, scores, *w), leaves))
    return found


def step(problem, forward, leaves):
    y = forward()
    return y, torch.autograd.grad(y, leaves, problem.dy)


def difference(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def check_results(problem, compared):
    """Raises where y, dx or dweights of two layers are further apart than roundings."""
    first = None
    for description, forward, leaves in compared:
        y, (dx, dweights, *_) = step(problem, forward, leaves)
        found = {"y": y.detach(), "dx": dx, "dweights": dweights}
        first = first or found
        for name, tensor in found.items():
            distance = difference(tensor, first[name])
            if not distance <= MOST_DIFFERENCE:
                raise RuntimeError(f"{description}: {name} differs from the first layer's by {distance:.3g}")


def slowest(samples_ms, device):
    """Of every pass the slowest rank's time."""
    values = torch.tensor(samples_ms, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def is_steady(samples):
    """Whether every stage's median is the same in both halves of the samples, of which there are some."""
    half = len(samples) // 2
    return half > 1 and all(
        math.isclose(statistics.median(of_stage[:half]), statistics.median(of_stage[half:]), rel_tol=STEADY_SHARE)
        for of_stage in zip(*samples)
    )


def time_passes(one_pass, arguments, device, with_work_ahead=True):
    """[duration of each stage of the pass, ms]: one_pass(mark) marks its beginning and the end of every stage."""
    clock = Clock(device)

    def timed():
        marks = []
        clock.meet(with_work_ahead)
        one_pass(lambda: marks.append(clock.mark()))
        clock.wait()
        return slowest([clock.ms(*span) for span in zip(marks, marks[1:])], device)

    for _ in range(arguments.warmups):
        last = timed()
    burst = max(1, int(BURST_MS / sum(last)))
    samples = []
    for index in range(arguments.runs):
        if index == -(-arguments.runs // 2) and is_steady(samples):
            break
        if index % burst == 0:
            time.sleep(PAUSE_S)
            timed()
        samples.append(timed())
    return samples


def measure(problem, forward, leaves, arguments, device):
    """{forward_ms, ...}"""

    def one_pass(mark):
        mark()
        y = forward()
        mark()
        torch.autograd.grad(y, leaves, problem.dy)
        mark()

    samples = time_passes(one_pass, arguments, device)
    from_idle = [sample[0] for sample in time_passes(one_pass, arguments, device, with_work_ahead=False)]
    record = {"forward_idle_ms": round(statistics.median(from_idle), 4), "passes": len(samples)}
    for stage, (name, flops) in enumerate(
        (("forward", problem.forward_flops), ("backward", 2 * problem.forward_flops))
    ):
        of_stage = [sample[stage] for sample in samples]
        median = statistics.median(of_stage)
        record |= {
            f"{name}_ms": round(median, 4),
            f"{name}_ms_range": [round(min(of_stage), 4), round(max(of_stage), 4)],
            f"{name}_tflops": round(flops / median / 1e9, 1),
        }
    if device.type == "cuda":
        pass_ms = record["forward_ms"] + record["backward_ms"]
        record["idle_share"] = round(idle_share(lambda: step(problem, forward, leaves), pass_ms), 3)
    return record


def dense_tflops(arguments, device):
    size = 8192 if device.type == "cuda" else 512
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn_like(a)

    def one_pass(mark):
        mark()
        a @ b
        mark()

    median = statistics.median(sample[0] for sample in time_passes(one_pass, arguments, device))
    return float(f"{2 * size**3 / median / 1e9:.4g}")


def circumstances(arguments, device, program="bench/compare.py"):
    versions = {"torch": torch.__version__, "megamoe": megamoe.__version__}
    if device.type == "cuda":
        versions |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return run_info(arguments.commit, program + " " + " ".join(sys.argv[1:])) | {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "versions": versions,
    }


def bench_command(arguments, path, mode, ranks, file):
    """What times the same layer from C++, and writes its records to a file of the folder that it runs in."""
    overlap = {"fused": "on", "sequential": "off"}[path]
    return [
        *(str(arguments.cpp.resolve()), "bench", "--backend", arguments.device, "--ranks", str(ranks)),
        *("--tokens", str(arguments.tokens), "--mode", mode, "--overlap", overlap),
        *("--repeats", str(arguments.runs), "--json", file, "--shape", *arguments.shapes),
    ]


def records_of_cpp(arguments, ranks):
    """Those that the C++ program's bench writes. Raises RuntimeError with its words where it fails."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for path in arguments.paths:
            for mode in arguments.modes:
                command = bench_command(arguments, path, mode, ranks, "bench.json")
                ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
                if ended.returncode != 0:
                    raise RuntimeError(f"{' '.join(ended.args)} ended with {ended.returncode}: {ended.stderr.strip()}")
                records += json.loads((pathlib.Path(folder) / "bench.json").read_text())
    return [record | {"called_from": "C++", "forward_idle_ms": record["forward_ms"]} for record in records]


def table_beside_cpp(records):
    """Two lines for every way in which the layer was timed from C++ and through PyTorch; none where it was not.

    The C++ program's passes begin on devices that have nothing else to do: forward is told both ways."""
    lines = []
    place = ("shape", "path", "mode", "tokens_per_rank", "ranks")
    ours = [record for record in records if record["layer"] == "megamoe"]
    of_cpp = {tuple(record[key] for key in place): record for record in ours if record["called_from"] == "C++"}
    for record in ours:
        other = of_cpp.get(tuple(record[key] for key in place))
        if record["called_from"] == "C++" or not other:
            continue
        for name, field in (("forward", "forward_ms"), ("from idle", "forward_idle_ms"), ("backward", "backward_ms")):
            cpp_ms, torch_ms = other[field], record[field]
            most_ms = max(MOST_OVER_CPP_SHARE * cpp_ms, MOST_OVER_CPP_MS)
            within = "within" if torch_ms - cpp_ms <= most_ms else "more"
            lines.append(
                f"{record['shape']:12} {record['path']:10} {record['mode']:9} {name:9} {cpp_ms:8.3f} {torch_ms:8.3f} "
                f"{1e3 * (torch_ms - cpp_ms):7.0f} {torch_ms / cpp_ms - 1:7.1%} {within}"
            )
    if not lines:
        return ""
    head = f"{'shape':12} {'path':10} {'mode':9} {'pass':9} {'C++ ms':>8} {'torch ms':>8} {'us more':>7} {'% more':>7}"
    return "\n".join([f"{head} within 2% or 60 us", *lines])


def table(records):
    """A line a record; shares are of P."""
    stage = f"{'ms':>8} {'TFLOP/s':>8} {'of P':>5} {'ratio':>6}"
    lines = [f"{'shape':12} {'layer':36} {'forward ' + stage} {'backward ' + stage} {'from idle':>9} {'idle':>5}"]
    for record in records:
        words = [record["layer"], record["path"], record["mode"], "compiled" if record.get("compiled") else ""]
        words += ["from C++"] * (record.get("called_from") == "C++")
        others = [other for other in records if other["layer"] == "torchtitan" and other["shape"] == record["shape"]]
        cells = [f"{record['shape']:12} {' '.join(word for word in words if word):36}"]
        for name in ("forward", "backward"):
            ms, tflops = record[f"{name}_ms"], record[f"{name}_tflops"]
            ratio = f"{others[-1][f'{name}_ms'] / ms:.2f}" if others else ""
            # The C++ program measures no ceiling on the CPU, nor without cuBLAS.
            of_dense = f"{tflops / record['dense_tflops']:.3f}" if record.get("dense_tflops") else ""
            cells.append(f"{'':{len(name)}} {ms:8.3f} {tflops:8.1f} {of_dense:>5} {ratio:>6}")
        idle = f"{record['idle_share']:.0%}" if "idle_share" in record else ""
        cells.append(f"{record['forward_idle_ms']:9.3f} {idle:>5}")
        lines.append(" ".join(cells))
    ranks = max(record["ranks"] for record in records)
    ceilings = " and ".join(dict.fromkeys(f"{r['dense_tflops']:.4g}" for r in records if r.get("dense_tflops")))
    lines.append(f"P = {ceilings} TFLOP/s, {records[-1]['hardware']}, {ranks} ranks")
    return "\n".join(lines)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-30b,qwen3-235b,deepseek-v3", help=", ".join(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--paths", default="fused,sequential", help="of megamoe: with overlap on and off")
    parser.add_argument("--modes", default="saved,recompute", help="of megamoe")
    parser.add_argument("--cpp", type=pathlib.Path, help="the program megamoe, whose bench is to join the table")
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--warmups", type=int, default=4)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--commit", help="of the measured source, where this is not a checkout of it")
    options = parser.parse_args(arguments)
    choices = {
        "shapes": SHAPES,
        "layers": LAYERS,
        "paths": ["fused", "sequential"],
        "modes": ["saved", "recompute"],
    }
    for name, known in choices.items():
        given = getattr(options, name).split(",")
        setattr(options, name, given)
        for one in given:
            if one not in known:
                parser.error(f"--{name}: {one} is not one of {', '.join(known)}")
    if options.cpp and not os.access(options.cpp, os.X_OK):
        parser.error(f"--cpp: {options.cpp} is not a program")
    return options


def join_group(device):
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.FileStore(tempfile.mktemp(), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def compare(arguments):
    """The records, the same on every rank but for those of the C++ program, which rank 0 has."""
    start = time.monotonic()
    records = []
    if arguments.cpp and "megamoe" in arguments.layers and int(os.environ.get("RANK", 0)) == 0:
        # Before this process has anything on a device; the other ranks wait in join_group.
        records = records_of_cpp(arguments, int(os.environ.get("WORLD_SIZE", 1)))
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    join_group(device)
    fixed = circumstances(arguments, device)
    records = [record | {"run": fixed["run"]} for record in records]
    dense = dense_tflops(arguments, device)
    for shape in arguments.shapes:
        problem = Problem(shape, arguments.tokens, device)
        compared = variants(problem, arguments.layers, arguments.paths, arguments.modes)
        check_results(problem, compared)
        for description, forward, leaves in compared:
            place = {"shape": shape, "tokens_per_rank": arguments.tokens, "ranks": dist.get_world_size()}
            record = place | description | {"dense_tflops": dense}
            records.append(record | measure(problem, forward, leaves, arguments, device) | fixed)
            if dist.get_rank() == 0:
                told = {key: records[-1][key] for key in records[-1] if key not in fixed}
                print(f"after {time.monotonic() - start:.0f} s: {json.dumps(told)}", flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(records, indent=1) + "\n")
        megamoe.check()
        del problem, compared, forward, leaves
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return records


def main(arguments=None):
    records = compare(parse(arguments))
    if dist.get_rank() == 0:
        print("\n\n".join(filter(None, (table(records), table_beside_cpp(records)))))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
