"""Two ranks, as processes of this host, against one rank on the same tokens, on each backend.

With the CPU backend their group is gloo's; with CUDA they have a device each and the group is NCCL's.
"""

import gc

import megamoe
import pytest
import torch
import torch.distributed as dist
from ranks import NUM_RANKS, SPLITS, joined, part_of, run_ranks
from reference import assert_equal, error, expert_dim, make_problem, results, used_mib
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


def short_form_step(weights, problem):
    weights = weights.clone().requires_grad_()
    x = problem.x.detach().clone().requires_grad_()
    y = megamoe.moe_overlapping_backward_op(x, weights, problem.expert_ids)
    y.backward(problem.dy)
    return {"y": y.detach(), "dx": x.grad}, weights.grad


def layer_step(x, dy, weights=None):
    """One step of a MoELayer: `weights` are of all experts."""
    layer = megamoe.MoELayer(8, 64, expert_dim(), 3)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            whole = weights[name]
            is_expert = megamoe.is_expert_parameter(parameter)
            parameter.copy_(whole[layer.local_experts.start : layer.local_experts.stop] if is_expert else whole)
    y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "dgate_up": layer.gate_up.grad, "ddown": layer.down.grad}, layer.router.weight.grad


def layer_weights():
    torch.manual_seed(1)
    shapes = {"router.weight": (8, 64), "gate_up": (8, 2 * expert_dim(), 64), "down": (8, 64, expert_dim())}
    return {name: (torch.randn(shape) / shape[-1] ** 0.5).bfloat16() for name, shape in shapes.items()}


def fsdp_step(x, dy, group, weights):
    """A layer whose group is this rank alone, its parameters sharded over both ranks on the expert dimension."""
    layer = megamoe.MoELayer(8, 64, expert_dim(), 3, group=group)
    layer.load_state_dict(weights)
    fully_shard(layer, mesh=init_device_mesh(x.device.type, (NUM_RANKS,)))
    assert layer.gate_up.to_local().shape[0] == 8 // NUM_RANKS
    layer(x).backward(dy)
    return {name: parameter.grad.full_tensor() for name, parameter in layer.named_parameters()}


def moe_in_autocast(x, *others):
    with torch.autocast(x.device.type, torch.bfloat16):
        return megamoe.moe(x, *others)


def moe_of_strided_inputs(x, expert_ids, weights, gate_up, down):
    wide = torch.cat([x, x[:, :1]], dim=1)[:, :-1]  # row stride H + 1
    return megamoe.moe(wide, expert_ids.T.contiguous().T, weights, gate_up, down)


def results_on_a_side_stream(problem):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = results(megamoe.moe, problem)
    stream.synchronize()
    return found


def results_with_nan_in_new_memory(problem):
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        return results(megamoe.moe, problem)
    finally:
        torch.use_deterministic_algorithms(False)


def main_grads_of(problem):
    """fp32 gradients, added to 3 by two calls."""
    main_grads = tuple(torch.full(leaf.shape, 3.0) for leaf in (problem.gate_up, problem.down))
    tensors = [problem.x, problem.expert_ids, problem.weights, problem.gate_up, problem.down]
    x = problem.x.detach().requires_grad_()
    for _ in range(2):
        megamoe.moe(x, *tensors[1:], main_grads=main_grads).backward(problem.dy)
    return dict(zip(("dgate_up", "ddown"), main_grads))


def mib_of_calls(problem, num_calls):
    """What so many calls without gradients leave."""
    tensors = [problem.x, problem.expert_ids, problem.weights, problem.gate_up, problem.down]
    with torch.no_grad():
        for _ in range(50):
            megamoe.moe(*tensors)
        before = used_mib(problem.x.device.type)
        for _ in range(num_calls):
            megamoe.moe(*tensors)
        dist.barrier()
        return used_mib(problem.x.device.type) - before


