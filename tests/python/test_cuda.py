"""What only CUDA has to show: errors that the device finds, streams, graphs, a host that does not wait."""

import time

import megamoe
import pytest
import reference
import torch
import torch.distributed as dist
from conftest import require_devices
from ranks import run_ranks
from reference import assert_equal, assert_within_baseline, make_problem, results
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

NAMES = ("x", "expert_ids", "weights", "gate_up", "down")


def test_the_operators_have_cuda_kernels():
    for name in ("forward", "backward", "backward_main_grad"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"megamoe::{name}", "CUDA")


def test_a_traced_call_converts_ids_without_the_host():
    """Traced with fake CUDA tensors, which need no device."""

    def forward(x, expert_ids, weights, gate_up, down):
        return megamoe.moe(x, expert_ids, weights, gate_up, down)

    megamoe.init()
    with FakeTensorMode(), torch.no_grad():
        sizes = {"x": (5, 64), "expert_ids": (5, 2), "weights": (5, 2), "gate_up": (4, 128, 64), "down": (4, 64, 64)}
        dtypes = {"expert_ids": torch.int64, "weights": torch.float32}
        inputs = [
            torch.empty(size, dtype=dtypes.get(name, torch.bfloat16), device="cuda") for name, size in sizes.items()
        ]
        traced = make_fx(forward)(*inputs)
        assert forward(*inputs).device.type == "cuda"
    (call,) = [node for node in traced.graph.nodes if node.target is torch.ops.megamoe.forward.default]
    ids = call.args[1]
    assert ids.meta["val"].dtype == torch.int32
    clamped = ids.args[0]
    assert clamped.target is torch.ops.aten.clamp.default and clamped.args[1:] == (-2, 4)
    kinds = {getattr(node.target, "__name__", "") for node in traced.graph.nodes if node.op == "call_function"}
    assert kinds == {"clamp.default", "_to_copy.default", "forward.default", "getitem"}


# ---- One rank --------------------------------------------------------------------------------------------


@pytest.fixture
def cuda():
    require_devices(1)
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
    try:
        megamoe.check()  # what a failed test has left on the device
    except RuntimeError:
        pass


def inputs_of(problem):
    return {name: getattr(problem, name).detach() for name in NAMES}


@pytest.mark.parametrize("sizes", [{}, {"T": 300, "H": 256, "I": 128, "E": 16, "K": 4}])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "gelu_erf", "gelu_tanh", "relu2", "identity"])
def test_values_are_within_twice_the_cpu_backends_error(cuda, activation, sizes):
    sizes = {"I": 64, "gated": activation not in ("relu2", "identity"), **sizes}

    def layer(*tensors):
        return megamoe.moe(*tensors, activation=activation, activation_limit=0.5)

    actual = results(layer, make_problem(**sizes))
    with torch.device("cpu"):
        problem = make_problem(**sizes)
        baseline = results(layer, problem)
        exact = results(lambda *tensors: reference.moe(*tensors, activation, limit=0.5), problem, torch.float64)
    assert_within_baseline(actual, baseline, exact)


@pytest.mark.parametrize(
    "value, dtype, reported",
    [
        (8, torch.int32, 8),
        (-2, torch.int32, -2),
        (8, torch.int64, 8),
        (-7, torch.int64, -2),
        (2**32, torch.int64, 8),
        (-(2**32), torch.int64, -2),
    ],
)
def test_an_id_out_of_range_is_raised_by_the_next_call_and_by_check(cuda, value, dtype, reported):
    problem = make_problem()
    expected = results(megamoe.moe, problem)
    wrong = inputs_of(problem)
    wrong["expert_ids"] = wrong["expert_ids"].to(dtype, copy=True)
    wrong["expert_ids"][7, 1] = value
    message = rf"expert_ids\[7, 1\] is {reported}, must be -1 or from 0 to 7"
    megamoe.moe(**wrong)
    with pytest.raises(RuntimeError, match=message):
        megamoe.check()
    megamoe.check()  # raised once
    megamoe.moe(**wrong)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=message):
        megamoe.moe(**inputs_of(problem))
    with pytest.raises(RuntimeError, match=message):
        megamoe.check()
    assert_equal(results(megamoe.moe, problem), expected)
    megamoe.check()


def test_more_rows_than_the_capacity_are_named(cuda):
    inputs = inputs_of(make_problem())
    megamoe.moe(**inputs, row_capacity=8)
    with pytest.raises(RuntimeError, match="its capacity is 8"):
        megamoe.check()


def test_max_tokens_bounds_later_calls_and_a_single_rank_grows_without_it(cuda):
    small, large = make_problem(T=40), make_problem(T=5000)
    megamoe.moe(**inputs_of(small), max_tokens=64)
    with pytest.raises(RuntimeError, match="x has 5000 tokens; shape.max_tokens is 64"):
        megamoe.moe(**inputs_of(large), max_tokens=64)
    megamoe.moe(**inputs_of(small))
    y = megamoe.moe(**inputs_of(large))
    megamoe.check()
    assert torch.equal(y[:40], megamoe.moe(**{**inputs_of(large), **{n: inputs_of(large)[n][:40] for n in NAMES[:3]}}))


