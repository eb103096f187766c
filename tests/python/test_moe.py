"""The functional form on one rank, on each backend: values, gradients and the ways in which torch runs an operator."""

import gc

import megamoe
import pytest
import reference
import torch
from reference import assert_equal, assert_within_baseline, least_growth_mib, make_problem, results
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ACTIVATIONS = ["swiglu", "clamped_swiglu", "gelu_erf", "gelu_tanh", "relu2", "identity"]
OPTIONS = ("one rank", "swiglu", 7.0, True, True, 0, 0, 0)
pytestmark = pytest.mark.usefixtures("device")


def kept_calls():
    gc.collect()
    return torch.ops.megamoe.num_kept_calls()


# ---- Values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_oracle_passes_gradcheck(activation):
    problem = make_problem(T=5, H=4, I=3, E=3, K=2, gated=activation not in ("relu2", "identity"))
    leaves = [leaf.detach().double().requires_grad_() for leaf in problem.leaves]
    torch.autograd.gradcheck(
        lambda x, weights, gate_up, down: reference.moe(
            x, problem.expert_ids, weights, gate_up, down, activation, limit=0.5
        ),
        leaves,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_within_twice_the_baselines_error(activation):
    problem = make_problem(gated=activation not in ("relu2", "identity"))

    def expected(*tensors):
        return reference.moe(*tensors, activation, limit=0.5)

    def actual(*tensors):
        return megamoe.moe(*tensors, activation=activation, activation_limit=0.5)

    assert_within_baseline(
        results(actual, problem), results(expected, problem), results(expected, problem, torch.float64)
    )


def test_a_wrong_gradient_is_found():
    problem = make_problem()
    exact = results(reference.moe, problem, torch.float64)
    baseline = results(reference.moe, problem)
    for name in exact:
        wrong = {key: value.clone() for key, value in results(megamoe.moe, problem).items()}
        wrong[name][-1] *= -1
        with pytest.raises(AssertionError, match=name):
            assert_within_baseline(wrong, baseline, exact)
        wrong[name][-1] = float("nan")
        with pytest.raises(AssertionError, match=name):
            assert_within_baseline(wrong, baseline, exact)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 63, 64, 65, 129])
def test_any_number_of_tokens(num_tokens):
    problem = make_problem(T=num_tokens)
    assert_within_baseline(
        results(megamoe.moe, problem),
        results(reference.moe, problem),
        results(reference.moe, problem, torch.float64),
    )


def test_recompute_overlap_and_a_second_run_give_the_same_bits():
    problem = make_problem()
    expected = results(megamoe.moe, problem)
    for options in ({}, {"recompute": True}, {"overlap_comm": False}, {"max_tokens": 4096}, {"num_sms": 20}):
        assert_equal(results(lambda *tensors: megamoe.moe(*tensors, **options), problem), expected)


def test_both_slots_of_one_expert_count_and_empty_slots_do_not():
    problem = make_problem(T=64, K=4)
    ids = torch.tensor([[5, 7, 7, 6], [-1, 2, 2, 2], [-1, -1, -1, -1], [1, -1, 1, -1]])
    problem.expert_ids = ids.repeat(16, 1)
    actual = results(megamoe.moe, problem)
    assert_within_baseline(actual, results(reference.moe, problem), results(reference.moe, problem, torch.float64))
    assert actual["y"][2].abs().max() == 0
    assert (actual["dweights"][problem.expert_ids == -1] == 0).all()
    assert (actual["dgate_up"][3] == 0).all()  # no token names expert 3


def test_leading_dimensions_are_kept():
    problem = make_problem(T=24)
    expected = results(megamoe.moe, problem)

    def batched(x, expert_ids, weights, gate_up, down):
        y = megamoe.moe(x.view(2, 3, 4, -1), expert_ids.view(2, 3, 4, -1), weights.view(2, 3, 4, -1), gate_up, down)
        assert y.shape == (2, 3, 4, x.shape[-1])
        return y.view(x.shape)

    assert_equal(results(batched, problem), expected)


# ---- Inputs ----------------------------------------------------------------------------------------------


def test_int32_and_int64_ids_agree():
    problem = make_problem()
    expected = results(megamoe.moe, problem)
    problem.expert_ids = problem.expert_ids.int()
    assert_equal(results(megamoe.moe, problem), expected)