def successes(rank):
    found = {}
    for name, split in SPLITS.items():
        found[name] = results(megamoe.moe, part_of(make_problem(T=split[1]), split, rank))

    split = SPLITS["uneven"]
    problem = part_of(make_problem(), split, rank)
    variants = {
        "recompute": lambda *tensors: megamoe.moe(*tensors, recompute=True),
        "max_tokens": lambda *tensors: megamoe.moe(*tensors, max_tokens=100),
        "checkpoint": lambda *tensors: checkpoint(megamoe.moe, *tensors, use_reentrant=False),
        "compiled": torch.compile(megamoe.moe, fullgraph=True),
    }
    variants["strided"] = moe_of_strided_inputs
    for name, function in variants.items():
        found[name] = results(function, problem)
    cast = results(moe_in_autocast, problem, torch.float32)
    found["autocast"] = {name: value if name == "dweights" else value.bfloat16() for name, value in cast.items()}
    found["memory filled with NaN"] = results_with_nan_in_new_memory(problem)
    if problem.x.is_cuda:
        found["side stream"] = results_on_a_side_stream(problem)
    found["main grads"] = main_grads_of(problem)
    found["MiB"] = mib_of_calls(problem, 300)

    # All tokens of both ranks to the experts of rank 0.
    skewed = make_problem()
    skewed.expert_ids = skewed.expert_ids.clamp(max=3)
    found["skewed"] = results(megamoe.moe, part_of(skewed, split, rank))

    # Several micro-batches in flight, and no_grad calls between them.
    outputs = [
        megamoe.moe(problem.x, problem.expert_ids, problem.weights, problem.gate_up.requires_grad_(), problem.down)
        for _ in range(2)
    ]
    with torch.no_grad():
        megamoe.moe(problem.x, problem.expert_ids, problem.weights, problem.gate_up, problem.down)
    for y in outputs:
        y.backward(problem.dy)
    found["in flight"] = {"dgate_up": problem.gate_up.grad}
    del outputs, y

    # Groups of their own: both ranks again, and each alone.
    both = dist.new_group([0, 1])
    found["second group"] = results(lambda *tensors: megamoe.moe(*tensors, group=both), problem)
    compiled = torch.compile(lambda *tensors: megamoe.moe(*tensors, group=both), fullgraph=True)
    found["second group, compiled"] = results(compiled, problem)
    alone = [dist.new_group([peer]) for peer in range(NUM_RANKS)][rank]
    found["alone"] = results(lambda *tensors: megamoe.moe(*tensors, group=alone), make_problem())

    found["short form"], found["short form weights"] = short_form_step(
        make_problem().gate_up.detach().mT[..., :64], problem
    )
    weights = layer_weights()
    found["layer"], router_gradient = layer_step(problem.x, problem.dy, weights)
    found["layer router"] = router_gradient
    found["fsdp"] = fsdp_step(problem.x.detach(), problem.dy, alone, weights)
    gc.collect()
    found["kept calls"] = torch.ops.megamoe.num_kept_calls()
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, device_of_ranks):
    return run_ranks(successes, NUM_RANKS, tmp_path_factory.mktemp("ranks"), device=device_of_ranks)


@pytest.mark.parametrize("name", SPLITS)
def test_two_ranks_give_the_bits_of_one(two_ranks, name):
    assert_equal(joined(two_ranks, name), results(megamoe.moe, make_problem(T=SPLITS[name][1])))


@pytest.mark.parametrize(
    "name",
    [
        "recompute",
        "max_tokens",
        "checkpoint",
        "compiled",
        "strided",
        "autocast",
        "memory filled with NaN",
        "side stream",
        "second group",
        "second group, compiled",
    ],
)
def test_every_way_to_run_gives_the_bits_of_one_rank(two_ranks, name):
    if name not in two_ranks[0]:
        pytest.skip("streams are CUDA's")
    assert_equal(joined(two_ranks, name), results(megamoe.moe, make_problem()))


def test_all_tokens_to_one_rank(two_ranks):
    problem = make_problem()
    problem.expert_ids = problem.expert_ids.clamp(max=3)
    actual = joined(two_ranks, "skewed")
    assert_equal(actual, results(megamoe.moe, problem))
    assert (actual["dgate_up"][4:] == 0).all()


def test_micro_batches_in_flight(two_ranks):
    once = results(megamoe.moe, make_problem())["dgate_up"]
    assert torch.equal(joined(two_ranks, "in flight")["dgate_up"], (once + once).cpu())


def test_main_grads_accumulate(two_ranks):
    assert_equal(joined(two_ranks, "main grads"), main_grads_of(make_problem()))


def test_calls_without_gradients_leave_memory_flat(two_ranks):
    assert all(found["MiB"] < 4 for found in two_ranks), [found["MiB"] for found in two_ranks]


def test_a_group_of_one_rank_computes_alone(two_ranks):
    for found in two_ranks:
        assert_equal(found["alone"], results(megamoe.moe, make_problem()))


def test_the_short_form_gives_every_rank_the_whole_gradient(two_ranks):
    problem = make_problem()
    expected, gradient = short_form_step(problem.gate_up.detach().mT[..., :64], problem)
    assert_equal(joined(two_ranks, "short form"), expected)
    for found in two_ranks:
        assert torch.equal(found["short form weights"], gradient.cpu())


def test_the_module_shards_its_experts(two_ranks):
    problem = make_problem()
    expected, router_gradient = layer_step(problem.x.detach(), problem.dy, layer_weights())
    assert_equal(joined(two_ranks, "layer"), expected)
    summed = sum(found["layer router"].double() for found in two_ranks)
    assert error(summed, router_gradient) <= 2**-7 * router_gradient.double().norm().item()


def test_parameters_can_be_sharded_by_fsdp(two_ranks):
    problem = make_problem()
    expected, router_gradient = layer_step(problem.x.detach(), problem.dy, layer_weights())
    expected = {"gate_up": expected["dgate_up"], "down": expected["ddown"], "router.weight": router_gradient}
    for name, gradient in two_ranks[0]["fsdp"].items():
        assert torch.equal(gradient, two_ranks[1]["fsdp"][name])
        # FSDP takes the mean of the ranks' gradients, in bf16: two roundings.
        limit = 2**-7 * expected[name].double().norm().item()
        assert error(NUM_RANKS * gradient.double(), expected[name]) <= limit, name


def test_no_context_is_left(two_ranks):
    assert [found["kept calls"] for found in two_ranks] == [0, 0]
