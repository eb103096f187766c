"""What one of two ranks does wrong, and what its peer learns of it."""

import time

import megamoe
import torch
import torch.distributed as dist
from ranks import NUM_RANKS, SPLITS, message_of, part_of, run_ranks
from reference import make_problem, results
from torch.utils.checkpoint import checkpoint


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
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start

    def with_weights(given):
        return megamoe.moe(x, ids, given, *experts)

    def with_option(option):
        return megamoe.moe(x, ids, slot_weights, *experts, **option)

    messages = {
        "not finite": found(layer, not_finite, x),
        "hidden size": found(layer, x[:, :32], x),
        "no memory": found(layer, x.to("meta"), x),
        "no tensor": found(with_weights, None, slot_weights),
        "sparse": found(with_weights, slot_weights.to_sparse(), slot_weights),
        "no text": found(with_option, {"activation": None}, {}),
        "no number": found(with_option, {"activation_limit": "7"}, {}),
        "no integer": found(with_option, {"max_tokens": 6.5}, {}),
        "too large an integer": found(with_option, {"row_capacity": 2**63}, {}),
        "no truth value": found(with_option, {"overlap_comm": "off"}, {}),
        "no pair": found(with_option, {"main_grads": experts[:1]}, {}),
        "short form": found(lambda given: megamoe.moe_overlapping_backward_op(given, weights, ids), x[:, :32], x),
    }
    messages |= mistakes_before_the_backward_operator(found, x, ids, slot_weights, experts)
    y = layer(x)  # which is usable all the same
    routing = layer.router(x)
    assert torch.equal(y, megamoe.moe(x, routing.expert_ids, routing.weights, *experts))
    return messages


def mistakes_before_the_backward_operator(found, x, ids, slot_weights, experts):
    def change_x(factor):
        given = x.clone()
        y = megamoe.moe(given, ids, slot_weights.clone().requires_grad_(), *experts)
        if factor != 1:
            given *= factor
        y.sum().backward()

    def differentiate(create_graph):
        given = x.clone().requires_grad_()
        y = megamoe.moe(given, ids, slot_weights, *experts)
        torch.autograd.grad(y.sum(), [given], create_graph=create_graph)

    def checkpoint_it(dtypes):
        rest = iter(dtypes)
        given = x.clone().requires_grad_()
        y = checkpoint(lambda x: with_dtype(x, next(rest)), given, use_reentrant=False)
        y.sum().backward()

    def with_dtype(given, dtype):
        return megamoe.moe(given.to(dtype), ids, slot_weights, *experts)

    return {
        "recomputed": found(checkpoint_it, (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)),
        "changed before backward": found(change_x, 2, 1),
        "second derivatives": found(differentiate, True, False),
    }


def test_an_error_before_the_operator_is_raised_on_all_at_once(tmp_path):
    rank_0, rank_1 = run_ranks(mistakes_before_the_operator, NUM_RANKS, tmp_path)
    for name, message in {
        "not finite": "RuntimeError: logits of token 1, expert 0 is nan; logits must be finite",
        "hidden size": "RuntimeError: x has shape [6, 32]; its last dimension must be hidden_dim = 64",
        "no memory": "RuntimeError: x is on device meta",
        "no tensor": "TypeError: weights must be a torch.Tensor, is NoneType",
        "sparse": "TypeError: weights must be a dense tensor, has the layout torch.sparse_coo",
        "no text": "TypeError: activation must be a str, is NoneType",
        "no number": "TypeError: activation_limit must be a float, is str",
        "no integer": "TypeError: max_tokens must be an int, is float",
        "too large an integer": "ValueError: row_capacity is 9223372036854775808, must have 64 bits",
        "no truth value": "TypeError: overlap_comm must be a bool, is str",
        "no pair": "TypeError: main_grads must be a pair of tensors",
        "recomputed": "RuntimeError: x must be bf16, is fp32",
        "changed before backward": "RuntimeError: one of the variables needed for gradient computation",
        "second derivatives": "RuntimeError: megamoe has no second derivatives",
        "short form": "ValueError: weights must have shape [E, H, D] with H = 32 of hidden_states",
    }.items():
        (of_peer, seconds), (own, _) = rank_0[name], rank_1[name]
        assert own.startswith(message), (name, own)
        _, text = message.split(": ", 1)
        assert of_peer.startswith("RuntimeError: rank 1: ") and text in of_peer and seconds < 30, (name, of_peer)


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