def test_int64_ids_of_the_operator_itself_are_refused_by_name(cuda):
    inputs = inputs_of(make_problem())
    megamoe.init()
    with pytest.raises(RuntimeError, match="expert_ids is int64 on a CUDA device"):
        torch.ops.megamoe.forward(*inputs.values(), None, None, "one rank", "swiglu", 7.0, True, True, 0, 0, 0)


def test_sizes_without_kernels_are_refused_by_name(cuda):
    with pytest.raises(RuntimeError, match="shape.intermediate_dim is 48; the cuda backend takes multiples of 64"):
        megamoe.moe(**inputs_of(make_problem(I=48)))


def test_one_multiprocessor_is_refused_by_name(cuda):
    with pytest.raises(RuntimeError, match="num_sms is 1; the cuda backend takes 0 or at least 2"):
        megamoe.moe(**inputs_of(make_problem()), num_sms=1)


def test_the_host_waits_for_nothing(cuda):
    problem = make_problem()
    leaves = [leaf.detach().requires_grad_() for leaf in problem.leaves]
    for _ in range(3):  # builds the layer, and both contexts that the loop below holds at a time
        y = megamoe.moe(leaves[0], problem.expert_ids, *leaves[1:])
        y.backward(problem.dy)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # about a second
        start = time.monotonic()
        for _ in range(3):
            y = megamoe.moe(leaves[0], problem.expert_ids, *leaves[1:])
            y.backward(problem.dy)
        seconds = time.monotonic() - start
        done = torch.cuda.Event()
        done.record()
        assert not done.query() and seconds < 0.5, seconds
    finally:
        torch.cuda.set_sync_debug_mode("default")
    megamoe.check()