def test_weights_of_another_float_dtype_are_converted_and_get_their_gradient():
    problem = make_problem()
    weights = problem.weights.detach().bfloat16().requires_grad_()
    problem.weights = weights.detach().float().requires_grad_()
    expected = results(megamoe.moe, problem)
    for dtype in (torch.bfloat16, torch.float64):
        problem.weights = weights.detach().to(dtype).requires_grad_()
        actual = results(megamoe.moe, problem)
        assert actual["dweights"].dtype == dtype
        actual["dweights"] = actual["dweights"].float()
        expected_here = dict(expected, dweights=expected["dweights"].to(dtype).float())
        assert_equal(actual, expected_here)


def test_strided_inputs_and_an_expanded_gradient_give_the_same_bits():
    problem = make_problem()
    problem.dy = problem.dy[:1].expand_as(problem.dy)
    expected = results(megamoe.moe, problem)

    def strided(x, expert_ids, weights, gate_up, down):
        wide = torch.cat([x, x[:, :1]], dim=1)[:, :-1]  # row stride H + 1
        transposed_ids = expert_ids.T.contiguous().T
        every_second_weight = weights.repeat_interleave(2, dim=1)[:, ::2]
        y = megamoe.moe(wide, transposed_ids, every_second_weight, gate_up, down)
        assert torch.equal(megamoe.moe(x.T.contiguous().T, expert_ids, weights, gate_up, down), y)
        return y

    assert_equal(results(strided, problem), expected)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: {"x": p.x.float()}, "x must be bf16, is fp32"),
        (lambda p: {"x": p.x.half()}, "x is fp16, which is not supported yet"),
        (lambda p: {"gate_up": p.gate_up.float()}, r"experts.gate must be bf16, is fp32"),
        (lambda p: {"down": p.down.double()}, r"experts.down must be bf16, is fp64"),
        (lambda p: {"weights": p.weights.int()}, "weights must be fp32, is int32"),
        (lambda p: {"expert_ids": p.expert_ids.float()}, "expert_ids must be int32 or int64, is fp32"),
        (lambda p: {"expert_ids": p.expert_ids.to(torch.uint8)}, "expert_ids has an element type"),
        (lambda p: {"expert_ids": p.expert_ids[:-1]}, "expert_ids has shape .* leading dimensions must be those of x"),
        (lambda p: {"weights": p.weights[:, :-1]}, "weights must have shape of expert_ids"),
        (lambda p: {"gate_up": p.gate_up[:, :-2]}, r"gate_up must have shape \[e, 2I, H\]"),
        (lambda p: {"down": p.down[0]}, "gate_up and down must have three dimensions"),
        (lambda p: {"down": p.down.mT.contiguous().mT}, "experts.down must have contiguous columns"),
        (lambda p: {"activation": "swish"}, 'activation is "swish"'),
        (lambda p: {"num_sms": 1025}, "num_sms is 1025, must be from 0 to 1024"),
        (lambda p: {"max_tokens": 4}, "x has 40 tokens; shape.max_tokens is 4"),
        (lambda p: {"row_capacity": 8}, "its capacity is 8"),
        (lambda p: {"expert_ids": p.expert_ids.to("meta")}, "expert_ids is on device meta; x is on"),
        (lambda p: {"weights": p.weights.to("meta")}, "weights is on device meta; x is on"),
        (lambda p: {"gate_up": p.gate_up.to("meta")}, "gate_up is on device meta; x is on"),
        (lambda p: {"main_grads": (p.gate_up.float().to("meta"), p.down.float())}, "gate_up_main_grad is on device"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, message, device):
    if device == "cuda" and "capacity" in message:
        pytest.skip("the device reports it later: test_cuda.py")
    problem = make_problem()
    arguments = {name: getattr(problem, name).detach() for name in ("x", "expert_ids", "weights", "gate_up", "down")}
    with pytest.raises(RuntimeError, match=message):
        megamoe.moe(**{**arguments, **change(problem)})
    assert torch.equal(megamoe.moe(**arguments), results(megamoe.moe, problem)["y"])  # the layer is usable


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda p: {"num_sms": -5}, ValueError, "num_sms is -5, must be at least 0"),
        (lambda p: {"max_tokens": -1}, ValueError, "max_tokens is -1, must be at least 0"),
        (lambda p: {"group": "world"}, TypeError, "group must be a torch.distributed.ProcessGroup, is str"),
        (lambda p: {"x": torch.nested.nested_tensor([p.x.detach()])}, TypeError, "x must be a dense tensor, is nested"),
        (
            lambda p: {"x": torch.quantize_per_tensor(p.x.detach().float().cpu(), 0.1, 0, torch.qint8)},
            TypeError,
            "x must be a dense tensor, is quantized",
        ),
        (lambda p: {"expert_ids": p.expert_ids.tolist()}, TypeError, "expert_ids must be a torch.Tensor, is list"),
    ],
)
def test_arguments_of_other_kinds_are_refused_by_name(change, error, message):
    problem = make_problem()
    arguments = {name: getattr(problem, name).detach() for name in ("x", "expert_ids", "weights", "gate_up", "down")}
    with pytest.raises(error, match=message):
        megamoe.moe(**{**arguments, **change(problem)})


