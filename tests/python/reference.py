"""What the layer computes, in plain torch operations, and how far a result may be from it.

In fp64 it is the oracle; in bf16 it is the baseline: a layer's error may be at most twice the baseline's.
"""

import dataclasses
import resource

import torch
import torch.nn.functional as F


def activate(kind, gate, up, limit=7.0):
    if kind == "swiglu":
        return F.silu(gate) * up
    if kind == "clamped_swiglu":
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if kind == "gelu_erf":
        return F.gelu(gate) * up
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if kind == "relu2":
        return F.relu(up).square()
    assert kind == "identity"
    return up


def moe(x, expert_ids, weights, gate_up, down, activation="swiglu", limit=7.0):
    """[T, H] in the dtype of x; slots are summed in the dtype of weights, then rounded once."""
    # The sum gives it a gradient without tokens too.
    y = torch.zeros(x.shape, dtype=weights.dtype, device=x.device) + 0 * weights.sum()
    for slot in range(expert_ids.shape[1]):
        for expert in range(down.shape[0]):
            rows = (expert_ids[:, slot] == expert).nonzero().flatten()
            if not len(rows):
                continue
            products = x[rows] @ gate_up[expert].T
            gated = activation not in ("relu2", "identity")
            gate, up = products.chunk(2, dim=-1) if gated else (None, products)
            output = activate(activation, gate, up, limit) @ down[expert].T
            y = y.index_add(0, rows, weights[rows, slot, None] * output.to(weights.dtype))
    return y.to(x.dtype)


@dataclasses.dataclass
class Problem:
    """Inputs of one layer; unit scale, so that outputs and gradients are of order 1."""

    x: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    dy: torch.Tensor

    @property
    def leaves(self):
        return [self.x, self.weights, self.gate_up, self.down]


#: What megamoe.moe takes.
INPUTS = ("x", "expert_ids", "weights", "gate_up", "down")


def inputs_of(problem):
    return {name: getattr(problem, name).detach() for name in INPUTS}


def expert_dim():
    """A width that the backend of torch's default device has: the CUDA backend takes multiples of 64."""
    return 48 if torch.get_default_device().type == "cpu" else 64


def make_problem(T=40, H=64, I=None, E=8, K=3, gated=True, seed=0):  # noqa: E741  the legend's letters
    """On torch's default device, with the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    I = I or expert_dim()  # noqa: E741
    device = torch.get_default_device()

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, device="cpu") * scale).bfloat16().to(device)

    problem = Problem(
        x=normal(T, H),
        expert_ids=torch.randint(-1, E, (T, K), generator=generator, device="cpu").to(device),
        weights=torch.rand(T, K, generator=generator, device="cpu").to(device),
        gate_up=normal(E, (2 if gated else 1) * I, H, scale=H**-0.5),
        down=normal(E, H, I, scale=I**-0.5),
        dy=normal(T, H),
    )
    for leaf in problem.leaves:
        leaf.requires_grad_()
    return problem


def results(function, problem, dtype=None):
    """{name: tensor} of y and all gradients; dtype: None as they are, fp64 for the oracle."""
    x, weights, gate_up, down = leaves = [
        leaf.detach().clone().to(dtype or leaf.dtype).requires_grad_() for leaf in problem.leaves
    ]
    y = function(x, problem.expert_ids, weights, gate_up, down)
    y.backward(problem.dy.to(y.dtype))
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return dict(zip(("y", "dx", "dweights", "dgate_up", "ddown"), (y.detach(), *gradients)))


def error(actual, exact):
    """Norm of the difference, in fp64. A NaN stays a NaN, and compares false with every limit."""
    return (actual.cpu().double() - exact.cpu().double()).norm()


def assert_within_baseline(actual, baseline, exact, factor=2.0):
    """Every tensor's error, and every expert's of weight gradients, is at most twice the baseline's."""
    assert actual.keys() == exact.keys()
    for name, tensor in actual.items():
        assert tensor.shape == exact[name].shape, name
        parts = range(tensor.shape[0]) if name in ("dgate_up", "ddown") else [slice(None)]
        for part in parts:
            # fp32 accumulation over at most a few hundred terms, where the baseline happens to be exact.
            floor = 2**-20 * exact[name][part].cpu().double().norm()
            limit = factor * error(baseline[name][part], exact[name][part]) + floor
            found = error(tensor[part], exact[name][part])
            assert found <= limit, f"{name}[{part}]: error {found:.3g}, limit {limit:.3g}"


def assert_equal(actual, expected):
    """The same bits in every tensor."""
    assert actual.keys() == expected.keys()
    for name in actual:
        assert torch.equal(actual[name].cpu(), expected[name].cpu()), name


def used_mib(device_type):
    """Memory of this process on the CPU, of all processes on a device."""
    if device_type == "cpu":
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize() / 2**20
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def least_growth_mib(device_type, run, num_runs=3):
    """What the run leaves behind. Other processes may take memory of a device meanwhile, but hardly during each of several runs, as a leak does."""
    growths = []
    for _ in range(num_runs):
        before = used_mib(device_type)
        run()
        growths.append(used_mib(device_type) - before)
    return min(growths)
