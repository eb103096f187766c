"""Models whose experts are spread over ranks: what is stored and loaded, and who else may reduce their parameters."""

import copy

import megamoe
import megamoe.huggingface
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from ranks import run_ranks
from reference import error, expert_dim
from test_huggingface import make_batch, make_model, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2


def device_type():
    return torch.get_default_device().type


def make_layer(seed=0, group=None):
    torch.manual_seed(seed)
    return megamoe.MoELayer(8, 64, expert_dim(), 2, group=group, bias_update_rate=0.01)


def make_group_of_this_rank(rank):
    return [dist.new_group([peer]) for peer in range(dist.get_world_size())][rank]


def message_of(function):
    try:
        function()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "no error"


def on_cpu(state):
    return {name: value.detach().cpu() for name, value in state.items()}


def differing(state, expected):
    """Names whose tensors aren't there, or aren't equal to the bit."""
    return sorted(
        name
        for name in {*state, *expected}
        if name not in state or name not in expected or not torch.equal(state[name], expected[name])
    )


def clear(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


# ---- States ----------------------------------------------------------------------------------------------


def store(rank, folder):
    whole = on_cpu(make_model("qwen3_moe").state_dict())
    model = megamoe.parallelize_experts(make_model("qwen3_moe"), dist.group.WORLD)
    found = {}

    found["refused"] = message_of(lambda: model.save_pretrained(f"{folder}/refused"))
    found["refused too"] = message_of(lambda: model.save_pretrained(f"{folder}/refused", state_dict=model.state_dict()))
    copied = copy.deepcopy(model)
    found["refused by a copy"] = message_of(lambda: copied.save_pretrained(f"{folder}/refused"))

    state = megamoe.full_state_dict(model)
    found["full"] = differing(state, whole if rank == 0 else {})
    if rank == 0:
        model.save_pretrained(f"{folder}/whole", state_dict=state)
        torch.save(state, f"{folder}/whole.pt")
    dist.barrier()

    clear(model)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    megamoe.load_full_state_dict(model, torch.load(f"{folder}/whole.pt", mmap=True))
    found["loaded"] = differing(megamoe.full_state_dict(model), whole if rank == 0 else {})
    found["in place"] = before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    found["part"] = message_of(lambda: megamoe.load_full_state_dict(model, model.state_dict()))
    missing = {name: value for name, value in whole.items() if "lm_head" not in name}
    found["missing"] = megamoe.load_full_state_dict(model, missing, strict=False).missing_keys

    dcp.save(megamoe.sharded_state_dict(model), checkpoint_id=f"{folder}/dcp")
    clear(model)
    dcp.load(megamoe.sharded_state_dict(model), checkpoint_id=f"{folder}/dcp")
    found["dcp"] = differing(megamoe.full_state_dict(model), whole if rank == 0 else {})

    # A layer: a selection bias beside the experts, and experts drawn apart.
    layer = make_layer(seed=rank)
    experts = [torch.empty_like(layer.down) for _ in range(NUM_RANKS)]
    dist.all_gather(experts, layer.down.detach())
    state = megamoe.full_state_dict(layer)
    found["layer"] = rank != 0 or torch.equal(state["down"], torch.cat(experts).cpu())
    found["names"] = sorted(state)
    dcp.save(megamoe.sharded_state_dict(layer), checkpoint_id=f"{folder}/dcp_layer")
    clear(layer)
    dcp.load(megamoe.sharded_state_dict(layer), checkpoint_id=f"{folder}/dcp_layer")
    found["dcp layer"] = torch.equal(layer.down, experts[rank])

    # The same experts as DTensors, and a layer of this rank alone whose experts FSDP shards.
    mesh = init_device_mesh(device_type(), (NUM_RANKS,))
    whole = make_layer(group=make_group_of_this_rank(rank))
    state = on_cpu(whole.state_dict())
    x = torch.randn(10, 64).bfloat16()
    megamoe.load_full_state_dict(layer, state)
    y = layer(x)
    for name, parameter in megamoe.expert_parameters(whole).items():
        setattr(layer, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    fully_shard(whole, mesh=mesh)
    for name, other in {"DTensors": layer, "FSDP": whole}.items():
        clear(other)
        megamoe.load_full_state_dict(other, state)
        dcp.save(megamoe.sharded_state_dict(other), checkpoint_id=f"{folder}/dcp_{name}")
        clear(other)
        dcp.load(megamoe.sharded_state_dict(other), checkpoint_id=f"{folder}/dcp_{name}")
        found[name] = differing(megamoe.full_state_dict(other), state if rank == 0 else {})
        found[f"y of {name}"] = torch.equal(other(x), y)
    return found


def test_whole_states_are_stored_and_loaded(tmp_path, device_of_ranks):
    found = run_ranks(store, NUM_RANKS, tmp_path, str(tmp_path), device=device_of_ranks)
    for rank, of_rank in enumerate(found):
        for name in ("refused", "refused too", "refused by a copy"):
            held = 4 if name == "refused too" else "none"
            assert f"the state holds {held} of the 8 experts of model.layers.0.mlp.experts" in of_rank[name], name
        assert of_rank["full"] == of_rank["loaded"] == of_rank["dcp"] == []
        assert of_rank["DTensors"] == of_rank["FSDP"] == [] and of_rank["y of DTensors"] and of_rank["y of FSDP"]
        assert of_rank["in place"] and of_rank["layer"] and of_rank["dcp layer"]
        assert "gate_up_proj of the state has 4 experts, the whole model has 8" in of_rank["part"]
        assert of_rank["missing"] == ["lm_head.weight"]
        assert of_rank["names"] == (["down", "gate_up", "router.selection_bias", "router.weight"] if rank == 0 else [])
    assert not (tmp_path / "refused").exists()

    # One rank reads both forms.
    whole = make_model("qwen3_moe")
    tokens = make_batch()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    assert differing(on_cpu(loaded.state_dict()), on_cpu(whole.state_dict())) == []
    clear(loaded)
    alone = megamoe.parallelize_experts(loaded.to(tokens.device))
    dcp.load(megamoe.sharded_state_dict(alone), checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert differing(on_cpu(alone.state_dict()), on_cpu(whole.state_dict())) == []
    alone.save_pretrained(tmp_path / "alone")  # it has all experts


def store_dtensors(rank):
    """Two expert-parallel groups of two ranks, and FSDP over what the groups have twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    whole = on_cpu(make_layer(group=make_group_of_this_rank(rank)).state_dict())
    layer = make_layer(group=mesh["ep"].get_group())
    megamoe.load_full_state_dict(layer, whole)
    x = torch.randn(10, 64, generator=torch.Generator().manual_seed(rank)).bfloat16()
    y = layer(x)
    fully_shard(layer, mesh=mesh["dp"])
    found = {"y": torch.equal(layer(x), y)}
    state = megamoe.full_state_dict(layer)
    found["full"] = differing(state, whole if rank == 0 else {})
    clear(layer)
    megamoe.load_full_state_dict(layer, whole)
    found["loaded"] = torch.equal(layer(x), y)
    found["refused"] = message_of(lambda: megamoe.sharded_state_dict(layer))
    found["DTensors"] = all(isinstance(value, DTensor) for value in megamoe.expert_parameters(layer).values())
    return found


def test_states_of_experts_that_are_sharded_by_fsdp_too(tmp_path):
    for found in run_ranks(store_dtensors, 4, tmp_path):
        assert found["y"] and found["loaded"] and found["DTensors"] and found["full"] == []
        assert "sharded over the group and by FSDP" in found["refused"]


# ---- Other reducers --------------------------------------------------------------------------------------


def refuse(rank):
    mesh = init_device_mesh(device_type(), (NUM_RANKS,))
    x, tokens = torch.randn(10, 64).bfloat16(), make_batch()
    messages = {}

    layer = make_layer()
    layer(x)
    fully_shard(layer, mesh=mesh)
    messages["fsdp"] = message_of(lambda: layer(x))
    messages["fsdp again"] = message_of(lambda: layer(x))
    outer = torch.nn.Sequential(make_layer())
    fully_shard(outer, mesh=mesh)
    messages["fsdp of a parent"] = message_of(lambda: outer(x))

    model = megamoe.parallelize_experts(make_model("mixtral"))
    messages["twice"] = message_of(lambda: megamoe.parallelize_experts(model))
    fully_shard(model, mesh=mesh)
    messages["fsdp of a model"] = message_of(lambda: model(input_ids=tokens))
    sharded = make_model("mixtral")
    fully_shard(sharded, mesh=mesh)
    messages["after fsdp"] = message_of(lambda: megamoe.parallelize_experts(sharded))

    model = DistributedDataParallel(megamoe.parallelize_experts(make_model("mixtral")))
    messages["ddp"] = message_of(lambda: model(input_ids=tokens))
    layer = DistributedDataParallel(torch.nn.Sequential(make_layer()))
    messages["ddp of a layer"] = message_of(lambda: layer(x))

    layer = make_layer()
    layer.down = torch.nn.Parameter(layer.down[:2].detach())
    messages["number"] = message_of(lambda: layer(x))
    return messages


def test_what_would_mix_experts_up_is_refused_by_name(tmp_path, device_of_ranks):
    glued = "fully_shard spreads {} over ranks of the layer's own group"
    replaced = "DistributedDataParallel has overwritten the experts of {} with rank 0's"
    for messages in run_ranks(refuse, NUM_RANKS, tmp_path, device=device_of_ranks):
        for name, message in {
            "fsdp": glued.format("gate_up of FSDPMoELayer"),
            "fsdp again": glued.format("gate_up of FSDPMoELayer"),
            "fsdp of a parent": glued.format("gate_up of MoELayer"),
            "fsdp of a model": glued.format("gate_up_proj of MixtralExperts"),
            "twice": "MixtralExperts has been through parallelize_experts before",
            "after fsdp": "gate_up_proj of MixtralExperts is a DTensor: call parallelize_experts before fully_shard",
            "ddp": replaced.format("model.layers.0.mlp.experts"),
            "ddp of a layer": replaced.format("0"),
            "number": "down of MoELayer has 2 experts on this rank, must have 4: 8 over the ranks of its group",
        }.items():
            assert message in messages[name], name


def reduce_otherwise(rank):
    """Gradients of the mean over the ranks' losses, by the recipes of docs/pytorch.md; whole, on rank 0."""
    tokens = make_batch()[2 * rank : 2 * rank + 2]
    found = {}

    def take_step(name, model, module):
        model(input_ids=tokens, labels=tokens).loss.backward()
        experts = megamoe.expert_parameters(module)
        for parameter in experts.values():
            parameter.grad /= NUM_RANKS
        gradients = {}
        for key, parameter in module.named_parameters():
            gradient = parameter.grad.clone()
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            elif key in experts:
                parts = [torch.empty_like(gradient) for _ in range(NUM_RANKS)]
                dist.all_gather(parts, gradient)
                gradient = torch.cat(parts)
            gradients[key] = gradient
        found[name] = gradients

    sharded = megamoe.parallelize_experts(make_model("qwen3_moe"))
    experts = set(megamoe.expert_parameters(sharded).values())
    fully_shard(sharded, mesh=init_device_mesh(device_type(), (NUM_RANKS,)), ignored_params=experts)
    take_step("fsdp", sharded, sharded)

    model = megamoe.parallelize_experts(make_model("qwen3_moe"))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(megamoe.expert_parameters(model)))
    take_step("ddp", DistributedDataParallel(model), model)

    for name, module in {"fsdp": sharded, "ddp": model}.items():
        found[f"norm of {name}"] = clipped_norm(module, max_norm=0.1)
        found[f"clipped norm of {name}"] = clipped_norm(module, max_norm=1.0)
    return found


def clipped_norm(model, max_norm, group=None):
    experts = megamoe.expert_parameters(model)
    others = [parameter for name, parameter in model.named_parameters() if name not in experts]
    mine = torch.nn.utils.get_total_norm([parameter.grad for parameter in experts.values()]).float() ** 2
    dist.all_reduce(mine, group=group)
    rest = torch.nn.utils.get_total_norm([parameter.grad for parameter in others])
    norm = (mine + (rest.full_tensor() if isinstance(rest, DTensor) else rest).float() ** 2).sqrt()
    for parameters in (experts.values(), others):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def test_recipes_for_other_reducers_give_the_gradients_of_one_rank(tmp_path, device_of_ranks):
    ranks = run_ranks(reduce_otherwise, NUM_RANKS, tmp_path, device=device_of_ranks)
    model = make_model("qwen3_moe")
    model.set_experts_implementation("megamoe")
    expected = step(model, make_batch())
    del expected["loss"]
    for name in ("fsdp", "ddp"):
        assert ranks[0][name].keys() == expected.keys()
        for key, gradient in expected.items():
            assert error(ranks[0][name][key], gradient) <= 2**-6 * gradient.double().norm().item(), (name, key)
    norm = torch.cat([gradient.double().flatten() for gradient in expected.values()]).norm().item()
    for found in ranks:
        for name in ("fsdp", "ddp"):
            assert found[f"norm of {name}"].item() == pytest.approx(norm, rel=2**-6)
            assert found[f"clipped norm of {name}"].item() == pytest.approx(0.1, rel=2**-6)


# ---- Marks -----------------------------------------------------------------------------------------------


def loaded_by_assignment(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def made_without_memory(model):
    state = model.state_dict()
    rotary = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    model = model.to("meta").to_empty(device=device_type())
    for name, buffer in rotary.items():
        model.get_buffer(name).copy_(buffer)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("make", [copy.deepcopy, loaded_by_assignment, made_without_memory])
def test_experts_of_a_model_are_known_after_their_parameters_were_made_anew(make, device):
    model = make(megamoe.parallelize_experts(make_model("deepseek_v3")))
    names = {f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    assert megamoe.expert_parameters(model).keys() == names
    tokens = make_batch()
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert {name for name, parameter in model.named_parameters() if megamoe.is_expert_parameter(parameter)} == names


def test_models_without_spread_experts_have_no_expert_parameters():
    assert megamoe.expert_parameters(make_model("mixtral")) == {}
    assert list(megamoe.expert_parameters(torch.nn.Sequential(make_layer()))) == ["0.gate_up", "0.down"]