def test_no_room_is_refused_by_name():
    for wrong, error in ((0, "max_tokens is 0, must be at least 1"), ("3", "max_tokens must be an int, is str")):
        with pytest.raises((TypeError, ValueError), match=error):
            megamoe.reserve(wrong)
    megamoe.reserve(3)


@pytest.mark.parametrize(
    "value, dtype",
    [
        (8, torch.int32),
        (-2, torch.int32),
        (8, torch.int64),
        (-2, torch.int64),
        (2**32, torch.int64),
        (-(2**32), torch.int64),
    ],
)
def test_an_id_out_of_range_is_named_with_its_place(value, dtype, device):
    if device == "cuda":
        pytest.skip("the device reports it later: test_cuda.py")
    problem = make_problem(E=8)
    problem.expert_ids = problem.expert_ids.to(dtype)
    problem.expert_ids[7, 1] = value
    with pytest.raises(RuntimeError, match=rf"expert_ids\[7, 1\] is {value}, must be -1 or from 0 to 7"):
        results(megamoe.moe, problem)


# ---- Autograd --------------------------------------------------------------------------------------------


@pytest.fixture
def problem(device):
    return make_problem()


def call_tensors(problem):
    return [problem.x, problem.expert_ids, problem.weights, problem.gate_up, problem.down]


def test_opcheck(problem):
    megamoe.init()
    problem.expert_ids = problem.expert_ids.int()
    tensors = call_tensors(problem)
    torch.library.opcheck(torch.ops.megamoe.forward, (*tensors, None, None, *OPTIONS))
    with torch.no_grad():
        _, call = torch.ops.megamoe.forward(*tensors, None, None, *OPTIONS)
        detached = [tensor.detach() for tensor in tensors]
        torch.library.opcheck(torch.ops.megamoe.backward, (problem.dy, call, *detached, *OPTIONS))
        main_grads = [torch.zeros(leaf.shape) for leaf in (problem.gate_up, problem.down)]
        _, call = torch.ops.megamoe.forward(*tensors, *main_grads, *OPTIONS)
        torch.library.opcheck(
            torch.ops.megamoe.backward_main_grad, (problem.dy, call, *detached, *main_grads, *OPTIONS)
        )
        torch.library.opcheck(torch.ops.megamoe.all_reduce_sum, (torch.ones(3, device="cpu"), "one rank"))


def test_compiled_is_eager_for_every_number_of_tokens():
    compiled = torch.compile(megamoe.moe, fullgraph=True, dynamic=True)
    for num_tokens in (5, 64, 1, 0, 17):
        problem = make_problem(T=num_tokens)
        assert_equal(results(compiled, problem), results(megamoe.moe, problem))
    assert kept_calls() == 0


def test_checkpointing_runs_forward_again(problem):
    expected = results(megamoe.moe, problem)
    for use_reentrant in (False, True):
        assert_equal(
            results(lambda *tensors: checkpoint(megamoe.moe, *tensors, use_reentrant=use_reentrant), problem), expected
        )
    assert kept_calls() == 0


def test_selective_checkpointing_can_save_the_output(problem):
    expected = results(lambda *tensors: megamoe.moe(*tensors).sin(), problem)
    calls = []  # False: the first run of forward; True: its rerun, which takes the saved output

    def policy(context, op, *args, **kwargs):
        is_layer = op == torch.ops.megamoe.forward.default
        if is_layer:
            calls.append(context.is_recompute)
        return CheckpointPolicy.MUST_SAVE if is_layer else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(*tensors):
        return checkpoint(
            lambda *inner: megamoe.moe(*inner).sin(),
            *tensors,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    assert_equal(results(layer, problem), expected)
    assert calls == [False, True] and kept_calls() == 0


def test_gradients_accumulate(problem):
    once = results(megamoe.moe, problem)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in problem.leaves]
    for _ in range(2):
        megamoe.moe(leaves[0], problem.expert_ids, *leaves[1:]).backward(problem.dy)
    for leaf, name in zip(leaves, ("dx", "dweights", "dgate_up", "ddown")):
        assert torch.equal(leaf.grad, once[name] + once[name]), name


