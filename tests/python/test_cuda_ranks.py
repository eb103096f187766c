"""What only CUDA has to show on two ranks, a device each: errors, graphs, NCCL's collectives beside the layer."""

import time

import megamoe
import pytest
import torch
import torch.distributed as dist
from captured_step import CapturedStep
from conftest import require_devices
from ranks import NUM_RANKS, SPLITS, join, message_of, part_of, run_ranks
from reference import INPUTS, assert_equal, inputs_of, make_problem, results

pytestmark = pytest.mark.two_devices


def two_rank_errors(rank):
    megamoe.init(entry_deadline_s=20, inner_deadline_s=20)
    inputs = inputs_of(part_of(make_problem(), SPLITS["even"], rank))
    found = {"y": megamoe.moe(**inputs)}

    def call(**changes):
        """What the call raises, and what check() raises after it."""
        arguments = {**inputs, **(changes if rank == 1 else {})}
        return message_of(lambda: megamoe.moe(**arguments)), message_of(megamoe.check)

    found["id"] = call(expert_ids=torch.full_like(inputs["expert_ids"], 8))
    found["dtype"] = call(x=inputs["x"].float())
    found["shape"] = call(weights=inputs["weights"][:, :1])
    more = {name: inputs[name].repeat(5, 1) for name in INPUTS[:3]}
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
    require_devices(NUM_RANKS)
    ranks = run_ranks(two_rank_errors, NUM_RANKS, tmp_path, device="cuda")
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


#: Seed, and tokens of rank 0 and of all.
CAPTURED = {"uneven": (1, SPLITS["uneven"]), "none on rank 1": (2, SPLITS["none on rank 1"])}


def captured_steps(rank):
    """Graphs of two sizes, replayed in mixed order with other values than they were captured with, between other calls.
    Returns [name, what the replay left, what the call after it gives]."""
    problems, graphs = {}, {}
    for name, (seed, split) in CAPTURED.items():
        problems[name] = part_of(make_problem(seed=seed, T=split[1]), split, rank)
        graphs[name] = CapturedStep(part_of(make_problem(seed=7, T=split[1]), split, rank))
    found = []
    for name in ("uneven", "none on rank 1", "none on rank 1", "uneven", "uneven"):
        graphs[name].take(problems[name])
        found.append((name, graphs[name].replay(), results(megamoe.moe, problems[name])))
    megamoe.check()
    return found


def test_captured_steps_of_two_ranks_replay(tmp_path):
    require_devices(NUM_RANKS)
    ranks = run_ranks(captured_steps, NUM_RANKS, tmp_path, device="cuda")
    with torch.device("cuda"):
        expected = {
            name: results(megamoe.moe, make_problem(seed=seed, T=split[1])) for name, (seed, split) in CAPTURED.items()
        }
    for (name, *of_rank_0), (_, *of_rank_1) in zip(*ranks):
        for parts in zip(of_rank_0, of_rank_1):
            assert_equal(join(parts), expected[name])


def steps_beside_collectives(rank):
    """How many of 40 steps gave other bits than one alone, while NCCL gathers 64 MiB on a stream of its own; ranks
    enqueue step and collective in opposite orders."""
    inputs = inputs_of(part_of(make_problem(), SPLITS["even"], rank))
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
    require_devices(1)
    assert run_ranks(steps_beside_collectives, NUM_RANKS, tmp_path, device="cuda") == [0, 0]


def one_rank_raises(rank):
    inputs = inputs_of(part_of(make_problem(), SPLITS["even"], rank))
    megamoe.moe(**inputs)
    megamoe.check()
    if rank == 1:
        raise KeyError("of the user's program")
    start = time.monotonic()
    # Over hosts the call raises, on one host the check.
    return message_of(lambda: (megamoe.moe(**inputs), megamoe.check())), time.monotonic() - start


def test_a_rank_that_raises_fails_its_peers_soon(tmp_path):
    require_devices(1)
    (message, seconds), _ = run_ranks(one_rank_raises, NUM_RANKS, tmp_path, failing=[1], device="cuda")
    assert "rank 1" in message and seconds < 60, (message, seconds)
