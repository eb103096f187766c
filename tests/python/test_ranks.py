"""Two ranks, as processes of this host, against one rank on the same tokens, on each backend.

With the CPU backend their group is gloo's; with CUDA they have a device each and the group is NCCL's.
"""

import copy
import dataclasses
import gc
import io
import os
import time

import megamoe
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference import assert_equal, error, expert_dim, make_problem, results, used_mib
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

NUM_RANKS = 2
#: Tokens of rank 0, of all.
SPLITS = {"even": (20, 40), "uneven": (5, 40), "none on rank 0": (0, 40), "none on rank 1": (40, 40), "none": (0, 0)}


def part_of(problem, split, rank):
    """The problem as this rank sees it: its tokens, its experts."""
    first, _ = split
    tokens = slice(0, first) if rank == 0 else slice(first, None)
    num_local = problem.down.shape[0] // NUM_RANKS
    experts = slice(rank * num_local, (rank + 1) * num_local)
    parts = {name: getattr(problem, name)[tokens] for name in ("x", "expert_ids", "weights", "dy")}
    parts |= {name: getattr(problem, name)[experts] for name in ("gate_up", "down")}
    return dataclasses.replace(problem, **{name: part.detach().clone() for name, part in parts.items()})


def join(parts):
    """Of all ranks: tokens one after the other, experts one after the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# ---- What must equal one rank, bit for bit ---------------------------------------------------------------


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


def joined(two_ranks, name):
    return join([found[name] for found in two_ranks])


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


# ---- Hosts -----------------------------------------------------------------------------------------------


def on_hosts_of_their_own(rank):
    """Hosts that see each other by the loopback network alone."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "NCCL_HOSTID": f"host {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    megamoe.init(host=f"host {rank}")
    found = {
        name: results(megamoe.moe, part_of(make_problem(T=split[1]), split, rank)) for name, split in SPLITS.items()
    }
    problem = part_of(make_problem(), SPLITS["uneven"], rank)
    found["recompute"] = results(lambda *tensors: megamoe.moe(*tensors, recompute=True), problem)
    found["no overlap"] = results(lambda *tensors: megamoe.moe(*tensors, overlap_comm=False), problem)
    both = dist.new_group([0, 1])
    megamoe.init(both, host=f"host {rank}")
    found["second group"] = results(lambda *tensors: megamoe.moe(*tensors, group=both), problem)
    inputs = [problem.x, problem.expert_ids, problem.weights, problem.gate_up, problem.down]
    found["message"] = message_of(lambda: megamoe.moe(problem.x.float() if rank == 1 else problem.x, *inputs[1:]))
    found["after an error"] = results(megamoe.moe, problem)
    return found


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory, device_of_ranks):
    return run_ranks(on_hosts_of_their_own, NUM_RANKS, tmp_path_factory.mktemp("hosts"), device=device_of_ranks)


@pytest.mark.parametrize("name", [*SPLITS, "recompute", "no overlap", "second group", "after an error"])
def test_two_hosts_give_the_bits_of_one_rank(two_hosts, name):
    num_tokens = SPLITS.get(name, SPLITS["uneven"])[1]
    assert_equal(joined(two_hosts, name), results(megamoe.moe, make_problem(T=num_tokens)))


def test_hosts_learn_of_each_others_errors(two_hosts):
    messages = [found["message"] for found in two_hosts]
    assert messages[1].startswith("x must be bf16") and messages[0] == f"rank 1: {messages[1]}", messages


# ---- Initial parameters, copies and groups of the module -------------------------------------------------


def new_layer(seed, **options):
    torch.manual_seed(seed)
    return megamoe.MoELayer(8, 64, 48, 2, bias_update_rate=0.1, **options)


def parameters_of(layer):
    return {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}


def parameters_of_one_rank(seed):
    with torch.device("cpu"):
        return parameters_of(new_layer(seed))