def test_micro_batches_in_flight_keep_their_own_routing():
    problems = [make_problem(T=num_tokens, seed=num_tokens) for num_tokens in (9, 200, 31)]
    expected = [results(megamoe.moe, problem) for problem in problems]
    outputs = [megamoe.moe(*call_tensors(problem)) for problem in problems]
    assert kept_calls() == 3
    for index in (1, 0, 2):
        problem = problems[index]
        outputs[index].backward(problem.dy)
        for leaf, name in zip(problem.leaves, ("dx", "dweights", "dgate_up", "ddown")):
            assert torch.equal(leaf.grad, expected[index][name]), name
    del outputs
    assert kept_calls() == 0


def test_backward_twice_over_a_retained_graph(problem):
    expected = results(megamoe.moe, problem)
    y = megamoe.moe(*call_tensors(problem))
    y.backward(problem.dy, retain_graph=True)
    y.backward(problem.dy)
    assert torch.equal(problem.gate_up.grad, expected["dgate_up"] + expected["dgate_up"])


def test_second_derivatives_are_refused(problem):
    """Left out, they would make a gradient penalty silently wrong."""
    y = megamoe.moe(*call_tensors(problem))
    with pytest.raises(RuntimeError, match="megamoe has no second derivatives"):
        torch.autograd.grad(y, [problem.x], problem.dy, create_graph=True)


def test_functional_transforms_want_no_gradient(problem):
    def layer(x):
        return megamoe.moe(x, problem.expert_ids, problem.weights, problem.gate_up, problem.down)

    xs = torch.stack([problem.x, 2 * problem.x]).detach()
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: layer(x).sum())(xs[0])
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(layer)(xs)
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(layer)(xs), torch.stack([layer(x) for x in xs]))


def test_saved_tensors_may_be_copied_elsewhere(problem):
    expected = results(megamoe.moe, problem)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.numpy(force=True).copy() if tensor.dtype == torch.int64 else tensor,
        lambda packed: torch.from_numpy(packed) if not torch.is_tensor(packed) else packed,
    ):
        assert_equal(results(megamoe.moe, problem), expected)


def test_a_thousand_calls_without_gradient_leave_memory_flat(problem, device):
    def run(num_calls):
        for _ in range(num_calls):
            megamoe.moe(*call_tensors(problem))

    with torch.no_grad():
        run(100)
        assert least_growth_mib(device, lambda: run(1000)) < 2
    assert least_growth_mib(device, lambda: run(100)) < 2  # with a graph that nobody keeps
    assert kept_calls() == 0


def test_only_some_inputs_need_a_gradient(problem):
    expected = results(megamoe.moe, problem)
    for name in ("x", "weights", "gate_up", "down"):
        tensors = {key: getattr(problem, key).detach() for key in ("x", "expert_ids", "weights", "gate_up", "down")}
        tensors[name].requires_grad_()
        megamoe.moe(**tensors).backward(problem.dy)
        assert torch.equal(tensors[name].grad, expected["d" + name]), name


def test_memory_filled_with_nan_changes_nothing(problem):
    expected = results(megamoe.moe, problem)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert_equal(results(megamoe.moe, problem), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast_casts_x_and_expert_weights(problem, device):
    expected = results(megamoe.moe, problem)

    def layer(x, expert_ids, weights, gate_up, down):
        with torch.autocast(device, torch.bfloat16):
            return megamoe.moe(x, expert_ids, weights, gate_up, down)

    for function in (layer, torch.compile(layer, fullgraph=True)):
        actual = results(function, problem, torch.float32)
        assert actual["y"].dtype == torch.bfloat16
        assert_equal(
            {name: tensor.float() for name, tensor in actual.items()},
            {name: tensor.float() for name, tensor in expected.items()},
        )


@pytest.mark.parametrize("compiled", [False, True])
def test_main_grad_gets_the_sum_in_fp32(problem, compiled):
    function = torch.compile(megamoe.moe, fullgraph=True) if compiled else megamoe.moe
    main_grads = tuple(torch.full(leaf.shape, 3.0) for leaf in (problem.gate_up, problem.down))
    outputs = [function(*call_tensors(problem), main_grads=main_grads) for _ in range(2)]
    for y in outputs:
        y.backward(problem.dy)
    assert problem.gate_up.grad is None and problem.down.grad is None
    exact = results(reference.moe, problem, torch.float64)
    once = results(megamoe.moe, problem)
    for main_grad, name in zip(main_grads, ("dgate_up", "ddown")):
        gradient = (main_grad.double() - 3) / 2
        # Nearer to the exact gradient than a bf16 gradient is; at most its rounding away from that.
        assert reference.error(gradient, exact[name]) <= reference.error(once[name], exact[name])
        assert reference.error(gradient, once[name]) <= 2**-8 * once[name].double().norm()
        assert (main_grad[0] == 3).all() == (once[name][0] == 0).all()