def test_side_streams(cuda):
    problems = [make_problem(T=num_tokens, seed=num_tokens) for num_tokens in (9, 200, 31)]
    expected = [results(megamoe.moe, problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    actual = []
    for problem, stream in zip(problems, streams):
        with torch.cuda.stream(stream):
            actual.append(results(megamoe.moe, problem))
    torch.cuda.synchronize()
    for found, wanted in zip(actual, expected):
        assert_equal(found, wanted)


class CapturedStep:
    """Forward and backward, captured once; reads what was copied to it last."""

    def __init__(self, problem):
        self.leaves = [leaf.detach().clone().requires_grad_() for leaf in problem.leaves]
        self.ids, self.dy = problem.expert_ids.int(), problem.dy.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._outputs = self._step()

    def _step(self):
        y = megamoe.moe(self.leaves[0], self.ids, *self.leaves[1:])
        return y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)

    def take(self, problem):
        with torch.no_grad():
            for leaf, values in zip(self.leaves, problem.leaves):
                leaf.copy_(values)
            self.ids.copy_(problem.expert_ids)
            self.dy.copy_(problem.dy)

    def replay(self):
        for output in self._outputs:
            output.fill_(float("nan"))
        self.graph.replay()
        return dict(zip(("y", "dx", "dweights", "dgate_up", "ddown"), [output.clone() for output in self._outputs]))


def test_a_captured_step_replays(cuda):
    problem, other = make_problem(seed=1), make_problem(seed=2)
    captured = CapturedStep(problem)
    for case in (other, problem):
        captured.take(case)
        found = captured.replay()
        megamoe.check()
        assert_equal(found, results(megamoe.moe, case))


def test_graphs_replay_between_the_forward_and_the_backward_call_of_others(cuda):
    """A graph keeps the contexts of its calls for itself."""
    problem, other = make_problem(seed=1), make_problem(seed=2, T=31)
    expected = {"graph": results(megamoe.moe, problem), "other": results(megamoe.moe, other)}
    graphs = [CapturedStep(problem), CapturedStep(problem)]

    def layer(*tensors):
        y = megamoe.moe(*tensors)
        for graph in graphs:
            assert_equal(graph.replay(), expected["graph"])
        return y

    for _ in range(3):
        assert_equal(results(layer, other), expected["other"])
    megamoe.check()


def test_a_graph_outlives_the_layer_that_a_larger_one_replaced(cuda):
    problem, larger = make_problem(seed=1, E=6), make_problem(T=9000, E=6)
    expected = results(megamoe.moe, problem)
    captured = CapturedStep(problem)
    results(megamoe.moe, larger)
    fill = torch.full((1 << 28,), float("nan"))  # where memory was freed
    assert_equal(captured.replay(), expected)
    captured.ids[3, 1] = 6
    captured.replay()
    with pytest.raises(RuntimeError, match=r"expert_ids\[3, 1\] is 6"):
        megamoe.check()
    del fill


def test_contexts_of_destroyed_graphs_are_used_again(cuda):
    problem = make_problem(T=3000, H=512, I=512)
    CapturedStep(problem)
    before = reference.used_mib("cuda")
    for _ in range(20):
        CapturedStep(problem)
        torch.cuda.empty_cache()
    # A context keeps 3000 * 3 rows of g and u: 18 MiB. The driver tells of a graph's end when it likes.
    assert reference.used_mib("cuda") < before + 100


# ---- Two ranks -------------------------------------------------------------------------------------------


def part_of(problem, rank):
    tokens, experts = slice(20 * rank, 20 * rank + 20), slice(4 * rank, 4 * rank + 4)
    inputs = {name: getattr(problem, name).detach()[tokens].clone() for name in NAMES[:3]}
    return inputs | {name: getattr(problem, name).detach()[experts].clone() for name in NAMES[3:]}


def message_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return "no error"


def two_rank_errors(rank):
    megamoe.init(entry_deadline_s=20, inner_deadline_s=20)
    inputs = part_of(make_problem(), rank)
    found = {"y": megamoe.moe(**inputs)}

    def call(**changes):
        """What the call raises, and what check() raises after it."""
        arguments = {**inputs, **(changes if rank == 1 else {})}
        return message_of(lambda: megamoe.moe(**arguments)), message_of(megamoe.check)

    found["id"] = call(expert_ids=torch.full_like(inputs["expert_ids"], 8))
    found["dtype"] = call(x=inputs["x"].float())
    found["shape"] = call(weights=inputs["weights"][:, :1])
    more = {name: inputs[name].repeat(5, 1) for name in NAMES[:3]}
    found["tokens"] = call(**more)
    megamoe.reserve(100)
    found["reserved"] = call(**more)
    found["y again"] = megamoe.moe(**inputs)
    megamoe.check()

    # A group of its own over NCCL's, and the device that torch had is still the current one.
    both = dist.new_group([0, 1])
    found["second group"] = megamoe.moe(**inputs, group=both)
    megamoe.check(both)
    found["device"] = torch.cuda.current_device()
    return found


def test_errors_of_one_rank_reach_both(tmp_path):
    require_devices(2)
    ranks = run_ranks(two_rank_errors, 2, tmp_path, device="cuda")
    with torch.device("cuda"):
        expected = results(megamoe.moe, make_problem())["y"].cpu()
    for name in ("y", "y again", "second group"):
        assert torch.equal(torch.cat([found[name] for found in ranks]), expected), name
    assert [found["device"] for found in ranks] == [0, 1]
    for found in ranks:
        assert "expert_ids[0, 0] is 8, must be -1 or from 0 to 7" in found["id"][1], found["id"]
        assert found["reserved"] == ("no error", "no error")
    for name, message in {
        "dtype": "x must be bf16, is fp32",
        "shape": "weights must have shape of expert_ids",
        "tokens": "x has 100 tokens; the layer was built for 64 in its first call: call megamoe.reserve",
    }.items():
        assert message in ranks[1][name][0], ranks[1][name]
        assert "rank 1 refused the call" in ranks[0][name][1], ranks[0][name]


def steps_beside_collectives(rank):
    """How many of 40 steps gave other bits than one alone, while NCCL gathers 64 MiB on a stream of its own; ranks
    enqueue step and collective in opposite orders."""
    inputs = part_of(make_problem(), rank)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weights", "gate_up", "down")]

    def step():
        y = megamoe.moe(**inputs)
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    expected = step()
    part = torch.full((32 << 20,), 1.0 + rank, dtype=torch.bfloat16)
    whole = torch.empty(2 * part.numel(), dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    dist.barrier()
    num_wrong = 0
    for number in range(40):
        found = step() if (number + rank) % 2 == 0 else None
        with torch.cuda.stream(stream):
            dist.all_gather_into_tensor(whole, part)
        found = step() if found is None else found
        num_wrong += not all(map(torch.equal, found, expected))
    stream.synchronize()
    megamoe.check()
    assert whole[: part.numel()].eq(1).all() and whole[part.numel() :].eq(2).all()
    return num_wrong


def test_collectives_of_nccl_run_beside_the_layer(tmp_path):
    require_devices(2)
    assert run_ranks(steps_beside_collectives, 2, tmp_path, device="cuda") == [0, 0]


def one_rank_raises(rank):
    inputs = part_of(make_problem(), rank)
    megamoe.moe(**inputs)
    megamoe.check()
    if rank == 1:
        raise KeyError("of the user's program")
    start = time.monotonic()
    megamoe.moe(**inputs)
    return message_of(megamoe.check), time.monotonic() - start


def test_a_rank_that_raises_fails_its_peers_soon(tmp_path):
    require_devices(2)
    (message, seconds), _ = run_ranks(one_rank_raises, 2, tmp_path, failing=[1], device="cuda")
    assert "rank 1" in message and seconds < 60, (message, seconds)