def modules(rank):
    found = {"one seed": parameters_of(new_layer(5)), "a seed a rank": parameters_of(new_layer(6 + rank))}

    with torch.device("meta"):
        late = new_layer(0)
    late.to_empty(device="cpu")
    torch.manual_seed(5 + 10 * rank)
    late.reset_parameters()
    found["late"] = parameters_of(late)
    late.router.reset_parameters()
    found["router alone"] = late.router.weight.detach().clone()

    alone = [dist.new_group([peer]) for peer in range(NUM_RANKS)]
    sharded = new_layer(0, group=alone[rank], device="meta")
    fully_shard(sharded, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    sharded.to_empty(device="cpu")
    torch.manual_seed(5)
    sharded.reset_parameters()
    found["fsdp"] = {name: parameter.full_tensor() for name, parameter in sharded.named_parameters()}

    for call in (
        lambda: new_layer(5, group=alone[1 - rank]),
        lambda: megamoe.moe(*[torch.zeros(1, 1)] * 5, group=alone[1 - rank]),
        lambda: megamoe.moe_overlapping_backward_op(*[torch.zeros(1, 1)] * 3, group=alone[1 - rank]),
    ):
        with pytest.raises(ValueError, match="group does not have this process as a rank"):
            call()

    layer = new_layer(5, group=dist.new_group([0, 1]))
    x = torch.randn(5 + rank, 64).bfloat16()
    y = layer(x)
    for copied in (copy.copy(layer), copy.deepcopy(layer), copy.deepcopy(torch.nn.Sequential(layer))[0]):
        assert copied.group is layer.group and copied.router.group is layer.group
        assert torch.equal(copied(x), y)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for call in (lambda: loaded(x), loaded.reset_parameters):
        with pytest.raises(ValueError, match="comes from a file, which does not hold its group"):
            call()
    loaded.group = loaded.router.group = layer.group
    assert torch.equal(loaded(x), y)
    return found


@pytest.fixture(scope="module")
def modules_of_ranks(tmp_path_factory):
    return run_ranks(modules, NUM_RANKS, tmp_path_factory.mktemp("modules"))


@pytest.mark.parametrize("name, seed", [("one seed", 5), ("a seed a rank", 6), ("late", 5)])
def test_ranks_start_from_the_layer_of_one_rank(modules_of_ranks, name, seed):
    expected = parameters_of_one_rank(seed)
    parts = [found[name] for found in modules_of_ranks]
    for parameter in ("gate_up", "down"):
        assert torch.equal(torch.cat([part[parameter] for part in parts]), expected[parameter])
    for part in parts:
        assert torch.equal(part["router.weight"], expected["router.weight"])


def test_the_router_alone_is_drawn_for_all_ranks(modules_of_ranks):
    first, second = (found["router alone"] for found in modules_of_ranks)
    assert torch.equal(first, second) and not torch.equal(first, modules_of_ranks[0]["late"]["router.weight"])


def test_what_fsdp_shards_is_drawn_like_the_whole(modules_of_ranks):
    for found in modules_of_ranks:
        assert_equal(found["fsdp"], parameters_of_one_rank(5))


# ---- Errors ----------------------------------------------------------------------------------------------


def message_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return "no error"


def refusals(rank):
    problem = part_of(make_problem(), SPLITS["even"], rank)
    inputs = {name: getattr(problem, name) for name in ("x", "expert_ids", "weights", "gate_up", "down")}

    def call(**changes):
        return message_of(lambda: megamoe.moe(**{**inputs, **(changes if rank == 1 else {})}))

    messages = {
        "dtype": call(x=problem.x.float()),
        "shape": call(weights=problem.weights[:, :1]),
        "id": call(expert_ids=torch.full_like(problem.expert_ids, 8)),
        "slots": call(expert_ids=problem.expert_ids[:, :2], weights=problem.weights[:, :2]),
        "activation": call(activation="gelu_erf"),
        "option": call(overlap_comm=False),
        "capacity": message_of(lambda: megamoe.moe(**inputs, row_capacity=1)),
    }
    y = megamoe.moe(problem.x.requires_grad_(), *list(inputs.values())[1:])
    dy = problem.dy if rank == 0 else problem.dy[:-1]
    messages["dy"] = message_of(
        lambda: torch.ops.megamoe.backward(
            dy,
            torch.zeros(4, dtype=torch.int64),
            *[value.detach() for value in inputs.values()],
            "0",
            "swiglu",
            7.0,
            True,
            True,
            0,
            0,
            0,
        )
    )
    y.backward(problem.dy)  # the layer is usable all the same
    return messages


def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    rank_0, rank_1 = run_ranks(refusals, NUM_RANKS, tmp_path)
    for name, message in {
        "dtype": "x must be bf16, is fp32",
        "shape": "weights must have shape of expert_ids",
        "id": "expert_ids[0, 0] is 8, must be -1 or from 0 to 7",
        "dy": "dy must have shape of x",
    }.items():
        assert message in rank_1[name], name
        assert "rank 1: " + message in rank_0[name], name
    for name, message in {
        "slots": "ranks differ in shape.top_k: rank 0 has 3, rank 1 has 2",
        "activation": "ranks differ in activation.kind",
        "option": "ranks differ in overlap",
        "capacity": "its capacity is 1",
    }.items():
        assert message in rank_0[name] and message in rank_1[name], name


def mistakes_before_the_operator(rank):
    """What rank 1 does wrong, where rank 0 makes the call."""
    megamoe.init(entry_deadline_s=60)
    layer = megamoe.MoELayer(8, 64, 48, 2)
    x, weights = torch.randn(6, 64).bfloat16(), torch.randn(8, 64, 48).bfloat16()
    ids, slot_weights = torch.zeros(6, 2, dtype=torch.int32), torch.ones(6, 2)
    experts = (layer.gate_up.detach(), layer.down.detach())
    not_finite = x.clone()
    not_finite[1] = float("nan")

    def found(call, mistaken, right):
        start = time.monotonic()
        try:
            call(mistaken if rank == 1 else right)
            return "no error", 0.0
        except (RuntimeError, ValueError, AttributeError) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start

    messages = {
        "not finite": found(layer, not_finite, x),
        "hidden size": found(layer, x[:, :32], x),
        "no memory": found(layer, x.to("meta"), x),
        "no tensor": found(lambda given: megamoe.moe(x, ids, given, *experts), None, slot_weights),
        "short form": found(lambda given: megamoe.moe_overlapping_backward_op(given, weights, ids), x[:, :32], x),
    }
    y = layer(x)  # which is usable all the same
    routing = layer.router(x)
    assert torch.equal(y, megamoe.moe(x, routing.expert_ids, routing.weights, *experts))
    return messages


def test_an_error_before_the_operator_is_raised_on_all_at_once(tmp_path):
    rank_0, rank_1 = run_ranks(mistakes_before_the_operator, NUM_RANKS, tmp_path)
    for name, message in {
        "not finite": "RuntimeError: logits of token 1, expert 0 is nan; logits must be finite",
        "hidden size": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (6x32 and 64x8)",
        "no memory": "RuntimeError: x is on device meta",
        "no tensor": "AttributeError: 'NoneType' object has no attribute 'is_floating_point'",
        "short form": "ValueError: weights must have shape [E, H, D] with H = 32 of hidden_states",
    }.items():
        (of_peer, seconds), (own, _) = rank_0[name], rank_1[name]
        assert own.startswith(message), (name, own)
        assert of_peer.startswith("RuntimeError: rank 1: ") and message in of_peer and seconds < 30, (name, of_peer)


def one_rank_raises(rank):
    megamoe.init(entry_deadline_s=60)
    problem = part_of(make_problem(), SPLITS["even"], rank)
    inputs = [getattr(problem, name) for name in ("x", "expert_ids", "weights", "gate_up", "down")]
    megamoe.moe(*inputs)
    if rank == 1:
        raise KeyError("of the user's program")
    start = time.monotonic()
    message = message_of(lambda: megamoe.moe(*inputs))
    return message, time.monotonic() - start


def test_a_rank_that_raises_fails_its_peers_at_once(tmp_path):
    (message, seconds), traceback = run_ranks(one_rank_raises, NUM_RANKS, tmp_path, failing=[1])
    assert "of the user's program" in traceback
    assert "rank 1" in message and seconds < 30, (message, seconds)


def one_rank_is_late(rank):
    megamoe.init(entry_deadline_s=1)
    problem = part_of(make_problem(), SPLITS["even"], rank)
    inputs = [getattr(problem, name) for name in ("x", "expert_ids", "weights", "gate_up", "down")]
    megamoe.moe(*inputs)
    message = message_of(lambda: megamoe.moe(*inputs)) if rank == 0 else ""
    dist.barrier()
    megamoe.init()  # a new communicator
    return message, megamoe.moe(*inputs)


def test_a_missed_deadline_names_the_rank_and_a_new_communicator_works(tmp_path):
    values = run_ranks(one_rank_is_late, NUM_RANKS, tmp_path)
    message = values[0][0]
    assert "1" in message and "megamoe's forward operator" in message, message
    y = torch.cat([y for _, y in values])
    with torch.device("cpu"):
        assert torch.equal(y, results(megamoe.moe, make_problem())["y"])
