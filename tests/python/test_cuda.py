"""What only CUDA has to show: errors that the device finds, streams, graphs, a host that does not wait."""

import time

import megamoe
import pytest
import reference
import torch
from captured_step import CapturedStep
from conftest import require_devices
from reference import INPUTS, assert_equal, assert_within_baseline, inputs_of, make_problem, results
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


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
    assert torch.equal(y[:40], megamoe.moe(**{**inputs_of(large), **{n: inputs_of(large)[n][:40] for n in INPUTS[:3]}}))


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
