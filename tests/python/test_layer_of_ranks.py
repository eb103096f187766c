"""The module on two ranks: initial parameters, copies and groups."""

import copy
import io

import megamoe
import pytest
import torch
import torch.distributed as dist
from ranks import NUM_RANKS, run_ranks
from reference import assert_equal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


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
