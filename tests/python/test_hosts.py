"""Two ranks on hosts of their own, against one rank on the same tokens, on each backend."""

import os

import megamoe
import pytest
import torch.distributed as dist
from ranks import NUM_RANKS, SPLITS, joined, message_of, part_of, run_ranks
from reference import assert_equal, make_problem, results


def on_hosts_of_their_own(rank):
    megamoe.init(host=f"host {rank}")
    found = {
        name: results(megamoe.moe, part_of(make_problem(T=split[1]), split, rank)) for name, split in SPLITS.items()
    }
    problem = part_of(make_problem(), SPLITS["uneven"], rank)
    found["recompute"] = results(lambda *tensors: megamoe.moe(*tensors, recompute=True), problem)
    found["no overlap"] = results(lambda *tensors: megamoe.moe(*tensors, overlap_comm=False), problem)
    both = dist.new_group([0, 1])
    megamoe.init(both, host=f"host {rank}", network_groups=3, network_ctas=4)
    found["second group"] = results(lambda *tensors: megamoe.moe(*tensors, group=both), problem)
    inputs = [problem.x, problem.expert_ids, problem.weights, problem.gate_up, problem.down]
    found["message"] = message_of(lambda: megamoe.moe(problem.x.float() if rank == 1 else problem.x, *inputs[1:]))
    found["after an error"] = results(megamoe.moe, problem)
    return found


def refused_meetings(rank):
    """What megamoe.init raises where rank 1 gives what no rank can use."""

    def refusal(**given):
        with pytest.raises((TypeError, ValueError)) as raised:
            megamoe.init(**({"host": "host 0", "entry_deadline_s": 10.0} | (given if rank == 1 else {})))
        return f"{raised.type.__name__}: {raised.value}"

    return [
        refusal(host=5),
        refusal(host="x" * 201),
        refusal(host="host 1", rendezvous=29501),
        refusal(entry_deadline_s=-1.0),
        refusal(inner_deadline_s="1"),
        refusal(network_groups=9),
        refusal(network_ctas=1.0),
        refusal(host="host 1", network_groups=3),
        refusal(host="host 1", network_ctas=4),
    ]


def meeting_nowhere(rank, names_hosts):
    """What megamoe.init raises where ranks of several hosts cannot meet; those of one need not."""
    if names_hosts:
        os.environ["NCCL_HOSTID"] = f"host {rank}"
    return message_of(lambda: megamoe.init(rendezvous="nowhere.invalid:1"))


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory, device_of_ranks):
    folder = tmp_path_factory.mktemp("hosts")
    return run_ranks(on_hosts_of_their_own, NUM_RANKS, folder, device=device_of_ranks, own_hosts=True)


@pytest.mark.parametrize("name", [*SPLITS, "recompute", "no overlap", "second group", "after an error"])
def test_two_hosts_give_the_bits_of_one_rank(two_hosts, name):
    num_tokens = SPLITS.get(name, SPLITS["uneven"])[1]
    assert_equal(joined(two_hosts, name), results(megamoe.moe, make_problem(T=num_tokens)))


def test_hosts_learn_of_each_others_errors(two_hosts):
    messages = [found["message"] for found in two_hosts]
    assert messages[1].startswith("x must be bf16") and messages[0] == f"rank 1: {messages[1]}", messages


def test_what_a_rank_gives_is_refused_on_all(tmp_path):
    for refusals in run_ranks(refused_meetings, NUM_RANKS, tmp_path):
        assert refusals == [
            "TypeError: rank 1: host must be a str, is int",
            "ValueError: rank 1: host has 201 bytes, at most 200 are taken",
            "TypeError: rank 1: rendezvous must be a str, is int",
            "ValueError: rank 1: entry_deadline_s is -1.0 s, must be positive and finite",
            "TypeError: rank 1: inner_deadline_s must be a number, is str",
            "ValueError: rank 1: network_groups is 9, must be from 0 to 8",
            "TypeError: rank 1: network_ctas must be an int, is float",
            "ValueError: ranks differ in network_groups: rank 0 has 0, rank 1 has 3",
            "ValueError: ranks differ in network_ctas: rank 0 has 0, rank 1 has 4",
        ]


@pytest.mark.parametrize("names_hosts", [False, True])
def test_hosts_are_those_that_nccl_is_told(tmp_path, names_hosts):
    for message in run_ranks(meeting_nowhere, NUM_RANKS, tmp_path, names_hosts):
        assert "nowhere.invalid" in message if names_hosts else message == "no error"
